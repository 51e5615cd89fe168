//! One Parquet file of one table: how it is written, and how it is checked before anyone
//! believes it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::{KeyValue, ParquetMetaDataReader};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder};
use parquet::file::reader::ChunkReader;
use parquet::schema::types::ColumnPath;

use crate::schema::{SCHEMA_VERSION, Table};

const TABLE_KEY: &str = "vramscope.table";
const VERSION_KEY: &str = "vramscope.schema_version";
const NOTE_KEY: &str = "vramscope.note";

/// Why a file cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not Parquet, truncated, or damaged.
    #[error("not a readable Parquet file: {0}")]
    Parquet(#[from] ParquetError),
    /// Rows could not be decoded.
    #[error("damaged rows: {0}")]
    Arrow(#[from] arrow::error::ArrowError),
    /// Damaged in a way that the Parquet reader does not expect.
    #[error("damaged beyond what the reader can tell: {0}")]
    Panic(String),
    /// Columns differ from the table's.
    #[error("columns do not fit table {table}: {detail}")]
    Schema {
        /// Table that was meant.
        table: &'static str,
        /// First difference found.
        detail: String,
    },
}

/// Writes rows of one table as one Parquet file in memory.
pub fn encode(table: Table, batches: &[RecordBatch]) -> Result<Vec<u8>, ParquetError> {
    encode_pieces(table, batches.iter().cloned().map(Ok))
}

/// The same from batches that are made one after the other.
pub fn encode_pieces(
    table: Table,
    batches: impl IntoIterator<Item = Result<RecordBatch, ArrowError>>,
) -> Result<Vec<u8>, ParquetError> {
    encode_with_note(table, batches, None)
}

/// The same with a text of the writer's own in the footer, which [`note`] reads.
pub fn encode_with_note(
    table: Table,
    batches: impl IntoIterator<Item = Result<RecordBatch, ArrowError>>,
    note: Option<String>,
) -> Result<Vec<u8>, ParquetError> {
    let mut batches = batches.into_iter();
    let first = batches.next().transpose()?;
    let properties = properties(table, note, compression(first.as_ref())?);
    let mut writer = ArrowWriter::try_new(Vec::new(), table.schema(), Some(properties))?;
    for batch in first.into_iter().map(Ok).chain(batches) {
        writer.write(&batch?)?;
    }
    writer.into_inner()
}

/// Rows of fewer bytes in memory than this are not compressed. For every column of a file a reader
/// makes a compressor's contexts of 100 KiB and more: of batches of 60 rows that was half of what it
/// cost to read them, to save a fifth of their bytes.
const WORTH_COMPRESSING: usize = 64 << 10;

/// Pieces are about equal: the first one tells.
fn compression(first: Option<&RecordBatch>) -> Result<Compression, ParquetError> {
    let mut bytes = 0;
    for column in first.into_iter().flat_map(RecordBatch::columns) {
        // Of the rows alone: builders set more aside.
        bytes += column.to_data().get_slice_memory_size()?;
    }
    match bytes {
        ..WORTH_COMPRESSING => Ok(Compression::UNCOMPRESSED),
        _ => zstd(),
    }
}

/// Level 1: level 3 takes twice the time for a few per cent of the bytes on our events.
fn zstd() -> Result<Compression, ParquetError> {
    Ok(Compression::ZSTD(ZstdLevel::try_new(1)?))
}

/// Writes rows of one table to a file piece by piece, for who has more of them than memory.
pub fn writer<W: std::io::Write + Send>(
    table: Table,
    to: W,
) -> Result<ArrowWriter<W>, ParquetError> {
    ArrowWriter::try_new(to, table.schema(), Some(properties(table, None, zstd()?)))
}

/// Columns that grow from row to row by little. As differences they take half the bytes of a
/// dictionary (on events of a serving workload 8 bytes a row instead of 19, all columns
/// together), and a fraction of the time.
const GROWING: [&str; 8] = [
    "ts",
    "ts_ns",
    "ts_enter",
    "seq",
    "alloc_seq",
    "parent_seq",
    "window_start",
    "window_end",
];

/// Columns in which hardly a value comes twice: a dictionary of them is made for nothing.
const DISTINCT: [&str; 2] = ["duration_ns", "lifetime_ns"];

/// Columns of a few texts: nobody looks for a file by them, and comparing every text with the
/// smallest and largest so far costs more than writing it.
const FEW_TEXTS: [&str; 10] = [
    "host",
    "boot_id",
    "agent_id",
    "gpu_uuid",
    "layer",
    "source",
    "api",
    "op",
    "memory_kind",
    "stack_quality",
];

/// The text that the writer of a file put into its footer, if any.
pub fn note<R: ChunkReader>(file: &R) -> Result<Option<String>, ReadError> {
    let footer = survive(|| Ok(ParquetMetaDataReader::new().parse_and_finish(file)?))?;
    let notes = footer.file_metadata().key_value_metadata();
    let found = notes.and_then(|notes| notes.iter().find(|entry| entry.key == NOTE_KEY));
    Ok(found.and_then(|entry| entry.value.clone()))
}

fn properties(table: Table, note: Option<String>, compression: Compression) -> WriterProperties {
    let mut about = vec![
        KeyValue::new(TABLE_KEY.to_string(), table.name().to_string()),
        KeyValue::new(VERSION_KEY.to_string(), SCHEMA_VERSION.to_string()),
    ];
    about.extend(note.map(|note| KeyValue::new(NOTE_KEY.to_string(), note)));
    let mut properties = encodings(WriterProperties::builder())
        .set_compression(compression)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_key_value_metadata(Some(about));
    for column in FEW_TEXTS {
        let path = ColumnPath::from(column);
        properties = properties.set_column_statistics_enabled(path, EnabledStatistics::None);
    }
    properties.build()
}

/// How the columns are encoded, whoever writes them: agents in their spool, a collector in its lake.
pub fn encodings(mut properties: WriterPropertiesBuilder) -> WriterPropertiesBuilder {
    for column in GROWING {
        let path = ColumnPath::from(column);
        properties = properties
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
    }
    for column in DISTINCT {
        properties = properties.set_column_dictionary_enabled(ColumnPath::from(column), false);
    }
    properties
}

/// Reads and checks a whole file: every row group is decoded, so that what is accepted here
/// can be read later. Columns the table gained since the file was written come back as NULL.
pub fn decode<R: ChunkReader + 'static>(
    table: Table,
    file: R,
) -> Result<Vec<RecordBatch>, ReadError> {
    rows(table, file)?.collect()
}

/// The same, a piece (at most 1024 rows) at a time: for a reader that must stop before a
/// small file has grown into a large memory.
pub fn rows<R: ChunkReader + 'static>(
    table: Table,
    file: R,
) -> Result<impl Iterator<Item = Result<RecordBatch, ReadError>>, ReadError> {
    Opened::new(file)?.rows(table)
}

/// A file whose footer was read, and nothing else.
pub struct Opened<R: ChunkReader>(ParquetRecordBatchReaderBuilder<R>);

impl<R: ChunkReader + 'static> Opened<R> {
    /// Reads a file's footer.
    pub fn new(file: R) -> Result<Opened<R>, ReadError> {
        // Parquet's own types say all that our columns need. The Arrow schema that writers put
        // beside them is one more thing to be hostile: the reader panics on types that do not exist.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let open = || ParquetRecordBatchReaderBuilder::try_new_with_options(file, options);
        survive(|| Ok(Opened(open()?)))
    }

    /// Rows and bytes that the file has, as its footer says; what is negative there is the most there
    /// can be.
    pub fn announced(&self) -> (u64, u64) {
        let unsigned = |number: i64| u64::try_from(number).unwrap_or(u64::MAX);
        let metadata = self.0.metadata();
        let groups = metadata.row_groups().iter();
        let bytes = groups.map(|group| unsigned(group.total_byte_size()));
        (
            unsigned(metadata.file_metadata().num_rows()),
            bytes.fold(0, u64::saturating_add),
        )
    }

    /// Its rows as those of a table, a piece at a time.
    pub fn rows(
        self,
        table: Table,
    ) -> Result<impl Iterator<Item = Result<RecordBatch, ReadError>>, ReadError> {
        // The reader sets memory aside for all rows of a piece in every column.
        let (rows, _) = self.announced();
        let piece = usize::try_from(rows).unwrap_or(usize::MAX).clamp(1, 1024);
        let mut reader = survive(|| {
            check_schema(table, self.0.schema())?;
            Ok(self.0.with_batch_size(piece).build()?)
        })?;
        let mut is_over = false;
        Ok(std::iter::from_fn(move || {
            if is_over {
                return None;
            }
            let next = survive(|| match reader.next() {
                Some(batch) => conform(table, &batch?).map(Some),
                None => Ok(None),
            });
            // After a panic the reader's state is not to be trusted.
            is_over = matches!(next, Err(ReadError::Panic(_)));
            next.transpose()
        }))
    }
}

/// A file that makes the Parquet reader panic is a damaged file, and no reason to fall over.
///
/// # Errors
/// What `read` gives, and [`ReadError::Panic`] if it panicked.
pub fn survive<T>(read: impl FnOnce() -> Result<T, ReadError>) -> Result<T, ReadError> {
    // What the closure leaves half done is dropped by the caller.
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no reason given");
        Err(ReadError::Panic(text.to_string()))
    })
}

fn check_schema(table: Table, found: &SchemaRef) -> Result<(), ReadError> {
    let wrong = |detail: String| ReadError::Schema {
        table: table.name(),
        detail,
    };
    let wanted = table.schema();
    for field in found.fields() {
        let Some((_, known)) = wanted.fields().find(field.name()) else {
            return Err(wrong(format!("unknown column {:?}", field.name())));
        };
        if known.data_type() != field.data_type() {
            return Err(wrong(format!(
                "column {:?} is {}, expected {}",
                field.name(),
                field.data_type(),
                known.data_type()
            )));
        }
    }
    for field in wanted.fields() {
        if !field.is_nullable() && found.fields().find(field.name()).is_none() {
            return Err(wrong(format!("column {:?} is missing", field.name())));
        }
    }
    Ok(())
}

/// Puts the columns into the table's order and adds missing nullable ones.
fn conform(table: Table, batch: &RecordBatch) -> Result<RecordBatch, ReadError> {
    let (schema, found) = (table.schema(), batch.schema());
    let mut columns = Vec::with_capacity(schema.fields().len());
    for (index, field) in schema.fields().iter().enumerate() {
        // Most files have the table's columns in its order.
        let in_place = found.fields().get(index).map(|found| found.name()) == Some(field.name());
        let column = match in_place {
            true => Some(batch.column(index)),
            false => batch.column_by_name(field.name()),
        };
        columns.push(match column {
            Some(column) => Arc::clone(column),
            None => arrow::array::new_null_array(field.data_type(), batch.num_rows()),
        });
    }
    Ok(RecordBatch::try_new(schema, columns)?)
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, StringArray};
    use arrow::compute::cast;
    use arrow::datatypes::DataType;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    use super::*;

    /// Rows with something in each column of a simple type.
    fn rows(table: Table, count: usize) -> RecordBatch {
        let numbers: ArrayRef = Arc::new(StringArray::from_iter_values(
            (0..count).map(|row| row.to_string()),
        ));
        let numbers = cast(&numbers, &DataType::Int64).unwrap();
        let schema = table.schema();
        let columns = schema
            .fields()
            .iter()
            .map(|field| match field.data_type().is_nested() {
                true => arrow::array::new_null_array(field.data_type(), count),
                false => cast(&numbers, field.data_type()).unwrap(),
            });
        RecordBatch::try_new(Arc::clone(&schema), columns.collect()).unwrap()
    }

    #[test]
    fn few_rows_are_not_compressed_and_many_are() {
        for (count, is_compressed) in [(0, false), (60, false), (5_000, true)] {
            let rows = rows(Table::AllocEvents, count);
            let half = count / 2;
            let pieces = [rows.slice(0, half), rows.slice(half, count - half)];
            let file = bytes::Bytes::from(encode(Table::AllocEvents, &pieces).unwrap());
            let reader = SerializedFileReader::new(file.clone()).unwrap();
            for group in reader.metadata().row_groups() {
                for column in group.columns() {
                    let plain = column.compression() == Compression::UNCOMPRESSED;
                    assert_eq!(plain, !is_compressed, "{count} rows");
                }
            }
            let back = decode(Table::AllocEvents, file).unwrap();
            let back = arrow::compute::concat_batches(&rows.schema(), &back);
            assert_eq!(back.unwrap(), rows);
        }
    }
}
