//! Rows on their way into the lake: partition columns and sort order.
//!
//! Sorted files are smaller and let readers skip: one process's events of an hour lie together.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Date32Array, Int32Array, RecordBatch};
use arrow::compute::{SortColumn, concat_batches, lexsort_to_indices, take_record_batch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimestampMicrosecondType};
use arrow::error::ArrowError;
use vramscope_wire::Table;

const HOUR_US: i64 = 3_600_000_000;
const DAY_HOURS: i64 = 24;

/// Columns that partition a table; both come from `ts`, in UTC, or where that is not believed from
/// the arrival of the batch ([`placing`](crate::ingest::placing)).
pub fn partition_columns(table: Table) -> &'static [&'static str] {
    if table.partitioned_by_time() {
        &["date", "hour"]
    } else {
        &[]
    }
}

/// The table's schema in the lake: the wire's, and the partition columns at the end.
pub fn lake_schema(table: Table) -> SchemaRef {
    let wire = table.schema();
    if !table.partitioned_by_time() {
        return wire;
    }
    let mut fields: Vec<_> = wire.fields().iter().cloned().collect();
    fields.push(Arc::new(Field::new("date", DataType::Date32, false)));
    fields.push(Arc::new(Field::new("hour", DataType::Int32, false)));
    Arc::new(Schema::new(fields))
}

/// The columns that a table's files are sorted by.
pub fn sort_columns(table: Table) -> &'static [&'static str] {
    match table {
        Table::AllocEvents => &["host", "process_id", "seq"],
        Table::Stacks => &["stack_id"],
        Table::Processes
        | Table::HostBuffers
        | Table::StackWindows
        | Table::DeviceWindows
        | Table::AllocatorSamples
        | Table::Segments => &["host", "process_id", "ts_ns"],
        Table::Traffic => &["host", "engine", "ts_ns"],
        Table::Devices => &["host", "gpu_uuid", "ts_ns"],
        Table::AgentWindows => &["host", "ts_ns"],
        Table::QueryLog => &["ts"],
        Table::Batches => &["agent_id", "batch_seq"],
    }
}

/// Merges batches of one table into one, sorted, with the partition columns.
pub fn merge(table: Table, batches: &[RecordBatch]) -> Result<RecordBatch, ArrowError> {
    let merged = concat_batches(&table.schema(), batches)?;
    let sorted = sort(table, &merged)?;
    with_partitions(table, sorted)
}

fn sort(table: Table, rows: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let columns = sort_columns(table)
        .iter()
        .map(|name| {
            Ok(SortColumn {
                values: Arc::clone(column(rows, name)?),
                options: None,
            })
        })
        .collect::<Result<Vec<_>, ArrowError>>()?;
    let order = lexsort_to_indices(&columns, None)?;
    take_record_batch(rows, &order)
}

fn with_partitions(table: Table, rows: RecordBatch) -> Result<RecordBatch, ArrowError> {
    if !table.partitioned_by_time() {
        return Ok(rows);
    }
    let ts = column(&rows, "ts")?
        .as_primitive_opt::<TimestampMicrosecondType>()
        .ok_or_else(|| {
            ArrowError::SchemaError("ts is not a timestamp in microseconds".to_string())
        })?;
    // `ingest` lets in the years 1970 to 9999 only, so the day fits and no rounding goes down.
    let hours = ts.values().iter().map(|ts| ts.div_euclid(HOUR_US));
    let (dates, hours): (Vec<i32>, Vec<i32>) = hours
        .map(|hour| {
            (
                (hour.div_euclid(DAY_HOURS)) as i32,
                hour.rem_euclid(DAY_HOURS) as i32,
            )
        })
        .unzip();
    let mut columns: Vec<ArrayRef> = rows.columns().to_vec();
    columns.push(Arc::new(Date32Array::from(dates)));
    columns.push(Arc::new(Int32Array::from(hours)));
    RecordBatch::try_new(lake_schema(table), columns)
}

fn column<'a>(rows: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, ArrowError> {
    rows.column_by_name(name)
        .ok_or_else(|| ArrowError::SchemaError(format!("column {name:?} is missing")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sort_columns_are_columns() {
        for table in Table::ALL {
            for name in sort_columns(table) {
                assert!(
                    table.schema().field_with_name(name).is_ok(),
                    "{}.{name}",
                    table.name()
                );
            }
        }
    }
}
