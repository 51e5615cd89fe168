//! Detector (a): growth with the requests served, or with time, that nothing else explains.
//!
//! One stack in one window. The rule is a conjunction; [`Judged::fails`] names the first part that
//! does not hold, so that a report can say why a growing stack is no suspect.

use crate::design::{Clock, Design, Estimate, ShapeName};
use crate::series::{Bytes, Load, Span};
use crate::settings::Settings;
use crate::stats::{drawdown, kendall_tau, median, slope};

/// The part of the rule that a stack does not pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Failing {
    /// The lower bound is below the threshold beside this explanation (`None`: without any).
    LowerBound(Option<ShapeName>),
    /// Too little of the growth remains beside this explanation.
    Remaining(Option<ShapeName>),
    /// Most of it came in one block.
    LargestRise,
    /// It does not grow in most blocks.
    BlockSlope,
    /// It does not grow in most runs of four blocks.
    FourBlockSlope,
    /// It gives much of it back in between.
    Drawdown,
    /// It does not grow any more.
    LastThird,
    /// It was as high before.
    NewHigh,
    /// What lived when the window began is gone: nothing is kept for so long.
    Turnover,
}

impl std::fmt::Display for Failing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failing::LowerBound(None) => f.write_str("too uncertain"),
            Failing::LowerBound(Some(shape)) => write!(f, "{shape} may explain it"),
            Failing::Remaining(None) => f.write_str("too little growth"),
            Failing::Remaining(Some(shape)) => write!(f, "{shape} explains most of it"),
            Failing::LargestRise => f.write_str("it grows in few large steps"),
            Failing::BlockSlope | Failing::FourBlockSlope => {
                f.write_str("it does not grow most of the time")
            }
            Failing::Drawdown => f.write_str("it gives much back in between"),
            Failing::LastThird => f.write_str("it has stopped growing"),
            Failing::NewHigh => f.write_str("it was as high before"),
            Failing::Turnover => f.write_str("nothing of it is as old as the growth"),
        }
    }
}

/// A stack's verdict in one window.
#[derive(Debug, Clone)]
pub struct Judged {
    /// First block of the window.
    pub first: usize,
    /// Blocks of the window.
    pub len: usize,
    /// What the growth was measured against.
    pub clock: Clock,
    /// Requests completed in the window.
    pub requests: f64,
    /// The plain fit: growth over the window, bytes.
    pub plain: Estimate,
    /// Smallest lower bound over all explanations, bytes over the window.
    pub low: f64,
    /// Upper bound of the plain fit, bytes over the window.
    pub high: f64,
    /// Growth over the window that would just have passed, bytes.
    pub detectable: f64,
    /// Kendall's tau of the block medians.
    pub tau: f64,
    /// Smallest growth over all explanations / the plain fit's.
    pub remaining: f64,
    /// The explanation that leaves the smallest lower bound.
    pub rival: Option<ShapeName>,
    /// Correlation that inflates the error.
    pub rho: f64,
    /// Shares of the growth: largest rise of one block, median slope of blocks and of four blocks,
    /// fall below the highest so far, slope of the last third, rise over everything earlier.
    pub shares: Shares,
    /// Share of the steps from block to block, load taken off, that do not fall.
    pub monotonic: f64,
    /// The first part of the rule that does not hold.
    pub fails: Option<Failing>,
}

/// See [`Judged::shares`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Shares {
    /// Largest rise of one block.
    pub largest_rise: f64,
    /// Median slope from block to block.
    pub block_slope: f64,
    /// Median slope over four blocks.
    pub four_block_slope: f64,
    /// Largest fall below the highest so far.
    pub drawdown: f64,
    /// Slope in the last third.
    pub last_third: f64,
    /// Rise of the last three blocks over everything before the window.
    pub new_high: f64,
}

impl Judged {
    /// The figures, for people. `hours` is the window's length.
    pub fn figures(&self, hours: f64) -> String {
        let shares = &self.shares;
        let rival = match &self.rival {
            Some(shape) => shape.to_string(),
            None => "none".to_string(),
        };
        format!(
            "window {hours:.1} h, {:.0} requests, clock {}; growth {:.0} +- {:.0} bytes (1 se, rho {:.2}), at least {:.0} beside rival: {rival}; tau {:.2}; shares: remaining {:.2}, largest rise {:.2}, block slope {:.2}, four-block slope {:.2}, drawdown {:.2}, last third {:.2}, new high {:.2}",
            self.requests,
            self.clock.name(),
            self.plain.growth,
            self.plain.error,
            self.rho,
            self.low,
            self.tau,
            self.remaining,
            shares.largest_rise,
            shares.block_slope,
            shares.four_block_slope,
            shares.drawdown,
            shares.last_third,
            shares.new_high,
        )
    }

    /// Whether every part of the rule holds.
    pub fn passes(&self) -> bool {
        self.fails.is_none()
    }
}

/// The first look: it costs little, and most stacks end here. `scale` is what a rate is over: the
/// window's requests, or its hours.
pub fn is_candidate(settings: &Settings, bytes: &Bytes, design: &Design, least: f64) -> bool {
    let medians = &bytes.median[design.first..design.first + design.len];
    ends(medians) > least && kendall_tau(medians) > settings.candidate_tau
}

/// Mean of the last three less mean of the first three.
fn ends(values: &[f64]) -> f64 {
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    mean(&values[values.len() - 3..]) - mean(&values[..3])
}

/// What the lower bound over a window has to exceed, bytes: the threshold per request times the
/// requests; without requests the threshold per hour times the hours.
pub fn least_growth(settings: &Settings, design: &Design, has_load: bool) -> f64 {
    if has_load {
        settings.bytes_per_request * design.requests
    } else {
        let hours = design.len as f64 * f64::from(settings.block_minutes) / 60.0;
        settings.bytes_per_hour * hours
    }
}

/// Judges a stack in a window; `None` if the first look finds nothing.
pub fn judge(
    settings: &Settings,
    span: &Span,
    load: &Load,
    design: &Design,
    bytes: &Bytes,
) -> Option<Judged> {
    let least = least_growth(settings, design, span.has_load);
    let first_look = least * settings.candidate_bytes_per_request / settings.bytes_per_request;
    if !is_candidate(settings, bytes, design, first_look) {
        return None;
    }
    let window = design.first..design.first + design.len;
    let medians = &bytes.median[window.clone()];
    let fits = design.fit(settings, &bytes.mean[window.clone()]);
    let low = fits.lowest.growth - settings.standard_errors * fits.lowest.error;
    let growth = fits.plain.growth;
    // What is left of a block when its load is taken off.
    let without_load = |block: usize| {
        bytes.median[block] - fits.load[0] * load.running[block] - fits.load[1] * load.kv[block]
    };
    let own: Vec<f64> = window.clone().map(without_load).collect();
    let earlier = (0..design.first).map(without_load).reduce(f64::max);
    let shares = shares(&own, &design.u, earlier, growth);
    let mut judged = Judged {
        first: design.first,
        len: design.len,
        clock: design.clock,
        requests: design.requests,
        plain: fits.plain,
        low,
        high: growth + settings.standard_errors * fits.plain.error,
        detectable: least + settings.standard_errors * fits.largest_error,
        tau: kendall_tau(medians),
        remaining: fits.least_growth.0 / growth,
        rival: fits.lowest_shape,
        rho: fits.rho,
        shares,
        monotonic: monotonic(&own),
        fails: None,
    };
    judged.fails = failing(settings, &judged, least, fits.least_growth.1)
        .or_else(|| turnover(span, bytes, design));
    Some(judged)
}

fn failing(
    settings: &Settings,
    judged: &Judged,
    least: f64,
    least_shape: Option<ShapeName>,
) -> Option<Failing> {
    let shares = &judged.shares;
    // Written so that a share that is no number fails.
    let rules = [
        (judged.low > least, Failing::LowerBound(judged.rival)),
        (
            judged.remaining > settings.remaining_share,
            Failing::Remaining(least_shape),
        ),
        (shares.last_third > settings.last_third, Failing::LastThird),
        (
            shares.largest_rise < settings.largest_rise,
            Failing::LargestRise,
        ),
        (
            shares.block_slope > settings.block_slope,
            Failing::BlockSlope,
        ),
        (
            shares.four_block_slope > settings.four_block_slope,
            Failing::FourBlockSlope,
        ),
        (shares.drawdown < settings.drawdown, Failing::Drawdown),
        (shares.new_high > settings.new_high, Failing::NewHigh),
    ];
    rules
        .into_iter()
        .find(|(holds, _)| !holds)
        .map(|(_, failing)| failing)
}

/// What was leaked when the window began still lives at its end. So a stack whose oldest
/// allocation is younger than that keeps nothing, however much it holds.
fn turnover(span: &Span, bytes: &Bytes, design: &Design) -> Option<Failing> {
    let end = span.first_slot(design.first + design.len);
    let born = (*bytes.oldest_born.get(end - 1)?)?;
    let middle = span.first_slot(design.first + design.len / 2) as f64;
    (born > middle).then_some(Failing::Turnover)
}

fn shares(own: &[f64], u: &[f64], earlier: Option<f64>, growth: f64) -> Shares {
    let n = own.len();
    let slopes = |over: usize| {
        let mut found: Vec<f64> = (0..n - over)
            .filter(|i| u[i + over] - u[*i] > 1e-4)
            .map(|i| (own[i + over] - own[i]) / (u[i + over] - u[i]))
            .collect();
        median(&mut found).unwrap_or(0.0) / growth
    };
    let rises = own.windows(2).map(|pair| pair[1] - pair[0]);
    let last_third = n - n / 3;
    let new_high = match earlier {
        Some(earlier) => (own[n - 3..].iter().sum::<f64>() / 3.0 - earlier) / growth,
        None => f64::INFINITY,
    };
    Shares {
        largest_rise: rises.fold(f64::NEG_INFINITY, f64::max) / growth,
        block_slope: slopes(1),
        four_block_slope: slopes(4),
        drawdown: drawdown(own) / growth,
        last_third: slope(&u[last_third..], &own[last_third..]).unwrap_or(0.0) / growth,
        new_high,
    }
}

fn monotonic(own: &[f64]) -> f64 {
    let steps = own.len() - 1;
    let risen = own.windows(2).filter(|pair| pair[1] >= pair[0]).count();
    risen as f64 / steps as f64
}
