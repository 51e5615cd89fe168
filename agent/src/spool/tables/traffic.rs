//! Rows of `traffic`.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, RecordBatch};
use arrow::error::ArrowError;
use vramscope_wire::Table;

use super::{Origin, build, column, int, long, text, time};
use crate::spool::rows::TrafficRow;

pub(super) fn traffic(rows: &[TrafficRow], origin: Origin<'_>) -> Result<RecordBatch, ArrowError> {
    let usage: Float64Array = rows.iter().map(|r| r.load.kv_usage_ratio).collect();
    let columns = vec![
        ("ts", column!(rows, time, |r| Some(r.ts_ns))),
        ("ts_ns", column!(rows, long, |r| Some(r.ts_ns))),
        ("process_id", column!(rows, long, |r| r.process_id)),
        ("pid", column!(rows, int, |r| r.pid.map(|pid| pid as i32))),
        (
            "endpoint",
            column!(rows, text, |r| Some(r.endpoint.as_str())),
        ),
        ("engine", column!(rows, text, |r| Some(r.load.engine))),
        ("model", column!(rows, text, |r| r.load.model.as_deref())),
        ("running", column!(rows, long, |r| r.load.running)),
        ("waiting", column!(rows, long, |r| r.load.waiting)),
        (
            "completed_total",
            column!(rows, long, |r| r.load.completed_total),
        ),
        (
            "prompt_tokens_total",
            column!(rows, long, |r| r.load.prompt_tokens_total),
        ),
        (
            "generation_tokens_total",
            column!(rows, long, |r| r.load.generation_tokens_total),
        ),
        ("kv_usage_ratio", Arc::new(usage) as ArrayRef),
        (
            "kv_page_tokens",
            column!(rows, long, |r| r.load.kv_page_tokens),
        ),
        (
            "kv_total_pages",
            column!(rows, long, |r| r.load.kv_total_pages),
        ),
        (
            "kv_used_pages",
            column!(rows, long, |r| r.load.kv_used_pages),
        ),
        (
            "kv_cached_pages",
            column!(rows, long, |r| r.load.kv_cached_pages),
        ),
        (
            "kv_free_pages",
            column!(rows, long, |r| r.load.kv_free_pages),
        ),
        (
            "preemptions_total",
            column!(rows, long, |r| r.load.preemptions_total),
        ),
        (
            "swapped_bytes",
            column!(rows, long, |r| r.load.swapped_bytes),
        ),
    ];
    build(Table::Traffic, rows.len(), origin, columns)
}
