//! Answers against the truth.
//!
//! By host: a leaky host counts as found only if the planted stack itself is confirmed and the clean
//! twin is silent on it; a clean host counts as a false alarm if any stack is confirmed on it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;

use super::plan::{Host, Pair};

/// One row of `leak_by_stack`. Times in seconds since 1970.
#[derive(Debug, Clone, PartialEq)]
pub struct Alarm {
    pub stack: i64,
    pub rank: i64,
    pub tier: String,
    pub detector: String,
    pub first_seen: Option<f64>,
    pub confirmed_at: Option<f64>,
    pub projected_oom_at: Option<f64>,
}

impl Alarm {
    /// From the product's JSON.
    pub fn read(row: &Value) -> Result<Self> {
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_string();
        Ok(Self {
            // A leak of a pool names no stack.
            stack: row["stack_id"].as_i64().unwrap_or(-1),
            rank: row["rank"].as_i64().context("a leak has no rank")?,
            tier: text("tier"),
            detector: text("detector"),
            first_seen: row["first_seen"].as_f64(),
            confirmed_at: row["confirmed_at"].as_f64(),
            projected_oom_at: row["projected_oom_at"].as_f64(),
        })
    }

    fn is_confirmed(&self) -> bool {
        self.tier == "confirmed"
    }

    fn is_at_least_suspect(&self) -> bool {
        self.is_confirmed() || self.tier == "suspect"
    }
}

/// What came of a leaky host and its twin.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    pub kind: &'static str,
    pub size: Option<f64>,
    pub bytes_per_request: f64,
    pub planted_on: String,
    /// Confirmed, and the twin is silent.
    pub found: bool,
    /// Of the found: nothing ranks above it.
    pub first: bool,
    /// When the leak was confirmed: hours since the run's begin.
    pub confirmed_hour: Option<f64>,
    /// From onset to confirmation, and to suspicion.
    pub hours_to_confirmed: Option<f64>,
    pub hours_to_suspect: Option<f64>,
    /// The suspicion says when memory will be out.
    pub oom_projected: bool,
    /// Other stacks confirmed on the leaky host.
    pub others_confirmed: usize,
    /// Stacks confirmed, suspected, and called ambiguous on the clean twin.
    pub clean_confirmed: usize,
    pub clean_suspect: usize,
    pub clean_ambiguous: usize,
    /// Classes of the stacks confirmed on the clean twin.
    pub mistaken_for_leaks: Vec<String>,
    pub clean_days: f64,
    /// By simple test: found as above, and whether the clean twin alarmed.
    pub baselines: BTreeMap<String, (bool, bool)>,
}

/// What the product said of a stack that bytes alone cannot judge.
#[derive(Debug, Clone, PartialEq)]
pub struct AmbiguousOutcome {
    pub what: &'static str,
    /// confirmed, suspect, ambiguous or silent.
    pub said: String,
}

/// Everything.
#[derive(Debug, Default)]
pub struct Judged {
    pub pairs: Vec<Outcome>,
    pub ambiguous: Vec<AmbiguousOutcome>,
    pub real_traces: bool,
    /// Confirmations looked at again with the future cut off, and those that were gone then.
    pub rechecked: usize,
    pub foresight: usize,
    pub seconds: f64,
    pub peak_bytes: f64,
    pub rows: f64,
}

impl Judged {
    /// What an answer cost.
    pub fn note_cost(&mut self, seconds: f64, peak_bytes: f64, rows: f64) {
        self.seconds += seconds;
        self.peak_bytes = self.peak_bytes.max(peak_bytes);
        self.rows += rows;
    }
}

fn ids(host: &Value, of: &str) -> Vec<i64> {
    let ids = host["truth"][of].as_array().into_iter().flatten();
    ids.filter_map(Value::as_i64).collect()
}

/// Whether the planted stack is confirmed.
pub fn names_planted(host: &Value, alarms: &[Alarm]) -> Result<bool> {
    let planted = ids(host, "planted_stack_ids");
    let of_planted = alarms.iter().filter(|alarm| planted.contains(&alarm.stack));
    Ok(of_planted.filter(|alarm| alarm.is_confirmed()).count() > 0)
}

fn earliest(times: impl Iterator<Item = f64>) -> Option<f64> {
    times.min_by(f64::total_cmp)
}

/// Judges a leaky host and its twin: what is true, and what the product said.
pub fn pair(
    pair: &Pair,
    (leaky, said_of_leaky): (&Value, &[Alarm]),
    (clean, said_of_clean): (&Value, &[Alarm]),
) -> Result<Outcome> {
    let truth = &leaky["truth"];
    let begin = leaky["begin"].as_f64().context("a host has no begin")?;
    let onset = truth["onset"].as_f64().context("a truth has no onset")?;
    let planted = ids(leaky, "planted_stack_ids");
    let is_planted = |alarm: &&Alarm| planted.contains(&alarm.stack);
    let of_planted = || said_of_leaky.iter().filter(is_planted);
    let confirmed = |alarm: &&Alarm| alarm.is_confirmed();

    let twin_names_it = said_of_clean
        .iter()
        .filter(is_planted)
        .any(Alarm::is_confirmed);
    let found = of_planted().any(Alarm::is_confirmed) && !twin_names_it;
    let top = said_of_leaky.iter().map(|alarm| alarm.rank).min();
    let best = of_planted().map(|alarm| alarm.rank).min();
    let hours = |at: f64| (at - begin) / 3600.0;
    let after_onset = |at: f64| hours(at) - onset / 3600.0;
    let confirmed_at = earliest(
        of_planted()
            .filter(confirmed)
            .filter_map(|a| a.confirmed_at),
    );
    let suspected = || of_planted().filter(|alarm| alarm.is_at_least_suspect());
    let suspected_at = earliest(suspected().filter_map(|alarm| alarm.first_seen));
    // A suspicion that the twin shares, or that came before the leak, is luck.
    let twin_suspects = said_of_clean
        .iter()
        .filter(is_planted)
        .any(Alarm::is_at_least_suspect);
    let in_time = |hours: &f64| *hours >= 0.0 && !twin_suspects;

    let classes = clean["classes"].as_object();
    let class = |stack: i64| {
        let class = classes.and_then(|classes| classes.get(&stack.to_string()));
        class
            .and_then(Value::as_str)
            .unwrap_or("unknown")
            .to_string()
    };
    let count = |tier: &str| {
        said_of_clean
            .iter()
            .filter(|alarm| alarm.tier == tier)
            .count()
    };
    Ok(Outcome {
        kind: pair.kind,
        size: pair.size,
        bytes_per_request: pair.bytes_per_request,
        planted_on: truth["planted_on"].as_str().unwrap_or_default().to_string(),
        found,
        first: found && best == top,
        confirmed_hour: confirmed_at.map(hours).filter(|_| found),
        hours_to_confirmed: confirmed_at.map(after_onset).filter(|_| found),
        hours_to_suspect: suspected_at.map(after_onset).filter(in_time),
        oom_projected: suspected().any(|alarm| alarm.projected_oom_at.is_some()),
        others_confirmed: said_of_leaky
            .iter()
            .filter(|alarm| alarm.is_confirmed() && !is_planted(alarm))
            .count(),
        clean_confirmed: count("confirmed"),
        clean_suspect: count("suspect"),
        clean_ambiguous: count("ambiguous"),
        mistaken_for_leaks: said_of_clean
            .iter()
            .filter(confirmed)
            .map(|alarm| format!("{} ({})", class(alarm.stack), alarm.detector))
            .collect(),
        clean_days: truth["condition"]["hours"].as_f64().unwrap_or_default() / 24.0,
        baselines: baselines(leaky, clean, &planted),
    })
}

fn baselines(leaky: &Value, clean: &Value, planted: &[i64]) -> BTreeMap<String, (bool, bool)> {
    let named = |alarms: &Value| {
        let stacks = alarms.as_array().into_iter().flatten();
        let mut stacks = stacks.filter_map(|alarm| alarm[0].as_i64());
        stacks.any(|stack| planted.contains(&stack))
    };
    let tests = leaky["baselines"].as_object().into_iter().flatten();
    tests
        .map(|(test, alarms)| {
            let of_twin = &clean["baselines"][test];
            let alarmed = of_twin.as_array().is_some_and(|alarms| !alarms.is_empty());
            (test.clone(), (named(alarms) && !named(of_twin), alarmed))
        })
        .collect()
}

/// Judges what was said of a stack that bytes alone cannot judge: the strongest word.
pub fn ambiguous(host: &Host, truth: &Value, alarms: &[Alarm]) -> Result<AmbiguousOutcome> {
    let stacks = ids(truth, "ambiguous_stack_ids");
    let said = |tier: &&str| {
        let mut alarms = alarms.iter();
        alarms.any(|alarm| stacks.contains(&alarm.stack) && alarm.tier == *tier)
    };
    let strongest = ["confirmed", "suspect", "ambiguous"].into_iter().find(said);
    Ok(AmbiguousOutcome {
        what: host.ambiguous.context("the host is not ambiguous")?,
        said: strongest.unwrap_or("silent").to_string(),
    })
}

/// The 95 % upper bound of a Poisson mean of which `events` were seen: the mean at which so few
/// happen in 5 of 100 cases (Garwood 1936). By bisection on the distribution's sum.
pub fn upper_bound(events: usize) -> f64 {
    let at_most = |mean: f64| {
        let mut term = (-mean).exp();
        let mut sum = term;
        for k in 1..=events {
            term *= mean / k as f64;
            sum += term;
        }
        sum
    };
    let (mut low, mut high) = (0.0, 20.0 + 3.0 * events as f64);
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        if at_most(middle) > 0.05 {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Against the tables of Garwood's limits (chi-square quantiles).
    #[test]
    fn bounds_are_those_of_the_tables() {
        for (events, bound) in [(0, 2.996), (1, 4.744), (2, 6.296), (4, 9.154), (10, 16.962)] {
            assert!((upper_bound(events) - bound).abs() < 1e-3, "{events}");
        }
    }

    fn alarm(stack: i64, rank: i64, tier: &str, at: f64) -> Alarm {
        Alarm {
            stack,
            rank,
            tier: tier.to_string(),
            detector: "growth".to_string(),
            first_seen: Some(at),
            confirmed_at: (tier == "confirmed").then_some(at + 3600.0),
            projected_oom_at: None,
        }
    }

    fn judge(leaky: &[Alarm], clean: &[Alarm]) -> Outcome {
        let planned = super::super::plan::Plan::draw(1, super::super::plan::Seeds::Tuning);
        let truth = json!({"begin": 1000.0, "truth": {
            "onset": 7200.0, "planted_stack_ids": [5], "planted_on": "cache",
            "condition": {"hours": 48},
        }, "baselines": {"ols": [[5, 3.0], [6, 4.0]]}});
        let of_clean = json!({"baselines": {"ols": [[6, 4.0]]}});
        pair(&planned.pairs[0], (&truth, leaky), (&of_clean, clean)).unwrap()
    }

    #[test]
    fn credit_is_for_the_planted_stack_alone() {
        let at = 1000.0 + 5.0 * 3600.0;
        let outcome = judge(
            &[alarm(5, 1, "confirmed", at), alarm(6, 2, "suspect", at)],
            &[],
        );
        assert!(outcome.found && outcome.first);
        assert_eq!(outcome.hours_to_suspect, Some(3.0));
        assert_eq!(outcome.hours_to_confirmed, Some(4.0));
        assert_eq!(outcome.baselines["ols"], (true, true));
        assert_eq!(outcome.clean_days, 2.0);

        let another = judge(&[alarm(6, 1, "confirmed", at)], &[]);
        assert!(!another.found);
        assert_eq!(another.others_confirmed, 1);

        let below = judge(
            &[alarm(6, 1, "confirmed", at), alarm(5, 2, "confirmed", at)],
            &[],
        );
        assert!(below.found && !below.first);
    }

    #[test]
    fn a_twin_that_names_the_stack_takes_the_credit() {
        let at = 1000.0 + 5.0 * 3600.0;
        let both = judge(
            &[alarm(5, 1, "confirmed", at)],
            &[alarm(5, 1, "confirmed", at)],
        );
        assert!(!both.found);
        assert_eq!((both.clean_confirmed, both.hours_to_suspect), (1, None));
        let early = judge(&[alarm(5, 1, "confirmed", 2000.0)], &[]);
        assert_eq!(early.hours_to_suspect, None, "before the leak began");
    }
}
