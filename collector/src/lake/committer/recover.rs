//! What a start has to sort out, and what a failed commit leaves in doubt.
//!
//! Every commit of this log's batches carries the number of its last record: in the table the
//! rows went to, and in `batches` for each table. A record at or below the first has its rows
//! committed, one at or below the second has its line too.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use vramscope_wire::Table;

use super::super::{Lake, LakeError, delta_error, io_error};
use super::{Acknowledged, acknowledged, ledger_transaction, own_transaction};
use crate::ingest::check;
use crate::ingest::marks::Marks;
use crate::ingest::placing::Clock;
use crate::ingest::wal::legacy::{self, Legacy};
use crate::ingest::wal::{Entry, NewBatch, Wal};

/// How far back the start reads the ledger, for the checksums of what agents may send again.
const LEDGER_US: i64 = 2 * 3_600_000_000;

/// Batches of an earlier version's log that are taken in at a time.
const LEGACY_AT_A_TIME: usize = 64;

/// Lets the log go of what the tables have, and takes in a log of an earlier version. Called at
/// start, before agents are let in.
pub async fn recover(wal: &Wal, lake: &Lake, clock: &Clock) -> Result<(), LakeError> {
    for table in Table::FROM_AGENTS {
        wal.continue_after(lake.committed(table, &own_transaction(wal.id())).await?);
        let lines = ledger_transaction(wal.id(), table.name());
        wal.continue_after(lake.committed(Table::Batches, &lines).await?);
        let done = sort_out(wal, lake, table).await?;
        if done > 0 {
            tracing::info!(
                table = table.name(),
                batches = done,
                "batches were committed before the restart"
            );
        }
    }
    take_in(wal, lake, clock).await
}

/// Tells the marks the checksums of what agents sent last.
pub async fn remember(wal: &Wal, lake: &Lake, marks: &Marks) -> Result<(), LakeError> {
    let since = chrono::Utc::now().timestamp_micros() - LEDGER_US;
    let tell = |known: Acknowledged<'_>| marks.remember(known.agent, known.seq, known.crc32);
    let ledger = lake.table(Table::Batches);
    acknowledged(&ledger, Some(since), tell)
        .await
        .map_err(delta_error(Table::Batches))?;
    for Entry { batch, .. } in wal.waiting().iter().chain(&wal.unledgered()) {
        marks.remember(&batch.agent, batch.seq, batch.crc32);
    }
    Ok(())
}

/// After a failed commit: it may have gone through nonetheless (the failure can come after the
/// log entry), so look before anything is written again.
pub(super) async fn reload(lake: &Lake, table: Table) -> Result<(), LakeError> {
    let mut delta = lake.table(table);
    delta.update_state().await.map_err(delta_error(table))?;
    // What the update saw must be durable before anybody counts on it.
    if let Ok(dir) = delta.table_url().to_file_path() {
        let log = dir.join("_delta_log");
        crate::folder::sync_dir(&log).map_err(io_error(&log))?;
    }
    lake.set(table, delta);
    Ok(())
}

/// Compares the log's batches with the transactions.
pub(super) async fn sort_out_all(wal: &Wal, lake: &Lake) -> Result<(), LakeError> {
    for table in Table::FROM_AGENTS {
        sort_out(wal, lake, table).await?;
    }
    Ok(())
}

/// Compares the log's batches of a table with the transactions. Returns of how many the rows are
/// committed.
async fn sort_out(wal: &Wal, lake: &Lake, table: Table) -> Result<usize, LakeError> {
    let of_table = |entries: Vec<Entry>, mark: u64| -> Vec<Entry> {
        let is_there = |entry: &Entry| entry.batch.table == table && entry.number <= mark;
        entries.into_iter().filter(is_there).collect()
    };
    let mark = lake.committed(table, &own_transaction(wal.id())).await?;
    let committed = of_table(wal.waiting(), mark);
    wal.committed(&committed);
    let lines = ledger_transaction(wal.id(), table.name());
    let mark = lake.committed(Table::Batches, &lines).await?;
    wal.finish(&of_table(wal.unledgered(), mark));
    Ok(committed.len())
}

/// Takes in a log of an earlier version.
async fn take_in(wal: &Wal, lake: &Lake, clock: &Clock) -> Result<(), LakeError> {
    let root = wal.root().to_path_buf();
    legacy::remove_temporaries(&root).map_err(io_error(&root))?;
    let found = legacy::list(&root).map_err(io_error(&root))?;
    let mut taken = 0;
    for some in found.chunks(LEGACY_AT_A_TIME) {
        let mut stores = Vec::new();
        for old in some {
            let is_committed = old.seq <= lake.committed(old.table, &old.agent).await?;
            let is_logged = wal.highest(&old.agent) >= Some(old.seq);
            if !is_committed && !is_logged {
                let path = &old.path;
                let Some((batch, parquet)) = read(&root, old, clock).map_err(io_error(path))?
                else {
                    continue;
                };
                stores.push(wal.store_regardless(batch, parquet));
                taken += 1;
            }
        }
        // In the order of the list: of an agent the lower number first.
        for stored in futures::future::join_all(stores).await {
            stored.map_err(|error| io_error(&root)(io::Error::other(error)))?;
        }
        for old in some {
            match std::fs::remove_file(&old.path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(io_error(&old.path)(error)),
            }
        }
    }
    if !found.is_empty() {
        tracing::info!(
            files = found.len(),
            taken,
            "took in the log of an earlier version"
        );
    }
    Ok(())
}

/// Reads a batch of an earlier version's log; `None` if it was damaged and set aside.
fn read(
    root: &std::path::Path,
    old: &Legacy,
    clock: &Clock,
) -> io::Result<Option<(NewBatch, Bytes)>> {
    let bytes = Bytes::from(std::fs::read(&old.path)?);
    let arrived = std::fs::metadata(&old.path)?.modified()?;
    let arrived = chrono::DateTime::<chrono::Utc>::from(arrived).timestamp_micros();
    let placing = clock.at(arrived);
    let rows = check::announced_rows(&bytes);
    let checked = match check::rows(old.table, bytes.clone(), old.crc32, rows, None, &placing) {
        Ok(checked) => checked,
        Err(reason) => {
            let aside = old.set_aside(root, &bytes)?;
            let rows = match rows {
                0 => "an unknown number of".to_string(),
                rows => rows.to_string(),
            };
            tracing::error!(
                agent = &*old.agent,
                batch_seq = old.seq,
                table = old.table.name(),
                "lost {rows} rows: {} is damaged ({reason}); kept as {}",
                old.path.display(),
                aside.display()
            );
            return Ok(None);
        }
    };
    let batch = NewBatch {
        agent: Arc::clone(&old.agent),
        seq: old.seq,
        host: None,
        table: old.table,
        crc32: old.crc32,
        rows: checked.rows,
        decoded_bytes: checked.decoded_bytes,
        times: checked.times,
        placing,
        misdated: checked.misdated,
    };
    Ok(Some((batch, bytes)))
}
