//! Orders that histories must come out in.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::probes::hooks::HOOKS;

const HOLD: Duration = Duration::from_nanos(1000);

fn hook(symbol: &str) -> u16 {
    HOOKS.iter().position(|hook| hook.symbol == symbol).unwrap() as u16
}

fn call(symbol: &str, seq: u64, enter_ns: u64, parent_enter_ns: Option<u64>) -> TracedCall {
    TracedCall {
        hook: hook(symbol),
        tgid: 1,
        tid: 1,
        seq,
        enter_ns,
        exit_ns: enter_ns + 1,
        parent_enter_ns,
        args: [0; 6],
        extra: None,
        out: None,
        context: None,
        device: None,
        result: 0,
        stack: Stack {
            id: parent_enter_ns.is_none().then_some(77),
            ..Stack::default()
        },
    }
}

fn seqs(orderer: &mut Orderer, now_ns: u64) -> Vec<u64> {
    let next = || orderer.next(now_ns).map(|ordered| ordered.event.seq());
    std::iter::from_fn(next).collect()
}

/// Another thread got the address (3) before the free that gave it up (2) returned.
#[test]
fn a_free_under_way_is_waited_for() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.push(Event::Call(call("cuMemAlloc_v2", 1, 10, None)), 0);
    orderer.push(Event::Call(call("cuMemAlloc_v2", 3, 30, None)), 0);
    assert_eq!(seqs(&mut orderer, 0), [1]);
    orderer.push(Event::Call(call("cuMemFree_v2", 2, 20, None)), 5);
    assert_eq!(seqs(&mut orderer, 5), [2, 3]);
}

/// A first start restores nothing, and must not forget where numbers begin.
#[test]
fn restoring_nothing_changes_nothing() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.restore(Waiting::default(), 0);
    orderer.push(
        Event::Exec {
            tgid: 1,
            seq: 1,
            at_ns: 0,
        },
        0,
    );
    assert_eq!(seqs(&mut orderer, 0), [1]);
}

#[test]
fn waiting_events_are_known_by_process() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.push(Event::Call(call("cuMemAlloc_v2", 2, 20, None)), 0);
    assert!(orderer.concerns(1) && !orderer.concerns(2));
    assert_eq!(seqs(&mut orderer, 10_000), [2]);
    assert!(!orderer.concerns(1));
    orderer.push(Event::Call(call("cuMemAlloc_v2", 3, 31, Some(30))), 0);
    assert!(orderer.concerns(1));
}

#[test]
fn a_gap_is_given_up_after_the_hold() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.push(
        Event::Exec {
            tgid: 1,
            seq: 5,
            at_ns: 0,
        },
        100,
    );
    assert_eq!(seqs(&mut orderer, 1000), [0; 0]);
    assert_eq!(seqs(&mut orderer, 1100), [5]);
    orderer.push(
        Event::Exec {
            tgid: 1,
            seq: 3,
            at_ns: 0,
        },
        1200,
    );
    assert_eq!(seqs(&mut orderer, 1200), [3], "a late event comes at once");
}

#[test]
fn a_nested_call_gets_parent_and_stack() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.push(Event::Call(call("cuMemAlloc_v2", 1, 11, Some(10))), 0);
    assert_eq!(seqs(&mut orderer, 0), [0; 0]);
    orderer.push(Event::Call(call("cudaMalloc", 2, 10, None)), 0);
    let out: Vec<_> = std::iter::from_fn(|| orderer.next(0)).collect();
    assert_eq!(out[0].parent_seq, Some(2));
    assert_eq!(out[0].stack.id, Some(77));
    assert!(!out[0].nested_success && out[1].nested_success);
    assert_eq!(out[1].parent_seq, None);
}

/// A callback inside the driver's call allocates through the runtime.
#[test]
fn an_allocation_inside_another_is_its_own() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    for (seq, (symbol, enter, parent, out)) in (1..).zip([
        ("cuMemAlloc_v2", 40, Some(30), 0x2000),
        ("cudaMalloc", 30, Some(20), 0x2000),
        ("cuMemAlloc_v2", 20, Some(10), 0x1000),
        ("cudaMalloc", 10, None, 0x1000),
    ]) {
        let mut call = call(symbol, seq, enter, parent);
        call.out = Some(out);
        orderer.push(Event::Call(call), 0);
    }
    let next = || orderer.next(0).map(|ordered| ordered.nested_success);
    let out: Vec<_> = std::iter::from_fn(next).collect();
    assert_eq!(out, [false, true, false, true]);
}

#[test]
fn a_nested_call_without_its_outer_one_is_not_lost() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.push(Event::Call(call("cuMemAlloc_v2", 1, 11, Some(10))), 0);
    // The next chain of the same thread: its outer call cannot be the parent of the first.
    orderer.push(Event::Call(call("cudaMalloc", 2, 20, None)), 0);
    let out: Vec<_> = std::iter::from_fn(|| orderer.next(0))
        .map(|ordered| {
            (
                ordered.event.seq(),
                ordered.parent_seq,
                ordered.nested_success,
            )
        })
        .collect();
    assert_eq!(out, [(1, None, false), (2, None, false)]);
    orderer.push(Event::Call(call("cuMemAlloc_v2", 3, 31, Some(30))), 0);
    assert_eq!(seqs(&mut orderer, 10 * 1000), [3]);
}

proptest! {
    /// Whatever the order of arrival, what comes out is what went in, sorted, as long as
    /// nothing had to wait longer than the hold.
    #[test]
    fn arrival_order_does_not_matter(
        order in Just((1..60u64).collect::<Vec<_>>()).prop_shuffle(),
        restart_after in 0..60usize,
    ) {
        let mut orderer = Orderer::new(HOLD, Some(1));
        let mut out = Vec::new();
        for (i, seq) in order.iter().enumerate() {
            orderer.push(Event::Exec { tgid: 1, seq: *seq, at_ns: 0 }, 0);
            out.extend(seqs(&mut orderer, 0));
            if i == restart_after {
                let waiting = orderer.waiting();
                orderer = Orderer::new(HOLD, None);
                orderer.restore(waiting, 0);
            }
        }
        prop_assert_eq!(out, (1..60).collect::<Vec<u64>>());
    }
}

fn told(what: What, tid: u32, seq: u64) -> Told {
    Told {
        what,
        tgid: 1,
        tid,
        seq,
        at_ns: seq,
        address: 0x7000,
        bytes: if what == What::Report { 512 } else { 0 },
        totals: None,
        device: Some(0),
        asked: (what == What::Rest).then_some((500, 2)),
        announced: false,
        stack: Stack::default(),
    }
}

fn asked(orderer: &mut Orderer, now_ns: u64) -> Vec<(u64, Option<(u64, i64)>)> {
    let next = || match orderer.next(now_ns)?.event {
        Event::Framework(told) => Some((told.seq, told.asked)),
        other => Some((other.seq(), None)),
    };
    std::iter::from_fn(next).collect()
}

/// Two threads; the second's probe comes before the first's.
#[test]
fn a_report_and_its_probe_are_one_event() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.push(Event::Framework(told(What::Report, 1, 1)), 0);
    orderer.push(Event::Framework(told(What::Report, 2, 2)), 0);
    assert!(orderer.concerns(1) && !orderer.waiting().is_empty());
    orderer.push(Event::Framework(told(What::Rest, 2, 2)), 0);
    assert_eq!(asked(&mut orderer, 0), []);
    // Also across a restart.
    let waiting = orderer.waiting();
    let mut orderer = Orderer::new(HOLD, None);
    orderer.restore(waiting, 0);
    orderer.push(Event::Framework(told(What::Rest, 1, 1)), 0);
    let whole = Some((500, 2));
    assert_eq!(asked(&mut orderer, 0), [(1, whole), (2, whole)]);
    assert!(orderer.waiting().is_empty());
}

/// Without a probe a report waits until its thread does something else, or long enough.
#[test]
fn a_report_without_a_probe_is_an_event_by_itself() {
    let mut orderer = Orderer::new(HOLD, Some(1));
    orderer.push(Event::Framework(told(What::Report, 1, 1)), 0);
    orderer.push(Event::Framework(told(What::Report, 1, 2)), 0);
    assert_eq!(asked(&mut orderer, 0), [(1, None)]);
    orderer.push(Event::Call(call("cuMemAlloc_v2", 3, 30, None)), 0);
    assert_eq!(asked(&mut orderer, 0), [(2, None), (3, None)]);
    orderer.push(Event::Framework(told(What::Report, 1, 4)), 0);
    assert_eq!(asked(&mut orderer, 999), []);
    assert_eq!(asked(&mut orderer, 1000), [(4, None)]);
    // What comes after all is not thrown away: the books have the block.
    orderer.push(Event::Framework(told(What::Rest, 1, 4)), 1000);
    assert_eq!(asked(&mut orderer, 1000), [(4, Some((500, 2)))]);
    // A process that ends says no more.
    orderer.push(Event::Framework(told(What::Report, 1, 5)), 1000);
    let exit = Event::Exit {
        tgid: 1,
        seq: 6,
        at_ns: 0,
    };
    orderer.push(exit, 1000);
    assert_eq!(asked(&mut orderer, 1000), [(5, None), (6, None)]);
}
