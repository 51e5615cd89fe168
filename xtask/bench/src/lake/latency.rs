//! How long acknowledgements take: a histogram that costs an atomic addition.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets within one doubling: a figure is at most 1/16 above what was measured.
const STEPS: u64 = 16;
const BUCKETS: usize = 16 * 40;

/// Counts of durations, in microseconds.
#[derive(Debug)]
pub struct Latencies(Vec<AtomicU64>);

impl Default for Latencies {
    fn default() -> Self {
        Latencies((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Latencies {
    /// One more.
    pub fn add(&self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.0[bucket(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets all.
    pub fn clear(&self) {
        self.0
            .iter()
            .for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// The duration that `share` of all do not exceed, in milliseconds; `None` if there is none.
    pub fn quantile_ms(&self, share: f64) -> Option<f64> {
        let counts: Vec<u64> = self
            .0
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        let total: u64 = counts.iter().sum();
        let wanted = (total as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let found = counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        Some(upper_us(found) as f64 / 1e3)
    }
}

/// Values below 16 have a bucket each; from there each doubling has 16.
fn bucket(us: u64) -> usize {
    if us < STEPS {
        return us as usize;
    }
    let doubling = u64::from(us.ilog2()) - 4;
    let step = (us >> doubling) - STEPS;
    ((doubling + 1) * STEPS + step).min(BUCKETS as u64 - 1) as usize
}

/// The largest value of a bucket.
fn upper_us(bucket: usize) -> u64 {
    let (doubling, step) = (bucket as u64 / STEPS, bucket as u64 % STEPS);
    match doubling {
        0 => step,
        _ => ((STEPS + step + 1) << (doubling - 1)) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lies_in_its_bucket_and_the_bucket_is_narrow() {
        let mut below = None;
        for bucket_index in 0..BUCKETS - 1 {
            let upper = upper_us(bucket_index);
            assert_eq!(bucket(upper), bucket_index);
            assert_eq!(bucket(upper + 1), bucket_index + 1);
            let lower = below.map_or(0, |below: u64| below + 1);
            assert!(upper - lower <= lower / 16, "{lower} to {upper}");
            below = Some(upper);
        }
    }

    #[test]
    fn quantiles_of_known_values() {
        let latencies = Latencies::default();
        assert_eq!(latencies.quantile_ms(0.99), None);
        for ms in 1..=100 {
            latencies.add(Duration::from_millis(ms));
        }
        for (share, ms) in [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0)] {
            let found = latencies.quantile_ms(share).unwrap();
            assert!(found >= ms && found <= ms * 17.0 / 16.0, "{share}: {found}");
        }
        latencies.clear();
        assert_eq!(latencies.quantile_ms(0.5), None);
    }
}
