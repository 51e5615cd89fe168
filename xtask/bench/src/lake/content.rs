//! Rows for the tables, each of which can be told from every other.
//!
//! Every table has one column of checks ([`check_column`]): a number that belongs to one row of
//! one batch of one agent and to no other. Their count, sum and XOR are the digest of a batch,
//! which SQL can compute from what a lake holds. The other columns hold what agents send.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch,
    StringArray, StructArray, TimestampMicrosecondArray, new_null_array,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use vramscope_wire::Table;

/// The tables that are sent, most often the first.
pub const TABLES: [Table; 5] = [
    Table::AllocEvents,
    Table::DeviceWindows,
    Table::StackWindows,
    Table::Stacks,
    Table::AgentWindows,
];

/// Rows of a batch at most: their number is part of each check.
pub const MAX_ROWS: usize = 1 << 12;

/// Which batch, and of when.
#[derive(Debug, Clone)]
pub struct Name {
    /// The agent's id.
    pub agent_id: String,
    /// Its host.
    pub host: String,
    /// Its number among the agents, below 1024; part of each check.
    pub agent: u64,
    /// The batch's number, below 2^20; part of each check.
    pub seq: u64,
    /// Time of the first row, microseconds since 1970.
    pub ts: i64,
    /// Mixed into each check: 0 for what an agent means, another for what must never be kept.
    pub forgery: u64,
}

/// What of a batch's rows can be compared with SQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Digest {
    /// Number of rows.
    pub rows: u64,
    /// Sum of the checks.
    pub sum: i64,
    /// XOR of the checks.
    pub xor: i64,
}

/// The column that tells a row from every other.
pub fn check_column(table: Table) -> Result<&'static str> {
    Ok(match table {
        Table::AllocEvents => "address",
        Table::DeviceWindows | Table::StackWindows => "alloc_bytes",
        Table::Stacks => "stack_id",
        Table::AgentWindows => "events",
        other => bail!("no batches of {} are made", other.name()),
    })
}

/// One row's check: 46 bits, another for every row. Agent, batch and row side by side make 42 bits;
/// a product with an odd number modulo 2^46 keeps them apart. 4096 of them add up to 58 bits.
fn check(name: &Name, row: usize) -> i64 {
    const BITS: u64 = (1 << 46) - 1;
    let plain = (name.forgery << 42) | (name.agent << 32) | (name.seq << 12) | row as u64;
    (plain.wrapping_mul(0x9E37_79B9_7F4A_7C15) & BITS) as i64
}

/// The digest that a batch must have.
pub fn digest(name: &Name, rows: usize) -> Digest {
    let checks = (0..rows).map(|row| check(name, row));
    checks.fold(Digest::default(), |digest, check| Digest {
        rows: digest.rows + 1,
        sum: digest.sum + check,
        xor: digest.xor ^ check,
    })
}

/// Rows of a table.
pub fn rows(table: Table, name: &Name, rows: usize) -> Result<RecordBatch> {
    let checked = check_column(table)?;
    let schema = table.schema();
    let columns = schema
        .fields()
        .iter()
        .map(|field| {
            if field.name() == checked {
                let checks = (0..rows).map(|row| check(name, row));
                return Ok(Arc::new(Int64Array::from_iter_values(checks)) as ArrayRef);
            }
            column(field, name, rows)
        })
        .collect::<Result<Vec<_>>>()?;
    RecordBatch::try_new(schema, columns)
        .with_context(|| format!("rows of {} do not fit its schema", table.name()))
}

/// Microseconds between two rows.
const STEP_US: i64 = 200;

fn column(field: &Field, name: &Name, rows: usize) -> Result<ArrayRef> {
    let count = 0..rows as i64;
    let ints = |value: &dyn Fn(i64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(count.clone().map(value)))
    };
    let small = |value: &dyn Fn(i64) -> i32| -> ArrayRef {
        Arc::new(Int32Array::from_iter_values(count.clone().map(value)))
    };
    let times = |value: &dyn Fn(i64) -> i64| -> ArrayRef {
        let values = TimestampMicrosecondArray::from_iter_values(count.clone().map(value));
        Arc::new(values.with_timezone("UTC"))
    };
    let texts = |value: &dyn Fn(i64) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(count.clone().map(value)))
    };
    // Eight processes a host, a thousand stacks each.
    let process = |row: i64| row % 8;
    let stack = |row: i64| 0x1357_9BDF + (row * 7919) % 1000;
    Ok(match field.name().as_str() {
        "agent_id" => texts(&|_| name.agent_id.clone()),
        "batch_seq" => ints(&|_| name.seq as i64),
        "host" => texts(&|_| name.host.clone()),
        "boot_id" => texts(&|_| "6b1f5f0e-9d3a-4a55-8d6f-0a7c1e2b3d4f".to_string()),
        "ts" | "window_start" => times(&|row| name.ts + row * STEP_US),
        "ts_enter" => times(&|row| name.ts + row * STEP_US - 20),
        "window_end" => times(&|row| name.ts + row * STEP_US + 60_000_000),
        "ts_ns" => ints(&|row| (name.ts + row * STEP_US) * 1000),
        "process_id" => ints(&|row| 0x0123_4567_89AB + process(row)),
        "pid" => small(&|row| 4000 + process(row) as i32),
        "tid" => small(&|row| 4000 + (row % 32) as i32),
        "gpu_uuid" => texts(&|row| format!("GPU-00000000-0000-0000-0000-{:012}", row % 8)),
        "device" => small(&|row| (row % 8) as i32),
        "seq" => ints(&|row| (name.seq as i64 & 0xF_FFFF) * MAX_ROWS as i64 + row),
        "bytes" | "requested_bytes" => ints(&|row| 512 << (row % 16)),
        "duration_ns" => ints(&|row| 1800 + (row * 7_919) % 5000),
        "stack_id" => ints(&stack),
        "layer" => texts(&|_| "driver".to_string()),
        "source" => texts(&|_| "uprobe".to_string()),
        "api" => texts(&|row| ["cuMemAlloc_v2", "cuMemFree_v2"][row as usize % 2].to_string()),
        "op" => texts(&|row| ["alloc", "free"][row as usize % 2].to_string()),
        "memory_kind" => texts(&|_| "device".to_string()),
        "stack_quality" => texts(&|_| "full".to_string()),
        "result" => small(&|_| 0),
        "folded" => texts(&|row| format!("main;serve;step_{row}")),
        _ if field.is_nullable() => new_null_array(field.data_type(), rows),
        _ => plain(field.data_type(), rows)?,
    })
}

/// A column that must not be NULL and that nobody looks at.
fn plain(data_type: &DataType, rows: usize) -> Result<ArrayRef> {
    Ok(match data_type {
        DataType::Int64 => Arc::new(Int64Array::from(vec![1; rows])),
        DataType::Int32 => Arc::new(Int32Array::from(vec![1; rows])),
        DataType::Float64 => Arc::new(Float64Array::from(vec![0.5; rows])),
        DataType::Boolean => Arc::new(BooleanArray::from(vec![false; rows])),
        DataType::Utf8 => Arc::new(StringArray::from(vec!["-"; rows])),
        DataType::Timestamp(_, _) => {
            Arc::new(TimestampMicrosecondArray::from(vec![0; rows]).with_timezone("UTC"))
        }
        DataType::List(element) => {
            let DataType::Struct(fields) = element.data_type() else {
                bail!("a list of {} is not known", element.data_type());
            };
            Arc::new(ListArray::new(
                Arc::clone(element),
                OffsetBuffer::from_lengths(vec![0; rows]),
                Arc::new(StructArray::new_null(fields.clone(), 0)),
                None,
            ))
        }
        other => bail!("a column of type {other} is not known"),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use arrow::array::AsArray;
    use arrow::datatypes::Int64Type;

    use super::*;

    pub(super) fn name(agent: u64, seq: u64) -> Name {
        Name {
            agent_id: format!("agent-{agent}"),
            host: "host".to_string(),
            agent,
            seq,
            ts: 1_795_957_500_000_000,
            forgery: 0,
        }
    }

    #[test]
    fn no_two_rows_have_the_same_check() {
        let mut seen = HashSet::new();
        for agent in [0, 1, 1023] {
            for seq in [1, 2, 77, (1 << 20) - 1] {
                for forgery in [0, 1] {
                    let name = Name {
                        forgery,
                        ..name(agent, seq)
                    };
                    for row in [0, 1, 2, MAX_ROWS - 1] {
                        assert!(seen.insert(check(&name, row)), "{name:?} {row}");
                    }
                }
            }
        }
    }

    /// The digest is of what the rows hold, for every table.
    #[test]
    fn the_digest_is_that_of_the_column() {
        for table in TABLES {
            let name = name(3, 9);
            let made = rows(table, &name, 100).unwrap();
            let column = made.column_by_name(check_column(table).unwrap()).unwrap();
            let values = column.as_primitive::<Int64Type>().values();
            let expected = digest(&name, 100);
            assert_eq!(expected.rows, 100);
            assert_eq!(expected.sum, values.iter().sum::<i64>());
            assert_eq!(
                expected.xor,
                values.iter().fold(0, |xor, value| xor ^ value)
            );
        }
    }
}
