//! The ten questions: of one process and one hour, of the last hour, of the day, of the whole fleet;
//! over raw events, over roll-ups, and through the views.
//!
//! Columns are named, and orders are total, so that two engines give the same rows.

use anyhow::{Context, Result};
use serde_json::Value;

/// What the questions ask about; the generator of the lake knows.
pub struct Values {
    host: String,
    process_id: i64,
    hour_start_ns: i64,
    hour_end_ns: i64,
    /// The same hour, as SQL spells it.
    hour: [String; 2],
}

impl Values {
    /// As the generator told.
    pub fn read(written: &Value) -> Result<Values> {
        let number = |name: &str| {
            let found = written[name].as_i64();
            found.with_context(|| format!("the lake's generator did not tell {name}"))
        };
        let date = written["date"]
            .as_str()
            .context("the lake's generator told no date")?;
        Ok(Values {
            host: written["host"]
                .as_str()
                .context("the lake's generator told no host")?
                .to_string(),
            process_id: number("process_id")?,
            hour_start_ns: number("hour_start_ns")?,
            hour_end_ns: number("hour_end_ns")?,
            hour: [number("hour")?, number("hour")? + 1]
                .map(|hour| format!("{date} {hour:02}:00:00")),
        })
    }
}

/// One of them.
pub struct Question {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub sql: String,
    /// Names of its figures: ratio, the product's time, DuckDB's.
    pub figures: [&'static str; 3],
}

macro_rules! question {
    ($name:literal, $($sql:tt)+) => {
        Question {
            name: $name,
            sql: format!($($sql)+),
            figures: [
                concat!("ratio_", $name),
                concat!("ms_", $name),
                concat!("duckdb_ms_", $name),
            ],
        }
    };
}

/// All ten. The first is the one whose bytes are counted.
pub fn all(values: &Values) -> Vec<Question> {
    let Values {
        host,
        process_id,
        hour_start_ns: from,
        hour_end_ns: to,
        hour: [start, end],
    } = values;
    vec![
        question!(
            "process_hour",
            "SELECT ts_ns, op, address, bytes, stack_id, lifetime_ns, seq FROM alloc_events
             WHERE host = '{host}' AND process_id = {process_id} AND ts_ns >= {from} AND ts_ns < {to}
             ORDER BY bytes DESC, seq LIMIT 100"
        ),
        question!(
            "hour_by_stack",
            "SELECT stack_id, count(*) AS calls, CAST(sum(bytes) AS BIGINT) AS bytes,
                count(DISTINCT process_id) AS processes
             FROM alloc_events
             WHERE ts_ns >= {from} AND ts_ns < {to} AND op = 'alloc' AND counted
             GROUP BY stack_id ORDER BY bytes DESC, stack_id LIMIT 20"
        ),
        question!(
            "day_by_host",
            "SELECT host, memory_kind, op, count(*) AS calls, CAST(sum(bytes) AS BIGINT) AS bytes,
                max(duration_ns) AS slowest_ns
             FROM alloc_events GROUP BY host, memory_kind, op ORDER BY host, memory_kind, op"
        ),
        question!(
            "top_stacks",
            "SELECT stack_id, folded, live_bytes, live_count, allocations, processes FROM top_stacks
             ORDER BY live_bytes DESC, stack_id LIMIT 20"
        ),
        question!(
            "live_allocations",
            "SELECT stack_id, folded, count(*) AS blocks, CAST(sum(bytes) AS BIGINT) AS bytes,
                max(age_seconds) AS oldest
             FROM live_allocations WHERE process_id = {process_id}
             GROUP BY stack_id, folded ORDER BY bytes DESC, stack_id LIMIT 20"
        ),
        question!(
            "process_totals",
            "SELECT host, process_id, exe, memory_kind, allocations, frees, live_bytes, peak_bytes
             FROM process_totals WHERE host = '{host}' ORDER BY process_id, memory_kind"
        ),
        question!(
            "reconciliation",
            "SELECT host, gpu_uuid, process_id, exe, traced_bytes, nvml_bytes, difference_bytes, ratio
             FROM reconciliation ORDER BY host, gpu_uuid, process_id"
        ),
        question!(
            "stack_history_hour",
            "SELECT stack_id, folded, CAST(sum(net_bytes) AS BIGINT) AS net,
                max(live_bytes) AS live, max(oldest_live_age_seconds) AS oldest
             FROM stack_history
             WHERE window_start >= TIMESTAMP '{start}' AND window_start < TIMESTAMP '{end}'
             GROUP BY stack_id, folded ORDER BY net DESC, stack_id LIMIT 20"
        ),
        question!(
            "stack_growth_day",
            "SELECT process_id, stack_id, count(*) AS windows,
                CAST(sum(alloc_bytes - free_bytes) AS BIGINT) AS net, max(live_bytes) AS most,
                regr_slope(live_bytes, (ts_ns - {from}) / 3.6e12) AS bytes_per_hour
             FROM stack_windows WHERE stack_id IS NOT NULL
             GROUP BY process_id, stack_id ORDER BY net DESC, process_id, stack_id LIMIT 20"
        ),
        question!(
            "answer_quality",
            "SELECT host, agent_id, count(*) AS windows, CAST(sum(lost) AS BIGINT) AS lost,
                max(causes) AS causes
             FROM answer_quality GROUP BY host, agent_id ORDER BY host, agent_id"
        ),
    ]
}
