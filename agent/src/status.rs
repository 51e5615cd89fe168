//! What the agent tells of itself: a small JSON file in the spool, renewed at every flush, and
//! its printed form.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::host::clock;
use crate::host::discovery::Report as Discovered;
use crate::host::identity::Host;
use crate::output::Checkpoint;
use crate::probes::hooks::Class;
use crate::recorder::{Report, Travel, view};
use crate::spool::folder::REJECTED;
use crate::spool::room::Room;
use crate::traffic::{self, Scraper};

const FILE: &str = "status.json";

/// State at the last flush.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    pub host: String,
    pub agent_id: String,
    /// Nanoseconds since 1970.
    pub written_ns: u64,
    /// Calls taken since this agent started.
    pub events: u64,
    /// Calls lost since this agent started, by cause.
    pub lost: BTreeMap<String, u64>,
    /// Stacks that were to be copied since this agent started and were not: they go by frame
    /// pointers.
    #[serde(default)]
    pub stacks_not_copied: u64,
    /// Processes in the books.
    pub processes: usize,
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub libraries: Vec<String>,
    pub hooked: usize,
    pub not_hooked: usize,
    /// Python frames that were not read or sent since the probes were made, by cause.
    #[serde(default)]
    pub python_lost: BTreeMap<String, u64>,
    /// How processes are found, and what this kernel can do.
    pub discovery: Discovered,
    /// Share of the ring that waits to be written, 0..1.
    pub ring_fill: f64,
    /// Files that no collector has acknowledged.
    pub spool_files: usize,
    pub spool_bytes: u64,
    #[serde(default)]
    pub spool_limit: u64,
    /// New rows are dropped, and counted, until there is room.
    #[serde(default)]
    pub spool_full: bool,
    /// Files that a collector refused; they are in `rejected/`.
    pub rejected_files: usize,
    /// The flight recorder.
    #[serde(default)]
    pub recorder: Option<Report>,
    /// The load of serving engines; `None` if nobody is asked.
    #[serde(default)]
    pub traffic: Option<traffic::Report>,
}

/// Writes the state of this moment.
pub fn write(
    spool: &Path,
    host: &Host,
    agent_id: &str,
    checkpoint: &Checkpoint<'_>,
    room: &Room,
    recorder: Option<Report>,
) -> anyhow::Result<()> {
    let (live_bytes, live_blocks) = checkpoint
        .ledger
        .processes()
        .map(|process| process.rollup.live(Class::Physical))
        .fold((0, 0), |(bytes, blocks), (b, n)| (bytes + b, blocks + n));
    let known = checkpoint.discovery.known();
    let (hooked, not_hooked) = known.hooked();
    let status = Status {
        version: env!("CARGO_PKG_VERSION").to_string(),
        pid: std::process::id(),
        host: host.name.clone(),
        agent_id: agent_id.to_string(),
        written_ns: clock::realtime_ns(),
        events: checkpoint.totals.events,
        lost: checkpoint
            .totals
            .lost
            .iter()
            .map(|(cause, count)| ((*cause).to_string(), *count))
            .collect(),
        stacks_not_copied: checkpoint.totals.stacks_not_copied,
        processes: checkpoint.ledger.processes().count(),
        live_bytes,
        live_blocks,
        libraries: known.libraries(),
        hooked,
        not_hooked,
        python_lost: checkpoint.python_lost.clone(),
        discovery: known.report(),
        ring_fill: checkpoint.ring_fill,
        spool_files: room.usage().files() as usize,
        spool_bytes: room.usage().bytes(),
        spool_limit: room.limit(),
        spool_full: room.is_full(),
        rejected_files: std::fs::read_dir(spool.join(REJECTED)).map_or(0, Iterator::count),
        recorder,
        traffic: checkpoint.traffic.map(Scraper::report),
    };
    // Whole or not at all, but without an fsync: after a power loss nobody asks for it.
    let (path, temporary) = (spool.join(FILE), spool.join("status.tmp"));
    std::fs::write(&temporary, serde_json::to_vec_pretty(&status)?)
        .and_then(|()| std::fs::rename(&temporary, &path))
        .with_context(|| format!("failed to write {}", path.display()))
}

/// Reads the state that an agent left in its spool, and whether it still runs.
pub fn read(spool: &Path) -> anyhow::Result<(Status, bool)> {
    let path = spool.join(FILE);
    let bytes = std::fs::read(&path).with_context(|| {
        format!("no agent has written {}; start one with `vramscope-agent serve`, or name its spool with --spool", path.display())
    })?;
    let status: Status =
        serde_json::from_slice(&bytes).with_context(|| format!("{} is damaged", path.display()))?;
    let running = crate::serve::is_locked(spool);
    Ok((status, running))
}

fn discovery(text: &mut String, report: &Discovered) {
    let probes = report.off.as_deref().unwrap_or("on");
    let _ = writeln!(text, "  probes         {probes}");
    for (library, reason) in &report.refused {
        if report.off.as_ref() != Some(reason) {
            let _ = writeln!(text, "  refused        {library}: {reason}");
        }
    }
    let frameworks = if report.framework {
        "hooked: PyTorch"
    } else {
        "not hooked: framework = false"
    };
    let _ = writeln!(text, "  frameworks     {frameworks}");
    for python in &report.pythons {
        let what = match (&python.version, &python.refused) {
            (_, Some(reason)) => format!("frames NOT read: {reason}"),
            (Some(version), None) => format!("{version}, frames are read"),
            (None, None) => "frames are read".to_string(),
        };
        let (pid, library) = (python.pid, &python.library);
        let _ = writeln!(text, "  python         pid {pid}: {library}: {what}");
    }
    let _ = writeln!(text, "  new mappings   {}", report.watch);
    if report.watch_lost > 0 {
        let lost = report.watch_lost;
        let _ = writeln!(
            text,
            "                 {lost} records were lost; all processes were searched instead"
        );
    }
    let _ = writeln!(
        text,
        "  searches       {}, {} processes' mappings read",
        report.scans, report.maps_read
    );
    let Some(checks) = &report.checks else {
        return;
    };
    let hooks = if report.uprobe_multi {
        "one link for a whole library"
    } else {
        "a perf event for each function"
    };
    let _ = writeln!(text, "  kernel         {}: {hooks}", checks.features.kernel);
    for feature in &checks.features.features {
        let has = if feature.available { "yes" } else { "no " };
        let reason = feature.reason.as_ref();
        let reason = reason.map(|reason| format!(" ({reason})"));
        let _ = writeln!(
            text,
            "    {has} {:<14} {}{}",
            feature.name,
            feature.used,
            reason.unwrap_or_default()
        );
    }
    let has = if checks.preflight.survives {
        "yes"
    } else {
        "no "
    };
    let _ = writeln!(
        text,
        "    {has} {:<14} {}",
        "seccomp", checks.preflight.detail
    );
}

fn recorder(text: &mut String, report: &Report) {
    // Writing to a string cannot fail.
    let _ = match (report.is_on, report.framework_events) {
        (_, Travel::Always) => {
            writeln!(text, "  recorder       not used: framework_events = always")
        }
        (false, _) => writeln!(
            text,
            "  recorder       off: {} raw framework events were not kept",
            report.off_rows
        ),
        (true, travel) => writeln!(
            text,
            "  recorder       {} rows in {} files, {} of {}, at most {} min; events travel: {travel}",
            report.rows,
            report.files,
            crate::summary::bytes(report.bytes),
            crate::summary::bytes(report.bytes_limit),
            report.seconds_limit / 60
        ),
    };
    if let (Some(first), Some(last)) = (report.first_ns, report.last_ns) {
        let (first, last) = (view::time(first), view::time(last));
        let _ = writeln!(text, "                 {first} to {last}");
    }
    if let (Some(first), Some(last)) = (report.overwritten_first_ns, report.overwritten_last_ns) {
        let _ = writeln!(
            text,
            "                 {} rows were overwritten before they travelled, {} to {}",
            report.overwritten_rows,
            view::time(first),
            view::time(last)
        );
    }
    if report.full_rows > 0 {
        let _ = writeln!(
            text,
            "                 {} rows found NO ROOM and are lost",
            report.full_rows
        );
    }
    let _ = writeln!(
        text,
        "                 {} triggers, {} spans open ({} asked for by the collector), {} rows travelled{}",
        report.triggers,
        report.open_spans,
        report.open_requests,
        report.travelled_rows,
        if report.waits_for_spool {
            "; waits until the spool is less than half full"
        } else {
            ""
        }
    );
}

fn traffic_lines(text: &mut String, report: &traffic::Report) {
    let _ = writeln!(
        text,
        "  traffic        {} rows of {} answers, {} failed",
        report.rows, report.scrapes, report.failures
    );
    if let Some(reason) = &report.stopped {
        let _ = writeln!(text, "                 STOPPED: {reason}");
    }
    for page in &report.pages {
        let engine = page.engine.as_deref().unwrap_or("no engine yet");
        let pid = page.pid.map(|pid| format!(", pid {pid}"));
        let state = match &page.error {
            Some(error) => format!("{} of {} failed: {error}", page.failures, page.scrapes),
            None => format!("{} answers", page.scrapes),
        };
        let _ = writeln!(
            text,
            "                 {} ({engine}{}): {state}",
            page.url,
            pid.unwrap_or_default()
        );
    }
    for (count, what) in [
        (
            report.dropped_rows,
            "rows were DROPPED: nobody took them in time",
        ),
        (report.bad_lines, "lines of engines' pages made no sense"),
        (report.left_out, "pages are not asked: too many"),
    ] {
        if count > 0 {
            let _ = writeln!(text, "                 {count} {what}");
        }
    }
}

/// The printed form.
pub fn text(status: &Status, running: bool) -> String {
    let mut text = String::new();
    let age = clock::realtime_ns().saturating_sub(status.written_ns) / 1_000_000;
    let state = if running {
        format!("running, pid {}", status.pid)
    } else {
        "not running".to_string()
    };
    let _ = writeln!(
        text,
        "vramscope-agent {} on {}: {state}",
        status.version, status.host
    );
    let _ = writeln!(text, "  written        {:.1} s ago", age as f64 / 1000.0);
    let _ = writeln!(text, "  events         {}", status.events);
    let lost: u64 = status.lost.values().sum();
    let causes: Vec<_> = status
        .lost
        .iter()
        .map(|(cause, count)| format!("{cause} {count}"))
        .collect();
    let causes = if causes.is_empty() {
        String::new()
    } else {
        format!(" ({})", causes.join(", "))
    };
    let _ = writeln!(text, "  lost           {lost}{causes}");
    let _ = writeln!(text, "  processes      {}", status.processes);
    let _ = writeln!(
        text,
        "  live           {} in {} blocks",
        crate::summary::bytes(status.live_bytes),
        status.live_blocks
    );
    let _ = writeln!(
        text,
        "  hooks          {} attached, {} not (see the view coverage)",
        status.hooked, status.not_hooked
    );
    for library in &status.libraries {
        let _ = writeln!(text, "                 {library}");
    }
    discovery(&mut text, &status.discovery);
    if !status.python_lost.is_empty() {
        let causes: Vec<_> = status
            .python_lost
            .iter()
            .map(|(cause, count)| format!("{cause} {count}"))
            .collect();
        let _ = writeln!(text, "  python frames  not read: {}", causes.join(", "));
    }
    let _ = writeln!(
        text,
        "  ring           {:.1} % full",
        status.ring_fill * 100.0
    );
    let _ = writeln!(
        text,
        "  spool          {} files, {} of {}{}",
        status.spool_files,
        crate::summary::bytes(status.spool_bytes),
        crate::summary::bytes(status.spool_limit),
        if status.spool_full {
            " (FULL: new rows are dropped and counted)"
        } else {
            ""
        }
    );
    if let Some(report) = &status.recorder {
        recorder(&mut text, report);
    }
    if let Some(report) = &status.traffic {
        traffic_lines(&mut text, report);
    }
    if status.rejected_files > 0 {
        let _ = writeln!(
            text,
            "  rejected       {} files, kept in rejected/ below the spool",
            status.rejected_files
        );
    }
    text
}
