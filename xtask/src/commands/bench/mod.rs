//! `cargo xtask bench`: measures, prints a table, and writes `target/bench/NAME.json`.
//!
//! A figure with a target says whether it meets it; one without is there to be watched. A figure
//! that could not be measured is NULL, with the reason on standard error, and misses its target.
//! Both sides of a comparison are measured in the same run, in turns, since the machine's speed
//! drifts more than the differences looked for. What is measured is built in the release profile.

mod agent;
mod daemon;
mod framework;
mod import;
mod lake;
mod leak_query;
mod leaks;
mod measurer;
mod parquet;
mod probes;
mod python;
mod query;
mod simulate;
mod stacks;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::build;
use crate::project::Project;

/// Measures what tracing costs; writes target/bench/NAME.json.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask bench probes           what a traced call costs, against an empty probe and bpftrace
  cargo xtask bench agent --check    events a second, losses, CPU, memory; exit 1 if a target is missed
  cargo xtask bench framework        what tracing costs a pair of PyTorch's allocator
  cargo xtask bench parquet --json   bytes per event; prints what it wrote as JSON
  cargo xtask bench import           vramscope import against Python; builds the query engine in
                                     release, which takes 40 minutes the first time on two cores
  cargo xtask bench stacks           what a copied stack costs the traced call and the agent, and what
                                     Python frames do
  cargo xtask bench simulate --check events a second through the allocator's simulator
  cargo xtask bench leaks --check    precision, recall and false alarms of the leak detectors on
                                     simulated hosts; an hour or so; needs vramscope in release
  cargo xtask bench leaks --runs 25 --seeds tuning --vramscope target/debug/vramscope
  cargo xtask bench leak-query       leak_by_stack over 50 million events, and DuckDB beside it
  cargo xtask bench query --check    ten questions over a lake of 100 million events, and DuckDB
                                     beside it; 4 GB of disk, some ten minutes
  cargo xtask bench query --rows 5000000 --vramscope target/release/vramscope
  cargo xtask bench crash --check    100 rounds of kills, power cuts, full disks and cut networks: rows
                                     lost and doubled; --rounds 5 for a short run
  cargo xtask bench crash --planted-bug --only power-cut --rounds 1
                                     whether the harness finds a collector that acknowledges too early
  cargo xtask bench ingest --check   rows a second with durable acknowledgement; needs the collector
                                     in release, which takes 40 minutes the first time on two cores
  cargo xtask bench ingest --collector target/debug/vramscope-collector --seconds 5
  cargo xtask bench fleet --agents 10000 --minutes 10
  cargo xtask bench                  all of them

All but import, leaks, leak-query, query, crash, ingest and fleet need root; crash can do more with it. They want at least two CPUs, and a machine that is otherwise idle.")]
pub struct Bench {
    /// Which benchmarks; all of them if none is named
    names: Vec<Name>,
    /// Fail if a figure misses its target
    #[arg(long)]
    check: bool,
    /// Print the JSON instead of a table
    #[arg(long)]
    json: bool,
    /// import: a Python with PyTorch to compare with, instead of the one in the vendors' cache
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// leaks: pairs of a leaky host and its clean twin
    #[arg(long, value_name = "N", default_value_t = 300)]
    runs: usize,
    /// leaks: hosts that detectors are tuned on, or those kept for reports
    #[arg(long, value_enum, default_value_t = leaks::Seeds::Report)]
    seeds: leaks::Seeds,
    /// leak-query: events in the tables
    #[arg(long, value_name = "N", default_value_t = 50_000_000)]
    events: usize,
    /// query: events in the lake
    #[arg(long, value_name = "N", default_value_t = 100_000_000)]
    rows: usize,
    /// leaks, leak-query, query, crash, ingest, fleet: this `vramscope-bench` instead of one built here
    #[arg(long, value_name = "PATH")]
    vramscope_bench: Option<PathBuf>,
    /// import, leaks, leak-query, query: measure this `vramscope` instead of one built in release
    #[arg(long, value_name = "PATH")]
    vramscope: Option<PathBuf>,
    #[command(flatten)]
    lake: lake::Options,
}

/// A benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Cost of a traced call against an empty pair of probes and against bpftrace.
    Probes,
    /// The whole agent: events a second on one core, losses, CPU, memory.
    Agent,
    /// Cost of a traced pair of PyTorch's allocator against empty probes at the same places.
    Framework,
    /// Bytes per event in the files of the agent's spool.
    Parquet,
    /// `vramscope import` against Python and PyTorch's own view of a snapshot.
    Import,
    /// Allocator events a second through the simulator.
    Simulate,
    /// Cost of a call whose stack is copied, of unwinding it, and of reading Python frames.
    Stacks,
    /// Precision, recall and false alarms of the leak detectors.
    Leaks,
    /// What the question for leaks costs over many events, against DuckDB.
    LeakQuery,
    /// What the questions cost that people start from, against DuckDB.
    Query,
    /// What a collector loses or doubles under kills, power cuts, full disks and cut networks.
    Crash,
    /// Rows a second that a collector takes with durable acknowledgements.
    Ingest,
    /// Thousands of agents with little to say, and their return all at once.
    Fleet,
}

impl Name {
    /// Whether it runs the agent on this machine.
    fn traces(self) -> bool {
        !matches!(
            self,
            Name::Import
                | Name::Leaks
                | Name::LeakQuery
                | Name::Query
                | Name::Crash
                | Name::Ingest
                | Name::Fleet
        )
    }
}

/// Which values are good enough.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Target {
    AtMost(f64),
    Below(f64),
    AtLeast(f64),
}

/// One measured number; `None` if it could not be measured.
#[derive(Debug, Clone, PartialEq)]
struct Figure {
    value: Option<f64>,
    unit: &'static str,
    target: Option<Target>,
}

type Figures = BTreeMap<&'static str, Figure>;

impl Figure {
    fn watched(value: impl Into<Option<f64>>, unit: &'static str) -> Self {
        Self {
            value: value.into(),
            unit,
            target: None,
        }
    }

    fn with_target(value: impl Into<Option<f64>>, unit: &'static str, target: Target) -> Self {
        Self {
            value: value.into(),
            unit,
            target: Some(target),
        }
    }

    /// `None` without a target.
    fn passes(&self) -> Option<bool> {
        let target = self.target?;
        Some(self.value.is_some_and(|value| match target {
            Target::AtMost(limit) => value <= limit,
            Target::Below(limit) => value < limit,
            Target::AtLeast(limit) => value >= limit,
        }))
    }

    fn to_json(&self) -> Value {
        let target = self.target.map(|target| match target {
            Target::AtMost(limit) | Target::Below(limit) | Target::AtLeast(limit) => limit,
        });
        json!({
            "value": self.value,
            "unit": self.unit,
            "target": target,
            "pass": self.passes(),
        })
    }
}

/// The command.
pub fn run(project: &Project, options: &Bench) -> Result<()> {
    let names = if options.names.is_empty() {
        Name::value_variants()
    } else {
        &options.names
    };
    if names.iter().any(|name| name.traces()) {
        daemon::require_root()?;
        build::for_measuring(project)?;
        daemon::warn_of_other_agents()?;
    }
    let mut missed = Vec::new();
    for name in names {
        let (text, figures) = match name {
            Name::Probes => ("probes", probes::measure(project)?),
            Name::Agent => ("agent", agent::measure(project)?),
            Name::Framework => ("framework", framework::measure(project)?),
            Name::Parquet => ("parquet", parquet::measure(project)?),
            Name::Import => ("import", import::measure(project, options)?),
            Name::Simulate => ("simulate", simulate::measure(project)?),
            Name::Stacks => {
                let mut figures = stacks::measure(project)?;
                figures.extend(python::measure(project)?);
                ("stacks", figures)
            }
            Name::Leaks => ("leaks", leaks::measure(project, options)?),
            Name::LeakQuery => ("leak-query", leak_query::measure(project, options)?),
            Name::Query => ("query", query::measure(project, options)?),
            Name::Crash => ("crash", lake::crash(project, options)?),
            Name::Ingest => ("ingest", lake::ingest(project, options)?),
            Name::Fleet => ("fleet", lake::fleet(project, options)?),
        };
        let json = to_json(&figures)?;
        let path = write(project, text, &json)?;
        if options.json {
            print!("{json}");
        } else {
            for (figure, measured) in &figures {
                println!("{}", line(figure, measured));
            }
        }
        eprintln!("written to {}", path.display());
        let over = figures
            .iter()
            .filter(|(_, figure)| figure.passes() == Some(false));
        missed.extend(over.map(|(figure, _)| *figure));
    }
    if options.check && !missed.is_empty() {
        bail!("target missed: {}", missed.join(", "));
    }
    Ok(())
}

fn line(name: &str, figure: &Figure) -> String {
    let value = match figure.value {
        None => "NULL".to_string(),
        Some(value) if value.abs() >= 1000.0 => format!("{value:.0}"),
        Some(value) => format!("{value:.2}"),
    };
    let target = figure.target.map(|target| match target {
        Target::AtMost(limit) => format!("at most {limit}"),
        Target::Below(limit) => format!("below {limit}"),
        Target::AtLeast(limit) => format!("at least {limit}"),
    });
    let verdict = match (target, figure.passes()) {
        (Some(target), Some(true)) => format!("{target}: met"),
        (Some(target), _) => format!("{target}: MISSED"),
        (None, _) => String::new(),
    };
    let unit = figure.unit;
    format!("{name:<34} {value:>12} {unit:<16} {verdict}")
        .trim_end()
        .to_string()
}

fn to_json(figures: &Figures) -> Result<String> {
    let figures: serde_json::Map<String, Value> = figures
        .iter()
        .map(|(name, figure)| ((*name).to_string(), figure.to_json()))
        .collect();
    let text = serde_json::to_string_pretty(&json!({ "figures": figures }))
        .context("failed to write JSON")?;
    Ok(text + "\n")
}

fn write(project: &Project, name: &str, json: &str) -> Result<PathBuf> {
    let folder = project.target.join("bench");
    let path = folder.join(format!("{name}.json"));
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&path, json))
        .with_context(|| format!("failed to write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_beyond_its_target_misses() {
        let passes = |value: f64, target| Figure::with_target(value, "us", target).passes();
        assert_eq!(passes(2.0, Target::AtMost(2.0)), Some(true));
        assert_eq!(passes(2.1, Target::AtMost(2.0)), Some(false));
        assert_eq!(passes(5.0, Target::Below(5.0)), Some(false));
        assert_eq!(passes(2.0, Target::AtLeast(2.0)), Some(true));
        assert_eq!(passes(1.9, Target::AtLeast(2.0)), Some(false));
        assert_eq!(Figure::watched(9.0, "us").passes(), None);
    }

    /// What was not measured must not pass.
    #[test]
    fn an_unknown_figure_is_null_and_misses() {
        let unknown = Figure::with_target(None, "us", Target::AtMost(1.0));
        assert_eq!(
            unknown.to_json(),
            json!({"value": null, "unit": "us", "target": 1.0, "pass": false})
        );
        let watched = Figure::watched(None, "us");
        assert_eq!(
            watched.to_json(),
            json!({"value": null, "unit": "us", "target": null, "pass": null})
        );
    }
}
