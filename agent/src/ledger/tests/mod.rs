//! Hand-calculated histories; random ones against an independent model are in [`model`].

mod created;
mod framework;
mod model;

use super::*;
use crate::probes::Event;
use crate::probes::hooks::{Class, HOOKS};
use crate::probes::record::Stack;

fn host() -> Host {
    Host {
        name: "test".into(),
        boot_id: "boot".into(),
    }
}

fn call(symbol: &str, seq: u64, args: [u64; 2], out: Option<u64>, result: i32) -> TracedCall {
    TracedCall {
        hook: HOOKS.iter().position(|hook| hook.symbol == symbol).unwrap() as u16,
        tgid: PID,
        tid: 4_000_001,
        seq,
        enter_ns: seq * 10,
        exit_ns: seq * 10 + 5,
        parent_enter_ns: None,
        args: [args[0], args[1], 0, 0, 0, 0],
        extra: None,
        out,
        context: None,
        device: Some(1),
        result,
        stack: Stack::default(),
    }
}

const PID: u32 = 4_000_000;

fn new_ledger() -> Ledger {
    Ledger::new(host(), 1_000_000)
}

/// Rows of what `work` does.
fn rows_of(ledger: &mut Ledger, work: impl FnOnce(&mut Ledger, &mut Desk<'_>)) -> Vec<AllocRow> {
    let card = |_: &Process, device: Option<i32>| device.map(|d| format!("GPU-{d}").into());
    let mut rows = Vec::new();
    let mut desk = Desk {
        clock: &WallClock::new(),
        card: &card,
        rows: &mut rows,
    };
    work(ledger, &mut desk);
    rows
}

fn apply(ledger: &mut Ledger, call: &TracedCall, nested_success: bool) -> Vec<AllocRow> {
    let ordered = Ordered {
        event: Event::Call(call.clone()),
        parent_seq: None,
        stack: call.stack,
        nested_success,
        context: call.context,
    };
    let ordered = &ordered;
    rows_of(ledger, |ledger, desk| {
        ledger.apply(Turn { ordered, call }, desk);
    })
}

/// Bytes and blocks that live, of all kinds.
fn live(ledger: &Ledger) -> (u64, u64) {
    let Some(process) = ledger.get(PID) else {
        return (0, 0);
    };
    let classes = [
        Class::Physical,
        Class::Host,
        Class::Virtual,
        Class::SubAllocated,
    ];
    classes.iter().fold((0, 0), |(bytes, blocks), class| {
        let (b, n) = process.rollup.live(*class);
        (bytes + b, blocks + n)
    })
}

#[test]
fn of_a_chain_the_driver_row_counts() {
    let mut ledger = new_ledger();
    let driver = apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 1, [0, 100], Some(0x1000), 0),
        false,
    );
    let runtime = apply(
        &mut ledger,
        &call("cudaMalloc", 2, [0, 100], Some(0x1000), 0),
        true,
    );
    assert!(driver[0].counted && !runtime[0].counted);
    assert_eq!(live(&ledger), (100, 1));
    // The runtime's free is entered first, so its row comes first and must not end the block.
    let runtime = apply(
        &mut ledger,
        &call("cudaFree", 3, [0x1000, 0], None, 0),
        true,
    );
    assert_eq!(live(&ledger), (100, 1));
    let driver = apply(
        &mut ledger,
        &call("cuMemFree_v2", 4, [0x1000, 0], None, 0),
        false,
    );
    assert_eq!(live(&ledger), (0, 0));
    assert!(driver[0].counted && !runtime[0].counted);
    assert_eq!((driver[0].bytes, runtime[0].bytes), (Some(100), Some(100)));
    assert_eq!(
        (driver[0].alloc_seq, runtime[0].alloc_seq),
        (Some(1), Some(1))
    );
}

/// The runtime's call took so long to return that its nested call was not waited for.
#[test]
fn a_nested_call_that_came_alone_is_still_the_one_that_counts() {
    let mut ledger = new_ledger();
    let driver = call("cuMemAlloc_v2", 1, [0, 100], Some(0x1000), 0);
    assert!(apply(&mut ledger, &driver, false)[0].counted);
    let mut runtime = call("cudaMalloc", 2, [0, 100], Some(0x1000), 0);
    runtime.enter_ns = driver.enter_ns - 1;
    let rows = apply(&mut ledger, &runtime, false);
    assert_eq!((rows.len(), rows[0].counted), (1, false));
    assert_eq!(live(&ledger), (100, 1));
    // The next one at that address, whose predecessor's free was lost, is another.
    let rows = apply(
        &mut ledger,
        &call("cudaMalloc", 3, [0, 50], Some(0x1000), 0),
        false,
    );
    assert_eq!((rows[0].api, rows[1].counted), ("address_reuse", true));
    assert_eq!(live(&ledger), (50, 1));
}

#[test]
fn failures_are_rows_and_not_memory() {
    let mut ledger = new_ledger();
    let failed = apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 1, [0, 1 << 50], None, 2),
        false,
    );
    assert_eq!(
        (
            failed[0].bytes,
            failed[0].requested_bytes,
            failed[0].counted
        ),
        (Some(0), Some(1 << 50), false)
    );
    assert_eq!(live(&ledger), (0, 0));
    apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 2, [0, 8], Some(0x1000), 0),
        false,
    );
    let failed = apply(
        &mut ledger,
        &call("cuMemFree_v2", 3, [0x1000, 0], None, 1),
        false,
    );
    assert_eq!(
        (failed[0].bytes, failed[0].counted, live(&ledger)),
        (Some(0), false, (8, 1))
    );
    let unknown = apply(
        &mut ledger,
        &call("cuMemFree_v2", 4, [0x9000, 0], None, 0),
        false,
    );
    assert_eq!(
        (unknown[0].bytes, unknown[0].alloc_seq, unknown[0].counted),
        (None, None, false)
    );
}

#[test]
fn a_free_goes_to_the_device_that_allocated() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 1, [0, 8], Some(0x1000), 0),
        false,
    );
    let mut free = call("cuMemFree_v2", 2, [0x1000, 0], None, 0);
    free.device = Some(0);
    let row = &apply(&mut ledger, &free, false)[0];
    assert_eq!(
        (row.device, row.gpu_uuid.as_deref()),
        (Some(1), Some("GPU-1"))
    );
}

#[test]
fn contexts_tell_the_device_and_win_over_the_runtime_for_driver_calls() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &call("cuDevicePrimaryCtxRetain", 1, [0, 0], Some(0xc0), 0),
        false,
    );
    let mut alloc = call("cuMemAlloc_v2", 2, [0, 8], Some(0x1000), 0);
    alloc.context = Some(0xc0);
    assert_eq!(apply(&mut ledger, &alloc, false)[0].device, Some(0));
    alloc.context = Some(0xdead);
    alloc.device = None;
    alloc.out = Some(0x2000);
    assert_eq!(
        apply(&mut ledger, &alloc, false)[0].device,
        None,
        "an unknown context is not device 0"
    );
}

#[test]
fn a_reused_address_ends_the_block_whose_free_was_lost() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 1, [0, 8], Some(0x1000), 0),
        false,
    );
    let rows = apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 3, [0, 16], Some(0x1000), 0),
        false,
    );
    assert_eq!(
        (rows[0].api, rows[0].implicit, rows[0].bytes),
        ("address_reuse", true, Some(8))
    );
    assert_eq!(live(&ledger), (16, 1));
    // The lost free comes late: it was entered before the second allocation took effect.
    let late = apply(
        &mut ledger,
        &call("cuMemFree_v2", 2, [0x1000, 0], None, 0),
        false,
    );
    assert_eq!((late[0].counted, live(&ledger)), (false, (16, 1)));
}

#[test]
fn freeing_null_is_nothing_and_zero_bytes_are_no_memory() {
    let mut ledger = new_ledger();
    assert!(apply(&mut ledger, &call("cudaFree", 1, [0, 0], None, 0), false).is_empty());
    let rows = apply(
        &mut ledger,
        &call("cudaMalloc", 2, [0, 0], Some(0), 0),
        false,
    );
    assert_eq!(
        (rows[0].address, rows[0].counted, live(&ledger)),
        (None, false, (0, 0))
    );
}

/// A pid given out again: events of the first process are read when `/proc` knows the second.
#[test]
fn who_started_after_an_event_did_not_make_it() {
    let pid = std::process::id();
    let start = StartTime::of(pid).unwrap();
    let now_ns = crate::host::clock::monotonic_ns();
    let discover = |at_ns, seen| Process::discover(&host(), pid, at_ns, seen);
    assert_eq!(discover(now_ns, None).start, start);
    let program = Program {
        exe: Some("/first".into()),
        ..Program::default()
    };
    let early = discover(1, Some((start, program.clone())));
    assert!(early.start < start, "{:?}", early.start);
    assert_eq!(early.program, Program::default());
    // What was seen of the first one itself tells.
    let early = discover(1, Some((StartTime(0), program.clone())));
    assert_eq!((early.start, early.program), (StartTime(0), program));
}

#[test]
fn an_exit_frees_what_lives() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 1, [0, 8], Some(0x1000), 0),
        false,
    );
    apply(
        &mut ledger,
        &call("cuMemHostRegister_v2", 2, [0x5000, 4096], None, 0),
        false,
    );
    ledger.exiting(PID, 3, 99);
    let rows = rows_of(&mut ledger, |ledger, desk| {
        assert!(!ledger.end_some(PID, 0, 1, desk), "one of two at a time");
        assert!(ledger.end_some(PID, 0, 1, desk));
    });
    let mut summary: Vec<_> = rows
        .iter()
        .map(|r| (r.op, r.bytes, r.implicit, r.seq, r.alloc_seq))
        .collect();
    summary.sort_unstable_by_key(|(.., alloc_seq)| *alloc_seq);
    assert_eq!(
        summary,
        [
            ("free", Some(8), true, 3, Some(1)),
            ("unregister", Some(4096), true, 3, Some(2))
        ]
    );
    assert_eq!(live(&ledger), (0, 0));
    assert!(ledger.end(PID, 0).is_some() && ledger.end(PID, 0).is_none());
}

/// The exit's record was lost and the agent restarted in between: the end still comes last.
#[test]
fn an_exit_comes_after_what_was_allocated_whatever_restarted() {
    let mut ledger = new_ledger();
    for (seq, address) in [(5, 0x1000), (9, 0x2000)] {
        let alloc = call("cuMemAlloc_v2", seq, [0, 8], Some(address), 0);
        apply(&mut ledger, &alloc, false);
    }
    let changes = ledger.take_changes();
    let mut ledger = new_ledger();
    changes.iter().for_each(|change| ledger.restore(change));
    ledger.restored();
    let rows = rows_of(&mut ledger, |ledger, desk| {
        assert!(ledger.end_some(PID, 1000, usize::MAX, desk));
    });
    assert!(rows.len() == 2 && rows.iter().all(|row| row.seq >= 9));
}

#[test]
fn a_context_takes_its_memory_along() {
    let mut ledger = new_ledger();
    let mut inside = call("cuMemAlloc_v2", 1, [0, 8], Some(0x1000), 0);
    inside.context = Some(0xc0);
    let mut outside = call("cuMemAlloc_v2", 2, [0, 16], Some(0x2000), 0);
    outside.context = Some(0xc1);
    apply(&mut ledger, &inside, false);
    apply(&mut ledger, &outside, false);
    assert!(
        apply(
            &mut ledger,
            &call("cuCtxDestroy_v2", 3, [0xc0, 0], None, 1),
            false
        )
        .is_empty()
    );
    let rows = apply(
        &mut ledger,
        &call("cuCtxDestroy_v2", 4, [0xc0, 0], None, 0),
        false,
    );
    let summary: Vec<_> = rows
        .iter()
        .map(|r| (r.api, r.bytes, r.implicit, r.alloc_seq))
        .collect();
    assert_eq!(summary, [("cuCtxDestroy_v2", Some(8), true, Some(1))]);
    assert_eq!(live(&ledger), (16, 1));
}
