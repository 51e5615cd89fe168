//! The driver's state and what its calls do with it.
//!
//! Invariants:
//! - one lock guards contexts, blocks, books and the memory mappings: an address is unmapped and
//!   struck off the books before another thread can be given it;
//! - a process forked from this one starts uninitialised and with empty books;
//! - the stack of current contexts is each thread's own; a context's validity is judged by the
//!   shared table at every use, since another thread may destroy it.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{c_int, c_uint},
    sync::{Mutex, MutexGuard, PoisonError},
};

use vramscope_fakes::{
    card,
    ledger::{Accounts, Block, Kind, Layer},
    per_process::PerProcess,
};

use crate::{Context, Out, codes::*, memory};

/// Every how many-th free fails, as a planted fault.
const FAIL_FREE_VARIABLE: &str = "VRAMSCOPE_FAKE_FAIL_FREE";

/// Handles are opaque to callers: primary contexts have fixed ones, created contexts follow.
const FIRST_PRIMARY: Context = 0x10_0000;
const FIRST_CREATED: Context = 0x20_0000;
const HANDLE_STEP: Context = 0x100;

/// CU_MEMHOSTALLOC_PORTABLE | DEVICEMAP | WRITECOMBINED.
const HOST_ALLOC_FLAGS: c_uint = 0x7;
/// CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP | IOMEMORY | READ_ONLY.
const HOST_REGISTER_FLAGS: c_uint = 0xf;

static STATE: PerProcess<Mutex<State>> = PerProcess::new();

struct State {
    initialised: bool,
    /// How often each device's primary context is retained; it exists while that is above 0.
    retained: [u32; card::DEVICES],
    /// Contexts that exist, with their device.
    contexts: HashMap<Context, u32>,
    next_context: Context,
    accounts: Accounts,
    /// Frees tried so far, for the planted fault.
    free_calls: u64,
    fail_every: Option<u64>,
}

/// A thread's stack of current contexts, and the process it was filled in: a forked child's thread
/// inherits the memory, but not the contexts.
#[derive(Default)]
struct Stack {
    pid: u32,
    contexts: Vec<Context>,
}

thread_local! {
    static STACK: RefCell<Stack> = RefCell::default();
}

fn state() -> MutexGuard<'static, State> {
    let shared = STATE.get(|| {
        Mutex::new(State {
            initialised: false,
            retained: [0; card::DEVICES],
            contexts: HashMap::new(),
            next_context: FIRST_CREATED,
            accounts: Accounts::new(Layer::Driver),
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
        let pid = std::process::id();
        if stack.pid != pid {
            stack.pid = pid;
            stack.contexts.clear();
        }
        action(&mut stack.contexts)
    });
    found.unwrap_or_else(|_| action(&mut Vec::new()))
}

impl State {
    fn require_initialised(&self) -> CuResult<()> {
        if self.initialised {
            Ok(())
        } else {
            Err(NOT_INITIALIZED)
        }
    }

    fn device(&self, device: c_int) -> CuResult<u32> {
        self.require_initialised()?;
        u32::try_from(device)
            .ok()
            .filter(|index| (*index as usize) < card::DEVICES)
            .ok_or(INVALID_DEVICE)
    }

    /// The current context and its device.
    fn current(&self) -> CuResult<(Context, u32)> {
        self.require_initialised()?;
        let top = with_stack(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?;
        let device = self.contexts.get(&top).ok_or(CONTEXT_IS_DESTROYED)?;
        Ok((top, *device))
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
        self.contexts.remove(&context);
        for address in self.accounts.of_context(context) {
            if let Some(block) = self.accounts.freed(address) {
                memory::release(address, block);
            }
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
        41 => 1,                                       // UNIFIED_ADDRESSING
        75 => 9,                                       // COMPUTE_CAPABILITY_MAJOR
        134 => -1,                                     // HOST_NUMA_ID: not known
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

pub fn primary_reset(device: c_int) -> CuResult<()> {
    let mut state = state();
    let device = state.device(device)?;
    state.retained[device as usize] = 0;
    state.end_context(primary_handle(device));
    Ok(())
}

pub fn primary_active(device: c_int) -> CuResult<bool> {
    let state = state();
    let device = state.device(device)?;
    Ok(state.retained[device as usize] > 0)
}

pub fn context_create(_flags: c_uint, device: c_int) -> CuResult<Context> {
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

pub fn require_context() -> CuResult<()> {
    state().current().map(|_| ())
}

/// Bytes that this process can still allocate on the current device.
pub fn memory_free() -> CuResult<u64> {
    let state = state();
    let (_, device) = state.current()?;
    Ok(card::DEVICE_BYTES - state.accounts.used_bytes(device))
}

/// Allocates device or pinned memory and enters the outcome in the books.
pub fn allocate(kind: Kind, address: Out<usize>, bytes: usize) -> CuResult<()> {
    let mut state = state();
    let current = state.current();
    let outcome = current.and_then(|(context, device)| {
        let out = address.ok_or(INVALID_VALUE)?;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let place = match kind {
            Kind::Device => {
                if bytes as u64 > card::DEVICE_BYTES - state.accounts.used_bytes(device) {
                    return Err(OUT_OF_MEMORY);
                }
                memory::reserve(bytes)
            }
            Kind::PinnedHost => memory::pin_new(bytes),
            // The program's own memory is registered, not allocated.
            Kind::RegisteredHost => None,
        };
        let place = place.ok_or(OUT_OF_MEMORY)?;
        out.write(place);
        state.accounts.allocated(
            place,
            Block {
                kind,
                device,
                bytes: bytes as u64,
                context,
            },
        );
        Ok(())
    });
    if outcome.is_err() {
        let device = current.ok().map(|(_, device)| device);
        state.accounts.allocation_failed(kind, device);
    }
    outcome
}

pub fn allocate_pinned(address: Out<usize>, bytes: usize, flags: c_uint) -> CuResult<()> {
    if flags & !HOST_ALLOC_FLAGS != 0 {
        // An output of none makes the call fail with the same code, after the same checks.
        return allocate(Kind::PinnedHost, None, bytes);
    }
    allocate(Kind::PinnedHost, address, bytes)
}

pub fn register(address: usize, bytes: usize, flags: c_uint) -> CuResult<()> {
    let mut state = state();
    let current = state.current();
    let outcome = current.and_then(|(context, device)| {
        let is_usable = address != 0
            && bytes != 0
            && address.checked_add(bytes).is_some()
            && flags & !HOST_REGISTER_FLAGS == 0;
        if !is_usable || !memory::exists(address, bytes) {
            return Err(INVALID_VALUE);
        }
        if let Some((_, other)) = state.accounts.overlapping(address, bytes).next() {
            return Err(match other.kind {
                Kind::Device => INVALID_VALUE,
                Kind::PinnedHost | Kind::RegisteredHost => HOST_MEMORY_ALREADY_REGISTERED,
            });
        }
        memory::pin(address, bytes);
        state.accounts.allocated(
            address,
            Block {
                kind: Kind::RegisteredHost,
                device,
                bytes: bytes as u64,
                context,
            },
        );
        Ok(())
    });
    if outcome.is_err() {
        let device = current.ok().map(|(_, device)| device);
        state
            .accounts
            .allocation_failed(Kind::RegisteredHost, device);
    }
    outcome
}

/// Frees, or unregisters, what begins at an address, and enters the outcome in the books.
pub fn free(kind: Kind, address: usize) -> CuResult<()> {
    let mut state = state();
    let current = state.current();
    let outcome = current.and_then(|_| {
        state.free_calls += 1;
        let is_planted_fault = state
            .fail_every
            .is_some_and(|every| state.free_calls.is_multiple_of(every));
        if is_planted_fault {
            return Err(INVALID_VALUE);
        }
        let is_block = state
            .accounts
            .block(address)
            .is_some_and(|block| block.kind == kind);
        let freed = is_block.then(|| state.accounts.freed(address)).flatten();
        match freed {
            Some(block) => {
                memory::release(address, block);
                Ok(())
            }
            None if kind == Kind::RegisteredHost => Err(HOST_MEMORY_NOT_REGISTERED),
            None => Err(INVALID_VALUE),
        }
    });
    if outcome.is_err() {
        let device = current.ok().map(|(_, device)| device);
        state.accounts.free_failed(kind, address, device);
    }
    outcome
}
