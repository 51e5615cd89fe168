//! Events that the allocator's simulator replays in a second on one core.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Figure, Figures, Target};
use crate::children::output;
use crate::progress::Step;
use crate::project::Project;

const TARGET_EVENTS: f64 = 5_000_000.0;

/// Replays generated traces in a process of one thread.
pub fn measure(project: &Project) -> Result<Figures> {
    let step = Step::start("replaying traces through the simulator");
    let mut command = Command::new(project.release_binary("vramscope-bench"));
    command.arg("simulate");
    let output = output(&mut command)?;
    if !output.status.success() {
        bail!(
            "failed to replay: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    step.done("");
    let measured: Value =
        serde_json::from_slice(&output.stdout).context("the replay printed no JSON")?;
    let rate = |name: &str| measured[name].as_f64();
    let watched = |name: &str| Figure::watched(rate(name), "events/s");
    Ok(Figures::from([
        (
            "events_per_second",
            Figure::with_target(rate("training"), "events/s", Target::AtLeast(TARGET_EVENTS)),
        ),
        ("expandable_per_second", watched("training_expandable")),
        ("split_limit_per_second", watched("training_split_limit")),
        ("churn_per_second", watched("churn")),
        ("events", Figure::watched(rate("events"), "events")),
    ]))
}
