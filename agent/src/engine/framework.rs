//! Events of frameworks' allocators, and samples of what they hold: at each window's end, at an OOM,
//! and at a process's end.

use tracing::warn;

use super::Engine;
use crate::host::discovery::Filter;
use crate::ledger::framework::{Heap, Moment, Reason, Sampled};
use crate::probes::framework::{Told, What};
use crate::probes::order::Ordered;

/// Blocks of one process's map at most; a sample of more has totals and no map.
const BLOCKS: usize = 400_000;
/// The same of all maps that one window's end makes, since they wait in memory to be written.
const BLOCKS_PER_WINDOW: usize = 1_000_000;

impl Engine {
    pub(super) fn handle_told(&mut self, ordered: &Ordered, told: &Told) {
        let wanted = |filter: &mut Box<dyn Filter>| filter.wants(told.tgid);
        if !self.filter.as_mut().is_none_or(wanted) {
            return;
        }
        self.window.counts.usdt_events += 1;
        self.totals.events += 1;
        self.meet(told.tgid, told.at_ns);
        let before = self.rows.alloc_events.len();
        self.with_desk(|ledger, desk| ledger.framework(told, ordered.stack, desk));
        self.sample_oom(told, before);
        self.told_of_rows(before, false);
    }

    /// Every process's allocator, as it is at the end of a window. Its time is the one that the books
    /// have reached, which is less than the clock's while events wait.
    pub(super) fn sample_all(&mut self) {
        if self.flush_failed {
            // Rows wait already, and each try would add more.
            return;
        }
        let ts_ns = self.clock.from_monotonic(self.known_until_ns());
        let pids: Vec<u32> = self
            .ledger
            .processes()
            .filter(|process| process.heap.is_some())
            .map(|process| process.pid)
            .collect();
        let mut room = BLOCKS_PER_WINDOW;
        for pid in pids {
            let moment = Moment {
                ts_ns,
                reason: Reason::Window,
                oom: None,
                blocks: BLOCKS.min(room),
            };
            room -= self.sample(pid, moment).min(room);
        }
    }

    /// The last state of a process whose books are about to be closed.
    pub(super) fn sample_last(&mut self, pid: u32) {
        let is_new = |heap: &Heap| !heap.is_sampled;
        let process = self.ledger.get(pid);
        let Some(process) = process.filter(|p| p.heap.as_deref().is_some_and(is_new)) else {
            return;
        };
        let ts_ns = match process.exiting {
            Some((_, at_ns)) => self.clock.from_monotonic(at_ns),
            None => self.clock.now_ns(),
        };
        let moment = Moment {
            ts_ns,
            reason: Reason::End,
            oom: None,
            blocks: BLOCKS,
        };
        self.sample(pid, moment);
        self.ledger.sampled_last(pid);
    }

    /// If memory is out, what is in its way. `before`: the event's rows begin there.
    pub(super) fn sample_oom(&mut self, told: &Told, before: usize) {
        if told.what != What::Oom {
            return;
        }
        let row = self.rows.alloc_events[before..].last();
        let free = row.and_then(|row| row.device_free_bytes);
        let moment = Moment {
            ts_ns: self.clock.from_monotonic(told.at_ns),
            reason: Reason::Oom,
            oom: Some((told.device, told.bytes, free)),
            blocks: BLOCKS,
        };
        self.sample(told.tgid, moment);
    }

    /// Takes the rows of one sample; how many blocks its map has.
    fn sample(&mut self, pid: u32, moment: Moment) -> usize {
        let sampled =
            self.with_desk(|ledger, desk| ledger.sample(pid, moment, desk.clock, desk.card));
        let Sampled {
            samples,
            segments,
            blocks,
            is_cut,
        } = sampled;
        if is_cut {
            warn!(
                pid,
                "its allocator holds too many blocks for an address map: the sample has totals alone"
            );
        }
        self.rows.allocator_samples.extend(samples);
        self.rows.segments.extend(segments);
        blocks
    }
}
