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

use super::super::{Lake, LakeError, delta_error, layout, rows, survive};

/// What a commit says beside its actions: a key of the commit's information, and what is there.
pub(super) type Note = (&'static str, serde_json::Value);

/// The transactions of a commit: of each name how far the table has it, and how far it will.
#[derive(Debug, Default)]
pub(super) struct Marks(HashMap<Arc<str>, (u64, u64)>);

impl Marks {
    /// Looks up how far names go. Whatever is decided by that comes after it: a name that moves
    /// from here on fails the commit.
    pub(super) async fn of(
        lake: &Lake,
        table: Table,
        names: impl IntoIterator<Item = &Arc<str>>,
    ) -> Result<Marks, LakeError> {
        let mut marks = HashMap::new();
        for name in names {
            if !marks.contains_key(name) {
                let before = lake.committed(table, name).await?;
                marks.insert(Arc::clone(name), (before, before));
            }
        }
        Ok(Marks(marks))
    }

    /// How far a name goes in the table, 0 if it was not looked up.
    pub(super) fn before(&self, name: &str) -> u64 {
        self.0.get(name).map_or(0, |(before, _)| *before)
    }

    /// Raises a name that was looked up; one that is further stays where it is.
    pub(super) fn raise(&mut self, name: &str, to: u64) {
        if let Some((_, after)) = self.0.get_mut(name) {
            *after = to.max(*after);
        }
    }

    /// Fails if the table has one of the names further than it had when it was asked: another
    /// collector has committed the same agent's batches meanwhile.
    async fn verify(&self, lake: &Lake, table: Table) -> Result<(), LakeError> {
        for (name, (before, _)) in &self.0 {
            let now = lake.committed(table, name).await?;
            if now != *before {
                return Err(LakeError::Moved {
                    table: table.name(),
                    name: name.to_string(),
                    before: *before,
                    now,
                });
            }
        }
        Ok(())
    }

    fn transactions(&self) -> Vec<Transaction> {
        let now = chrono::Utc::now().timestamp_millis();
        let transaction = |(name, (_, after)): (&Arc<str>, &(u64, u64))| {
            // `ingest` lets in numbers up to i64::MAX only, and no log has so many records.
            let version = i64::try_from(*after).unwrap_or(i64::MAX);
            Transaction::new_with_last_update(name, version, Some(now))
        };
        self.0.iter().map(transaction).collect()
    }
}

/// Writes rows of the lake's schema, sorted by partition, and commits them with transactions.
/// Returns the table's new version.
///
/// Until the files are written the table may have got commits of others. Those that this process
/// has seen are checked here, the rest by Delta: either way none of the names may have moved.
pub(super) async fn commit(
    lake: &Lake,
    table: Table,
    chunks: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
    marks: &Marks,
    note: Option<Note>,
) -> Result<u64, LakeError> {
    let adds = survive(write(&lake.table(table), table, chunks))
        .await
        .map_err(delta_error(table))?;
    let _turn = lake.turn(table).await;
    let mut delta = lake.table(table);
    marks.verify(lake, table).await?;
    let version = enter(&mut delta, table, adds, marks, note)
        .await
        .map_err(delta_error(table))?;
    lake.set(table, delta);
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
    marks: &Marks,
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
        .with_application_transactions(marks.transactions())
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
