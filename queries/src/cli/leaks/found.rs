//! Leaks as rows of `leak_by_stack`, as a table and as JSON.

use serde_json::{Value, json};

use super::Tier;
use crate::rows::Row;
use crate::text::{percent, size};
use crate::why::tail;

/// A row of leak_by_stack.
#[derive(Debug, Clone, Default)]
pub struct Leak {
    rank: i64,
    tier: String,
    detector: String,
    host: String,
    process_id: i64,
    pid: Option<i64>,
    exe: Option<String>,
    namespace: Option<String>,
    pod: Option<String>,
    version: Option<String>,
    gpu_uuid: Option<String>,
    device: Option<i64>,
    memory_kind: Option<String>,
    byte_class: Option<String>,
    layer: Option<String>,
    stack_id: Option<i64>,
    folded: Option<String>,
    function: Option<String>,
    module: Option<String>,
    per_request: Estimate,
    per_hour: Estimate,
    minimum_detectable: Option<f64>,
    live_bytes: Option<i64>,
    live_count: Option<i64>,
    growth_bytes: Option<i64>,
    growth_share: Option<f64>,
    oldest_live_age_seconds: Option<f64>,
    survivor_bytes: Option<i64>,
    monotonic_share: Option<f64>,
    first_seen: Option<String>,
    confirmed_at: Option<String>,
    since: Option<String>,
    projected_oom_at: Option<String>,
    pub reason: Option<String>,
    settled_by: Option<String>,
    statistics: Option<String>,
    overlaps: Option<String>,
    same_function_rows: Option<i64>,
    requests: Option<f64>,
    recorded_until: Option<String>,
    lossy: Option<bool>,
}

/// A rate with its bounds.
#[derive(Debug, Clone, Copy, Default)]
struct Estimate {
    value: Option<f64>,
    low: Option<f64>,
    high: Option<f64>,
}

impl Estimate {
    fn from_row(row: Row<'_>, name: &str) -> anyhow::Result<Estimate> {
        Ok(Estimate {
            value: row.ratio(name)?,
            low: row.ratio(&format!("{name}_low"))?,
            high: row.ratio(&format!("{name}_high"))?,
        })
    }

    /// `10.2 KiB (9.10 KiB..11.5 KiB)`
    fn text(&self) -> String {
        let Some(value) = self.value else {
            return "?".to_string();
        };
        match (self.low, self.high) {
            (Some(low), Some(high)) => {
                format!("{} ({}..{})", signed(value), signed(low), signed(high))
            }
            (Some(low), None) => format!("{} (at least {})", signed(value), signed(low)),
            _ => signed(value),
        }
    }
}

/// Bytes that may be below 0, as lower bounds are.
pub fn signed(bytes: f64) -> String {
    let whole = size(bytes.abs().round() as u64);
    if bytes <= -0.5 {
        format!("-{whole}")
    } else {
        whole
    }
}

impl Leak {
    pub fn from_row(row: Row<'_>) -> anyhow::Result<Leak> {
        let text = |name| -> anyhow::Result<String> { Ok(row.text(name)?.unwrap_or_default()) };
        Ok(Leak {
            rank: row.number("rank")?.unwrap_or_default(),
            tier: text("tier")?,
            detector: text("detector")?,
            host: text("host")?,
            process_id: row.number("process_id")?.unwrap_or_default(),
            pid: row.number("pid")?,
            exe: row.text("exe")?,
            namespace: row.text("namespace")?,
            pod: row.text("pod")?,
            version: row.text("version")?,
            gpu_uuid: row.text("gpu_uuid")?,
            device: row.number("device")?,
            memory_kind: row.text("memory_kind")?,
            byte_class: row.text("byte_class")?,
            layer: row.text("layer")?,
            stack_id: row.number("stack_id")?,
            folded: row.text("folded")?,
            function: row.text("function")?,
            module: row.text("module")?,
            per_request: Estimate::from_row(row, "bytes_per_request")?,
            per_hour: Estimate::from_row(row, "bytes_per_hour")?,
            minimum_detectable: row.ratio("minimum_detectable_bytes_per_request")?,
            live_bytes: row.number("live_bytes")?,
            live_count: row.number("live_count")?,
            growth_bytes: row.number("growth_bytes")?,
            growth_share: row.ratio("growth_share")?,
            oldest_live_age_seconds: row.ratio("oldest_live_age_seconds")?,
            survivor_bytes: row.number("survivor_bytes")?,
            monotonic_share: row.ratio("monotonic_share")?,
            first_seen: row.text("first_seen")?,
            confirmed_at: row.text("confirmed_at")?,
            since: row.text("since")?,
            projected_oom_at: row.text("projected_oom_at")?,
            reason: row.text("ambiguous_reason")?,
            settled_by: row.text("settled_by")?,
            statistics: row.text("statistics")?,
            overlaps: row.text("overlaps")?,
            same_function_rows: row.number("same_function_rows")?,
            requests: row.ratio("requests")?,
            recorded_until: row.text("recorded_until")?,
            lossy: row.flag("lossy")?,
        })
    }

    /// How sure it is; `None` where too little is recorded to tell.
    pub fn tier(&self) -> Option<Tier> {
        match self.tier.as_str() {
            "confirmed" => Some(Tier::Confirmed),
            "suspect" => Some(Tier::Suspect),
            "ambiguous" => Some(Tier::Ambiguous),
            _ => None,
        }
    }

    pub fn is(&self, tier: Tier) -> bool {
        self.tier() == Some(tier)
    }

    /// Process, as a heading has it.
    pub fn whose(&self) -> String {
        let mut text = match self.pid {
            Some(pid) => format!("pid {pid} on {}", self.host),
            None => format!("process {} on {}", self.process_id, self.host),
        };
        match (&self.namespace, &self.pod) {
            (Some(namespace), Some(pod)) => text.push_str(&format!(", pod {namespace}/{pod}")),
            (None, Some(pod)) => text.push_str(&format!(", pod {pod}")),
            _ => {}
        }
        text
    }

    fn place(&self) -> String {
        let mut text = match (&self.function, &self.module) {
            (Some(function), Some(module)) => {
                let module = module.rsplit('/').next().unwrap_or(module);
                format!("{function} ({module})")
            }
            (Some(function), None) => function.clone(),
            (None, Some(module)) => module.clone(),
            (None, None) if self.detector == "kv_pool" => "pages of the KV pool".to_string(),
            (None, None) => "no stack was taken".to_string(),
        };
        text.push_str(&format!(": {}", self.whose()));
        if let Some(device) = self.device {
            text.push_str(&format!(", device {device}"));
        }
        if let Some(kind) = &self.memory_kind {
            text.push_str(&format!(", {kind} memory"));
        }
        text
    }

    /// Lines below the row: what it is, and what has to be known about it.
    fn details(&self) -> Vec<String> {
        let mut lines = vec![self.place()];
        if let Some(folded) = &self.folded {
            lines.push(tail(folded));
        }
        let mut times = Vec::new();
        if let Some(since) = &self.since {
            times.push(format!("grows since {since}"));
        }
        if let Some(confirmed) = &self.confirmed_at {
            times.push(format!("confirmed {confirmed}"));
        }
        if let Some(full) = &self.projected_oom_at {
            times.push(format!("at this rate the card is full at {full}"));
        }
        if !times.is_empty() {
            lines.push(times.join(", "));
        }
        if let Some(reason) = &self.reason {
            let settled = match &self.settled_by {
                Some(by) => format!("; settled by {by}"),
                None => String::new(),
            };
            lines.push(format!("{reason}{settled}"));
        }
        if self.per_hour.value.is_none()
            && let Some(statistics) = &self.statistics
        {
            lines.push(statistics.clone());
        }
        lines.extend(self.overlaps.clone());
        if let Some(more @ 1..) = self.same_function_rows {
            let rows = if more == 1 { "row has" } else { "rows have" };
            lines.push(format!(
                "{more} more {rows} the same function: may be one place, its stack whole in some calls and cut short in others"
            ));
        }
        if self.lossy == Some(true) {
            lines.push("events were lost in its windows: the numbers may be wrong".to_string());
        }
        lines
    }

    /// Every column of the view.
    pub fn json(&self) -> Value {
        let whose = json!({
            "rank": self.rank, "tier": self.tier, "detector": self.detector, "host": self.host,
            "process_id": self.process_id, "pid": self.pid, "exe": self.exe,
            "namespace": self.namespace, "pod": self.pod, "version": self.version,
            "gpu_uuid": self.gpu_uuid, "device": self.device, "memory_kind": self.memory_kind,
            "byte_class": self.byte_class, "layer": self.layer, "stack_id": self.stack_id,
            "folded": self.folded, "function": self.function, "module": self.module,
        });
        let figures = json!({
            "bytes_per_request": self.per_request.value,
            "bytes_per_request_low": self.per_request.low,
            "bytes_per_request_high": self.per_request.high,
            "bytes_per_hour": self.per_hour.value, "bytes_per_hour_low": self.per_hour.low,
            "bytes_per_hour_high": self.per_hour.high,
            "minimum_detectable_bytes_per_request": self.minimum_detectable,
            "live_bytes": self.live_bytes, "live_count": self.live_count,
            "growth_bytes": self.growth_bytes, "growth_share": self.growth_share,
            "oldest_live_age_seconds": self.oldest_live_age_seconds,
            "survivor_bytes": self.survivor_bytes, "monotonic_share": self.monotonic_share,
            "requests": self.requests,
        });
        let verdict = json!({
            "first_seen": self.first_seen, "confirmed_at": self.confirmed_at, "since": self.since,
            "projected_oom_at": self.projected_oom_at, "ambiguous_reason": self.reason,
            "settled_by": self.settled_by, "statistics": self.statistics, "overlaps": self.overlaps,
            "same_function_rows": self.same_function_rows,
            "recorded_until": self.recorded_until, "lossy": self.lossy,
        });
        let mut all = serde_json::Map::new();
        for part in [whose, figures, verdict] {
            if let Value::Object(part) = part {
                all.extend(part);
            }
        }
        Value::Object(all)
    }
}

/// Processes of which too little is recorded.
pub fn insufficient(leaks: &[Leak]) -> impl Iterator<Item = &Leak> {
    leaks.iter().filter(|leak| leak.tier().is_none())
}

/// A line a leak, each with more below it.
pub fn table(leaks: &[&Leak]) -> String {
    let head = [
        "rank",
        "tier",
        "per request",
        "per hour",
        "live",
        "share",
        "first seen",
        "found by",
    ];
    let mut rows = vec![head.map(str::to_string)];
    for leak in leaks {
        let live = leak
            .live_bytes
            .map_or("?".to_string(), |bytes| signed(bytes as f64));
        rows.push([
            leak.rank.to_string(),
            leak.tier.clone(),
            leak.per_request.text(),
            leak.per_hour.text(),
            live,
            leak.growth_share.map_or("?".to_string(), percent),
            leak.first_seen.clone().unwrap_or_else(|| "?".to_string()),
            leak.detector.clone(),
        ]);
    }
    let mut widths = [0; 8];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
        if index > 0 {
            for detail in leaks[index - 1].details() {
                text.push_str(&format!("      {detail}\n"));
            }
        }
    }
    text
}
