//! Whether a table has a batch, told exactly: by its rows.
//!
//! An agent's transaction says how far its line goes in a table, and everything at or below it is
//! there, as long as one collector takes all of an agent's batches. When an agent goes to another
//! collector on the same lake, the first one may still hold a batch in its log while the second has
//! moved the agent's mark beyond it: then only the rows can tell. This takes time in proportion to
//! the files that may have them, and happens rarely.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow::error::ArrowError;
use deltalake::logstore::object_store::path::Path;
use deltalake::logstore::object_store::{ObjectStore, ObjectStoreExt};
use deltalake::{DeltaTable, DeltaTableError};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::{
    AsyncFileReader, ParquetRecordBatchStream, ParquetRecordBatchStreamBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::statistics::Statistics;
use vramscope_wire::Table;

use super::super::{Lake, LakeError, delta_error};
use crate::ingest::wal::{Entry, Wal};

type Name = (Arc<str>, u64);

/// Leaves out of `entries` what the table has already from another collector, and lets the log go
/// of it.
pub(super) async fn without_committed(
    wal: &Wal,
    lake: &Lake,
    table: Table,
    entries: Vec<Entry>,
) -> Result<Vec<Entry>, LakeError> {
    let mut in_doubt: HashSet<Name> = HashSet::new();
    for entry in &entries {
        if entry.batch.seq <= lake.committed(table, &entry.batch.agent).await? {
            in_doubt.insert((Arc::clone(&entry.batch.agent), entry.batch.seq));
        }
    }
    if in_doubt.is_empty() {
        return Ok(entries);
    }
    // The other collector has written the lines in the ledger; they outlive the rows.
    let mut found = HashSet::new();
    for place in [table, Table::Batches] {
        let mut delta = lake.table(place);
        delta.update_state().await.map_err(delta_error(place))?;
        found.extend(find(&delta, &in_doubt).await.map_err(delta_error(place))?);
    }
    let is_there =
        |entry: &Entry| found.contains(&(Arc::clone(&entry.batch.agent), entry.batch.seq));
    let (there, rest): (Vec<Entry>, Vec<Entry>) = entries.into_iter().partition(is_there);
    if !there.is_empty() {
        tracing::info!(
            table = table.name(),
            batches = there.len(),
            "another collector has committed batches that wait here"
        );
        wal.finish(&there);
    }
    Ok(rest)
}

/// Which of the batches have rows (or lines) in a table.
async fn find(
    delta: &DeltaTable,
    wanted: &HashSet<Name>,
) -> Result<HashSet<Name>, DeltaTableError> {
    let seqs = wanted.iter().map(|(_, seq)| *seq as i64);
    let range = seqs.clone().min().unwrap_or(0)..=seqs.max().unwrap_or(0);
    let files = Files::of(delta)?;
    let mut found = HashSet::new();
    for file in files.iter() {
        let columns = ["agent_id", "batch_seq"];
        let mut pieces = files.read(file, &columns, Some(&range)).await?;
        while let Some(piece) = pieces.next().await? {
            collect(&piece, wanted, &mut found)?;
        }
    }
    Ok(found)
}

fn collect(
    piece: &RecordBatch,
    wanted: &HashSet<Name>,
    found: &mut HashSet<Name>,
) -> Result<(), ArrowError> {
    let column = |name: &str, data_type| {
        let column = piece
            .column_by_name(name)
            .ok_or_else(|| ArrowError::SchemaError(format!("column {name:?} is missing")))?;
        cast(column, data_type)
    };
    let agents = column("agent_id", &DataType::Utf8)?;
    let seqs = column("batch_seq", &DataType::Int64)?;
    let mut by_seq: HashMap<u64, Vec<&Name>> = HashMap::new();
    for name in wanted {
        by_seq.entry(name.1).or_default().push(name);
    }
    let seqs = seqs.as_primitive::<Int64Type>();
    for row in 0..piece.num_rows() {
        let candidates = by_seq.get(&(seqs.value(row) as u64));
        for name in candidates.into_iter().flatten() {
            if *name.0 == *agents.as_string::<i32>().value(row) {
                found.insert((*name).clone());
            }
        }
    }
    Ok(())
}

/// The live files of a table.
pub(super) struct Files {
    store: Arc<dyn ObjectStore>,
    files: Vec<File>,
}

pub(super) struct File {
    path: Path,
    bytes: u64,
    /// Hour of its partition, counted from 1970.
    hour: Option<i64>,
}

impl Files {
    pub(super) fn of(delta: &DeltaTable) -> Result<Files, DeltaTableError> {
        let views = delta.snapshot()?.log_data();
        let files = views
            .into_iter()
            .map(|view| File {
                path: view.object_store_path(),
                bytes: u64::try_from(view.size()).unwrap_or(0),
                hour: hour(&view.partition_values_map()),
            })
            .collect();
        Ok(Files {
            store: delta.object_store(),
            files,
        })
    }

    pub(super) fn since_hour(mut self, hour: i64) -> Files {
        self.files
            .retain(|file| file.hour.is_none_or(|of| of >= hour));
        self
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &File> {
        self.files.iter()
    }

    /// Reads columns of a file; of row groups that cannot have a `batch_seq` in the range nothing.
    pub(super) async fn read(
        &self,
        file: &File,
        columns: &[&str],
        seqs: Option<&std::ops::RangeInclusive<i64>>,
    ) -> Result<Pieces, DeltaTableError> {
        let reader = Reader {
            store: Arc::clone(&self.store),
            path: file.path.clone(),
            bytes: file.bytes,
        };
        let mut builder = ParquetRecordBatchStreamBuilder::new(reader).await?;
        let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().copied());
        if let Some(seqs) = seqs {
            let groups = may_have(builder.metadata(), seqs);
            builder = builder.with_row_groups(groups);
        }
        let stream = builder
            .with_projection(mask)
            .with_batch_size(8192)
            .build()?;
        Ok(Pieces { stream })
    }
}

/// Reads pieces of a file out of a store.
struct Reader {
    store: Arc<dyn ObjectStore>,
    path: Path,
    bytes: u64,
}

impl AsyncFileReader for Reader {
    fn get_bytes(
        &mut self,
        range: std::ops::Range<u64>,
    ) -> BoxFuture<'_, Result<bytes::Bytes, ParquetError>> {
        async move {
            let bytes = self.store.get_range(&self.path, range).await;
            bytes.map_err(|error| ParquetError::External(Box::new(error)))
        }
        .boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>, ParquetError>> {
        async move {
            let bytes = self.bytes;
            let footer = ParquetMetaDataReader::new();
            Ok(Arc::new(footer.load_and_finish(self, bytes).await?))
        }
        .boxed()
    }
}

/// Rows of a file, a piece at a time.
pub(super) struct Pieces {
    stream: ParquetRecordBatchStream<Reader>,
}

impl Pieces {
    pub(super) async fn next(&mut self) -> Result<Option<RecordBatch>, DeltaTableError> {
        Ok(self.stream.next().await.transpose()?)
    }
}

fn may_have(footer: &ParquetMetaData, seqs: &std::ops::RangeInclusive<i64>) -> Vec<usize> {
    let groups = footer.row_groups().iter().enumerate();
    groups
        .filter(|(_, group)| {
            let column = group
                .columns()
                .iter()
                .find(|column| column.column_path().string() == "batch_seq");
            let range = column.and_then(|column| match column.statistics() {
                Some(Statistics::Int64(range)) => range.min_opt().zip(range.max_opt()),
                _ => None,
            });
            range.is_none_or(|(min, max)| min <= seqs.end() && max >= seqs.start())
        })
        .map(|(index, _)| index)
        .collect()
}

/// The hour of a partition by date and hour, counted from 1970.
fn hour(values: &HashMap<String, Option<String>>) -> Option<i64> {
    let date = values.get("date")?.as_deref()?;
    let hour: i64 = values.get("hour")?.as_deref()?.parse().ok()?;
    let date: chrono::NaiveDate = date.parse().ok()?;
    let days = date.signed_duration_since(chrono::NaiveDate::default());
    Some(days.num_days() * 24 + hour)
}
