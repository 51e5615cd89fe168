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
use vramscope_wire::Table;

use super::super::{Lake, LakeError, delta_error, layout, rows};

/// Writes rows of the lake's schema, sorted by partition, and commits them with transactions.
/// Returns the table's new version.
pub(super) async fn commit(
    lake: &Lake,
    table: Table,
    chunks: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
    marks: HashMap<Arc<str>, u64>,
) -> Result<u64, LakeError> {
    let adds = write(&lake.table(table), table, chunks)
        .await
        .map_err(delta_error(table))?;
    let _turn = lake.turn(table).await;
    let mut delta = lake.table(table);
    let version = enter(&mut delta, table, adds, &marks)
        .await
        .map_err(delta_error(table))?;
    lake.committed_now(table, delta, marks);
    Ok(version)
}

async fn write(
    delta: &DeltaTable,
    table: Table,
    chunks: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
) -> Result<Vec<Action>, DeltaTableError> {
    let mut writer = RecordBatchWriter::for_table(delta)?
        .with_writer_properties(layout::properties(table, layout::Kind::Fresh)?)
        .with_target_file_size(layout::TARGET_FILE_BYTES);
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
