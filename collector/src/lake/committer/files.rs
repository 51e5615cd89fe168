//! Reading a few columns of the lake's own files, without a query engine.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::RecordBatch;
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
        let reader = Reader::new(Arc::clone(&self.store), file.path.clone(), file.bytes);
        reader.rows(columns, seqs).await
    }
}

/// Reads pieces of a file out of a store.
pub(in crate::lake) struct Reader {
    store: Arc<dyn ObjectStore>,
    path: Path,
    bytes: u64,
}

impl Reader {
    /// For a file of so many bytes.
    pub(in crate::lake) fn new(store: Arc<dyn ObjectStore>, path: Path, bytes: u64) -> Reader {
        Reader { store, path, bytes }
    }

    /// Reads columns; of row groups that cannot have a `batch_seq` in the range nothing.
    pub(in crate::lake) async fn rows(
        self,
        columns: &[&str],
        seqs: Option<&std::ops::RangeInclusive<i64>>,
    ) -> Result<Pieces, DeltaTableError> {
        let mut builder = ParquetRecordBatchStreamBuilder::new(self).await?;
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
pub(in crate::lake) struct Pieces {
    stream: ParquetRecordBatchStream<Reader>,
}

impl Pieces {
    pub(in crate::lake) async fn next(&mut self) -> Result<Option<RecordBatch>, DeltaTableError> {
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
