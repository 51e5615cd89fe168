//! What an allocation of so many bytes would do now, by the allocator's own rules on the map.

use serde_json::{Value, json};
use vramscope_model::oom::OomClass;
use vramscope_model::settings::Settings;
use vramscope_model::simulator::{Card, Placement, Request, WhatIf, what_if};

use super::segments::Map;
use super::waterfall::Waterfall;
use crate::target::Moment;
use crate::text::size;

pub struct Answer {
    requested: u64,
    stream: i64,
    found: WhatIf,
    /// Settings in effect that the model does not know.
    not_modelled: Vec<String>,
}

/// `stream`: `None` is that of most of the memory.
pub fn answer(
    map: &Map,
    fall: &Waterfall,
    moment: &Moment,
    bytes: u64,
    stream: Option<i64>,
) -> anyhow::Result<Answer> {
    let device = i32::try_from(moment.device)?;
    let stream = stream.unwrap_or_else(|| map.main_stream());
    let parsed = Settings::parse(fall.settings.as_deref().unwrap_or_default());
    let mut settings = parsed.settings;
    // A process whose segments are expandable runs with them, whatever is known of its settings.
    settings.expandable_segments |= map.segments.iter().any(|segment| segment.expandable);
    let card = match (fall.device_free, fall.reserved) {
        (Some(free), Some(reserved)) => Card::with_free(free, reserved, fall.card_total),
        _ => Card::default(),
    };
    let found = what_if(
        &map.address_map(device),
        device,
        Request::new(bytes, stream),
        &settings,
        card,
    )?;
    Ok(Answer {
        requested: bytes,
        stream,
        found,
        not_modelled: parsed.problems.iter().map(ToString::to_string).collect(),
    })
}

impl Answer {
    pub fn text(&self) -> String {
        let found = &self.found;
        let mut text = format!(
            "a request of {} by stream {} ({} pool, {} after rounding) now:\n  ",
            size(self.requested),
            self.stream,
            found.pool.size.name(),
            size(found.rounded)
        );
        if found.released > 0 {
            text.push_str(&format!(
                "{} of cached segments are given back first; then ",
                size(found.released)
            ));
        }
        let then = match &found.placement {
            Placement::Cached {
                address,
                found,
                rest: 0,
                ..
            } => {
                format!(
                    "it takes the whole cached gap of {} at {address:#x}",
                    size(*found)
                )
            }
            Placement::Cached {
                address,
                found,
                rest,
                ..
            } => format!(
                "it goes into the cached gap of {} at {address:#x}, of which {} stay free",
                size(*found),
                size(*rest)
            ),
            Placement::NewSegment { bytes } => {
                format!("the driver is asked for a new segment of {}", size(*bytes))
            }
            Placement::Mapped { address, bytes } => format!(
                "{} are mapped into an expandable segment, and it goes to {address:#x}",
                size(*bytes)
            ),
            Placement::Fails { failure, verdict } => {
                let mut why = format!(
                    "it fails: {} would be asked of the driver",
                    size(failure.tried)
                );
                if let Some(free) = failure.device_free {
                    why.push_str(&format!(", which has {}", size(free)));
                }
                if verdict.class != OomClass::Unknown {
                    why.push_str(&format!(" (class: {})", verdict.class));
                }
                why
            }
        };
        text.push_str(&then);
        if found.supposes_driver {
            text.push_str(", if it has that much: its free bytes are not known");
        }
        for problem in &self.not_modelled {
            text.push_str(&format!("\n  note: setting {problem}"));
        }
        text
    }

    pub fn json(&self) -> Value {
        let found = &self.found;
        let placement = match &found.placement {
            Placement::Cached {
                segment,
                address,
                found,
                rest,
            } => json!({
                "kind": "cached", "segment_address": segment, "address": address, "gap_bytes": found,
                "rest_bytes": rest,
            }),
            Placement::NewSegment { bytes } => json!({"kind": "new_segment", "bytes": bytes}),
            Placement::Mapped { address, bytes } => {
                json!({"kind": "mapped", "address": address, "bytes": bytes})
            }
            Placement::Fails { failure, verdict } => json!({
                "kind": "fails", "tried_bytes": failure.tried, "device_free_bytes": failure.device_free,
                "class": verdict.class.name(),
            }),
        };
        json!({
            "requested_bytes": self.requested, "stream": self.stream, "segment_type": found.pool.size.name(),
            "rounded_bytes": found.rounded, "block_bytes": found.block, "released_bytes": found.released,
            "supposes_driver": found.supposes_driver, "placement": placement,
            "not_modelled": self.not_modelled,
        })
    }
}
