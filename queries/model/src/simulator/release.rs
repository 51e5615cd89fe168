//! Giving cached memory back to the driver: on a flush, for an oversize request, or because it
//! has been idle for long.

use super::Simulator;
use super::blocks::{NONE, State};
use crate::trace::Action;

impl Simulator {
    /// Waits for all pending blocks, then gives back every segment that holds nothing and every
    /// chunk that can be unmapped, except of private pools in use.
    pub(super) fn flush(&mut self) {
        self.stats.num_sync_all_streams += 1;
        if self.pending > 0 {
            let mut pending: Vec<(u64, u32)> = self
                .blocks
                .iter()
                .filter(|(_, block)| block.state == State::Pending)
                .map(|(number, block)| (block.address, number))
                .collect();
            pending.sort_unstable();
            for (_, block) in pending {
                self.complete(block);
            }
        }
        for pool in self.lists.flushable() {
            let (expandable, whole): (Vec<u32>, Vec<u32>) = pool
                .into_iter()
                .filter(|block| {
                    let block = &self.blocks[*block];
                    block.reservation != NONE || !block.is_split()
                })
                .partition(|block| self.blocks[*block].reservation != NONE);
            for block in whole {
                self.release(block);
            }
            for block in expandable {
                self.unmap(block);
            }
        }
    }

    /// Gives a free block back that is a whole segment.
    fn release(&mut self, block: u32) {
        let released = &self.blocks[block];
        let (list, address, bytes) = (released.list, released.address, released.bytes);
        self.record_range(Action::SegmentFree, list, address, bytes);
        self.lists.remove_free(block, &self.blocks[block]);
        self.space.release(address);
        self.blocks.remove(block);
        let size = self.lists.size(list);
        self.uncount_reserved(size, bytes);
        self.stats.segment.decrease(size, 1);
        if bytes >= self.max_split_size() {
            self.stats.oversize_segments.decrease(1);
        }
    }

    /// With `max_split_size`: gives back the smallest cached block that would have served the
    /// request but for the oversize rules, or the largest ones until they add up to it. Says
    /// whether it is worth asking the driver again.
    pub(super) fn release_oversize(&mut self, list: u32, rounded: u64) -> bool {
        let Some(limit) = self.settings.max_split_size else {
            return false;
        };
        let wanted = rounded.max(limit);
        let smallest = self.lists.fits(list, wanted).next();
        if let Some((_, block)) = smallest
            && self.is_whole_segment(block)
        {
            self.release(block);
            return true;
        }
        // From the largest below the wanted size downwards; of blocks in expandable segments
        // nothing is given back here, nor of segments that were split under other settings.
        let mut candidates: Vec<(u64, u32)> = self
            .lists
            .fits(list, limit)
            .take_while(|(bytes, _)| *bytes < wanted)
            .filter(|(_, block)| self.is_whole_segment(*block))
            .collect();
        let mut released = 0;
        while released < wanted
            && let Some((bytes, block)) = candidates.pop()
        {
            self.release(block);
            released += bytes;
        }
        released >= wanted
    }

    fn is_whole_segment(&self, block: u32) -> bool {
        let block = &self.blocks[block];
        block.reservation == NONE && !block.is_split()
    }

    pub(super) fn collects_garbage(&self) -> bool {
        self.limit.is_some() && self.settings.garbage_collection_threshold.is_some()
    }

    /// Above the threshold: gives back idle segments of the large default pool that are older
    /// than the average, the average anew after each round, until enough is free.
    pub(super) fn collect_garbage(&mut self) {
        let (Some(threshold), Some(limit)) =
            (self.settings.garbage_collection_threshold, self.limit)
        else {
            return;
        };
        let threshold = (threshold * limit as f64) as u64;
        let Some(target) = self
            .reserved
            .checked_sub(threshold)
            .filter(|over| *over > 0)
        else {
            return;
        };
        let mut idle: Vec<u32> = self.lists.large_default();
        idle.retain(|block| !self.blocks[*block].is_split());
        let mut reclaimed = 0;
        while reclaimed < target && !idle.is_empty() {
            let ages = idle
                .iter()
                .map(|block| self.lists.age(&self.blocks[*block]));
            let average = ages.sum::<u64>() as f64 / idle.len() as f64;
            let (old, young): (Vec<u32>, Vec<u32>) = idle.into_iter().partition(|block| {
                let block = &self.blocks[*block];
                block.reservation == NONE && self.lists.age(block) as f64 >= average
            });
            if old.is_empty() {
                return;
            }
            for block in old {
                reclaimed += self.blocks[block].bytes;
                self.release(block);
            }
            idle = young;
        }
    }
}
