//! The four layers of a device: the card, what of it is in use, what of that this process holds, and
//! what its allocator does with it, down to what the program asked for.
//!
//! Invariant: a layer that is not known says so, with the reason; it is never drawn as 0.

use std::fmt::Write;

use serde_json::{Value, json};
use vramscope_queries::session::Limits;

use super::of;
use crate::door::Door;
use crate::target::Moment;
use crate::text::{percent, size};

/// What is known of each layer. Bytes.
#[derive(Default)]
pub struct Waterfall {
    pub layers: Vec<Layer>,
    pub device_free: Option<u64>,
    pub card_total: Option<u64>,
    pub reserved: Option<u64>,
    pub stranded: Option<u64>,
    pub releasable: Option<u64>,
    pub max_contiguous: Option<u64>,
    pub external_ratio: Option<f64>,
    pub stranded_ratio: Option<f64>,
    pub unusable_p99: Option<f64>,
    pub settings: Option<String>,
    pub lossy: Option<bool>,
}

/// One layer; each lies within the one before.
pub struct Layer {
    /// Name in JSON.
    pub key: &'static str,
    pub name: &'static str,
    pub bytes: Option<u64>,
    /// What the bytes are that the next layer does not have; of an unknown layer why it is unknown.
    pub note: String,
}

pub async fn ask(door: &mut Door, limits: Limits, moment: &Moment) -> anyhow::Result<Waterfall> {
    let mut fall = Waterfall::default();
    let sql = format!(
        "SELECT sum(reserved_bytes) AS reserved, sum(allocated_bytes) AS allocated,
            CASE WHEN count(active_bytes) = count(*) THEN sum(active_bytes) END AS active,
            CASE WHEN count(requested_bytes) = count(*) THEN sum(requested_bytes) END AS requested,
            sum(stranded_bytes) AS stranded, sum(releasable_bytes) AS releasable,
            max(device_free_bytes) AS device_free, max(max_contiguous_bytes) AS max_contiguous,
            1 - CAST(max(max_contiguous_bytes) AS DOUBLE)
                / nullif(max(device_free_bytes) + sum(inactive_bytes), 0) AS external_ratio,
            CAST(sum(stranded_bytes) AS DOUBLE) / nullif(sum(reserved_bytes), 0) AS stranded_ratio,
            sum(unusable_free_index_p99 * inactive_bytes)
                / nullif(sum(CASE WHEN unusable_free_index_p99 IS NOT NULL THEN inactive_bytes END), 0) AS unusable_p99,
            bool_or(lossy) AS lossy
         FROM fragmentation WHERE coalesce(memory_kind, '') <> 'pinned_host' AND {}",
        moment.conditions()
    );
    let rows = door.collect(&sql, limits).await?;
    let row = rows.first();
    let bytes = |name: &str| row.map_or(Ok(None), |row| row.bytes(name));
    let ratio = |name: &str| row.map_or(Ok(None), |row| row.ratio(name));
    let (allocated, active, requested) =
        (bytes("allocated")?, bytes("active")?, bytes("requested")?);
    fall.reserved = bytes("reserved")?;
    fall.stranded = bytes("stranded")?;
    fall.releasable = bytes("releasable")?;
    fall.device_free = bytes("device_free")?;
    fall.max_contiguous = bytes("max_contiguous")?;
    fall.external_ratio = ratio("external_ratio")?;
    fall.stranded_ratio = ratio("stranded_ratio")?;
    fall.unusable_p99 = ratio("unusable_p99")?;
    fall.lossy = row.map_or(Ok(None), |row| row.flag("lossy"))?;

    let settings = format!(
        "SELECT max(settings) AS settings FROM allocator_samples WHERE {}",
        moment.conditions()
    );
    let rows = door.collect(&settings, limits).await?;
    fall.settings = rows.first().map_or(Ok(None), |row| row.text("settings"))?;

    fall.card(door, limits, moment).await?;
    fall.process(door, limits, moment).await?;
    let slack = match (fall.releasable, fall.stranded) {
        (Some(releasable), Some(stranded)) => format!(
            "cached: {} could be given back, {} are stranded",
            size(releasable),
            size(stranded)
        ),
        _ => String::new(),
    };
    fall.push(
        "reserved_bytes",
        "reserved by the allocator",
        fall.reserved,
        slack,
    );
    let pending = match (active, allocated) {
        (Some(active), Some(allocated)) => format!(
            "{} freed, a stream may still use it",
            size(active.saturating_sub(allocated))
        ),
        _ => "not known: tracing does not see what waits for a stream".to_string(),
    };
    fall.push("active_bytes", "active", active, pending);
    let rounding = match (active.or(allocated), requested) {
        (Some(block), Some(requested)) => format!(
            "{} by rounding and unsplit rests",
            size(block.saturating_sub(requested))
        ),
        _ => String::new(),
    };
    fall.push("allocated_bytes", "allocated", allocated, rounding);
    let why = if requested.is_none() {
        "not known of every block"
    } else {
        ""
    };
    fall.push("requested_bytes", "asked for", requested, why.to_string());
    Ok(fall)
}

impl Waterfall {
    fn push(&mut self, key: &'static str, name: &'static str, bytes: Option<u64>, note: String) {
        self.layers.push(Layer {
            key,
            name,
            bytes,
            note,
        });
    }

    /// The card, by its newest NVML sample up to then.
    async fn card(
        &mut self,
        door: &mut Door,
        limits: Limits,
        moment: &Moment,
    ) -> anyhow::Result<()> {
        let no_card = |why: &str| format!("not known: {why}");
        let Some(card) = &moment.gpu_uuid else {
            let why = if moment.source == "import" {
                no_card("a snapshot does not say what else is on the card")
            } else {
                no_card("which card it is, is not certain")
            };
            self.push("card_total_bytes", "the card", None, why.clone());
            self.push("card_used_bytes", "in use on it", None, why);
            return Ok(());
        };
        let sql = format!(
            "SELECT total_bytes, used_bytes, free_bytes, ts_ns FROM devices
             WHERE host = {} AND gpu_uuid = {} AND ts_ns <= {} ORDER BY ts_ns DESC LIMIT 1",
            moment.quoted_host(),
            crate::rows::quoted(card),
            moment.ts_ns
        );
        let rows = door.collect(&sql, limits).await?;
        let Some(row) = rows.first() else {
            let why = no_card("no NVML sample of the card up to then");
            self.push("card_total_bytes", "the card", None, why.clone());
            self.push("card_used_bytes", "in use on it", None, why);
            return Ok(());
        };
        let (total, used) = (row.bytes("total_bytes")?, row.bytes("used_bytes")?);
        let older = (moment.ts_ns - row.number("ts_ns")?.unwrap_or_default()) as f64 / 1e9;
        let free = row
            .bytes("free_bytes")?
            .map_or(String::new(), |free| format!("{} free", size(free)));
        self.card_total = total;
        self.push(
            "card_total_bytes",
            "the card",
            total,
            format!("{free} (NVML, {} before)", crate::text::age(older)),
        );
        let others = "other processes, contexts, the driver";
        self.push("card_used_bytes", "in use on it", used, others.to_string());
        Ok(())
    }

    /// What the driver gave this process up to then, by its traced calls.
    async fn process(
        &mut self,
        door: &mut Door,
        limits: Limits,
        moment: &Moment,
    ) -> anyhow::Result<()> {
        if moment.source == "import" {
            let why = "not known: a snapshot has no driver calls";
            self.push(
                "process_physical_bytes",
                "this process, physical",
                None,
                why.to_string(),
            );
            return Ok(());
        }
        let sql = format!(
            "SELECT sum(live_delta_bytes) AS bytes FROM call_chains
             WHERE process_id = {} AND device = {} AND byte_class = 'physical' AND ts_ns <= {}",
            moment.process_id, moment.device, moment.ts_ns
        );
        let rows = door.collect(&sql, limits).await?;
        let bytes = rows.first().map_or(Ok(None), |row| row.bytes("bytes"))?;
        let note = match (bytes, self.reserved) {
            (Some(bytes), Some(reserved)) if bytes >= reserved => {
                format!("{} outside the allocator", size(bytes - reserved))
            }
            (Some(_), _) => {
                "less than is reserved: the process began before it was traced".to_string()
            }
            (None, _) => "not known: no traced call of the driver".to_string(),
        };
        self.push(
            "process_physical_bytes",
            "this process, physical",
            bytes,
            note,
        );
        Ok(())
    }

    pub fn text(&self, width: usize) -> String {
        let whole = self
            .layers
            .iter()
            .find_map(|layer| layer.bytes)
            .unwrap_or(0);
        let room = (width.saturating_sub(40)).clamp(10, 40);
        let mut out = String::new();
        for layer in &self.layers {
            let bar = match layer.bytes {
                Some(bytes) if whole > 0 => {
                    let filled = (bytes as f64 / whole as f64 * room as f64).round() as usize;
                    "#".repeat(filled.min(room))
                }
                _ => String::new(),
            };
            let bytes = layer.bytes.map_or("?".to_string(), size);
            let line = format!("{:<26}{bytes:>11}  {bar}", layer.name);
            let _ = writeln!(out, "{}", line.trim_end());
            if !layer.note.is_empty() {
                let _ = writeln!(out, "{:<26}{:>11}  {}", "", "", layer.note);
            }
        }
        out.push('\n');
        let mut measure = |name: &str, value: String| {
            let _ = writeln!(out, "{name:<38}{value}");
        };
        if let (Some(stranded), Some(reserved)) = (self.stranded, self.reserved) {
            measure("stranded, of what is reserved", of(stranded, reserved));
        }
        let unknown = "not known: the driver's free bytes are not";
        measure(
            "largest request that would succeed",
            self.max_contiguous.map_or(unknown.to_string(), size),
        );
        measure(
            "external fragmentation",
            self.external_ratio.map_or(unknown.to_string(), percent),
        );
        measure(
            "free, but too small for p99 requests",
            self.unusable_p99.map_or(
                "not known: no recorded requests, or nothing free".to_string(),
                percent,
            ),
        );
        if let Some(settings) = self.settings.as_deref().filter(|text| !text.is_empty()) {
            measure("allocator settings", settings.to_string());
        }
        if self.lossy == Some(true) {
            measure(
                "note",
                "events of this process were lost: totals may be off".to_string(),
            );
        }
        out
    }

    pub fn json(&self) -> Value {
        let mut object = serde_json::Map::new();
        for layer in &self.layers {
            object.insert(layer.key.to_string(), json!(layer.bytes));
        }
        let rest = json!({
            "releasable_bytes": self.releasable, "stranded_bytes": self.stranded,
            "device_free_bytes": self.device_free, "max_contiguous_bytes": self.max_contiguous,
            "external_ratio": self.external_ratio, "stranded_ratio": self.stranded_ratio,
            "unusable_free_index_p99": self.unusable_p99, "settings": self.settings, "lossy": self.lossy,
        });
        if let Value::Object(rest) = rest {
            object.extend(rest);
        }
        Value::Object(object)
    }
}
