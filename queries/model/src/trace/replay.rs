//! From events to maps: what a trace did to the address map, event by event.
//!
//! Invariants, at every moment:
//! - blocks lie in segments and never overlap; the gaps between them are the free blocks;
//! - reserved is the sum of all segments, active that of all blocks, allocated that of the blocks
//!   that are not pending;
//! - what does not fit to what is known is counted, and changes as little as possible: an event
//!   whose counterpart was overwritten is never guessed at.
//!
//! A trace gives what was asked for, not what a block got. That follows from PyTorch's rules: a
//! block begins where a free one began, and takes all of it unless the rest was split off.

use std::collections::BTreeMap;

use crate::map::{AddressMap, Block, BlockState, MapProblem, PoolKey, PoolSize, Segment};
use crate::rules;
use crate::settings::Settings;
use crate::trace::{Action, TraceEvent};

/// Bytes of one device at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    pub reserved: u64,
    pub allocated: u64,
    pub active: u64,
    /// Of the active blocks whose request is known.
    pub requested: u64,
}

impl Totals {
    fn raise_to(&mut self, other: Totals) {
        self.reserved = self.reserved.max(other.reserved);
        self.allocated = self.allocated.max(other.allocated);
        self.active = self.active.max(other.active);
        self.requested = self.requested.max(other.requested);
    }
}

/// What was met on the way; all but the first three are 0 for a trace that is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplayCounts {
    pub events: u64,
    pub ooms: u64,
    pub snapshots: u64,
    /// Allocations in no known segment: on no map, in no total.
    pub outside_segments: u64,
    /// Frees of blocks that are not known, and of those outside segments.
    pub unmatched_frees: u64,
    /// Completions of frees that were not requested, as far as known.
    pub unmatched_completions: u64,
    /// Blocks that must have been freed, since their bytes went to another block or to the
    /// driver; they were removed.
    pub missing_frees: u64,
    /// Segments given back or unmapped that are not known.
    pub unmatched_segment_frees: u64,
    /// Segments that must have been given back, since their addresses were taken anew.
    pub missing_segment_frees: u64,
}

#[derive(Debug, Clone)]
struct Range {
    bytes: u64,
    pool: PoolKey,
    expandable: bool,
    tag: Option<u64>,
}

#[derive(Debug, Clone)]
struct Live {
    bytes: u64,
    requested: Option<u64>,
    pending: bool,
    tag: Option<u64>,
}

impl Live {
    /// A request that is said to exceed its block counts as the block.
    fn counted_request(&self) -> u64 {
        self.requested.unwrap_or(0).min(self.bytes)
    }
}

/// One device's segments and blocks.
#[derive(Debug, Clone, Default)]
struct Device {
    segments: BTreeMap<u64, Range>,
    live: BTreeMap<u64, Live>,
    totals: Totals,
    peaks: Totals,
}

/// The state of all devices after the events so far.
#[derive(Debug, Clone)]
pub struct Replay {
    settings: Settings,
    devices: BTreeMap<i32, Device>,
    counts: ReplayCounts,
}

impl Replay {
    /// Nothing lives. `settings` are those of the traced allocator.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            devices: BTreeMap::new(),
            counts: ReplayCounts::default(),
        }
    }

    /// What `map` says lives.
    pub fn from_map(map: &AddressMap, settings: Settings) -> Result<Self, MapProblem> {
        map.check()?;
        let mut replay = Self::new(settings);
        for segment in &map.segments {
            let device = replay.devices.entry(segment.pool.device).or_default();
            device.adopt(segment);
        }
        Ok(replay)
    }

    pub fn counts(&self) -> &ReplayCounts {
        &self.counts
    }

    /// The devices that were seen.
    pub fn devices(&self) -> impl Iterator<Item = i32> {
        self.devices.keys().copied()
    }

    /// Bytes of a device now.
    pub fn totals(&self, device: i32) -> Totals {
        self.devices
            .get(&device)
            .map(|device| device.totals)
            .unwrap_or_default()
    }

    /// The most of each, over all events so far and the state before them.
    pub fn peaks(&self, device: i32) -> Totals {
        self.devices
            .get(&device)
            .map(|device| device.peaks)
            .unwrap_or_default()
    }

    /// One event later.
    pub fn apply(&mut self, event: &TraceEvent) {
        self.counts.events += 1;
        match event.action {
            Action::Oom { .. } => {
                self.counts.ooms += 1;
                return;
            }
            Action::Snapshot => {
                self.counts.snapshots += 1;
                return;
            }
            _ => {}
        }
        let device = self.devices.entry(event.device).or_default();
        let counts = &mut self.counts;
        match event.action {
            Action::Alloc => device.alloc(event, &self.settings, counts),
            Action::FreeRequested => device.free_requested(event.address, counts),
            Action::FreeCompleted => device.free_completed(event.address, counts),
            Action::SegmentAlloc => device.take_segment(event, false, counts),
            Action::SegmentMap => device.take_segment(event, true, counts),
            Action::SegmentFree => device.give_segment(event, false, counts),
            Action::SegmentUnmap => device.give_segment(event, true, counts),
            Action::Oom { .. } | Action::Snapshot => {}
        }
        device.peaks.raise_to(device.totals);
    }

    /// The map now, in order of device and address.
    pub fn map(&self) -> AddressMap {
        let mut segments = Vec::new();
        let mut live = Vec::new();
        for (number, device) in &self.devices {
            segments.extend(device.segments.iter().map(|(address, range)| Segment {
                pool: range.pool.clone(),
                address: *address,
                bytes: range.bytes,
                expandable: range.expandable,
                blocks: Vec::new(),
                tag: range.tag,
            }));
            live.extend(device.live.iter().map(|(address, live)| {
                let block = Block {
                    address: *address,
                    bytes: live.bytes,
                    requested: live.requested,
                    state: if live.pending {
                        BlockState::PendingFree
                    } else {
                        BlockState::Allocated
                    },
                    tag: live.tag,
                };
                (*number, block)
            }));
        }
        let built = AddressMap::build(segments, live);
        debug_assert_eq!(built.problems, []);
        built.map
    }
}

impl Device {
    fn adopt(&mut self, segment: &Segment) {
        let range = Range {
            bytes: segment.bytes,
            pool: segment.pool.clone(),
            expandable: segment.expandable,
            tag: segment.tag,
        };
        self.segments.insert(segment.address, range);
        self.totals.reserved += segment.bytes;
        for block in segment.blocks.iter().filter(|block| block.is_active()) {
            let live = Live {
                bytes: block.bytes,
                requested: block.requested,
                pending: block.state == BlockState::PendingFree,
                tag: block.tag,
            };
            self.insert(block.address, live);
        }
        self.peaks = self.totals;
    }

    fn insert(&mut self, address: u64, live: Live) {
        self.totals.active += live.bytes;
        self.totals.requested += live.counted_request();
        if !live.pending {
            self.totals.allocated += live.bytes;
        }
        self.live.insert(address, live);
    }

    fn remove(&mut self, address: u64) {
        let Some(live) = self.live.remove(&address) else {
            return;
        };
        self.totals.active -= live.bytes;
        self.totals.requested -= live.counted_request();
        if !live.pending {
            self.totals.allocated -= live.bytes;
        }
    }

    /// Begin and range of the segment that `address` lies in.
    fn segment_at(&self, address: u64) -> Option<(u64, &Range)> {
        let (begin, range) = self.segments.range(..=address).next_back()?;
        (address < begin + range.bytes).then_some((*begin, range))
    }

    fn alloc(&mut self, event: &TraceEvent, settings: &Settings, counts: &mut ReplayCounts) {
        let address = event.address;
        let Some((begin, range)) = self.segment_at(address) else {
            counts.outside_segments += 1;
            return;
        };
        let (segment_end, size) = (begin + range.bytes, range.pool.size);
        let expandable = range.expandable;
        let rounded = rules::round(event.bytes, settings);
        let least = rounded.min(segment_end - address);
        counts.missing_frees += self.evict(address, address + least);
        let next = self.live.range(address..).next();
        let gap_end = next.map_or(segment_end, |(next, _)| segment_end.min(*next));
        let gap = gap_end - address;
        let rest = gap - least;
        // Whatever is set now, a block of an expandable segment is only taken while they are on.
        let splits = rules::should_split(size, rounded, rest, settings)
            || (expandable && rest >= rules::MIN_BLOCK);
        let live = Live {
            bytes: if splits { least } else { gap },
            requested: Some(event.bytes),
            pending: false,
            tag: event.tag,
        };
        self.insert(address, live);
    }

    /// Removes the blocks that reach into a range; says how many.
    fn evict(&mut self, begin: u64, end: u64) -> u64 {
        let before = self.live.range(..begin).next_back();
        let reaching = before.filter(|(address, live)| *address + live.bytes > begin);
        let inside = self.live.range(begin..end);
        let evicted: Vec<u64> = reaching
            .into_iter()
            .chain(inside)
            .map(|(address, _)| *address)
            .collect();
        for address in &evicted {
            self.remove(*address);
        }
        evicted.len() as u64
    }

    fn free_requested(&mut self, address: u64, counts: &mut ReplayCounts) {
        match self.live.get_mut(&address) {
            Some(live) if !live.pending => {
                live.pending = true;
                self.totals.allocated -= live.bytes;
            }
            _ => counts.unmatched_frees += 1,
        }
    }

    fn free_completed(&mut self, address: u64, counts: &mut ReplayCounts) {
        let requested = self.live.get(&address).is_some_and(|live| live.pending);
        counts.unmatched_completions += u64::from(!requested);
        self.remove(address);
    }

    fn take_segment(&mut self, event: &TraceEvent, expandable: bool, counts: &mut ReplayCounts) {
        let (address, bytes) = (event.address, event.bytes);
        let Some(end) = address.checked_add(bytes).filter(|_| bytes > 0) else {
            return;
        };
        let overwritten = self.cut(address, end);
        counts.missing_segment_frees += u64::from(overwritten > 0);
        counts.missing_frees += self.evict(address, end);
        let mut begin = address;
        let mut range = Range {
            bytes,
            pool: PoolKey {
                device: event.device,
                private: event.private,
                size: pool_size_of_segment(bytes),
                stream: event.stream,
            },
            expandable,
            tag: event.tag,
        };
        self.totals.reserved += bytes;
        if expandable {
            if let Some((before, neighbour)) = self.expandable_before(address, event.stream) {
                begin = before;
                range = Range {
                    bytes: neighbour.bytes + bytes,
                    ..neighbour
                };
            }
            if let Some(neighbour) = self.segments.get(&end)
                && neighbour.expandable
                && neighbour.pool.stream == event.stream
            {
                if begin == address {
                    range.pool = neighbour.pool.clone();
                }
                range.bytes += neighbour.bytes;
                self.segments.remove(&end);
            }
        }
        self.segments.insert(begin, range);
    }

    /// Takes the expandable range of a stream out that ends at an address.
    fn expandable_before(&mut self, address: u64, stream: i64) -> Option<(u64, Range)> {
        let (begin, range) = self.segments.range(..address).next_back()?;
        let begin = *begin;
        let touches = begin + range.bytes == address;
        if !touches || !range.expandable || range.pool.stream != stream {
            return None;
        }
        let range = self.segments.remove(&begin)?;
        Some((begin, range))
    }

    fn give_segment(&mut self, event: &TraceEvent, expandable: bool, counts: &mut ReplayCounts) {
        let (address, end) = (event.address, event.address.saturating_add(event.bytes));
        let known = match self.segment_at(address) {
            Some((begin, range)) if range.expandable == expandable => {
                expandable || begin == address
            }
            _ => false,
        };
        if !known {
            counts.unmatched_segment_frees += 1;
            return;
        }
        counts.missing_frees += self.evict(address, end);
        self.cut(address, end);
    }

    /// Takes a range out of the segments; says how many bytes of it they had.
    fn cut(&mut self, begin: u64, end: u64) -> u64 {
        let removed = cut(&mut self.segments, begin, end);
        self.totals.reserved -= removed;
        removed
    }
}

/// Takes a range out of `segments`, keeping what lies before and behind it.
fn cut(segments: &mut BTreeMap<u64, Range>, begin: u64, end: u64) -> u64 {
    let mut removed = 0;
    if begin >= end {
        return removed;
    }
    loop {
        let touched = segments
            .range(..end)
            .next_back()
            .map(|(address, range)| (*address, range.clone()))
            .filter(|(address, range)| address + range.bytes > begin);
        let Some((address, range)) = touched else {
            return removed;
        };
        segments.remove(&address);
        let range_end = address + range.bytes;
        if range_end > end {
            let behind = Range {
                bytes: range_end - end,
                ..range.clone()
            };
            segments.insert(end, behind);
        }
        if address < begin {
            let before = Range {
                bytes: begin - address,
                ..range
            };
            segments.insert(address, before);
        }
        removed += range_end.min(end) - address.max(begin);
    }
}

/// The small pool takes its segments, and maps its chunks, in one size that the large one never
/// takes.
pub(super) fn pool_size_of_segment(bytes: u64) -> PoolSize {
    if bytes == rules::SMALL_SEGMENT {
        PoolSize::Small
    } else {
        PoolSize::Large
    }
}
