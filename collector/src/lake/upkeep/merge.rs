//! Merges sorted files of one partition into few, without ever holding the partition.
//!
//! Memory: of each input one row group as it lies on disk and a few decoded batches of about
//! [`BATCH_BYTES`], of the output one row group. How many inputs a merge takes follows from their
//! footers and its budget ([`Inputs::within`]).
//!
//! Invariants:
//! - the output has the table's own columns, also those that this program does not know; a column
//!   that an older file lacks is NULL in it;
//! - it keeps the inputs' partition, whatever `ts` says: rows of a host whose clock was wrong lie
//!   in the partition of their arrival;
//! - no merge is handed out whose rows do not add up.
//!
//! Inputs are taken to be sorted, as everything that a collector writes is. Rows of one that is not
//! come out in another order, and nothing else happens to them.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch, new_null_array};
use arrow::compute::{SortOptions, cast, filter_record_batch};
use arrow::datatypes::{Int64Type, Schema, SchemaRef};
use arrow::error::ArrowError;
use bytes::Bytes;
use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryConsumer, MemoryPool};
use datafusion::physical_expr::expressions::col;
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_plan::metrics::{BaselineMetrics, ExecutionPlanMetricsSet};
use datafusion::physical_plan::sorts::streaming_merge::StreamingMergeBuilder;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use deltalake::kernel::{Add, LogicalFileView};
use deltalake::logstore::object_store::path::Path;
use deltalake::logstore::object_store::{ObjectStore, ObjectStoreExt};

use deltalake::writer::{DeltaWriter, RecordBatchWriter, WriteMode};
use deltalake::{DeltaTable, DeltaTableError};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use parquet::arrow::ParquetRecordBatchStreamBuilder;
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use vramscope_wire::Table;

use super::{Pace, UpkeepError};
use crate::lake::{layout, rows, survive};

/// Decoded bytes of a batch, about.
const BATCH_BYTES: u64 = 1 << 20;

/// Batches that a merge holds of each input: the one it reads from, and those that rows of the
/// batch in the making come from.
const BATCHES_HELD: u64 = 3;

/// What the output takes: the row group in the making, and its encoders' dictionaries.
const OUTPUT_BYTES: u64 = 3 * layout::ROW_GROUP_BYTES as u64;

/// Open files of one merge.
const MOST_INPUTS: usize = 64;

/// What a merge came to. Its files are written, and nobody knows of them yet.
pub struct Merged {
    /// The new files.
    pub adds: Vec<Add>,
    /// Rows of the inputs.
    pub rows_in: u64,
    /// Rows of the new files. Fewer only if stacks came more than once.
    pub rows_out: u64,
}

/// One input, its footer read.
pub struct Input {
    view: LogicalFileView,
    reader: StoredFile,
    footer: Arc<ParquetMetaData>,
}

/// The inputs of a merge.
pub struct Inputs {
    table: Table,
    files: Vec<Input>,
    batch_rows: usize,
}

impl Input {
    /// Reads a file's footer.
    pub async fn open(
        store: &Arc<dyn ObjectStore>,
        view: LogicalFileView,
    ) -> Result<Input, ParquetError> {
        let mut reader = StoredFile {
            store: Arc::clone(store),
            path: view.object_store_path(),
            bytes: u64::try_from(view.size()).unwrap_or(0),
        };
        let footer = reader.get_metadata(None).await?;
        Ok(Input {
            view,
            reader,
            footer,
        })
    }

    fn rows(&self) -> u64 {
        u64::try_from(self.footer.file_metadata().num_rows()).unwrap_or(0)
    }

    /// The largest row group, as it lies on disk.
    fn row_group_bytes(&self) -> u64 {
        let sizes = self
            .footer
            .row_groups()
            .iter()
            .map(|group| group.compressed_size());
        sizes
            .max()
            .and_then(|bytes| u64::try_from(bytes).ok())
            .unwrap_or(0)
    }

    /// Bytes of a row in memory, about: what it takes on disk before compression, several times
    /// over since dictionaries are written out, and the fixed part of every column.
    fn row_bytes(&self) -> u64 {
        let encoded: i64 = self
            .footer
            .row_groups()
            .iter()
            .map(|group| group.total_byte_size())
            .sum();
        let columns = self.footer.file_metadata().schema_descr().num_columns() as u64;
        4 * u64::try_from(encoded).unwrap_or(0) / self.rows().max(1) + 12 * columns
    }
}

impl Inputs {
    /// The files, from the first on, that can be merged within a budget in bytes: two at least.
    pub fn within(table: Table, files: Vec<Input>, budget: u64) -> Inputs {
        let row_bytes = files.iter().map(Input::row_bytes).max().unwrap_or(1).max(1);
        let batch_rows = (BATCH_BYTES / row_bytes).clamp(16, 8192);
        let batch_bytes = batch_rows * row_bytes;
        let mut left = budget.saturating_sub(OUTPUT_BYTES);
        let mut taken = 0;
        for file in files.iter().take(MOST_INPUTS) {
            let cost = file.row_group_bytes() + BATCHES_HELD * batch_bytes;
            if cost > left && taken >= 2 {
                break;
            }
            left = left.saturating_sub(cost);
            taken += 1;
        }
        Inputs {
            table,
            files: files.into_iter().take(taken).collect(),
            batch_rows: usize::try_from(batch_rows).unwrap_or(8192),
        }
    }

    /// How many files are merged.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there is nothing to merge.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The paths of the files, as the table's log has them.
    pub fn paths(&self) -> Vec<String> {
        self.files
            .iter()
            .map(|file| file.view.path().into_owned())
            .collect()
    }

    /// Bytes of the files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.reader.bytes).sum()
    }

    /// Merges them into new files. If it fails, or is dropped, what it wrote is left to vacuum.
    pub async fn merge(
        self,
        delta: &DeltaTable,
        budget: u64,
        pace: &mut Pace,
    ) -> Result<Merged, UpkeepError> {
        let table = self.table;
        let failed = |source: DeltaTableError| UpkeepError::from(super::delta_error(table)(source));
        let rows_in = self.files.iter().map(Input::rows).sum();
        let Some(first) = self.files.first() else {
            return Err(UpkeepError::Rows {
                table: table.name(),
                read: 0,
                written: 0,
            });
        };
        // The parsed values are in the order of the partition columns.
        let partition = first.view.partition_values();
        let partition = partition
            .iter()
            .flat_map(|values| values.fields().iter().zip(values.values()))
            .map(|(field, value)| (field.name().clone(), value.clone()))
            .collect();
        let properties = layout::properties(table, layout::Kind::Settled)
            .map_err(|error| failed(error.into()))?;
        let mut writer = RecordBatchWriter::for_table(delta)
            .map_err(failed)?
            .with_writer_properties(properties)
            .with_target_file_size(layout::TARGET_FILE_BYTES);
        let schema = file_schema(&writer.arrow_schema(), table);
        let mut merged = self
            .stream(schema, budget)
            .await
            .map_err(merge_error(table))?;
        let mut stacks = (table == Table::Stacks).then(Stacks::default);
        let (mut rows_read, mut rows_out) = (0, 0);
        while let Some(batch) = merged.try_next().await.map_err(merge_error(table))? {
            pace.breathe().await?;
            rows_read += batch.num_rows() as u64;
            let batch = match &mut stacks {
                Some(stacks) => stacks
                    .new_ones(&batch)
                    .map_err(|error| merge_error(table)(error.into()))?,
                None => batch,
            };
            rows_out += batch.num_rows() as u64;
            if batch.num_rows() > 0 {
                survive(writer.write_partition(batch, &partition, WriteMode::Default))
                    .await
                    .map_err(failed)?;
            }
        }
        let mut adds = survive(writer.flush()).await.map_err(failed)?;
        adds.iter_mut().for_each(|add| add.data_change = false);
        let dropped = stacks.map_or(0, |stacks| stacks.dropped);
        if rows_read != rows_in || rows_out + dropped != rows_in {
            return Err(UpkeepError::Rows {
                table: table.name(),
                read: rows_in,
                written: rows_out + dropped,
            });
        }
        Ok(Merged {
            adds,
            rows_in,
            rows_out,
        })
    }

    async fn stream(
        self,
        schema: SchemaRef,
        budget: u64,
    ) -> Result<SendableRecordBatchStream, DataFusionError> {
        let mut streams = Vec::with_capacity(self.files.len());
        for file in self.files {
            streams.push(file_stream(file, &schema, self.batch_rows).await?);
        }
        let mut order = Vec::new();
        for name in rows::sort_columns(self.table) {
            // As `rows::merge` sorts.
            let options = SortOptions::default();
            order.push(PhysicalSortExpr::new(col(name, &schema)?, options));
        }
        let Some(order) = LexOrdering::new(order) else {
            return Err(DataFusionError::Internal(format!(
                "{} has no order",
                self.table.name()
            )));
        };
        let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(
            usize::try_from(budget).unwrap_or(usize::MAX),
        ));
        let metrics = BaselineMetrics::new(&ExecutionPlanMetricsSet::new(), 0);
        StreamingMergeBuilder::new()
            .with_streams(streams)
            .with_schema(schema)
            .with_expressions(&order)
            .with_metrics(metrics)
            .with_batch_size(self.batch_rows)
            .with_reservation(MemoryConsumer::new("merge").register(&pool))
            .build()
    }
}

fn merge_error(table: Table) -> impl FnOnce(DataFusionError) -> UpkeepError {
    move |source| UpkeepError::Merge {
        table: table.name(),
        source: Box::new(source),
    }
}

/// The table's columns but those of the partition, which no file has.
fn file_schema(columns: &SchemaRef, table: Table) -> SchemaRef {
    let partition = rows::partition_columns(table);
    let is_own = |name: &String| !partition.contains(&name.as_str());
    let fields = columns.fields().iter().filter(|field| is_own(field.name()));
    Arc::new(Schema::new(fields.cloned().collect::<Vec<_>>()))
}

async fn file_stream(
    file: Input,
    schema: &SchemaRef,
    batch_rows: usize,
) -> Result<SendableRecordBatchStream, DataFusionError> {
    // Parquet's own types say all that our columns need.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder = ParquetRecordBatchStreamBuilder::new_with_options(file.reader, options).await?;
    let batches = builder.with_batch_size(batch_rows).build()?;
    let to = Arc::clone(schema);
    let conformed = batches
        .map_err(DataFusionError::from)
        .map(move |batch| Ok(conform(&batch?, &to)?));
    Ok(Box::pin(RecordBatchStreamAdapter::new(
        Arc::clone(schema),
        conformed,
    )))
}

/// Puts a file's columns into the table's order.
fn conform(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, ArrowError> {
    let column = |field: &Arc<arrow::datatypes::Field>| -> Result<ArrayRef, ArrowError> {
        match batch.column_by_name(field.name()) {
            Some(column) if column.data_type() == field.data_type() => Ok(Arc::clone(column)),
            Some(column) => cast(column, field.data_type()),
            None => Ok(new_null_array(field.data_type(), batch.num_rows())),
        }
    };
    let columns = schema
        .fields()
        .iter()
        .map(column)
        .collect::<Result<_, _>>()?;
    RecordBatch::try_new(Arc::clone(schema), columns)
}

/// Lets each stack through once. The rows come sorted by `stack_id`.
#[derive(Default)]
struct Stacks {
    last: Option<i64>,
    dropped: u64,
}

impl Stacks {
    fn new_ones(&mut self, batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
        let ids = batch
            .column_by_name("stack_id")
            .and_then(|column| column.as_primitive_opt::<Int64Type>())
            .ok_or_else(|| ArrowError::SchemaError("stack_id is not a BIGINT".to_string()))?;
        let is_new: BooleanArray = ids
            .iter()
            .map(|id| Some(std::mem::replace(&mut self.last, id) != id))
            .collect();
        self.dropped += (is_new.len() - is_new.true_count()) as u64;
        filter_record_batch(batch, &is_new)
    }
}

/// A file of the lake's store.
#[derive(Clone)]
pub struct StoredFile {
    store: Arc<dyn ObjectStore>,
    path: Path,
    bytes: u64,
}

impl StoredFile {
    /// A file of so many bytes.
    pub fn new(store: Arc<dyn ObjectStore>, path: Path, bytes: u64) -> StoredFile {
        StoredFile { store, path, bytes }
    }
}

fn store_error(error: deltalake::ObjectStoreError) -> ParquetError {
    ParquetError::External(Box::new(error))
}

impl AsyncFileReader for StoredFile {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, ParquetError>> {
        async move {
            self.store
                .get_range(&self.path, range)
                .await
                .map_err(store_error)
        }
        .boxed()
    }

    fn get_byte_ranges(
        &mut self,
        ranges: Vec<Range<u64>>,
    ) -> BoxFuture<'_, Result<Vec<Bytes>, ParquetError>> {
        async move {
            self.store
                .get_ranges(&self.path, &ranges)
                .await
                .map_err(store_error)
        }
        .boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>, ParquetError>> {
        async move {
            let bytes = self.bytes;
            let reader = ParquetMetaDataReader::new().with_arrow_reader_options(options);
            Ok(Arc::new(reader.load_and_finish(self, bytes).await?))
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::Int64Array;
    use arrow::datatypes::{DataType, Field};

    use super::*;

    fn stacks(ids: &[i64]) -> RecordBatch {
        let schema = Schema::new(vec![Field::new("stack_id", DataType::Int64, false)]);
        let ids = Int64Array::from(ids.to_vec());
        RecordBatch::try_new(Arc::new(schema), vec![Arc::new(ids)]).unwrap()
    }

    #[test]
    fn a_stack_is_let_through_once_across_batches() {
        let mut filter = Stacks::default();
        let mut kept = Vec::new();
        for batch in [stacks(&[1, 1, 2]), stacks(&[2, 2]), stacks(&[2, 3])] {
            let rows = filter.new_ones(&batch).unwrap();
            kept.extend(
                rows.column(0)
                    .as_primitive::<Int64Type>()
                    .values()
                    .iter()
                    .copied(),
            );
        }
        assert_eq!(kept, [1, 2, 3]);
        assert_eq!(filter.dropped, 4);
    }
}
