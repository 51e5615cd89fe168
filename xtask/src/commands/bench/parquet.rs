//! Bytes on disk per event, in the lake that a collector makes of a serving workload's stream.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Figure, Figures};
use crate::compare::number;
use crate::progress::Step;
use crate::project::Project;
use crate::system::{Driver, System};

const REQUESTS: &str = "4000";
const LIMIT: Duration = Duration::from_secs(180);

/// 17 bytes an event were measured on sorted files of millions of events; a stream that is
/// committed a few times a second carries more footers and less order.
const TARGET_BYTES: f64 = 40.0;

/// Runs the serving workload through agent and collector and weighs the table's files.
pub fn measure(project: &Project) -> Result<Figures> {
    let folder = project.target.join("bench").join("parquet");
    let mut system = System::new(project, &folder, Driver::stand_ins(project))?;
    let step = Step::start("streaming a serving workload into a lake");
    system.start_collector()?;
    system.start_agent()?;
    let mut workload = system.start_workload(&["demo", "--requests", REQUESTS])?;
    workload.wait_success(LIMIT)?;
    system.wait_until_ended(&[workload.id()], LIMIT)?;
    system.stop_agent()?;
    system.stop_collector()?;
    step.done("");

    let rows = system.query("SELECT count(*) AS events FROM alloc_events")?;
    let events = rows.first().map(|row| number(row, "events"));
    let events = events.transpose()?.flatten().unwrap_or(0);
    if events == 0 {
        bail!("the lake in {} has no events", system.data().display());
    }
    let (files, bytes) = weigh(&system.data().join("alloc_events"))?;
    Ok(Figures::from([
        ("events", Figure::watched(events as f64, "events")),
        ("files", Figure::watched(files as f64, "files")),
        (
            "bytes_per_event",
            Figure::at_most(bytes as f64 / events as f64, "bytes/event", TARGET_BYTES),
        ),
    ]))
}

/// Number and bytes of the Parquet files of a folder, Delta's own log left out.
fn weigh(folder: &Path) -> Result<(u64, u64)> {
    let mut total = (0, 0);
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("failed to read {}", folder.display()))?;
    for entry in entries {
        let path = entry.context("failed to read a folder")?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "_delta_log") {
                let (files, bytes) = weigh(&path)?;
                total = (total.0 + files, total.1 + bytes);
            }
        } else if path.extension().is_some_and(|ending| ending == "parquet") {
            let length = path
                .metadata()
                .with_context(|| format!("failed to weigh {}", path.display()))?
                .len();
            total = (total.0 + 1, total.1 + length);
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_and_other_files_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let hour = folder.path().join("date=2026-01-01/hour=3");
        let log = folder.path().join("_delta_log");
        std::fs::create_dir_all(&hour).unwrap();
        std::fs::create_dir_all(&log).unwrap();
        std::fs::write(hour.join("a.parquet"), [0; 100]).unwrap();
        std::fs::write(hour.join("b.parquet"), [0; 20]).unwrap();
        std::fs::write(hour.join("c.tmp"), [0; 7]).unwrap();
        std::fs::write(log.join("checkpoint.parquet"), [0; 5000]).unwrap();
        assert_eq!(weigh(folder.path()).unwrap(), (2, 120));
    }
}
