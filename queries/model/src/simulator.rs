//! PyTorch's caching allocator for one device, without a device: what it would do with a sequence
//! of requests under given settings, on a card of a given size.
//!
//! The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (PyTorch 2.15 or near);
//! `docs/allocator-model.md` lists them with their sources, and what is not modelled.
//!
//! Invariants:
//! - the blocks of a segment form a chain that tiles it; of an expandable segment the chain covers
//!   the whole reservation, unmapped blocks included;
//! - two free neighbours of one chain are one block, and so are two unmapped ones;
//! - a free block is in the free list of its pool and stream, an unmapped one in its list of
//!   unmapped blocks, any other block in neither;
//! - what the driver gave is the sum of all mapped blocks, and never exceeds the card.

mod blocks;
mod expandable;
mod lists;
mod release;
mod rerun;
mod space;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod what_if;

pub use rerun::{OomOutcome, Rerun, RerunCounts, Scenario};
pub use stats::{PoolStat, Stat, Stats};
pub use what_if::{Placement, WhatIf, what_if};

use crate::map::PoolSize;
use crate::rules;
use crate::settings::Settings;
use crate::trace::{Action, TraceEvent};
use blocks::{Blocks, NONE, State};
use lists::Lists;
use space::Space;

/// No card has more, whoever says so: device addresses stay below this.
const MOST_BYTES: u64 = 1 << 57;

/// What the allocator can take from. The default: a card without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Card {
    /// Bytes; `None`: the driver never refuses.
    pub capacity: Option<u64>,
    /// Of them, held by others: processes, contexts, libraries that bypass the allocator.
    pub others: u64,
}

/// One request of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub bytes: u64,
    pub stream: i64,
    /// The private pool that serves it, if any.
    pub private: Option<(u64, u64)>,
    /// Kept with the block.
    pub tag: Option<u64>,
}

impl Request {
    /// A request to the default pool.
    pub fn new(bytes: u64, stream: i64) -> Self {
        Self {
            bytes,
            stream,
            private: None,
            tag: None,
        }
    }
}

/// A block that the program holds, until it gives it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockId(u32);

/// The allocator is out of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: tried to take {tried} bytes from the driver")]
pub struct Failure {
    /// As the program asked.
    pub requested: u64,
    /// What would have been taken from the driver: PyTorch's "Tried to allocate".
    pub tried: u64,
    /// Free at that moment, as the driver would say.
    pub device_free: Option<u64>,
    pub reserved: u64,
    pub allocated: u64,
}

/// A block that was not the program's to give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the block was given back before")]
pub struct NotHeld;

/// The allocator of one device.
#[derive(Debug, Clone)]
pub struct Simulator {
    device: i32,
    settings: Settings,
    card: Card,
    /// `memory_fraction` of the card, in bytes.
    limit: Option<u64>,
    blocks: Blocks,
    lists: Lists,
    reservations: Vec<expandable::Reservation>,
    space: Space,
    /// Taken from the driver: what `stats` says, without the split by pool.
    reserved: u64,
    /// Blocks given back that a stream still uses.
    pending: usize,
    stats: Stats,
    record: Option<Vec<TraceEvent>>,
}

impl Simulator {
    /// An allocator that holds nothing yet.
    pub fn new(device: i32, settings: Settings, card: Card) -> Self {
        let limit = settings.memory_fraction.zip(card.capacity);
        Self {
            device,
            limit: limit.map(|(share, capacity)| (share * capacity as f64).round() as u64),
            settings,
            card,
            blocks: Blocks::default(),
            lists: Lists::default(),
            reservations: Vec::new(),
            space: Space::default(),
            reserved: 0,
            pending: 0,
            stats: Stats::default(),
            record: None,
        }
    }

    /// From now on, writes down what happens, as PyTorch's memory history does.
    pub fn start_recording(&mut self) {
        self.record.get_or_insert_default();
    }

    /// What was written down since the last call.
    pub fn take_recording(&mut self) -> Vec<TraceEvent> {
        self.record.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What `torch.cuda.memory_stats()` would say.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Bytes taken from the driver.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Where a held block begins.
    pub fn address(&self, id: BlockId) -> u64 {
        self.blocks[id.0].address
    }

    /// A held block's bytes, after rounding.
    pub fn bytes(&self, id: BlockId) -> u64 {
        self.blocks[id.0].bytes
    }

    /// What the driver has left; `None` for a card without end.
    pub fn driver_free(&self) -> Option<u64> {
        let taken = self.card.others.saturating_add(self.reserved);
        Some(self.card.capacity?.saturating_sub(taken))
    }

    /// Serves a request, or fails as PyTorch would: after it has given back all it can.
    pub fn alloc(&mut self, request: Request) -> Result<BlockId, Failure> {
        let rounded = rules::round(request.bytes, &self.settings);
        let size = rules::pool_size(rounded);
        let list = self.lists.find(request.private, size, request.stream);
        let block = match self.take_cached(list, rounded) {
            Some(block) => block,
            None => self
                .take_from_driver(list, rounded)
                .ok_or_else(|| self.fail(request, rounded))?,
        };
        Ok(self.hand_out(block, rounded, request))
    }

    /// The block's last use is over on all streams: PyTorch's usual free.
    pub fn free(&mut self, id: BlockId) -> Result<(), NotHeld> {
        self.free_requested(id)?;
        self.free_completed(id)
    }

    /// The program gives a block back that other streams may still use (`record_stream`).
    pub fn free_requested(&mut self, id: BlockId) -> Result<(), NotHeld> {
        let block = self.blocks.get(id.0).ok_or(NotHeld)?;
        if block.state != State::Allocated {
            return Err(NotHeld);
        }
        let (bytes, list) = (block.bytes, block.list);
        self.record(Action::FreeRequested, id.0);
        self.blocks[id.0].state = State::Pending;
        self.pending += 1;
        let size = self.lists.size(list);
        self.stats.allocation.decrease(size, 1);
        self.stats.allocated_bytes.decrease(size, bytes);
        if bytes >= self.max_split_size() {
            self.stats.oversize_allocations.decrease(1);
        }
        Ok(())
    }

    /// No stream uses a block any more that was given back.
    pub fn free_completed(&mut self, id: BlockId) -> Result<(), NotHeld> {
        let block = self.blocks.get(id.0).ok_or(NotHeld)?;
        if block.state != State::Pending {
            return Err(NotHeld);
        }
        self.complete(id.0);
        Ok(())
    }

    /// `torch.cuda.empty_cache()`.
    pub fn empty_cache(&mut self) {
        self.flush();
    }

    /// No captured graph uses the private pool any more: a flush may give its memory back.
    pub fn release_private_pool(&mut self, id: (u64, u64)) {
        self.lists.make_flushable(id);
    }

    fn max_split_size(&self) -> u64 {
        self.settings.max_split_size.unwrap_or(u64::MAX)
    }

    /// Best fit on (size, address) in one pool and stream.
    fn take_cached(&mut self, list: u32, rounded: u64) -> Option<u32> {
        if self.collects_garbage() {
            self.lists.count_call(list);
        }
        let (bytes, block) = self.best_fit(list, rounded)?;
        let limit = self.max_split_size();
        // A block that may not be split does not serve a request that would split it …
        if rounded < limit && bytes >= limit {
            return None;
        }
        // … nor one that would waste too much of it.
        let tolerated = rounded.saturating_add(self.settings.non_split_rounding());
        if rounded >= limit && bytes >= tolerated {
            return None;
        }
        self.lists.remove_free(block, &self.blocks[block]);
        Some(block)
    }

    fn best_fit(&self, list: u32, rounded: u64) -> Option<(u64, u32)> {
        let mut fits = self.lists.fits(list, rounded).peekable();
        let (mut bytes, mut found) = fits.next()?;
        if self.blocks[found].reservation == NONE {
            return Some((bytes, found));
        }
        if !self.settings.expandable_segments {
            // Expandable segments were switched off: what lies in them serves no new request.
            return fits.find(|(_, block)| self.blocks[*block].reservation == NONE);
        }
        // A block before unmapped memory counts with what it can grow to, so a larger block that
        // cannot grow is the better fit.
        while self.blocks[found].reservation != NONE
            && let Some((next_bytes, next)) = fits.peek().copied()
            && self.growable_bytes(next) < self.growable_bytes(found)
        {
            (bytes, found) = (next_bytes, next);
            fits.next();
        }
        Some((bytes, found))
    }

    fn growable_bytes(&self, block: u32) -> u64 {
        let block = &self.blocks[block];
        match self.blocks.get(block.next) {
            Some(next) if next.state == State::Unmapped => block.bytes + next.bytes,
            _ => block.bytes,
        }
    }

    /// A new block from the driver, giving cached memory back where it refuses.
    fn take_from_driver(&mut self, list: u32, rounded: u64) -> Option<u32> {
        if self.collects_garbage() {
            self.collect_garbage();
        }
        if let Some(block) = self.ask_driver(list, rounded) {
            return Some(block);
        }
        if self.release_oversize(list, rounded)
            && let Some(block) = self.ask_driver(list, rounded)
        {
            return Some(block);
        }
        self.flush();
        self.stats.num_alloc_retries += 1;
        self.ask_driver(list, rounded)
    }

    fn ask_driver(&mut self, list: u32, rounded: u64) -> Option<u32> {
        let bytes = rules::segment_bytes(rounded, &self.settings);
        let after = self.reserved.saturating_add(bytes);
        if self.limit.is_some_and(|limit| after > limit) {
            return None;
        }
        if self.settings.expandable_segments {
            return self.expand(list, rounded);
        }
        if !self.driver_gives(bytes) {
            return None;
        }
        let address = self.space.segment(bytes)?;
        let block = self.blocks.insert(address, bytes, list);
        let size = self.lists.size(list);
        self.stats.segment.increase(size, 1);
        if bytes >= self.max_split_size() {
            self.stats.oversize_segments.increase(1);
        }
        self.count_reserved(size, bytes);
        self.record_range(Action::SegmentAlloc, list, address, bytes);
        Some(block)
    }

    fn driver_gives(&self, bytes: u64) -> bool {
        let most = MOST_BYTES.saturating_sub(self.reserved);
        bytes <= most.min(self.driver_free().unwrap_or(most))
    }

    fn count_reserved(&mut self, size: PoolSize, bytes: u64) {
        self.reserved += bytes;
        self.stats.reserved_bytes.increase(size, bytes);
        self.stats.num_device_alloc += 1;
    }

    fn uncount_reserved(&mut self, size: PoolSize, bytes: u64) {
        self.reserved -= bytes;
        self.stats.reserved_bytes.decrease(size, bytes);
        self.stats.num_device_free += 1;
    }

    /// Makes a block that is in no list the program's, splitting it where the rest is of use.
    fn hand_out(&mut self, mut block: u32, rounded: u64, request: Request) -> BlockId {
        let found = &self.blocks[block];
        let (list, bytes) = (found.list, found.bytes);
        let was_split = found.is_split();
        let counts_splits = found.reservation == NONE;
        let size = self.lists.size(list);
        let rest = bytes - rounded;
        if rules::should_split(size, rounded, rest, &self.settings) {
            let remaining = block;
            block = self.blocks.split_front(remaining, rounded);
            self.lists
                .insert_free(remaining, &mut self.blocks[remaining]);
            if counts_splits && was_split {
                self.stats.inactive_split_bytes.decrease(size, rounded);
            } else if counts_splits {
                self.stats.inactive_split_bytes.increase(size, rest);
                self.stats.inactive_split.increase(size, 1);
            }
        } else if was_split && counts_splits {
            self.stats.inactive_split_bytes.decrease(size, bytes);
            self.stats.inactive_split.decrease(size, 1);
        }
        let handed_out = &mut self.blocks[block];
        handed_out.state = State::Allocated;
        handed_out.requested = request.bytes;
        handed_out.tag = request.tag;
        let bytes = handed_out.bytes;
        self.stats.allocation.increase(size, 1);
        self.stats.allocated_bytes.increase(size, bytes);
        self.stats.active.increase(size, 1);
        self.stats.active_bytes.increase(size, bytes);
        self.stats.requested_bytes.increase(size, request.bytes);
        if bytes >= self.max_split_size() {
            self.stats.oversize_allocations.increase(1);
        }
        self.record(Action::Alloc, block);
        BlockId(block)
    }

    /// Puts a pending block back into its free list, as one with its free neighbours.
    fn complete(&mut self, block: u32) {
        self.record(Action::FreeCompleted, block);
        self.pending -= 1;
        let completed = &mut self.blocks[block];
        completed.state = State::Free;
        completed.tag = None;
        let (list, bytes, requested) = (completed.list, completed.bytes, completed.requested);
        let counts_splits = completed.reservation == NONE;
        let size = self.lists.size(list);
        let merged = self.merge_neighbours(block);
        self.lists.insert_free(block, &mut self.blocks[block]);
        if counts_splits {
            let became = self.blocks[block].is_split();
            let after = if became { self.blocks[block].bytes } else { 0 };
            self.stats
                .inactive_split
                .change(size, merged.blocks, u64::from(became));
            self.stats
                .inactive_split_bytes
                .change(size, merged.bytes, after);
        }
        self.stats.active.decrease(size, 1);
        self.stats.active_bytes.decrease(size, bytes);
        self.stats.requested_bytes.decrease(size, requested);
    }

    /// Joins a block that is in no list with neighbours of its own state.
    fn merge_neighbours(&mut self, block: u32) -> Merged {
        let mut merged = Merged::default();
        for neighbour in [self.blocks[block].prev, self.blocks[block].next] {
            let Some(other) = self.blocks.get(neighbour) else {
                continue;
            };
            if other.state != self.blocks[block].state {
                continue;
            }
            merged.blocks += 1;
            merged.bytes += other.bytes;
            if other.state == State::Free {
                self.lists.remove_free(neighbour, other);
            } else {
                self.lists.remove_unmapped(other);
            }
            self.blocks.join(block, neighbour);
        }
        merged
    }

    fn fail(&mut self, request: Request, rounded: u64) -> Failure {
        self.stats.num_ooms += 1;
        let device_free = self.driver_free();
        let event = TraceEvent {
            action: Action::Oom {
                device_free: device_free.unwrap_or(u64::MAX),
            },
            device: self.device,
            address: 0,
            bytes: rounded,
            stream: request.stream,
            private: request.private,
            time_ns: None,
            tag: request.tag,
        };
        if let Some(record) = &mut self.record {
            record.push(event);
        }
        Failure {
            requested: request.bytes,
            tried: rules::segment_bytes(rounded, &self.settings),
            device_free,
            reserved: self.reserved,
            allocated: self.stats.allocated_bytes.all.current,
        }
    }

    fn record(&mut self, action: Action, block: u32) {
        let Some(record) = &mut self.record else {
            return;
        };
        let block = &self.blocks[block];
        record.push(TraceEvent {
            action,
            device: self.device,
            address: block.address,
            bytes: block.requested,
            stream: self.lists.stream(block.list),
            private: self.lists.private(block.list),
            time_ns: None,
            tag: block.tag,
        });
    }

    fn record_range(&mut self, action: Action, list: u32, address: u64, bytes: u64) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.push(TraceEvent {
            action,
            device: self.device,
            address,
            bytes,
            stream: self.lists.stream(list),
            private: self.lists.private(list),
            time_ns: None,
            tag: None,
        });
    }
}

/// What a block swallowed.
#[derive(Debug, Clone, Copy, Default)]
struct Merged {
    blocks: u64,
    bytes: u64,
}
