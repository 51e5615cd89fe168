//! A recorded trace once more, under other settings: would the failures have been avoided, and
//! what would have been reserved?
//!
//! Blocks are followed by the address that the trace gives them. The program's requests, frees
//! and completions are what is rerun; what the recorded allocator did with the driver is not, since
//! that is what the settings change. Two things have to be concluded from it:
//! - segments that were given back without a new one following were the program's
//!   `empty_cache()`, and are rerun as that. Where a new one, or a failure, follows, the allocator
//!   may have flushed by itself: it is taken for that where the card was full (or its size is not
//!   known, which is counted), else for the program's;
//! - a failure is tried again at its place. If it succeeds now, the block is given back at once:
//!   what the program would have done with it nobody knows.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::{BlockId, Card, Failure, Request, Simulator, Stats};
use crate::map::{AddressMap, MapMeasures, MapProblem, Measures};
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
        let top = self.events.iter().map(|event| match event.action {
            Action::Oom { .. } | Action::Snapshot => 0,
            _ => event.address.saturating_add(event.bytes),
        });
        simulator.space.begin_above(top.max().unwrap_or(0));
        let mut run = Run {
            scenario: self,
            held: simulator.held().collect(),
            recorded_reserved: simulator.reserved(),
            simulator,
            ooms: Vec::new(),
            new_failures: 0,
            first_failures: Vec::new(),
            counts: RerunCounts::default(),
            releasing: false,
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
    ooms: Vec<OomOutcome>,
    new_failures: u64,
    first_failures: Vec<(usize, Failure)>,
    counts: RerunCounts,
    /// Inside a run of segments given back.
    releasing: bool,
}

impl Run<'_> {
    fn apply(&mut self, index: usize, event: &TraceEvent) {
        match event.action {
            Action::Alloc => {
                let request = Request {
                    tag: event.tag,
                    ..Request::new(event.bytes, event.stream)
                };
                if let Some(lost) = self.held.remove(&event.address) {
                    self.counts.missing_frees += 1;
                    self.give_back(lost);
                }
                self.counts.allocs += 1;
                match self.simulator.alloc(request) {
                    Ok(block) => {
                        self.held.insert(event.address, block);
                    }
                    Err(failure) => self.note_failure(index, failure),
                }
                self.simulator.space.forget_suggestions();
            }
            Action::FreeRequested => {
                self.counts.frees += 1;
                let block = self.held.get(&event.address);
                let freed = block.is_some_and(|block| {
                    let requested = self.simulator.free_requested(*block);
                    requested.is_ok()
                });
                self.counts.unmatched_frees += u64::from(!freed);
            }
            Action::FreeCompleted => {
                // A flush of the rerun may have completed it before.
                if let Some(block) = self.held.remove(&event.address) {
                    let _ = self.simulator.free_completed(block);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                self.recorded_reserved = self.recorded_reserved.saturating_add(event.bytes);
                self.simulator.space.suggest(event.address, event.bytes);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                if !self.releasing {
                    self.releasing = true;
                    self.conclude_release(index);
                }
                self.recorded_reserved = self.recorded_reserved.saturating_sub(event.bytes);
                return;
            }
            Action::Oom { .. } => self.retry(index, event),
            Action::Snapshot => {}
        }
        self.releasing = false;
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
        let outcome = self
            .simulator
            .alloc(Request::new(event.bytes, event.stream));
        self.simulator.space.forget_suggestions();
        self.ooms.push(OomOutcome {
            event: index,
            avoided: outcome.is_ok(),
            reserved: self.simulator.reserved(),
            driver_free: self.simulator.driver_free(),
        });
        if let Ok(block) = outcome {
            self.give_back(block);
        }
    }

    /// At the first of a run of segments given back: who gave them back?
    fn conclude_release(&mut self, first: usize) {
        let rest = &self.scenario.events[first..];
        let next = rest
            .iter()
            .filter(|event| event.device == self.scenario.device)
            .find(|event| {
                !matches!(
                    event.action,
                    Action::SegmentFree | Action::SegmentUnmap | Action::FreeCompleted
                )
            });
        let by_program = match next.map(|event| (event.action, event.bytes)) {
            Some((Action::Oom { .. }, _)) => Some(false),
            Some((Action::SegmentAlloc | Action::SegmentMap, bytes)) => {
                let card = self.scenario.card;
                card.capacity.map(|capacity| {
                    let wanted = self.recorded_reserved.saturating_add(bytes);
                    wanted.saturating_add(card.others) <= capacity
                })
            }
            _ => Some(true),
        };
        match by_program {
            Some(true) => {
                self.counts.empty_caches += 1;
                self.simulator.empty_cache();
            }
            Some(false) => {}
            None => self.counts.unclear_releases += 1,
        }
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
