//! Bytes on disk per event, in the files as the agent's spool writes them at its default
//! interval: pairs of an allocation and a free from 200 distinct stacks.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::agent::{Scene, wait_for_calls};
use super::{Figure, Figures, Target};
use crate::children::output;
use crate::progress::Step;
use crate::project::Project;

const TARGET_BYTES: f64 = 20.0;

/// What a busy serving engine makes; files at this rate hold some ten thousand rows.
const RATE: u64 = 20_000;
const TIME: Duration = Duration::from_secs(10);

/// Columns that are shown.
const SHOWN: usize = 8;

/// Runs the workload under an agent without a collector, and weighs what is in the spool.
pub fn measure(project: &Project) -> Result<Figures> {
    let folder = project.target.join("bench").join("parquet");
    let mut scene = Scene::start(project, &folder)?;
    let step = Step::start(&format!("{RATE} events a second for {} s", TIME.as_secs()));
    let mut generator = scene.churn(TIME, RATE)?;
    wait_for_calls(&mut generator, TIME)?;
    let status = scene.agent.wait_until_read(Duration::from_secs(60))?;
    scene.agent.stop()?;
    step.done("");
    if status.lost() > 0 {
        eprintln!("  {} events were lost", status.lost());
    }

    let spool = scene.agent.spool();
    let mut command = Command::new(project.release_binary("vramscope-bench"));
    command.arg("weigh");
    let files =
        std::fs::read_dir(&spool).with_context(|| format!("failed to read {}", spool.display()))?;
    for file in files {
        let path = file.context("failed to read the spool")?.path();
        if path.to_string_lossy().ends_with("-alloc_events.parquet") {
            command.arg(path);
        }
    }
    let output = output(&mut command)?;
    if !output.status.success() {
        bail!(
            "failed to weigh the spool: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let weighed: Value =
        serde_json::from_slice(&output.stdout).context("the weighing printed no JSON")?;
    let number = |name: &str| weighed[name].as_f64().unwrap_or(0.0);
    let rows = number("rows");
    if rows == 0.0 {
        bail!("the spool in {} has no events", spool.display());
    }
    show_columns(&weighed, rows);
    Ok(Figures::from([
        (
            "bytes_per_event",
            Figure::with_target(
                number("bytes") / rows,
                "bytes/event",
                Target::AtMost(TARGET_BYTES),
            ),
        ),
        ("rows", Figure::watched(rows, "events")),
        ("files", Figure::watched(number("files"), "files")),
        (
            "footer_bytes_per_event",
            Figure::watched(number("footer_bytes") / rows, "bytes/event"),
        ),
    ]))
}

/// Says which columns take most.
fn show_columns(weighed: &Value, rows: f64) {
    let columns = weighed["column_bytes"].as_object();
    let mut columns: Vec<(&String, f64)> = columns
        .into_iter()
        .flatten()
        .map(|(name, bytes)| (name, bytes.as_f64().unwrap_or(0.0) / rows))
        .collect();
    columns.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shown: Vec<String> = columns
        .iter()
        .take(SHOWN)
        .map(|(name, bytes)| format!("{name} {bytes:.2}"))
        .collect();
    eprintln!("  bytes an event by column: {}", shown.join(", "));
}
