//! Expandable segments: a reservation of address space per pool and stream, mapped in chunks from
//! the lowest address at which a request fits.

use super::Simulator;
use super::blocks::{NONE, State};
use crate::rules;
use crate::trace::Action;

/// What is reserved on a card of unknown size.
const UNKNOWN_CAPACITY: u64 = 1 << 40;

/// The address space of one expandable segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reservation {
    pub base: u64,
    pub bytes: u64,
    /// It is mapped and unmapped by.
    pub chunk: u64,
}

impl Simulator {
    /// A free block of at least `rounded` bytes, in no list, made by mapping memory.
    pub(super) fn expand(&mut self, list: u32, rounded: u64) -> Option<u32> {
        let mut block = self.find_room(list, rounded)?;
        if self.blocks[block].state == State::Unmapped {
            let bytes = self.blocks[block].bytes.min(rounded);
            self.map_memory(block, bytes)?;
        }
        // Free memory and unmapped memory behind it, in turns: mapping joins both.
        while self.blocks[block].bytes < rounded {
            let lacking = rounded - self.blocks[block].bytes;
            let next = self.blocks[block].next;
            let bytes = self.blocks[next].bytes.min(lacking);
            self.map_memory(next, bytes)?;
            block = next;
        }
        self.lists.remove_free(block, &self.blocks[block]);
        Some(block)
    }

    /// The lowest run of free and unmapped blocks that the request fits into, or a reservation of
    /// its own; `None` where even that would be too small.
    fn find_room(&mut self, list: u32, rounded: u64) -> Option<u32> {
        let run = self
            .lists
            .unmapped(list)
            .map(
                |unmapped| match self.blocks.get(self.blocks[unmapped].prev) {
                    Some(prev) if prev.state == State::Free => self.blocks[unmapped].prev,
                    _ => unmapped,
                },
            )
            .find(|first| self.run_reaches(*first, rounded));
        run.or_else(|| self.reserve(list, rounded))
    }

    fn run_reaches(&self, first: u32, rounded: u64) -> bool {
        let mut bytes = 0u64;
        let mut block = first;
        while bytes < rounded
            && let Some(part) = self.blocks.get(block)
            && matches!(part.state, State::Free | State::Unmapped)
        {
            bytes += part.bytes;
            block = part.next;
        }
        bytes >= rounded
    }

    /// 1 1/8 of the card, as PyTorch reserves, so that what was unmapped at the front can be
    /// mapped again at the end.
    pub(super) fn reservation_bytes(&self, chunk: u64) -> u64 {
        let capacity = self.card.capacity.unwrap_or(UNKNOWN_CAPACITY);
        rules::round_up(capacity.saturating_add(capacity / 8), chunk)
    }

    fn reserve(&mut self, list: u32, rounded: u64) -> Option<u32> {
        let chunk = rules::chunk_bytes(self.lists.size(list), &self.settings);
        let bytes = self.reservation_bytes(chunk);
        if bytes < rounded {
            return None;
        }
        let least = rules::round_up(rounded, chunk);
        let (base, bytes) = self.space.reservation(bytes, least, chunk)?;
        let reservation = self.reservations.len() as u32;
        self.reservations.push(Reservation { base, bytes, chunk });
        let block = self.blocks.insert(base, bytes, list);
        self.blocks[block].reservation = reservation;
        self.blocks[block].state = State::Unmapped;
        self.lists.insert_unmapped(block, &self.blocks[block]);
        Some(block)
    }

    /// Maps the first `bytes` of an unmapped block, in whole chunks, and puts the result (joined
    /// with free neighbours) into the free list. `None` if the driver refuses.
    fn map_memory(&mut self, block: u32, bytes: u64) -> Option<()> {
        let (address, list) = (self.blocks[block].address, self.blocks[block].list);
        let reservation = self.reservations[self.blocks[block].reservation as usize];
        // The end of a reservation that was taken over may not be a whole chunk away.
        let mapped = rules::round_up(bytes, reservation.chunk).min(self.blocks[block].bytes);
        if !self.driver_gives(mapped) {
            return None;
        }
        self.lists.remove_unmapped(&self.blocks[block]);
        if mapped < self.blocks[block].bytes {
            self.split_back(block, mapped);
            let rest = self.blocks[block].next;
            self.lists.insert_unmapped(rest, &self.blocks[rest]);
        }
        self.blocks[block].state = State::Free;
        self.merge_neighbours(block);
        self.lists.insert_free(block, &mut self.blocks[block]);
        self.count_reserved(self.lists.size(list), mapped);
        self.record_range(Action::SegmentMap, list, address, mapped);
        Some(())
    }

    /// Cuts what lies behind the first `bytes` off, so that the block keeps its number.
    fn split_back(&mut self, block: u32, bytes: u64) {
        let whole = self.blocks[block].clone();
        let rest = self
            .blocks
            .insert(whole.address + bytes, whole.bytes - bytes, whole.list);
        self.blocks[rest].reservation = whole.reservation;
        self.blocks[rest].state = whole.state;
        self.blocks[block].bytes = bytes;
        self.blocks.append(block, rest);
        if whole.next != NONE {
            self.blocks.append(rest, whole.next);
        }
    }

    /// Gives the whole chunks inside a free block back to the driver, and the reservation too if
    /// nothing else is in it.
    pub(super) fn unmap(&mut self, block: u32) {
        let (begin, end) = (self.blocks[block].address, self.blocks[block].end());
        let list = self.blocks[block].list;
        let Reservation { base, chunk, .. } =
            self.reservations[self.blocks[block].reservation as usize];
        let first = base.saturating_add(rules::round_up(begin - base, chunk));
        let last = end - (end - base) % chunk;
        if first >= last {
            return;
        }
        self.lists.remove_free(block, &self.blocks[block]);
        if first > begin {
            let before = self.blocks.split_front(block, first - begin);
            self.lists.insert_free(before, &mut self.blocks[before]);
        }
        if end > last {
            self.split_back(block, last - first);
            let after = self.blocks[block].next;
            self.lists.insert_free(after, &mut self.blocks[after]);
        }
        self.blocks[block].state = State::Unmapped;
        self.merge_neighbours(block);
        self.lists.insert_unmapped(block, &self.blocks[block]);
        self.uncount_reserved(self.lists.size(list), last - first);
        self.record_range(Action::SegmentUnmap, list, first, last - first);
        if !self.blocks[block].is_split() {
            self.lists.remove_unmapped(&self.blocks[block]);
            self.space.release(base);
            self.blocks.remove(block);
        }
    }
}
