//! `vramscope-agent recorder`: what is recorded, and spans of it as a trace's folder.
//!
//! Only reads, beside an agent that runs: a file that is overwritten meanwhile is said to be. What
//! the last flush wrote may be shown a moment before the journal knows it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use arrow::array::RecordBatch;
use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use vramscope_wire::{Table, parquet_file};

use super::files::{self, Content, Entry, Pick};
use super::state::{self, Found, State};
use super::{FOLDER, Stretch, shelf};
use crate::Map;
use crate::config;
use crate::spool::folder;

/// Which rows a person asks for.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct Wanted {
    /// Process: its process_id, or pid:N for all that had that number.
    #[arg(long, value_name = "ID")]
    pub process: Option<Who>,
    /// From then on: 2026-11-30T12:00:00Z, nanoseconds since 1970, or a span of time ago as 5min.
    #[arg(long, value_name = "TIME")]
    pub from: Option<Moment>,
    /// Until then, without it; as --from, or now.
    #[arg(long, value_name = "TIME")]
    pub to: Option<Moment>,
}

/// A process as a person names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Lifetime(i64),
    Pid(u32),
}

impl std::str::FromStr for Who {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hint = || format!("{text:?} is no process: write its process_id, or pid:N");
        match text.strip_prefix("pid:") {
            Some(pid) => pid.parse().map(Who::Pid).map_err(|_| hint()),
            None => text.parse().map(Who::Lifetime).map_err(|_| hint()),
        }
    }
}

/// Nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment(pub i64);

impl std::str::FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let now = super::now_ns();
        if text == "now" {
            return Ok(Self(now));
        }
        if let Ok(ns) = text.parse::<i64>() {
            return Ok(Self(ns));
        }
        if let Ok(ago) = text.parse::<config::Span>() {
            return Ok(Self(now.saturating_sub(super::nanos(ago.0))));
        }
        DateTime::parse_from_rfc3339(text)
            .ok()
            .and_then(|time| time.timestamp_nanos_opt())
            .map(Self)
            .ok_or_else(|| {
                format!(
                    "{text:?} is no time: write 2026-11-30T12:00:00Z, nanoseconds since 1970, or a span of time ago as 5min"
                )
            })
    }
}

/// A moment for people.
pub fn time(ns: i64) -> String {
    DateTime::<Utc>::from_timestamp_nanos(ns).to_rfc3339_opts(SecondsFormat::Millis, true)
}

impl Wanted {
    fn first_ns(&self) -> i64 {
        self.from.map_or(i64::MIN, |moment| moment.0)
    }

    fn end_ns(&self) -> i64 {
        self.to.map_or(i64::MAX, |moment| moment.0)
    }

    fn check(&self) -> anyhow::Result<()> {
        if self.first_ns() >= self.end_ns() {
            bail!(
                "--from {} is not before --to {}",
                self.first_ns(),
                self.end_ns()
            );
        }
        Ok(())
    }

    fn is_of(&self, process_id: i64, pid: u32) -> bool {
        match self.process {
            None => true,
            Some(Who::Lifetime(wanted)) => wanted == process_id,
            Some(Who::Pid(wanted)) => wanted == pid,
        }
    }

    fn meets(&self, first_ns: i64, last_ns: i64) -> bool {
        first_ns < self.end_ns() && last_ns >= self.first_ns()
    }
}

/// What is recorded of one process, and what no longer is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProcessLine {
    pub process_id: i64,
    pub pid: u32,
    /// Rows in files that touch the span of time.
    pub rows: u64,
    pub first_ns: Option<i64>,
    pub last_ns: Option<i64>,
    pub files: usize,
    /// Rows that were overwritten without having travelled, oldest first.
    pub overwritten: Vec<Stretch>,
}

/// A span that travels or has travelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SpanLine {
    pub cause: String,
    pub process_id: i64,
    pub from_ns: i64,
    pub to_ns: i64,
    pub triggers: u64,
    pub is_done: bool,
    pub rows: u64,
    pub rows_before: u64,
    pub overwritten: Vec<Stretch>,
}

/// What `recorder list` tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listing {
    pub recorder: PathBuf,
    pub files: usize,
    pub bytes: u64,
    pub rows: u64,
    pub overwritten_rows: u64,
    /// Of processes so long gone that they are not told apart any more.
    pub overwritten_others: Option<Stretch>,
    pub travelled_rows: u64,
    pub processes: Vec<ProcessLine>,
    pub spans: Vec<SpanLine>,
    /// Files that cannot be read, and why.
    pub damaged: Vec<(PathBuf, String)>,
}

struct Look {
    folder: PathBuf,
    entries: Vec<Entry>,
    state: State,
}

fn look(spool: &Path) -> anyhow::Result<Look> {
    let folder = spool.join(FOLDER);
    if !folder.is_dir() {
        bail!(
            "there is no recorder in {}; name the agent's spool with --spool",
            spool.display()
        );
    }
    // The state first: files that are overwritten after this look are missing and not counted.
    let state = match state::load(&folder, None)? {
        Found::State(state) => state,
        Found::Nothing => State::default(),
        Found::Damaged => {
            eprintln!(
                "vramscope-agent: {} is damaged: what was overwritten is not known",
                folder.join(state::FILE).display()
            );
            State::default()
        }
    };
    let entries = files::list(&folder)?;
    Ok(Look {
        entries: entries
            .into_iter()
            .filter(|entry| entry.number >= state.horizon)
            .collect(),
        folder,
        state,
    })
}

fn is_gone(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    })
}

/// What is recorded.
pub fn list(spool: &Path, wanted: &Wanted) -> anyhow::Result<Listing> {
    wanted.check()?;
    let Look {
        folder,
        mut entries,
        state,
    } = look(spool)?;
    let mut lines: BTreeMap<i64, ProcessLine> = BTreeMap::new();
    let line = |process_id: i64, pid: u32| ProcessLine {
        process_id,
        pid,
        rows: 0,
        first_ns: None,
        last_ns: None,
        files: 0,
        overwritten: Vec::new(),
    };
    let mut damaged = Vec::new();
    for entry in &mut entries {
        let contents = match entry.contents(&folder) {
            Ok(contents) => contents,
            Err(error) if is_gone(&error) => continue,
            Err(error) => {
                damaged.push((entry.path(&folder), format!("{error:#}")));
                continue;
            }
        };
        for content in contents.iter() {
            if !wanted.is_of(content.process_id, content.pid)
                || !wanted.meets(content.first_ns, content.last_ns)
            {
                continue;
            }
            let line = lines
                .entry(content.process_id)
                .or_insert_with(|| line(content.process_id, content.pid));
            line.rows += content.rows + content.ooms;
            line.files += 1;
            let first = line.first_ns.get_or_insert(content.first_ns);
            *first = content.first_ns.min(*first);
            let last = line.last_ns.get_or_insert(content.last_ns);
            *last = content.last_ns.max(*last);
        }
    }
    for gone in &state.overwritten {
        let cut = state.overwritten_in(gone.process_id, wanted.first_ns(), wanted.end_ns());
        if wanted.is_of(gone.process_id, gone.pid) && !cut.is_empty() {
            lines
                .entry(gone.process_id)
                .or_insert_with(|| line(gone.process_id, gone.pid))
                .overwritten = cut;
        }
    }
    let spans = state.spans.iter();
    let spans = spans.filter(|span| wanted.meets(span.from_ns, span.to_ns - 1));
    let spans = spans.filter(|span| match wanted.process {
        None => true,
        Some(Who::Lifetime(id)) => span.process_id == id,
        Some(Who::Pid(_)) => lines.contains_key(&span.process_id),
    });
    let spans = spans
        .map(|span| SpanLine {
            cause: span.cause.text(),
            process_id: span.process_id,
            from_ns: span.from_ns,
            to_ns: span.to_ns,
            triggers: span.triggers,
            is_done: span.is_done,
            rows: span.rows,
            rows_before: span.rows_before,
            overwritten: span.gone.clone(),
        })
        .collect();
    Ok(Listing {
        files: entries.len(),
        bytes: entries.iter().map(|entry| entry.bytes).sum(),
        rows: entries.iter().map(|entry| entry.rows).sum(),
        recorder: folder,
        overwritten_rows: state.overwritten_rows,
        overwritten_others: state.overwritten_others,
        travelled_rows: state.travelled_rows,
        processes: lines.into_values().collect(),
        spans,
        damaged,
    })
}

fn stretches(text: &mut String, of: &[Stretch]) {
    for Stretch {
        first_ns,
        last_ns,
        rows,
    } in of
    {
        let _ = writeln!(
            text,
            "    OVERWRITTEN  {}  {}  up to {rows} rows",
            time(*first_ns),
            time(*last_ns)
        );
    }
}

/// The printed form.
pub fn text(listing: &Listing) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{}: {} rows in {} files, {}; {} rows have travelled, {} were overwritten before they did",
        listing.recorder.display(),
        listing.rows,
        listing.files,
        crate::summary::bytes(listing.bytes),
        listing.travelled_rows,
        listing.overwritten_rows,
    );
    for (path, reason) in &listing.damaged {
        let _ = writeln!(text, "DAMAGED {}: {reason}", path.display());
    }
    let _ = writeln!(
        text,
        "\n{:<20} {:>8} {:>12} {:>6}  {:<24}  {:<24}",
        "process", "pid", "rows", "files", "first", "last"
    );
    for line in &listing.processes {
        let moment = |ns: Option<i64>| ns.map_or_else(|| "-".to_string(), time);
        let _ = writeln!(
            text,
            "{:<20} {:>8} {:>12} {:>6}  {:<24}  {:<24}",
            line.process_id,
            line.pid,
            line.rows,
            line.files,
            moment(line.first_ns),
            moment(line.last_ns)
        );
        stretches(&mut text, &line.overwritten);
    }
    if let Some(others) = listing.overwritten_others {
        let _ = writeln!(text, "processes of earlier");
        stretches(&mut text, &[others]);
    }
    if !listing.spans.is_empty() {
        let _ = writeln!(
            text,
            "\n{:<20}  {:<24}  {:<24} {:>10} {:>9}  cause",
            "span of process", "from", "to", "travelled", "state"
        );
    }
    for span in &listing.spans {
        let state = if span.is_done { "done" } else { "open" };
        let _ = writeln!(
            text,
            "{:<20}  {:<24}  {:<24} {:>10} {:>9}  {}",
            span.process_id,
            time(span.from_ns),
            time(span.to_ns),
            span.rows,
            state,
            span.cause
        );
        stretches(&mut text, &span.overwritten);
    }
    text
}

/// What an export wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exported {
    pub folder: PathBuf,
    pub rows: u64,
    pub stacks: u64,
    /// Stacks that the rows refer to and the recorder does not have.
    pub stacks_missing: u64,
    /// What of the span was overwritten, by process.
    pub overwritten: Vec<(i64, Vec<Stretch>)>,
    /// Files that were overwritten while this was written, or are damaged.
    pub files_missed: Vec<(PathBuf, String)>,
}

/// Writes the rows of a span and their stacks as a trace's folder, which `vramscope sql --data`
/// opens.
pub fn export(spool: &Path, wanted: &Wanted, to: &Path) -> anyhow::Result<Exported> {
    wanted.check()?;
    let Look {
        folder,
        mut entries,
        state,
    } = look(spool)?;
    fs::create_dir_all(to).with_context(|| format!("failed to create {}", to.display()))?;
    let mut there = fs::read_dir(to).with_context(|| format!("failed to read {}", to.display()))?;
    if there.next().is_some() {
        bail!("{} is not empty; name a new folder", to.display());
    }
    let mut exported = Exported {
        folder: to.to_path_buf(),
        rows: 0,
        stacks: 0,
        stacks_missing: 0,
        overwritten: Vec::new(),
        files_missed: Vec::new(),
    };
    let mut needed: Map<i64, ()> = Map::default();
    let shows = std::io::stderr().is_terminal();
    let total = entries.len();
    for (done, entry) in entries.iter_mut().enumerate() {
        if shows {
            eprint!("\r{done} of {total} files");
        }
        let path = entry.path(&folder);
        let picked = entry
            .contents(&folder)
            .and_then(|contents| pick(&path, wanted, &contents));
        let batches = match picked {
            Ok(batches) => batches,
            Err(error) => {
                let why = if is_gone(&error) {
                    "overwritten meanwhile".to_string()
                } else {
                    format!("{error:#}")
                };
                exported.files_missed.push((path, why));
                continue;
            }
        };
        if batches.is_empty() {
            continue;
        }
        for batch in &batches {
            exported.rows += batch.num_rows() as u64;
            files::stack_ids(batch, |id| {
                needed.insert(id, ());
            });
        }
        write(to, Table::AllocEvents, entry.number, &batches)?;
    }
    if shows {
        eprint!("\r\x1b[K");
    }
    let count = needed.len() as u64;
    let stacks = shelf::rows_of(&folder, needed)?;
    exported.stacks = stacks.iter().map(|batch| batch.num_rows() as u64).sum();
    exported.stacks_missing = count - exported.stacks;
    if !stacks.is_empty() {
        write(to, Table::Stacks, 1, &stacks)?;
    }
    for gone in &state.overwritten {
        let cut = state.overwritten_in(gone.process_id, wanted.first_ns(), wanted.end_ns());
        if wanted.is_of(gone.process_id, gone.pid) && !cut.is_empty() {
            exported.overwritten.push((gone.process_id, cut));
        }
    }
    Ok(exported)
}

fn pick(path: &Path, wanted: &Wanted, contents: &[Content]) -> anyhow::Result<Vec<RecordBatch>> {
    let mut batches = Vec::new();
    for content in contents {
        if wanted.is_of(content.process_id, content.pid)
            && wanted.meets(content.first_ns, content.last_ns)
        {
            let pick = Pick {
                process_id: Some(content.process_id),
                from_ns: wanted.first_ns(),
                to_ns: wanted.end_ns(),
            };
            batches.extend(files::pick_all(path, pick)?);
        }
    }
    Ok(batches)
}

fn write(to: &Path, table: Table, number: u64, batches: &[RecordBatch]) -> anyhow::Result<()> {
    let folder = to.join(table.name());
    fs::create_dir_all(&folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    let bytes = parquet_file::encode(table, batches)?;
    folder::write_durably(&folder.join(format!("{number:010}.parquet")), &bytes)
}

/// The printed form.
pub fn export_text(exported: &Exported) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{}: {} rows, {} stacks{}",
        exported.folder.display(),
        exported.rows,
        exported.stacks,
        if exported.stacks_missing > 0 {
            format!(" ({} are not known any more)", exported.stacks_missing)
        } else {
            String::new()
        }
    );
    for (process_id, gone) in &exported.overwritten {
        let _ = writeln!(text, "process {process_id}, not in it:");
        stretches(&mut text, gone);
    }
    for (path, reason) in &exported.files_missed {
        let _ = writeln!(text, "MISSING {}: {reason}", path.display());
    }
    text
}
