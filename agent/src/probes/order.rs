//! Puts events into the order in which they took effect, and call chains together.
//!
//! The kernel numbers events where they take effect (a free at its entry, an allocation at its
//! return), but they arrive when calls return. So an event waits until all lower numbers are
//! there, at most `hold`: a free that the driver is long over, or a lost record, must not stop
//! the rest. A call made inside another traced call arrives first and waits for the outer one,
//! which has the stack and the number it will name as its parent. What a framework's allocator
//! reports waits for the probe that follows on its thread, until the thread does something else.
//!
//! Invariants:
//! - every event that goes in comes out exactly once;
//! - events come out in order of `seq`, except those that arrive after their turn was given up.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::framework::{Told, What};
use super::hooks::Layer;
use super::record::Stack;
use super::{Event, TracedCall};
use crate::Map;

/// An event in its turn, with what its call chain adds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ordered {
    pub event: Event,
    /// `seq` of the enclosing call's row.
    pub parent_seq: Option<u64>,
    /// That of the outermost call.
    pub stack: Stack,
    /// For an enclosing call: a nested call of the driver did the same thing and succeeded.
    pub nested_success: bool,
    /// For an enclosing call: the device on which its nested calls worked.
    pub context: Option<u64>,
}

/// Events that wait, as the journal keeps them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Waiting {
    pub next_seq: Option<u64>,
    pub nested: Vec<TracedCall>,
    pub ordered: Vec<Ordered>,
    pub halves: Vec<Told>,
}

impl Waiting {
    pub fn is_empty(&self) -> bool {
        self.nested.is_empty() && self.ordered.is_empty() && self.halves.is_empty()
    }
}

/// See the module's text.
pub struct Orderer {
    hold_ns: u64,
    /// Calls whose enclosing call has not returned, by thread.
    nested: Map<u32, Vec<(u64, TracedCall)>>,
    /// Reports whose probe has not followed, by thread.
    halves: Map<u32, (u64, Told)>,
    /// Events whose turn it was when they came: with one thread at work, nearly all.
    ready: VecDeque<Ordered>,
    /// Events whose turn has not come, with their time of arrival.
    turns: BTreeMap<u64, (u64, Ordered)>,
    next_seq: Option<u64>,
}

impl Orderer {
    /// `next_seq`: the number of the first event to come, if it is known.
    pub fn new(hold: std::time::Duration, next_seq: Option<u64>) -> Self {
        Self {
            hold_ns: hold.as_nanos() as u64,
            nested: Map::default(),
            halves: Map::default(),
            ready: VecDeque::new(),
            turns: BTreeMap::new(),
            next_seq,
        }
    }

    /// Goes on with what waited when the journal was written.
    pub fn restore(&mut self, waiting: Waiting, now_ns: u64) {
        self.next_seq = waiting.next_seq.or(self.next_seq);
        for call in waiting.nested {
            self.nested
                .entry(call.tid)
                .or_default()
                .push((now_ns, call));
        }
        for told in waiting.halves {
            self.halves.insert(told.tid, (now_ns, told));
        }
        for ordered in waiting.ordered {
            self.turns.insert(ordered.event.seq(), (now_ns, ordered));
        }
    }

    /// Whether nothing waits.
    pub fn is_idle(&self) -> bool {
        self.nested.values().all(Vec::is_empty)
            && self.halves.is_empty()
            && self.ready.is_empty()
            && self.turns.is_empty()
    }

    /// What waits now.
    pub fn waiting(&self) -> Waiting {
        Waiting {
            next_seq: self.next_seq,
            nested: self
                .nested
                .values()
                .flatten()
                .map(|(_, call)| call.clone())
                .collect(),
            ordered: self
                .ready
                .iter()
                .chain(self.turns.values().map(|(_, ordered)| ordered))
                .cloned()
                .collect(),
            halves: self.halves.values().map(|(_, told)| told.clone()).collect(),
        }
    }

    /// Whether an event of that process waits.
    pub fn concerns(&self, pid: u32) -> bool {
        let nested = self
            .nested
            .values()
            .flatten()
            .any(|(_, call)| call.tgid == pid);
        nested
            || self.halves.values().any(|(_, told)| told.tgid == pid)
            || self.ready.iter().any(|ordered| ordered.event.tgid() == pid)
            || self
                .turns
                .values()
                .any(|(_, ordered)| ordered.event.tgid() == pid)
    }

    /// Takes an event that arrived at `now_ns`.
    pub fn push(&mut self, event: Event, now_ns: u64) {
        if let Event::Framework(told) = event {
            self.push_told(told, now_ns);
            return;
        }
        if !self.halves.is_empty() {
            self.release_half_before(&event);
        }
        let call = match event {
            Event::Call(call) if call.parent_enter_ns.is_some() => {
                self.nested
                    .entry(call.tid)
                    .or_default()
                    .push((now_ns, call));
                return;
            }
            Event::Call(call) => call,
            other => {
                self.insert(Ordered::plain(other), now_ns);
                return;
            }
        };
        let inner = if self.nested.is_empty() {
            Vec::new()
        } else {
            self.nested.remove(&call.tid).unwrap_or_default()
        };
        if inner.is_empty() {
            self.insert(Ordered::plain(Event::Call(call)), now_ns);
            return;
        }
        for ordered in assemble(call, inner.into_iter().map(|(_, call)| call).collect()) {
            self.insert(ordered, now_ns);
        }
    }

    /// Puts the two halves of an allocator's event together.
    fn push_told(&mut self, mut told: Told, now_ns: u64) {
        let before = self.halves.remove(&told.tid);
        match before {
            Some((arrived, mut half)) if told.what == What::Rest && half.seq == told.seq => {
                half.complete(&told);
                self.insert(Ordered::plain(Event::Framework(half)), arrived);
                return;
            }
            Some((arrived, half)) => self.insert(Ordered::plain(Event::Framework(half)), arrived),
            None => {}
        }
        if told.is_half() {
            let tid = told.tid;
            self.halves.insert(tid, (now_ns, told));
            return;
        }
        // Its report was lost, or not waited for any longer.
        told.announced |= told.what == What::Rest;
        self.insert(Ordered::plain(Event::Framework(told)), now_ns);
    }

    /// A thread that does something else has no more to say about its last block.
    fn release_half_before(&mut self, event: &Event) {
        let tids: Vec<u32> = match event {
            Event::Call(call) => vec![call.tid],
            Event::Framework(_) => Vec::new(),
            Event::Exec { tgid, .. } | Event::Exit { tgid, .. } => self
                .halves
                .iter()
                .filter(|(_, (_, told))| told.tgid == *tgid)
                .map(|(tid, _)| *tid)
                .collect(),
        };
        for tid in tids {
            if let Some((arrived, told)) = self.halves.remove(&tid) {
                self.insert(Ordered::plain(Event::Framework(told)), arrived);
            }
        }
    }

    /// Reports that no probe followed: the program allocates without telling what was asked for.
    fn give_up_halves(&mut self, overdue: impl Fn(u64) -> bool) {
        let late: Vec<u32> = self
            .halves
            .iter()
            .filter(|(_, (arrived, _))| overdue(*arrived))
            .map(|(tid, _)| *tid)
            .collect();
        for tid in late {
            if let Some((arrived, told)) = self.halves.remove(&tid) {
                self.insert(Ordered::plain(Event::Framework(told)), arrived);
            }
        }
    }

    fn insert(&mut self, ordered: Ordered, now_ns: u64) {
        let seq = ordered.event.seq();
        if self.turns.is_empty() && self.next_seq == Some(seq) {
            self.next_seq = Some(seq + 1);
            self.ready.push_back(ordered);
            return;
        }
        self.turns.insert(seq, (now_ns, ordered));
    }

    /// The next event whose turn has come, or whose wait has been long enough. With `u64::MAX`
    /// also what else waits: nothing more will come.
    pub fn next(&mut self, now_ns: u64) -> Option<Ordered> {
        if let Some(ordered) = self.ready.pop_front() {
            return Some(ordered);
        }
        let hold_ns = self.hold_ns;
        let overdue = |arrived: u64| now_ns.saturating_sub(arrived) >= hold_ns;
        if !self.nested.is_empty() {
            self.give_up_nested(|arrived| overdue(arrived.saturating_add(hold_ns)));
        }
        if !self.halves.is_empty() {
            self.give_up_halves(overdue);
            if let Some(ordered) = self.ready.pop_front() {
                return Some(ordered);
            }
        }
        let entry = self.turns.first_entry()?;
        let seq = *entry.key();
        let in_turn = self.next_seq.is_some_and(|next| seq <= next);
        if !in_turn && !overdue(entry.get().0) {
            return None;
        }
        self.next_seq = Some(self.next_seq.unwrap_or(0).max(seq + 1));
        Some(entry.remove().1)
    }

    /// Nested calls whose enclosing call never came (its record was lost, its thread died).
    fn give_up_nested(&mut self, overdue: impl Fn(u64) -> bool) {
        let abandoned: Vec<u32> = self
            .nested
            .iter()
            .filter(|(_, calls)| calls.iter().any(|(at, _)| overdue(*at)))
            .map(|(tid, _)| *tid)
            .collect();
        for tid in abandoned {
            for (arrived, call) in self.nested.remove(&tid).unwrap_or_default() {
                self.turns
                    .insert(call.seq, (arrived, Ordered::plain(Event::Call(call))));
            }
        }
    }
}

impl Ordered {
    fn plain(event: Event) -> Self {
        let (stack, context) = match &event {
            Event::Call(call) => (call.stack, call.context),
            Event::Framework(told) => (told.stack, None),
            _ => (Stack::default(), None),
        };
        Self {
            event,
            parent_seq: None,
            stack,
            nested_success: false,
            context,
        }
    }
}

/// Joins an outermost call with the calls made inside it.
fn assemble(root: TracedCall, inner: Vec<TracedCall>) -> Vec<Ordered> {
    // Calls of an earlier chain of this thread, whose outermost call never came.
    let (inner, orphans): (Vec<_>, Vec<_>) = inner
        .into_iter()
        .partition(|call| call.enter_ns >= root.enter_ns);
    let seq_of = |enter_ns: u64| {
        std::iter::once(&root)
            .chain(&inner)
            .find(|call| call.enter_ns == enter_ns)
            .map(|call| call.seq)
    };
    let context = inner
        .iter()
        .rev()
        .find_map(|call| call.context)
        .or(root.context);
    let mut chain = Vec::with_capacity(1 + inner.len() + orphans.len());
    for call in std::iter::once(&root).chain(&inner) {
        chain.push(Ordered {
            parent_seq: call.parent_enter_ns.and_then(seq_of),
            stack: root.stack,
            nested_success: inner.iter().any(|other| does_the_same(other, call)),
            context: call.context.or(context),
            event: Event::Call(call.clone()),
        });
    }
    chain.extend(
        orphans
            .into_iter()
            .map(|call| Ordered::plain(Event::Call(call))),
    );
    chain
}

/// Whether a successful call made inside `outer` is what `outer` did: the driver's call under
/// the runtime's, or one name of a function that calls another. A callback may also allocate
/// something of its own inside a call; that has another address.
fn does_the_same(inner: &TracedCall, outer: &TracedCall) -> bool {
    let (is, of) = (inner.hook(), outer.hook());
    let down = of.layer == Layer::Runtime && is.layer == Layer::Driver;
    let address = |call: &TracedCall| call.out.unwrap_or(call.args[0]);
    inner.parent_enter_ns == Some(outer.enter_ns)
        && inner.result == 0
        && std::mem::discriminant(&is.effect) == std::mem::discriminant(&of.effect)
        && (down || address(inner) == address(outer))
}

#[cfg(test)]
mod tests {
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
}
