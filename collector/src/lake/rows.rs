//! How rows lie in the lake: partition columns and sort order.
//!
//! Sorted files are smaller and let readers skip: one process's events of an hour lie together.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use vramscope_wire::Table;

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
