//! What lived before a trace began: PyTorch keeps the last events only, but a snapshot's map is of
//! their end, so the way back is known.
//!
//! - Segments: undoing the trace's takes and returns, from the last to the first, on the final
//!   ones.
//! - Blocks: those whose free is in the trace and whose allocation is not, and those that live at
//!   the end and were not allocated in the trace.
//! - A block that does not live at the end gives only what was asked for. It ends where the split
//!   rules say, given the first block that is ever seen behind it while it lives: rests that are
//!   not split off are at most 1 MiB, and blocks of the large pool are larger.
//!
//! What remains unknown: the private pool of a segment that was given back within a trace that
//! does not name pools (it counts as the default pool's), and a rest that was not split off from a block whose right
//! neighbour was free during the whole trace.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use foldhash::fast::FixedState;

use super::replay::pool_size_of_segment;
use super::{Action, TraceEvent};
use crate::map::{AddressMap, Block, BlockState, MapProblem, PoolKey, PoolSize, Segment};
use crate::rules;
use crate::settings::Settings;

type At = (i32, u64);

/// What of trace and final map does not agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StartCounts {
    /// Blocks that lived before the first event.
    pub blocks: u64,
    /// Segments that did.
    pub segments: u64,
    /// Blocks that live after the last event, but not in the final map.
    pub missing_at_end: u64,
    /// Blocks that were freed in the trace, but live in the final map.
    pub unexpected_at_end: u64,
    /// Events on blocks that contradict earlier ones: a second allocation or free.
    pub contradictions: u64,
    /// Segments taken in the trace that are neither given back there nor in the final map.
    pub missing_segments: u64,
}

/// The state before a trace.
#[derive(Debug, Clone, Default)]
pub struct Start {
    pub map: AddressMap,
    pub counts: StartCounts,
    /// What was left out because it fits to nothing else.
    pub problems: Vec<MapProblem>,
}

/// What the trace says of an address that it has touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// Lives, and was allocated in the trace.
    Allocated,
    /// Lives, pending, and was allocated in the trace.
    Pending,
    /// Lived before, pending now.
    PendingFromBefore,
    Free,
}

impl Start {
    /// Goes back from `end` through `events` (of any number of devices, each device's in order).
    pub fn find(events: &[TraceEvent], end: &AddressMap, settings: &Settings) -> Self {
        let mut blocks = Blocks::default();
        for event in events {
            blocks.see(event);
        }
        blocks.close(end);
        let segments = segments_before(events, end, settings, &mut blocks.counts);
        blocks.bound(events, &segments, settings);

        let mut counts = blocks.counts;
        let built = AddressMap::build(segments, blocks.finish(settings));
        counts.segments = built.map.segments.len() as u64;
        let blocks = built.map.segments.iter().flat_map(|s| &s.blocks);
        counts.blocks = blocks.filter(|block| block.is_active()).count() as u64;
        Self {
            map: built.map,
            counts,
            problems: built.problems,
        }
    }
}

/// A block that lived before the first event.
#[derive(Debug, Clone)]
struct Before {
    state: BlockState,
    requested: Option<u64>,
    tag: Option<u64>,
    /// From the final map.
    bytes: Option<u64>,
    /// It cannot reach beyond this.
    bound: u64,
    pool: PoolSize,
    expandable: bool,
}

#[derive(Debug, Default)]
struct Blocks {
    seen: HashMap<At, Seen, FixedState>,
    before: BTreeMap<At, Before>,
    counts: StartCounts,
}

impl Blocks {
    fn see(&mut self, event: &TraceEvent) {
        let at = (event.device, event.address);
        let seen = self.seen.get(&at).copied();
        let now = match (event.action, seen) {
            (Action::Alloc, None | Some(Seen::Free)) => Seen::Allocated,
            (Action::FreeRequested, Some(Seen::Allocated)) => Seen::Pending,
            (Action::FreeRequested, None) => {
                self.lived_before(event, BlockState::Allocated);
                Seen::PendingFromBefore
            }
            (Action::FreeCompleted, Some(Seen::Pending | Seen::PendingFromBefore)) => Seen::Free,
            (Action::FreeCompleted, None) => {
                self.lived_before(event, BlockState::PendingFree);
                Seen::Free
            }
            (Action::Alloc, Some(_)) => {
                self.counts.contradictions += 1;
                Seen::Allocated
            }
            (Action::FreeRequested | Action::FreeCompleted, Some(_)) => {
                self.counts.contradictions += 1;
                return;
            }
            _ => return,
        };
        self.seen.insert(at, now);
    }

    fn lived_before(&mut self, event: &TraceEvent, state: BlockState) {
        let before = Before {
            state,
            requested: Some(event.bytes),
            // The event's stack is the free's.
            tag: None,
            bytes: None,
            bound: u64::MAX,
            pool: PoolSize::Large,
            expandable: false,
        };
        self.before.insert((event.device, event.address), before);
    }

    /// Adds what lives at the end and was never touched, and compares the rest.
    fn close(&mut self, end: &AddressMap) {
        let mut at_end = 0;
        for segment in &end.segments {
            for block in segment.blocks.iter().filter(|block| block.is_active()) {
                let at = (segment.pool.device, block.address);
                match self.seen.get(&at) {
                    None => {
                        let before = Before {
                            state: block.state,
                            requested: block.requested,
                            tag: block.tag,
                            bytes: Some(block.bytes),
                            bound: u64::MAX,
                            pool: segment.pool.size,
                            expandable: segment.expandable,
                        };
                        self.before.insert(at, before);
                    }
                    Some(Seen::Free) => self.counts.unexpected_at_end += 1,
                    Some(Seen::PendingFromBefore) => {
                        at_end += 1;
                        if let Some(before) = self.before.get_mut(&at) {
                            before.bytes = Some(block.bytes);
                            before.tag = before.tag.or(block.tag);
                        }
                    }
                    Some(_) => at_end += 1,
                }
            }
        }
        let living = self.seen.values().filter(|seen| **seen != Seen::Free);
        self.counts.missing_at_end = living.count() as u64 - at_end;
    }

    /// Finds how far the blocks of unknown size can reach at most: to the next block before the
    /// trace, to any block that is allocated behind them while they live, and to their segment's
    /// end.
    fn bound(&mut self, events: &[TraceEvent], segments: &[Segment], settings: &Settings) {
        let places: Vec<At> = self.before.keys().copied().collect();
        for (index, at) in places.iter().enumerate() {
            let Some(segment) = segment_of(segments, *at) else {
                continue;
            };
            let next = places.get(index + 1).filter(|next| next.0 == at.0);
            let next = next.map_or(u64::MAX, |next| next.1);
            if let Some(before) = self.before.get_mut(at) {
                before.bound = segment.end().min(next);
                before.pool = segment.pool.size;
                before.expandable = segment.expandable;
            }
        }
        let mut unknown: BTreeSet<At> = self
            .before
            .iter()
            .filter(|(_, before)| before.bytes.is_none())
            .map(|(at, _)| *at)
            .collect();
        for event in events {
            let at = (event.device, event.address);
            match event.action {
                Action::FreeCompleted => {
                    unknown.remove(&at);
                }
                Action::Alloc => {
                    let left = unknown.range(..at).next_back().copied();
                    let left = left.filter(|left| left.0 == at.0);
                    if let Some(left) = left
                        && let Some(before) = self.before.get_mut(&left)
                    {
                        let rounded = rules::round(before.requested.unwrap_or(0), settings);
                        if event.address >= left.1.saturating_add(rounded) {
                            before.bound = before.bound.min(event.address);
                        }
                    }
                }
                _ => {}
            }
            if unknown.is_empty() {
                return;
            }
        }
    }

    fn finish(self, settings: &Settings) -> Vec<(i32, Block)> {
        self.before
            .into_iter()
            .map(|((device, address), before)| {
                let bytes = before
                    .bytes
                    .unwrap_or_else(|| before.bytes_by_rule(address, settings));
                let block = Block {
                    address,
                    bytes,
                    requested: before.requested,
                    state: before.state,
                    tag: before.tag,
                };
                (device, block)
            })
            .collect()
    }
}

impl Before {
    fn bytes_by_rule(&self, address: u64, settings: &Settings) -> u64 {
        let rounded = rules::round(self.requested.unwrap_or(0), settings);
        let room = self.bound.saturating_sub(address);
        let rest = room.saturating_sub(rounded);
        let splits = rules::should_split(self.pool, rounded, rest, settings)
            || (self.expandable && rest >= rules::MIN_BLOCK);
        if splits { rounded } else { room.max(rounded) }
    }
}

fn segment_of(segments: &[Segment], (device, address): At) -> Option<&Segment> {
    let after = segments
        .partition_point(|segment| (segment.pool.device, segment.address) <= (device, address));
    let segment = &segments[after.checked_sub(1)?];
    let inside = segment.pool.device == device && address < segment.end();
    inside.then_some(segment)
}

/// The final segments with the trace undone, in order of device and address.
fn segments_before(
    events: &[TraceEvent],
    end: &AddressMap,
    settings: &Settings,
    counts: &mut StartCounts,
) -> Vec<Segment> {
    let mut undo = Undo {
        segments: BTreeMap::new(),
        small: events
            .iter()
            .filter(|event| event.action == Action::Alloc || event.action == Action::FreeRequested)
            .filter(|event| rules::round(event.bytes, settings) <= rules::SMALL_REQUEST)
            .map(|event| (event.device, event.address))
            .collect(),
        large_chunk: rules::chunk_bytes(PoolSize::Large, settings),
        missing: 0,
    };
    for segment in &end.segments {
        undo.cut(segment.pool.device, segment.address, segment.end());
        undo.put(Segment {
            blocks: Vec::new(),
            ..segment.clone()
        });
    }
    for event in events.iter().rev() {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => undo.take(event),
            Action::SegmentFree => undo.give(event, false),
            Action::SegmentUnmap => undo.give(event, true),
            _ => {}
        }
    }
    counts.missing_segments = undo.missing;
    undo.segments.into_values().collect()
}

struct Undo {
    segments: BTreeMap<At, Segment>,
    /// Where small requests were served.
    small: BTreeSet<At>,
    /// What the large pool's expandable segments grow and shrink by.
    large_chunk: u64,
    missing: u64,
}

impl Undo {
    /// Undoes a segment's taking.
    fn take(&mut self, event: &TraceEvent) {
        let end = event.address.saturating_add(event.bytes);
        let removed = self.cut(event.device, event.address, end);
        self.missing += u64::from(removed < event.bytes);
    }

    /// Takes a range out; says how many bytes of it there were.
    fn cut(&mut self, device: i32, begin: u64, end: u64) -> u64 {
        let mut removed = 0;
        if begin >= end {
            return removed;
        }
        loop {
            let touched = self
                .segments
                .range(..(device, end))
                .next_back()
                .filter(|(at, segment)| at.0 == device && segment.end() > begin)
                .map(|(at, _)| *at);
            let Some(segment) = touched.and_then(|at| self.segments.remove(&at)) else {
                return removed;
            };
            removed += segment.end().min(end) - segment.address.max(begin);
            if segment.end() > end {
                self.put(Segment {
                    address: end,
                    bytes: segment.end() - end,
                    ..segment.clone()
                });
            }
            if segment.address < begin {
                self.put(Segment {
                    bytes: begin - segment.address,
                    ..segment
                });
            }
        }
    }

    /// Undoes a segment's return. Whatever was there in its place cannot have been.
    fn give(&mut self, event: &TraceEvent, expandable: bool) {
        let at = (event.device, event.address);
        let end = event.address.saturating_add(event.bytes);
        if end == event.address {
            return;
        }
        self.cut(event.device, event.address, end);
        let mut size = pool_size_of_segment(event.bytes);
        // Chunks that were free side by side go back together: those of the large pool are whole
        // multiples of its own chunk.
        let served_small = self.small.range(at..(event.device, end)).next().is_some();
        if expandable && (served_small || !event.bytes.is_multiple_of(self.large_chunk)) {
            size = PoolSize::Small;
        }
        let mut segment = Segment {
            pool: PoolKey {
                device: event.device,
                private: event.private,
                size,
                stream: event.stream,
            },
            address: event.address,
            bytes: end - event.address,
            expandable,
            blocks: Vec::new(),
            tag: event.tag,
        };
        if expandable {
            self.join(&mut segment);
        }
        self.put(segment);
    }

    /// Joins a range with those that it touches: they are of one reservation.
    fn join(&mut self, segment: &mut Segment) {
        let device = segment.pool.device;
        let stream = segment.pool.stream;
        let is_same = |other: &Segment| {
            other.expandable && other.pool.device == device && other.pool.stream == stream
        };
        let before = self.segments.range(..(device, segment.address)).next_back();
        let before = before
            .filter(|(_, other)| is_same(other) && other.end() == segment.address)
            .map(|(at, _)| *at);
        if let Some(other) = before.and_then(|at| self.segments.remove(&at)) {
            segment.bytes += other.bytes;
            segment.address = other.address;
            segment.pool = other.pool;
            segment.tag = other.tag;
        }
        let behind = (device, segment.end());
        if self.segments.get(&behind).is_some_and(is_same)
            && let Some(other) = self.segments.remove(&behind)
        {
            segment.bytes += other.bytes;
            segment.pool = other.pool;
        }
    }

    fn put(&mut self, segment: Segment) {
        let at = (segment.pool.device, segment.address);
        self.segments.insert(at, segment);
    }
}
