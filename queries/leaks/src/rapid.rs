//! A look at the last few slots, for leaks so large that a card fills before blocks have told of
//! them: at a megabyte per request and five requests a second, 18 GB an hour.
//!
//! It makes suspects, never more: a cache that fills for hours looks the same for forty minutes.

use crate::series::{Bytes, Load, Span};
use crate::settings::Settings;

/// Slots looked at.
pub const SLOTS: usize = 3;
/// Least growth per request, bytes: half of what it is for, a megabyte.
const BYTES_PER_REQUEST: f64 = 500_000.0;
/// Slots after a process's start that are left out: what loads then is the model.
const FIRST: usize = 2;
/// Least growth of each slot per request, as a share of the mean: what fills decays.
const LEAST_SHARE: f64 = 0.7;
/// Requests in the slots looked at, as a share of what a window needs.
const REQUESTS: f64 = 0.1;

/// Growth seen by the rapid look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rapid {
    /// Slot (since the process's start) at whose end it was seen.
    pub slot: usize,
    /// Requests in the slots looked at.
    pub requests: f64,
    /// Growth over them, bytes.
    pub growth: f64,
    /// Smallest growth of a slot, scaled to all of them: what can be relied on.
    pub low: f64,
    /// Largest growth of a slot, scaled likewise.
    pub high: f64,
}

/// Every slot at whose end the rule holds, in order.
pub fn look(settings: &Settings, span: &Span, load: &Load, bytes: &Bytes) -> Vec<Rapid> {
    let mut found = Vec::new();
    if !span.has_load {
        return found;
    }
    let mut highest = 0.0_f64;
    for slot in 0..bytes.last.len() {
        // The highest value before the slots looked at.
        if let Some(before) = slot.checked_sub(SLOTS) {
            highest = highest.max(bytes.last[before]);
        }
        if slot + 1 < FIRST + SLOTS {
            continue;
        }
        if let Some(rapid) = look_at(settings, load, bytes, slot, highest) {
            found.push(rapid);
        }
    }
    found
}

fn look_at(
    settings: &Settings,
    load: &Load,
    bytes: &Bytes,
    slot: usize,
    highest: f64,
) -> Option<Rapid> {
    let first = slot - SLOTS;
    let requests = load.completed[slot + 1] - load.completed[first + 1];
    let growth = bytes.last[slot] - bytes.last[first];
    let rate = growth / requests;
    let is_large = requests >= settings.min_requests * REQUESTS && rate >= BYTES_PER_REQUEST;
    if !is_large || bytes.last[slot] - highest < 0.7 * growth {
        return None;
    }
    let of_slot = |s: usize| {
        let requests = load.completed[s + 1] - load.completed[s];
        (bytes.last[s] - bytes.last[s - 1]) / requests
    };
    let rates = (first + 1..=slot).map(of_slot);
    let low = rates.clone().fold(f64::INFINITY, f64::min);
    let high = rates.fold(f64::NEG_INFINITY, f64::max);
    // Bytes that follow the requests in service would rise as they do.
    let (before, now) = (load.slot_running[first], load.slot_running[slot]);
    let by_load = bytes.last[first] * (now / before.max(1.0) - 1.0).max(0.0);
    let holds = low >= LEAST_SHARE * rate && growth > 2.0 * by_load;
    holds.then_some(Rapid {
        slot,
        requests,
        growth,
        low: low * requests,
        high: high * requests,
    })
}
