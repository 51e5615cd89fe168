//! Texts: views inside, plain at the door.
//!
//! Scans read texts as views (`Utf8View`): filters, joins and groups then pass 16 bytes for a text
//! and copy it only where they must, which made questions by host a third faster. What leaves is
//! plain (`Utf8`), as the wire's schemas and every client know it: the rows of an answer are cast
//! when they are handed out ([`plain_rows`]), whatever the planner made of their types.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use datafusion::error::Result;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::StreamExt;

/// The same columns, with texts as views.
pub(crate) fn viewed(schema: &Schema) -> Schema {
    let fields = schema.fields().iter().map(viewed_field);
    Schema::new_with_metadata(fields.collect::<Fields>(), schema.metadata().clone())
}

/// The same column; a text as a view.
pub(crate) fn viewed_field(field: &Arc<Field>) -> Arc<Field> {
    match field.data_type() {
        DataType::Utf8 => retyped(field, DataType::Utf8View),
        _ => Arc::clone(field),
    }
}

/// Whether two columns hold the same, one of them perhaps as views.
pub(crate) fn same(one: &DataType, other: &DataType) -> bool {
    plain_type(one).equals_datatype(&plain_type(other))
}

/// A type with views as plain texts, at any depth.
pub fn plain_type(found: &DataType) -> DataType {
    match found {
        DataType::Utf8View => DataType::Utf8,
        DataType::List(item) => DataType::List(plain_field(item)),
        DataType::LargeList(item) => DataType::LargeList(plain_field(item)),
        DataType::FixedSizeList(item, length) => {
            DataType::FixedSizeList(plain_field(item), *length)
        }
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(plain_field).collect()),
        DataType::Map(entries, sorted) => DataType::Map(plain_field(entries), *sorted),
        other => other.clone(),
    }
}

/// Columns with plain texts.
pub fn plain_schema(schema: &SchemaRef) -> SchemaRef {
    let fields = schema.fields().iter();
    if fields.clone().all(|field| is_plain(field)) {
        return Arc::clone(schema);
    }
    let fields = fields.map(plain_field).collect::<Fields>();
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

/// A column of plain texts, for who reads a table's rows himself.
pub fn plain_column(column: &ArrayRef) -> Result<ArrayRef> {
    Ok(cast(column, &plain_type(column.data_type()))?)
}

/// Rows with plain texts.
pub(crate) fn plain_rows(rows: SendableRecordBatchStream) -> SendableRecordBatchStream {
    let schema = plain_schema(&rows.schema());
    if Arc::ptr_eq(&schema, &rows.schema()) {
        return rows;
    }
    let to = Arc::clone(&schema);
    let plain = rows.map(move |batch| {
        let batch = batch?;
        let columns = batch.columns().iter().map(plain_column);
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let plain = RecordBatch::try_new_with_options(Arc::clone(&to), columns, &rows)?;
        Ok(plain)
    });
    Box::pin(RecordBatchStreamAdapter::new(schema, plain))
}

fn is_plain(field: &Field) -> bool {
    plain_type(field.data_type()) == *field.data_type()
}

fn plain_field(field: &Arc<Field>) -> Arc<Field> {
    match is_plain(field) {
        true => Arc::clone(field),
        false => retyped(field, plain_type(field.data_type())),
    }
}

fn retyped(field: &Field, wanted: DataType) -> Arc<Field> {
    Arc::new(field.clone().with_data_type(wanted))
}
