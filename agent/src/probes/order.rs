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
mod tests;
