//! What the detectors read: sums over slots (a third of a block), put in order and filled.
//!
//! Invariants:
//! - a slot without a row of a stack is one in which the stack did nothing: its bytes stay;
//! - the last slot of a recording is left out, for it is seldom whole;
//! - blocks begin after the warm-up and are whole; requests and bytes are in step.

use crate::settings::{SLOTS_PER_BLOCK, Settings};

/// What a serving engine said of its load in one slot.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LoadSlot {
    /// Number of the slot: its start divided by [`Settings::slot_ns`].
    pub slot: i64,
    /// Mean of the requests being served.
    pub running: f64,
    /// Most of them at once.
    pub running_peak: f64,
    /// Mean of the KV pool's use, in any unit that stays the same; 0 where it is not known.
    pub kv: f64,
    /// Most of it.
    pub kv_peak: f64,
    /// Requests completed in the slot.
    pub completed: f64,
}

/// What one stack held in one slot.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StackSlot {
    /// Number of the slot: its start divided by [`Settings::slot_ns`].
    pub slot: i64,
    /// Live bytes at its end.
    pub live_bytes: i64,
    /// Mean of the live bytes over its time.
    pub mean_bytes: f64,
    /// Bytes freed in it.
    pub freed_bytes: i64,
    /// Live allocations at its end.
    pub live_count: i64,
    /// Age of the oldest that lived at the last row of the slot, nanoseconds.
    pub oldest_age_ns: Option<i64>,
    /// Live bytes at the last moment of the slot when nothing was being served.
    pub quiet_bytes: Option<i64>,
}

/// One process lifetime.
#[derive(Debug, Clone)]
pub struct Process<K> {
    /// Load, in any order; empty without an engine's figures.
    pub loads: Vec<LoadSlot>,
    /// Slots in which an engine was at rest (nothing running or waiting) for a minute or more.
    pub quiet_slots: Vec<i64>,
    /// Stacks with their slots in any order.
    pub stacks: Vec<(K, Vec<StackSlot>)>,
}

impl<K> Default for Process<K> {
    fn default() -> Self {
        Process {
            loads: Vec::new(),
            quiet_slots: Vec::new(),
            stacks: Vec::new(),
        }
    }
}

/// The time that a process's blocks lie in.
#[derive(Debug, Clone)]
pub struct Span {
    /// First slot of the process.
    pub start: i64,
    /// Slots from `start` to the last whole one.
    pub slots: usize,
    /// Slots before the first block.
    pub skipped: usize,
    /// Whole blocks.
    pub blocks: usize,
    /// Whether anything is known of the load.
    pub has_load: bool,
}

const PER_BLOCK: usize = SLOTS_PER_BLOCK as usize;

impl Span {
    /// The span of a process; `None` if it has no whole slot.
    pub fn of<K>(settings: &Settings, process: &Process<K>) -> Option<Span> {
        let bytes = || process.stacks.iter().flat_map(|(_, slots)| slots);
        let start = bytes().map(|s| s.slot).min()?;
        let last_bytes = bytes().map(|s| s.slot).max()?;
        // While a stack lives it has a row in every 60th window at least (of 60 s): load that goes
        // on for longer than that is another process's.
        let hour = (3_600_000_000_000 / settings.slot_ns()).max(1);
        let is_gone = process.stacks.iter().all(|(_, slots)| {
            let newest = slots.iter().max_by_key(|s| s.slot);
            newest.is_none_or(|s| s.live_bytes == 0)
        });
        let last_load = process.loads.iter().map(|l| l.slot).max();
        let last = match last_load {
            Some(load) if !is_gone => last_bytes.max(load.min(last_bytes + hour)),
            _ => last_bytes,
        };
        let slots = usize::try_from(last - start).ok()?;
        let skipped = usize::try_from(settings.warmup_slots()).ok()?.min(slots);
        (slots > 0).then(|| Span {
            start,
            slots,
            skipped,
            blocks: (slots - skipped) / PER_BLOCK,
            has_load: last_load.is_some(),
        })
    }

    /// First slot (from the process's start) of a block.
    pub fn first_slot(&self, block: usize) -> usize {
        self.skipped + block * PER_BLOCK
    }

    /// Number of the slot at which a block ends.
    pub fn end_of(&self, block: usize) -> i64 {
        self.start + self.first_slot(block + 1) as i64
    }

    fn index(&self, slot: i64) -> Option<usize> {
        usize::try_from(slot - self.start)
            .ok()
            .filter(|i| *i < self.slots)
    }
}

/// Load by slot and by block.
#[derive(Debug, Clone, Default)]
pub struct Load {
    /// Mean running requests by block.
    pub running: Vec<f64>,
    /// Mean use of the KV pool by block.
    pub kv: Vec<f64>,
    /// Most requests at once so far, by block.
    pub running_high: Vec<f64>,
    /// Most use of the KV pool so far, by block.
    pub kv_high: Vec<f64>,
    /// Requests completed since the process's start: at the start of each slot, and at the end of
    /// the last one.
    pub completed: Vec<f64>,
    /// Mean of the same over each block.
    pub completed_mean: Vec<f64>,
    /// Mean running requests by slot.
    pub slot_running: Vec<f64>,
    /// Slots without figures.
    pub missing_slots: usize,
}

impl Load {
    /// Puts the load of a process in order. Without figures everything is 0.
    pub fn of(span: &Span, loads: &[LoadSlot]) -> Load {
        let mut by_slot: Vec<Option<LoadSlot>> = vec![None; span.slots];
        for load in loads {
            if let Some(index) = span.index(load.slot) {
                by_slot[index] = Some(*load);
            }
        }
        let missing_slots = by_slot.iter().filter(|slot| slot.is_none()).count();
        let mut last = LoadSlot::default();
        let mut completed = vec![0.0];
        let mut filled = Vec::with_capacity(span.slots);
        let (mut total, mut running_high, mut kv_high) = (0.0, 0.0_f64, 0.0_f64);
        for slot in by_slot {
            // A gap keeps the level, and completes nothing until figures come again.
            last = slot.unwrap_or(LoadSlot {
                completed: 0.0,
                ..last
            });
            total += last.completed.max(0.0);
            completed.push(total);
            running_high = running_high.max(last.running_peak.max(last.running));
            kv_high = kv_high.max(last.kv_peak.max(last.kv));
            filled.push((last, running_high, kv_high));
        }
        let mut load = Load {
            completed,
            slot_running: filled.iter().map(|(slot, ..)| slot.running).collect(),
            missing_slots,
            ..Load::default()
        };
        for block in 0..span.blocks {
            let first = span.first_slot(block);
            let mean = |value: &dyn Fn(usize) -> f64| {
                (first..first + PER_BLOCK).map(value).sum::<f64>() / PER_BLOCK as f64
            };
            load.running.push(mean(&|s| filled[s].0.running));
            load.kv.push(mean(&|s| filled[s].0.kv));
            load.running_high.push(mean(&|s| filled[s].1));
            load.kv_high.push(mean(&|s| filled[s].2));
            let middle = mean(&|s| load.at(s as f64 + 0.5));
            load.completed_mean.push(middle);
        }
        load
    }

    /// Requests completed up to a time in slots since the start; linear within a slot.
    pub fn at(&self, slots: f64) -> f64 {
        let last = self.completed.len() - 1;
        let slots = slots.clamp(0.0, last as f64);
        let index = (slots as usize).min(last.saturating_sub(1));
        let next = self.completed[(index + 1).min(last)];
        let share = slots - index as f64;
        self.completed[index] + (next - self.completed[index]) * share
    }
}

/// One stack by block.
#[derive(Debug, Clone, Default)]
pub struct Bytes {
    /// Mean live bytes.
    pub mean: Vec<f64>,
    /// Median of the means of the block's slots.
    pub median: Vec<f64>,
    /// By slot since the process's start: live bytes at its end.
    pub last: Vec<f64>,
    /// By slot: bytes freed.
    pub freed: Vec<f64>,
    /// By slot: when the oldest that lived at its end was allocated, in slots since the process's
    /// start; `None` where it is not known.
    pub oldest_born: Vec<Option<f64>>,
    /// Live bytes when the engine was at rest: slot since the start, bytes.
    pub quiet: Vec<(usize, f64)>,
    /// Live allocations at the end.
    pub live_count: i64,
}

impl Bytes {
    /// Puts a stack's slots in order and fills the gaps.
    pub fn of(settings: &Settings, span: &Span, slots: &[StackSlot], quiet: &[i64]) -> Bytes {
        let mut by_slot: Vec<Option<&StackSlot>> = vec![None; span.slots];
        for slot in slots {
            if let Some(index) = span.index(slot.slot) {
                by_slot[index] = Some(slot);
            }
        }
        let mut bytes = Bytes::default();
        let mut means = Vec::with_capacity(span.slots);
        let (mut live, mut born) = (0.0, None);
        let slot_ns = settings.slot_ns() as f64;
        for (index, slot) in by_slot.iter().enumerate() {
            match slot {
                Some(slot) => {
                    means.push(slot.mean_bytes);
                    live = slot.live_bytes as f64;
                    born = slot
                        .oldest_age_ns
                        .map(|age| (index + 1) as f64 - age as f64 / slot_ns);
                    bytes.live_count = slot.live_count;
                    bytes.freed.push(slot.freed_bytes as f64);
                }
                None => {
                    means.push(live);
                    bytes.freed.push(0.0);
                }
            }
            bytes.last.push(live);
            bytes.oldest_born.push(born);
        }
        for block in 0..span.blocks {
            let first = span.first_slot(block);
            let mut of_block: [f64; PER_BLOCK] = [0.0; PER_BLOCK];
            of_block.copy_from_slice(&means[first..first + PER_BLOCK]);
            bytes
                .mean
                .push(of_block.iter().sum::<f64>() / PER_BLOCK as f64);
            of_block.sort_unstable_by(f64::total_cmp);
            bytes.median.push(of_block[PER_BLOCK / 2]);
        }
        for index in quiet.iter().filter_map(|slot| span.index(*slot)) {
            let here = by_slot[index].and_then(|slot| slot.quiet_bytes);
            let before = if index == 0 {
                0.0
            } else {
                bytes.last[index - 1]
            };
            // Without a row the stack did nothing in the slot: it held what it held before.
            let held = match (here, by_slot[index]) {
                (Some(held), _) => held as f64,
                (None, None) => before,
                (None, Some(_)) => continue,
            };
            bytes.quiet.push((index, held));
        }
        bytes.quiet.sort_unstable_by_key(|(index, _)| *index);
        bytes
    }

    /// Bytes at the end of `slot` that are older than `slots`: at least what lived then and has
    /// not been freed since.
    pub fn survivors(&self, slot: usize, slots: usize) -> f64 {
        let Some(before) = slot.checked_sub(slots) else {
            return 0.0;
        };
        let freed: f64 = self.freed[before + 1..=slot].iter().sum();
        (self.last[before] - freed).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(slot: i64, live: i64, mean: f64) -> StackSlot {
        StackSlot {
            slot,
            live_bytes: live,
            mean_bytes: mean,
            ..StackSlot::default()
        }
    }

    /// Slots 100..=112; three of warm-up, blocks 103..106, 106..109 and 109..112; 112 is the last
    /// one and left out.
    #[test]
    fn gaps_keep_what_was_there() {
        let settings = Settings::default();
        let load = |slot, completed| LoadSlot {
            slot,
            completed,
            running: 2.0,
            running_peak: 3.0,
            ..LoadSlot::default()
        };
        let process = Process {
            loads: (100..=112).map(|s| load(s, 10.0)).collect(),
            quiet_slots: vec![105, 107],
            stacks: vec![(
                (),
                vec![
                    slot(100, 60, 30.0),
                    slot(104, 90, 66.0),
                    slot(112, 90, 90.0),
                ],
            )],
        };
        let span = Span::of(&settings, &process).unwrap();
        assert_eq!((span.slots, span.skipped, span.blocks), (12, 3, 3));
        let slots = &process.stacks[0].1;
        let bytes = Bytes::of(&settings, &span, slots, &process.quiet_slots);
        assert_eq!(bytes.mean, [(60.0 + 66.0 + 90.0) / 3.0, 90.0, 90.0]);
        assert_eq!(bytes.median, [66.0, 90.0, 90.0]);
        assert_eq!(bytes.quiet, [(5, 90.0), (7, 90.0)]);
        assert_eq!(bytes.survivors(11, 6), 90.0);
        let load = Load::of(&span, &process.loads);
        assert_eq!(load.completed.len(), 13);
        // Block 0 is slots 3, 4, 5: middles at 35, 45, 55 requests.
        assert_eq!(load.completed_mean, [45.0, 75.0, 105.0]);
        assert_eq!(load.at(4.25), 42.5);
        assert_eq!((load.running[2], load.running_high[2]), (2.0, 3.0));
        assert_eq!(load.missing_slots, 0);
    }

    #[test]
    fn a_process_without_a_whole_slot_has_no_span() {
        let process = Process {
            stacks: vec![((), vec![slot(5, 1, 1.0)])],
            ..Process::default()
        };
        assert!(Span::of(&Settings::default(), &process).is_none());
    }
}
