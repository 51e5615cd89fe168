//! The kernel side: one entry program and one return program serve every hooked function; what
//! differs between functions comes in the probe's cookie (`vramscope_ebpf_abi::Cookie`). A third
//! program serves the places where a framework's allocator tells of itself.
//!
//! Invariants:
//! - nothing is evicted: a table that is full counts the call it could not take;
//! - no per-CPU scratch memory: uprobe programs may be preempted by others of the same CPU, so
//!   state lives in the calling thread's own entry, and records are built there;
//! - the traced thread never waits for the agent.

#![no_std]
#![no_main]
// The BPF target's `core` declares atomics without read-modify-write, though BPF has them since
// kernel 5.12: the intrinsic is the way to the instruction.
#![feature(core_intrinsics)]
#![allow(internal_features)]

mod calls;
mod copy;
mod framework;
mod processes;
mod python;
mod stack;

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::{
    helpers::generated::{bpf_map_update_elem, bpf_ringbuf_output},
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use vramscope_ebpf_abi::{
    CONTEXTS, CallStack, Loss, MAX_DEPTH, framework::SITES, framework::Site, stack::Settings,
};

/// Words of a piece of a stack, a power of two.
const PIECE_WORDS: usize = 128;

const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_NOEXIST: u64 = 1;
const BPF_RB_NO_WAKEUP: u64 = 1;
const BPF_RB_FORCE_WAKEUP: u64 = 2;

/// A call that was entered and has not returned.
#[repr(C)]
#[derive(Clone, Copy)]
struct InFlight {
    /// Stack pointer at entry: it tells nested calls from abandoned ones.
    pub sp: u64,
    /// The return address, which a return probe replaces on the stack.
    pub returns_to: u64,
    pub cookie: u64,
    pub enter_ns: u64,
    /// `enter_ns` of this call if it sends a record, else of the nearest enclosing one that does.
    pub chain_ns: u64,
    pub seq: u64,
    pub args: [u64; 6],
}

/// What is known about one thread.
#[repr(C)]
struct Thread {
    pub depth: u64,
    /// Current contexts, the topmost first; `contexts_known` of them are known.
    pub contexts: [u64; CONTEXTS],
    pub contexts_known: u32,
    pub device: i32,
    /// FLAG_DEVICE once the thread chose one.
    pub known: u32,
    /// Calls under way that were nested too deep to be kept.
    pub skipped: u32,
    /// Records sent. The first one wakes the agent: it has to read the mappings of a process
    /// that may be over in milliseconds.
    pub sent: u64,
    pub calls: [InFlight; MAX_DEPTH],
    /// The record is made here, so that the ring gets no byte more than its stack has frames.
    pub record: CallStack,
    /// What PyTorch's allocator last reported as handed out, until its probe has followed.
    pub reported: u64,
    pub reported_seq: u64,
    /// What its probe last announced as taken back, until the report has followed.
    pub freeing: u64,
    /// 1 once such a report has been seen to follow.
    pub confirmed: u64,
    /// The second, roughly, in which so many stacks of calls, and of a framework's events, were
    /// copied.
    pub second: u64,
    pub call_copies: u32,
    pub framework_copies: u32,
    /// A piece of the thread's stack, copied at once: frames lie close together.
    pub piece: [u64; PIECE_WORDS],
}

// Sizes of EVENTS, STACKS and THREADS are the loader's to set.

#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(4096, 0);

/// Copied stacks, `vramscope_ebpf_abi::stack`.
#[map]
static STACKS: RingBuf = RingBuf::with_byte_size(4096, 0);

/// One entry, written by the agent.
#[map]
static SETTINGS: Array<Settings> = Array::with_max_entries(1, 0);

/// Keyed by thread id. Entries are made at a thread's first call and removed at its exit.
#[map]
static THREADS: HashMap<u32, Thread> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// One zeroed entry, never written: a new thread's value is copied from here, since a `Thread`
/// is too large for the 512-byte BPF stack.
#[map]
static NEW_THREAD: Array<Thread> = Array::with_max_entries(1, 0);

/// The next sequence number.
#[map]
static SEQ: Array<u64> = Array::with_max_entries(1, 0);

/// When these maps were made, written once by the agent. A restarted agent compares it with its
/// journal, to know whether it goes on with the same ring.
#[map]
static GENERATION: Array<u64> = Array::with_max_entries(1, 0);

/// Losses by `Loss`.
#[map]
static LOST: PerCpuArray<u64> = PerCpuArray::with_max_entries(Loss::COUNT, 0);

/// Where the operands of a framework's probes lie, by the cookie's number.
#[map]
static SITES_OF: Array<Site> = Array::with_max_entries(SITES, 0);

#[inline(always)]
fn lose(cause: Loss) {
    if let Some(count) = LOST.get_ptr_mut(cause as u32) {
        // SAFETY: the pointer is this CPU's slot. Two programs on one CPU may interleave, so
        // the addition is atomic.
        unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(count, 1) };
    }
}

#[inline(always)]
fn next_seq() -> u64 {
    match SEQ.get_ptr_mut(0) {
        // SAFETY: the slot is aligned, lives as long as the map, and is only used atomically.
        // Sequentially consistent, since LLVM turns a relaxed addition into the instruction that
        // does not fetch, even where the old value is used.
        Some(seq) => unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(seq, 1) },
        None => 0,
    }
}

#[inline(always)]
fn thread(tid: u32) -> Option<*mut Thread> {
    if let Some(thread) = THREADS.get_ptr_mut(tid) {
        return Some(thread);
    }
    let template = NEW_THREAD.get_ptr(0)?;
    // SAFETY: both pointers are valid for the map's key and value sizes; the kernel copies.
    unsafe {
        bpf_map_update_elem(
            (&raw const THREADS).cast_mut().cast(),
            (&raw const tid).cast(),
            template.cast(),
            BPF_NOEXIST,
        );
    }
    THREADS.get_ptr_mut(tid)
}

/// Sends `size` bytes of the thread's record.
#[inline(always)]
fn send(thread: &mut Thread, record: *const core::ffi::c_void, size: u64) {
    let wakeup = if thread.sent == 0 {
        BPF_RB_FORCE_WAKEUP
    } else {
        BPF_RB_NO_WAKEUP
    };
    thread.sent += 1;
    // SAFETY: `size` bytes of the record were written just now.
    let sent = unsafe {
        bpf_ringbuf_output(
            (&raw const EVENTS).cast_mut().cast(),
            record.cast_mut(),
            size,
            wakeup,
        )
    };
    if sent != 0 {
        lose(Loss::RingFull);
    }
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
