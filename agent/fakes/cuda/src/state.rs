//! The driver's state, what guards it, and its contexts.
//!
//! Invariants:
//! - one lock guards contexts, blocks, books and the address space: an address is struck off the
//!   books and given back before another thread can be given it;
//! - a process forked from this one starts uninitialised and with empty books;
//! - the stack of current contexts is each thread's own; a context's validity is judged by the
//!   shared table at every use, since another thread may destroy it;
//! - a context's end frees the blocks that were made in it; pools and mapped memory belong to the
//!   process and a device, and outlive it.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{c_int, c_uint},
    sync::{Mutex, MutexGuard, PoisonError},
};

use vramscope_fake_host::{
    card,
    ledger::{Accounts, Kind, Layer},
    per_process::{PerProcess, generation},
};

use crate::{Context, Stream, codes::*, ipc::Opened, memory::AddressSpace, pools::Pools, vmm::Vmm};

/// Every how many-th free fails, as a planted fault.
const FAIL_FREE_VARIABLE: &str = "VRAMSCOPE_FAKE_FAIL_FREE";

/// Handles are opaque to callers: primary contexts have fixed ones, others are given as needed, of
/// each sort from its own place on.
const FIRST_PRIMARY: Context = 0x10_0000;
const FIRST_CREATED: Context = 0x20_0000;
const FIRST_STREAM: Stream = 0x30_0000;
const FIRST_ARRAY: usize = 0x4000_0000;
pub const HANDLE_STEP: usize = 0x100;

static STATE: PerProcess<Mutex<State>> = PerProcess::new();

/// Everything of one process.
pub struct State {
    initialised: bool,
    /// How often each device's primary context is retained. A reset destroys it all the same.
    retained: [u32; card::DEVICES],
    /// Contexts that exist, with their device.
    contexts: HashMap<Context, u32>,
    next_context: Context,
    /// Streams that exist, with their device.
    streams: HashMap<Stream, u32>,
    stream_handles: Handles,
    pub accounts: Accounts,
    pub addresses: AddressSpace,
    pub array_handles: Handles,
    pub pools: Pools,
    pub vmm: Vmm,
    pub opened: HashMap<usize, Opened>,
    /// Frees tried so far, for the planted fault.
    free_calls: u64,
    fail_every: Option<u64>,
}

/// Handles of one sort. One that its owner gave back is the next to be given, as addresses of a heap
/// are: whoever keys by a handle alone mixes two lives up.
pub struct Handles {
    next: usize,
    returned: Vec<usize>,
}

impl Handles {
    pub fn from(first: usize) -> Self {
        Self {
            next: first,
            returned: Vec::new(),
        }
    }

    pub fn issue(&mut self) -> usize {
        self.returned.pop().unwrap_or_else(|| {
            let handle = self.next;
            self.next += HANDLE_STEP;
            handle
        })
    }

    pub fn give_back(&mut self, handle: usize) {
        self.returned.push(handle);
    }
}

/// A thread's stack of current contexts, and the process it was filled in: a forked child's thread
/// inherits the memory, but not the contexts.
#[derive(Default)]
struct Stack {
    generation: u64,
    contexts: Vec<Context>,
}

thread_local! {
    static STACK: RefCell<Stack> = RefCell::default();
}

/// This process's state, locked.
pub fn state() -> MutexGuard<'static, State> {
    let shared = STATE.get(|| {
        Mutex::new(State {
            initialised: false,
            retained: [0; card::DEVICES],
            contexts: HashMap::new(),
            next_context: FIRST_CREATED,
            streams: HashMap::new(),
            stream_handles: Handles::from(FIRST_STREAM),
            accounts: Accounts::new(Layer::Driver),
            addresses: AddressSpace::default(),
            array_handles: Handles::from(FIRST_ARRAY),
            pools: Pools::new(),
            vmm: Vmm::new(),
            opened: HashMap::new(),
            free_calls: 0,
            fail_every: std::env::var(FAIL_FREE_VARIABLE)
                .ok()
                .and_then(|value| value.parse().ok())
                .filter(|every| *every > 0),
        })
    });
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `action` on this thread's stack; on an empty one if the thread is ending.
fn with_stack<T>(action: impl Fn(&mut Vec<Context>) -> T) -> T {
    let found = STACK.try_with(|stack| {
        let Ok(mut stack) = stack.try_borrow_mut() else {
            return action(&mut Vec::new());
        };
        let generation = generation();
        if stack.generation != generation {
            stack.generation = generation;
            stack.contexts.clear();
        }
        action(&mut stack.contexts)
    });
    found.unwrap_or_else(|_| action(&mut Vec::new()))
}

impl State {
    pub fn require_initialised(&self) -> CuResult<()> {
        if self.initialised {
            Ok(())
        } else {
            Err(NOT_INITIALIZED)
        }
    }

    pub fn device(&self, device: c_int) -> CuResult<u32> {
        self.require_initialised()?;
        u32::try_from(device)
            .ok()
            .filter(|index| (*index as usize) < card::DEVICES)
            .ok_or(INVALID_DEVICE)
    }

    /// The current context and its device.
    pub fn current(&self) -> CuResult<(Context, u32)> {
        self.require_initialised()?;
        let top = with_stack(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?;
        let device = self.contexts.get(&top).ok_or(CONTEXT_IS_DESTROYED)?;
        Ok((top, *device))
    }

    /// The current device, where there is one.
    pub fn current_device(&self) -> Option<u32> {
        self.current().ok().map(|(_, device)| device)
    }

    /// The device of a stream. The built-in streams (null, legacy, per thread) are those of the
    /// current context.
    pub fn stream_device(&self, stream: Stream) -> CuResult<u32> {
        let (_, current) = self.current()?;
        match stream {
            0..=2 => Ok(current),
            _ => self.streams.get(&stream).copied().ok_or(INVALID_HANDLE),
        }
    }

    /// Bytes that this process can still take of a card.
    pub fn free_bytes(&self, device: u32) -> u64 {
        card::device_bytes().saturating_sub(self.accounts.used_bytes(device))
    }

    /// Counts a free that reached the driver with a context; the planted fault makes it fail.
    pub fn fail_free_if_planted(&mut self) -> CuResult<()> {
        self.free_calls += 1;
        match self.fail_every {
            Some(every) if self.free_calls.is_multiple_of(every) => Err(INVALID_VALUE),
            _ => Ok(()),
        }
    }

    fn require_context(&self, context: Context) -> CuResult<()> {
        self.require_initialised()?;
        if self.contexts.contains_key(&context) {
            Ok(())
        } else {
            Err(INVALID_CONTEXT)
        }
    }

    /// Ends a context: what was allocated in it is freed, as with the vendor's.
    fn end_context(&mut self, context: Context) {
        if self.contexts.remove(&context).is_none() {
            return;
        }
        for (address, block) in self.accounts.of_context(context) {
            self.accounts.freed(block.kind, address);
            self.give_back(address, block);
        }
        let opened: Vec<usize> = self
            .opened
            .iter()
            .filter(|(_, opened)| opened.context == context)
            .map(|(address, _)| *address)
            .collect();
        for address in opened {
            self.close_opened(address);
        }
    }
}

fn primary_handle(device: u32) -> Context {
    FIRST_PRIMARY + HANDLE_STEP * device as usize
}

pub fn init(flags: c_uint) -> CuResult<()> {
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = state();
    state.accounts.open();
    state.initialised = true;
    Ok(())
}

pub fn device_count() -> CuResult<c_int> {
    state().require_initialised()?;
    Ok(card::DEVICES as c_int)
}

pub fn device(ordinal: c_int) -> CuResult<u32> {
    state().device(ordinal)
}

pub fn device_uuid(device: c_int) -> CuResult<[u8; 16]> {
    Ok(card::uuid_bytes(state().device(device)? as usize))
}

/// The pretended card's properties. An attribute that is not listed is a feature it lacks: 0.
pub fn device_attribute(attribute: c_int, device: c_int) -> CuResult<c_int> {
    let device = state().device(device)?;
    if attribute <= 0 {
        return Err(INVALID_VALUE);
    }
    Ok(match attribute {
        1 => 1024,                                     // MAX_THREADS_PER_BLOCK
        10 => 32,                                      // WARP_SIZE
        16 => 132,                                     // MULTIPROCESSOR_COUNT
        19 => 1,                                       // CAN_MAP_HOST_MEMORY
        33 => card::pci_bus(device as usize) as c_int, // PCI_BUS_ID
        39 => 2048,                                    // MAX_THREADS_PER_MULTIPROCESSOR
        40 => 2,                                       // ASYNC_ENGINE_COUNT
        41 => 1,                                       // UNIFIED_ADDRESSING
        75 => 9,                                       // COMPUTE_CAPABILITY_MAJOR
        83 => 1,                                       // MANAGED_MEMORY
        102 => 1,                                      // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        103 => 1,  // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        115 => 1,  // MEMORY_POOLS_SUPPORTED
        134 => -1, // HOST_NUMA_ID: not known
        _ => 0,
    })
}

pub fn primary_retain(device: c_int) -> CuResult<Context> {
    let mut state = state();
    let device = state.device(device)?;
    let context = primary_handle(device);
    state.retained[device as usize] += 1;
    state.contexts.insert(context, device);
    Ok(context)
}

/// The last release destroys the context.
pub fn primary_release(device: c_int) -> CuResult<()> {
    let mut state = state();
    let device = state.device(device)?;
    let retained = state.retained[device as usize]
        .checked_sub(1)
        .ok_or(INVALID_CONTEXT)?;
    state.retained[device as usize] = retained;
    if retained == 0 {
        state.end_context(primary_handle(device));
    }
    Ok(())
}

/// Destroys the context without releasing it: who retained it still has to release it.
pub fn primary_reset(device: c_int) -> CuResult<()> {
    let mut state = state();
    let device = state.device(device)?;
    state.end_context(primary_handle(device));
    Ok(())
}

pub fn primary_active(device: c_int) -> CuResult<bool> {
    let state = state();
    let device = state.device(device)?;
    Ok(state.contexts.contains_key(&primary_handle(device)))
}

pub fn context_create(device: c_int) -> CuResult<Context> {
    let mut state = state();
    let device = state.device(device)?;
    let context = state.next_context;
    state.next_context += HANDLE_STEP;
    state.contexts.insert(context, device);
    with_stack(|stack| stack.push(context));
    Ok(context)
}

pub fn context_destroy(context: Context) -> CuResult<()> {
    let mut state = state();
    state.require_context(context)?;
    if context < FIRST_CREATED {
        // A primary context ends by its release, never by a destroy.
        return Err(INVALID_CONTEXT);
    }
    state.end_context(context);
    with_stack(|stack| {
        if stack.last() == Some(&context) {
            stack.pop();
        }
    });
    Ok(())
}

pub fn context_current() -> CuResult<Context> {
    state().require_initialised()?;
    Ok(with_stack(|stack| stack.last().copied()).unwrap_or(0))
}

/// Replaces the top of the stack; 0 takes the top off.
pub fn context_set_current(context: Context) -> CuResult<()> {
    let state = state();
    if context == 0 {
        state.require_initialised()?;
        with_stack(|stack| stack.pop());
        return Ok(());
    }
    state.require_context(context)?;
    with_stack(|stack| {
        stack.pop();
        stack.push(context);
    });
    Ok(())
}

pub fn context_push(context: Context) -> CuResult<()> {
    state().require_context(context)?;
    with_stack(|stack| stack.push(context));
    Ok(())
}

pub fn context_pop() -> CuResult<Context> {
    state().require_initialised()?;
    with_stack(|stack| stack.pop()).ok_or(INVALID_CONTEXT)
}

pub fn context_device() -> CuResult<c_int> {
    Ok(state().current()?.1 as c_int)
}

/// Waits for a context's work, of which there never is any: pools give back what they may.
pub fn context_synchronize(context: Option<Context>) -> CuResult<()> {
    let mut state = state();
    let device = match context {
        None => state.current()?.1,
        Some(context) => *state.contexts.get(&context).ok_or(INVALID_CONTEXT)?,
    };
    state.pools_synchronised(device);
    Ok(())
}

pub fn stream_create() -> CuResult<Stream> {
    let mut state = state();
    let (_, device) = state.current()?;
    let stream = state.stream_handles.issue();
    state.streams.insert(stream, device);
    Ok(stream)
}

pub fn stream_destroy(stream: Stream) -> CuResult<()> {
    let mut state = state();
    state.require_initialised()?;
    state.streams.remove(&stream).ok_or(INVALID_HANDLE)?;
    state.stream_handles.give_back(stream);
    Ok(())
}

/// As [`context_synchronize`].
pub fn stream_synchronize(stream: Stream) -> CuResult<()> {
    let mut state = state();
    let device = state.stream_device(stream)?;
    state.pools_synchronised(device);
    Ok(())
}

/// Bytes that this process can still allocate on the current device.
pub fn memory_free() -> CuResult<u64> {
    let state = state();
    let (_, device) = state.current()?;
    Ok(state.free_bytes(device))
}

/// Enters a failed call in the books.
pub fn allocation_failed(
    state: &mut State,
    kind: Kind,
    device: Option<u32>,
    code: c_int,
) -> CuResult<()> {
    state.accounts.allocation_failed(kind, device);
    Err(code)
}
