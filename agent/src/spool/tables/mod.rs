//! Typed rows into Arrow batches with the wire schemas. Columns are given by name, so that a
//! slip in their order cannot swap two of the same type.

mod allocator;
mod traffic;
mod windows;

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch,
    StringArray, StructArray, TimestampMicrosecondArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Fields};
use arrow::error::ArrowError;
use vramscope_wire::{Table, schema};

use super::rows::{AllocRow, DeviceRow, FrameRow, HostBufferRow, ProcessRow, Rows, StackRow};
use crate::host::identity::Host;

/// What every row of one file has in common.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    pub host: &'a Host,
    pub agent_id: &'a str,
    pub batch_seq: i64,
}

/// Tables that have rows, in a fixed order: stacks come before what refers to them.
pub fn tables_with_rows(rows: &Rows) -> Vec<Table> {
    let all = [
        (Table::Stacks, rows.stacks.is_empty()),
        (Table::Processes, rows.processes.is_empty()),
        (Table::AllocEvents, rows.alloc_events.is_empty()),
        (Table::HostBuffers, rows.host_buffers.is_empty()),
        (Table::Devices, rows.devices.is_empty()),
        (Table::AgentWindows, rows.agent_windows.is_empty()),
        (Table::StackWindows, rows.stack_windows.is_empty()),
        (Table::DeviceWindows, rows.device_windows.is_empty()),
        (Table::AllocatorSamples, rows.allocator_samples.is_empty()),
        (Table::Segments, rows.segments.is_empty()),
        (Table::Traffic, rows.traffic.is_empty()),
    ];
    all.into_iter()
        .filter(|(_, empty)| !empty)
        .map(|(table, _)| table)
        .collect()
}

/// Rows of one batch: what fits the processor's cache, since every column walks over all of them.
const ROWS_PER_BATCH: usize = 1024;

/// The rows of one table as batches.
pub fn batches<'a>(
    table: Table,
    rows: &'a Rows,
    origin: Origin<'a>,
) -> Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + 'a> {
    let whole = match table {
        Table::AllocEvents => {
            return Box::new(event_batches(&rows.alloc_events, origin));
        }
        Table::Stacks => stacks(&rows.stacks, origin),
        Table::Processes => processes(&rows.processes, origin),
        Table::Devices => devices(&rows.devices, origin),
        Table::HostBuffers => host_buffers(&rows.host_buffers, origin),
        Table::AgentWindows => windows::agent_windows(&rows.agent_windows, origin),
        Table::StackWindows => windows::stack_windows(&rows.stack_windows, origin),
        Table::DeviceWindows => windows::device_windows(&rows.device_windows, origin),
        Table::AllocatorSamples => allocator::samples(&rows.allocator_samples, origin),
        Table::Segments => allocator::segments(&rows.segments, origin),
        Table::Traffic => traffic::traffic(&rows.traffic, origin),
        // Tables of the collector, which have no rows here.
        other => Ok(RecordBatch::new_empty(other.schema())),
    };
    Box::new(std::iter::once(whole))
}

/// Rows of `alloc_events` as batches.
pub fn event_batches<'a>(
    rows: &'a [AllocRow],
    origin: Origin<'a>,
) -> impl Iterator<Item = Result<RecordBatch, ArrowError>> + 'a {
    rows.chunks(ROWS_PER_BATCH)
        .map(move |piece| alloc_events(piece, origin))
}

type Columns = Vec<(&'static str, ArrayRef)>;

fn build(
    table: Table,
    rows: usize,
    origin: Origin<'_>,
    mut columns: Columns,
) -> Result<RecordBatch, ArrowError> {
    columns.extend([
        ("host", same(&origin.host.name, rows)),
        ("boot_id", same(&origin.host.boot_id, rows)),
        ("agent_id", same(origin.agent_id, rows)),
        ("batch_seq", long(vec![Some(origin.batch_seq); rows])),
    ]);
    let schema = table.schema();
    let arrays = schema
        .fields()
        .iter()
        .map(
            |field| match columns.iter().find(|(name, _)| name == field.name()) {
                Some((_, array)) => Arc::clone(array),
                // What no source tells is not known.
                None => arrow::array::new_null_array(field.data_type(), rows),
            },
        )
        .collect();
    RecordBatch::try_new(schema, arrays)
}

/// The same text in every row.
fn same(value: &str, rows: usize) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(std::iter::repeat_n(
        value, rows,
    )))
}

fn text<S: AsRef<str>>(values: Vec<Option<S>>) -> ArrayRef {
    Arc::new(values.into_iter().collect::<StringArray>())
}

fn long(values: Vec<Option<i64>>) -> ArrayRef {
    Arc::new(Int64Array::from(values))
}

fn int(values: Vec<Option<i32>>) -> ArrayRef {
    Arc::new(Int32Array::from(values))
}

fn flag(values: Vec<bool>) -> ArrayRef {
    Arc::new(BooleanArray::from(values))
}

/// Nanoseconds since 1970 as TIMESTAMP in microseconds UTC.
fn time(values: Vec<Option<i64>>) -> ArrayRef {
    let micros: Vec<_> = values
        .into_iter()
        .map(|ns| ns.map(|ns| ns.div_euclid(1000)))
        .collect();
    Arc::new(TimestampMicrosecondArray::from(micros).with_timezone("UTC"))
}

/// One list per row from the rows' element counts and the elements' columns.
fn list(
    fields: Fields,
    lengths: Vec<usize>,
    columns: Vec<ArrayRef>,
) -> Result<ArrayRef, ArrowError> {
    let elements = StructArray::try_new(fields.clone(), columns, None)?;
    let field = Arc::new(Field::new("element", DataType::Struct(fields), true));
    let list = ListArray::try_new(
        field,
        OffsetBuffer::from_lengths(lengths),
        Arc::new(elements),
        None,
    )?;
    Ok(Arc::new(list))
}

/// A column from every row's value.
macro_rules! column {
    ($rows:expr, $make:ident, $value:expr) => {
        $make($rows.iter().map($value).collect())
    };
}
use column;

fn alloc_events(rows: &[AllocRow], origin: Origin<'_>) -> Result<RecordBatch, ArrowError> {
    let columns = vec![
        ("ts", column!(rows, time, |r| Some(r.ts_ns))),
        ("ts_ns", column!(rows, long, |r| Some(r.ts_ns))),
        ("ts_enter", column!(rows, time, |r| r.ts_enter_ns)),
        ("process_id", column!(rows, long, |r| Some(r.process_id))),
        ("pid", column!(rows, int, |r| Some(r.pid as i32))),
        ("tid", column!(rows, int, |r| r.tid.map(|tid| tid as i32))),
        ("gpu_uuid", column!(rows, text, |r| r.gpu_uuid.as_deref())),
        ("device", column!(rows, int, |r| r.device)),
        ("context", column!(rows, long, |r| r.context)),
        ("stream", column!(rows, long, |r| r.stream)),
        ("pool", column!(rows, long, |r| r.pool)),
        ("layer", column!(rows, text, |r| Some(r.layer))),
        ("source", column!(rows, text, |r| Some(r.source))),
        ("api", column!(rows, text, |r| Some(r.api))),
        ("op", column!(rows, text, |r| Some(r.op))),
        ("memory_kind", column!(rows, text, |r| r.memory_kind)),
        ("address", column!(rows, long, |r| r.address)),
        ("bytes", column!(rows, long, |r| r.bytes)),
        (
            "requested_bytes",
            column!(rows, long, |r| r.requested_bytes),
        ),
        ("result", column!(rows, int, |r| r.result)),
        ("duration_ns", column!(rows, long, |r| r.duration_ns)),
        ("stack_id", column!(rows, long, |r| r.stack_id)),
        ("stack_quality", column!(rows, text, |r| r.stack_quality)),
        ("counted", column!(rows, flag, |r| r.counted)),
        ("parent_seq", column!(rows, long, |r| r.parent_seq)),
        ("implicit", column!(rows, flag, |r| r.implicit)),
        ("alloc_seq", column!(rows, long, |r| r.alloc_seq)),
        ("alloc_stack_id", column!(rows, long, |r| r.alloc_stack_id)),
        ("lifetime_ns", column!(rows, long, |r| r.lifetime_ns)),
        ("seq", column!(rows, long, |r| Some(r.seq))),
        (
            "segment_address",
            column!(rows, long, |r| r.segment_address),
        ),
        (
            "allocator_allocated_bytes",
            column!(rows, long, |r| r.allocator_allocated_bytes),
        ),
        (
            "allocator_reserved_bytes",
            column!(rows, long, |r| r.allocator_reserved_bytes),
        ),
        (
            "device_free_bytes",
            column!(rows, long, |r| r.device_free_bytes),
        ),
    ];
    build(Table::AllocEvents, rows.len(), origin, columns)
}

fn stacks(rows: &[StackRow], origin: Origin<'_>) -> Result<RecordBatch, ArrowError> {
    let frames: Vec<&FrameRow> = rows.iter().flat_map(|row| &row.frames).collect();
    let frames_list = list(
        schema::frame_fields(),
        rows.iter().map(|row| row.frames.len()).collect(),
        vec![
            column!(frames, text, |f| Some(f.kind.name())),
            column!(frames, text, |f| f.module.as_deref()),
            column!(frames, text, |f| f.build_id.as_deref()),
            column!(frames, long, |f| f.offset),
            column!(frames, text, |f| f.function.as_deref()),
            column!(frames, text, |f| f.file.as_deref()),
            column!(frames, int, |f| f.line),
        ],
    )?;
    let columns = vec![
        ("stack_id", column!(rows, long, |r| Some(r.stack_id))),
        ("frames", frames_list),
        ("folded", column!(rows, text, |r| Some(r.folded.as_str()))),
    ];
    build(Table::Stacks, rows.len(), origin, columns)
}

fn processes(rows: &[ProcessRow], origin: Origin<'_>) -> Result<RecordBatch, ArrowError> {
    let coverage: Vec<_> = rows.iter().flat_map(|row| &row.coverage).collect();
    let coverage_list = list(
        schema::coverage_fields(),
        rows.iter().map(|row| row.coverage.len()).collect(),
        vec![
            column!(coverage, text, |c| Some(c.library.as_str())),
            column!(coverage, text, |c| Some(c.symbol)),
            column!(coverage, flag, |c| c.refused.is_none()),
            column!(coverage, text, |c| c.refused.as_deref()),
        ],
    )?;
    let columns = vec![
        ("ts", column!(rows, time, |r| Some(r.ts_ns))),
        ("ts_ns", column!(rows, long, |r| Some(r.ts_ns))),
        ("process_id", column!(rows, long, |r| Some(r.process_id))),
        ("pid", column!(rows, int, |r| Some(r.pid as i32))),
        ("exe", column!(rows, text, |r| r.exe.as_deref())),
        ("command", column!(rows, text, |r| r.command.as_deref())),
        ("started", column!(rows, time, |r| r.started_ns)),
        ("ended", column!(rows, time, |r| r.ended_ns)),
        (
            "container_id",
            column!(rows, text, |r| r.container.id.clone()),
        ),
        (
            "pod_uid",
            column!(rows, text, |r| r.container.pod_uid.clone()),
        ),
        ("pod", column!(rows, text, |r| r.container.pod.clone())),
        (
            "namespace",
            column!(rows, text, |r| r.container.namespace.clone()),
        ),
        ("coverage", coverage_list),
        ("framework", column!(rows, text, |r| r.framework)),
        (
            "framework_version",
            column!(rows, text, |r| r.framework_version.as_deref()),
        ),
    ];
    build(Table::Processes, rows.len(), origin, columns)
}

fn devices(rows: &[DeviceRow], origin: Origin<'_>) -> Result<RecordBatch, ArrowError> {
    let bytes = |value: Option<u64>| value.map(|bytes| bytes as i64);
    let processes: Vec<_> = rows
        .iter()
        .flat_map(|row| row.sample.processes.iter().zip(&row.process_ids))
        .collect();
    let processes_list = list(
        schema::device_process_fields(),
        rows.iter().map(|row| row.sample.processes.len()).collect(),
        vec![
            column!(processes, int, |((pid, _), _)| Some(*pid as i32)),
            column!(processes, long, |(_, process_id)| **process_id),
            column!(processes, long, |((_, used), _)| bytes(*used)),
        ],
    )?;
    let columns = vec![
        ("ts", column!(rows, time, |r| Some(r.sample.at_ns))),
        ("ts_ns", column!(rows, long, |r| Some(r.sample.at_ns))),
        (
            "gpu_uuid",
            column!(rows, text, |r| Some(r.sample.card.uuid.as_str())),
        ),
        (
            "device",
            column!(rows, int, |r| Some(r.sample.card.index as i32)),
        ),
        (
            "name",
            column!(rows, text, |r| r.sample.card.name.as_deref()),
        ),
        (
            "total_bytes",
            column!(rows, long, |r| bytes(r.sample.total)),
        ),
        ("used_bytes", column!(rows, long, |r| bytes(r.sample.used))),
        ("free_bytes", column!(rows, long, |r| bytes(r.sample.free))),
        (
            "reserved_bytes",
            column!(rows, long, |r| bytes(r.sample.reserved)),
        ),
        (
            "utilization",
            Arc::new(
                rows.iter()
                    .map(|r| r.sample.utilization)
                    .collect::<Float64Array>(),
            ) as ArrayRef,
        ),
        ("numa_node", column!(rows, int, |r| r.sample.card.numa_node)),
        (
            "pci_bus_id",
            column!(rows, text, |r| r.sample.card.pci_bus_id.as_deref()),
        ),
        ("processes", processes_list),
    ];
    build(Table::Devices, rows.len(), origin, columns)
}

fn host_buffers(rows: &[HostBufferRow], origin: Origin<'_>) -> Result<RecordBatch, ArrowError> {
    let pages: Vec<_> = rows.iter().flat_map(|row| &row.placement.pages).collect();
    let pages_list = list(
        schema::node_pages_fields(),
        rows.iter().map(|row| row.placement.pages.len()).collect(),
        vec![
            column!(pages, int, |(node, _)| **node),
            column!(pages, long, |(_, pages)| Some(**pages as i64)),
        ],
    )?;
    let columns = vec![
        ("ts", column!(rows, time, |r| Some(r.ts_ns))),
        ("ts_ns", column!(rows, long, |r| Some(r.ts_ns))),
        ("process_id", column!(rows, long, |r| Some(r.process_id))),
        ("pid", column!(rows, int, |r| Some(r.pid as i32))),
        ("seq", column!(rows, long, |r| Some(r.seq))),
        ("address", column!(rows, long, |r| Some(r.address))),
        ("bytes", column!(rows, long, |r| Some(r.bytes))),
        ("memory_kind", column!(rows, text, |r| Some(r.memory_kind))),
        (
            "page_bytes",
            column!(rows, long, |r| Some(r.placement.page_bytes as i64)),
        ),
        ("sampled", column!(rows, flag, |r| r.placement.sampled)),
        ("pages", pages_list),
        ("gpu_uuid", column!(rows, text, |r| r.gpu_uuid.as_deref())),
        ("device", column!(rows, int, |r| r.device)),
        ("gpu_node", column!(rows, int, |r| r.gpu_node)),
        (
            "misplaced_bytes",
            column!(rows, long, |r| r.misplaced_bytes),
        ),
        ("stack_id", column!(rows, long, |r| r.stack_id)),
    ];
    build(Table::HostBuffers, rows.len(), origin, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every required column is filled for every table, and files read back what went in.
    #[test]
    fn batches_fit_the_wire_schemas() {
        let rows = super::super::samples::one_of_each();
        let host = Host {
            name: "h".into(),
            boot_id: "b".into(),
        };
        assert_eq!(tables_with_rows(&rows).len(), Table::FROM_AGENTS.len());
        for table in tables_with_rows(&rows) {
            let origin = Origin {
                host: &host,
                agent_id: "a",
                batch_seq: 7,
            };
            let batch = batches(table, &rows, origin).next().unwrap().unwrap();
            assert_eq!(batch.num_rows(), 1, "{table:?}");
            let bytes =
                vramscope_wire::parquet_file::encode(table, std::slice::from_ref(&batch)).unwrap();
            let back =
                vramscope_wire::parquet_file::decode(table, bytes::Bytes::from(bytes)).unwrap();
            assert_eq!(back, [batch]);
        }
    }
}
