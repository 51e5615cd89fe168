//! Moves batches from the log to the tables: merges what many agents sent, writes sorted
//! files, commits them with the agents' transactions, writes the ledger of acknowledgements, and
//! only then lets the log go.
//!
//! Invariants:
//! - the order is: data files durable, table's Delta log entry durable, lines in `batches` durable,
//!   log released. Stopped anywhere, a restart finds a batch in the log, and how far it came by two
//!   transactions of this log ([`recover`]): no row and no line is lost or written twice;
//! - of one table, batches are committed in ascending order of their records, a prefix at a time;
//! - a commit carries for each of its agents a transaction with the highest `batch_seq` that the
//!   table has of it, which never goes down. Two collectors on one lake that commit the same agent
//!   at the same time get in each other's way there, and the second one looks again;
//! - a batch that rotted in the log is set aside, counted and named at ERROR; the rest goes on;
//! - any other failure leaves the log as it is: the next tick tries again.
//!
//! It has a thread of its own: encoding takes processor time for as long as there is any, and
//! intake must go on meanwhile.

mod commit;
pub mod direct;
mod exact;
pub(super) mod files;
mod ledger;
mod load;
pub mod recover;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deltalake::DeltaTable;
use tokio::sync::{oneshot, watch};
use vramscope_wire::Table;

use super::{Lake, LakeError};
use crate::ingest::wal::{Entry, Wal};
use crate::metrics::METRICS;

use commit::Marks;
pub use ledger::{Acknowledged, acknowledged};

/// Memory that the rows of one commit may take; sorting adds about a quarter, and the encoded
/// files.
const COMMIT_MEMORY_BYTES: u64 = 128 << 20;

/// Commits between two checkpoints of a table's log. Opening a table reads the entries since
/// the last one.
pub(super) const CHECKPOINT_INTERVAL: u64 = 100;

/// The transaction by which a table knows the records of a log. No agent can have such a name.
pub fn own_transaction(log_id: &str) -> String {
    format!("log:{log_id}")
}

/// The transaction by which `batches` knows the records of a log that went to a table.
pub fn ledger_transaction(log_id: &str, table: &str) -> String {
    format!("log:{log_id}:{table}")
}

/// Starts the committer: it commits at every tick until `stopping` turns true, and once more then.
/// The answer is whether the log is empty at the end.
pub fn start(
    wal: Arc<Wal>,
    lake: Arc<Lake>,
    interval: Duration,
    stopping: watch::Receiver<bool>,
) -> io::Result<oneshot::Receiver<bool>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("commit-io")
        .build()?;
    let (done, ended) = oneshot::channel();
    std::thread::Builder::new()
        .name("committer".to_string())
        .spawn(move || {
            let is_empty = runtime.block_on(run(wal, lake, interval, stopping));
            // Nobody may be interested any more.
            let _ = done.send(is_empty);
        })?;
    Ok(ended)
}

async fn run(
    wal: Arc<Wal>,
    lake: Arc<Lake>,
    interval: Duration,
    mut stopping: watch::Receiver<bool>,
) -> bool {
    let mut tick = tokio::time::interval(interval);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            _ = stopping.wait_for(|stopping| *stopping) => break,
        }
        commit_all(&wal, &lake).await;
    }
    commit_all(&wal, &lake).await;
    wal.close();
    let left = wal.backlog();
    if left.files > 0 {
        tracing::warn!(
            batches = left.files,
            bytes = left.bytes,
            "stopping with batches in the log; the next start commits them"
        );
    }
    left.files == 0
}

/// Commits everything that waits in the log. A table that fails does not hold up the others.
pub async fn commit_all(wal: &Wal, lake: &Lake) {
    for table in Table::FROM_AGENTS {
        if let Err(error) = commit_table(wal, lake, table).await {
            METRICS.commit_failed(table, &error);
            tracing::error!(table = table.name(), %error, "failed to commit; the batches stay in the log and are tried again");
        }
    }
    if let Err(error) = ledger::write(wal, lake).await {
        METRICS.commit_failed(Table::Batches, &error);
        tracing::error!(table = Table::Batches.name(), %error, "failed to commit the ledger of batches; they stay in the log and are tried again");
    }
}

async fn commit_table(wal: &Wal, lake: &Lake, table: Table) -> Result<(), LakeError> {
    loop {
        let entries = wal.oldest(table, COMMIT_MEMORY_BYTES);
        let Some(last) = entries.last().map(|entry| entry.number) else {
            return Ok(());
        };
        let own = Arc::from(own_transaction(wal.id()));
        let agents = entries.iter().map(|entry| &entry.batch.agent);
        let mut marks = Marks::of(lake, table, agents.chain([&own])).await?;
        let entries = exact::without_committed(wal, lake, table, entries, &marks).await?;
        let loaded = load::load(table, entries, |entry| load::from_log(wal, entry))
            .map_err(load_error(table))?;
        for (entry, reason) in &loaded.damaged {
            set_aside(wal, entry, reason)?;
        }
        if loaded.sound.is_empty() {
            continue;
        }
        for Entry { batch, .. } in &loaded.sound {
            marks.raise(&batch.agent, batch.seq);
        }
        marks.raise(&own, last);
        let rows = loaded.rows.len();
        let began = Instant::now();
        let version = match commit::commit(lake, table, loaded.rows.chunks(), &marks, None).await {
            Ok(version) => version,
            Err(error) => {
                recover::reload(lake, table).await?;
                recover::sort_out_all(wal, lake).await?;
                if error.is_conflict() {
                    tracing::debug!(table = table.name(), %error, "another was first; looking again");
                    continue;
                }
                return Err(error);
            }
        };
        METRICS.committed(table, rows as u64, began.elapsed());
        wal.committed(&loaded.sound);
        tracing::debug!(
            table = table.name(),
            version,
            rows,
            batches = loaded.sound.len(),
            "committed"
        );
        checkpoint_if_due(lake, table, version).await;
    }
}

fn load_error(table: Table) -> impl FnOnce(load::LoadError) -> LakeError {
    move |error| match error {
        load::LoadError::Arrow(source) => LakeError::Arrow {
            table: table.name(),
            source,
        },
        load::LoadError::Io { path, source } => LakeError::Io { path, source },
    }
}

fn set_aside(wal: &Wal, entry: &Entry, reason: &str) -> Result<(), LakeError> {
    let path = wal.path(entry);
    let aside = wal.set_aside(entry).map_err(super::io_error(&path))?;
    tracing::error!(
        agent = &*entry.batch.agent,
        batch_seq = entry.batch.seq,
        table = entry.batch.table.name(),
        "lost {} rows: a batch in {} is damaged ({reason}); kept as {}",
        entry.batch.rows,
        path.display(),
        aside.display()
    );
    Ok(())
}

async fn checkpoint_if_due(lake: &Lake, table: Table, version: u64) {
    if version > 0 && version.is_multiple_of(CHECKPOINT_INTERVAL) {
        checkpoint(&lake.table(table), table).await;
    }
}

/// Checkpoints a table's log and removes entries that are older than its retention. A failure
/// costs time at the next start, no data.
pub(super) async fn checkpoint(delta: &DeltaTable, table: Table) {
    let done = match deltalake::checkpoints::create_checkpoint(delta, None).await {
        Ok(()) => deltalake::checkpoints::cleanup_metadata(delta, None).await,
        Err(error) => Err(error),
    };
    match done {
        Ok(removed) => tracing::debug!(
            table = table.name(),
            removed,
            "checkpointed the table's log"
        ),
        Err(error) => {
            tracing::warn!(table = table.name(), %error, "failed to checkpoint the table's log")
        }
    }
}
