//! Properties over random programs: what holds for every one of them.

use std::collections::HashMap;

use proptest::prelude::*;
use vramscope_model::map::{AddressMap, BlockState, MapMeasures, PoolKey, PoolSize};
use vramscope_model::settings::Settings;
use vramscope_model::simulator::{BlockId, Card, Request, Scenario, Simulator};
use vramscope_model::trace::{Action, Replay, Start, TraceEvent};

use crate::naive::Naive;

const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Copy)]
enum Step {
    Alloc {
        bytes: u64,
        stream: i64,
    },
    /// The n-th oldest block that is held, modulo their number.
    Free(usize),
    /// It stays pending.
    FreeRequested(usize),
    /// The n-th oldest pending block.
    FreeCompleted(usize),
    EmptyCache,
}

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 0..4096u64,
        3 => 4096..MIB + 2,
        4 => MIB..11 * MIB,
        2 => 9 * MIB..60 * MIB,
        2 => (1..40u64).prop_map(|steps| steps * MIB / 2),
    ]
}

fn step(with_pending: bool) -> impl Strategy<Value = Step> {
    let pending = u32::from(with_pending);
    prop_oneof![
        10 => (bytes(), 0..3i64).prop_map(|(bytes, stream)| Step::Alloc { bytes, stream }),
        8 => any::<usize>().prop_map(Step::Free),
        2 * pending => any::<usize>().prop_map(Step::FreeRequested),
        2 * pending => any::<usize>().prop_map(Step::FreeCompleted),
        1 => Just(Step::EmptyCache),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    prop_oneof![
        Just(""),
        Just("expandable_segments:True"),
        Just("max_split_size_mb:20"),
        Just("max_split_size_mb:32,expandable_segments:True"),
        Just("roundup_power2_divisions:[1:4,8:2,>:1]"),
        Just("large_segment_size_mb:12,expandable_segments:True"),
        Just("garbage_collection_threshold:0.5,per_process_memory_fraction:0.8"),
    ]
    .prop_map(|text| Settings::parse(text).settings)
}

/// A program under way.
struct Program {
    simulator: Simulator,
    held: Vec<BlockId>,
    pending: Vec<BlockId>,
}

impl Program {
    fn new(settings: &Settings, capacity: Option<u64>) -> Self {
        let card = Card {
            capacity,
            others: 0,
        };
        let mut simulator = Simulator::new(0, settings.clone(), card);
        simulator.start_recording();
        Self {
            simulator,
            held: Vec::new(),
            pending: Vec::new(),
        }
    }

    fn step(&mut self, step: Step) {
        let pick = |from: &mut Vec<BlockId>, number: usize| {
            let index = number.checked_rem(from.len())?;
            Some(from.remove(index))
        };
        match step {
            Step::Alloc { bytes, stream } => {
                let retries = self.simulator.stats().num_alloc_retries;
                // One stream's requests are a captured graph's.
                let request = Request {
                    private: (stream == 2).then_some((0, 1)),
                    ..Request::new(bytes, stream)
                };
                if let Ok(block) = self.simulator.alloc(request) {
                    self.held.push(block);
                }
                if self.simulator.stats().num_alloc_retries > retries {
                    self.pending.clear();
                }
            }
            Step::Free(number) => {
                if let Some(block) = pick(&mut self.held, number) {
                    self.simulator.free(block).unwrap();
                }
            }
            Step::FreeRequested(number) => {
                if let Some(block) = pick(&mut self.held, number) {
                    self.simulator.free_requested(block).unwrap();
                    self.pending.push(block);
                }
            }
            Step::FreeCompleted(number) => {
                if let Some(block) = pick(&mut self.pending, number) {
                    self.simulator.free_completed(block).unwrap();
                }
            }
            Step::EmptyCache => {
                self.simulator.empty_cache();
                self.pending.clear();
            }
        }
    }
}

/// Bytes by state, worked out over a grid of 512 bytes: every cell of a segment belongs to exactly
/// one block.
fn count_cells(map: &AddressMap) -> HashMap<BlockState, u64> {
    let mut cells = HashMap::new();
    for segment in &map.segments {
        let mut owners = vec![None; (segment.bytes / 512) as usize];
        for block in &segment.blocks {
            assert_eq!((block.address - segment.address) % 512, 0);
            assert_eq!(block.bytes % 512, 0);
            let first = ((block.address - segment.address) / 512) as usize;
            for owner in &mut owners[first..first + (block.bytes / 512) as usize] {
                assert_eq!(*owner, None, "a cell of two blocks");
                *owner = Some(block.state);
            }
        }
        for owner in owners {
            *cells.entry(owner.expect("a cell of no block")).or_default() += 512;
        }
    }
    cells
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Blocks and gaps tile each segment, free neighbours are one, and the statistics are the sum
    /// of the map, whatever the settings and however small the card.
    #[test]
    fn bytes_are_conserved(
        steps in prop::collection::vec(step(true), 1..120),
        settings in settings(),
        capacity in prop_oneof![Just(None), (60..400u64).prop_map(|mib| Some(mib * MIB))],
    ) {
        let mut program = Program::new(&settings, capacity);
        for (index, step) in steps.iter().enumerate() {
            program.step(*step);
            if index % 4 > 0 && index + 1 < steps.len() && !step_is_flush(step) {
                continue;
            }
            let map = program.simulator.map();
            prop_assert_eq!(map.check(), Ok(()));
            for segment in &map.segments {
                let twice_free = segment.blocks.windows(2).any(|pair| {
                    pair.iter().all(|block| block.state == BlockState::Inactive)
                });
                prop_assert!(!twice_free);
            }
            let total = MapMeasures::of(&map, &settings).total();
            let stats = program.simulator.stats();
            prop_assert_eq!(total.reserved, stats.reserved_bytes.all.current);
            prop_assert_eq!(total.reserved, program.simulator.reserved());
            prop_assert_eq!(total.allocated, stats.allocated_bytes.all.current);
            prop_assert_eq!(total.active, stats.active_bytes.all.current);
            prop_assert_eq!(total.requested, Some(stats.requested_bytes.all.current));
            prop_assert_eq!(total.active_blocks, stats.active.all.current);
            prop_assert_eq!(total.reserved, total.active + total.inactive);
            prop_assert_eq!(total.inactive, total.releasable + total.stranded);
            prop_assert!(capacity.is_none_or(|capacity| total.reserved <= capacity));
            if index + 1 == steps.len() {
                let cells = count_cells(&map);
                let of = |state| cells.get(&state).copied().unwrap_or(0);
                prop_assert_eq!(of(BlockState::Allocated), total.allocated);
                prop_assert_eq!(of(BlockState::PendingFree), total.pending_free);
                prop_assert_eq!(of(BlockState::Inactive), total.inactive);
            }
            if step_is_flush(step) {
                prop_assert_eq!(total.flushable, 0);
            }
        }
    }

    /// The simulator without settings against one written as plainly as possible.
    #[test]
    fn the_simulator_does_as_a_naive_allocator(
        steps in prop::collection::vec(step(false), 1..150),
        capacity in 40..300u64,
    ) {
        let capacity = capacity * MIB;
        let card = Card { capacity: Some(capacity), others: 0 };
        let mut simulator = Simulator::new(0, Settings::default(), card);
        let mut naive = Naive::new(capacity);
        let mut held: Vec<(u64, BlockId)> = Vec::new();
        for (id, step) in steps.iter().enumerate() {
            let id = id as u64;
            match *step {
                Step::Alloc { bytes, stream } => {
                    let block = simulator.alloc(Request::new(bytes, stream));
                    prop_assert_eq!(block.is_ok(), naive.alloc(id, bytes, stream));
                    held.extend(block.ok().map(|block| (id, block)));
                }
                Step::Free(number) if !held.is_empty() => {
                    let (id, block) = held.remove(number % held.len());
                    simulator.free(block).unwrap();
                    naive.free(id);
                }
                Step::EmptyCache => {
                    simulator.empty_cache();
                    naive.flush();
                }
                _ => {}
            }
            prop_assert_eq!(simulator.reserved(), naive.reserved());
            // Both take segments in the same order, and the simulator's addresses rise.
            let map = simulator.map();
            let ours: Vec<_> = map.segments.iter().map(|segment| {
                let blocks = segment.blocks.iter();
                let blocks: Vec<_> = blocks.map(|b| (b.is_active(), b.bytes, b.requested)).collect();
                (segment.pool.stream, segment.pool.size == PoolSize::Small, blocks)
            }).collect();
            let theirs: Vec<_> = naive.segments.iter().map(|segment| {
                let blocks = segment.blocks.iter();
                let blocks: Vec<_> = blocks
                    .map(|b| (b.id.is_some(), b.bytes, b.id.map(|_| b.requested)))
                    .collect();
                (segment.stream, segment.small, blocks)
            }).collect();
            prop_assert_eq!(ours, theirs);
        }
        prop_assert_eq!(simulator.stats().num_alloc_retries, naive.retries);
        prop_assert_eq!(simulator.stats().num_ooms, naive.ooms);
    }

    /// What the simulator writes down leads to its own map, block for block, at every event that
    /// ends a step; and nothing in it is left over.
    #[test]
    fn a_recording_replays_to_the_map(
        steps in prop::collection::vec(step(true), 1..120),
        settings in settings(),
        capacity in prop_oneof![Just(None), (60..400u64).prop_map(|mib| Some(mib * MIB))],
    ) {
        let mut program = Program::new(&settings, capacity);
        let mut replay = Replay::new(settings);
        for step in steps {
            program.step(step);
            for event in program.simulator.take_recording() {
                replay.apply(&event);
            }
            prop_assert_eq!(replay.map(), program.simulator.map());
            let stats = program.simulator.stats();
            let (totals, peaks) = (replay.totals(0), replay.peaks(0));
            prop_assert_eq!(totals.reserved, stats.reserved_bytes.all.current);
            prop_assert_eq!(totals.requested, stats.requested_bytes.all.current);
            prop_assert_eq!(peaks.reserved, stats.reserved_bytes.all.peak);
            prop_assert_eq!(peaks.allocated, stats.allocated_bytes.all.peak);
            prop_assert_eq!(peaks.active, stats.active_bytes.all.peak);
        }
        let counts = replay.counts();
        prop_assert_eq!(counts.unmatched_frees + counts.unmatched_completions, 0);
        prop_assert_eq!(counts.missing_frees + counts.missing_segment_frees, 0);
        prop_assert_eq!(counts.outside_segments + counts.unmatched_segment_frees, 0);
        prop_assert_eq!(counts.ooms, program.simulator.stats().num_ooms);
    }

    /// The map in the middle of a recording follows from what comes after it. Without rests that
    /// were not split off (small and expandable pools have none), to the block.
    #[test]
    fn the_past_follows_from_the_future(
        steps in prop::collection::vec(step(true), 20..120),
        cut in 0..100usize,
        expandable in any::<bool>(),
    ) {
        let settings = Settings { expandable_segments: expandable, ..Settings::default() };
        let capacity = Some(300 * MIB);
        let mut program = Program::new(&settings, capacity);
        let cut = cut * steps.len() / 100;
        for step in &steps[..cut] {
            program.step(without_rest(*step, expandable));
        }
        let before = program.simulator.map();
        program.simulator.take_recording();
        for step in &steps[cut..] {
            program.step(without_rest(*step, expandable));
        }
        let events = program.simulator.take_recording();
        let start = Start::find(&events, &program.simulator.map(), &settings);
        prop_assert_eq!(&start.problems, &[]);
        prop_assert_eq!(start.counts.missing_at_end + start.counts.unexpected_at_end, 0);
        prop_assert_eq!(start.counts.contradictions + start.counts.missing_segments, 0);
        prop_assert_eq!(&start.map, &before);
    }

    /// A rerun under the recorded settings on the recorded card ends in the recorded map.
    #[test]
    fn a_rerun_under_the_same_settings_is_the_same(
        steps in prop::collection::vec(step(true), 1..120),
        settings in settings(),
        capacity in 60..400u64,
    ) {
        let capacity = Some(capacity * MIB);
        let mut program = Program::new(&settings, capacity);
        // A flush that directly follows a free looks like the free's completion, and a completion
        // right before a flush like one of its own, which come in the order of addresses: something
        // that needs no flush keeps the two apart.
        let apart = Step::Alloc { bytes: 1, stream: 3 };
        program.step(apart);
        // Three things are not always to be told from a recording, and are left out here: whether
        // the program's own call gave segments back; whether the allocator waited for streams where
        // it can give single segments back or needs nothing from the driver afterwards; and whether
        // it flushed at all where expandable segments have oversize blocks.
        prop_assume!(!settings.expandable_segments || settings.max_split_size.is_none());
        let unclear = settings.expandable_segments
            || settings.max_split_size.is_some()
            || settings.garbage_collection_threshold.is_some();
        for step in steps {
            match step {
                Step::EmptyCache => {}
                Step::FreeRequested(number) if unclear => program.step(Step::Free(number)),
                Step::FreeRequested(_) | Step::FreeCompleted(_) => {
                    program.step(step);
                    program.step(apart);
                }
                step => program.step(step),
            }
        }
        let events = program.simulator.take_recording();
        let card = Card { capacity, others: 0 };
        let scenario = Scenario { device: 0, events: &events, start: None, recorded: settings.clone(), settings, card };
        let rerun = scenario.run().unwrap();
        // An expandable segment that a failure left empty has another address in the rerun.
        prop_assert_eq!(without_addresses(&rerun.map), without_addresses(&program.simulator.map()));
        prop_assert_eq!(&rerun.stats, program.simulator.stats());
        prop_assert!(rerun.ooms.iter().all(|oom| !oom.avoided));
        prop_assert_eq!(rerun.new_failures, 0);
    }

    /// Streams do not share blocks: however their events are interleaved, each stream's pools end
    /// up the same.
    #[test]
    fn the_order_of_streams_does_not_matter(
        steps in prop::collection::vec(step(true), 1..120),
        settings in settings(),
        choices in prop::collection::vec(0..3usize, 400),
    ) {
        let mut program = Program::new(&settings, None);
        for step in steps {
            program.step(step);
        }
        let events = program.simulator.take_recording();
        let mut by_stream: Vec<Vec<TraceEvent>> = (0..3)
            .map(|stream| events.iter().copied().filter(|event| event.stream == stream).collect())
            .collect();
        for queue in &mut by_stream {
            queue.reverse();
        }
        let mut replay = Replay::new(settings);
        let mut choices = choices.into_iter().cycle();
        while by_stream.iter().any(|queue| !queue.is_empty()) {
            let chosen = choices.next().unwrap();
            let chosen = (chosen..chosen + 3).map(|index| index % 3).find(|index| !by_stream[*index].is_empty());
            if let Some(event) = chosen.and_then(|index| by_stream[index].pop()) {
                replay.apply(&event);
            }
        }
        prop_assert_eq!(replay.map(), program.simulator.map());
    }

    /// Any events at all, in any order: nothing panics, the map stays sound, and the totals are
    /// the map's.
    #[test]
    fn nonsense_is_survived(events in prop::collection::vec(any_event(), 0..200)) {
        let mut replay = Replay::new(Settings::default());
        for event in &events {
            replay.apply(event);
        }
        let map = replay.map();
        prop_assert_eq!(map.check(), Ok(()));
        let total = MapMeasures::of(&map, &Settings::default()).total();
        prop_assert_eq!(total.reserved, replay.totals(0).reserved);
        prop_assert_eq!(total.active, replay.totals(0).active);
        prop_assert_eq!(total.allocated, replay.totals(0).allocated);

        let start = Start::find(&events, &map, &Settings::default());
        prop_assert_eq!(start.map.check(), Ok(()));
        for text in ["", "expandable_segments:True", "max_split_size_mb:20"] {
            let scenario = Scenario {
                device: 0,
                events: &events,
                start: Some(&start.map),
                recorded: Settings::default(),
                settings: Settings::parse(text).settings,
                card: Card { capacity: Some(100 * MIB), others: MIB },
            };
            let rerun = scenario.run().unwrap();
            prop_assert_eq!(rerun.map.check(), Ok(()));
        }
    }
}

type Contents = Vec<(PoolKey, bool, Vec<(u64, Option<u64>, BlockState)>)>;

fn without_addresses(map: &AddressMap) -> Contents {
    let mut contents: Contents = map
        .segments
        .iter()
        .map(|segment| {
            let blocks = segment.blocks.iter();
            let blocks = blocks.map(|block| (block.bytes, block.requested, block.state));
            (segment.pool.clone(), segment.expandable, blocks.collect())
        })
        .collect();
    contents.sort_by_key(|(pool, expandable, blocks)| {
        let blocks: Vec<_> = blocks.iter().map(|block| (block.0, block.1)).collect();
        (pool.clone(), *expandable, blocks)
    });
    contents
}

fn step_is_flush(step: &Step) -> bool {
    matches!(step, Step::EmptyCache)
}

/// Of the large pool without expandable segments: sizes in steps of 2 MiB, which leave no rest of
/// 1 MiB or less.
fn without_rest(step: Step, expandable: bool) -> Step {
    match step {
        Step::Alloc { bytes, stream } if bytes > MIB && !expandable => Step::Alloc {
            bytes: bytes.next_multiple_of(2 * MIB),
            stream,
        },
        step => step,
    }
}

fn any_event() -> impl Strategy<Value = TraceEvent> {
    let action = prop_oneof![
        4 => Just(Action::Alloc),
        3 => Just(Action::FreeRequested),
        3 => Just(Action::FreeCompleted),
        2 => Just(Action::SegmentAlloc),
        1 => Just(Action::SegmentFree),
        2 => Just(Action::SegmentMap),
        1 => Just(Action::SegmentUnmap),
        1 => Just(Action::Oom { device_free: 1 }),
    ];
    let address = prop_oneof![
        8 => (0..60u64).prop_map(|step| step * MIB),
        1 => any::<u64>(),
    ];
    let bytes = prop_oneof![
        8 => (0..24u64).prop_map(|step| step * MIB),
        1 => Just(20 * MIB),
        1 => any::<u64>(),
    ];
    (action, address, bytes, 0..2i64).prop_map(|(action, address, bytes, stream)| TraceEvent {
        action,
        device: 0,
        address,
        bytes,
        stream,
        private: None,
        time_ns: None,
        tag: None,
    })
}

/// The pools of two devices and of private pools are rows of their own.
#[test]
fn rows_add_up_over_devices() {
    let mut map = AddressMap::default();
    for device in [0, 1] {
        let card = Card::default();
        let mut simulator = Simulator::new(device, Settings::default(), card);
        for step in 1..20 {
            let request = Request {
                private: (step % 3 == 0).then_some((0, step)),
                ..Request::new(step * MIB / 3, step as i64 % 2)
            };
            simulator.alloc(request).unwrap();
        }
        map.segments.extend(simulator.map().segments);
    }
    let measures = MapMeasures::of(&map, &Settings::default());
    assert_eq!(measures.devices(), [0, 1]);
    let mut sum = measures.device(0);
    sum += measures.device(1);
    assert_eq!(sum, measures.total());
    let private = |pool: &&PoolKey| pool.private.is_some();
    assert_eq!(measures.pools.keys().filter(private).count(), 12);
}
