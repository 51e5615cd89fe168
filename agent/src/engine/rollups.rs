//! Windows: what the agent saw and lost, and what each stack and device did.

use std::collections::HashMap;

use super::Engine;
use crate::host::clock;
use crate::host::gpu::Sample;
use crate::host::identity::StartTime;
use crate::ledger::Process;
use crate::ledger::rollup::Place;
use crate::probes::hooks::MemoryKind;
use crate::spool::rows::{DeviceWindowRow, StackWindowRow, WindowOf};

/// Every how many-th window tells also of what only lives, so that retention cannot orphan it.
const FULL_EVERY: u64 = 60;

impl Engine {
    /// What every process did since the last time, as rows.
    pub(super) fn roll_up_all(&mut self) {
        self.windows_ended += 1;
        let all = self.windows_ended.is_multiple_of(FULL_EVERY);
        let pids: Vec<u32> = self.ledger.processes().map(|process| process.pid).collect();
        for pid in pids {
            self.roll_up(pid, all);
        }
        self.sample_all();
        self.ledger.next_window();
        self.window.counts.rollup_start_ns = self.clock.now_ns();
    }

    /// The last word on a process that is about to leave the books.
    pub(super) fn roll_up_last(&mut self, pid: u32) {
        self.take_losses();
        self.roll_up(pid, false);
    }

    fn roll_up(&mut self, pid: u32, all: bool) {
        let end_ns = self.clock.now_ns();
        // A clock that was set back must not turn a window round.
        let start_ns = self.window.counts.rollup_start_ns.min(end_ns);
        let lossy = self.window.counts.is_lossy();
        let (devices, stacks) = self.with_desk(|ledger, desk| {
            let (mut devices, mut stacks) = (Vec::new(), Vec::new());
            let Some(process) = ledger.get(pid) else {
                return (devices, stacks);
            };
            let window = process.rollup.window(all);
            let of = |place: Place| WindowOf {
                start_ns,
                end_ns,
                process_id: process.process_id,
                pid,
                gpu_uuid: (desk.card)(process, place.device),
                place,
                lossy,
            };
            devices.extend(window.devices.into_iter().map(|(place, device)| {
                let is_pool = place.kind == MemoryKind::Pool;
                let reserved = is_pool.then(|| ledger.pool_reserved_bytes(pid, place.device));
                DeviceWindowRow {
                    of: of(place),
                    device,
                    pool_reserved_bytes: reserved.flatten().map(|bytes| bytes as i64),
                }
            }));
            if !window.stacks.is_empty() {
                let oldest = oldest_by_stack(process);
                let now_ns = clock::monotonic_ns();
                stacks.extend(window.stacks.into_iter().map(|(place, stack_id, sums)| {
                    let born_ns = oldest.get(&(place, stack_id));
                    StackWindowRow {
                        of: of(place),
                        stack_id,
                        sums,
                        oldest_live_age_ns: born_ns.map(|ns| now_ns.saturating_sub(*ns) as i64),
                    }
                }));
            }
            (devices, stacks)
        });
        self.rows.device_windows.extend(devices);
        self.rows.stack_windows.extend(stacks);
    }

    /// What processes older than the probes held before anybody looked.
    pub(super) fn take_baselines(&mut self, sample: &Sample) {
        for (pid, used) in &sample.processes {
            let is_older = self
                .ledger
                .get(*pid)
                .is_some_and(|process| self.is_older_than_probes(process.start));
            if let (true, Some(used)) = (is_older, used) {
                let uuid = std::sync::Arc::from(sample.card.uuid.as_str());
                let before = self.rows.alloc_events.len();
                self.with_desk(|ledger, desk| {
                    ledger.baseline(*pid, &uuid, *used, sample.at_ns, desk);
                });
                self.told_of_rows(before, true);
            }
        }
    }

    fn is_older_than_probes(&self, start: StartTime) -> bool {
        start < StartTime::from_boottime_ns(self.channel.generation)
    }
}

/// When the oldest allocation of each stack that lives was made.
fn oldest_by_stack(process: &Process) -> HashMap<(Place, Option<i64>), u64> {
    let mut oldest = HashMap::new();
    let mut note = |place: Place, stack: Option<i64>, effect_ns: u64| {
        let born_ns = oldest.entry((place, stack)).or_insert(u64::MAX);
        *born_ns = effect_ns.min(*born_ns);
    };
    for allocation in process.live.values() {
        note(
            allocation.place(),
            allocation.stack_id(),
            allocation.effect_ns,
        );
    }
    let blocks = process.heap.iter().flat_map(|heap| heap.blocks().values());
    for block in blocks {
        note(block.place(), block.stack_id(), block.effect_ns);
    }
    oldest
}
