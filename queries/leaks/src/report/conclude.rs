//! What is said of a stack at the end, from all evaluations of it and the other detectors.

use super::{Detector, History, Rate, Tier, Verdict, empty};
use crate::design::{Clock, Design};
use crate::growth::{Failing, Judged};
use crate::onset;
use crate::peaks::{self, Peaks};
use crate::quiet::{self, Quiet};
use crate::rapid::{self, Rapid};
use crate::series::{Bytes, Load, Span};
use crate::settings::{SUSPECT_WINDOW, Settings, WINDOWS};

/// What a verdict is drawn from at the end.
pub(super) struct Concluding<'a> {
    pub(super) settings: &'a Settings,
    pub(super) span: &'a Span,
    pub(super) load: &'a Load,
    pub(super) episodes: &'a peaks::Episodes,
}

const NO_TRAFFIC: &str = "no traffic figures: load may explain the growth";
const BY_TRAFFIC: &str = "figures of the serving engine (table traffic)";

impl Concluding<'_> {
    pub(super) fn verdict(&self, stack: usize, bytes: &Bytes, history: &History) -> Verdict {
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
