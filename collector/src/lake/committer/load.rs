//! From the log's bytes to rows in the order of their files.
//!
//! Memory: the decoded rows of the batches (the caller bounds them), their sort keys (some 40
//! bytes a row), and one chunk of sorted rows at a time.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Date32Array, Int32Array, Int64Array, RecordBatch};
use arrow::compute::interleave_record_batch;
use arrow::datatypes::{DataType, TimestampMicrosecondType};
use arrow::error::ArrowError;
use arrow::row::{RowConverter, SortField};
use bytes::Bytes;
use vramscope_wire::{Table, parquet_file};

use crate::ingest::placing::Placing;
use crate::ingest::wal::{Entry, NewBatch, Wal};
use crate::lake::rows;

/// Rows that are put in order at a time.
const CHUNK_ROWS: usize = 32_768;

const DAY_HOURS: i64 = 24;

/// What stops a commit that may work the next time.
#[derive(Debug)]
pub(super) enum LoadError {
    Arrow(ArrowError),
    Io { path: PathBuf, source: io::Error },
}

impl From<ArrowError> for LoadError {
    fn from(error: ArrowError) -> Self {
        LoadError::Arrow(error)
    }
}

/// A batch whose rows are to be committed.
pub(super) trait Source {
    /// What it is.
    fn batch(&self) -> &NewBatch;
}

impl Source for Entry {
    fn batch(&self) -> &NewBatch {
        &self.batch
    }
}

pub(super) struct Loaded<S> {
    /// Rows of the sound batches.
    pub rows: Sorted,
    pub sound: Vec<S>,
    /// With the reason.
    pub damaged: Vec<(S, String)>,
}

/// Decodes batches of one table. Of `read`, the outer error is one that may pass; the inner one is
/// damage.
pub(super) fn load<S: Source>(
    table: Table,
    sources: Vec<S>,
    read: impl Fn(&S) -> Result<Result<Bytes, String>, LoadError>,
) -> Result<Loaded<S>, LoadError> {
    let mut unsorted = Unsorted::new(table)?;
    let mut sound = Vec::with_capacity(sources.len());
    let mut damaged = Vec::new();
    for source in sources {
        // The rows were decoded once before the batch was acknowledged, so their memory is known.
        let decoded = read(&source)?.and_then(|bytes| {
            parquet_file::decode(table, bytes).map_err(|error| error.to_string())
        });
        match decoded {
            Ok(pieces) => {
                for piece in pieces {
                    unsorted.push(piece, &source.batch().placing)?;
                }
                sound.push(source);
            }
            Err(reason) => damaged.push((source, reason)),
        }
    }
    Ok(Loaded {
        rows: unsorted.sort(),
        sound,
        damaged,
    })
}

/// Reads a batch from the log and compares its CRC-32.
pub(super) fn from_log(wal: &Wal, entry: &Entry) -> Result<Result<Bytes, String>, LoadError> {
    let bytes = match wal.read(entry) {
        Ok(bytes) => bytes,
        // EIO: the disk gave the bytes up. Eof, NotFound: somebody cut or removed the file.
        Err(error)
            if error.raw_os_error() == Some(5)
                || matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof
                ) =>
        {
            return Ok(Err(error.to_string()));
        }
        Err(source) => {
            return Err(LoadError::Io {
                path: wal.path(entry),
                source,
            });
        }
    };
    let found = crc32fast::hash(&bytes);
    if found != entry.batch.crc32 {
        return Ok(Err(format!(
            "CRC-32 is {found:08x}, expected {:08x}",
            entry.batch.crc32
        )));
    }
    Ok(Ok(bytes))
}

/// Rows as they came, with what they are to be sorted by.
pub(super) struct Unsorted {
    table: Table,
    pieces: Vec<RecordBatch>,
    /// Of each row the hour of its partition, counted from 1970; empty for a table without time.
    hours: Vec<Int64Array>,
    converter: RowConverter,
    keys: arrow::row::Rows,
}

impl Unsorted {
    pub(super) fn new(table: Table) -> Result<Unsorted, ArrowError> {
        let schema = table.schema();
        let mut fields = Vec::new();
        if table.partitioned_by_time() {
            fields.push(SortField::new(DataType::Int64));
        }
        for name in rows::sort_columns(table) {
            fields.push(SortField::new(
                schema.field_with_name(name)?.data_type().clone(),
            ));
        }
        let converter = RowConverter::new(fields)?;
        let keys = converter.empty_rows(0, 0);
        Ok(Unsorted {
            table,
            pieces: Vec::new(),
            hours: Vec::new(),
            converter,
            keys,
        })
    }

    /// Takes rows of the table's wire schema.
    pub(super) fn push(&mut self, piece: RecordBatch, placing: &Placing) -> Result<(), ArrowError> {
        let mut keys: Vec<ArrayRef> = Vec::new();
        if self.table.partitioned_by_time() {
            let ts = column(&piece, "ts")?
                .as_primitive_opt::<TimestampMicrosecondType>()
                .ok_or_else(|| {
                    ArrowError::SchemaError("ts is not a timestamp in microseconds".to_string())
                })?;
            let hours = ts.values().iter().map(|ts| placing.hour(*ts));
            let hours = Int64Array::from_iter_values(hours);
            keys.push(Arc::new(hours.clone()));
            self.hours.push(hours);
        }
        for name in rows::sort_columns(self.table) {
            keys.push(Arc::clone(column(&piece, name)?));
        }
        self.converter.append(&mut self.keys, &keys)?;
        self.pieces.push(piece);
        Ok(())
    }

    /// Puts all rows in order of partition and sort columns.
    pub(super) fn sort(self) -> Sorted {
        let mut places = Vec::with_capacity(self.keys.num_rows());
        for (piece, rows) in self.pieces.iter().enumerate() {
            places.extend((0..rows.num_rows()).map(|row| (piece, row)));
        }
        let mut order: Vec<usize> = (0..places.len()).collect();
        // Stable: what agents sent is in order by and large, which this sort makes use of.
        order.sort_by(|a, b| self.keys.row(*a).cmp(&self.keys.row(*b)));
        Sorted {
            table: self.table,
            order: order.into_iter().map(|row| places[row]).collect(),
            pieces: self.pieces,
            hours: self.hours,
        }
    }
}

/// Rows, and the order they are to be read in.
pub(super) struct Sorted {
    table: Table,
    pieces: Vec<RecordBatch>,
    hours: Vec<Int64Array>,
    /// Piece and row.
    order: Vec<(usize, usize)>,
}

impl Sorted {
    /// How many.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// The rows in order, of the lake's schema, a chunk at a time.
    pub(super) fn chunks(self) -> impl Iterator<Item = Result<RecordBatch, ArrowError>> {
        let chunks = self.order.len().div_ceil(CHUNK_ROWS);
        (0..chunks).map(move |chunk| {
            let start = chunk * CHUNK_ROWS;
            let end = (start + CHUNK_ROWS).min(self.order.len());
            self.chunk(&self.order[start..end])
        })
    }

    fn chunk(&self, places: &[(usize, usize)]) -> Result<RecordBatch, ArrowError> {
        let pieces: Vec<&RecordBatch> = self.pieces.iter().collect();
        let rows = interleave_record_batch(&pieces, places)?;
        if !self.table.partitioned_by_time() {
            return Ok(rows);
        }
        let hours = || {
            places
                .iter()
                .map(|(piece, row)| self.hours[*piece].value(*row))
        };
        // Times are of the years 1970 to 9999, or of this moment: the day fits.
        let dates = hours().map(|hour| hour.div_euclid(DAY_HOURS) as i32);
        let dates = Date32Array::from_iter_values(dates);
        let hours = hours().map(|hour| hour.rem_euclid(DAY_HOURS) as i32);
        let hours = Int32Array::from_iter_values(hours);
        let mut columns: Vec<ArrayRef> = rows.columns().to_vec();
        columns.push(Arc::new(dates));
        columns.push(Arc::new(hours));
        RecordBatch::try_new(rows::lake_schema(self.table), columns)
    }
}

fn column<'a>(rows: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, ArrowError> {
    rows.column_by_name(name)
        .ok_or_else(|| ArrowError::SchemaError(format!("column {name:?} is missing")))
}
