//! One commit of one table: data files, then the entry in the table's log.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties};
use deltalake::kernel::{Action, Transaction};
use deltalake::protocol::{DeltaOperation, SaveMode};
use deltalake::writer::{DeltaWriter, RecordBatchWriter};
use deltalake::{DeltaTable, DeltaTableError};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use vramscope_wire::Table;

use super::super::{Lake, LakeError, delta_error, rows};

/// A file of a partition is closed and another begun at this size.
const TARGET_FILE_BYTES: u64 = 256 << 20;

/// What a commit says beside its actions: a key of the commit's information, and what is there.
pub(super) type Note = (&'static str, serde_json::Value);

/// Writes rows of the lake's schema, sorted by partition, and commits them with transactions.
/// Returns the table's new version.
pub(super) async fn commit(
    lake: &Lake,
    table: Table,
    chunks: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
    marks: HashMap<Arc<str>, u64>,
    note: Option<Note>,
) -> Result<u64, LakeError> {
    let mut delta = lake.table(table);
    let adds = write(&delta, chunks).await.map_err(delta_error(table))?;
    let version = enter(&mut delta, table, adds, &marks, note)
        .await
        .map_err(delta_error(table))?;
    lake.set(table, delta);
    Ok(version)
}

async fn write(
    delta: &DeltaTable,
    chunks: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
) -> Result<Vec<Action>, DeltaTableError> {
    let mut writer = RecordBatchWriter::for_table(delta)?
        .with_writer_properties(writer_properties()?)
        .with_target_file_size(TARGET_FILE_BYTES);
    for chunk in chunks {
        writer.write(chunk?).await?;
    }
    Ok(writer.flush().await?.into_iter().map(Action::Add).collect())
}

async fn enter(
    delta: &mut DeltaTable,
    table: Table,
    adds: Vec<Action>,
    marks: &HashMap<Arc<str>, u64>,
    note: Option<Note>,
) -> Result<u64, DeltaTableError> {
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
        .with_application_transactions(transactions(marks))
        .with_metadata(note.map(|(key, value)| (key.to_string(), value)))
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

fn transactions(marks: &HashMap<Arc<str>, u64>) -> Vec<Transaction> {
    let now = chrono::Utc::now().timestamp_millis();
    let transaction = |(name, mark): (&Arc<str>, &u64)| {
        // `ingest` lets in numbers up to i64::MAX only, and no log has so many records.
        let version = i64::try_from(*mark).unwrap_or(i64::MAX);
        Transaction::new_with_last_update(name, version, Some(now))
    };
    marks.iter().map(transaction).collect()
}

fn writer_properties() -> Result<WriterProperties, DeltaTableError> {
    // Level 1: compaction writes these rows again soon, and takes the time to do it better.
    let level = ZstdLevel::try_new(1)?;
    Ok(WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .build())
}
