//! `cargo xtask bench`: measures, and writes `target/bench/NAME.json`.
//!
//! A figure that has a target says whether it meets it; one without is there to be watched.
//! Both sides of a comparison are measured in the same run, in turns, since the machine's speed
//! drifts more than the differences looked for. Numbers are those of the dev profile.

mod pairs;
mod parquet;
mod probes;

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
  cargo xtask bench                  every benchmark
  cargo xtask bench probes           what a traced cudaMalloc/cudaFree pair costs
  cargo xtask bench parquet --check  fail if a figure misses its target")]
pub struct Bench {
    /// Which benchmarks; all of them if none is named
    names: Vec<Name>,
    /// Fail if a figure misses its target
    #[arg(long)]
    check: bool,
    /// Measure here: a CUDA runtime library and how many pairs (what `probes` starts)
    #[arg(long, hide = true, num_args = 2, value_names = ["LIBRARY", "PAIRS"])]
    pairs: Option<Vec<String>>,
}

/// A benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Cost of a traced cudaMalloc/cudaFree pair on the stand-ins.
    Probes,
    /// Bytes per event as the lake stores them.
    Parquet,
}

/// One measured number.
#[derive(Debug, Clone, PartialEq)]
struct Figure {
    value: f64,
    unit: &'static str,
    /// Highest value that passes.
    target: Option<f64>,
}

type Figures = BTreeMap<&'static str, Figure>;

impl Figure {
    fn watched(value: f64, unit: &'static str) -> Self {
        Self {
            value,
            unit,
            target: None,
        }
    }

    fn at_most(value: f64, unit: &'static str, target: f64) -> Self {
        Self {
            value,
            unit,
            target: Some(target),
        }
    }

    fn passes(&self) -> Option<bool> {
        self.target.map(|target| self.value <= target)
    }

    fn to_json(&self) -> Value {
        json!({
            "value": self.value,
            "unit": self.unit,
            "target": self.target,
            "pass": self.passes(),
        })
    }
}

/// The command.
pub fn run(project: &Project, options: &Bench) -> Result<()> {
    if let Some(arguments) = &options.pairs {
        return pairs::print(arguments);
    }
    build::everything(project)?;
    let names = if options.names.is_empty() {
        Name::value_variants()
    } else {
        &options.names
    };
    let mut missed = Vec::new();
    for name in names {
        let (text, figures) = match name {
            Name::Probes => ("probes", probes::measure(project)?),
            Name::Parquet => ("parquet", parquet::measure(project)?),
        };
        let path = write(project, text, &figures)?;
        for (figure, measured) in &figures {
            println!("{}", line(figure, measured));
            if measured.passes() == Some(false) {
                missed.push(*figure);
            }
        }
        println!("written to {}", path.display());
    }
    if options.check && !missed.is_empty() {
        bail!("over target: {}", missed.join(", "));
    }
    Ok(())
}

fn line(name: &str, figure: &Figure) -> String {
    let verdict = match (figure.target, figure.passes()) {
        (Some(target), Some(true)) => format!("at most {target}: met"),
        (Some(target), _) => format!("at most {target}: MISSED"),
        (None, _) => String::new(),
    };
    format!(
        "{name:<28} {:>12.1} {:<16} {verdict}",
        figure.value, figure.unit
    )
    .trim_end()
    .to_string()
}

fn write(project: &Project, name: &str, figures: &Figures) -> Result<PathBuf> {
    let folder = project.target.join("bench");
    let path = folder.join(format!("{name}.json"));
    let figures: serde_json::Map<String, Value> = figures
        .iter()
        .map(|(name, figure)| ((*name).to_string(), figure.to_json()))
        .collect();
    let text = serde_json::to_string_pretty(&json!({ "figures": figures }))
        .context("failed to write JSON")?;
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&path, text + "\n"))
        .with_context(|| format!("failed to write {}", path.display()))?;
    Ok(path)
}

/// The middle value; 0 of nothing.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_over_its_target_misses() {
        assert_eq!(Figure::at_most(2.0, "us", 2.0).passes(), Some(true));
        assert_eq!(Figure::at_most(2.1, "us", 2.0).passes(), Some(false));
        assert_eq!(Figure::watched(9.0, "us").passes(), None);
        let json = Figure::watched(9.0, "us").to_json();
        assert!(json["target"].is_null() && json["pass"].is_null());
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(median(&mut [5.0, 1.0, 3.0]), 3.0);
    }
}
