//! What the questions cost that people start from: ten of them over a day of a fleet, beside DuckDB
//! on the same files.
//!
//! The lake is made by `vramscope-bench query-lake` in the layout that compaction leaves. Both get
//! the same SQL: where a question asks a view, DuckDB gets the view's own text from `queries/sql`.
//! Each question is asked [`ROUNDS`] times in one process of either, in turns; time is that of one
//! answer, without the start of its process, and the answers have to be equal.

mod questions;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::leak_query::duckdb;
use super::measurer::{Measurer, Run};
use super::{Bench, Figure, Figures, Target};
use crate::progress::Step;
use crate::project::Project;
use questions::{Question, Values};

const ROUNDS: usize = 5;
const MIB: f64 = 1_048_576.0;

/// What one question may take.
const MOST_MIB: f64 = 2048.0;

/// Share of the lake's bytes that the question for one process and one hour may read.
const POINT_SHARE: f64 = 0.01;

/// Tables that the questions and their views read.
const TABLES: [&str; 8] = [
    "alloc_events",
    "stacks",
    "processes",
    "devices",
    "agent_windows",
    "stack_windows",
    "device_windows",
    "allocator_samples",
];

/// Views that the questions ask, each after those that it reads.
const VIEWS: [&str; 9] = [
    "current_processes",
    "framework_processes",
    "call_chains",
    "process_totals",
    "live_allocations",
    "top_stacks",
    "reconciliation",
    "stack_history",
    "answer_quality",
];

/// Asks DuckDB one question several times; prints seconds of each, and the last rows, as JSON.
const PEER: &str = include_str!("peer.py");

/// Measures both.
pub fn measure(project: &Project, options: &Bench) -> Result<Figures> {
    let measurer = Measurer::ready(project, options)?;
    let product = super::import::program(project, options)?;
    let python = duckdb(project)?;
    let folder = project.target.join("bench").join("query");
    super::daemon::empty(&folder)?;
    let bench = Runner {
        measurer,
        product,
        python,
        data: folder.join("data"),
        views: project.root.join("queries/sql"),
    };
    let figures = bench.run(options.rows);
    // Also if it failed: it is large.
    super::daemon::empty(&folder)?;
    figures
}

struct Runner {
    measurer: Measurer,
    product: PathBuf,
    python: PathBuf,
    data: PathBuf,
    views: PathBuf,
}

/// One question's answer.
struct Asked {
    /// Of the median round.
    seconds: f64,
    peak_bytes: f64,
    rows: Vec<Value>,
}

impl Runner {
    fn product(&self, format: &str, sql: &str) -> Result<Run> {
        let (product, data) = (self.product.to_string_lossy(), self.data.to_string_lossy());
        self.measurer.run(&[
            &product, "sql", "--data", &data, "--format", format, "-c", sql,
        ])
    }

    /// The product says under each table how long its answer took.
    fn ours(&self, sql: &str) -> Result<Asked> {
        let timed = self.product("table", &[sql; ROUNDS].join(";\n"))?;
        let seconds = seconds_told(&timed.output)?;
        ensure!(
            seconds.len() == ROUNDS,
            "{} answers instead of {ROUNDS}",
            seconds.len()
        );
        let told: f64 = seconds.iter().sum();
        ensure!(
            told <= timed.seconds,
            "answers took {told} s, their process {} s",
            timed.seconds
        );
        let answer = self.product("json", sql)?;
        Ok(Asked {
            seconds: median(seconds),
            peak_bytes: timed.peak_bytes,
            rows: rows(&answer.output)?,
        })
    }

    fn theirs(&self, sql: &str) -> Result<Asked> {
        let (python, data) = (self.python.to_string_lossy(), self.data.to_string_lossy());
        let (tables, views) = (TABLES.join(","), VIEWS.join(","));
        let rounds = ROUNDS.to_string();
        let sources = self.views.to_string_lossy();
        let run = self.measurer.run(&[
            &python, "-c", PEER, &data, &tables, &sources, &views, &rounds, sql,
        ])?;
        let answer: Value =
            serde_json::from_str(&run.output).context("DuckDB's answer is no JSON")?;
        let seconds = answer["seconds"]
            .as_array()
            .context("DuckDB told no times")?;
        let seconds = seconds.iter().filter_map(Value::as_f64).collect();
        Ok(Asked {
            seconds: median(seconds),
            peak_bytes: run.peak_bytes,
            rows: answer["rows"].as_array().cloned().unwrap_or_default(),
        })
    }

    /// Bytes that a process reads for a question, less those that it reads for none.
    fn bytes_read(&self, sql: &str) -> Result<f64> {
        let read = |sql: &str| Ok::<_, anyhow::Error>(self.product("json", sql)?.read_bytes);
        Ok((read(sql)? - read("SELECT 1 AS one")?).max(0.0))
    }

    fn run(&self, rows: usize) -> Result<Figures> {
        let data = self.data.to_string_lossy();
        let step = Step::start(&format!("writing {rows} events"));
        let written =
            self.measurer
                .tell(&["query-lake", "--into", &data, "--rows", &rows.to_string()])?;
        step.done("");
        let values = Values::read(&written)?;
        let lake_bytes = number(&written, "bytes")?;

        let questions = questions::all(&values);
        let mut step = Step::start("asking both in turns");
        step.set_total(questions.len() as u64);
        let mut figures = Figures::new();
        let (mut worst, mut peak, mut their_peak): (f64, f64, f64) = (0.0, 0.0, 0.0);
        for (number, question) in questions.iter().enumerate() {
            step.at(number as u64, question.name);
            let (ours, theirs) = self.ask(question)?;
            let ratio = ours.seconds / theirs.seconds;
            worst = worst.max(ratio);
            peak = peak.max(ours.peak_bytes);
            their_peak = their_peak.max(theirs.peak_bytes);
            let [ratio_name, ours_name, theirs_name] = question.figures;
            figures.insert(ratio_name, Figure::watched(ratio, "times"));
            figures.insert(ours_name, Figure::watched(ours.seconds * 1000.0, "ms"));
            figures.insert(theirs_name, Figure::watched(theirs.seconds * 1000.0, "ms"));
        }
        step.done("");
        let point = self.bytes_read(&questions[0].sql)? / lake_bytes;
        figures.extend([
            (
                "worst_duckdb_ratio",
                Figure::with_target(worst, "times", Target::AtMost(1.0)),
            ),
            (
                "peak_mib",
                Figure::with_target(peak / MIB, "MiB", Target::Below(MOST_MIB)),
            ),
            (
                "point_bytes_share",
                Figure::with_target(point, "of the lake", Target::AtMost(POINT_SHARE)),
            ),
            ("duckdb_peak_mib", Figure::watched(their_peak / MIB, "MiB")),
            ("rows", Figure::watched(written["rows"].as_f64(), "rows")),
            ("lake_mib", Figure::watched(lake_bytes / MIB, "MiB")),
        ]);
        Ok(figures)
    }

    fn ask(&self, question: &Question) -> Result<(Asked, Asked)> {
        let failed = |who: &str| format!("{who} failed at {}", question.name);
        let ours = self
            .ours(&question.sql)
            .with_context(|| failed("vramscope"))?;
        let theirs = self
            .theirs(&question.sql)
            .with_context(|| failed("DuckDB"))?;
        same(&ours.rows, &theirs.rows)
            .with_context(|| format!("answers differ at {}", question.name))?;
        Ok((ours, theirs))
    }
}

fn number(run: &Value, name: &str) -> Result<f64> {
    let found = run[name].as_f64();
    found.with_context(|| format!("a measurement lacks {name}"))
}

fn rows(json: &str) -> Result<Vec<Value>> {
    serde_json::from_str(json).with_context(|| format!("an answer is no JSON: {json:.200}"))
}

/// The times in lines such as `(20 rows, 0.123 s)`.
fn seconds_told(output: &str) -> Result<Vec<f64>> {
    let told = output.lines().filter_map(|line| {
        let inner = line.strip_prefix('(')?.strip_suffix(" s)")?;
        inner.rsplit_once(", ").map(|(_, seconds)| seconds)
    });
    told.map(|seconds| {
        seconds
            .parse()
            .with_context(|| format!("{seconds:?} is no time"))
    })
    .collect()
}

/// Whether both gave the same rows, in the same order. Numbers may differ in their last digits:
/// sums of floating-point numbers depend on their order.
fn same(ours: &[Value], theirs: &[Value]) -> Result<()> {
    ensure!(!ours.is_empty(), "the answer has no rows");
    ensure!(
        ours.len() == theirs.len(),
        "{} rows, but {} from DuckDB",
        ours.len(),
        theirs.len()
    );
    for (ours, theirs) in ours.iter().zip(theirs) {
        let (Some(left), Some(right)) = (ours.as_object(), theirs.as_object()) else {
            bail!("a row is no object: {ours}");
        };
        // A column whose value is NULL may be left out.
        let names = left.keys().chain(right.keys());
        for name in names {
            let (left, right) = (&ours[name], &theirs[name]);
            ensure!(
                is_same(left, right),
                "{name} is {left}, but {right} from DuckDB"
            );
        }
    }
    Ok(())
}

fn is_same(ours: &Value, theirs: &Value) -> bool {
    match (ours.as_f64(), theirs.as_f64()) {
        (Some(left), Some(right)) => (left - right).abs() <= 1e-9 * left.abs().max(right.abs()),
        _ => ours == theirs,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn times_are_read_from_under_the_tables() {
        let output = "| a |\n(1 row, 0.250 s)\n| a |\n(20 rows, 1.5 s)\n";
        assert_eq!(seconds_told(output).unwrap(), [0.25, 1.5]);
    }

    #[test]
    fn other_answers_are_an_error() {
        let row = |bytes: f64| json!({"host": "a", "bytes": bytes});
        assert!(same(&[row(1.0)], &[row(1.0 + 1e-12)]).is_ok());
        assert!(same(&[row(1.0)], &[row(1.001)]).is_err());
        assert!(same(&[], &[]).is_err());
        assert!(same(&[row(1.0)], &[]).is_err());
        assert!(same(&[json!({"a": null})], &[json!({})]).is_ok());
    }
}
