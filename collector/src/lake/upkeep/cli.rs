//! `compact`, `vacuum` and `fsck` by hand.
//!
//! All three may run beside a collector: they commit as it does, and delete only what nobody needs.
//! What would not be safe then is refused.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use chrono::Utc;
use clap::Args;
use futures::StreamExt;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::sync::Semaphore;
use vramscope_wire::Table;

use super::plan::Depth;
use super::retention::{self, Retention};
use super::{Compacted, Pace, Settings, UpkeepError, fsck, jobs, merge_job, vacuum};
use crate::config::{ByteSize, Span};
use crate::folder::Lock;
use crate::lake::Lake;

/// Exit code when a folder is not sound.
const FOUND: u8 = 3;

/// Options of `compact`.
#[derive(Debug, Args)]
pub struct Compact {
    /// Data folder
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    data: PathBuf,
    /// Only this table; may be given several times
    #[arg(long = "table", value_name = "TABLE", value_parser = table)]
    tables: Vec<Table>,
    /// Only what is worth it by now, as a running collector does
    #[arg(long)]
    levels: bool,
    /// First take out rows that are past their time, by table: alloc_events=7d
    #[arg(long, value_name = "TABLE=TIME,…")]
    retention: Option<Retention>,
    /// Memory for all merges together
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    memory: ByteSize,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// For `--help`.
pub const COMPACT_EXAMPLES: &str = "Examples:
  vramscope-collector compact --data /var/lib/vramscope
  vramscope-collector compact --data /var/lib/vramscope --table stacks --json
  vramscope-collector compact --data /var/lib/vramscope --retention alloc_events=3d

A collector may be running: rows that it commits meanwhile are left alone. Merged files stay on disk
until `vacuum` deletes them.";

/// Options of `vacuum`.
#[derive(Debug, Args)]
pub struct Vacuum {
    /// Data folder
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    data: PathBuf,
    /// Only this table; may be given several times
    #[arg(long = "table", value_name = "TABLE", value_parser = table)]
    tables: Vec<Table>,
    /// Delete what has been of no use for so long; less than 10m needs the collector stopped
    #[arg(long, value_name = "TIME", default_value = "1h")]
    after: Span,
    /// Only tell what would be deleted
    #[arg(long)]
    dry_run: bool,
    /// As JSON, with every file
    #[arg(long)]
    json: bool,
}

/// For `--help`.
pub const VACUUM_EXAMPLES: &str = "Examples:
  vramscope-collector vacuum --data /var/lib/vramscope --dry-run
  vramscope-collector vacuum --data /var/lib/vramscope
  vramscope-collector vacuum --data /var/lib/vramscope --after 24h --json | jq '.[].bytes'

A query, a backup or another reader that began before has --after to end: its files stay so long.";

/// Options of `fsck`.
#[derive(Debug, Args)]
pub struct Fsck {
    /// Data folder
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    data: PathBuf,
    /// Decode every value of every file too
    #[arg(long)]
    deep: bool,
    /// Memory for counting rows; beyond it, counts spill to the temporary folder
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    memory: ByteSize,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// For `--help`.
pub const FSCK_EXAMPLES: &str = "Examples:
  vramscope-collector fsck --data /var/lib/vramscope
  vramscope-collector fsck --data /var/lib/vramscope --deep --json | jq .problems

Exit codes: 0 the folder is sound, 1 it could not be checked, 3 something is wrong with it.";

fn table(name: &str) -> Result<Table, String> {
    let known = || Table::ALL.map(Table::name).join(", ");
    Table::by_name(name).ok_or_else(|| format!("no such table; there are {}", known()))
}

fn open_data(data: &Path) -> anyhow::Result<PathBuf> {
    data.canonicalize()
        .with_context(|| format!("failed to open data folder {}", data.display()))
}

async fn attach(data: &Path, tables: &[Table]) -> anyhow::Result<(Lake, Vec<Table>)> {
    let lake = Lake::attach(data).await?;
    let there: Vec<Table> = lake.tables().collect();
    if there.is_empty() {
        bail!(
            "{} holds no tables; is it a collector's data folder?",
            data.display()
        );
    }
    if let Some(missing) = tables.iter().find(|table| !there.contains(table)) {
        bail!("table {} is not in {}", missing.name(), data.display());
    }
    let chosen = if tables.is_empty() {
        there
    } else {
        tables.to_vec()
    };
    Ok((lake, chosen))
}

/// Keeps a vacuum that spares nothing away from merges whose files no log names yet. The kernel lets
/// go of it when the process ends.
struct Upkeep {
    _file: File,
}

impl Upkeep {
    fn open(data: &Path) -> anyhow::Result<File> {
        let path = data.join("_upkeep.lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        file.with_context(|| format!("failed to open lock file {}", path.display()))
    }

    fn share(data: &Path) -> anyhow::Result<Upkeep> {
        let file = Upkeep::open(data)?;
        match file.try_lock_shared() {
            Ok(()) => Ok(Upkeep { _file: file }),
            Err(TryLockError::WouldBlock) => bail!(
                "a vacuum that spares no file runs on {}; wait for its end",
                data.display()
            ),
            Err(TryLockError::Error(error)) => Err(error).context("failed to lock the folder"),
        }
    }

    fn alone(data: &Path) -> anyhow::Result<Upkeep> {
        let file = Upkeep::open(data)?;
        match file.try_lock() {
            Ok(()) => Ok(Upkeep { _file: file }),
            Err(TryLockError::WouldBlock) => bail!(
                "`compact` or another vacuum runs on {}; wait for its end, or give --after {} or more",
                data.display(),
                Span(vacuum::LEAST)
            ),
            Err(TryLockError::Error(error)) => Err(error).context("failed to lock the folder"),
        }
    }
}

/// A bar on a terminal, nothing elsewhere.
fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    // The template is fixed and valid.
    if let Ok(style) =
        ProgressStyle::with_template("{prefix:16} {bar:30} {pos}/{len} {msg} {elapsed}")
    {
        bar.set_style(style);
    }
    bar
}

/// What `compact` did to one table.
#[derive(Debug, Serialize)]
struct TableCompacted {
    table: &'static str,
    expired_files: u64,
    expired_rows: u64,
    #[serde(flatten)]
    compacted: Compacted,
    files_now: u64,
}

/// Runs `compact`.
pub async fn compact(options: &Compact) -> anyhow::Result<ExitCode> {
    let data = open_data(&options.data)?;
    let _hands_off = Upkeep::share(&data)?;
    let (lake, tables) = attach(&data, &options.tables).await?;
    let workers = std::thread::available_parallelism()
        .map_or(1, |n| n.get())
        .min(4);
    let settings = Settings {
        interval: Duration::ZERO,
        memory_bytes: options.memory.0 / workers as u64,
        vacuum_after: vacuum::LEAST * 6,
        retention: options.retention.clone().unwrap_or_default(),
    };
    let (lake, bar) = (Arc::new(lake), bar());
    let mut done = Vec::new();
    for table in tables {
        bar.set_prefix(table.name());
        let expired = match &options.retention {
            Some(retention) => retention::expire(&lake, table, retention, Utc::now()).await?,
            None => None,
        };
        let depth = if options.levels {
            Depth::Levels
        } else {
            Depth::Full
        };
        let compacted = compact_table(&lake, table, depth, &settings, workers, &bar).await?;
        done.push(TableCompacted {
            table: table.name(),
            expired_files: expired.map_or(0, |expired| expired.files),
            expired_rows: expired.map_or(0, |expired| expired.rows),
            compacted,
            files_now: super::files(&lake.table(table))?.len() as u64,
        });
    }
    bar.finish_and_clear();
    if options.json {
        println!("{}", serde_json::to_string_pretty(&done)?);
    } else {
        print!("{}", compacted_text(&done));
    }
    Ok(ExitCode::SUCCESS)
}

async fn compact_table(
    lake: &Arc<Lake>,
    table: Table,
    depth: Depth,
    settings: &Settings,
    workers: usize,
    bar: &ProgressBar,
) -> Result<Compacted, UpkeepError> {
    let mut sum = Compacted::default();
    let places = Arc::new(Semaphore::new(workers));
    loop {
        lake.refresh(table).await?;
        let jobs = jobs(lake, table, depth)?;
        bar.set_length(bar.position() + jobs.len() as u64);
        // Each on a thread of the runtime: a merge hardly pauses.
        let mut merges = futures::stream::iter(jobs.into_iter().map(|job| {
            let (lake, settings, places) =
                (Arc::clone(lake), settings.clone(), Arc::clone(&places));
            tokio::spawn(async move {
                // The semaphore is never closed.
                let _place = places.acquire_owned().await.ok();
                merge_job(&lake, table, &job, &settings, &mut Pace::unhurried()).await
            })
        }))
        .buffer_unordered(workers);
        let mut merged = Compacted::default();
        while let Some(done) = merges.next().await {
            let done =
                done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
            merged += done.unwrap_or_default();
            bar.inc(1);
        }
        // Nothing left, or others are at it.
        if merged.merges == 0 {
            return Ok(sum);
        }
        sum += merged;
    }
}

fn compacted_text(done: &[TableCompacted]) -> String {
    let mut text = format!(
        "{:<18} {:>8} {:>8} {:>14} {:>14} {:>14} {:>10}\n",
        "table", "merged", "into", "bytes", "into bytes", "rows", "files now"
    );
    for table in done {
        let compacted = &table.compacted;
        text += &format!(
            "{:<18} {:>8} {:>8} {:>14} {:>14} {:>14} {:>10}\n",
            table.table,
            compacted.files_in,
            compacted.files_out,
            compacted.bytes_in,
            compacted.bytes_out,
            compacted.rows,
            table.files_now
        );
        if compacted.same_stacks > 0 {
            text += &format!("  {} stacks were there already\n", compacted.same_stacks);
        }
        if table.expired_files > 0 {
            text += &format!(
                "  {} rows in {} files were past their time\n",
                table.expired_rows, table.expired_files
            );
        }
    }
    text
}

/// What `vacuum` deleted of one table.
#[derive(Debug, Serialize)]
struct TableDeleted {
    table: &'static str,
    dry_run: bool,
    #[serde(flatten)]
    deleted: vacuum::Deleted,
}

/// Runs `vacuum`.
pub async fn vacuum(options: &Vacuum) -> anyhow::Result<ExitCode> {
    let data = open_data(&options.data)?;
    if options.after.0 > vacuum::MOST {
        bail!(
            "--after is {}; the log remembers for {} only which files went",
            options.after,
            Span(vacuum::MOST)
        );
    }
    // Held to the end: no collector starts meanwhile.
    let _locks = if options.after.0 < vacuum::LEAST {
        let no_collector = Lock::take(&data).with_context(|| {
            format!(
                "--after is {}, less than {}",
                options.after,
                Span(vacuum::LEAST)
            )
        })?;
        Some((no_collector, Upkeep::alone(&data)?))
    } else {
        None
    };
    let (lake, tables) = attach(&data, &options.tables).await?;
    let bar = bar();
    bar.set_length(tables.len() as u64);
    let mut done = Vec::new();
    for table in tables {
        bar.set_prefix(table.name());
        let deleted = vacuum::table(&lake, table, options.after.0, options.dry_run).await?;
        done.push(TableDeleted {
            table: table.name(),
            dry_run: options.dry_run,
            deleted,
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    if options.json {
        println!("{}", serde_json::to_string_pretty(&done)?);
        return Ok(ExitCode::SUCCESS);
    }
    let verb = if options.dry_run {
        "would be deleted"
    } else {
        "deleted"
    };
    println!("{:<18} {:>8} {:>16}  {verb}", "table", "files", "bytes");
    for table in &done {
        println!(
            "{:<18} {:>8} {:>16}",
            table.table,
            table.deleted.files.len(),
            table.deleted.bytes
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `fsck`.
pub async fn fsck(options: &Fsck) -> anyhow::Result<ExitCode> {
    let check = fsck::Check {
        deep: options.deep,
        memory_bytes: usize::try_from(options.memory.0).unwrap_or(usize::MAX),
    };
    let bar = bar();
    let step = |what: &str, at: u64, of: u64| {
        bar.set_prefix(what.to_string());
        bar.set_length(of);
        bar.set_position(at);
    };
    let report = fsck::check(&options.data, check, &step).await?;
    bar.finish_and_clear();
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.to_text());
    }
    Ok(if report.sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FOUND)
    })
}
