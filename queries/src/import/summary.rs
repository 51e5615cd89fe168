//! What an import says of itself: for people, and as JSON.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vramscope_model::map::Measures;
use vramscope_snapshot::Memory;
use vramscope_wire::Table;

use super::columns::Origin;
use super::map::Maps;
use super::survey::Survey;

/// One imported file.
#[derive(Debug, Clone)]
pub struct Summary {
    /// The file.
    pub file: PathBuf,
    /// Hash of its content: `process_id` of all its rows.
    pub process_id: i64,
    /// Rows written, by table.
    pub rows: Vec<(Table, u64)>,
    /// By device, host memory last.
    pub memories: Vec<MemorySummary>,
    /// The allocator's settings; `None` if the snapshot does not say.
    pub settings: Option<String>,
    /// Top-level keys that were passed over.
    pub skipped_keys: Vec<String>,
}

/// The memory of one device, or the host's.
#[derive(Debug, Clone)]
pub struct MemorySummary {
    /// `None`: pinned host memory.
    pub device: Option<i32>,
    /// The final map.
    pub measures: Measures,
    /// Blocks that the program holds.
    pub blocks: u64,
    /// Trace entries by action.
    pub events: Vec<(String, u64)>,
    /// Trace entries with an action that is not known, which are no rows.
    pub unknown: Vec<(String, u64)>,
    /// The trace begins in mid-life: that many blocks and segments were there before it.
    pub older_blocks: u64,
    /// See `older_blocks`.
    pub older_segments: u64,
    /// The trace holds all that the allocator ever did. `None` without a trace.
    pub trace_is_whole: Option<bool>,
    /// Entries that contradict one another or the map.
    pub contradictions: u64,
    /// Blocks and gaps that replaying the trace leads to otherwise than the snapshot has them; 0: the
    /// replay gives the snapshot's map block for block. `None` without a trace.
    pub differences: Option<u64>,
    /// Over the trace, bytes; `None` without one.
    pub peak_allocated: Option<u64>,
    /// See `peak_allocated`.
    pub peak_reserved: Option<u64>,
}

impl Summary {
    pub(super) fn new(
        file: &Path,
        survey: &Survey,
        maps: &Maps,
        origin: &Origin,
        rows: Vec<(Table, u64)>,
    ) -> Self {
        let memories = maps.memories.iter().map(|(memory, map)| {
            let of = &survey.memories[memory];
            let named = |(name, count): (&&str, &u64)| ((*name).to_string(), *count);
            MemorySummary {
                device: match memory {
                    Memory::Device(device) => Some(*device),
                    Memory::Host => None,
                },
                measures: map.measures,
                blocks: map.blocks,
                events: of.events.iter().map(named).collect(),
                unknown: of.unknown.clone().into_iter().collect(),
                older_blocks: of.older_blocks,
                older_segments: if of.total_events > 0 {
                    of.start.segments.len() as u64
                } else {
                    0
                },
                trace_is_whole: (of.total_events > 0).then(|| of.is_whole()),
                contradictions: of.contradictions,
                differences: map.differences,
                peak_allocated: map.peak_allocated,
                peak_reserved: map.peak_reserved,
            }
        });
        Self {
            file: file.to_path_buf(),
            process_id: origin.process_id,
            rows,
            memories: memories.collect(),
            settings: survey.settings_text.clone(),
            skipped_keys: survey.skipped_keys.clone(),
        }
    }

    /// For scripts. Bytes are bytes; what is not known is null.
    pub fn to_json(&self) -> Value {
        let counts = |counts: &[(String, u64)]| -> Value {
            counts
                .iter()
                .map(|(name, count)| (name.clone(), json!(count)))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        let rows: serde_json::Map<String, Value> = self
            .rows
            .iter()
            .map(|(table, count)| (table.name().to_string(), json!(count)))
            .collect();
        let memories: Vec<Value> = self
            .memories
            .iter()
            .map(|of| {
                let m = &of.measures;
                json!({
                    "device": of.device,
                    "segments": m.segments,
                    "blocks": of.blocks,
                    "reserved_bytes": m.reserved,
                    "allocated_bytes": m.allocated,
                    "active_bytes": m.active,
                    "requested_bytes": m.requested,
                    "inactive_bytes": m.inactive,
                    "releasable_bytes": m.releasable,
                    "stranded_bytes": m.stranded,
                    "largest_free_block_bytes": m.largest_free_block,
                    "cache_slack": m.cache_slack(),
                    "stranded_ratio": m.stranded_ratio(),
                    "peak_allocated_bytes": of.peak_allocated,
                    "peak_reserved_bytes": of.peak_reserved,
                    "events": counts(&of.events),
                    "unknown_actions": counts(&of.unknown),
                    "trace_is_whole": of.trace_is_whole,
                    "older_blocks": of.older_blocks,
                    "older_segments": of.older_segments,
                    "contradictions": of.contradictions,
                    "replay_differences": of.differences,
                })
            })
            .collect();
        json!({
            "file": self.file.to_string_lossy(),
            "process_id": self.process_id,
            "rows": rows,
            "memories": memories,
            "settings": self.settings,
            "skipped_keys": self.skipped_keys,
        })
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let mut text = format!("{}\n", self.file.display());
        for of in &self.memories {
            of.add_text(&mut text);
        }
        if let Some(settings) = self.settings.as_deref().filter(|s| !s.is_empty()) {
            line(&mut text, "settings", settings);
        }
        text
    }
}

fn line(text: &mut String, name: &str, value: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "  {name:<11} {value}");
}

impl MemorySummary {
    fn add_text(&self, text: &mut String) {
        let m = &self.measures;
        let name = match self.device {
            Some(device) => format!("device {device}"),
            None => "host".to_string(),
        };
        let share = |part: Option<f64>| match part {
            Some(part) => format!(" ({:.1} %)", part * 100.0),
            None => String::new(),
        };
        let map = format!(
            "{} segments, {} blocks in use: reserved {}, allocated {}, active {}",
            m.segments,
            self.blocks,
            bytes(m.reserved),
            bytes(m.allocated),
            bytes(m.active),
        );
        line(text, &name, &map);
        let cached = format!(
            "{}{}: releasable {}, stranded {}{}",
            bytes(m.inactive),
            share(m.cache_slack()),
            bytes(m.releasable),
            bytes(m.stranded),
            share(m.stranded_ratio()),
        );
        line(text, "  slack", &cached);
        let Some(is_whole) = self.trace_is_whole else {
            line(text, "  trace", "none: recording was off");
            return;
        };
        let events: Vec<String> = self
            .events
            .iter()
            .map(|(name, count)| format!("{count} {name}"))
            .collect();
        let mut events = events.join(", ");
        if !is_whole {
            let _ = write!(
                events,
                "; begins in mid-life, {} blocks and {} segments are older",
                self.older_blocks, self.older_segments
            );
        }
        line(text, "  trace", &events);
        if !self.unknown.is_empty() {
            let unknown: Vec<String> = self
                .unknown
                .iter()
                .map(|(name, count)| format!("{count} {name:?}"))
                .collect();
            let unknown = format!("{}: not known, no rows", unknown.join(", "));
            line(text, "  actions", &unknown);
        }
        match self.differences {
            Some(0) => line(text, "  replay", "gives this map, block for block"),
            Some(count) => {
                let count = format!("gives a map that differs in {count} blocks and gaps");
                line(text, "  replay", &count);
            }
            None => {}
        }
        if self.contradictions > 0 {
            let count = format!(
                "{} entries contradict one another or the map: totals over time may be off",
                self.contradictions
            );
            line(text, "  warning", &count);
        }
    }
}

/// Bytes for people; 1 GB is 10^9.
fn bytes(bytes: u64) -> String {
    let size = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", size / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", size / 1e6),
        _ => format!("{:.2} GB", size / 1e9),
    }
}
