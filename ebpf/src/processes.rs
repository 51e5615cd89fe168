//! Programs that begin, and processes that end.

use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_ktime_get_ns},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use vramscope_ebpf_abi::{KIND_EXEC, KIND_EXIT, Loss, Process};

use crate::calls::lose_calls_in_flight;
use crate::python::{forget_process, forget_thread};
use crate::{BPF_RB_FORCE_WAKEUP, EVENTS, THREADS, lose, next_seq};

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
    forget_thread(tgid);
    forget_process(tgid);
    process_record(KIND_EXEC, tgid);
    0
}

#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn exit(_ctx: RawTracePointContext) -> i32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let (tgid, tid) = ((pid_tgid >> 32) as u32, pid_tgid as u32);
    lose_calls_in_flight(tid);
    let _ = THREADS.remove(tid);
    forget_thread(tid);
    // A thread's exit frees nothing; the agent checks that the others are gone as well.
    if tid == tgid {
        // Of threads that go on without their leader no Python frames are read.
        forget_process(tgid);
        process_record(KIND_EXIT, tgid);
    }
    0
}
