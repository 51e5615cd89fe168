//! From one process's slots to verdicts: evaluations through the recording as they would have been
//! made live, every two hours, and what they come to at its end.

mod conclude;

use crate::design::{Clock, Design};
use crate::growth::{Judged, judge};
use crate::peaks;
use crate::series::{Bytes, Load, Process, Span, StackSlot};
use crate::settings::{CONFIRMING, EVALUATION_STEP, SUSPECT_WINDOW, Settings, WINDOWS};
use conclude::Concluding;

/// How sure a verdict is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// It passed three evaluations in a row.
    Confirmed,
    /// It passed the faster rule once.
    Suspect,
    /// It grows, and the bytes alone cannot tell whether it leaks.
    Ambiguous,
    /// It does not grow, or not as a leak does.
    Clear,
    /// There is too little to tell.
    Insufficient,
}

impl Tier {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Confirmed => "confirmed",
            Tier::Suspect => "suspect",
            Tier::Ambiguous => "ambiguous",
            Tier::Clear => "clear",
            Tier::Insufficient => "insufficient",
        }
    }
}

/// Which detector a verdict comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detector {
    /// Growth with traffic or time.
    Growth,
    /// The difference between moments at rest.
    Quiesce,
    /// What peaks of the load leave behind.
    PeakRecovery,
}

impl Detector {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Detector::Growth => "growth",
            Detector::Quiesce => "quiesce",
            Detector::PeakRecovery => "peak_recovery",
        }
    }
}

/// One stack at one evaluation, where its first look found growth.
#[derive(Debug, Clone)]
pub struct Evaluation {
    /// Which stack: index into [`Process::stacks`].
    pub stack: usize,
    /// Number of the slot at whose start it was made.
    pub at: i64,
    /// The window that tells most.
    pub judged: Judged,
    /// Whether a window that may confirm passes.
    pub confirming: bool,
    /// Whether the faster rule passes.
    pub suspicious: bool,
    /// How many evaluations in a row have passed a window that may confirm, with this one.
    pub in_a_row: usize,
}

/// A growth with its bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rate {
    /// The estimate.
    pub value: f64,
    /// Lower bound: three standard errors below, beside the worst rival explanation.
    pub low: f64,
    /// Upper bound: three standard errors above.
    pub high: f64,
}

impl Rate {
    fn times(self, factor: f64) -> Rate {
        Rate {
            value: self.value * factor,
            low: self.low * factor,
            high: self.high * factor,
        }
    }
}

/// What the recording says of one stack at its end.
#[derive(Debug, Clone)]
pub struct Verdict {
    /// Which stack: index into [`Process::stacks`].
    pub stack: usize,
    /// How sure.
    pub tier: Tier,
    /// By what.
    pub detector: Detector,
    /// Bytes per request; `None` without traffic.
    pub per_request: Option<Rate>,
    /// Bytes per hour.
    pub per_hour: Option<Rate>,
    /// Growth per request that would just have been found.
    pub detectable_per_request: Option<f64>,
    /// Live bytes at the end.
    pub live_bytes: f64,
    /// Live allocations at the end.
    pub live_count: i64,
    /// Growth since `since`, or since the warm-up.
    pub growth: f64,
    /// Age of the oldest allocation at the end, hours.
    pub oldest_age_hours: Option<f64>,
    /// Bytes at least that are older than a block and live.
    pub survivors: f64,
    /// Share of the steps from block to block that do not fall, load taken off.
    pub monotonic: Option<f64>,
    /// Level on which the stack stayed for the last third of the blocks, if it did.
    pub plateau: Option<f64>,
    /// Slot at which it first was a suspect.
    pub first_seen: Option<i64>,
    /// Slot at which it was confirmed.
    pub confirmed_at: Option<i64>,
    /// Slot at which the growth seems to have begun.
    pub since: Option<i64>,
    /// Why it is ambiguous or insufficient.
    pub reason: Option<String>,
    /// What would settle it.
    pub settled_by: Option<&'static str>,
    /// The figures behind it.
    pub statistics: String,
}

/// Everything about one process.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// By evaluation, then stack.
    pub evaluations: Vec<Evaluation>,
    /// One per stack.
    pub verdicts: Vec<Verdict>,
    /// Requests completed after the warm-up; `None` without traffic.
    pub requests: Option<f64>,
    /// Number of the slot after the last one that was read.
    pub end: i64,
}

/// What is remembered of a stack from one evaluation to the next.
#[derive(Debug, Clone, Default)]
struct History {
    in_a_row: usize,
    first_seen: Option<i64>,
    confirmed_at: Option<i64>,
    last_pass: Option<(i64, Judged)>,
    newest: Option<(i64, Judged)>,
}

/// Judges a process.
pub fn analyse<K>(settings: &Settings, process: &Process<K>) -> Report {
    let Some(span) = Span::of(settings, process) else {
        return Report {
            verdicts: (0..process.stacks.len())
                .map(|stack| too_short(settings, process, stack))
                .collect(),
            ..Report::default()
        };
    };
    let load = Load::of(&span, &process.loads);
    let series: Vec<Bytes> = process
        .stacks
        .iter()
        .map(|(_, slots)| Bytes::of(settings, &span, slots, &process.quiet_slots))
        .collect();
    let mut report = Report {
        requests: span
            .has_load
            .then(|| load.completed[span.slots] - load.completed[span.skipped]),
        end: span.start + span.slots as i64,
        ..Report::default()
    };
    let mut histories = vec![History::default(); series.len()];
    for end in (EVALUATION_STEP..=span.blocks).step_by(EVALUATION_STEP) {
        evaluate(
            settings,
            &span,
            &load,
            &series,
            end,
            &mut histories,
            &mut report,
        );
    }
    let episodes = peaks::episodes(&span, &load);
    let judge = Concluding {
        settings,
        span: &span,
        load: &load,
        episodes: &episodes,
    };
    for (stack, (bytes, history)) in series.iter().zip(&histories).enumerate() {
        report.verdicts.push(judge.verdict(stack, bytes, history));
    }
    report
}

/// The windows that end at a block.
fn designs(settings: &Settings, span: &Span, load: &Load, end: usize) -> Vec<(bool, Design)> {
    let suspect = [(SUSPECT_WINDOW, false, Clock::Requests)];
    let confirm = WINDOWS
        .into_iter()
        .flat_map(|len| [(len, true, Clock::Requests), (len, true, Clock::Time)]);
    let without_load = [(SUSPECT_WINDOW, false, Clock::Time)];
    let wanted = suspect.into_iter().chain(confirm);
    let wanted: Vec<_> = if span.has_load {
        wanted.collect()
    } else {
        let by_time = wanted.filter(|(.., clock)| *clock == Clock::Time);
        by_time.chain(without_load).collect()
    };
    wanted
        .into_iter()
        .filter(|(len, ..)| *len <= end)
        .filter_map(|(len, confirms, clock)| {
            let design = Design::new(settings, span, load, end - len, len, clock)?;
            let is_enough = !span.has_load || design.requests >= settings.min_requests;
            is_enough.then_some((confirms, design))
        })
        .collect()
}

fn evaluate(
    settings: &Settings,
    span: &Span,
    load: &Load,
    series: &[Bytes],
    end: usize,
    histories: &mut [History],
    report: &mut Report,
) {
    let designs = designs(settings, span, load, end);
    if designs.is_empty() {
        return;
    }
    let at = span.end_of(end - 1);
    for (stack, (bytes, history)) in series.iter().zip(histories).enumerate() {
        let mut best: Option<Judged> = None;
        let (mut confirming, mut suspicious) = (false, false);
        for (confirms, design) in &designs {
            let Some(judged) = judge(settings, span, load, design, bytes) else {
                continue;
            };
            if judged.passes() {
                confirming |= *confirms;
                suspicious |= !*confirms || !span.has_load;
            }
            if best.as_ref().is_none_or(|best| tells_more(&judged, best)) {
                best = Some(judged);
            }
        }
        history.in_a_row = if confirming { history.in_a_row + 1 } else { 0 };
        let Some(judged) = best else {
            history.newest = None;
            continue;
        };
        history.newest = Some((at, judged.clone()));
        if confirming || suspicious {
            history.first_seen.get_or_insert(at);
            history.last_pass = Some((at, judged.clone()));
        }
        if history.in_a_row >= CONFIRMING && span.has_load {
            history.confirmed_at.get_or_insert(at);
        }
        report.evaluations.push(Evaluation {
            stack,
            at,
            judged,
            confirming,
            suspicious,
            in_a_row: history.in_a_row,
        });
    }
}

/// A window that passes tells more than one that does not; then the higher lower bound per block.
fn tells_more(one: &Judged, other: &Judged) -> bool {
    let rank = |judged: &Judged| (judged.passes(), judged.low / judged.len as f64);
    rank(one) > rank(other)
}

fn too_short<K>(settings: &Settings, process: &Process<K>, stack: usize) -> Verdict {
    let newest = process.stacks[stack].1.iter().max_by_key(|s| s.slot);
    let newest = newest.copied().unwrap_or(StackSlot::default());
    Verdict {
        live_bytes: newest.live_bytes as f64,
        live_count: newest.live_count,
        reason: Some(format!(
            "insufficient: shorter than {} minutes",
            settings.slot_ns() / 60_000_000_000
        )),
        ..empty(stack, Tier::Insufficient)
    }
}

fn empty(stack: usize, tier: Tier) -> Verdict {
    Verdict {
        stack,
        tier,
        detector: Detector::Growth,
        per_request: None,
        per_hour: None,
        detectable_per_request: None,
        live_bytes: 0.0,
        live_count: 0,
        growth: 0.0,
        oldest_age_hours: None,
        survivors: 0.0,
        monotonic: None,
        plateau: None,
        first_seen: None,
        confirmed_at: None,
        since: None,
        reason: None,
        settled_by: None,
        statistics: String::new(),
    }
}
