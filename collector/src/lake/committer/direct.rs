//! The promise `store`: an acknowledgement stands for rows that are in the table, on its storage.
//!
//! No local log: batches that come within [`GATHER`] are merged, put and committed together, then
//! their lines in `batches`, and only then they are acknowledged. What this machine's disk holds
//! does not matter after that.
//!
//! Invariants:
//! - a commit of rows says in its information what lines belong to it. A stop between the two
//!   commits leaves rows without lines, and no acknowledgement: the next start finds the lines
//!   there and writes them ([`redo`]), also those of another collector that will never come back.
//!   Two that do so at once get in each other's way at the transaction of the lines;
//! - a batch whose rows are committed and whose lines failed is not acknowledged; when it comes
//!   again, its rows are not committed a second time, and its line is tried again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use deltalake::logstore::LogStore;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use vramscope_wire::Table;

use super::super::{Lake, LakeError, delta_error};
use super::commit::Marks;
use super::ledger::{self, Keeper, Line};
use super::load::{self, Source};
use super::{COMMIT_MEMORY_BYTES, checkpoint_if_due, commit, exact, load_error, recover};
use crate::ingest::wal::NewBatch;
use crate::metrics::METRICS;

/// How long a group waits for more batches. Two commits take longer than that on any storage.
const GATHER: Duration = Duration::from_millis(50);

/// Decoded bytes of a group; more wait for the next one.
const GROUP_BYTES: u64 = COMMIT_MEMORY_BYTES;

/// Bytes of batches that may wait for their commit, unless one alone has more.
const MAX_HELD: u64 = 256 << 20;

/// Key in a commit's information.
const NOTE: &str = "vramscopeBatches";

/// Commits of each table that a start looks through for lines that were never written.
const REDO_COMMITS: u64 = 100;

/// How often a start tries to write lines that somebody else may be writing too.
const REDO_TRIES: usize = 3;

fn rows_transaction(collector: &str) -> String {
    format!("store:{collector}")
}

fn lines_transaction(collector: &str, table: &str) -> String {
    format!("store:{collector}:{table}")
}

fn keeper(collector: &str) -> Keeper<'_> {
    Keeper {
        promise: "store",
        collector,
        transaction: lines_transaction,
    }
}

/// What a commit's information says.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    collector: String,
    lines: Vec<Line>,
}

/// Why a batch could not be stored now.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DirectError {
    /// Storage does not keep up.
    #[error("{held} bytes wait for their commit and the limit is {MAX_HELD}")]
    Full {
        /// Bytes that wait.
        held: u64,
    },
    /// The commit failed.
    #[error("failed to commit: {0}")]
    Commit(Arc<LakeError>),
    /// The collector stops.
    #[error("the collector is shutting down")]
    Closed,
}

/// Commits batches before they are acknowledged.
#[derive(Debug)]
pub struct Direct {
    jobs: mpsc::UnboundedSender<Job>,
    held: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Job {
    batch: NewBatch,
    parquet: Bytes,
    done: oneshot::Sender<Result<(), DirectError>>,
}

impl Source for Job {
    fn batch(&self) -> &NewBatch {
        &self.batch
    }
}

impl Direct {
    /// Starts the thread that commits. `collector` is this collector's id.
    pub async fn start(lake: Arc<Lake>, collector: &str) -> anyhow::Result<Direct> {
        let mut last = 0;
        for table in Table::FROM_AGENTS {
            let rows = lake.committed(table, &rows_transaction(collector)).await?;
            last = rows.max(last);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_name("store-io")
            .build()?;
        let held = Arc::new(AtomicU64::new(0));
        let (jobs, queue) = mpsc::unbounded_channel();
        let worker = Worker {
            lake,
            collector: collector.to_string(),
            last,
            unwritten: Vec::new(),
            in_doubt: Vec::new(),
            held: Arc::clone(&held),
        };
        std::thread::Builder::new()
            .name("store".to_string())
            .spawn(move || runtime.block_on(worker.run(queue)))?;
        Ok(Direct { jobs, held })
    }

    /// Stores one batch: when this returns, its rows and its line are committed.
    pub async fn store(&self, batch: NewBatch, parquet: Bytes) -> Result<(), DirectError> {
        let bytes = parquet.len() as u64;
        let held = self.held.fetch_add(bytes, Ordering::Relaxed);
        if held > 0 && held + bytes > MAX_HELD {
            self.held.fetch_sub(bytes, Ordering::Relaxed);
            return Err(DirectError::Full { held });
        }
        let (done, stored) = oneshot::channel();
        let job = Job {
            batch,
            parquet,
            done,
        };
        self.jobs.send(job).map_err(|_| DirectError::Closed)?;
        stored.await.unwrap_or(Err(DirectError::Closed))
    }
}

struct Worker {
    lake: Arc<Lake>,
    collector: String,
    /// Number of the last batch whose rows were committed.
    last: u64,
    /// Lines whose rows are committed and which could not be written yet.
    unwritten: Vec<Line>,
    /// Lines of commits that failed, at most one a table.
    in_doubt: Vec<(Table, Vec<Line>)>,
    held: Arc<AtomicU64>,
}

impl Worker {
    async fn run(mut self, mut queue: mpsc::UnboundedReceiver<Job>) {
        while let Some(first) = queue.recv().await {
            let group = gather(first, &mut queue).await;
            let bytes: u64 = group.iter().map(|job| job.parquet.len() as u64).sum();
            self.store(group).await;
            self.held.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    async fn store(&mut self, group: Vec<Job>) {
        if let Err(error) = self.settle().await {
            tracing::error!(%error, "failed to look at a table; agents keep the batches and send them again");
            answer(group, &Err(DirectError::Commit(Arc::new(error))));
            return;
        }
        let mut by_table: BTreeMap<Table, Vec<Job>> = BTreeMap::new();
        for job in group {
            by_table.entry(job.batch.table).or_default().push(job);
        }
        let mut committed = Vec::new();
        for (table, jobs) in by_table {
            match self.commit_rows(table, jobs).await {
                Ok(done) => committed.extend(done),
                Err((jobs, error)) => {
                    METRICS.commit_failed(table, &error);
                    tracing::error!(table = table.name(), %error, "failed to commit; agents keep the batches and send them again");
                    answer(jobs, &Err(DirectError::Commit(Arc::new(error))));
                }
            }
        }
        let written = self.write_lines().await;
        if let Err(error) = &written {
            METRICS.commit_failed(Table::Batches, error);
            tracing::error!(table = Table::Batches.name(), %error, "failed to commit the ledger of batches; agents keep the batches and send them again");
        }
        let outcome = written.map_err(|error| DirectError::Commit(Arc::new(error)));
        answer(committed, &outcome);
    }

    /// Commits rows of one table. Returns the batches whose rows are there now; or all, if the
    /// commit failed.
    async fn commit_rows(
        &mut self,
        table: Table,
        jobs: Vec<Job>,
    ) -> Result<Vec<Job>, (Vec<Job>, LakeError)> {
        let looked = self.look(table, &jobs).await;
        let (mut marks, known) = match looked {
            Ok(looked) => looked,
            Err(error) => return Err((jobs, error)),
        };
        let is_known = |job: &Job| known.contains(&(Arc::clone(&job.batch.agent), job.batch.seq));
        let (mut done, fresh): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(is_known);
        if fresh.is_empty() {
            return Ok(done);
        }
        let lines: Vec<Line> = (self.last + 1..)
            .zip(&fresh)
            .map(|(number, job)| Line::of(&job.batch, number, job.parquet.len() as u64))
            .collect();
        let last = self.last + fresh.len() as u64;
        let own = rows_transaction(&self.collector);
        for Job { batch, .. } in &fresh {
            marks.raise(&batch.agent, batch.seq);
        }
        marks.raise(&own, last);
        // A number is never used again, whatever becomes of its commit.
        self.last = last;
        let committed = self.commit(table, &fresh, &lines, &marks).await;
        done.extend(fresh);
        match committed {
            Ok(()) => {
                self.unwritten.extend(lines);
                Ok(done)
            }
            Err(error) => {
                self.in_doubt.push((table, lines));
                Err((done, error))
            }
        }
    }

    async fn commit(
        &self,
        table: Table,
        jobs: &[Job],
        lines: &[Line],
        marks: &Marks,
    ) -> Result<(), LakeError> {
        let lake = &self.lake;
        let batches: Vec<&Job> = jobs.iter().collect();
        let began = Instant::now();
        let loaded = load::load(table, batches, |job| Ok(Ok(job.parquet.clone())))
            .map_err(load_error(table))?;
        if let Some((job, reason)) = loaded.damaged.first() {
            // They were decoded at the door a moment ago.
            let reason = format!("batch {} of {}: {reason}", job.batch.seq, job.batch.agent);
            let failed = deltalake::DeltaTableError::Generic(reason);
            return Err(delta_error(table)(failed));
        }
        let note = serde_json::json!({ "collector": self.collector, "lines": lines });
        let count = loaded.rows.len();
        let rows = loaded.rows.chunks();
        match commit::commit(lake, table, rows, marks, Some((NOTE, note))).await {
            Ok(version) => {
                METRICS.committed(table, count as u64, began.elapsed());
                checkpoint_if_due(lake, table, version).await;
                Ok(())
            }
            // It may have gone through nonetheless, which `settle` finds out.
            Err(error) => Err(error),
        }
    }

    /// Finds out whether commits that failed went through nonetheless: then only their lines are
    /// missing. Before anything else is committed, which would hide it.
    async fn settle(&mut self) -> Result<(), LakeError> {
        let own = rows_transaction(&self.collector);
        while let Some((table, lines)) = self.in_doubt.last() {
            let last = lines.last().map_or(0, |line| line.number);
            recover::reload(&self.lake, *table).await?;
            let is_there = self.lake.committed(*table, &own).await? >= last;
            if let Some((_, lines)) = self.in_doubt.pop()
                && is_there
            {
                self.unwritten.extend(lines);
            }
        }
        Ok(())
    }

    /// How far the agents and this collector go in the table, and which batches it has already.
    async fn look(
        &self,
        table: Table,
        jobs: &[Job],
    ) -> Result<(Marks, HashSet<exact::Name>), LakeError> {
        let own = Arc::from(rows_transaction(&self.collector));
        let agents = jobs.iter().map(|job| &job.batch.agent);
        let marks = Marks::of(&self.lake, table, agents.chain([&own])).await?;
        let mut known = HashSet::new();
        let mut in_doubt = HashSet::new();
        for Job { batch, .. } in jobs {
            let name = (Arc::clone(&batch.agent), batch.seq);
            if self.unwritten.iter().any(|line| line.is_of(batch)) {
                known.insert(name);
            } else if batch.seq <= marks.before(&batch.agent) {
                in_doubt.insert(name);
            }
        }
        known.extend(exact::there(&self.lake, table, &in_doubt).await?);
        Ok((marks, known))
    }

    async fn write_lines(&mut self) -> Result<(), LakeError> {
        if self.unwritten.is_empty() {
            return Ok(());
        }
        let keeper = keeper(&self.collector);
        if let Err(error) = ledger::commit_lines(&self.lake, &self.unwritten, keeper).await {
            recover::reload(&self.lake, Table::Batches).await?;
            let missing = missing(&self.lake, &self.collector, &self.unwritten).await?;
            let is_over = missing.is_empty();
            self.unwritten = missing;
            return if is_over { Ok(()) } else { Err(error) };
        }
        self.unwritten.clear();
        Ok(())
    }
}

impl Source for &Job {
    fn batch(&self) -> &NewBatch {
        &self.batch
    }
}

fn answer(jobs: Vec<Job>, outcome: &Result<(), DirectError>) {
    for job in jobs {
        // Whoever asked may be gone.
        let _ = job.done.send(outcome.clone());
    }
}

async fn gather(first: Job, queue: &mut mpsc::UnboundedReceiver<Job>) -> Vec<Job> {
    let deadline = tokio::time::Instant::now() + GATHER;
    let mut decoded = first.batch.decoded_bytes;
    let mut group = vec![first];
    while decoded < GROUP_BYTES {
        match tokio::time::timeout_at(deadline, queue.recv()).await {
            Ok(Some(job)) => {
                decoded += job.batch.decoded_bytes;
                group.push(job);
            }
            Ok(None) | Err(_) => break,
        }
    }
    group
}

/// The lines that the ledger does not have.
async fn missing(lake: &Lake, collector: &str, lines: &[Line]) -> Result<Vec<Line>, LakeError> {
    let mut missing = Vec::new();
    for line in lines {
        let mark = lines_transaction(collector, line.table());
        if line.number > lake.committed(Table::Batches, &mark).await? {
            missing.push(line.clone());
        }
    }
    Ok(missing)
}

/// Writes lines that a stop has left out, of whatever collector. Called at start.
pub async fn redo(lake: &Lake) -> Result<(), LakeError> {
    let mut found: HashMap<String, Vec<Line>> = HashMap::new();
    for table in Table::FROM_AGENTS {
        for note in notes(lake, table).await? {
            let lines = missing(lake, &note.collector, &note.lines).await?;
            found.entry(note.collector).or_default().extend(lines);
        }
    }
    for (collector, mut lines) in found {
        for attempt in 1..=REDO_TRIES {
            if lines.is_empty() {
                break;
            }
            let written = ledger::commit_lines(lake, &lines, keeper(&collector)).await;
            if written.is_ok() {
                tracing::info!(
                    collector,
                    lines = lines.len(),
                    "wrote lines of the ledger that a stop had left out"
                );
                break;
            }
            recover::reload(lake, Table::Batches).await?;
            lines = missing(lake, &collector, &lines).await?;
            if attempt == REDO_TRIES && !lines.is_empty() {
                return written;
            }
        }
    }
    Ok(())
}

/// What the last commits of a table say about lines, the oldest first.
async fn notes(lake: &Lake, table: Table) -> Result<Vec<Note>, LakeError> {
    let delta = lake.table(table);
    let store = delta.log_store();
    let newest = delta.version().unwrap_or(0);
    let mut notes = Vec::new();
    for version in newest.saturating_sub(REDO_COMMITS)..=newest {
        let entry = store.read_commit_entry(version).await;
        // Old entries are removed after a checkpoint.
        let Some(entry) = entry.map_err(delta_error(table))? else {
            continue;
        };
        for action in entry.split(|byte| *byte == b'\n') {
            // Most actions are long, and say nothing of lines.
            let Ok(action) = serde_json::from_slice::<CommitInfo>(action) else {
                continue;
            };
            notes.extend(action.commit_info.note);
        }
    }
    Ok(notes)
}

/// The one action of a commit that has what we look for.
#[derive(Debug, Deserialize)]
struct CommitInfo {
    #[serde(rename = "commitInfo")]
    commit_info: Information,
}

#[derive(Debug, Deserialize)]
struct Information {
    #[serde(rename = "vramscopeBatches", default)]
    note: Option<Note>,
}
