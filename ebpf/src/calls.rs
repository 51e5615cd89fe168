//! Hooked functions: what was given at the entry, what came of it at the return.

use aya_ebpf::{
    EbpfContext,
    bindings::pt_regs,
    helpers::{
        bpf_get_current_pid_tgid, bpf_ktime_get_ns, bpf_probe_read_user,
        generated::{bpf_get_attach_cookie, bpf_probe_read_user as read_user},
    },
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use vramscope_ebpf_abi::{
    Action, CONTEXTS, Call, Cookie, EXTRA_WORDS, FLAG_CONTEXT, FLAG_DEVICE, FLAG_EXTRA, FLAG_OUT,
    FLAG_OUT_FAULT, FLAG_STACK_COPIED, FLAG_STACK_FULL, KIND_CALL, KIND_CALL_STACK, Loss,
    MAX_DEPTH, NO_ARG, STACK_FRAMES,
};

use crate::copy::{Of, copy_stack, may_copy};
use crate::python::walk;
use crate::stack::walk_stack;
use crate::{InFlight, THREADS, Thread, lose, next_seq, send, thread};

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
pub fn lose_calls_in_flight(tid: u32) {
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

/// Whither the function that was just entered returns; its return probe is about to hide that.
#[inline(always)]
fn return_address(thread: &Thread, sp: u64) -> u64 {
    let depth = thread.depth;
    if depth > 0 {
        // Entered by a jump from a probed function: hidden already.
        let top = &thread.calls[((depth - 1) as usize) & (MAX_DEPTH - 1)];
        if top.sp == sp {
            return top.returns_to;
        }
    }
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_user(sp as *const u64) }.unwrap_or(0)
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
    let returns_to = return_address(thread, sp);
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
        returns_to,
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
    left(&ctx, false)
}

/// The same, with Python frames; for kernels that have what reading them takes.
#[uretprobe]
pub fn leave_python(ctx: RetProbeContext) -> u32 {
    left(&ctx, true)
}

#[inline(always)]
fn left(ctx: &RetProbeContext, python: bool) -> u32 {
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
            if python {
                flags |= walk(pid_tgid, top.enter_ns, false);
            }
            (*call).kind = KIND_CALL_STACK;
            let is_copied = may_copy(thread, Of::Call, top.enter_ns)
                && copy_stack(thread, seq, regs.rip, regs.rsp, regs.rbp) != 0;
            let frames = if is_copied {
                flags |= FLAG_STACK_COPIED;
                thread.record.stack[0] = regs.rip;
                1
            } else {
                walk_stack(thread, regs.rip, regs.rbp)
            };
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
    send(thread, record.cast(), size);
    0
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
