//! Rows that sum up a window: what the agent did, and what each stack and device held.

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use vramscope_wire::{Table, schema};

use super::{Columns, Origin, build, column, flag, int, list, long, text, time};
use crate::ledger::rollup::Sums;
use crate::spool::room::counts_calls;
use crate::spool::rows::{DeviceWindowRow, StackWindowRow, WindowOf, WindowRow};

pub(super) fn agent_windows(
    rows: &[WindowRow],
    origin: Origin<'_>,
) -> Result<RecordBatch, ArrowError> {
    let sum = |counts: &[(&'static str, i64)]| counts.iter().map(|(_, count)| count).sum::<i64>();
    let calls = |counts: &[(&'static str, i64)]| {
        let calls = counts.iter().filter(|(cause, _)| counts_calls(cause));
        calls.map(|(_, count)| count).sum::<i64>()
    };
    let counts = |name: &str, of: &dyn Fn(&WindowRow) -> &[(&'static str, i64)]| {
        let all: Vec<_> = rows.iter().flat_map(of).collect();
        list(
            schema::count_fields(name),
            rows.iter().map(|row| of(row).len()).collect(),
            vec![
                column!(all, text, |(name, _)| Some(*name)),
                column!(all, long, |(_, count)| Some(*count)),
            ],
        )
    };
    let columns = vec![
        ("ts", column!(rows, time, |r| Some(r.end_ns))),
        ("ts_ns", column!(rows, long, |r| Some(r.end_ns))),
        ("window_start", column!(rows, time, |r| Some(r.start_ns))),
        ("window_end", column!(rows, time, |r| Some(r.end_ns))),
        (
            "events",
            column!(rows, long, |r| Some(sum(&r.events_by_source))),
        ),
        (
            "events_by_source",
            counts("source", &|r| &r.events_by_source)?,
        ),
        (
            "lost",
            column!(rows, long, |r| Some(calls(&r.lost_by_cause))),
        ),
        ("lost_by_cause", counts("cause", &|r| &r.lost_by_cause)?),
        ("lossy", column!(rows, flag, |r| r.lossy)),
        ("clock_step_ns", column!(rows, long, |r| r.clock_step_ns)),
        ("cpu_ns", column!(rows, long, |r| r.cpu_ns)),
        ("rss_bytes", column!(rows, long, |r| r.rss_bytes)),
    ];
    build(Table::AgentWindows, rows.len(), origin, columns)
}

/// The columns that say which window of what.
fn windows_of<'a>(of: impl Iterator<Item = &'a WindowOf> + Clone) -> Columns {
    vec![
        ("ts", time(of.clone().map(|w| Some(w.start_ns)).collect())),
        (
            "ts_ns",
            long(of.clone().map(|w| Some(w.start_ns)).collect()),
        ),
        (
            "window_end",
            time(of.clone().map(|w| Some(w.end_ns)).collect()),
        ),
        (
            "process_id",
            long(of.clone().map(|w| Some(w.process_id)).collect()),
        ),
        ("pid", int(of.clone().map(|w| Some(w.pid as i32)).collect())),
        (
            "gpu_uuid",
            text(of.clone().map(|w| w.gpu_uuid.as_deref()).collect()),
        ),
        ("device", int(of.clone().map(|w| w.place.device).collect())),
        (
            "memory_kind",
            text(of.clone().map(|w| Some(w.place.kind.name())).collect()),
        ),
        (
            "layer",
            text(of.clone().map(|w| Some(w.place.layer.name())).collect()),
        ),
        ("lossy", flag(of.map(|w| w.lossy).collect())),
    ]
}

/// The columns that say what happened in it.
fn sums_of<'a>(sums: impl Iterator<Item = &'a Sums> + Clone) -> Columns {
    let figure = |of: fn(&Sums) -> u64| long(sums.clone().map(|s| Some(of(s) as i64)).collect());
    vec![
        ("alloc_bytes", figure(|s| s.alloc_bytes)),
        ("alloc_count", figure(|s| s.alloc_count)),
        ("free_bytes", figure(|s| s.free_bytes)),
        ("free_count", figure(|s| s.free_count)),
        ("live_bytes", figure(|s| s.live_bytes)),
        ("live_count", figure(|s| s.live_count)),
        ("peak_live_bytes", figure(|s| s.peak_bytes)),
    ]
}

pub(super) fn stack_windows(
    rows: &[StackWindowRow],
    origin: Origin<'_>,
) -> Result<RecordBatch, ArrowError> {
    let mut columns = windows_of(rows.iter().map(|r| &r.of));
    columns.extend(sums_of(rows.iter().map(|r| &r.sums)));
    columns.push(("stack_id", column!(rows, long, |r| r.stack_id)));
    let ages = column!(rows, long, |r| r.oldest_live_age_ns);
    columns.push(("oldest_live_age_ns", ages));
    build(Table::StackWindows, rows.len(), origin, columns)
}

pub(super) fn device_windows(
    rows: &[DeviceWindowRow],
    origin: Origin<'_>,
) -> Result<RecordBatch, ArrowError> {
    let mut columns = windows_of(rows.iter().map(|r| &r.of));
    columns.extend(sums_of(rows.iter().map(|r| &r.device.sums)));
    let figure = |value: u64| Some(value as i64);
    columns.extend([
        (
            "failed_allocations",
            column!(rows, long, |r| figure(r.device.failed_allocations)),
        ),
        (
            "failed_frees",
            column!(rows, long, |r| figure(r.device.failed_frees)),
        ),
        (
            "process_peak_bytes",
            column!(rows, long, |r| figure(r.device.process_peak_bytes)),
        ),
        (
            "pool_reserved_bytes",
            column!(rows, long, |r| r.pool_reserved_bytes),
        ),
    ]);
    build(Table::DeviceWindows, rows.len(), origin, columns)
}
