//! What an allocation would do now.

use super::{Card, Failure, Request, Simulator};
use crate::map::{AddressMap, MapMeasures, MapProblem, PoolKey};
use crate::oom::{OomFacts, Verdict};
use crate::rules;
use crate::settings::Settings;
use crate::trace::{Action, TraceEvent};

/// Where it would go. Bytes.
#[derive(Debug, Clone, PartialEq)]
pub enum Placement {
    /// Into a cached block.
    Cached {
        segment: u64,
        address: u64,
        /// The free block's size.
        found: u64,
        /// What is split off it and stays free; 0: the block is taken whole.
        rest: u64,
    },
    /// Into a segment of so many bytes that the driver would be asked for.
    NewSegment { bytes: u64 },
    /// To an address of an expandable segment that so many bytes would be mapped into.
    Mapped { address: u64, bytes: u64 },
    /// Nowhere.
    Fails {
        failure: Failure,
        verdict: Box<Verdict>,
    },
}

/// The answer.
#[derive(Debug, Clone, PartialEq)]
pub struct WhatIf {
    /// Who would serve it.
    pub pool: PoolKey,
    /// The request after rounding.
    pub rounded: u64,
    /// What the block would have: the request, its rounding, and a rest that is not split off;
    /// `None` where it fails.
    pub block: Option<u64>,
    /// Bytes that would be given back to the driver first.
    pub released: u64,
    pub placement: Placement,
    /// Whether it is taken for granted that the driver gives what it is asked for, since nobody
    /// knows what it has.
    pub supposes_driver: bool,
}

impl Card {
    /// From what the driver has left beside what the allocator has `reserved`; `total` is the
    /// card's capacity if known, without which a memory fraction cannot be applied.
    pub fn with_free(driver_free: u64, reserved: u64, total: Option<u64>) -> Self {
        let ours = driver_free.saturating_add(reserved);
        Self {
            capacity: Some(total.unwrap_or(ours)),
            others: total.map_or(0, |total| total.saturating_sub(ours)),
        }
    }
}

/// What `request` would do on `device`, whose allocator holds what `map` says. For a card of
/// unknown size the driver is supposed to give. Fails where the map is not sound.
pub fn what_if(
    map: &AddressMap,
    device: i32,
    request: Request,
    settings: &Settings,
    card: Card,
) -> Result<WhatIf, MapProblem> {
    let mut simulator = Simulator::from_map(device, map, settings.clone(), card)?;
    simulator.start_recording();
    let outcome = simulator.alloc(request);
    let events = simulator.take_recording();
    let rounded = rules::round(request.bytes, settings);
    let taken = sum(&events, |action| {
        matches!(action, Action::SegmentAlloc | Action::SegmentMap)
    });
    let placement = match outcome {
        Err(failure) => Placement::Fails {
            failure,
            verdict: Box::new(verdict(&simulator, failure)),
        },
        Ok(block) if taken == 0 => cached(map, device, &simulator, simulator.address(block)),
        Ok(_) if !settings.expandable_segments => Placement::NewSegment { bytes: taken },
        Ok(block) => Placement::Mapped {
            address: simulator.address(block),
            bytes: taken,
        },
    };
    Ok(WhatIf {
        pool: PoolKey {
            device,
            private: request.private,
            size: rules::pool_size(rounded),
            stream: request.stream,
        },
        rounded,
        block: outcome.ok().map(|block| simulator.bytes(block)),
        released: sum(&events, |action| {
            matches!(action, Action::SegmentFree | Action::SegmentUnmap)
        }),
        supposes_driver: taken > 0 && card.capacity.is_none(),
        placement,
    })
}

fn sum(events: &[TraceEvent], which: impl Fn(Action) -> bool) -> u64 {
    let chosen = events.iter().filter(|event| which(event.action));
    chosen.map(|event| event.bytes).sum()
}

fn cached(map: &AddressMap, device: i32, after: &Simulator, address: u64) -> Placement {
    let segment = map.segments.iter().find(|segment| {
        segment.pool.device == device && (segment.address..segment.end()).contains(&address)
    });
    let found = segment.and_then(|segment| {
        let gap = segment.blocks.iter().find(|block| block.address == address);
        gap.map(|gap| gap.bytes)
    });
    let found = found.unwrap_or(0);
    let taken = after.held().find(|(held, _)| *held == address);
    let taken = taken.map_or(0, |(_, block)| after.bytes(block));
    Placement::Cached {
        segment: segment.map_or(address, |segment| segment.address),
        address,
        found,
        rest: found.saturating_sub(taken),
    }
}

/// The class of a failure, from what is left after the flush that it comes with.
fn verdict(simulator: &Simulator, failure: Failure) -> Verdict {
    let measures = MapMeasures::of(&simulator.map(), simulator.settings());
    let measures = measures.total();
    let facts = OomFacts {
        tried: failure.tried,
        driver_free: failure.device_free,
        stranded: Some(measures.stranded),
        releasable: Some(measures.releasable),
        card_total: simulator.card.capacity,
        others_used: Some(simulator.card.others),
        ..OomFacts::default()
    };
    facts.classify()
}
