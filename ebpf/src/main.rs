//! The kernel side: one entry program and one return program serve every hooked function; what
//! differs between functions comes in the probe's cookie (`vramscope_ebpf_abi::Cookie`).
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

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::{
    EbpfContext,
    bindings::pt_regs,
    helpers::{
        bpf_get_current_pid_tgid, bpf_ktime_get_ns, bpf_probe_read_user,
        generated::{
            bpf_get_attach_cookie, bpf_map_update_elem, bpf_probe_read_user as read_user,
            bpf_ringbuf_output,
        },
    },
    macros::{map, raw_tracepoint, uprobe, uretprobe},
    maps::{Array, HashMap, PerCpuArray, RingBuf},
    programs::{ProbeContext, RawTracePointContext, RetProbeContext},
};
use vramscope_ebpf_abi::{
    Action, CONTEXTS, Call, CallStack, Cookie, EXTRA_WORDS, FLAG_CONTEXT, FLAG_DEVICE, FLAG_EXTRA,
    FLAG_OUT, FLAG_OUT_FAULT, FLAG_STACK_FULL, KIND_CALL, KIND_CALL_STACK, KIND_EXEC, KIND_EXIT,
    Loss, MAX_DEPTH, NO_ARG, Process, STACK_FRAMES,
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
    sp: u64,
    cookie: u64,
    enter_ns: u64,
    /// `enter_ns` of this call if it sends a record, else of the nearest enclosing one that does.
    chain_ns: u64,
    seq: u64,
    args: [u64; 6],
}

/// What is known about one thread.
#[repr(C)]
struct Thread {
    depth: u64,
    /// Current contexts, the topmost first; `contexts_known` of them are known.
    contexts: [u64; CONTEXTS],
    contexts_known: u32,
    device: i32,
    /// FLAG_DEVICE once the thread chose one.
    known: u32,
    /// Calls under way that were nested too deep to be kept.
    skipped: u32,
    /// Records sent. The first one wakes the agent: it has to read the mappings of a process
    /// that may be over in milliseconds.
    sent: u64,
    calls: [InFlight; MAX_DEPTH],
    /// The record is made here, so that the ring gets no byte more than its stack has frames.
    record: CallStack,
    /// A piece of the thread's stack, copied at once: frames lie close together.
    piece: [u64; PIECE_WORDS],
}

// Sizes of EVENTS and THREADS are the loader's to set.

#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(4096, 0);

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

#[inline(always)]
fn lose(cause: Loss) {
    if let Some(count) = LOST.get_ptr_mut(cause as u32) {
        // SAFETY: the pointer is this CPU's slot. Two programs on one CPU may interleave, so
        // the addition is atomic.
        unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(count, 1) };
    }
}

/// Counts a call that would have made a record.
#[inline(always)]
fn lose_call(ctx: *mut core::ffi::c_void, cause: Loss) {
    // SAFETY: the helper takes the program's context.
    let cookie = Cookie::unpack(unsafe { bpf_get_attach_cookie(ctx) });
    if records(cookie.action) {
        lose(cause);
    }
}

#[inline(always)]
fn records(action: Action) -> bool {
    matches!(
        action,
        Action::Record | Action::RecordContext | Action::RecordEnd
    )
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

/// Drops calls that were abandoned: a live enclosing call has its stack pointer above ours.
#[inline(always)]
fn drop_abandoned(thread: &mut Thread, sp: u64) {
    let depth = thread.depth;
    if depth == 0 || thread.calls[((depth - 1) as usize) & (MAX_DEPTH - 1)].sp > sp {
        return;
    }
    for _ in 0..MAX_DEPTH {
        let depth = thread.depth;
        if depth == 0 || depth > MAX_DEPTH as u64 {
            break;
        }
        let top = &thread.calls[((depth - 1) as usize) & (MAX_DEPTH - 1)];
        if top.sp > sp {
            break;
        }
        if records(Cookie::unpack(top.cookie).action) {
            lose(Loss::MissedReturn);
        }
        thread.depth = depth - 1;
    }
}

/// Counts the calls that a thread takes with it: no return tells of them.
#[inline(always)]
fn lose_calls_in_flight(tid: u32) {
    let Some(thread) = THREADS.get_ptr(tid) else {
        return;
    };
    // SAFETY: the entry belongs to the running thread alone; no other program writes it.
    let thread = unsafe { &*thread };
    for i in 0..MAX_DEPTH {
        if i as u64 >= thread.depth {
            break;
        }
        if records(Cookie::unpack(thread.calls[i].cookie).action) {
            lose(Loss::MissedReturn);
        }
    }
}

#[uprobe]
pub fn enter(ctx: ProbeContext) -> u32 {
    let tid = bpf_get_current_pid_tgid() as u32;
    // A call that finds no room is counted once, at its return.
    let Some(thread) = thread(tid) else {
        return 0;
    };
    // SAFETY: the entry belongs to the running thread alone; no other program writes it.
    let thread = unsafe { &mut *thread };
    // SAFETY: the kernel passes the thread's registers.
    let regs: &pt_regs = unsafe { &*ctx.regs };
    let sp = regs.rsp;
    drop_abandoned(thread, sp);
    let depth = thread.depth;
    if depth >= MAX_DEPTH as u64 {
        lose_call(ctx.as_ptr(), Loss::TooDeep);
        thread.skipped += 1;
        return 0;
    }
    // SAFETY: the helper takes the program's context.
    let packed = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let cookie = Cookie::unpack(packed);
    let records = records(cookie.action);
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let chain_ns = if records {
        now
    } else if depth > 0 {
        thread.calls[((depth - 1) as usize) & (MAX_DEPTH - 1)].chain_ns
    } else {
        0
    };
    thread.calls[(depth as usize) & (MAX_DEPTH - 1)] = InFlight {
        sp,
        cookie: packed,
        enter_ns: now,
        chain_ns,
        seq: if cookie.seq_at_entry { next_seq() } else { 0 },
        args: [regs.rdi, regs.rsi, regs.rdx, regs.rcx, regs.r8, regs.r9],
    };
    if cookie.stack_args {
        // Above the return address. Read now: the callee may write there.
        let to = &raw mut thread.calls[(depth as usize) & (MAX_DEPTH - 1)].args[3];
        // SAFETY: three words of the entry's own arguments; the helper checks the source.
        if unsafe { read_user(to.cast(), 24, (sp + 8) as *const _) } != 0 {
            lose(Loss::ReadFault);
        }
    }
    thread.depth = depth + 1;
    0
}

#[uretprobe]
pub fn leave(ctx: RetProbeContext) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let tid = pid_tgid as u32;
    let Some(thread) = THREADS.get_ptr_mut(tid) else {
        // There is room now: the entry was not seen. There is none: there was none then.
        lose_call(
            ctx.as_ptr(),
            match thread(tid) {
                Some(_) => Loss::MissedEntry,
                None => Loss::ThreadsFull,
            },
        );
        return 0;
    };
    // SAFETY: as in `enter`.
    let thread = unsafe { &mut *thread };
    // SAFETY: the kernel passes the thread's registers.
    let regs: &pt_regs = unsafe { &*ctx.regs };
    // The return popped the return address: at entry the stack pointer was one word lower.
    let sp = regs.rsp - 8;
    drop_abandoned(thread, sp - 1);
    let depth = thread.depth;
    if depth == 0 || depth > MAX_DEPTH as u64 {
        lose_call(ctx.as_ptr(), Loss::MissedEntry);
        return 0;
    }
    let top = &raw const thread.calls[((depth - 1) as usize) & (MAX_DEPTH - 1)];
    // SAFETY: an element of the entry above, which nothing writes before this program is over.
    let top = unsafe { &*top };
    // SAFETY: the helper takes the program's context.
    let packed = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    if top.sp != sp || top.cookie != packed {
        if thread.skipped > 0 {
            // Counted at its entry.
            thread.skipped -= 1;
        } else {
            lose_call(ctx.as_ptr(), Loss::MissedEntry);
        }
        return 0;
    }
    thread.depth = depth - 1;
    thread.skipped = 0;

    let cookie = Cookie::unpack(packed);
    let result = regs.rax as i32;
    let succeeded = result == 0;
    let first_arg = top.args[0];
    match cookie.action {
        Action::SetContext => {
            if succeeded {
                thread.contexts[0] = first_arg;
                if thread.contexts_known == 0 {
                    thread.contexts_known = 1;
                }
            }
            return 0;
        }
        Action::PushContext => {
            if succeeded {
                push_context(thread, first_arg);
            }
            return 0;
        }
        Action::PopContext => {
            if succeeded {
                pop_context(thread);
            }
            return 0;
        }
        Action::SetDevice => {
            if succeeded {
                thread.device = first_arg as i32;
                thread.known |= FLAG_DEVICE;
            }
            return 0;
        }
        Action::Record | Action::RecordContext | Action::RecordEnd => {}
    }

    let mut flags = thread.known;
    let mut out = 0;
    if cookie.out_arg != NO_ARG && succeeded {
        let pointer = top.args[(cookie.out_arg & 3) as usize] as *const u64;
        // SAFETY: the helper checks the address.
        match unsafe { bpf_probe_read_user(pointer) } {
            Ok(value) => {
                out = value;
                flags |= FLAG_OUT;
            }
            Err(_) => {
                lose(Loss::ReadFault);
                flags |= FLAG_OUT_FAULT;
            }
        }
    }
    match cookie.action {
        Action::RecordContext if flags & FLAG_OUT != 0 => push_context(thread, out),
        Action::RecordEnd
            if succeeded && thread.contexts_known > 0 && thread.contexts[0] == first_arg =>
        {
            pop_context(thread);
        }
        _ => {}
    }
    if thread.contexts_known > 0 {
        flags |= FLAG_CONTEXT;
    }

    let parent_enter_ns = if depth > 1 {
        thread.calls[((depth - 2) as usize) & (MAX_DEPTH - 1)].chain_ns
    } else {
        0
    };
    let seq = if cookie.seq_at_entry {
        top.seq
    } else {
        next_seq()
    };
    let record = &raw mut thread.record;
    let mut size = size_of::<Call>() as u64;
    // SAFETY: the entry's own memory; the helpers write at most the sizes given, and check what
    // they read.
    unsafe {
        let call = &raw mut (*record).call;
        if cookie.extra_arg != NO_ARG {
            let pointer = top.args[(cookie.extra_arg & 3) as usize] as *const core::ffi::c_void;
            let words = (cookie.extra_words as u32).min(EXTRA_WORDS as u32);
            if read_user((&raw mut (*call).extra).cast(), words * 8, pointer) == 0 {
                flags |= FLAG_EXTRA;
            } else if succeeded {
                lose(Loss::ReadFault);
            }
        }
        (*call).frames = 0;
        (*call).kind = KIND_CALL;
        if cookie.stack && parent_enter_ns == 0 {
            let frames = walk_stack(thread, regs.rip, regs.rbp);
            (*call).kind = KIND_CALL_STACK;
            (*call).frames = frames;
            if frames as usize == STACK_FRAMES {
                flags |= FLAG_STACK_FULL;
            }
            size += 8 * (frames as u64 & (2 * STACK_FRAMES as u64 - 1));
        }
        (*call).hook = cookie.hook as u32;
        (*call).tgid = (pid_tgid >> 32) as u32;
        (*call).tid = tid;
        (*call).seq = seq;
        (*call).enter_ns = top.enter_ns;
        (*call).exit_ns = bpf_ktime_get_ns();
        (*call).parent_enter_ns = parent_enter_ns;
        (*call).args = top.args;
        (*call).out = out;
        (*call).context = thread.contexts[0];
        (*call).device = thread.device;
        (*call).result = result;
        (*call).flags = flags;
    }
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
            record.cast(),
            size,
            wakeup,
        )
    };
    if sent != 0 {
        lose(Loss::RingFull);
    }
    0
}

/// Return addresses by frame pointers, innermost first, into the thread's record; gives how many.
///
/// `bpf_get_stack` does the same with two guarded reads a frame, some 90 ns each on a virtual
/// machine. Frames lie close together, so here a piece of the stack is copied at once and walked.
#[inline(always)]
fn walk_stack(thread: &mut Thread, returns_to: u64, frame_pointer: u64) -> u32 {
    const PIECE_BYTES: u64 = PIECE_WORDS as u64 * 8;
    thread.record.stack[0] = returns_to;
    let mut frames = 1u32;
    let mut pointer = frame_pointer;
    let (mut start, mut end) = (0u64, 0u64);
    for _ in 1..STACK_FRAMES {
        if pointer & 7 != 0 || pointer == 0 {
            break;
        }
        if pointer < start || pointer + 16 > end {
            let piece = (&raw mut thread.piece).cast();
            let from = pointer as *const core::ffi::c_void;
            // SAFETY: the helper writes at most the piece's size, and checks the source.
            let whole = unsafe { read_user(piece, PIECE_BYTES as u32, from) } == 0;
            // Near the end of the stack there may be no more than the frame itself.
            // SAFETY: as above.
            if !whole && unsafe { read_user(piece, 16, from) } != 0 {
                break;
            }
            start = pointer;
            end = pointer + if whole { PIECE_BYTES } else { 16 };
        }
        let at = ((pointer - start) >> 3) as usize;
        let next = thread.piece[at & (PIECE_WORDS - 1)];
        let address = thread.piece[(at + 1) & (PIECE_WORDS - 1)];
        if address == 0 {
            break;
        }
        thread.record.stack[(frames as usize) & (STACK_FRAMES - 1)] = address;
        frames += 1;
        // The stack grows down: a caller's frame lies above.
        if next <= pointer {
            break;
        }
        pointer = next;
    }
    frames
}

#[inline(always)]
fn push_context(thread: &mut Thread, context: u64) {
    for i in (1..CONTEXTS).rev() {
        thread.contexts[i] = thread.contexts[i - 1];
    }
    thread.contexts[0] = context;
    if thread.contexts_known < CONTEXTS as u32 {
        thread.contexts_known += 1;
    }
}

/// The one below is known only if it was pushed, or set, while we looked.
#[inline(always)]
fn pop_context(thread: &mut Thread) {
    for i in 1..CONTEXTS {
        thread.contexts[i - 1] = thread.contexts[i];
    }
    if thread.contexts_known > 0 {
        thread.contexts_known -= 1;
    }
}

#[inline(always)]
fn process_record(kind: u32, tgid: u32) {
    let Some(mut entry) = EVENTS.reserve::<Process>(0) else {
        lose(Loss::ProcessEvent);
        return;
    };
    entry.write(Process {
        kind,
        tgid,
        seq: next_seq(),
        // SAFETY: a helper without arguments.
        at_ns: unsafe { bpf_ktime_get_ns() },
    });
    entry.submit(BPF_RB_FORCE_WAKEUP);
}

#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn exec(_ctx: RawTracePointContext) -> i32 {
    let tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    // Calls in flight died with the old program.
    lose_calls_in_flight(tgid);
    let _ = THREADS.remove(tgid);
    process_record(KIND_EXEC, tgid);
    0
}

#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn exit(_ctx: RawTracePointContext) -> i32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let (tgid, tid) = ((pid_tgid >> 32) as u32, pid_tgid as u32);
    lose_calls_in_flight(tid);
    let _ = THREADS.remove(tid);
    // A thread's exit frees nothing; the agent checks that the others are gone as well.
    if tid == tgid {
        process_record(KIND_EXIT, tgid);
    }
    0
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
