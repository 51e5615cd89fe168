//! What a framework's allocator holds.

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use vramscope_wire::{Table, schema};

use super::super::rows::{AllocatorSampleRow, BlockRow, SampleOf, SegmentRow};
use super::{Columns, Origin, build, column, flag, int, list, long, text, time};

/// The columns that say of whom and when.
fn sample_of<'a>(of: impl Iterator<Item = &'a SampleOf>) -> Columns {
    let of: Vec<&SampleOf> = of.collect();
    vec![
        ("ts", column!(of, time, |s| Some(s.ts_ns))),
        ("ts_ns", column!(of, long, |s| Some(s.ts_ns))),
        ("process_id", column!(of, long, |s| Some(s.process_id))),
        ("pid", column!(of, int, |s| Some(s.pid as i32))),
        ("gpu_uuid", column!(of, text, |s| s.gpu_uuid.as_deref())),
        ("device", column!(of, int, |s| s.device)),
        ("framework", column!(of, text, |s| Some(s.framework))),
        ("source", column!(of, text, |s| Some(s.source))),
        ("reason", column!(of, text, |s| Some(s.reason))),
        ("snapshot_id", column!(of, long, |s| Some(s.snapshot_id))),
    ]
}

pub(super) fn samples(
    rows: &[AllocatorSampleRow],
    origin: Origin<'_>,
) -> Result<RecordBatch, ArrowError> {
    let mut columns = sample_of(rows.iter().map(|r| &r.of));
    columns.extend([
        (
            "allocated_bytes",
            column!(rows, long, |r| r.allocated_bytes),
        ),
        ("reserved_bytes", column!(rows, long, |r| r.reserved_bytes)),
        ("active_bytes", column!(rows, long, |r| r.active_bytes)),
        (
            "requested_bytes",
            column!(rows, long, |r| r.requested_bytes),
        ),
        (
            "peak_allocated_bytes",
            column!(rows, long, |r| r.peak_allocated_bytes),
        ),
        (
            "peak_reserved_bytes",
            column!(rows, long, |r| r.peak_reserved_bytes),
        ),
        ("retries", column!(rows, long, |r| r.retries)),
        ("ooms", column!(rows, long, |r| r.ooms)),
        (
            "largest_free_block_bytes",
            column!(rows, long, |r| r.largest_free_block_bytes),
        ),
        (
            "releasable_bytes",
            column!(rows, long, |r| r.releasable_bytes),
        ),
        ("stranded_bytes", column!(rows, long, |r| r.stranded_bytes)),
        ("segment_count", column!(rows, long, |r| r.segment_count)),
        ("block_count", column!(rows, long, |r| r.block_count)),
        (
            "device_free_bytes",
            column!(rows, long, |r| r.device_free_bytes),
        ),
        ("tried_bytes", column!(rows, long, |r| r.tried_bytes)),
        ("lossy", column!(rows, flag, |r| r.lossy)),
        ("settings", column!(rows, text, |r| r.settings.as_deref())),
    ]);
    build(Table::AllocatorSamples, rows.len(), origin, columns)
}

pub(super) fn segments(rows: &[SegmentRow], origin: Origin<'_>) -> Result<RecordBatch, ArrowError> {
    let blocks: Vec<&BlockRow> = rows.iter().flat_map(|row| &row.blocks).collect();
    let blocks_list = list(
        schema::block_fields(),
        rows.iter().map(|row| row.blocks.len()).collect(),
        vec![
            column!(blocks, long, |b| Some(b.address)),
            column!(blocks, long, |b| Some(b.bytes)),
            column!(blocks, long, |b| b.requested_bytes),
            column!(blocks, text, |b| Some(b.state)),
            column!(blocks, long, |b| b.stack_id),
            column!(blocks, long, |b| b.allocated_ts_ns),
            column!(blocks, long, |b| b.alloc_seq),
        ],
    )?;
    let mut columns = sample_of(rows.iter().map(|r| &r.of));
    columns.extend([
        ("memory_kind", column!(rows, text, |r| Some(r.memory_kind))),
        ("pool", column!(rows, text, |r| r.pool.as_deref())),
        ("segment_type", column!(rows, text, |r| r.segment_type)),
        ("stream", column!(rows, long, |r| r.stream)),
        ("expandable", column!(rows, flag, |r| r.expandable)),
        ("address", column!(rows, long, |r| Some(r.address))),
        ("bytes", column!(rows, long, |r| Some(r.bytes))),
        (
            "allocated_bytes",
            column!(rows, long, |r| Some(r.allocated_bytes)),
        ),
        ("active_bytes", column!(rows, long, |r| r.active_bytes)),
        (
            "requested_bytes",
            column!(rows, long, |r| r.requested_bytes),
        ),
        (
            "largest_free_block_bytes",
            column!(rows, long, |r| Some(r.largest_free_block_bytes)),
        ),
        (
            "releasable_bytes",
            column!(rows, long, |r| Some(r.releasable_bytes)),
        ),
        (
            "stranded_bytes",
            column!(rows, long, |r| Some(r.stranded_bytes)),
        ),
        ("stack_id", column!(rows, long, |r| r.stack_id)),
        (
            "allocated_ts_ns",
            column!(rows, long, |r| r.allocated_ts_ns),
        ),
        ("blocks", blocks_list),
    ]);
    build(Table::Segments, rows.len(), origin, columns)
}
