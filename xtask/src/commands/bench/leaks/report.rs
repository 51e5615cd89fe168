//! Figures of the report, and the table of every cell.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::plan::{KINDS, SIZES};
use super::score::{Judged, Outcome, upper_bound};
use crate::commands::bench::{Figure, Figures, Target};

/// What counts as a leak worth finding, bytes per request.
const WORTH: f64 = 10_000.0;

/// Found, of how many.
#[derive(Clone, Copy)]
struct Share {
    found: usize,
    of: usize,
}

impl Share {
    fn value(self) -> Option<f64> {
        (self.of > 0).then(|| self.found as f64 / self.of as f64)
    }
}

fn recall<'a>(
    judged: &'a Judged,
    which: impl Fn(&Outcome) -> bool + 'a,
    found: impl Fn(&Outcome) -> bool,
) -> Share {
    let all: Vec<&Outcome> = judged
        .pairs
        .iter()
        .filter(|outcome| which(outcome))
        .collect();
    Share {
        found: all.iter().filter(|outcome| found(outcome)).count(),
        of: all.len(),
    }
}

fn worth(outcome: &Outcome) -> bool {
    outcome.bytes_per_request >= WORTH
}

/// Of those that never were, the time is longer than any.
fn median(times: &mut [f64]) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    let middle = times.get(times.len() / 2).copied();
    middle.filter(|hours| hours.is_finite())
}

fn suspect_median(judged: &Judged, bytes: f64) -> Option<f64> {
    let cell = judged
        .pairs
        .iter()
        .filter(|outcome| outcome.size == Some(bytes));
    let hours = cell.map(|outcome| outcome.hours_to_suspect.unwrap_or(f64::INFINITY));
    median(&mut hours.collect::<Vec<_>>())
}

/// With a share of the hosts leaking.
fn precision(recall: f64, false_alarm: f64, prevalence: f64) -> Option<f64> {
    let (right, wrong) = (prevalence * recall, (1.0 - prevalence) * false_alarm);
    (right + wrong > 0.0).then(|| right / (right + wrong))
}

/// The figures, with their targets.
pub fn figures(judged: &Judged) -> Figures {
    let found = |outcome: &Outcome| outcome.found;
    let of = |which: &dyn Fn(&Outcome) -> bool| recall(judged, which, found).value();
    let of_kind = |kind: &'static str| of(&move |outcome| worth(outcome) && outcome.kind == kind);
    let pooled = of(&worth);
    let alarmed = recall(judged, |_| true, |outcome| outcome.clean_confirmed > 0);
    let at_prevalence = |prevalence: f64| precision(pooled?, alarmed.value()?, prevalence);

    let days: f64 = judged.pairs.iter().map(|outcome| outcome.clean_days).sum();
    let sum = |of: fn(&Outcome) -> usize| judged.pairs.iter().map(of).sum::<usize>();
    let alarms = sum(|outcome| outcome.clean_confirmed);
    let per_100_days = |events: f64| (days > 0.0).then(|| events / days * 100.0);
    let first = recall(judged, found, |outcome| outcome.first).value();
    let right = sum(|outcome| usize::from(outcome.found));
    let all_confirmed = right + alarms + sum(|outcome| outcome.others_confirmed);

    let at_least =
        |value: Option<f64>, limit| Figure::with_target(value, "", Target::AtLeast(limit));
    let watched = |value: Option<f64>, unit| Figure::watched(value, unit);
    let suspected = recall(judged, worth, |outcome| outcome.hours_to_suspect.is_some());
    let hour_costs = judged.seconds / (judged.pairs.len().max(1) as f64 * 4.0);
    Figures::from([
        ("precision", at_least(at_prevalence(0.5), 0.98)),
        ("precision_at_10_percent", watched(at_prevalence(0.1), "")),
        ("precision_at_2_percent", watched(at_prevalence(0.02), "")),
        (
            "precision_of_rows",
            watched(
                (all_confirmed > 0).then(|| right as f64 / all_confirmed as f64),
                "",
            ),
        ),
        ("recall", at_least(pooled, 0.95)),
        (
            "recall_10kb",
            at_least(of(&|outcome| outcome.size == Some(10_000.0)), 0.93),
        ),
        (
            "recall_30kb",
            at_least(of(&|outcome| outcome.bytes_per_request >= 30_000.0), 0.98),
        ),
        (
            "recall_below_10kb",
            watched(of(&|outcome| !worth(outcome)), ""),
        ),
        ("recall_per_request", watched(of_kind("request"), "")),
        ("recall_error_path", watched(of_kind("error"), "")),
        ("recall_per_hour", watched(of_kind("hour"), "")),
        ("recall_starting_late", watched(of_kind("late"), "")),
        ("recall_after_deploy", watched(of_kind("deploy"), "")),
        ("top1", at_least(first, 0.98)),
        (
            "false_alarms_per_100_host_days",
            Figure::with_target(per_100_days(alarms as f64), "", Target::AtMost(1.0)),
        ),
        (
            "false_alarms_upper_bound",
            Figure::with_target(per_100_days(upper_bound(alarms)), "", Target::AtMost(1.0)),
        ),
        (
            "clean_host_days",
            Figure::with_target(days, "days", Target::AtLeast(400.0)),
        ),
        (
            "suspect_median_hours",
            Figure::with_target(suspect_median(judged, 1e4), "h", Target::AtMost(9.0)),
        ),
        (
            "suspect_median_hours_1mb",
            Figure::with_target(suspect_median(judged, 1e6), "h", Target::Below(1.0)),
        ),
        ("suspect_recall", watched(suspected.value(), "")),
        (
            "suspect_oom_share",
            watched(
                recall(
                    judged,
                    |outcome| outcome.hours_to_suspect.is_some(),
                    |outcome| outcome.oom_projected,
                )
                .value(),
                "",
            ),
        ),
        (
            "suspects_per_100_clean_host_days",
            watched(
                per_100_days(sum(|outcome| outcome.clean_suspect) as f64),
                "",
            ),
        ),
        (
            "ambiguous_per_100_clean_host_days",
            watched(
                per_100_days(sum(|outcome| outcome.clean_ambiguous) as f64),
                "",
            ),
        ),
        (
            "confirmed_hours_median",
            watched(
                median(
                    &mut judged
                        .pairs
                        .iter()
                        .filter_map(|outcome| outcome.hours_to_confirmed)
                        .collect::<Vec<_>>(),
                ),
                "h",
            ),
        ),
        (
            "foresight",
            Figure::with_target(judged.foresight as f64, "runs", Target::AtMost(0.0)),
        ),
        ("rechecked", watched(Some(judged.rechecked as f64), "runs")),
        ("pairs", watched(Some(judged.pairs.len() as f64), "pairs")),
        (
            "real_traces",
            watched(Some(f64::from(u8::from(judged.real_traces))), ""),
        ),
        ("seconds_per_host_day", watched(Some(hour_costs), "s")),
        (
            "answer_peak_mib",
            watched(Some(judged.peak_bytes / 1_048_576.0), "MiB"),
        ),
    ])
}

fn size_name(size: Option<f64>) -> String {
    match size {
        Some(bytes) if bytes >= 1e6 => format!("{} MB", bytes / 1e6),
        Some(bytes) => format!("{} KB", bytes / 1e3),
        None => "1 KB to 1 MB".to_string(),
    }
}

fn cells(judged: &Judged) -> Vec<(&'static str, Option<f64>, Vec<&Outcome>)> {
    let mut cells = Vec::new();
    for kind in KINDS {
        for size in SIZES {
            let of_cell = |outcome: &&Outcome| outcome.kind == kind && outcome.size == size;
            cells.push((kind, size, judged.pairs.iter().filter(of_cell).collect()));
        }
    }
    cells
}

/// By class of the stack that a leak was planted on: found and planted.
fn by_class(judged: &Judged) -> BTreeMap<&str, Share> {
    let mut classes = BTreeMap::new();
    for outcome in judged.pairs.iter().filter(|outcome| worth(outcome)) {
        let class = classes.entry(outcome.planted_on.as_str());
        let share = class.or_insert(Share { found: 0, of: 0 });
        share.found += usize::from(outcome.found);
        share.of += 1;
    }
    classes
}

/// By simple test: recall of leaks worth finding, and share of clean hosts alarmed.
fn by_baseline(judged: &Judged) -> BTreeMap<&str, (Option<f64>, Option<f64>)> {
    let tests = judged
        .pairs
        .iter()
        .flat_map(|outcome| outcome.baselines.keys());
    tests
        .map(|test| {
            let of = |outcome: &Outcome| outcome.baselines.get(test).copied().unwrap_or_default();
            let found = recall(judged, worth, |outcome| of(outcome).0).value();
            let alarmed = recall(judged, |_| true, |outcome| of(outcome).1).value();
            (test.as_str(), (found, alarmed))
        })
        .collect()
}

fn by_ambiguity(judged: &Judged) -> BTreeMap<(&str, &str), usize> {
    let mut counts = BTreeMap::new();
    for outcome in &judged.ambiguous {
        *counts
            .entry((outcome.what, outcome.said.as_str()))
            .or_default() += 1;
    }
    counts
}

fn mistaken(judged: &Judged) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    let all = judged
        .pairs
        .iter()
        .flat_map(|outcome| &outcome.mistaken_for_leaks);
    for class in all {
        *counts.entry(class.as_str()).or_default() += 1;
    }
    counts
}

/// Every cell, for files.
pub fn details(judged: &Judged) -> Value {
    let cells: Vec<Value> = cells(judged)
        .into_iter()
        .map(|(kind, size, outcomes)| {
            let of = |which: fn(&Outcome) -> bool| outcomes.iter().filter(|o| which(o)).count();
            let hours = |which: fn(&Outcome) -> Option<f64>| {
                let hours = outcomes.iter().map(|o| which(o).unwrap_or(f64::INFINITY));
                median(&mut hours.collect::<Vec<_>>())
            };
            json!({
                "kind": kind,
                "bytes_per_request": size,
                "runs": outcomes.len(),
                "found": of(|o| o.found),
                "first": of(|o| o.first),
                "suspected": of(|o| o.hours_to_suspect.is_some()),
                "median_hours_to_suspect": hours(|o| o.hours_to_suspect),
                "median_hours_to_confirmed": hours(|o| o.hours_to_confirmed),
            })
        })
        .collect();
    let shares = by_class(judged).into_iter();
    let classes: BTreeMap<&str, Value> = shares
        .map(|(class, share)| (class, json!({"found": share.found, "planted": share.of})))
        .collect();
    let baselines: BTreeMap<&str, Value> = by_baseline(judged)
        .into_iter()
        .map(|(test, (recall, alarmed))| {
            (
                test,
                json!({"recall": recall, "clean_hosts_alarmed": alarmed}),
            )
        })
        .collect();
    let ambiguous: Vec<Value> = by_ambiguity(judged)
        .into_iter()
        .map(|((what, said), runs)| json!({"case": what, "said": said, "runs": runs}))
        .collect();
    json!({
        "real_traces": judged.real_traces,
        "cells": cells,
        "planted_on": classes,
        "simple_tests": baselines,
        "ambiguous": ambiguous,
        "mistaken_for_leaks": mistaken(judged),
    })
}

/// The same for people.
pub fn table(judged: &Judged) -> String {
    let mut text = String::new();
    let share = |value: Option<f64>| value.map_or("-".to_string(), |value| format!("{value:.2}"));
    // Writing to a string cannot fail.
    let _ = writeln!(text, "confirmed of planted, by kind and size:");
    let _ = write!(text, "{:<10}", "");
    for size in SIZES {
        let _ = write!(text, "{:>14}", size_name(size));
    }
    let all = cells(judged);
    for (index, (kind, _, outcomes)) in all.iter().enumerate() {
        if index % SIZES.len() == 0 {
            let _ = write!(text, "\n{kind:<10}");
        }
        let found = outcomes.iter().filter(|outcome| outcome.found).count();
        let _ = write!(text, "{:>14}", format!("{found}/{}", outcomes.len()));
    }
    let _ = writeln!(text, "\nby what the stack does besides (10 KB and more):");
    for (class, share) in by_class(judged) {
        let _ = writeln!(text, "  {class:<18} {}/{}", share.found, share.of);
    }
    let _ = writeln!(
        text,
        "simple tests on the same hosts: recall, clean hosts alarmed:"
    );
    for (test, (recall, alarmed)) in by_baseline(judged) {
        let _ = writeln!(
            text,
            "  {test:<26} {:>5} {:>5}",
            share(recall),
            share(alarmed)
        );
    }
    let _ = writeln!(text, "what bytes alone cannot tell:");
    for ((what, said), runs) in by_ambiguity(judged) {
        let _ = writeln!(text, "  {what:<18} {said:<10} {runs}");
    }
    for (class, count) in mistaken(judged) {
        let _ = writeln!(text, "mistaken for a leak: {class} {count}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(found: bool, clean_confirmed: usize, bytes: f64) -> Outcome {
        Outcome {
            kind: "request",
            size: Some(bytes),
            bytes_per_request: bytes,
            found,
            first: found,
            hours_to_suspect: found.then_some(4.0),
            clean_confirmed,
            clean_days: 2.0,
            ..Outcome::default()
        }
    }

    /// By hand: 9 of 10 found, 1 of 10 twins alarmed; 0.9 / (0.9 + 0.1) at equal prevalence, and
    /// 0.1 x 0.9 / (0.1 x 0.9 + 0.9 x 0.1) at one in ten.
    #[test]
    fn precision_depends_on_prevalence() {
        let mut judged = Judged::default();
        for index in 0..10 {
            judged
                .pairs
                .push(outcome(index > 0, usize::from(index == 5), 10_000.0));
        }
        let figures = figures(&judged);
        let value = |name: &str| figures[name].value.unwrap();
        assert!((value("precision") - 0.9).abs() < 1e-12);
        assert!((value("precision_at_10_percent") - 0.5).abs() < 1e-12);
        assert!((value("recall_10kb") - 0.9).abs() < 1e-12);
        assert!((value("false_alarms_per_100_host_days") - 5.0).abs() < 1e-12);
        assert!((value("false_alarms_upper_bound") - 4.744 * 5.0).abs() < 0.01);
        assert_eq!(value("suspect_median_hours"), 4.0);
        assert_eq!(figures["suspect_median_hours_1mb"].value, None);
        assert_eq!(figures["clean_host_days"].passes(), Some(false));
    }

    #[test]
    fn a_median_of_mostly_never_is_unknown() {
        assert_eq!(median(&mut [f64::INFINITY, 3.0, f64::INFINITY]), None);
        assert_eq!(median(&mut [5.0, 3.0, f64::INFINITY]), Some(5.0));
        assert_eq!(median(&mut []), None);
    }
}
