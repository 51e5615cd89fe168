//! Slots from rows of `stack_windows` and `traffic`, in memory: what the SQL of the views does over
//! files, for whoever has rows at hand (simulations, tests).
//!
//! Live bytes are those at the end of a window, and hold from its start on: so the mean of a slot is
//! its last value less each change times the share of the slot before it.

use std::collections::BTreeMap;

use crate::series::{LoadSlot, StackSlot};
use crate::settings::Settings;

/// A row of `stack_windows`.
#[derive(Debug, Clone, Copy, Default)]
pub struct WindowRow {
    /// Start of the window, nanoseconds since 1970.
    pub start_ns: i64,
    /// Its end.
    pub end_ns: i64,
    /// Bytes that began in it.
    pub alloc_bytes: i64,
    /// Bytes that ended in it.
    pub free_bytes: i64,
    /// Live bytes at its end.
    pub live_bytes: i64,
    /// Live allocations at its end.
    pub live_count: i64,
    /// Age of the oldest at its end, nanoseconds.
    pub oldest_live_age_ns: Option<i64>,
}

/// A row of `traffic`.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrafficRow {
    /// When it was read, nanoseconds since 1970.
    pub ts_ns: i64,
    /// Requests being served.
    pub running: i64,
    /// Requests that wait.
    pub waiting: i64,
    /// Requests completed so far.
    pub completed_total: i64,
    /// Use of the KV pool.
    pub kv: f64,
}

/// What the samples of a load come to.
#[derive(Debug, Clone, Default)]
pub struct Gathered {
    /// By slot.
    pub loads: Vec<LoadSlot>,
    /// Slot and moment (nanoseconds since 1970) of the last sample in it that followed a minute or
    /// more at rest.
    pub quiet: BTreeMap<i64, i64>,
}

/// How long nothing must have been served for a moment at rest, nanoseconds: a window, so that
/// the roll-up at its start was made at rest too.
pub const REST_NS: i64 = 60_000_000_000;

/// Sums up samples in order of time.
pub fn loads(settings: &Settings, rows: &[TrafficRow]) -> Gathered {
    struct Sum {
        samples: f64,
        slot: LoadSlot,
    }
    let mut slots: BTreeMap<i64, Sum> = BTreeMap::new();
    let mut gathered = Gathered::default();
    let mut before: Option<TrafficRow> = None;
    let mut resting_since = None;
    for row in rows {
        let number = row.ts_ns.div_euclid(settings.slot_ns());
        let sum = slots.entry(number).or_insert(Sum {
            samples: 0.0,
            slot: LoadSlot {
                slot: number,
                ..LoadSlot::default()
            },
        });
        let completed = match before {
            None => 0,
            // A counter that fell began anew.
            Some(before) if row.completed_total < before.completed_total => row.completed_total,
            Some(before) => row.completed_total - before.completed_total,
        };
        sum.samples += 1.0;
        sum.slot.running += row.running as f64;
        sum.slot.kv += row.kv;
        sum.slot.completed += completed as f64;
        sum.slot.running_peak = sum.slot.running_peak.max(row.running as f64);
        sum.slot.kv_peak = sum.slot.kv_peak.max(row.kv);
        if row.running + row.waiting > 0 {
            resting_since = None;
        } else {
            let since = *resting_since.get_or_insert(row.ts_ns);
            if row.ts_ns - since >= REST_NS {
                gathered.quiet.insert(number, row.ts_ns);
            }
        }
        before = Some(*row);
    }
    gathered.loads = slots
        .into_values()
        .map(|sum| LoadSlot {
            running: sum.slot.running / sum.samples,
            kv: sum.slot.kv / sum.samples,
            ..sum.slot
        })
        .collect();
    gathered
}

/// Sums up one stack's windows, in order of time.
pub fn stack(
    settings: &Settings,
    quiet: &BTreeMap<i64, i64>,
    rows: &[WindowRow],
) -> Vec<StackSlot> {
    let slot_ns = settings.slot_ns();
    let mut slots: BTreeMap<i64, StackSlot> = BTreeMap::new();
    let mut moments: BTreeMap<i64, (f64, i64)> = BTreeMap::new();
    for row in rows {
        let number = row.start_ns.div_euclid(slot_ns);
        let net = row.alloc_bytes - row.free_bytes;
        let slot = slots.entry(number).or_insert(StackSlot {
            slot: number,
            ..StackSlot::default()
        });
        slot.live_bytes = row.live_bytes;
        slot.live_count = row.live_count;
        slot.oldest_age_ns = row.oldest_live_age_ns;
        slot.freed_bytes += row.free_bytes;
        let (moment, after_rest) = moments.entry(number).or_default();
        *moment += net as f64 * ((row.start_ns - number * slot_ns) / 1_000_000) as f64;
        if quiet.get(&number).is_some_and(|at| row.end_ns > *at) {
            *after_rest += net;
        }
    }
    let slot_ms = (slot_ns / 1_000_000) as f64;
    for (number, slot) in &mut slots {
        let (moment, after_rest) = moments[number];
        slot.mean_bytes = slot.live_bytes as f64 - moment / slot_ms;
        slot.quiet_bytes = quiet.get(number).map(|_| slot.live_bytes - after_rest);
    }
    slots.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slot of ten minutes: 100 bytes from minute 0, 50 more from minute 4, 30 less from minute 9:
    /// (4 x 100 + 5 x 150 + 1 x 120) / 10 = 127.
    #[test]
    fn the_mean_is_over_time() {
        const MINUTE: i64 = 60_000_000_000;
        let settings = Settings::default();
        let row = |minute: i64, alloc, free, live| WindowRow {
            start_ns: minute * MINUTE,
            end_ns: (minute + 1) * MINUTE,
            alloc_bytes: alloc,
            free_bytes: free,
            live_bytes: live,
            ..WindowRow::default()
        };
        let rows = [row(0, 100, 0, 100), row(4, 50, 0, 150), row(9, 0, 30, 120)];
        // At rest until minute 7: what lived then is 150.
        let quiet = BTreeMap::from([(0, 7 * MINUTE)]);
        let slots = stack(&settings, &quiet, &rows);
        assert_eq!(slots.len(), 1);
        assert_eq!(slots[0].mean_bytes, 127.0);
        assert_eq!(slots[0].quiet_bytes, Some(150));
        assert_eq!((slots[0].live_bytes, slots[0].freed_bytes), (120, 30));
    }

    #[test]
    fn counters_that_begin_anew_lose_nothing() {
        let settings = Settings::default();
        let row = |minute: i64, running, completed_total| TrafficRow {
            ts_ns: minute * 60_000_000_000,
            running,
            completed_total,
            ..TrafficRow::default()
        };
        let rows = [
            row(0, 2, 5),
            row(1, 0, 9),
            row(2, 0, 9),
            row(3, 4, 3),
            row(11, 2, 7),
        ];
        let gathered = loads(&settings, &rows);
        let completed: Vec<f64> = gathered.loads.iter().map(|l| l.completed).collect();
        assert_eq!(completed, [4.0 + 3.0, 4.0]);
        assert_eq!(gathered.loads[0].running, 1.5);
        assert_eq!(gathered.loads[0].running_peak, 4.0);
        assert_eq!(gathered.quiet, BTreeMap::from([(0, 120_000_000_000)]));
    }
}
