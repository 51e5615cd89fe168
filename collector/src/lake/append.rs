//! Rows of the collector's own tables: written by nobody else, in one piece, without a log before
//! them.

use std::sync::Arc;

use arrow::array::RecordBatch;
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties};
use deltalake::kernel::{Action, Transaction};
use deltalake::protocol::{DeltaOperation, SaveMode};
use deltalake::writer::{DeltaWriter, RecordBatchWriter};
use deltalake::{DeltaTable, DeltaTableError};
use vramscope_wire::Table;

use super::{Lake, LakeError, delta_error, rows, survive, transaction};

/// Commits between two checkpoints of the table's log.
const CHECKPOINT_INTERVAL: u64 = 100;

/// Appends rows in one commit, marked as number `number` of `writer`, unless the table holds that
/// number already. After an error, the same rows can be tried again with the same number.
pub async fn once(
    lake: &Lake,
    table: Table,
    batch: RecordBatch,
    writer: &str,
    number: u64,
) -> Result<(), LakeError> {
    let failed = || delta_error(table);
    let mut delta = lake.table(table);
    // Somebody else may have committed, or this number's first try did after all.
    delta.update_state().await.map_err(failed())?;
    if transaction(&delta, writer).await.map_err(failed())? >= number {
        lake.set(table, delta);
        return Ok(());
    }
    let merged = rows::merge(table, &[batch]).map_err(|source| LakeError::Arrow {
        table: table.name(),
        source,
    })?;
    let version = commit(&mut delta, table, merged, writer, number)
        .await
        .map_err(failed())?;
    if version > 0 && version.is_multiple_of(CHECKPOINT_INTERVAL) {
        // A failure costs time at the next start, no data.
        if let Err(error) = deltalake::checkpoints::create_checkpoint(&delta, None).await {
            tracing::warn!(table = table.name(), %error, "failed to checkpoint the table's log");
        }
    }
    lake.set(table, delta);
    Ok(())
}

async fn commit(
    delta: &mut DeltaTable,
    table: Table,
    batch: RecordBatch,
    writer: &str,
    number: u64,
) -> Result<u64, DeltaTableError> {
    let mut files = RecordBatchWriter::for_table(delta)?;
    let adds = survive(async {
        files.write(batch).await?;
        files.flush().await
    });
    let adds = adds.await?.into_iter().map(Action::Add).collect();
    let columns = rows::partition_columns(table).iter();
    let partition_by: Vec<String> = columns.map(|name| name.to_string()).collect();
    let operation = DeltaOperation::Write {
        mode: SaveMode::Append,
        partition_by: (!partition_by.is_empty()).then_some(partition_by),
        predicate: None,
    };
    // Numbers count up from 1.
    let number = i64::try_from(number).unwrap_or(i64::MAX);
    let now = chrono::Utc::now().timestamp_millis();
    let mark = Transaction::new_with_last_update(Arc::<str>::from(writer), number, Some(now));
    let properties = CommitProperties::default()
        .with_application_transactions(vec![mark])
        .with_create_checkpoint(false)
        .with_cleanup_expired_logs(Some(false));
    let done = CommitBuilder::from(properties)
        .with_actions(adds)
        .build(Some(delta.snapshot()?), delta.log_store(), operation)
        .await?;
    delta.state = Some(done.snapshot());
    Ok(done.version())
}
