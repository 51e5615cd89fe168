//! Simple tests, run beside the product's detectors on the same hosts: what people alert on today.
//!
//! Each looks at one stack of one process at a time, every two hours, after the first half hour, as
//! an alert rule would. The first alarm counts. Bytes, hours.

use std::collections::BTreeMap;

use vramscope_leaksim::{Run, TICK, Traffic};

const HOUR: f64 = 3600.0;
const MB: f64 = 1e6;

/// Skipped after a process's start.
const WARM_UP: f64 = 1800.0;
const EVERY: f64 = 2.0 * HOUR;

/// Growth that tests of significance ask for besides, so that they do not alarm over kilobytes.
const LEAST_SLOPE: f64 = 10.0 * MB;

/// Alarms of one host: test, then stack id and the hour of its first alarm.
pub type Alarms = BTreeMap<&'static str, Vec<(i64, f64)>>;

type Test = fn(&Series, f64) -> bool;

/// Names as in the report.
const TESTS: [(&str, Test); 7] = [
    ("endpoint_200mb_per_hour", endpoint),
    ("ols_slope", ols),
    ("mann_kendall_sen", mann_kendall),
    ("regression_60_minutes", hour_regression),
    ("zero_traffic_difference", zero_traffic),
    ("growth_per_request_1mb", per_request),
    ("recovery_after_peak", recovery),
];

/// Live bytes of a stack at the ends of windows, from one process's start.
struct Series<'a> {
    start: f64,
    step: f64,
    live: Vec<f64>,
    load: &'a Process<'a>,
}

/// A process's samples, and its quiet moments.
struct Process<'a> {
    samples: Vec<&'a Traffic>,
    /// Nothing has run or waited for five minutes.
    quiet: Vec<f64>,
}

/// Judges every stack of a run.
pub fn alarms(run: &Run) -> Alarms {
    let step = f64::from(run.window_seconds);
    let mut found: BTreeMap<&str, BTreeMap<i64, f64>> = BTreeMap::new();
    for (index, process) in run.processes.iter().enumerate() {
        let load = Process::new(run, index);
        let windows = ((process.end - process.start) / step) as usize;
        let mut live = vec![vec![None; windows]; run.stacks.len()];
        for row in run.windows.iter().filter(|row| row.process == index) {
            let place = ((row.start - process.start) / step).max(0.0) as usize;
            // The last window of a process that ends holds its end, where all is freed.
            if place < windows {
                live[row.stack][place] = Some(row.live_bytes as f64);
            }
        }
        for (stack, live) in live.into_iter().enumerate() {
            let series = Series {
                start: process.start,
                step,
                live: carried(live),
                load: &load,
            };
            if series.live.iter().all(|bytes| *bytes == 0.0) {
                continue;
            }
            for (name, test) in TESTS {
                let mut now = process.start + WARM_UP + EVERY;
                while now < process.end - step {
                    if test(&series, now) {
                        let first = found.entry(name).or_default();
                        first
                            .entry(run.stacks[stack].stack_id)
                            .or_insert(now / HOUR);
                        break;
                    }
                    now += EVERY;
                }
            }
        }
    }
    let named = |(name, _): &(&'static str, Test)| {
        let alarms = found.get(name).into_iter().flatten();
        (*name, alarms.map(|(stack, hour)| (*stack, *hour)).collect())
    };
    TESTS.iter().map(named).collect()
}

/// Windows without a row are as the one before.
fn carried(live: Vec<Option<f64>>) -> Vec<f64> {
    let mut last = 0.0;
    let carry = live.into_iter().map(|bytes| {
        last = bytes.unwrap_or(last);
        last
    });
    carry.collect()
}

impl<'a> Process<'a> {
    fn new(run: &'a Run, index: usize) -> Self {
        let samples: Vec<&Traffic> = run.traffic.iter().filter(|s| s.process == index).collect();
        let mut quiet = Vec::new();
        let mut since = None;
        for sample in &samples {
            if sample.running + sample.waiting > 0 {
                since = None;
                continue;
            }
            let began: f64 = *since.get_or_insert(sample.at);
            if sample.at - began >= 5.0 * TICK {
                quiet.push(sample.at);
            }
        }
        Self { samples, quiet }
    }

    fn sample(&self, at: f64) -> Option<&Traffic> {
        let before = self.samples.partition_point(|sample| sample.at <= at);
        before.checked_sub(1).map(|index| self.samples[index])
    }

    fn mean_running(&self, from: f64, to: f64) -> f64 {
        let range = |at: f64| self.samples.partition_point(|sample| sample.at <= at);
        let within = &self.samples[range(from)..range(to)];
        within.iter().map(|s| s.running as f64).sum::<f64>() / within.len().max(1) as f64
    }
}

impl Series<'_> {
    fn index(&self, at: f64) -> usize {
        let index = ((at - self.start) / self.step).floor() as usize;
        index.saturating_sub(1).min(self.live.len() - 1)
    }

    fn at(&self, at: f64) -> f64 {
        self.live[self.index(at)]
    }

    /// The last so many hours before `now`, without the warm-up; none if they are not all there.
    fn last(&self, hours: f64, now: f64) -> Option<&[f64]> {
        let from = now - hours * HOUR;
        if from < self.start + WARM_UP {
            return None;
        }
        Some(&self.live[self.index(from)..=self.index(now)])
    }

    fn per_hour(&self, per_step: f64) -> f64 {
        per_step * HOUR / self.step
    }
}

/// Slope per step, its standard error, and the share of the variance that it explains.
fn fit(values: &[f64]) -> (f64, f64, f64) {
    let n = values.len() as f64;
    let (middle, mean) = ((n - 1.0) / 2.0, values.iter().sum::<f64>() / n);
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (index, value) in values.iter().enumerate() {
        let (x, y) = (index as f64 - middle, value - mean);
        xx += x * x;
        xy += x * y;
        yy += y * y;
    }
    if xx == 0.0 || yy == 0.0 || n < 3.0 {
        return (0.0, 0.0, 0.0);
    }
    let slope = xy / xx;
    let rest = (yy - slope * xy).max(0.0);
    (slope, (rest / (n - 2.0) / xx).sqrt(), 1.0 - rest / yy)
}

/// The article's alert on growth: more than 200 MB an hour between the ends of six hours.
fn endpoint(series: &Series, now: f64) -> bool {
    let Some(values) = series.last(6.0, now) else {
        return false;
    };
    (values[values.len() - 1] - values[0]) / 6.0 > 200.0 * MB
}

/// A straight line through six hours that rises significantly (t > 3).
fn ols(series: &Series, now: f64) -> bool {
    let Some(values) = series.last(6.0, now) else {
        return false;
    };
    let (slope, error, _) = fit(values);
    slope > 3.0 * error && series.per_hour(slope) > LEAST_SLOPE
}

/// Mann and Kendall's test of trend (z > 3) over half-hour means of 24 hours, with Sen's slope.
fn mann_kendall(series: &Series, now: f64) -> bool {
    let Some(values) = series.last(24.0, now) else {
        return false;
    };
    let per_block = (1800.0 / series.step) as usize;
    let mean = |block: &[f64]| block.iter().sum::<f64>() / block.len() as f64;
    let blocks: Vec<f64> = values.chunks_exact(per_block).map(mean).collect();
    let n = blocks.len();
    let mut score = 0i64;
    let mut slopes = Vec::with_capacity(n * n / 2);
    for later in 1..n {
        for earlier in 0..later {
            let rise = blocks[later] - blocks[earlier];
            score += i64::from(rise > 0.0) - i64::from(rise < 0.0);
            slopes.push(rise / (later - earlier) as f64);
        }
    }
    let size = n as f64;
    let variance = size * (size - 1.0) * (2.0 * size + 5.0) / 18.0;
    let z = (score as f64 - 1.0) / variance.sqrt();
    if z <= 3.0 {
        return false;
    }
    slopes.sort_by(f64::total_cmp);
    slopes[slopes.len() / 2] * 2.0 > LEAST_SLOPE
}

/// A straight line through the last hour that rises and fits (R² > 0.8).
fn hour_regression(series: &Series, now: f64) -> bool {
    let Some(values) = series.last(1.0, now) else {
        return false;
    };
    let (slope, _, fits) = fit(values);
    series.per_hour(slope) > LEAST_SLOPE && fits > 0.8
}

/// The article's first test: growth between two quiet moments (the first after the warm-up, and the
/// last) of more than 100 MB in half an hour.
fn zero_traffic(series: &Series, now: f64) -> bool {
    let after = series.start + WARM_UP;
    let mut quiet = series
        .load
        .quiet
        .iter()
        .filter(|at| (after..now).contains(*at));
    let (Some(first), Some(last)) = (quiet.next(), quiet.next_back()) else {
        return false;
    };
    let half_hours = (last - first) / 1800.0;
    half_hours >= 1.0 && (series.at(*last) - series.at(*first)) / half_hours > 100.0 * MB
}

/// The article's second test: more than 1 MB a request over six hours.
fn per_request(series: &Series, now: f64) -> bool {
    let from = now - 6.0 * HOUR;
    let Some(values) = series.last(6.0, now) else {
        return false;
    };
    let completed = |at: f64| series.load.sample(at).map_or(0, |s| s.completed_total) as f64;
    let requests = completed(now) - completed(from);
    requests > 0.0 && (values[values.len() - 1] - values[0]) / requests > MB
}

/// The article's third test, over six hours: after a peak of at least 100 MB above the level before,
/// with the load back where it was, less than 90 % of the rise has gone.
fn recovery(series: &Series, now: f64) -> bool {
    let from = now - 6.0 * HOUR;
    let Some(values) = series.last(6.0, now) else {
        return false;
    };
    let third = values.len() / 3;
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let (before, after) = (least(&values[..third]), least(&values[2 * third..]));
    let peak = values[third..2 * third].iter().copied().fold(0.0, f64::max);
    let hours = |from: f64, to: f64| series.load.mean_running(from, to);
    let (loaded, back) = (hours(from, from + 2.0 * HOUR), hours(now - 2.0 * HOUR, now));
    let rise = peak - before;
    rise > 100.0 * MB && back <= loaded && (peak - after) / rise < 0.9
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: points 1, 3, 2, 6 have slope 1.4, residual sum 4.2 of 14.
    #[test]
    fn a_line_is_fitted() {
        let (slope, error, fits) = fit(&[1.0, 3.0, 2.0, 6.0]);
        assert!((slope - 1.4).abs() < 1e-12);
        assert!((error - (4.2f64 / 2.0 / 5.0).sqrt()).abs() < 1e-12);
        assert!((fits - 0.7).abs() < 1e-12);
    }

    fn judge(live: impl Fn(f64) -> f64, test: Test) -> bool {
        let load = Process {
            samples: Vec::new(),
            quiet: vec![HOUR, 20.0 * HOUR],
        };
        let windows: Vec<f64> = (1..600).map(|i| live(f64::from(i) * 300.0)).collect();
        let series = Series {
            start: 0.0,
            step: 300.0,
            live: windows,
            load: &load,
        };
        test(&series, 30.0 * HOUR)
    }

    #[test]
    fn tests_tell_growth_from_rest() {
        let grows = |at: f64| 300.0 * MB * at / HOUR;
        let rests = |_: f64| 300.0 * MB;
        let swings = |at: f64| MB * (100.0 + (at / 300.0) % 2.0);
        for test in [endpoint, ols, mann_kendall, hour_regression, zero_traffic] {
            assert!(judge(grows, test));
            assert!(!judge(rests, test));
            assert!(!judge(swings, test));
        }
    }
}
