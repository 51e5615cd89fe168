use super::*;
use crate::map::{AddressMap, BlockState, PoolSize};
use crate::settings::Settings;

const MIB: u64 = 1 << 20;

fn event(action: Action, address: u64, bytes: u64) -> TraceEvent {
    TraceEvent {
        action,
        device: 0,
        address,
        bytes,
        stream: 0,
        private: None,
        time_ns: None,
        tag: None,
    }
}

fn replay(events: &[TraceEvent]) -> Replay {
    let mut replay = Replay::new(Settings::default());
    for event in events {
        replay.apply(event);
    }
    replay
}

type Shape = Vec<(u64, Vec<(u64, BlockState)>)>;

fn shape(map: &AddressMap) -> Shape {
    let segments = map.segments.iter();
    segments
        .map(|segment| {
            let blocks = segment.blocks.iter();
            let blocks = blocks.map(|block| (block.bytes, block.state));
            (segment.address, blocks.collect())
        })
        .collect()
}

/// By hand: 5 of 20 MiB are split off, 14.5 take what is left with its rest of half a MiB.
#[test]
fn blocks_get_what_the_split_rules_give() {
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
    use BlockState::{Inactive, PendingFree};
    let base = 1 << 30;
    let second = base + 5 * MIB;
    let replay = replay(&[
        event(SegmentAlloc, base, 20 * MIB),
        event(Alloc, base, 5 * MIB - 100),
        event(Alloc, second, 29 * MIB / 2),
        event(FreeRequested, base, 5 * MIB - 100),
        event(FreeCompleted, base, 5 * MIB - 100),
        event(FreeRequested, second, 29 * MIB / 2),
    ]);
    let map = replay.map();
    assert_eq!(map.segments[0].pool.size, PoolSize::Large);
    assert_eq!(
        shape(&map),
        [(base, vec![(5 * MIB, Inactive), (15 * MIB, PendingFree)])]
    );
    assert_eq!(
        replay.totals(0),
        Totals {
            reserved: 20 * MIB,
            allocated: 0,
            active: 15 * MIB,
            requested: 29 * MIB / 2,
        }
    );
    assert_eq!(replay.peaks(0).allocated, 20 * MIB);
    assert_eq!(replay.peaks(0).requested, 39 * MIB / 2 - 100);
    assert_eq!(
        *replay.counts(),
        ReplayCounts {
            events: 6,
            ..ReplayCounts::default()
        }
    );
}

/// Frees, completions and segments of before the trace are counted, and change nothing.
#[test]
fn what_began_before_is_counted_not_guessed() {
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree, SegmentUnmap};
    let replay = replay(&[
        event(FreeRequested, 1000, 512),
        event(FreeCompleted, 1000, 512),
        event(SegmentFree, 0, 2 * MIB),
        event(SegmentUnmap, 1 << 33, 20 * MIB),
        event(Alloc, 5 * MIB, 512),
        event(FreeRequested, 5 * MIB, 512),
        event(SegmentAlloc, 1 << 30, 2 * MIB),
        event(Alloc, 1 << 30, 512),
        event(Action::Oom { device_free: 5 }, 0, 512),
        event(Action::Snapshot, 0, 0),
    ]);
    assert_eq!(
        *replay.counts(),
        ReplayCounts {
            events: 10,
            ooms: 1,
            snapshots: 1,
            outside_segments: 1,
            unmatched_frees: 2,
            unmatched_completions: 1,
            unmatched_segment_frees: 2,
            ..ReplayCounts::default()
        }
    );
    assert_eq!(replay.totals(0).active, 512);
    assert_eq!(replay.totals(0).reserved, 2 * MIB);
    assert_eq!(replay.map().check(), Ok(()));
}

/// An allocation over a live block, a segment given back under one, and a segment over another:
/// the older ones must have gone.
#[test]
fn what_must_have_ended_is_ended() {
    use Action::{Alloc, SegmentAlloc, SegmentFree};
    use BlockState::{Allocated, Inactive};
    let replay = replay(&[
        event(SegmentAlloc, 0, 2 * MIB),
        event(Alloc, 0, 1024),
        event(Alloc, 512, 512),
        event(SegmentAlloc, 4 * MIB, 2 * MIB),
        event(Alloc, 4 * MIB, 512),
        event(SegmentFree, 4 * MIB, 2 * MIB),
        event(SegmentAlloc, 5 * MIB, 2 * MIB),
        event(SegmentAlloc, 6 * MIB, 2 * MIB),
    ]);
    assert_eq!(replay.counts().missing_frees, 2);
    assert_eq!(replay.counts().missing_segment_frees, 1);
    let map = replay.map();
    assert_eq!(map.check(), Ok(()));
    assert_eq!(
        shape(&map)[0].1,
        [
            (512, Inactive),
            (512, Allocated),
            (2 * MIB - 1024, Inactive)
        ]
    );
    assert_eq!(replay.totals(0).allocated, 512);
    assert_eq!(replay.totals(0).reserved, 5 * MIB);
}

/// Ranges of an expandable segment join where they touch, and part where the middle is unmapped.
#[test]
fn mapped_ranges_join_and_part() {
    use Action::{SegmentMap, SegmentUnmap};
    let mut replay = replay(&[
        event(SegmentMap, 0, 20 * MIB),
        event(SegmentMap, 40 * MIB, 20 * MIB),
        event(SegmentMap, 20 * MIB, 20 * MIB),
    ]);
    let ranges = |replay: &Replay| -> Vec<(u64, u64)> {
        let map = replay.map();
        assert!(map.segments.iter().all(|segment| segment.expandable));
        let segments = map.segments.iter();
        segments
            .map(|segment| (segment.address / MIB, segment.bytes / MIB))
            .collect()
    };
    assert_eq!(ranges(&replay), [(0, 60)]);
    replay.apply(&event(SegmentUnmap, 20 * MIB, 20 * MIB));
    assert_eq!(ranges(&replay), [(0, 20), (40, 20)]);
    replay.apply(&event(SegmentUnmap, 0, 20 * MIB));
    assert_eq!(ranges(&replay), [(40, 20)]);
    assert_eq!(replay.totals(0).reserved, 20 * MIB);
}

/// By hand: before the last four events a block of 6 MiB lived that was asked for with 5.5 and
/// whose right neighbour began 6 MiB behind it, and a segment that was given back.
#[test]
fn the_state_before_follows_from_the_end() {
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree};
    use BlockState::{Allocated, Inactive, PendingFree};
    let base = 1 << 30;
    let other = 1 << 31;
    let request = 11 * MIB / 2;
    let whole = [
        event(SegmentAlloc, base, 20 * MIB),
        event(Alloc, base, 6 * MIB),
        event(Alloc, base + 6 * MIB, 4 * MIB),
        event(SegmentAlloc, other, 2 * MIB),
        event(FreeRequested, base, 6 * MIB),
        event(FreeCompleted, base, 6 * MIB),
        event(Alloc, base, request),
        event(FreeRequested, base + 6 * MIB, 4 * MIB),
    ];
    let tail = [
        event(FreeCompleted, base + 6 * MIB, 4 * MIB),
        event(SegmentFree, other, 2 * MIB),
        event(FreeRequested, base, request),
        event(FreeCompleted, base, request),
    ];
    let mut replay = replay(&whole);
    let before = replay.map();
    assert_eq!(
        shape(&before),
        [
            (
                base,
                vec![
                    (6 * MIB, Allocated),
                    (4 * MIB, PendingFree),
                    (10 * MIB, Inactive)
                ]
            ),
            (other, vec![(2 * MIB, Inactive)]),
        ]
    );
    for event in &tail {
        replay.apply(event);
    }
    let start = Start::find(&tail, &replay.map(), &Settings::default());
    assert_eq!(start.problems, []);
    assert_eq!(start.map, before);
    assert_eq!(
        start.counts,
        StartCounts {
            blocks: 2,
            segments: 2,
            ..StartCounts::default()
        }
    );
}

/// A trace and a map that are not of the same program.
#[test]
fn an_end_that_contradicts_the_trace_is_told() {
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
    let events = [
        event(SegmentAlloc, 0, 2 * MIB),
        event(Alloc, 0, 512),
        event(Alloc, 512, 512),
        event(FreeRequested, 512, 512),
        event(FreeCompleted, 512, 512),
        event(FreeRequested, 512, 512),
    ];
    let elsewhere = replay(&[
        event(SegmentAlloc, 4 * MIB, 2 * MIB),
        event(Alloc, 4 * MIB, 512),
    ]);
    let start = Start::find(&events, &elsewhere.map(), &Settings::default());
    assert_eq!(
        start.counts,
        StartCounts {
            blocks: 1,
            segments: 1,
            missing_at_end: 1,
            contradictions: 1,
            missing_segments: 1,
            unexpected_at_end: 0,
        }
    );
}

/// PyTorch maps and unmaps expandable segments in chunks of 2 MiB for small requests and of 20 MiB for
/// large ones: 4 MiB that come back at once are two chunks of the small pool, 40 MiB two of the large.
#[test]
fn what_an_expandable_segment_gives_back_tells_its_pool() {
    let settings = Settings {
        expandable_segments: true,
        ..Settings::default()
    };
    let nothing = AddressMap {
        segments: Vec::new(),
    };
    for (bytes, expected) in [
        (2 * MIB, PoolSize::Small),
        (4 * MIB, PoolSize::Small),
        (20 * MIB, PoolSize::Large),
        (40 * MIB, PoolSize::Large),
        (42 * MIB, PoolSize::Small),
    ] {
        let events = [event(Action::SegmentUnmap, 1 << 30, bytes)];
        let start = Start::find(&events, &nothing, &settings);
        let pools: Vec<_> = start.map.segments.iter().map(|s| s.pool.size).collect();
        assert_eq!(pools, [expected], "{bytes}");
    }
}
