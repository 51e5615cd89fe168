//! From a map to an allocator that holds it, and back.

use super::blocks::{NONE, State};
use super::expandable::Reservation;
use super::{BlockId, Card, Simulator};
use crate::map::{AddressMap, Block, BlockState, MapProblem, PoolKey, Segment};
use crate::rules;
use crate::settings::Settings;

impl Simulator {
    /// An allocator that holds what `map` says of `device`. Peaks and totals start there.
    ///
    /// What a map does not say is taken to be as usual: expandable ranges of one pool and stream
    /// belong to one reservation as far as one reaches, which begins with the lowest; all cached
    /// blocks have been idle equally long; private pools are in use; and a request that is not
    /// known (or is said to exceed its block) was as large as its block.
    pub fn from_map(
        device: i32,
        map: &AddressMap,
        settings: Settings,
        card: Card,
    ) -> Result<Self, MapProblem> {
        map.check()?;
        let mut simulator = Self::new(device, settings, card);
        let mut segments: Vec<&Segment> = map
            .segments
            .iter()
            .filter(|segment| segment.pool.device == device)
            .collect();
        segments.sort_by_key(|segment| segment.address);
        let (mut expandable, whole): (Vec<&Segment>, Vec<&Segment>) =
            segments.iter().partition(|segment| segment.expandable);
        for segment in whole {
            simulator.space.occupy(segment.address, segment.bytes);
            simulator.adopt(segment);
        }
        expandable.sort_by_key(|segment| (&segment.pool, segment.address));
        for ranges in expandable.chunk_by(|one, next| one.pool == next.pool) {
            simulator.adopt_ranges(ranges, &segments);
        }
        Ok(simulator)
    }

    /// Takes over a segment's blocks as a chain; returns its ends.
    fn adopt(&mut self, segment: &Segment) -> Option<(u32, u32)> {
        let pool = &segment.pool;
        let list = self.lists.find(pool.private, pool.size, pool.stream);
        let mut chain: Option<(u32, u32)> = None;
        let mut before: Option<BlockState> = None;
        for block in &segment.blocks {
            if let Some((_, last)) = chain
                && before == Some(BlockState::Inactive)
                && block.state == BlockState::Inactive
            {
                // Two gaps in a row are one.
                self.blocks[last].bytes += block.bytes;
                continue;
            }
            before = Some(block.state);
            let number = self.blocks.insert(block.address, block.bytes, list);
            let taken = &mut self.blocks[number];
            taken.requested = block.requested.unwrap_or(block.bytes).min(block.bytes);
            taken.tag = block.tag;
            taken.state = match block.state {
                BlockState::Allocated => State::Allocated,
                BlockState::PendingFree => State::Pending,
                BlockState::Inactive => State::Free,
            };
            chain = Some(match chain {
                None => (number, number),
                Some((first, last)) => {
                    self.blocks.append(last, number);
                    (first, number)
                }
            });
        }
        let (first, _) = chain?;
        self.enlist(first);
        self.count_adopted(segment, first);
        chain
    }

    /// Puts the free blocks of a chain into their list.
    fn enlist(&mut self, first: u32) {
        let mut number = first;
        while number != NONE {
            if self.blocks[number].state == State::Free {
                self.lists.insert_free(number, &mut self.blocks[number]);
            }
            number = self.blocks[number].next;
        }
    }

    fn count_adopted(&mut self, segment: &Segment, first: u32) {
        let size = segment.pool.size;
        let limit = self.max_split_size();
        self.reserved += segment.bytes;
        self.stats.reserved_bytes.increase(size, segment.bytes);
        if !segment.expandable {
            self.stats.segment.increase(size, 1);
            if segment.bytes >= limit {
                self.stats.oversize_segments.increase(1);
            }
        }
        let mut number = first;
        while number != NONE {
            let block = &self.blocks[number];
            let stats = &mut self.stats;
            if block.state == State::Free {
                if !segment.expandable && block.is_split() {
                    stats.inactive_split.increase(size, 1);
                    stats.inactive_split_bytes.increase(size, block.bytes);
                }
            } else {
                stats.active.increase(size, 1);
                stats.active_bytes.increase(size, block.bytes);
                stats.requested_bytes.increase(size, block.requested);
            }
            if block.state == State::Allocated {
                stats.allocation.increase(size, 1);
                stats.allocated_bytes.increase(size, block.bytes);
                if block.bytes >= limit {
                    stats.oversize_allocations.increase(1);
                }
            }
            self.pending += usize::from(block.state == State::Pending);
            number = block.next;
        }
    }

    /// Takes over the mapped ranges of one pool and stream as reservations. Both lists are in
    /// order of address.
    fn adopt_ranges(&mut self, ranges: &[&Segment], all: &[&Segment]) {
        let mut ranges = ranges;
        while let Some(first) = ranges.first() {
            let chunk = rules::chunk_bytes(first.pool.size, &self.settings);
            let base = first.address;
            let wanted = self.reservation_bytes(chunk).max(first.bytes);
            // A reservation ends before the next segment that is not its own.
            let foreign = all.iter().find(|segment| {
                let is_ours = segment.expandable && segment.pool == first.pool;
                segment.address > base && !is_ours
            });
            let room = foreign.map_or(u64::MAX, |segment| segment.address - base);
            let reach = base.saturating_add(wanted.min(room));
            let inside = ranges.partition_point(|range| range.end() <= reach).max(1);
            let next = ranges.get(inside).map_or(u64::MAX, |range| range.address);
            let reach = reach.min(next);
            let end = ranges[inside - 1].end().max(reach - (reach - base) % chunk);
            self.adopt_reservation(
                &ranges[..inside],
                Reservation {
                    base,
                    bytes: end - base,
                    chunk,
                },
            );
            ranges = &ranges[inside..];
        }
    }

    fn adopt_reservation(&mut self, ranges: &[&Segment], reservation: Reservation) {
        let number = self.reservations.len() as u32;
        self.reservations.push(reservation);
        self.space.occupy(reservation.base, reservation.bytes);
        let mut last: Option<u32> = None;
        for range in ranges {
            let Some((first, end)) = self.adopt(range) else {
                continue;
            };
            if let Some(before) = last {
                last = Some(self.append_unmapped(before, range.address));
            }
            last = Some(match last {
                Some(before) => self.link(before, first, end),
                None => end,
            });
        }
        let Some(last) = last else { return };
        let end = reservation.base + reservation.bytes;
        let tail = self.append_unmapped(last, end);
        self.mark(tail, number);
    }

    /// Puts a chain from `first` to `end` behind `before`, as one block where both are free at
    /// the seam; returns the last block.
    fn link(&mut self, before: u32, first: u32, end: u32) -> u32 {
        self.blocks.append(before, first);
        let is_free = |block: u32| self.blocks[block].state == State::Free;
        if !is_free(before) || !is_free(first) {
            return end;
        }
        self.lists.remove_free(before, &self.blocks[before]);
        self.lists.remove_free(first, &self.blocks[first]);
        self.blocks.join(before, first);
        self.lists.insert_free(before, &mut self.blocks[before]);
        if end == first { before } else { end }
    }

    /// Fills a chain with unmapped memory up to `address`, if anything is missing.
    fn append_unmapped(&mut self, last: u32, address: u64) -> u32 {
        let (end, list) = (self.blocks[last].end(), self.blocks[last].list);
        if address <= end {
            return last;
        }
        let unmapped = self.blocks.insert(end, address - end, list);
        self.blocks[unmapped].state = State::Unmapped;
        self.blocks.append(last, unmapped);
        self.lists.insert_unmapped(unmapped, &self.blocks[unmapped]);
        unmapped
    }

    /// Notes the reservation on every block of the chain that ends with `last`.
    fn mark(&mut self, last: u32, reservation: u32) {
        let mut number = last;
        while number != NONE {
            self.blocks[number].reservation = reservation;
            number = self.blocks[number].prev;
        }
    }

    /// The blocks that the program holds or a stream still uses, in no order: where each begins,
    /// and its number.
    pub fn held(&self) -> impl Iterator<Item = (u64, BlockId)> {
        self.blocks
            .iter()
            .filter(|(_, block)| matches!(block.state, State::Allocated | State::Pending))
            .map(|(number, block)| (block.address, BlockId(number)))
    }

    /// The map as it is now, in order of address.
    pub fn map(&self) -> AddressMap {
        let mut map = AddressMap::default();
        for (number, block) in self.blocks.iter() {
            let prev = self.blocks.get(block.prev);
            let is_first = prev.is_none_or(|prev| !prev.is_mapped());
            if block.is_mapped() && is_first {
                map.segments.push(self.segment(number));
            }
        }
        map.sort();
        map
    }

    /// The contiguous mapped range that begins with a block.
    fn segment(&self, first: u32) -> Segment {
        let block = &self.blocks[first];
        let mut segment = Segment {
            pool: PoolKey {
                device: self.device,
                private: self.lists.private(block.list),
                size: self.lists.size(block.list),
                stream: self.lists.stream(block.list),
            },
            address: block.address,
            bytes: 0,
            expandable: block.reservation != NONE,
            blocks: Vec::new(),
            tag: None,
        };
        let mut number = first;
        while let Some(block) = self.blocks.get(number)
            && block.is_mapped()
        {
            segment.bytes += block.bytes;
            segment.blocks.push(Block {
                address: block.address,
                bytes: block.bytes,
                requested: (block.state != State::Free).then_some(block.requested),
                state: match block.state {
                    State::Allocated => BlockState::Allocated,
                    State::Pending => BlockState::PendingFree,
                    _ => BlockState::Inactive,
                },
                tag: block.tag,
            });
            number = block.next;
        }
        segment
    }
}
