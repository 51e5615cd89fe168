//! Tables of a catalog, made from the few values that say something.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int16Array, Int32Array, Int64Array, RecordBatch,
    StringArray, new_null_array,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::catalog::TableProvider;
use datafusion::datasource::MemTable;
use datafusion::error::Result;

/// One value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// Text.
    Text(String),
    /// A whole number.
    Number(i64),
    /// Yes or no.
    Bool(bool),
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_string())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}

impl From<i32> for Cell {
    fn from(number: i32) -> Cell {
        Cell::Number(number.into())
    }
}

impl From<bool> for Cell {
    fn from(value: bool) -> Cell {
        Cell::Bool(value)
    }
}

/// A row: values by the names of their columns.
pub type Row = Vec<(&'static str, Cell)>;

/// Columns by name and type: `t` text, `i` number of 32 bits, `b` yes or no.
pub fn schema(columns: &[(&str, char)]) -> SchemaRef {
    let fields = columns.iter().map(|(name, kind)| {
        let kind = match kind {
            'i' => DataType::Int32,
            'b' => DataType::Boolean,
            _ => DataType::Utf8,
        };
        Field::new(*name, kind, true)
    });
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// The same columns, with those of these names as lists of text, which PostgreSQL has them as, at
/// the end if they are not there.
pub fn with_lists(schema: &SchemaRef, names: &[&str]) -> SchemaRef {
    let list = DataType::new_list(DataType::Utf8, true);
    let mut fields: Vec<Field> = schema
        .fields()
        .iter()
        .map(|field| match names.contains(&field.name().as_str()) {
            true => Field::new(field.name(), list.clone(), true),
            false => field.as_ref().clone(),
        })
        .collect();
    for name in names {
        if schema.field_with_name(name).is_err() {
            fields.push(Field::new(*name, list.clone(), true));
        }
    }
    Arc::new(Schema::new(fields))
}

/// A batch. A value that a row does not name is NULL where the column may be, and else 0, false or
/// empty.
pub fn batch(schema: &SchemaRef, rows: &[Row]) -> Result<RecordBatch> {
    let columns = schema.fields().iter().map(|field| column(field, rows));
    let nullable: Vec<Field> = schema
        .fields()
        .iter()
        .map(|field| field.as_ref().clone().with_nullable(true))
        .collect();
    let schema = Arc::new(Schema::new(nullable));
    Ok(RecordBatch::try_new(schema, columns.collect())?)
}

fn column(field: &Field, rows: &[Row]) -> ArrayRef {
    let known = |row: &Row| {
        let found = row.iter().find(|(name, _)| name == field.name());
        found.map(|(_, cell)| cell.clone())
    };
    let cells = rows.iter().map(known);
    let may_be_null = field.is_nullable();
    let number = |cell: Option<Cell>| match cell {
        Some(Cell::Number(number)) => Some(number),
        Some(Cell::Bool(value)) => Some(value.into()),
        _ => (!may_be_null).then_some(0),
    };
    match field.data_type() {
        DataType::Utf8 => Arc::new(StringArray::from_iter(cells.map(|cell| match cell {
            Some(Cell::Text(text)) => Some(text),
            Some(Cell::Number(number)) => Some(number.to_string()),
            Some(Cell::Bool(value)) => Some(value.to_string()),
            None => (!may_be_null).then(String::new),
        }))),
        DataType::Boolean => Arc::new(BooleanArray::from_iter(cells.map(|cell| match cell {
            Some(Cell::Bool(value)) => Some(value),
            _ => (!may_be_null).then_some(false),
        }))),
        DataType::Int16 => {
            Arc::new(Int16Array::from_iter(cells.map(|cell| {
                number(cell).and_then(|number| i16::try_from(number).ok())
            })))
        }
        DataType::Int32 => {
            Arc::new(Int32Array::from_iter(cells.map(|cell| {
                number(cell).and_then(|number| i32::try_from(number).ok())
            })))
        }
        DataType::Int64 => Arc::new(Int64Array::from_iter(cells.map(number))),
        DataType::Float64 => Arc::new(Float64Array::from_iter(
            // Counts in the catalog are far below 2^53.
            cells.map(|cell| number(cell).map(|number| number as f64)),
        )),
        other => new_null_array(other, rows.len()),
    }
}

/// A table of batches of one schema.
pub fn provider(batches: Vec<RecordBatch>) -> Result<Arc<dyn TableProvider>> {
    let schema = match batches.first() {
        Some(first) => first.schema(),
        None => Arc::new(Schema::empty()),
    };
    Ok(Arc::new(MemTable::try_new(schema, vec![batches])?))
}
