//! A recorded trace once more, under other settings: would the failures have been avoided, and
//! what would have been reserved?
//!
//! Blocks are followed by the address that the trace gives them. The program's requests, frees
//! and completions are what is rerun; what the recorded allocator did with the driver is not, since
//! that is what the settings change. Two things have to be concluded from it:
//! - segments that were given back without a new one following were the program's
//!   `empty_cache()`, and are rerun as that. Where a new one, or a failure, follows, the allocator
//!   may have given them back by itself: that is supposed where the card was full or the recorded
//!   settings make it do so, else it was the program. Where the card's size is not known nothing is
//!   rerun, which is counted;
//! - a flush waits for all pending blocks: where all of them complete before a request that the
//!   driver had no room for, they complete after that request, unless the rerun had to flush too;
//! - a failure is tried again at its place. If it succeeds now, the block is given back at once:
//!   what the program would have done with it nobody knows.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::{BlockId, Card, Failure, Request, Simulator, Stats};
use crate::map::{AddressMap, MapMeasures, MapProblem, Measures};
use crate::rules;
use crate::settings::Settings;
use crate::trace::{Action, TraceEvent};

/// Failures beyond the recorded ones that are told one by one.
const TOLD_FAILURES: usize = 64;

/// What to rerun, and under what.
#[derive(Debug, Clone)]
pub struct Scenario<'a> {
    pub device: i32,
    /// Events of other devices are passed over.
    pub events: &'a [TraceEvent],
    /// What lived before the first event; `None`: nothing.
    pub start: Option<&'a AddressMap>,
    /// Under what the trace was recorded: an allocator that collects garbage or limits splitting
    /// gives single segments back on its own.
    pub recorded: Settings,
    /// Under what it is rerun.
    pub settings: Settings,
    pub card: Card,
}

/// A failure of the recorded program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OomOutcome {
    /// The event's index.
    pub event: usize,
    pub avoided: bool,
    /// What the rerun's allocator held when it tried.
    pub reserved: u64,
    pub driver_free: Option<u64>,
}

/// What was met on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RerunCounts {
    pub allocs: u64,
    pub frees: u64,
    /// Frees of blocks whose allocation the trace does not have (nor the map before it), or
    /// whose allocation failed in the rerun.
    pub unmatched_frees: u64,
    /// Allocations at an address that was never given back: the free is missing, and done now.
    pub missing_frees: u64,
    /// `empty_cache()` calls concluded from segments given back.
    pub empty_caches: u64,
    /// Segments given back for a reason that could not be concluded: nothing was done.
    pub unclear_releases: u64,
}

/// The outcome.
#[derive(Debug, Clone)]
pub struct Rerun {
    /// Peaks are over all events.
    pub stats: Stats,
    /// At the end.
    pub map: AddressMap,
    pub measures: Measures,
    pub ooms: Vec<OomOutcome>,
    /// Requests that the recorded allocator served and this one did not.
    pub new_failures: u64,
    /// The first of them, with their event.
    pub first_failures: Vec<(usize, Failure)>,
    pub counts: RerunCounts,
}

impl Rerun {
    /// Every failure of the recorded program, and no other.
    pub fn avoids_all(&self) -> bool {
        self.new_failures == 0 && self.ooms.iter().all(|oom| oom.avoided)
    }
}

impl Scenario<'_> {
    /// Reruns the trace. Fails where `start` is no sound map.
    pub fn run(&self) -> Result<Rerun, MapProblem> {
        let empty = AddressMap::default();
        let start = self.start.unwrap_or(&empty);
        let mut simulator =
            Simulator::from_map(self.device, start, self.settings.clone(), self.card)?;
        for event in self.events {
            let end = event.address.saturating_add(event.bytes);
            simulator.space.begin_above(end);
        }
        let mut run = Run {
            scenario: self,
            held: simulator.held().collect(),
            recorded_reserved: simulator.reserved(),
            recorded_pending: simulator.pending as u64,
            simulator,
            ooms: Vec::new(),
            new_failures: 0,
            first_failures: Vec::new(),
            counts: RerunCounts::default(),
            cleanup: None,
            deferred: Vec::new(),
            just_freed: None,
        };
        for (index, event) in self.events.iter().enumerate() {
            if event.device == self.device {
                run.apply(index, event);
            }
        }
        Ok(run.finish())
    }
}

struct Run<'a> {
    scenario: &'a Scenario<'a>,
    simulator: Simulator,
    /// Recorded address to block.
    held: HashMap<u64, BlockId, FixedState>,
    recorded_reserved: u64,
    /// Blocks that were given back and not completed, in the recorded program.
    recorded_pending: u64,
    ooms: Vec<OomOutcome>,
    new_failures: u64,
    first_failures: Vec<(usize, Failure)>,
    counts: RerunCounts,
    /// The run of late completions and of segments given back that the next event belongs to, if
    /// it continues one.
    cleanup: Option<Cleanup>,
    /// Completions to make up for after the request under way.
    deferred: Vec<BlockId>,
    /// The block whose free was requested by the event before.
    just_freed: Option<u64>,
}

/// Why the recorded allocator completed frees or gave segments back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cleanup {
    /// A flush for a request that follows.
    Flush,
    /// For a request that follows, without waiting for streams.
    Release,
    /// `empty_cache()`, still to be called.
    EmptyCache,
    /// `empty_cache()`, called.
    EmptyCacheDone,
    /// Nobody knows.
    Unclear,
    /// Streams had finished: no segment is given back.
    Completions,
}

fn request_of(event: &TraceEvent) -> Request {
    Request {
        bytes: event.bytes,
        stream: event.stream,
        private: event.private,
        tag: event.tag,
    }
}

impl Run<'_> {
    fn apply(&mut self, index: usize, event: &TraceEvent) {
        let just_freed = self.just_freed.take();
        match event.action {
            Action::FreeCompleted if just_freed == Some(event.address) => {
                self.recorded_pending = self.recorded_pending.saturating_sub(1);
                self.complete(event.address);
            }
            Action::FreeCompleted | Action::SegmentFree | Action::SegmentUnmap => {
                self.clean_up(index, event);
                return;
            }
            Action::Alloc => self.alloc(index, event),
            Action::FreeRequested => {
                self.counts.frees += 1;
                let block = self.held.get(&event.address);
                let freed = block.is_some_and(|block| {
                    let requested = self.simulator.free_requested(*block);
                    requested.is_ok()
                });
                self.counts.unmatched_frees += u64::from(!freed);
                self.recorded_pending += 1;
                self.just_freed = Some(event.address);
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                self.recorded_reserved = self.recorded_reserved.saturating_add(event.bytes);
                self.simulator.space.suggest(event.address, event.bytes);
            }
            Action::Oom { .. } => self.retry(index, event),
            Action::Snapshot => {}
        }
        self.cleanup = None;
    }

    fn alloc(&mut self, index: usize, event: &TraceEvent) {
        if let Some(lost) = self.held.remove(&event.address) {
            self.counts.missing_frees += 1;
            self.give_back(lost);
        }
        self.counts.allocs += 1;
        let request = request_of(event);
        match self.simulator.alloc(request) {
            Ok(block) => {
                self.held.insert(event.address, block);
            }
            Err(failure) => self.note_failure(index, failure),
        }
        self.after_request();
    }

    fn after_request(&mut self) {
        self.simulator.space.forget_suggestions();
        for block in self.deferred.drain(..) {
            // A flush of the rerun may have completed it.
            let _ = self.simulator.free_completed(block);
        }
    }

    fn complete(&mut self, address: u64) {
        if let Some(block) = self.held.remove(&address) {
            // A flush of the rerun may have completed it.
            let _ = self.simulator.free_completed(block);
        }
    }

    /// A completion that comes late, or a segment given back.
    fn clean_up(&mut self, index: usize, event: &TraceEvent) {
        let cleanup = match self.cleanup {
            Some(cleanup) => cleanup,
            None => self.conclude(index),
        };
        self.cleanup = Some(cleanup);
        if event.action == Action::FreeCompleted {
            self.recorded_pending = self.recorded_pending.saturating_sub(1);
            if cleanup == Cleanup::Flush {
                self.deferred.extend(self.held.remove(&event.address));
            } else {
                self.complete(event.address);
            }
            return;
        }
        if cleanup == Cleanup::EmptyCache {
            self.simulator.empty_cache();
            self.cleanup = Some(Cleanup::EmptyCacheDone);
        }
        self.recorded_reserved = self.recorded_reserved.saturating_sub(event.bytes);
    }

    fn give_back(&mut self, block: BlockId) {
        // Pending ones only have to be completed.
        let _ = self.simulator.free_requested(block);
        let _ = self.simulator.free_completed(block);
    }

    fn note_failure(&mut self, index: usize, failure: Failure) {
        self.new_failures += 1;
        if self.first_failures.len() < TOLD_FAILURES {
            self.first_failures.push((index, failure));
        }
    }

    fn retry(&mut self, index: usize, event: &TraceEvent) {
        let outcome = self.simulator.alloc(request_of(event));
        self.ooms.push(OomOutcome {
            event: index,
            avoided: outcome.is_ok(),
            reserved: self.simulator.reserved(),
            driver_free: self.simulator.driver_free(),
        });
        if let Ok(block) = outcome {
            self.give_back(block);
        }
        self.after_request();
    }

    /// At the first of a run of completions and of segments given back: why?
    fn conclude(&mut self, first: usize) -> Cleanup {
        let rest = &self.scenario.events[first..];
        let mut gives_back = false;
        let mut completed = 0;
        let mut next = None;
        for event in rest.iter().filter(|e| e.device == self.scenario.device) {
            match event.action {
                Action::FreeCompleted => completed += 1,
                Action::SegmentFree | Action::SegmentUnmap => gives_back = true,
                _ => {
                    next = Some(event);
                    break;
                }
            }
        }
        let by_program = match next.map(|event| (event.action, event.bytes)) {
            Some((Action::Oom { .. }, _)) => Some(false),
            Some((Action::SegmentAlloc, bytes)) => self.there_was_room(bytes),
            Some((Action::SegmentMap, bytes)) => {
                let wanted = rest.iter().find(|event| event.action == Action::Alloc);
                self.there_was_room(self.mapped_for(wanted).max(bytes))
            }
            _ => Some(true),
        };
        match by_program {
            Some(false) if completed == self.recorded_pending => Cleanup::Flush,
            Some(false) => Cleanup::Release,
            _ if !gives_back => Cleanup::Completions,
            Some(true) => {
                self.counts.empty_caches += 1;
                Cleanup::EmptyCache
            }
            None => {
                self.counts.unclear_releases += 1;
                Cleanup::Unclear
            }
        }
    }

    /// What may have to be mapped for a request, at most: a flush can bring it to where less is
    /// lacking.
    fn mapped_for(&self, alloc: Option<&TraceEvent>) -> u64 {
        let recorded = &self.scenario.recorded;
        let rounded = alloc.map_or(0, |event| rules::round(event.bytes, recorded));
        let chunk = rules::chunk_bytes(rules::pool_size(rounded), recorded);
        rules::round_up(rounded, chunk)
    }

    /// Whether the recorded allocator could have taken `bytes` without giving anything back;
    /// `None` where nobody knows.
    fn there_was_room(&self, bytes: u64) -> Option<bool> {
        let recorded = &self.scenario.recorded;
        if recorded.garbage_collection_threshold.is_some() || recorded.max_split_size.is_some() {
            return Some(false);
        }
        let Card { capacity, others } = self.scenario.card;
        let capacity = capacity?;
        let share = recorded.memory_fraction.unwrap_or(1.0);
        let limit = (share * capacity as f64) as u64;
        let wanted = self.recorded_reserved.saturating_add(bytes);
        Some(wanted <= limit && wanted.saturating_add(others) <= capacity)
    }

    fn finish(self) -> Rerun {
        let map = self.simulator.map();
        let measures = MapMeasures::of(&map, self.simulator.settings());
        Rerun {
            stats: *self.simulator.stats(),
            measures: measures.device(self.scenario.device),
            map,
            ooms: self.ooms,
            new_failures: self.new_failures,
            first_failures: self.first_failures,
            counts: self.counts,
        }
    }
}
