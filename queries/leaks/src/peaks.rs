//! Detector (c): recovery after a peak of the load. What a peak brought has to go when it is over;
//! what stays once is a cache or a pool that grew, what stays every time is a leak.

use crate::series::{Bytes, Load, Span};
use crate::settings::Settings;
use crate::stats::median;

/// Fewest peaks that say anything.
const PEAKS: usize = 3;
/// Recovery below which a peak left something: metric 9's bound.
pub const RECOVERED: f64 = 0.9;
/// Recovery that shows that a peak moved the stack at all.
const MOVED: f64 = 0.1;
/// Least that stayed of the last peak, as a share of the mean: what fills decays.
const LAST_SHARE: f64 = 0.75;

/// What the peaks of the load left behind in a stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// How many peaks there are.
    pub peaks: usize,
    /// Median of (peak - trough after) / (peak - trough before).
    pub recovery: f64,
    /// Bytes that stayed, all peaks together.
    pub retained: f64,
    /// Least that stayed of a peak.
    pub least_retained: f64,
    /// Requests from before the first to after the last.
    pub requests: f64,
    /// Hours likewise.
    pub hours: f64,
    /// Slot in which the last trough ends.
    pub slot: usize,
    /// Whether the rule holds.
    pub holds: bool,
}

/// A run of blocks with high or low load.
struct Run {
    high: bool,
    first: usize,
    end: usize,
}

/// Runs of high and low load. Between the limits a run goes on.
fn runs(running: &[f64]) -> Vec<Run> {
    let mut sorted = running.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let quantile = |share: f64| sorted[((sorted.len() - 1) as f64 * share) as usize];
    let (low, high) = (quantile(0.1), quantile(0.9));
    if high < 1.5 * low || high <= 0.0 {
        return Vec::new();
    }
    let (lower, upper) = (low + 0.35 * (high - low), low + 0.65 * (high - low));
    let mut found: Vec<Run> = Vec::new();
    for (block, load) in running.iter().enumerate() {
        let is_high = match found.last() {
            Some(run) if run.high => *load > lower,
            _ => *load > upper,
        };
        match found.last_mut() {
            Some(run) if run.high == is_high => run.end = block + 1,
            _ => found.push(Run {
                high: is_high,
                first: block,
                end: block + 1,
            }),
        }
    }
    found
}

/// The process's peaks: (trough before, peak, trough after) as ranges of blocks.
pub struct Episodes(Vec<[std::ops::Range<usize>; 3]>);

/// Finds the peaks of a load.
pub fn episodes(span: &Span, load: &Load) -> Episodes {
    if !span.has_load || load.running.len() < 3 {
        return Episodes(Vec::new());
    }
    let runs = runs(&load.running);
    let range = |run: &Run| run.first..run.end;
    let triples = runs.windows(3).filter(|three| three[1].high);
    Episodes(
        triples
            .map(|three| [range(&three[0]), range(&three[1]), range(&three[2])])
            .collect(),
    )
}

/// Looks at what each peak left of a stack; `None` if the peaks are too few.
pub fn look(
    settings: &Settings,
    span: &Span,
    load: &Load,
    episodes: &Episodes,
    bytes: &Bytes,
) -> Option<Peaks> {
    let episodes = &episodes.0;
    let (first, last) = (episodes.first()?, episodes.last()?);
    if episodes.len() < PEAKS {
        return None;
    }
    let least = |range: &std::ops::Range<usize>| {
        bytes.median[range.clone()]
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min)
    };
    let mut recoveries = Vec::with_capacity(episodes.len());
    let mut retained = Vec::with_capacity(episodes.len());
    for [before, peak, after] in episodes {
        let (before, after) = (least(before), least(after));
        let top = bytes.mean[peak.clone()]
            .iter()
            .copied()
            .fold(f64::NEG_INFINITY, f64::max);
        // A stack that the peak did not move has nothing to recover from.
        let brought = top - before;
        recoveries.push(if brought > 0.0 {
            (top - after) / brought
        } else {
            1.0
        });
        retained.push(after - before);
    }
    let (from, to) = (
        span.first_slot(first[0].start),
        span.first_slot(last[2].end),
    );
    let requests = load.completed[to] - load.completed[from];
    let total: f64 = retained.iter().sum();
    let mean = total / retained.len() as f64;
    let least_retained = retained.iter().copied().fold(f64::INFINITY, f64::min);
    // Below the lower one the peak did not move the stack, and there is nothing to recover from.
    let every_peak = recoveries.iter().all(|r| (MOVED..RECOVERED).contains(r));
    let holds = every_peak
        && requests >= settings.min_requests
        && least_retained > 0.5 * mean
        && retained
            .last()
            .is_some_and(|last| *last > LAST_SHARE * mean)
        && total > 2.0 * settings.bytes_per_request * requests;
    Some(Peaks {
        peaks: episodes.len(),
        recovery: median(&mut recoveries)?,
        retained: total,
        least_retained,
        requests,
        hours: (to - from) as f64 * settings.slot_hours(),
        slot: to - 1,
        holds,
    })
}
