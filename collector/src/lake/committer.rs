//! Moves batches from the log to the tables: merges what many agents sent, writes sorted
//! files, commits them with the agents' transactions, and only then removes them from the log.
//!
//! Invariants:
//! - the order is: data files durable, Delta log entry durable, log files removed. Stopped
//!   anywhere, a restart finds a batch in the log or its transaction in the table, and
//!   [`forget_committed`] sorts out those that are in both;
//! - of one agent and table, batches are committed in ascending order, a prefix at a time;
//! - a batch that rotted in the log is set aside, counted and named at ERROR; the rest goes on;
//! - any other failure leaves the log as it is: the next tick tries again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::RecordBatch;
use bytes::Bytes;
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties};
use deltalake::kernel::{Action, Transaction};
use deltalake::protocol::{DeltaOperation, SaveMode};
use deltalake::writer::{DeltaWriter, RecordBatchWriter};
use deltalake::{DeltaTable, DeltaTableError};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use tokio::sync::watch;
use vramscope_wire::{Table, parquet_file};

use super::{Lake, LakeError, delta_error, rows};
use crate::ingest::wal::{self, Entry, Wal};

/// Memory that the rows of one commit may take before they are merged; merging and sorting
/// hold about three times as much.
const COMMIT_MEMORY_BYTES: u64 = 256 << 20;

/// Commits between two checkpoints of a table's log. Opening a table reads the entries since
/// the last one.
const CHECKPOINT_INTERVAL: u64 = 100;

/// A file of a partition is closed and another begun at this size.
const TARGET_FILE_BYTES: u64 = 256 << 20;

/// Removes from the log what the tables hold already: the leftovers of a stop between a commit
/// and the removal. Called at start, before agents are let in.
pub async fn forget_committed(wal: &Wal, lake: &Lake) -> Result<(), LakeError> {
    for table in Table::ALL {
        let mut done = Vec::new();
        for entry in wal
            .waiting()
            .into_iter()
            .filter(|entry| entry.table == table)
        {
            if lake.holds(table, &entry.agent, entry.seq).await? {
                done.push(entry);
            }
        }
        if !done.is_empty() {
            tracing::info!(
                table = table.name(),
                batches = done.len(),
                "batches of the log are in the table already"
            );
            wal.remove(&done);
        }
    }
    Ok(())
}

/// Commits at every tick until `stopping` turns true, and once more then. Returns whether the
/// log is empty at the end.
pub async fn run(
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
pub async fn commit_all(wal: &Arc<Wal>, lake: &Arc<Lake>) {
    for table in Table::ALL {
        if let Err(error) = commit_table(wal, lake, table).await {
            tracing::error!(table = table.name(), %error, "failed to commit; the batches stay in the log and are tried again");
        }
    }
}

async fn commit_table(wal: &Arc<Wal>, lake: &Arc<Lake>, table: Table) -> Result<(), LakeError> {
    loop {
        let mut entries = wal.oldest(table, COMMIT_MEMORY_BYTES);
        if entries.is_empty() {
            return Ok(());
        }
        if lake.shared().is_some() {
            entries = drop_held(wal, lake, table, entries).await?;
        }
        let loaded = load(wal, table, entries).await?;
        for (entry, reason) in &loaded.damaged {
            set_aside(wal, entry, reason)?;
            if let Some(shared) = lake.shared() {
                shared.lost(&entry.agent, entry.seq);
            }
        }
        let Some(merged) = loaded.rows else { continue };
        let rows = merged.num_rows();
        let version = match commit(lake, table, merged, &loaded.sound).await {
            Ok(version) => version,
            Err(error) => {
                recover(wal, lake, table).await?;
                if lake.shared().is_some() && error.is_conflict() {
                    tracing::debug!(table = table.name(), %error, "another collector was first");
                    continue;
                }
                return Err(error);
            }
        };
        wal.remove(&loaded.sound);
        tracing::debug!(
            table = table.name(),
            version,
            rows,
            batches = loaded.sound.len(),
            "committed"
        );
        if version > 0 && version.is_multiple_of(CHECKPOINT_INTERVAL) {
            checkpoint(&lake.table(table), table).await;
        }
    }
}

/// Takes out of the log what another collector committed; the rest.
async fn drop_held(
    wal: &Wal,
    lake: &Lake,
    table: Table,
    entries: Vec<Entry>,
) -> Result<Vec<Entry>, LakeError> {
    let (mut held, mut rest) = (Vec::new(), Vec::new());
    for entry in entries {
        match lake.holds(table, &entry.agent, entry.seq).await? {
            true => held.push(entry),
            false => rest.push(entry),
        }
    }
    if !held.is_empty() {
        let batches = held.len();
        tracing::info!(
            table = table.name(),
            batches,
            "another collector committed them"
        );
        wal.remove(&held);
    }
    Ok(rest)
}

/// After a failed commit: it may have gone through nonetheless (the failure can come after the
/// log entry), so look before anything is written again.
async fn recover(wal: &Wal, lake: &Lake, table: Table) -> Result<(), LakeError> {
    lake.refresh(table).await?;
    forget_committed(wal, lake).await
}

struct Loaded {
    /// Merged, sorted rows; `None` if no batch is left.
    rows: Option<RecordBatch>,
    sound: Vec<Entry>,
    damaged: Vec<(Entry, String)>,
}

async fn load(wal: &Arc<Wal>, table: Table, entries: Vec<Entry>) -> Result<Loaded, LakeError> {
    let wal = Arc::clone(wal);
    let work = move || -> Result<Loaded, LakeError> {
        let mut loaded = Loaded {
            rows: None,
            sound: Vec::new(),
            damaged: Vec::new(),
        };
        let mut batches = Vec::new();
        for entry in entries {
            match read(&wal, &entry)? {
                Ok(rows) => {
                    batches.extend(rows);
                    loaded.sound.push(entry);
                }
                Err(reason) => loaded.damaged.push((entry, reason)),
            }
        }
        if !loaded.sound.is_empty() {
            let merged = rows::merge(table, &batches);
            loaded.rows = Some(merged.map_err(|source| LakeError::Arrow {
                table: table.name(),
                source,
            })?);
        }
        Ok(loaded)
    };
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|source| LakeError::Io {
            path: "_wal".into(),
            source: io::Error::other(source),
        })?
}

/// Reads one batch. The outer error is one that may pass; the inner one is damage.
fn read(wal: &Wal, entry: &Entry) -> Result<Result<Vec<RecordBatch>, String>, LakeError> {
    let path = entry.path(wal.root());
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        // EIO: the disk gave the bytes up. NotFound: somebody removed the file.
        Err(error)
            if error.raw_os_error() == Some(5) || error.kind() == io::ErrorKind::NotFound =>
        {
            return Ok(Err(error.to_string()));
        }
        Err(source) => return Err(LakeError::Io { path, source }),
    };
    let found = crc32fast::hash(&bytes);
    if found != entry.crc32 {
        return Ok(Err(format!(
            "CRC-32 is {found:08x}, expected {:08x}",
            entry.crc32
        )));
    }
    Ok(parquet_file::decode(entry.table, Bytes::from(bytes)).map_err(|error| error.to_string()))
}

fn set_aside(wal: &Wal, entry: &Entry, reason: &str) -> Result<(), LakeError> {
    let path = entry.path(wal.root());
    let aside = wal.set_aside(entry).map_err(super::io_error(&path))?;
    let rows = entry
        .rows
        .map_or("an unknown number of".to_string(), |rows| rows.to_string());
    tracing::error!(
        agent = &*entry.agent,
        batch_seq = entry.seq,
        table = entry.table.name(),
        "lost {rows} rows: {} is damaged ({reason}); kept as {}",
        path.display(),
        aside.display()
    );
    Ok(())
}

async fn commit(
    lake: &Lake,
    table: Table,
    rows: RecordBatch,
    entries: &[Entry],
) -> Result<u64, LakeError> {
    let highest = wal::highest_by_agent(entries);
    // Before the marks are looked at: what others commit after this state is found by Delta.
    let mut delta = lake.table(table);
    refuse_committed(lake, table, entries).await?;
    let marks = lake.transactions(entries.iter().map(|entry| (&entry.agent, entry.seq)));
    let version = write(&mut delta, table, rows, marks)
        .await
        .map_err(delta_error(table))?;
    lake.committed_now(table, delta, highest);
    Ok(version)
}

/// Refuses batches that the table holds already. The log's invariants rule them out; should
/// they be broken, rows must not double.
async fn refuse_committed(lake: &Lake, table: Table, entries: &[Entry]) -> Result<(), LakeError> {
    for entry in entries {
        if lake.holds(table, &entry.agent, entry.seq).await? {
            let both = format!(
                "batch {} of agent {} is in the log and in the table",
                entry.seq, entry.agent
            );
            return Err(delta_error(table)(DeltaTableError::Generic(both)));
        }
    }
    Ok(())
}

async fn write(
    delta: &mut DeltaTable,
    table: Table,
    rows: RecordBatch,
    marks: Vec<Transaction>,
) -> Result<u64, DeltaTableError> {
    let mut writer = RecordBatchWriter::for_table(delta)?
        .with_writer_properties(writer_properties()?)
        .with_target_file_size(TARGET_FILE_BYTES);
    writer.write(rows).await?;
    let adds = writer.flush().await?.into_iter().map(Action::Add).collect();
    let partition_by: Vec<String> = rows::partition_columns(table)
        .iter()
        .map(|name| name.to_string())
        .collect();
    let operation = DeltaOperation::Write {
        mode: SaveMode::Append,
        partition_by: (!partition_by.is_empty()).then_some(partition_by),
        predicate: None,
    };
    let properties = CommitProperties::default()
        .with_application_transactions(marks)
        // Checkpoints and old log entries are dealt with every so many commits, not here.
        .with_create_checkpoint(false)
        .with_cleanup_expired_logs(Some(false));
    let done = CommitBuilder::from(properties)
        .with_actions(adds)
        .build(Some(delta.snapshot()?), delta.log_store(), operation)
        .await?;
    delta.state = Some(done.snapshot());
    Ok(done.version())
}

fn writer_properties() -> Result<WriterProperties, DeltaTableError> {
    // Level 3: written once, read for months.
    let level = ZstdLevel::try_new(3)?;
    Ok(WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .build())
}

/// Checkpoints a table's log and removes entries that are older than its retention. A failure
/// costs time at the next start, no data.
async fn checkpoint(delta: &DeltaTable, table: Table) {
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
