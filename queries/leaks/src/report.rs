//! From one process's slots to verdicts: evaluations through the recording as they would have been
//! made live, every two hours, and what they come to at its end.

use crate::design::{Clock, Design};
use crate::growth::{Failing, Judged, judge};
use crate::onset;
use crate::peaks::{self, Peaks};
use crate::quiet::{self, Quiet};
use crate::rapid::{self, Rapid};
use crate::series::{Bytes, Load, Process, Span, StackSlot};
use crate::settings::{CONFIRMING, EVALUATION_STEP, SUSPECT_WINDOW, Settings, WINDOWS};

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

/// What a verdict is drawn from at the end.
struct Concluding<'a> {
    settings: &'a Settings,
    span: &'a Span,
    load: &'a Load,
    episodes: &'a peaks::Episodes,
}

const NO_TRAFFIC: &str = "no traffic figures: load may explain the growth";
const BY_TRAFFIC: &str = "figures of the serving engine (table traffic)";

impl Concluding<'_> {
    fn verdict(&self, stack: usize, bytes: &Bytes, history: &History) -> Verdict {
        let mut verdict = self.facts(stack, bytes);
        if let Some((at, judged)) = &history.last_pass {
            self.of_growth(&mut verdict, bytes, history, *at, judged);
        } else if let Some(rapid) = self.rapid(bytes) {
            self.of_rapid(&mut verdict, rapid);
        } else if let Some(quiet) =
            quiet::look(self.settings, self.span, self.load, bytes).filter(|quiet| quiet.holds)
        {
            self.of_quiet(&mut verdict, &quiet);
        } else if let Some(peaks) =
            peaks::look(self.settings, self.span, self.load, self.episodes, bytes)
                .filter(|peaks| peaks.holds)
        {
            self.of_peaks(&mut verdict, &peaks);
        } else if let Some((_, judged)) = &history.newest {
            self.of_failing(&mut verdict, judged);
        } else if self.is_too_little() {
            verdict.tier = Tier::Insufficient;
            verdict.reason = Some(self.what_is_missing());
        }
        if matches!(
            verdict.tier,
            Tier::Confirmed | Tier::Suspect | Tier::Ambiguous
        ) {
            let since = onset::find(self.span, self.load, bytes);
            verdict.since = since.map(|block| self.span.start + self.span.first_slot(block) as i64);
            let from = since.unwrap_or(0);
            if let (Some(last), Some(first)) = (bytes.mean.last(), bytes.mean.get(from)) {
                verdict.growth = last - first;
            }
        }
        // The rapid look may have come first.
        if verdict.tier != Tier::Clear && history.first_seen.is_some() {
            let rapid = rapid::look(self.settings, self.span, self.load, bytes);
            let first = rapid.first().map(|r| self.span.start + r.slot as i64 + 1);
            verdict.first_seen = [first, history.first_seen].into_iter().flatten().min();
        }
        verdict
    }

    fn facts(&self, stack: usize, bytes: &Bytes) -> Verdict {
        let end = self.span.slots - 1;
        let last = bytes.last[end];
        let third = self.span.blocks / 3;
        let plateau = (third >= 4).then(|| {
            let tail = &bytes.median[self.span.blocks - third..];
            let low = tail.iter().copied().fold(f64::INFINITY, f64::min);
            let high = tail.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            (high > 0.0 && high - low < 0.05 * high).then_some(high)
        });
        let growth = match (bytes.mean.first(), bytes.mean.last()) {
            (Some(first), Some(last)) => last - first,
            _ => 0.0,
        };
        Verdict {
            detectable_per_request: self.detectable(bytes),
            live_bytes: last,
            live_count: bytes.live_count,
            growth,
            oldest_age_hours: bytes.oldest_born[end]
                .filter(|_| last > 0.0)
                .map(|born| ((end + 1) as f64 - born).max(0.0) * self.settings.slot_hours()),
            survivors: bytes.survivors(end, crate::settings::SLOTS_PER_BLOCK as usize),
            plateau: plateau.flatten(),
            ..empty(stack, Tier::Clear)
        }
    }

    /// Smallest leak that the longest window would have found, by its plain fit.
    fn detectable(&self, bytes: &Bytes) -> Option<f64> {
        let blocks = self.span.blocks;
        let len = WINDOWS.into_iter().rev().find(|len| *len <= blocks)?;
        let (settings, span, load) = (self.settings, self.span, self.load);
        let design = Design::plain(span, load, blocks - len, len, Clock::Requests)?;
        let is_enough = design.requests >= settings.min_requests;
        let fits = is_enough.then(|| design.fit(settings, &bytes.mean[blocks - len..]))?;
        let error = settings.standard_errors * fits.largest_error;
        Some(settings.bytes_per_request + error / design.requests)
    }

    fn is_too_little(&self) -> bool {
        let requests = self.requests();
        let few = self.span.has_load && requests < self.settings.min_requests;
        self.span.blocks < SUSPECT_WINDOW || few
    }

    fn requests(&self) -> f64 {
        self.load.completed[self.span.slots] - self.load.completed[self.span.skipped]
    }

    fn what_is_missing(&self) -> String {
        let minutes = self.settings.block_minutes as usize;
        let time = format!(
            "{} of {} minutes after the warm-up",
            self.span.blocks * minutes,
            SUSPECT_WINDOW * minutes
        );
        if !self.span.has_load {
            return format!("insufficient: {time}; no traffic");
        }
        format!(
            "insufficient: {:.0} of {:.0} requests, {time}",
            self.requests(),
            self.settings.min_requests
        )
    }

    fn rapid(&self, bytes: &Bytes) -> Option<Rapid> {
        let found = rapid::look(self.settings, self.span, self.load, bytes);
        let first = *found.first()?;
        let newest = *found.last()?;
        // What grew that fast and then stayed for a quarter of the time is no suspect any more.
        let still = self.span.slots - newest.slot <= SUSPECT_WINDOW;
        still.then_some(Rapid {
            slot: first.slot,
            ..newest
        })
    }

    fn rate(&self, verdict: &mut Verdict, growth: Rate, requests: f64, hours: f64) {
        if self.span.has_load && requests > 0.0 {
            verdict.per_request = Some(growth.times(1.0 / requests));
        }
        if hours > 0.0 {
            verdict.per_hour = Some(growth.times(1.0 / hours));
        }
    }

    fn hours(&self, blocks: usize) -> f64 {
        blocks as f64 * f64::from(self.settings.block_minutes) / 60.0
    }

    fn of_judged(&self, verdict: &mut Verdict, judged: &Judged) {
        let growth = Rate {
            value: judged.plain.growth,
            low: judged.low,
            high: judged.high,
        };
        self.rate(verdict, growth, judged.requests, self.hours(judged.len));
        if self.span.has_load {
            verdict.detectable_per_request = Some(judged.detectable / judged.requests);
        }
        verdict.monotonic = Some(judged.monotonic);
        verdict.statistics = judged.figures(self.hours(judged.len));
    }

    fn of_growth(
        &self,
        verdict: &mut Verdict,
        bytes: &Bytes,
        history: &History,
        at: i64,
        judged: &Judged,
    ) {
        self.of_judged(verdict, judged);
        verdict.first_seen = history.first_seen;
        verdict.confirmed_at = history.confirmed_at;
        verdict.tier = match history.confirmed_at {
            Some(_) => Tier::Confirmed,
            None => Tier::Suspect,
        };
        if !self.span.has_load {
            verdict.reason = Some(NO_TRAFFIC.to_string());
            verdict.settled_by = Some(BY_TRAFFIC);
        }
        if self.has_stopped(bytes, at, judged) {
            verdict.tier = Tier::Ambiguous;
            verdict.reason = Some(
                "it grew as a leak does and has stopped: a cache that is full, or a leak that is not reached any more"
                    .to_string(),
            );
            verdict.settled_by =
                Some("the cache's declared cap, or another lifetime of the same program");
        }
    }

    /// Whether blocks after the last pass show that the growth is over: at least a suspect's window
    /// of them, with requests, in which less than a fifth of the growth came.
    fn has_stopped(&self, bytes: &Bytes, at: i64, judged: &Judged) -> bool {
        let passed = (0..self.span.blocks).find(|b| self.span.end_of(*b) >= at);
        let Some(passed) = passed.filter(|b| self.span.blocks - b > SUSPECT_WINDOW) else {
            return false;
        };
        let medians = &bytes.median[passed..];
        let (from, to) = (
            self.span.first_slot(passed),
            self.span.first_slot(self.span.blocks),
        );
        let requests = self.load.completed[to] - self.load.completed[from];
        let expected = match judged.clock {
            Clock::Requests => judged.plain.growth / judged.requests * requests,
            Clock::Time => judged.plain.growth / judged.len as f64 * medians.len() as f64,
        };
        let is_enough = !self.span.has_load || requests >= self.settings.min_requests;
        is_enough && medians[medians.len() - 1] - medians[0] < 0.2 * expected
    }

    fn of_rapid(&self, verdict: &mut Verdict, rapid: Rapid) {
        let growth = Rate {
            value: rapid.growth,
            low: rapid.low,
            high: rapid.high,
        };
        let hours = rapid::SLOTS as f64 * self.settings.slot_hours();
        self.rate(verdict, growth, rapid.requests, hours);
        verdict.tier = Tier::Suspect;
        verdict.first_seen = Some(self.span.start + rapid.slot as i64 + 1);
        verdict.statistics = format!(
            "rapid growth: {:.0} bytes over {:.0} requests in {:.0} min, in every part of it",
            rapid.growth,
            rapid.requests,
            hours * 60.0
        );
    }

    fn of_quiet(&self, verdict: &mut Verdict, quiet: &Quiet) {
        let error = self.settings.standard_errors * quiet.error;
        let growth = Rate {
            value: quiet.growth,
            low: quiet.growth - error,
            high: quiet.growth + error,
        };
        self.rate(verdict, growth, quiet.requests, quiet.hours);
        verdict.tier = Tier::Suspect;
        verdict.detector = Detector::Quiesce;
        verdict.monotonic = Some(quiet.monotonic);
        verdict.first_seen = Some(self.span.start + quiet.slot as i64 + 1);
        verdict.statistics = format!(
            "{} quiesce points over {:.1} h and {:.0} requests; growth {:.0} +- {:.0} bytes (1 se), {:.0} % of steps do not fall",
            quiet.points,
            quiet.hours,
            quiet.requests,
            quiet.growth,
            quiet.error,
            100.0 * quiet.monotonic
        );
    }

    fn of_peaks(&self, verdict: &mut Verdict, peaks: &Peaks) {
        let growth = Rate {
            value: peaks.retained,
            low: peaks.least_retained * peaks.peaks as f64,
            high: peaks.retained,
        };
        self.rate(verdict, growth, peaks.requests, peaks.hours);
        verdict.tier = Tier::Suspect;
        verdict.detector = Detector::PeakRecovery;
        verdict.first_seen = Some(self.span.start + peaks.slot as i64 + 1);
        verdict.statistics = format!(
            "{} peaks of the load; median recovery {:.2} (sound: {}); {:.0} bytes stayed, {:.0} at least of each peak",
            peaks.peaks,
            peaks.recovery,
            peaks::RECOVERED,
            peaks.retained,
            peaks.least_retained
        );
    }

    /// Growth that fails the rule for a reason that bytes alone cannot settle.
    fn of_failing(&self, verdict: &mut Verdict, judged: &Judged) {
        let Some(failing) = judged.fails else {
            return;
        };
        verdict.settled_by = match failing {
            Failing::LargestRise => {
                Some("load events of adapters or models, or their declared number")
            }
            Failing::LowerBound(Some(_)) | Failing::Remaining(Some(_)) => Some(
                "more time; the cache's declared cap; or a level at which an earlier lifetime stayed",
            ),
            _ => return,
        };
        let plain_low = judged.plain.growth - self.settings.standard_errors * judged.plain.error;
        let least = self.settings.bytes_per_request * judged.requests;
        if !self.span.has_load || plain_low < 2.0 * least {
            verdict.settled_by = None;
            return;
        }
        self.of_judged(verdict, judged);
        verdict.tier = Tier::Ambiguous;
        verdict.reason = Some(format!("it grows, but {failing}"));
    }
}
