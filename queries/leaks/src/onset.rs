//! When growth began: the block at which a hinge fits a stack's whole epoch best.

use crate::design::Basis;
use crate::series::{Bytes, Load, Span};
use crate::stats::dot;

/// Blocks looked at, the newest: a fit per block costs the square of it.
const LONGEST: usize = 480;

/// The block after which the stack grows with the requests (or with time, if nothing is known of
/// them); `None` if there are too few blocks or it does not grow.
pub fn find(span: &Span, load: &Load, bytes: &Bytes) -> Option<usize> {
    let first = span.blocks.saturating_sub(LONGEST);
    let n = span.blocks - first;
    if n < 6 {
        return None;
    }
    let clock: Vec<f64> = if load.completed_mean.last() > load.completed_mean.first() {
        load.completed_mean[first..].to_vec()
    } else {
        (0..n).map(|block| block as f64).collect()
    };
    let ones = vec![1.0; n];
    let basis = Basis::of([&ones, &load.running[first..], &load.kv[first..]]);
    let left = basis.free(&bytes.mean[first..]);
    let mut best = None;
    let mut most = 0.0;
    for at in 0..n - 3 {
        let hinge: Vec<f64> = clock.iter().map(|c| (c - clock[at]).max(0.0)).collect();
        let hinge = basis.free(&hinge);
        let (with, own) = (dot(&left, &hinge), dot(&hinge, &hinge));
        // The share of squares that the hinge takes; only growth counts.
        let taken = with * with / own;
        if with > 0.0 && own > 0.0 && taken > most {
            (best, most) = (Some(first + at), taken);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::{LoadSlot, Process, StackSlot};
    use crate::settings::Settings;

    /// 1000 bytes a request from slot 33 (block 10) on, 40 slots, 10 requests each.
    #[test]
    fn finds_the_block() {
        let settings = Settings::default();
        let process = Process {
            loads: (0..80)
                .map(|slot| LoadSlot {
                    slot,
                    completed: 10.0,
                    running: 1.0 + (slot % 7) as f64,
                    ..LoadSlot::default()
                })
                .collect(),
            stacks: vec![(
                (),
                (0..80)
                    .map(|slot| {
                        let leaked = 10_000 * (slot - 32).max(0);
                        StackSlot {
                            slot,
                            live_bytes: leaked,
                            mean_bytes: leaked as f64 - if slot > 32 { 5_000.0 } else { 0.0 },
                            ..StackSlot::default()
                        }
                    })
                    .collect(),
            )],
            ..Process::default()
        };
        let span = Span::of(&settings, &process).unwrap();
        let load = Load::of(&span, &process.loads);
        let bytes = Bytes::of(&settings, &span, &process.stacks[0].1, &[]);
        assert!(find(&span, &load, &bytes).unwrap().abs_diff(10) <= 1);
    }
}
