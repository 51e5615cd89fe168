//! The lake's upkeep: small files become large ones, what is past its time goes, and files that
//! nobody refers to any more are deleted.
//!
//! Everything goes through the tables' logs: files are written, a commit exchanges them for others
//! ([`swap`]), and only much later [`vacuum`] deletes what no log entry and no reader needs. A stop
//! at any point leaves at most files that no log names.
//!
//! Invariants:
//! - no row is lost or there twice, whoever commits at the same time, in this process or another;
//! - memory is bounded: a merge takes [`Settings::memory_bytes`] and stops being larger by taking
//!   fewer files;
//! - intake comes first: this runs on a thread of its own with a lower priority ([`run`]), and waits
//!   while the write-ahead log grows.

pub mod cli;
pub mod fsck;
pub mod merge;
pub mod plan;
pub mod retention;
pub mod swap;
pub mod vacuum;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use datafusion::error::DataFusionError;
use deltalake::kernel::{Add, LogicalFileView};
use deltalake::protocol::DeltaOperation;
use deltalake::{DeltaTable, DeltaTableError};
use serde_json::json;
use tokio::sync::watch;
use vramscope_wire::Table;

use super::{Lake, LakeError, delta_error, layout, turn};
use crate::metrics::METRICS;
use merge::{Input, Inputs};
use plan::{Depth, Hour};
use retention::Retention;
use swap::{Change, Count, Swap, Swapped};

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum UpkeepError {
    /// A table could not be read or written.
    #[error(transparent)]
    Lake(#[from] LakeError),
    /// A file of the table could not be read.
    #[error("table {table}: failed to read {path}: {source}")]
    File {
        /// Which table.
        table: &'static str,
        /// Which file.
        path: String,
        /// What was wrong.
        source: parquet::errors::ParquetError,
    },
    /// Files could not be merged.
    #[error("table {table}: failed to merge: {source}")]
    Merge {
        /// Which table.
        table: &'static str,
        /// What went wrong.
        source: Box<DataFusionError>,
    },
    /// A merge lost or doubled rows. It was not committed.
    #[error("table {table}: {read} rows became {written}; the merge was thrown away")]
    Rows {
        /// Which table.
        table: &'static str,
        /// Rows that the files should have.
        read: u64,
        /// Rows that came out.
        written: u64,
    },
    /// Other writers came first, every time.
    #[error("table {table}: other writers committed first {attempts} times; try again later")]
    Busy {
        /// Which table.
        table: &'static str,
        /// How often it was tried.
        attempts: usize,
    },
    /// The process stops.
    #[error("stopped")]
    Stopped,
    /// A merge took so long that its first files could be taken for leftovers.
    #[error(
        "table {table}: a merge went on for {seconds} s after its first file; it was thrown away, since \
         vacuum could take that file for a leftover"
    )]
    TooSlow {
        /// Which table.
        table: &'static str,
        /// How old its first file was.
        seconds: u64,
    },
}

/// How it is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Time between two rounds.
    pub interval: Duration,
    /// Memory of one merge, in bytes.
    pub memory_bytes: u64,
    /// How long a file stays after nothing refers to it any more.
    pub vacuum_after: Duration,
    /// How long rows are kept.
    pub retention: Retention,
}

/// Tells whether intake needs the machine more.
pub type Pressure = Arc<dyn Fn() -> bool + Send + Sync>;

/// When to stop, and when to hold still.
#[derive(Clone)]
pub struct Pace {
    stopping: watch::Receiver<bool>,
    pressure: Pressure,
    /// Waited in this merge.
    waited: Duration,
}

/// A merge holds still for so long in all: files must not pile up for ever.
const LONGEST_WAIT: Duration = Duration::from_secs(20);

impl Pace {
    /// As told by the process and by its intake.
    pub fn new(stopping: watch::Receiver<bool>, pressure: Pressure) -> Pace {
        Pace {
            stopping,
            pressure,
            waited: Duration::ZERO,
        }
    }

    /// Full speed, to the end.
    pub fn unhurried() -> Pace {
        // A sender that is gone says nothing any more.
        Pace::new(watch::channel(false).1, Arc::new(|| false))
    }

    /// Called between two pieces of work.
    async fn breathe(&mut self) -> Result<(), UpkeepError> {
        const NAP: Duration = Duration::from_millis(50);
        while (self.pressure)() && self.waited < LONGEST_WAIT && !*self.stopping.borrow() {
            tokio::time::sleep(NAP).await;
            self.waited += NAP;
        }
        if *self.stopping.borrow() {
            return Err(UpkeepError::Stopped);
        }
        Ok(())
    }
}

/// What one compaction did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Compacted {
    /// Merges.
    pub merges: u64,
    /// Files that went in.
    pub files_in: u64,
    /// Files that came out.
    pub files_out: u64,
    /// Bytes that went in.
    pub bytes_in: u64,
    /// Bytes that came out.
    pub bytes_out: u64,
    /// Rows that went in.
    pub rows: u64,
    /// Rows of stacks that were there already.
    pub same_stacks: u64,
}

impl std::ops::AddAssign for Compacted {
    fn add_assign(&mut self, other: Compacted) {
        self.merges += other.merges;
        self.files_in += other.files_in;
        self.files_out += other.files_out;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
        self.rows += other.rows;
        self.same_stacks += other.same_stacks;
    }
}

/// The files of a table that a planner chooses from.
pub fn files(delta: &DeltaTable) -> Result<Vec<plan::File>, DeltaTableError> {
    let files = delta.snapshot()?.log_data();
    Ok(files.iter().map(|view| file(&view)).collect())
}

fn file(view: &LogicalFileView) -> plan::File {
    plan::File {
        path: view.path().into_owned(),
        bytes: u64::try_from(view.size()).unwrap_or(0),
        written: DateTime::from_timestamp_millis(view.modification_time()).unwrap_or_default(),
        hour: hour(view),
    }
}

/// The hour of a file's partition.
pub fn hour(view: &LogicalFileView) -> Option<Hour> {
    let values = view.partition_values_map();
    let value = |name: &str| values.get(name)?.as_deref();
    Hour::parse(value("date")?, value("hour")?)
}

/// What a table has to be merged.
pub fn jobs(lake: &Lake, table: Table, depth: Depth) -> Result<Vec<plan::Job>, UpkeepError> {
    let files = files(&lake.table(table)).map_err(delta_error(table))?;
    Ok(plan::jobs(files, depth, Utc::now()))
}

/// Merges the files of one job, or the first of them if all are too many; `None` if somebody else
/// was faster.
pub async fn merge_job(
    lake: &Lake,
    table: Table,
    job: &plan::Job,
    settings: &Settings,
    pace: &mut Pace,
) -> Result<Option<Compacted>, UpkeepError> {
    let delta = lake.table(table);
    let Some(inputs) = open(&delta, table, job, settings.memory_bytes).await? else {
        return Ok(None);
    };
    pace.waited = Duration::ZERO;
    let remove = inputs.paths();
    let bytes_in = inputs.bytes();
    let merged = inputs.merge(&delta, settings.memory_bytes, pace).await?;
    refuse_old(table, &merged.adds)?;
    let same_stacks = merged.rows_in - merged.rows_out;
    let done = Compacted {
        merges: 1,
        files_in: remove.len() as u64,
        files_out: merged.adds.len() as u64,
        bytes_in,
        bytes_out: merged
            .adds
            .iter()
            .map(|add| u64::try_from(add.size).unwrap_or(0))
            .sum(),
        rows: merged.rows_in,
        same_stacks,
    };
    let counts = match same_stacks {
        0 => Vec::new(),
        dropped => vec![(Count::SameStacks, Change::Add(dropped))],
    };
    let swap = Swap {
        remove,
        add: merged.adds,
        changes_data: false,
        operation: DeltaOperation::Optimize {
            predicate: None,
            target_size: i64::try_from(layout::TARGET_FILE_BYTES).unwrap_or(i64::MAX),
        },
        counts,
        metadata: HashMap::from([(
            "vramscope.merge".to_string(),
            json!({"rowsIn": merged.rows_in, "rowsOut": merged.rows_out, "sameStacks": same_stacks}),
        )]),
    };
    Ok(match swap::commit(lake, table, &swap).await? {
        Swapped::Done => Some(done),
        Swapped::Overtaken => None,
    })
}

/// Vacuum deletes what nothing names once it is [`vacuum::LEAST`] old. What is about to be named has to
/// be well below that.
fn refuse_old(table: Table, adds: &[Add]) -> Result<(), UpkeepError> {
    let Some(first) = adds.iter().map(|add| add.modification_time).min() else {
        return Ok(());
    };
    let seconds = (Utc::now().timestamp_millis() - first) / 1000;
    let seconds = u64::try_from(seconds).unwrap_or(0);
    if seconds > vacuum::LEAST.as_secs() / 2 {
        return Err(UpkeepError::TooSlow {
            table: table.name(),
            seconds,
        });
    }
    Ok(())
}

/// Opens the files of a job; `None` if one is gone from the table.
async fn open(
    delta: &DeltaTable,
    table: Table,
    job: &plan::Job,
    budget: u64,
) -> Result<Option<Inputs>, UpkeepError> {
    let mut views: HashMap<String, LogicalFileView> = HashMap::new();
    for view in delta.snapshot().map_err(delta_error(table))?.log_data() {
        let path = view.path().into_owned();
        if job.iter().any(|file| file.path == path) {
            views.insert(path, view);
        }
    }
    let store = delta.object_store();
    let mut inputs = Vec::with_capacity(job.len());
    for file in job {
        let Some(view) = views.remove(&file.path) else {
            return Ok(None);
        };
        let input = Input::open(&store, view)
            .await
            .map_err(|source| UpkeepError::File {
                table: table.name(),
                path: file.path.clone(),
                source,
            })?;
        inputs.push(input);
    }
    Ok(Some(Inputs::within(table, inputs, budget)))
}

/// The upkeep of a running collector.
pub struct Upkeep {
    lake: Arc<Lake>,
    settings: Settings,
    pace: Pace,
}

/// Merges of one table in one round: other tables have their turn too.
const MERGES_A_ROUND: usize = 4;

/// Time between two looks for what is past its time, and for files to delete.
const SLOW_ROUND: Duration = Duration::from_secs(600);

/// Time from the start to the first of them.
const FIRST_SLOW_ROUND: Duration = Duration::from_secs(60);

/// Starts the upkeep on a thread of its own. It ends at the next pause after `stopping` turns true.
pub fn run(
    lake: Arc<Lake>,
    settings: Settings,
    pace: Pace,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let upkeep = Upkeep {
        lake,
        settings,
        pace,
    };
    std::thread::Builder::new()
        .name("upkeep".to_string())
        .spawn(move || {
            // Threads that this one starts, for file work, take over its priority.
            yield_to_others();
            runtime.block_on(upkeep.rounds());
        })
}

/// Lowers the priority of this thread alone.
fn yield_to_others() {
    const NICE: libc::c_int = 10;
    // SAFETY: a plain system call. On Linux 0 stands for the calling thread, not its process.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    if done != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!(%error, "the upkeep runs at the priority of intake");
    }
}

impl Upkeep {
    async fn rounds(mut self) {
        let mut stopping = self.pace.stopping.clone();
        let mut slow = Instant::now() + FIRST_SLOW_ROUND;
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.settings.interval) => {}
                // An error means that the sender is gone, which is a stop too.
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
            let is_slow_round = Instant::now() >= slow;
            if is_slow_round {
                slow = Instant::now() + SLOW_ROUND;
            }
            match self.round(is_slow_round).await {
                Ok(()) => {}
                Err(UpkeepError::Stopped) => return,
                // Each table's failure was told already.
                Err(_) => {}
            }
        }
    }

    async fn round(&mut self, is_slow_round: bool) -> Result<(), UpkeepError> {
        // On a lake of several collectors one does it at a time.
        let Some(_turn) = turn::take(self.lake.home()).await? else {
            return Ok(());
        };
        let mut last = Ok(());
        let mut waiting = 0;
        for table in Table::ALL {
            let done = self.table_round(table, is_slow_round, &mut waiting).await;
            match done {
                Ok(()) => {}
                Err(UpkeepError::Stopped) => return Err(UpkeepError::Stopped),
                Err(error) => {
                    tracing::warn!(table = table.name(), %error, "upkeep failed; it is tried again");
                    last = Err(error);
                }
            }
        }
        METRICS.compaction_backlog_files.set(waiting);
        last
    }

    async fn table_round(
        &mut self,
        table: Table,
        is_slow_round: bool,
        waiting: &mut i64,
    ) -> Result<(), UpkeepError> {
        self.pace.breathe().await?;
        self.lake.refresh(table).await?;
        if is_slow_round {
            self.expire(table).await?;
        }
        for _ in 0..MERGES_A_ROUND {
            let jobs = jobs(&self.lake, table, Depth::Levels)?;
            let Some(job) = jobs.first() else { break };
            let settings = &self.settings;
            match merge_job(&self.lake, table, job, settings, &mut self.pace).await? {
                Some(done) => self.tell(table, done),
                None => break,
            }
        }
        let left = jobs(&self.lake, table, Depth::Levels)?;
        *waiting += left.iter().map(|job| job.len() as i64).sum::<i64>();
        if is_slow_round {
            let after = self.settings.vacuum_after;
            let deleted = vacuum::table(&self.lake, table, after, false).await?;
            if !deleted.files.is_empty() {
                tracing::info!(
                    table = table.name(),
                    files = deleted.files.len(),
                    bytes = deleted.bytes,
                    "files of no more use were deleted"
                );
            }
        }
        Ok(())
    }

    async fn expire(&self, table: Table) -> Result<(), UpkeepError> {
        let Some(expired) =
            retention::expire(&self.lake, table, &self.settings.retention, Utc::now()).await?
        else {
            return Ok(());
        };
        tracing::info!(
            table = table.name(),
            files = expired.files,
            rows = expired.rows,
            kept_from = %expired.kept_from,
            "rows past their time were removed"
        );
        Ok(())
    }

    fn tell(&self, table: Table, done: Compacted) {
        METRICS.compacted_files.inc_by(done.files_in);
        tracing::debug!(
            table = table.name(),
            files = done.files_in,
            into = done.files_out,
            bytes = done.bytes_in,
            rows = done.rows,
            "merged"
        );
    }
}
