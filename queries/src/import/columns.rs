//! Rows as Arrow batches with the wire schemas. Columns are given by name; those that an import
//! knows nothing about are NULL.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Int32Array, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray, TimestampMicrosecondArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Fields};
use arrow::error::ArrowError;
use vramscope_wire::{Table, schema};

/// What all rows of one import have in common.
pub(super) struct Origin {
    /// The file's name stands for the host.
    pub host: String,
    /// Hash of the content: the process that wrote it.
    pub process_id: i64,
    pub agent_id: String,
    /// When the file was written, nanoseconds since 1970.
    pub modified_ns: i64,
}

impl Origin {
    pub fn new(file: &Path, content: i64, modified_ns: i64) -> Self {
        let name = file.file_name().unwrap_or(file.as_os_str());
        Self {
            host: name.to_string_lossy().into_owned(),
            process_id: content,
            agent_id: format!("import-{content:016x}"),
            modified_ns,
        }
    }
}

pub(super) fn longs(values: impl IntoIterator<Item = Option<i64>>) -> ArrayRef {
    Arc::new(values.into_iter().collect::<Int64Array>())
}

pub(super) fn ints(values: impl IntoIterator<Item = Option<i32>>) -> ArrayRef {
    Arc::new(values.into_iter().collect::<Int32Array>())
}

pub(super) fn flags(values: impl IntoIterator<Item = bool>) -> ArrayRef {
    Arc::new(BooleanArray::from_iter(values.into_iter().map(Some)))
}

pub(super) fn texts<T: AsRef<str>>(values: impl IntoIterator<Item = Option<T>>) -> ArrayRef {
    Arc::new(values.into_iter().collect::<StringArray>())
}

/// Nanoseconds as TIMESTAMP.
pub(super) fn times(values: impl IntoIterator<Item = Option<i64>>) -> ArrayRef {
    let values = values
        .into_iter()
        .map(|ns| ns.map(|ns| ns.div_euclid(1000)));
    Arc::new(
        values
            .collect::<TimestampMicrosecondArray>()
            .with_timezone("UTC"),
    )
}

/// Lists of structs: so many elements in each row.
pub(super) fn list(
    fields: Fields,
    counts: Vec<usize>,
    columns: Vec<ArrayRef>,
) -> Result<ArrayRef, ArrowError> {
    let elements = StructArray::try_new(fields.clone(), columns, None)?;
    let element = Arc::new(Field::new("element", DataType::Struct(fields), true));
    let offsets = OffsetBuffer::from_lengths(counts);
    Ok(Arc::new(ListArray::try_new(
        element,
        offsets,
        Arc::new(elements),
        None,
    )?))
}

/// A batch of one table.
pub(super) fn build(
    table: Table,
    rows: usize,
    origin: &Origin,
    mut columns: Vec<(&'static str, ArrayRef)>,
) -> Result<RecordBatch, ArrowError> {
    let same = |text: &str| texts(std::iter::repeat_n(Some(text), rows));
    columns.extend([
        ("host", same(&origin.host)),
        ("boot_id", same("")),
        ("agent_id", same(&origin.agent_id)),
        ("batch_seq", longs(std::iter::repeat_n(Some(1), rows))),
    ]);
    let schema = table.schema();
    let arrays = schema
        .fields()
        .iter()
        .map(|field| {
            let found = columns.iter().find(|(name, _)| name == field.name());
            match found {
                Some((_, array)) => Arc::clone(array),
                None => arrow::array::new_null_array(field.data_type(), rows),
            }
        })
        .collect();
    RecordBatch::try_new(schema, arrays)
}

/// The row of `processes`: the file stands for the process that wrote it.
pub(super) fn process(origin: &Origin, file: &Path) -> Result<RecordBatch, ArrowError> {
    let path = std::path::absolute(file).unwrap_or_else(|_| file.to_path_buf());
    let coverage = schema::coverage_fields();
    let empty = coverage
        .iter()
        .map(|field| arrow::array::new_empty_array(field.data_type()))
        .collect();
    let modified = || [Some(origin.modified_ns)];
    build(
        Table::Processes,
        1,
        origin,
        vec![
            ("ts", times(modified())),
            ("ts_ns", longs(modified())),
            ("process_id", longs([Some(origin.process_id)])),
            ("pid", ints([Some(0)])),
            ("command", texts([Some(path.to_string_lossy())])),
            ("coverage", list(coverage, vec![0], empty)?),
            ("framework", texts([Some("pytorch")])),
        ],
    )
}
