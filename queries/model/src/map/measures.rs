//! How full and how fragmented a map is: the measures of an allocator, each per (device, pool,
//! stream), summed per device and over all.
//!
//! Invariants, for every row and every sum:
//! - reserved = active + inactive, active = allocated + pending_free;
//! - inactive = releasable + stranded, and flushable is a part of releasable;
//! - bytes add up over rows; `largest_free_block` is the largest of the rows'.
//!
//! Holes inside the allocator's segments are real: a request cannot span two of them. Holes
//! between segments are not, since the driver gives any free memory at any address: there only
//! the driver's free bytes count.

use std::collections::BTreeMap;

use super::{AddressMap, Block, BlockState, PoolKey, Segment};
use crate::rules;
use crate::settings::Settings;

/// The measures of one pool and stream, or a sum of several. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measures {
    pub segments: u64,
    /// Blocks in use, and free ones.
    pub active_blocks: u64,
    pub free_blocks: u64,
    /// Taken from the driver.
    pub reserved: u64,
    /// Held by the program.
    pub allocated: u64,
    /// Held by the program, or given back and still in use by a stream.
    pub active: u64,
    /// As asked for, of the active blocks; `None` if that is not known of one of them.
    pub requested: Option<u64>,
    /// active - allocated.
    pub pending_free: u64,
    /// Cached: reserved - active.
    pub inactive: u64,
    /// Inactive bytes that make up whole segments, or whole chunks of expandable segments.
    pub releasable: u64,
    /// Of them, what a flush gives back to the driver: not that of private pools, whose memory
    /// stays reserved for their captured graphs.
    pub flushable: u64,
    /// Inactive and not releasable: blocks in use hold it hostage.
    pub stranded: u64,
    pub largest_free_block: u64,
}

impl Default for Measures {
    /// Nothing reserved, and 0 bytes asked for.
    fn default() -> Self {
        Self {
            segments: 0,
            active_blocks: 0,
            free_blocks: 0,
            reserved: 0,
            allocated: 0,
            active: 0,
            requested: Some(0),
            pending_free: 0,
            inactive: 0,
            releasable: 0,
            flushable: 0,
            stranded: 0,
            largest_free_block: 0,
        }
    }
}

impl Measures {
    /// `rounding_loss` = 1 - requested / active: what rounding and unsplit rests cost. `None`
    /// where nothing is active or a request is not known.
    pub fn rounding_loss(&self) -> Option<f64> {
        Some(1.0 - ratio(self.requested?, self.active)?)
    }

    /// `cache_slack` = (reserved - active) / reserved. High is normal.
    pub fn cache_slack(&self) -> Option<f64> {
        ratio(self.inactive, self.reserved)
    }

    /// stranded / reserved: what alerts look at.
    pub fn stranded_ratio(&self) -> Option<f64> {
        ratio(self.stranded, self.reserved)
    }

    fn add_block(&mut self, block: &Block) {
        if !block.is_active() {
            raise(&mut self.free_blocks, 1);
            raise(&mut self.inactive, block.bytes);
            self.largest_free_block = self.largest_free_block.max(block.bytes);
            return;
        }
        raise(&mut self.active_blocks, 1);
        raise(&mut self.active, block.bytes);
        self.requested = add(self.requested, block.requested);
        if block.state == BlockState::Allocated {
            raise(&mut self.allocated, block.bytes);
        } else {
            raise(&mut self.pending_free, block.bytes);
        }
    }
}

impl std::ops::AddAssign for Measures {
    fn add_assign(&mut self, other: Self) {
        raise(&mut self.segments, other.segments);
        raise(&mut self.active_blocks, other.active_blocks);
        raise(&mut self.free_blocks, other.free_blocks);
        raise(&mut self.reserved, other.reserved);
        raise(&mut self.allocated, other.allocated);
        raise(&mut self.active, other.active);
        self.requested = add(self.requested, other.requested);
        raise(&mut self.pending_free, other.pending_free);
        raise(&mut self.inactive, other.inactive);
        raise(&mut self.releasable, other.releasable);
        raise(&mut self.flushable, other.flushable);
        raise(&mut self.stranded, other.stranded);
        self.largest_free_block = self.largest_free_block.max(other.largest_free_block);
    }
}

/// A free block, and how much of it could be given back to the driver.
#[derive(Debug, Clone, Copy)]
struct Free {
    bytes: u64,
    flushable: u64,
}

/// The measures of a whole map.
#[derive(Debug, Clone, Default)]
pub struct MapMeasures {
    /// A row per device, pool and stream.
    pub pools: BTreeMap<PoolKey, Measures>,
    free: BTreeMap<PoolKey, Vec<Free>>,
}

impl MapMeasures {
    /// Of `map`, whose allocator runs with `settings` (only the large segment's size matters, and
    /// that only where segments are expandable).
    pub fn of(map: &AddressMap, settings: &Settings) -> Self {
        let mut measures = Self::default();
        for segment in &map.segments {
            measures.add_segment(segment, settings);
        }
        measures
    }

    fn add_segment(&mut self, segment: &Segment, settings: &Settings) {
        let row = self.pools.entry(segment.pool.clone()).or_default();
        let free = self.free.entry(segment.pool.clone()).or_default();
        raise(&mut row.segments, 1);
        raise(&mut row.reserved, segment.bytes);
        for block in &segment.blocks {
            row.add_block(block);
            if block.is_active() {
                continue;
            }
            let releasable = releasable(segment, block, settings);
            let flushable = match segment.pool.private {
                None => releasable,
                Some(_) => 0,
            };
            raise(&mut row.releasable, releasable);
            raise(&mut row.flushable, flushable);
            raise(&mut row.stranded, block.bytes - releasable);
            free.push(Free {
                bytes: block.bytes,
                flushable,
            });
        }
    }

    /// The devices that anything is reserved on.
    pub fn devices(&self) -> Vec<i32> {
        let mut devices: Vec<i32> = self.pools.keys().map(|pool| pool.device).collect();
        devices.dedup();
        devices
    }

    /// The sum over one device.
    pub fn device(&self, device: i32) -> Measures {
        sum(self.on(device).map(|(_, row)| row))
    }

    /// The sum over all devices.
    pub fn total(&self) -> Measures {
        sum(self.pools.values())
    }

    fn on(&self, device: i32) -> impl Iterator<Item = (&PoolKey, &Measures)> {
        self.pools
            .iter()
            .filter(move |(pool, _)| pool.device == device)
    }

    /// `max_contiguous_free(pool, stream)` = max(largest cached free block there, `driver_free` +
    /// what a flush of the device's pools gives back): the largest request that would succeed.
    pub fn max_contiguous_free(&self, pool: &PoolKey, driver_free: u64) -> u64 {
        let cached = self.pools.get(pool).map_or(0, |row| row.largest_free_block);
        cached.max(self.driver_reach(pool.device, driver_free))
    }

    /// The largest of the device's pools and streams.
    pub fn device_max_contiguous_free(&self, device: i32, driver_free: u64) -> u64 {
        let cached = self.device(device).largest_free_block;
        cached.max(self.driver_reach(device, driver_free))
    }

    fn driver_reach(&self, device: i32, driver_free: u64) -> u64 {
        driver_free.saturating_add(self.device(device).flushable)
    }

    /// `external_ratio` = 1 - max_contiguous / total_free, where total_free is `driver_free` and
    /// all that is cached. `None` where nothing is free.
    pub fn external_ratio(&self, device: i32, driver_free: u64) -> Option<f64> {
        let contiguous = self.device_max_contiguous_free(device, driver_free);
        let free = driver_free.saturating_add(self.device(device).inactive);
        Some(1.0 - ratio(contiguous, free)?)
    }

    /// `unusable_free_index(r)` = (free - free in blocks >= round(r)) / free over the cached
    /// blocks of one pool and stream, for a request of `request` bytes: 0 good, 1 bad. Linux's
    /// definition. `None` where nothing is cached.
    pub fn unusable_free_index(
        &self,
        pool: &PoolKey,
        request: u64,
        settings: &Settings,
    ) -> Option<f64> {
        let rounded = rules::round(request, settings);
        let blocks = self.free.get(pool)?;
        let free = sum_of(blocks.iter());
        let usable = blocks.iter().filter(|block| block.bytes >= rounded);
        let usable = sum_of(usable);
        ratio(free - usable, free)
    }

    /// The same over a whole device. With `driver_free`, that and what a flush gives back count
    /// as one further block; without, only cached blocks count.
    pub fn device_unusable_free_index(
        &self,
        device: i32,
        request: u64,
        driver_free: Option<u64>,
        settings: &Settings,
    ) -> Option<f64> {
        let rounded = rules::round(request, settings);
        let driver = driver_free.unwrap_or(0);
        let driver_reach = driver_free.map_or(0, |free| self.driver_reach(device, free));
        let driver_serves = driver_reach >= rounded;
        let mut free = driver;
        let mut usable = if driver_serves { driver } else { 0 };
        let pools = self.free.iter().filter(|(pool, _)| pool.device == device);
        for block in pools.flat_map(|(_, blocks)| blocks) {
            free = free.saturating_add(block.bytes);
            usable = usable.saturating_add(if block.bytes >= rounded {
                block.bytes
            } else if driver_serves {
                block.flushable
            } else {
                0
            });
        }
        ratio(free - usable, free)
    }
}

/// How much of a free block of `segment` can be given back: all of it where the segment holds
/// nothing in use; of an expandable segment the whole chunks inside the block. Chunks are counted
/// from the segment's begin, since what is mapped begins with a whole chunk.
fn releasable(segment: &Segment, block: &Block, settings: &Settings) -> u64 {
    if !segment.expandable {
        let idle = !segment.blocks.iter().any(Block::is_active);
        return if idle { block.bytes } else { 0 };
    }
    let chunk = rules::chunk_bytes(segment.pool.size, settings);
    let begin = rules::round_up(block.address - segment.address, chunk);
    let end = block.end() - segment.address;
    (end - end % chunk).saturating_sub(begin)
}

/// `request_headroom_ratio` = (max_contiguous - largest_request) / max_contiguous: how much room
/// the largest request leaves. It rises as the largest hole grows, so it is no measure of
/// fragmentation. `None` where nothing is free.
pub fn request_headroom_ratio(max_contiguous: u64, largest_request: u64) -> Option<f64> {
    Some(1.0 - ratio(largest_request, max_contiguous)?)
}

/// `fragmentation_ratio` = 1 - peak_active / peak_reserved, as GMLake and STAlloc define it, for
/// comparison with papers. `None` where nothing was ever reserved.
pub fn fragmentation_ratio(peak_active: u64, peak_reserved: u64) -> Option<f64> {
    Some(1.0 - ratio(peak_active, peak_reserved)?)
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn add(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.zip(other).map(|(one, other)| one.saturating_add(other))
}

/// Sums stop at 2^64 - 1: a map that was never checked may claim more.
fn raise(sum: &mut u64, by: u64) {
    *sum = sum.saturating_add(by);
}

fn sum_of<'a>(blocks: impl Iterator<Item = &'a Free>) -> u64 {
    blocks.fold(0, |sum, block| sum.saturating_add(block.bytes))
}

fn sum<'a>(rows: impl Iterator<Item = &'a Measures>) -> Measures {
    let mut sum = Measures::default();
    for row in rows {
        sum += *row;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::super::PoolSize;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn segment(pool: (Option<(u64, u64)>, PoolSize, i64), address: u64, bytes: u64) -> Segment {
        let (private, size, stream) = pool;
        Segment {
            pool: PoolKey {
                device: 0,
                private,
                size,
                stream,
            },
            address,
            bytes,
            expandable: false,
            blocks: Vec::new(),
            tag: None,
        }
    }

    fn block(address: u64, bytes: u64, requested: u64, state: BlockState) -> (i32, Block) {
        let block = Block {
            address,
            bytes,
            requested: Some(requested),
            state,
            tag: None,
        };
        (0, block)
    }

    const LARGE: (Option<(u64, u64)>, PoolSize, i64) = (None, PoolSize::Large, 0);

    /// Worked out by hand, in MiB: segment 1 holds 4 allocated, 6 pending, 10 free; segment 2 (of
    /// another stream) is idle with 30; segment 3 is idle in a private pool with 2.
    #[test]
    fn a_small_map_by_hand() {
        let other_stream = (None, PoolSize::Large, 7);
        let private = (Some((0, 1)), PoolSize::Small, 0);
        let map = AddressMap::build(
            vec![
                segment(LARGE, 0, 20 * MIB),
                segment(other_stream, 100 * MIB, 30 * MIB),
                segment(private, 200 * MIB, 2 * MIB),
            ],
            [
                block(0, 4 * MIB, 3 * MIB, BlockState::Allocated),
                block(8 * MIB, 6 * MIB, 6 * MIB, BlockState::PendingFree),
            ],
        )
        .map;
        let settings = Settings::default();
        let measures = MapMeasures::of(&map, &settings);
        let total = measures.total();
        assert_eq!(
            total,
            Measures {
                segments: 3,
                active_blocks: 2,
                free_blocks: 4,
                reserved: 52 * MIB,
                allocated: 4 * MIB,
                active: 10 * MIB,
                requested: Some(9 * MIB),
                pending_free: 6 * MIB,
                inactive: 42 * MIB,
                releasable: 32 * MIB,
                flushable: 30 * MIB,
                stranded: 10 * MIB,
                largest_free_block: 30 * MIB,
            }
        );
        assert_eq!(measures.device(0), total);
        assert_eq!(measures.device(1), Measures::default());
        assert_eq!(total.rounding_loss(), Some(1.0 - 9.0 / 10.0));
        assert_eq!(total.cache_slack(), Some(42.0 / 52.0));
        assert_eq!(total.stranded_ratio(), Some(10.0 / 52.0));

        let first = &map.segments[0].pool;
        // Gaps of 4 and 6 MiB; 5 from the driver and 30 from a flush make more.
        assert_eq!(measures.max_contiguous_free(first, 5 * MIB), 35 * MIB);
        assert_eq!(measures.device_max_contiguous_free(0, 0), 30 * MIB);
        assert_eq!(measures.external_ratio(0, 5 * MIB), Some(1.0 - 35.0 / 47.0));
        let index = |request| measures.unusable_free_index(first, request, &settings);
        assert_eq!(index(MIB), Some(0.0));
        assert_eq!(index(4 * MIB + 1), Some(4.0 / 10.0));
        assert_eq!(index(7 * MIB), Some(1.0));
        let device = |free| measures.device_unusable_free_index(0, 31 * MIB, free, &settings);
        assert_eq!(device(None), Some(1.0));
        assert_eq!(device(Some(0)), Some(1.0));
        // With 1 MiB more a flush gives 31: unusable are the gaps and the private pool.
        assert_eq!(device(Some(MIB)), Some(12.0 / 43.0));
    }

    /// 60 MiB mapped in chunks of 20: what lies between 6 and 47 MiB is free, of it the chunk from
    /// 20 to 40 can be unmapped. With chunks of 12: those from 12 to 36.
    #[test]
    fn of_expandable_segments_whole_chunks_are_releasable() {
        let mut large = segment(LARGE, 1000 * MIB, 60 * MIB);
        large.expandable = true;
        let mut small = segment((None, PoolSize::Small, 0), 0, 6 * MIB);
        small.expandable = true;
        let map = AddressMap::build(
            vec![large, small],
            [
                block(1000 * MIB, 6 * MIB, 1, BlockState::Allocated),
                block(1047 * MIB, 13 * MIB, 1, BlockState::Allocated),
                block(512, 512, 1, BlockState::Allocated),
            ],
        )
        .map;
        let measures = MapMeasures::of(&map, &Settings::default());
        let rows: Vec<(u64, u64)> = measures
            .pools
            .values()
            .map(|row| (row.releasable, row.stranded))
            .collect();
        assert_eq!(rows, [(4 * MIB, 2 * MIB - 512), (20 * MIB, 21 * MIB)]);
        let chunks_of_12 = Settings {
            large_segment_size: Some(12 * MIB),
            ..Settings::default()
        };
        let releasable = MapMeasures::of(&map, &chunks_of_12).device(0).releasable;
        assert_eq!(releasable, 4 * MIB + 24 * MIB);
    }

    #[test]
    fn what_is_unknown_or_nothing_has_no_ratio() {
        let mut unknown = block(0, MIB, 0, BlockState::Allocated);
        unknown.1.requested = None;
        let map = AddressMap::build(vec![segment(LARGE, 0, MIB)], [unknown]).map;
        let total = MapMeasures::of(&map, &Settings::default()).total();
        assert_eq!(total.requested, None);
        assert_eq!(total.rounding_loss(), None);

        let empty = MapMeasures::default();
        assert_eq!(empty.total().cache_slack(), None);
        assert_eq!(empty.external_ratio(0, 0), None);
        assert_eq!(request_headroom_ratio(0, 5), None);
        assert_eq!(request_headroom_ratio(8, 2), Some(0.75));
        assert_eq!(fragmentation_ratio(6, 8), Some(0.25));
    }
}
