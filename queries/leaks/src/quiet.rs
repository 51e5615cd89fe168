//! Detector (b): the difference between moments at rest. When nothing is being served, what still
//! lives is no request's; if it is more each time, something was left behind.

use crate::series::{Bytes, Load, Span};
use crate::settings::Settings;

/// Fewest moments at rest that say anything.
const POINTS: usize = 5;
/// Least share of steps from one to the next that must not fall.
const MONOTONIC: f64 = 0.8;
/// Fewest hours (of blocks of 30 minutes; they scale with the block) from the first to the last: the
/// shortest window that may confirm growth.
const HOURS: f64 = 10.0;
/// Least slope of the last third as a share of the whole: what fills decays.
const LAST_THIRD: f64 = 0.75;
/// What the lower bound must exceed, in thresholds: there are no rival shapes here.
const THRESHOLDS: f64 = 2.0;

/// What the moments at rest say of a stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quiet {
    /// How many there are.
    pub points: usize,
    /// Slot of the last one.
    pub slot: usize,
    /// Hours from the first to the last.
    pub hours: f64,
    /// Requests from the first to the last.
    pub requests: f64,
    /// Growth from the first to the last, by the fitted line, bytes.
    pub growth: f64,
    /// Its standard error.
    pub error: f64,
    /// Share of the steps that do not fall.
    pub monotonic: f64,
    /// Whether the rule holds.
    pub holds: bool,
}

/// Looks at a stack's moments at rest after the warm-up; `None` if they are too few.
pub fn look(settings: &Settings, span: &Span, load: &Load, bytes: &Bytes) -> Option<Quiet> {
    let after_start = bytes.quiet.iter().filter(|(s, _)| *s >= span.skipped);
    let points: Vec<(f64, f64, usize)> = after_start
        .map(|(slot, held)| (load.completed[slot + 1], *held, *slot))
        .collect();
    let (first, last) = (points.first()?, points.last()?);
    let requests = last.0 - first.0;
    if points.len() < POINTS || requests < settings.min_requests {
        return None;
    }
    let line = |part: &[(f64, f64, usize)]| {
        let x: Vec<f64> = part.iter().map(|p| p.0).collect();
        let y: Vec<f64> = part.iter().map(|p| p.1).collect();
        crate::stats::slope(&x, &y).map(|slope| (slope, x, y))
    };
    let (slope, x, y) = line(&points)?;
    let n = points.len() as f64;
    let (mean_x, mean_y) = (x.iter().sum::<f64>() / n, y.iter().sum::<f64>() / n);
    let residuals: Vec<f64> = x
        .iter()
        .zip(&y)
        .map(|(x, y)| y - mean_y - slope * (x - mean_x))
        .collect();
    let squares: f64 = x.iter().map(|x| (x - mean_x) * (x - mean_x)).sum();
    let variance = crate::stats::dot(&residuals, &residuals) / (n - 2.0)
        + settings.noise_bytes * settings.noise_bytes;
    let rho = (crate::stats::lag_one(&residuals) + 2.0 / n).clamp(0.0, 0.9);
    let error = (variance * (1.0 + rho) / (1.0 - rho) / squares).sqrt();
    let steps = y.windows(2).filter(|pair| pair[1] >= pair[0]).count();
    let monotonic = steps as f64 / (n - 1.0);
    let last_third = first.0 + requests * 2.0 / 3.0;
    let late: Vec<_> = points
        .iter()
        .copied()
        .filter(|p| p.0 >= last_third)
        .collect();
    let later = line(&late).map_or(0.0, |(slope, ..)| slope);
    let hours = (last.2 - first.2) as f64 * settings.slot_hours();
    let least = THRESHOLDS * settings.bytes_per_request;
    let holds = slope - settings.standard_errors * error > least
        && hours >= HOURS * f64::from(settings.block_minutes) / 30.0
        && monotonic >= MONOTONIC
        && later >= LAST_THIRD * slope;
    Some(Quiet {
        points: points.len(),
        slot: last.2,
        hours,
        requests,
        growth: slope * requests,
        error: error * requests,
        monotonic,
        holds,
    })
}
