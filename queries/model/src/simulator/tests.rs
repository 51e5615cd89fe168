use super::*;
use crate::map::{AddressMap, BlockState, MapMeasures};

mod outcomes;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn simulator(settings: &str, capacity: u64) -> Simulator {
    let parsed = Settings::parse(settings);
    assert_eq!(parsed.problems, []);
    let card = Card {
        capacity: Some(capacity),
        others: 0,
    };
    Simulator::new(0, parsed.settings, card)
}

fn alloc(simulator: &mut Simulator, bytes: u64) -> BlockId {
    simulator.alloc(Request::new(bytes, 0)).unwrap()
}

/// Published: with a 64 MiB base, cycles that allocate 91 and 45.5 MiB, keep 2 MiB and free the
/// two reserve ever more, since blocks from 128 MiB on serve no smaller request.
#[test]
fn the_published_table_of_expandable_segments() {
    let settings = "max_split_size_mb:128,expandable_segments:True";
    let mut simulator = simulator(settings, 80 * GIB);
    alloc(&mut simulator, 64 * MIB);
    let mut seen = Vec::new();
    for cycle in 0..=100 {
        let large = alloc(&mut simulator, 91 * MIB);
        let small = alloc(&mut simulator, 91 * MIB / 2);
        alloc(&mut simulator, 2 * MIB);
        simulator.free(large).unwrap();
        simulator.free(small).unwrap();
        if cycle % 20 == 0 {
            let allocated = simulator.stats().allocated_bytes.all.current;
            seen.push((cycle, simulator.reserved() / MIB, allocated / MIB));
        }
    }
    assert_eq!(
        seen,
        [
            (0, 220, 66),
            (20, 2980, 106),
            (40, 5760, 146),
            (60, 8520, 186),
            (80, 11300, 226),
            (100, 14060, 266),
        ]
    );
}

/// Best fit takes the smallest block that fits, and of equal ones the lowest.
#[test]
fn best_fit_by_size_then_address() {
    let mut simulator = simulator("", GIB);
    let blocks = [40, 20, 30, 20].map(|mib| alloc(&mut simulator, mib * MIB));
    let addresses = blocks.map(|block| simulator.address(block));
    for block in blocks {
        simulator.free(block).unwrap();
    }
    let take = |simulator: &mut Simulator, mib: u64| {
        let block = alloc(simulator, mib * MIB);
        simulator.address(block)
    };
    assert_eq!(take(&mut simulator, 20), addresses[1]);
    assert_eq!(take(&mut simulator, 20), addresses[3]);
    assert_eq!(take(&mut simulator, 20), addresses[2]);
    assert_eq!(take(&mut simulator, 9), addresses[2] + 20 * MIB);
    assert_eq!(simulator.reserved(), 110 * MIB);
}

/// A block of another stream or of the other pool never matches.
#[test]
fn streams_and_pools_are_apart() {
    let mut simulator = simulator("", GIB);
    let block = alloc(&mut simulator, 20 * MIB);
    simulator.free(block).unwrap();
    simulator.alloc(Request::new(20 * MIB, 7)).unwrap();
    assert_eq!(simulator.reserved(), 40 * MIB);
    alloc(&mut simulator, MIB);
    assert_eq!(simulator.reserved(), 42 * MIB);
    let request = Request {
        private: Some((0, 1)),
        ..Request::new(20 * MIB, 0)
    };
    simulator.alloc(request).unwrap();
    assert_eq!(simulator.reserved(), 62 * MIB);
}

/// Worked out by hand after PyTorch's rules: a 5 MiB request of a new 20 MiB segment leaves one
/// split block of 15; a second request shrinks it; frees join again.
#[test]
fn split_blocks_are_counted_as_pytorch_does() {
    let mut simulator = simulator("", GIB);
    let split = |simulator: &Simulator| {
        let stats = simulator.stats();
        (
            stats.inactive_split.large.current,
            stats.inactive_split_bytes.all.current / MIB,
        )
    };
    let first = alloc(&mut simulator, 5 * MIB);
    assert_eq!(split(&simulator), (1, 15));
    let second = alloc(&mut simulator, 6 * MIB);
    assert_eq!(split(&simulator), (1, 9));
    let third = alloc(&mut simulator, 8 * MIB + 512);
    // 9 - 8 MiB are too little to split off.
    assert_eq!(split(&simulator), (0, 0));
    simulator.free(second).unwrap();
    assert_eq!(split(&simulator), (1, 6));
    simulator.free(first).unwrap();
    assert_eq!(split(&simulator), (1, 11));
    simulator.free(third).unwrap();
    assert_eq!(split(&simulator), (0, 0));
    let stats = simulator.stats();
    assert_eq!(stats.requested_bytes.all.peak, 19 * MIB + 512);
    assert_eq!(stats.active_bytes.all.peak, 20 * MIB);
    assert_eq!(stats.allocation.all.allocated, 3);
    assert_eq!(stats.allocation.all.current, 0);
    assert_eq!(stats.segment.all.current, 1);
    assert_eq!(stats.num_device_alloc, 1);
}

#[test]
fn the_cache_is_flushed_before_a_request_fails() {
    let mut simulator = simulator("", 100 * MIB);
    let first = alloc(&mut simulator, 60 * MIB);
    simulator.free(first).unwrap();
    alloc(&mut simulator, 70 * MIB);
    assert_eq!(simulator.reserved(), 70 * MIB);
    assert_eq!(simulator.stats().num_alloc_retries, 1);
    assert_eq!(simulator.stats().num_device_free, 1);

    let failure = simulator.alloc(Request::new(31 * MIB, 0)).unwrap_err();
    assert_eq!(
        failure,
        Failure {
            requested: 31 * MIB,
            tried: 32 * MIB,
            device_free: Some(30 * MIB),
            reserved: 70 * MIB,
            allocated: 70 * MIB,
        }
    );
    assert_eq!(simulator.stats().num_ooms, 1);
    assert_eq!(simulator.stats().num_alloc_retries, 2);
    // The failure took nothing, and a smaller request goes through.
    alloc(&mut simulator, 30 * MIB);
}

/// A flush waits for blocks that a stream still uses; until then they are active and serve nobody.
#[test]
fn pending_blocks_come_back_with_a_flush() {
    let mut simulator = simulator("", 100 * MIB);
    let block = alloc(&mut simulator, 60 * MIB);
    simulator.free_requested(block).unwrap();
    assert_eq!(simulator.free_requested(block), Err(NotHeld));
    let stats = simulator.stats();
    assert_eq!(stats.allocated_bytes.all.current, 0);
    assert_eq!(stats.active_bytes.all.current, 60 * MIB);
    let map = simulator.map();
    assert_eq!(map.segments[0].blocks[0].state, BlockState::PendingFree);
    alloc(&mut simulator, 30 * MIB);
    assert_eq!(simulator.reserved(), 90 * MIB);
    alloc(&mut simulator, 60 * MIB);
    assert_eq!(simulator.reserved(), 90 * MIB);
    assert_eq!(simulator.stats().num_alloc_retries, 1);
    assert_eq!(simulator.free_completed(block), Err(NotHeld));
}

/// With `max_split_size_mb:40`: a cached 60 MiB block serves neither 30 (it would be split) nor
/// 40 (it wastes 20), but 41; and it is what is given back when 50 MiB do not fit.
#[test]
fn oversize_blocks_serve_only_requests_of_nearly_their_size() {
    let mut simulator = simulator("max_split_size_mb:40", 120 * MIB);
    let block = alloc(&mut simulator, 60 * MIB);
    simulator.free(block).unwrap();
    let small = alloc(&mut simulator, 30 * MIB);
    assert_eq!(simulator.reserved(), 90 * MIB);
    let other = alloc(&mut simulator, 41 * MIB);
    assert_eq!(simulator.reserved(), 90 * MIB);
    assert_eq!(simulator.stats().allocated_bytes.all.current, 90 * MIB);
    assert_eq!(simulator.stats().oversize_allocations.current, 1);
    simulator.free(other).unwrap();
    simulator.free(small).unwrap();
    alloc(&mut simulator, 40 * MIB);
    // 60 were given back without a flush: 30 are still cached.
    assert_eq!(simulator.reserved(), 70 * MIB);
    assert_eq!(simulator.stats().num_alloc_retries, 0);
    assert_eq!(simulator.stats().oversize_segments.current, 1);
}

/// Two oversize blocks of 40 and 50 MiB have to go together for one of 80.
#[test]
fn oversize_blocks_are_given_back_until_they_add_up() {
    let mut simulator = simulator("max_split_size_mb:40", 100 * MIB);
    let blocks = [40, 50].map(|mib| alloc(&mut simulator, mib * MIB));
    for block in blocks {
        simulator.free(block).unwrap();
    }
    alloc(&mut simulator, 80 * MIB);
    assert_eq!(simulator.reserved(), 80 * MIB);
    assert_eq!(simulator.stats().num_alloc_retries, 0);
    assert_eq!(simulator.stats().num_device_free, 2);
}

/// 90 % of half of 400 MiB are 180: with 190 reserved, 10 have to go. Of the idle 30, 50 and
/// 110 MiB, which no request asked for since 1, 2 and 3 requests, the ones of at least average age
/// go: 50 and 110.
#[test]
fn idle_segments_older_than_average_are_collected() {
    let settings = "garbage_collection_threshold:0.9,per_process_memory_fraction:0.5";
    let mut simulator = simulator(settings, 400 * MIB);
    let [a, b, c] = [110, 50, 30].map(|mib| alloc(&mut simulator, mib * MIB));
    simulator.free(a).unwrap();
    let held = alloc(&mut simulator, 110 * MIB);
    simulator.free(held).unwrap();
    let keep_asking = |simulator: &mut Simulator| {
        let block = simulator.alloc(Request::new(30 * MIB, 0));
        simulator.free(block.unwrap()).unwrap();
    };
    simulator.free(c).unwrap();
    keep_asking(&mut simulator);
    simulator.free(b).unwrap();
    keep_asking(&mut simulator);
    assert_eq!(simulator.reserved(), 190 * MIB);
    simulator.alloc(Request::new(10 * MIB, 9)).unwrap();
    assert_eq!(simulator.reserved(), 40 * MIB);
    assert_eq!(simulator.stats().num_alloc_retries, 0);
}

#[test]
fn a_memory_fraction_is_a_limit() {
    let mut simulator = simulator("per_process_memory_fraction:0.5", 100 * MIB);
    alloc(&mut simulator, 50 * MIB);
    let failure = simulator.alloc(Request::new(MIB, 0)).unwrap_err();
    assert_eq!(failure.device_free, Some(50 * MIB));
}

/// By hand: 30 and 50 MiB map two and then, with 10 left over, two more chunks of 20. After the
/// first is freed a flush unmaps its one whole chunk, and the next 45 MiB are put where they fit
/// at the lowest address.
#[test]
fn expandable_segments_map_and_unmap_whole_chunks() {
    let mut simulator = simulator("expandable_segments:True", GIB);
    simulator.start_recording();
    let first = alloc(&mut simulator, 30 * MIB);
    assert_eq!(simulator.reserved(), 40 * MIB);
    alloc(&mut simulator, 50 * MIB);
    assert_eq!(simulator.reserved(), 80 * MIB);
    let base = simulator.address(first);
    simulator.free(first).unwrap();
    simulator.empty_cache();
    assert_eq!(simulator.reserved(), 60 * MIB);
    let map = simulator.map();
    let ranges: Vec<(u64, u64)> = map
        .segments
        .iter()
        .map(|segment| ((segment.address - base) / MIB, segment.bytes / MIB))
        .collect();
    assert_eq!(ranges, [(20, 60)]);
    assert!(map.segments[0].expandable);
    let total = MapMeasures::of(&map, simulator.settings()).total();
    assert_eq!((total.releasable, total.stranded), (0, 10 * MIB));

    let second = alloc(&mut simulator, 30 * MIB);
    assert_eq!(simulator.address(second), base);
    assert_eq!(simulator.reserved(), 80 * MIB);
    let third = alloc(&mut simulator, 45 * MIB);
    assert_eq!(simulator.address(third), base + 80 * MIB);
    // Segments of the kind that `segment` counts were never made.
    assert_eq!(simulator.stats().segment.all.allocated, 0);
    let mapped: Vec<(Action, u64)> = simulator
        .take_recording()
        .into_iter()
        .filter(|event| matches!(event.action, Action::SegmentMap | Action::SegmentUnmap))
        .map(|event| (event.action, event.bytes / MIB))
        .collect();
    assert_eq!(
        mapped,
        [
            (Action::SegmentMap, 40),
            (Action::SegmentMap, 40),
            (Action::SegmentUnmap, 20),
            (Action::SegmentMap, 20),
            (Action::SegmentMap, 60),
        ]
    );
}

/// A free block that can grow counts as what it can grow to: the larger one that cannot is taken.
#[test]
fn a_block_that_can_grow_is_the_worse_fit() {
    let mut simulator = simulator("expandable_segments:True", GIB);
    let hole = alloc(&mut simulator, 14 * MIB);
    alloc(&mut simulator, 14 * MIB);
    // 12 MiB are left at the end of 40; a hole of 14 lies before.
    simulator.free(hole).unwrap();
    let block = alloc(&mut simulator, 11 * MIB);
    assert_eq!(simulator.reserved(), 40 * MIB);
    let first = simulator.map().segments[0].address;
    assert_eq!(simulator.address(block), first);
}

#[test]
fn private_pools_keep_their_memory_until_they_are_released() {
    let mut simulator = simulator("", 100 * MIB);
    let request = Request {
        private: Some((0, 1)),
        ..Request::new(60 * MIB, 0)
    };
    let block = simulator.alloc(request).unwrap();
    simulator.free(block).unwrap();
    assert!(simulator.alloc(Request::new(60 * MIB, 0)).is_err());
    assert_eq!(simulator.map().segments[0].pool.private, Some((0, 1)));
    simulator.release_private_pool((0, 1));
    alloc(&mut simulator, 60 * MIB);
    assert_eq!(simulator.reserved(), 60 * MIB);
}

/// A simulator made from a map goes on as the one that the map was taken of.
#[test]
fn a_map_is_a_whole_state() {
    for settings in ["", "expandable_segments:True", "max_split_size_mb:20"] {
        let mut original = simulator(settings, GIB);
        let blocks: Vec<BlockId> = (0..60)
            .map(|step| {
                let request = Request::new((step * 7919 % 6000) * 1000, step as i64 % 2);
                original.alloc(request).unwrap()
            })
            .collect();
        for block in blocks.iter().step_by(3) {
            original.free(*block).unwrap();
        }
        original.free_requested(blocks[1]).unwrap();
        original.empty_cache();
        original.free_requested(blocks[4]).unwrap();
        let map = original.map();
        assert_eq!(map.check(), Ok(()));
        let card = original.card;
        let parsed = Settings::parse(settings).settings;
        let mut copy = Simulator::from_map(0, &map, parsed, card).unwrap();
        assert_eq!(copy.map(), map, "{settings}");
        assert_eq!(
            copy.stats().active_bytes.all.current,
            original.stats().active_bytes.all.current
        );
        assert_eq!(
            copy.stats().inactive_split.all.current,
            original.stats().inactive_split.all.current
        );
        for step in 0..60 {
            let request = Request::new(step * 104_729 % 9000 * 1000, step as i64 % 2);
            original.alloc(request).unwrap();
            copy.alloc(request).unwrap();
        }
        original.empty_cache();
        copy.empty_cache();
        assert_eq!(layout(&copy.map()), layout(&original.map()), "{settings}");
    }
}

/// Segments without their addresses, which both invent on their own.
fn layout(map: &AddressMap) -> Vec<(u64, Vec<(u64, BlockState)>)> {
    let mut segments: Vec<_> = map
        .segments
        .iter()
        .map(|segment| {
            let blocks = segment
                .blocks
                .iter()
                .map(|block| (block.bytes, block.state));
            (segment.bytes, blocks.collect())
        })
        .collect();
    segments.sort_by_key(|(bytes, blocks): &(u64, Vec<(u64, BlockState)>)| {
        let blocks: Vec<(u64, bool)> = blocks
            .iter()
            .map(|(bytes, state)| (*bytes, *state == BlockState::Inactive))
            .collect();
        (*bytes, blocks)
    });
    segments
}
