//! A small data set with everything the views have to get right, written as JSON against the
//! wire's schemas, independent of the agent.
//!
//! Times are seconds after 2026-11-29 10:00:00 UTC. Five hosts and a file: alpha and beta in
//! [`two_hosts`], gamma with every kind of memory in [`kinds`], delta with a framework's allocator,
//! and an imported snapshot, in [`framework`], epsilon with a leak in [`leaks`].

mod framework;
mod kinds;
pub mod leaks;
mod two_hosts;

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Date32Array, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, TimestampMicrosecondType};
use arrow::json::ReaderBuilder;
use deltalake::DeltaTable;
use serde_json::{Map, Value, json};
use url::Url;
use vramscope_wire::{Table, parquet_file};

pub use two_hosts::{agent_windows, alloc_events, processes, stacks};

/// 2026-11-29 10:00:00 UTC in seconds since 1970: 20,786 days and 10 hours.
pub const START: i64 = 20_786 * 86_400 + 10 * 3_600;

pub fn at(seconds: i64) -> String {
    format!(
        "2026-11-29T{:02}:{:02}:{:02}Z",
        10 + seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

pub fn nanoseconds(seconds: i64) -> i64 {
    (START + seconds) * 1_000_000_000
}

/// One row of `alloc_events`, as a call that succeeded on no card. `over` overrides.
pub fn event(host: &str, process: i64, seq: i64, seconds: i64, over: Value) -> Value {
    let pid = match process {
        101 | 201 => 1001,
        _ => 1002,
    };
    let row = json!({
        "ts": at(seconds), "ts_ns": nanoseconds(seconds), "host": host, "boot_id": "boot",
        "process_id": process, "pid": pid, "tid": pid, "layer": "driver", "source": "uprobe",
        "result": 0, "counted": true, "implicit": false, "seq": seq,
        "agent_id": format!("agent-{host}"), "batch_seq": 1,
    });
    merge(row, over)
}

pub fn merge(row: Value, over: Value) -> Value {
    let (Value::Object(mut row), Value::Object(over)) = (row, over) else {
        panic!("rows are objects")
    };
    row.extend(over);
    Value::Object(row)
}

pub fn alloc(
    host: &str,
    process: i64,
    seq: i64,
    seconds: i64,
    bytes: i64,
    stack: i64,
    over: Value,
) -> Value {
    let base = json!({
        "op": "alloc", "api": "cuMemAlloc_v2", "memory_kind": "device", "bytes": bytes,
        "requested_bytes": bytes, "address": 0x7000_0000 + seq * 0x1000, "stack_id": stack,
        "stack_quality": "frame_pointer",
    });
    event(host, process, seq, seconds, merge(base, over))
}

pub fn free(
    host: &str,
    process: i64,
    seq: i64,
    seconds: i64,
    of: i64,
    bytes: i64,
    over: Value,
) -> Value {
    let base = json!({
        "op": "free", "api": "cuMemFree_v2", "memory_kind": "device", "bytes": bytes,
        "address": 0x7000_0000 + of * 0x1000, "alloc_seq": of,
    });
    event(host, process, seq, seconds, merge(base, over))
}

/// The rows of a table as one batch of the wire's schema.
pub fn batch(table: Table, rows: &[Value]) -> RecordBatch {
    let mut decoder = ReaderBuilder::new(table.schema())
        .with_strict_mode(true)
        .build_decoder()
        .unwrap();
    let rows: Vec<&Map<String, Value>> = rows.iter().map(|row| row.as_object().unwrap()).collect();
    decoder.serialize(&rows).unwrap();
    decoder
        .flush()
        .unwrap()
        .unwrap_or_else(|| RecordBatch::new_empty(table.schema()))
}

fn rows(table: Table) -> Vec<Value> {
    let (two_hosts, gamma) = match table {
        Table::AllocEvents => (two_hosts::alloc_events(), kinds::alloc_events()),
        Table::Stacks => (two_hosts::stacks(), kinds::stacks()),
        Table::Processes => (two_hosts::processes(), kinds::processes()),
        Table::Devices => (two_hosts::devices(), kinds::devices()),
        Table::HostBuffers => (two_hosts::host_buffers(), Vec::new()),
        Table::AgentWindows => (two_hosts::agent_windows(), kinds::agent_windows()),
        Table::StackWindows => (Vec::new(), kinds::stack_windows()),
        Table::DeviceWindows => (Vec::new(), kinds::device_windows()),
        // The seeds below have the framework's; tables of the collector are not in a trace.
        _ => (Vec::new(), Vec::new()),
    };
    [two_hosts, gamma, framework::rows(table), leaks::rows(table)].concat()
}

/// Writes one trace file.
pub fn write_file(dir: &Path, table: Table, name: &str, rows: &[Value]) {
    let dir = dir.join(table.name());
    std::fs::create_dir_all(&dir).unwrap();
    let bytes = parquet_file::encode(table, &[batch(table, rows)]).unwrap();
    std::fs::write(dir.join(name), bytes).unwrap();
}

/// Writes the data set as a trace, the events cut into two files.
pub fn write_trace(dir: &Path) {
    for table in Table::ALL {
        let rows = rows(table);
        let middle = rows.len() / 2;
        write_file(dir, table, "1.parquet", &rows[..middle]);
        write_file(dir, table, "2.parquet", &rows[middle..]);
    }
}

/// Appends rows to a Delta table laid out as a collector's: partitioned by date and hour.
pub async fn append_to_lake(dir: &Path, table: Table, rows: &[Value]) {
    append_batch_to_lake(dir, table, batch(table, rows)).await;
}

/// The same with any columns, as an older collector's table may have.
pub async fn append_batch_to_lake(dir: &Path, table: Table, rows: RecordBatch) {
    let dir = dir.join(table.name());
    std::fs::create_dir_all(&dir).unwrap();
    let delta = DeltaTable::try_from_url(Url::from_directory_path(&dir).unwrap())
        .await
        .unwrap();
    let write = if table.partitioned_by_time() {
        delta
            .write([with_partitions(rows)])
            .with_partition_columns(["date", "hour"])
    } else {
        delta.write([rows])
    };
    write.await.unwrap();
}

fn with_partitions(rows: RecordBatch) -> RecordBatch {
    let micros = rows
        .column_by_name("ts")
        .unwrap()
        .as_primitive::<TimestampMicrosecondType>();
    let seconds = || micros.values().iter().map(|us| us / 1_000_000);
    let date = Date32Array::from_iter_values(seconds().map(|s| (s / 86_400) as i32));
    let hour = Int32Array::from_iter_values(seconds().map(|s| (s % 86_400 / 3_600) as i32));
    assert_eq!(micros.null_count(), 0);
    let mut fields = rows.schema().fields().to_vec();
    fields.push(Arc::new(Field::new("date", DataType::Date32, false)));
    fields.push(Arc::new(Field::new("hour", DataType::Int32, false)));
    let mut columns: Vec<ArrayRef> = rows.columns().to_vec();
    columns.push(Arc::new(date));
    columns.push(Arc::new(hour));
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

/// Writes the data set as a lake, in two commits per table.
pub async fn write_lake(dir: &Path) {
    for table in Table::ALL {
        let rows = rows(table);
        let middle = rows.len() / 2;
        append_to_lake(dir, table, &rows[..middle]).await;
        append_to_lake(dir, table, &rows[middle..]).await;
    }
}
