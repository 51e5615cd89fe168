//! What a collector promises, and how fast it keeps it: the crash harness, ingest, and a fleet.
//!
//! The work is done by `vramscope-bench`, which knows the protocol and SQL and nothing of the
//! collector's inside; here it is built, watched, and its findings become figures.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value;

use super::measurer::Measurer;
use super::{Bench, Figure, Figures, Target};
use crate::commands::build;
use crate::progress::{self, Step};
use crate::project::Project;

const MIB: f64 = 1_048_576.0;

/// Options of crash, ingest and fleet.
#[derive(Debug, Args)]
pub struct Options {
    /// crash, ingest, fleet: this `vramscope-collector` instead of one built here
    #[arg(long, value_name = "PATH")]
    collector: Option<PathBuf>,
    /// crash, ingest, fleet: a flag of `vramscope-collector serve`, as --serve-flag=--X=Y; can be
    /// given several times
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    serve_flag: Vec<String>,
    /// crash: rounds, each with one great fault and some small ones
    #[arg(long, value_name = "N", default_value_t = 100)]
    rounds: usize,
    /// crash: repeat the plan of the run that printed this seed
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// crash: only this fault (kill, kill-after-acknowledgement, kill-in-commit,
    /// kill-in-compaction, power-cut, torn-power-cut, disk-full, kill-on-full-disk, stop); can be
    /// given several times
    #[arg(long, value_name = "FAULT")]
    only: Vec<String>,
    /// crash: let the collector acknowledge before it syncs; passes if that is found
    #[arg(long)]
    planted_bug: bool,
    /// ingest: seconds of the burst, and of the sustained phase
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// ingest: rows a second that are offered in the sustained phase
    #[arg(long, value_name = "N", default_value_t = 260_000)]
    rate: u64,
    /// fleet: agents
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    agents: usize,
    /// fleet: how long
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    minutes: f64,
}

/// The crash harness.
pub fn crash(project: &Project, bench: &Bench) -> Result<Figures> {
    let options = &bench.lake;
    let (measurer, collector) = match (&bench.vramscope_bench, &options.collector) {
        (Some(measurer), Some(collector)) => (measurer.clone(), collector.clone()),
        // It is about what is kept and not about speed: the profile of the tests.
        (measurer, collector) => {
            build::everything(project)?;
            let built = |name: &str| project.binary(name);
            (
                measurer.clone().unwrap_or_else(|| built("vramscope-bench")),
                collector
                    .clone()
                    .unwrap_or_else(|| built("vramscope-collector")),
            )
        }
    };
    let mut arguments = vec!["--rounds".to_string(), options.rounds.to_string()];
    if let Some(seed) = options.seed {
        arguments.extend(["--seed".to_string(), seed.to_string()]);
    }
    for fault in &options.only {
        arguments.extend(["--only".to_string(), fault.clone()]);
    }
    if options.planted_bug {
        arguments.push("--planted-bug".to_string());
    }
    let part = Part {
        name: "crash",
        step: "killing a collector",
        measurer,
        collector,
    };
    let found = part.run(project, options, &arguments)?;
    let findings = found["findings"].as_array().map_or(0, Vec::len);
    for finding in found["findings"].as_array().into_iter().flatten() {
        eprintln!("  {}", finding.as_str().unwrap_or_default());
    }
    if findings > 0 {
        let seed = found["seed"].as_str().unwrap_or_default();
        eprintln!("  data and logs are kept; repeat with --seed {seed}");
    } else {
        super::daemon::empty(&part.folder(project))?;
    }
    if options.planted_bug {
        let caught = Target::AtLeast(1.0);
        return Ok(Figures::from([
            (
                "planted_bug_found",
                Figure::with_target(findings as f64, "findings", caught),
            ),
            ("lost", Figure::watched(found["lost"].as_f64(), "rows")),
        ]));
    }
    let mut figures = Figures::new();
    for (name, unit) in [
        ("lost", "rows"),
        ("doubled", "rows"),
        ("foreign", "rows"),
        ("changed", "batches"),
        ("broken", "findings"),
    ] {
        let none = Target::AtMost(0.0);
        figures.insert(name, Figure::with_target(found[name].as_f64(), unit, none));
    }
    for (name, unit) in [
        ("rounds", "rounds"),
        ("kills", "kills"),
        ("power_cuts", "cuts"),
        ("torn_tails", "files"),
        ("moved_names", "files"),
        ("network_cuts", "cuts"),
        ("disks_filled", "times"),
        ("agent_kills", "kills"),
        ("compactions_met", "times"),
        ("acknowledged_batches", "batches"),
        ("acknowledged_rows", "rows"),
        ("resent_batches", "batches"),
        ("forged_batches", "batches"),
        ("visible_after_ms", "ms"),
    ] {
        figures.insert(name, Figure::watched(found[name].as_f64(), unit));
    }
    Ok(figures)
}

/// Rows a second with durable acknowledgement.
pub fn ingest(project: &Project, bench: &Bench) -> Result<Figures> {
    let options = &bench.lake;
    let part = Part::in_release(project, bench, "ingest", "sending from a hundred agents")?;
    let seconds = options.seconds.to_string();
    let arguments = [
        "--seconds",
        &seconds,
        "--sustained-seconds",
        &seconds,
        "--rate",
        &options.rate.to_string(),
    ]
    .map(str::to_string);
    let found = part.run(project, options, &arguments)?;
    super::daemon::empty(&part.folder(project))?;
    tell_trouble(&found);
    let number = |name: &str| found[name].as_f64();
    let at_least =
        |name: &str, limit| Figure::with_target(number(name), "rows/s", Target::AtLeast(limit));
    let none = |name: &str, unit| Figure::with_target(number(name), unit, Target::AtMost(0.0));
    Ok(Figures::from([
        ("rows_per_second", at_least("rows_per_second", 500_000.0)),
        (
            "sustained_rows_per_second",
            at_least("sustained_rows_per_second", 250_000.0),
        ),
        (
            "ack_p99_ms",
            Figure::with_target(number("ack_p99_ms"), "ms", Target::Below(250.0)),
        ),
        (
            "rss_mib",
            rss(&found, "peak_bytes", Some(Target::Below(1024.0))),
        ),
        ("lost", none("lost", "rows")),
        ("doubled", none("doubled", "rows")),
        ("changed", none("changed", "agents")),
        ("refused", none("refused", "batches")),
        (
            "drain_seconds",
            Figure::watched(number("drain_seconds"), "s"),
        ),
        (
            "backlog_rows",
            Figure::watched(number("backlog_rows"), "rows"),
        ),
        (
            "backlog_growth",
            Figure::watched(number("backlog_growth"), "rows/s"),
        ),
        (
            "burst_ack_p99_ms",
            Figure::watched(number("burst_ack_p99_ms"), "ms"),
        ),
        ("ack_p50_ms", Figure::watched(number("ack_p50_ms"), "ms")),
        ("put_off", Figure::watched(number("put_off"), "answers")),
        (
            "broken_streams",
            Figure::watched(number("broken_streams"), "streams"),
        ),
    ]))
}

/// Thousands of agents.
pub fn fleet(project: &Project, bench: &Bench) -> Result<Figures> {
    /// What "flat" means, between the half and the end of a run.
    const FLAT: Target = Target::AtMost(1.25);
    let options = &bench.lake;
    let part = Part::in_release(project, bench, "fleet", "behaving as a fleet")?;
    let arguments = [
        "--agents",
        &options.agents.to_string(),
        "--seconds",
        &format!("{:.0}", options.minutes * 60.0),
    ]
    .map(str::to_string);
    let found = part.run(project, options, &arguments)?;
    super::daemon::empty(&part.folder(project))?;
    tell_trouble(&found);
    let number = |name: &str| found[name].as_f64();
    let ratio = |over: &str, under: &str| Some(number(over)? / number(under)?.max(1.0));
    let none = |name: &str, unit| Figure::with_target(number(name), unit, Target::AtMost(0.0));
    let watched = |name: &str, unit| Figure::watched(number(name), unit);
    let memory_growth = Figure::with_target(ratio("end_bytes", "half_bytes"), "times", FLAT);
    let files_growth =
        Figure::with_target(ratio("live_files_end", "live_files_half"), "times", FLAT);
    Ok(Figures::from([
        ("lost", none("lost", "rows")),
        ("doubled", none("doubled", "rows")),
        ("changed", none("changed", "agents")),
        ("refused", none("refused", "batches")),
        ("memory_growth", memory_growth),
        ("files_growth", files_growth),
        (
            "rss_mib",
            rss(&found, "peak_bytes", Some(Target::Below(1024.0))),
        ),
        ("rss_half_mib", rss(&found, "half_bytes", None)),
        ("rss_end_mib", rss(&found, "end_bytes", None)),
        ("live_files_most", watched("live_files_most", "files")),
        ("live_files_end", watched("live_files_end", "files")),
        ("files_on_disk_end", watched("files_on_disk_end", "files")),
        (
            "batches_per_second",
            watched("batches_per_second", "batches/s"),
        ),
        (
            "offered_batches_per_second",
            watched("offered_batches_per_second", "batches/s"),
        ),
        ("ack_p99_ms", watched("ack_p99_ms", "ms")),
        ("ack_p50_ms", watched("ack_p50_ms", "ms")),
        (
            "acknowledged_batches",
            watched("acknowledged_batches", "batches"),
        ),
        ("put_off", watched("put_off", "answers")),
        ("broken_streams", watched("broken_streams", "streams")),
        ("storms", watched("storms", "storms")),
    ]))
}

fn rss(found: &Value, name: &str, target: Option<Target>) -> Figure {
    Figure {
        value: found[name].as_f64().map(|bytes| bytes / MIB),
        unit: "MiB",
        target,
    }
}

/// What agents ran into last, which need not be wrong.
fn tell_trouble(found: &Value) {
    match found["trouble"].as_str() {
        None | Some("") => {}
        Some(trouble) => eprintln!("  the last trouble of an agent: {trouble}"),
    }
}

/// A part of `vramscope-bench` against a collector.
struct Part {
    name: &'static str,
    step: &'static str,
    measurer: PathBuf,
    collector: PathBuf,
}

impl Part {
    fn in_release(
        project: &Project,
        bench: &Bench,
        name: &'static str,
        step: &'static str,
    ) -> Result<Part> {
        Ok(Part {
            name,
            step,
            measurer: Measurer::ready(project, bench)?.path().to_path_buf(),
            collector: match &bench.lake.collector {
                Some(path) => path.clone(),
                None => collector(project)?,
            },
        })
    }

    fn folder(&self, project: &Project) -> PathBuf {
        project.target.join("bench").join(self.name)
    }

    /// Runs it on an empty folder behind a bar. Gives what it printed.
    fn run(&self, project: &Project, options: &Options, arguments: &[String]) -> Result<Value> {
        let folder = self.folder(project);
        super::daemon::empty(&folder)?;
        let mut command = Command::new(&self.measurer);
        command.arg(self.name);
        command.arg("--collector").arg(absolute(&self.collector)?);
        command.arg("--folder").arg(&folder).args(arguments);
        for flag in &options.serve_flag {
            command.arg(format!("--serve-flag={flag}"));
        }
        let mut json = None;
        progress::run(Step::start(self.step), &mut command, |line, step| {
            if let Some((position, total, message)) = position(line) {
                step.set_total(total);
                step.at(position, message);
                return true;
            }
            if line.starts_with('{') {
                json = serde_json::from_str(line).ok();
                return true;
            }
            if line.starts_with("crash: seed") || line.starts_with("SKIPPED") {
                eprintln!("  {line}");
            }
            false
        })?;
        json.with_context(|| format!("vramscope-bench {} printed no JSON", self.name))
    }
}

/// `progress POSITION TOTAL MESSAGE`, as `vramscope-bench` says how far it is.
fn position(line: &str) -> Option<(u64, u64, &str)> {
    let mut words = line.strip_prefix("progress ")?.splitn(3, ' ');
    let (position, total) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some((position, total, words.next().unwrap_or_default()))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    ensure!(path.is_file(), "no program {}", path.display());
    std::path::absolute(path).with_context(|| format!("failed to find {}", path.display()))
}

/// The collector that is measured.
fn collector(project: &Project) -> Result<PathBuf> {
    build::query_engine(project)?;
    Ok(project.release_binary("vramscope-collector"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_progress_are_told_from_others() {
        assert_eq!(
            position("progress 3 100 PowerCut"),
            Some((3, 100, "PowerCut"))
        );
        assert_eq!(
            position("progress 0 9 until it is gone"),
            Some((0, 9, "until it is gone"))
        );
        assert_eq!(position("crash: seed 7"), None);
        assert_eq!(position("progress of a kind"), None);
    }
}
