//! What it costs to ask for leaks: `leak_by_stack` and the sum over raw events that stands behind
//! it, over 50 million events, beside DuckDB on the same files.
//!
//! DuckDB comes from PyPI into a folder under the target folder. Both get the same SQL and the same
//! Parquet files, in turns; each is a process of its own, and its answers must be equal.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::measurer::Measurer;
use super::{Bench, Figure, Figures, Target};
use crate::progress::{self, Step};
use crate::project::Project;

const ROUNDS: usize = 3;
const MIB: f64 = 1_048_576.0;
const MOST_MIB: f64 = 2048.0;

/// The version that figures are compared with.
const DUCKDB: &str = "duckdb==2.0.1";

/// Live bytes of every stack at the end of every half hour, by the events alone; then its growth.
/// SQL that both understand.
const SQL: &str = include_str!("leak_query.sql");

/// Runs the SQL in DuckDB over Parquet files, and prints the rows as JSON.
const PEER: &str = "
import duckdb, json, sys
connection = duckdb.connect()
connection.execute('SET enable_progress_bar = false')
files = sys.argv[1] + '/alloc_events/*.parquet'
connection.execute(f\"CREATE VIEW alloc_events AS SELECT * FROM read_parquet('{files}')\")
answer = connection.execute(sys.argv[2])
names = [column[0] for column in answer.description]
print(json.dumps([dict(zip(names, row)) for row in answer.fetchall()]))
";

/// Measures both.
pub fn measure(project: &Project, options: &Bench) -> Result<Figures> {
    let measurer = Measurer::ready(project, options)?;
    let product = super::import::program(project, options)?;
    let python = duckdb(project)?;
    let folder = project.target.join("bench").join("leak-query");
    super::daemon::empty(&folder)?;
    let bench = Runner {
        measurer,
        data: folder.join("data"),
    };
    let figures = bench.run(&product, &python, options.events);
    // Also if it failed: it is large.
    super::daemon::empty(&folder)?;
    figures
}

/// A Python with DuckDB, made once.
pub(super) fn duckdb(project: &Project) -> Result<PathBuf> {
    let folder = project.target.join("bench").join("duckdb");
    let python = folder.join("bin/python");
    let has_it = |python: &Path| {
        let script = "import duckdb, sys; sys.exit(duckdb.__version__ != sys.argv[1])";
        let version = DUCKDB.split("==").nth(1).unwrap_or_default();
        let asked = Command::new(python).args(["-c", script, version]).output();
        asked.is_ok_and(|output| output.status.success())
    };
    if has_it(&python) {
        return Ok(python);
    }
    let step = Step::start("making a Python environment for DuckDB");
    let mut command = Command::new("python3");
    command.args(["-m", "venv", "--clear"]).arg(&folder);
    progress::run(step, &mut command, |_, _| false)
        .context("DuckDB runs in Python: install python3 with venv")?;
    let step = Step::start("installing DuckDB");
    let mut command = Command::new(&python);
    command.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        DUCKDB,
    ]);
    progress::run(step, &mut command, |_, _| false).context("DuckDB comes from PyPI")?;
    ensure!(has_it(&python), "{} has no {DUCKDB}", python.display());
    Ok(python)
}

struct Runner {
    measurer: Measurer,
    data: PathBuf,
}

/// Seconds, bytes and rows of one question.
struct Asked {
    seconds: f64,
    peak_bytes: f64,
    rows: Vec<Value>,
}

impl Runner {
    fn ask(&self, command: &[&str]) -> Result<Asked> {
        let run = self.measurer.run(command)?;
        let rows = serde_json::from_str(&run.output)
            .with_context(|| format!("an answer is no JSON: {:.200}", run.output))?;
        Ok(Asked {
            seconds: run.seconds,
            peak_bytes: run.peak_bytes,
            rows,
        })
    }

    fn run(&self, product: &Path, python: &Path, events: usize) -> Result<Figures> {
        let data = self.data.to_string_lossy().into_owned();
        let step = Step::start(&format!("writing {events} events"));
        let written = self.measurer.tell(&[
            "leak-events",
            "--into",
            &data,
            "--rows",
            &events.to_string(),
        ])?;
        step.done("");
        let product = product.to_string_lossy();
        let ours = |sql: &str| {
            self.ask(&[
                &product, "sql", "--data", &data, "--format", "json", "-c", sql,
            ])
        };
        let peer = || self.ask(&[&python.to_string_lossy(), "-c", PEER, &data, SQL]);

        let mut step = Step::start("asking both in turns");
        step.set_total(ROUNDS as u64);
        let (mut sums, mut theirs, mut views) = (Vec::new(), Vec::new(), Vec::new());
        let (mut peak, mut their_peak, mut found): (f64, f64, usize) = (0.0, 0.0, 0);
        for round in 0..ROUNDS {
            step.at(round as u64, "sums over events, leak_by_stack");
            let (sum, other) = (ours(SQL)?, peer()?);
            same(&sum.rows, &other.rows)?;
            let view = ours("SELECT * FROM leak_by_stack")?;
            found = view.rows.len();
            peak = peak.max(sum.peak_bytes).max(view.peak_bytes);
            their_peak = their_peak.max(other.peak_bytes);
            sums.push(sum.seconds);
            theirs.push(other.seconds);
            views.push(view.seconds);
        }
        step.done("");
        let (sums, theirs, views) = (median(sums), median(theirs), median(views));
        Ok(Figures::from([
            (
                "duckdb_ratio",
                Figure::with_target(sums / theirs, "times", Target::AtMost(1.0)),
            ),
            (
                "view_ratio",
                Figure::with_target(views / theirs, "times", Target::AtMost(1.0)),
            ),
            (
                "peak_mib",
                Figure::with_target(peak / MIB, "MiB", Target::Below(MOST_MIB)),
            ),
            ("events_seconds", Figure::watched(sums, "s")),
            ("view_seconds", Figure::watched(views, "s")),
            ("duckdb_seconds", Figure::watched(theirs, "s")),
            ("duckdb_peak_mib", Figure::watched(their_peak / MIB, "MiB")),
            (
                "events",
                Figure::watched(written["events"].as_f64(), "events"),
            ),
            (
                "windows",
                Figure::watched(written["windows"].as_f64(), "rows"),
            ),
            ("leaks_found", Figure::watched(found as f64, "rows")),
        ]))
    }
}

/// Whether both gave the same rows; all columns are integers.
fn same(ours: &[Value], theirs: &[Value]) -> Result<()> {
    ensure!(!ours.is_empty(), "the events have no stacks");
    ensure!(
        ours.len() == theirs.len(),
        "{} rows, but {} from DuckDB",
        ours.len(),
        theirs.len()
    );
    for (ours, theirs) in ours.iter().zip(theirs) {
        ensure!(ours == theirs, "{ours}, but {theirs} from DuckDB");
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn other_answers_are_an_error() {
        let row = |live: i64| json!({"stack": 5, "live_bytes": live});
        assert!(same(&[row(1)], &[row(1)]).is_ok());
        let error = same(&[row(1)], &[row(2)]).unwrap_err().to_string();
        assert!(error.contains("from DuckDB"), "{error}");
        assert!(same(&[], &[]).is_err());
        assert!(same(&[row(1)], &[row(1), row(1)]).is_err());
    }
}
