//! What an allocator holds at one moment, as rows: its totals, and the address map with the measures
//! that the model crate defines.
//!
//! What the books cannot know stays unknown. A block that is freed while another stream still uses
//! it (`record_stream`) is reported as taken back, so `active_bytes` is never filled. Of a process
//! whose allocator had blocks before anybody looked, or whose events were lost, the map is of what
//! was seen, and the figures that need all of it are left out.

use std::collections::BTreeMap;
use std::sync::Arc;

use vramscope_model::map::{
    AddressMap, Block as MapBlock, BlockState, MapMeasures, Measures, PoolKey, PoolSize,
    Segment as MapSegment,
};
use vramscope_model::settings::Settings;

use super::super::change::What;
use super::heap::{Heap, HeapChange, Segment, Totals};
use crate::host::clock::WallClock;
use crate::ledger::{CardOf, Ledger, Process};
use crate::probes::hooks::MemoryKind;
use crate::spool::rows::{AllocatorSampleRow, BlockRow, SampleOf, SegmentRow};

/// Keeps hashes inside the positive half of a BIGINT.
const MASK_63: u64 = (1 << 63) - 1;

/// Why a sample is taken: `allocator_samples.reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    Window,
    Oom,
    End,
}

impl Reason {
    const fn name(self) -> &'static str {
        match self {
            Reason::Window => "window",
            Reason::Oom => "oom",
            Reason::End => "end",
        }
    }
}

/// A moment to sample.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    pub ts_ns: i64,
    pub reason: Reason,
    /// At an OOM: its device, what was asked for, and the card's free bytes.
    pub oom: Option<(Option<i32>, i64, Option<i64>)>,
    /// Blocks that the map may have; beyond it the sample has no map.
    pub blocks: usize,
}

/// Rows of one moment.
#[derive(Debug, Default)]
pub struct Sampled {
    pub samples: Vec<AllocatorSampleRow>,
    pub segments: Vec<SegmentRow>,
    /// Blocks in the map, held ones and gaps.
    pub blocks: usize,
    /// The map was left out: it would have had more blocks than it may.
    pub is_cut: bool,
}

impl Ledger {
    /// What a process's allocator holds now; nothing if it has none.
    pub fn sample(
        &self,
        pid: u32,
        moment: Moment,
        clock: &WallClock,
        card: &CardOf<'_>,
    ) -> Sampled {
        let Some((process, heap)) = self
            .processes
            .get(&pid)
            .and_then(|process| Some((process, process.heap.as_ref()?)))
        else {
            return Sampled::default();
        };
        let of = |device: Option<i32>| SampleOf {
            ts_ns: moment.ts_ns,
            process_id: process.process_id,
            pid,
            gpu_uuid: card(process, device),
            device,
            framework: "pytorch",
            source: "usdt",
            reason: moment.reason.name(),
            snapshot_id: snapshot_id(process, moment),
        };
        let settings = process.program.allocator_settings.as_deref();
        let model = settings.map_or_else(Settings::default, |text| Settings::parse(text).settings);
        let mut sampled = Sampled::default();
        // There is a gap more than blocks in a segment at most.
        let segments = heap.segments();
        let most = 2 * heap.blocks().len() + segments.len();
        sampled.is_cut = most > moment.blocks;
        let (measures, misfits) = if sampled.is_cut {
            (BTreeMap::new(), 0)
        } else {
            map_rows(heap, &segments, &model, clock, &of, &mut sampled)
        };
        for (device, totals) in heap.devices() {
            let is_whole = totals.is_whole() && misfits == 0 && !sampled.is_cut;
            let measured = measures.get(&device).copied().unwrap_or_default();
            let oom = moment.oom.filter(|(on, ..)| *on == Some(device));
            let is_lossy = totals.strayed || misfits > 0;
            let row = sample_row(
                of(Some(device)),
                totals,
                measured,
                (is_whole, is_lossy),
                oom,
                segments_on(&segments, device),
            );
            sampled.samples.push(AllocatorSampleRow {
                settings: settings.map(str::to_string),
                ..row
            });
        }
        sampled
    }
}

impl Ledger {
    /// The last state of a process was sampled: what is left of it is on its way out.
    pub fn sampled_last(&mut self, pid: u32) {
        self.commit(pid, What::Heap(HeapChange::Sampled));
    }
}

fn segments_on(segments: &[Segment], device: i32) -> i64 {
    let on = |segment: &&Segment| segment.used.is_some_and(|used| used.device == Some(device));
    segments.iter().filter(on).count() as i64
}

/// Rows of one moment share it.
fn snapshot_id(process: &Process, moment: Moment) -> i64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(&process.process_id.to_le_bytes());
    hash.update(&moment.ts_ns.to_le_bytes());
    hash.update(moment.reason.name().as_bytes());
    (hash.digest() & MASK_63) as i64
}

fn sample_row(
    of: SampleOf,
    totals: &Totals,
    measured: Measures,
    (is_whole, is_lossy): (bool, bool),
    oom: Option<(Option<i32>, i64, Option<i64>)>,
    segments: i64,
) -> AllocatorSampleRow {
    let long = |value: Option<u64>| value.map(|value| value as i64);
    let of_map = |value: u64| is_whole.then_some(value as i64);
    let knows_requests = totals.is_whole() && totals.requested_unknown == 0;
    AllocatorSampleRow {
        of,
        allocated_bytes: long(totals.allocated()),
        reserved_bytes: long(totals.reserved()),
        active_bytes: None,
        requested_bytes: knows_requests.then_some(totals.requested_bytes as i64),
        peak_allocated_bytes: Some(totals.peak_allocated as i64),
        peak_reserved_bytes: Some(totals.peak_reserved as i64),
        retries: Some(totals.retries as i64),
        ooms: Some(totals.ooms as i64),
        largest_free_block_bytes: of_map(measured.largest_free_block),
        releasable_bytes: of_map(measured.releasable),
        stranded_bytes: of_map(measured.stranded),
        segment_count: totals.is_whole().then_some(segments),
        block_count: totals.is_whole().then_some(totals.blocks as i64),
        device_free_bytes: oom.and_then(|(_, _, free)| free),
        tried_bytes: oom.map(|(_, tried, _)| tried),
        lossy: is_lossy,
        settings: None,
    }
}

/// The rows of the map; gives measures by device, and how many blocks fit into no segment.
fn map_rows(
    heap: &Heap,
    segments: &[Segment],
    settings: &Settings,
    clock: &WallClock,
    of: &dyn Fn(Option<i32>) -> SampleOf,
    sampled: &mut Sampled,
) -> (BTreeMap<i32, Measures>, usize) {
    let mapped = segments
        .iter()
        .enumerate()
        .filter_map(|(index, segment)| map_segment(index, segment))
        .collect();
    let live = heap.blocks().iter().filter_map(|(address, block)| {
        let live = MapBlock {
            address: *address,
            bytes: block.bytes,
            requested: block.requested(),
            state: BlockState::Allocated,
            tag: Some(*address),
        };
        Some((block.device()?, live))
    });
    let built = AddressMap::build(mapped, live);
    let mut measures: BTreeMap<i32, Measures> = BTreeMap::new();
    let mut ids: BTreeMap<i32, SampleOf> = BTreeMap::new();
    for segment in built.map.segments {
        let device = segment.pool.device;
        let one = AddressMap {
            segments: vec![segment],
        };
        let measured = MapMeasures::of(&one, settings).total();
        *measures.entry(device).or_default() += measured;
        let of = ids.entry(device).or_insert_with(|| of(Some(device)));
        for segment in one.segments {
            let source = segment.tag.and_then(|tag| segments.get(tag as usize));
            let Some(source) = source else { continue };
            sampled.blocks += segment.blocks.len();
            sampled
                .segments
                .push(segment_row(of, source, &segment, measured, heap, clock));
        }
    }
    (measures, built.problems.len())
}

/// The segment of an unknown device is in no map.
fn map_segment(index: usize, segment: &Segment) -> Option<MapSegment> {
    let used = segment.used?;
    Some(MapSegment {
        pool: PoolKey {
            device: used.device?,
            private: None,
            size: if used.is_small {
                PoolSize::Small
            } else {
                PoolSize::Large
            },
            stream: used.stream.unwrap_or(i64::MIN),
        },
        address: segment.address,
        bytes: segment.bytes,
        expandable: segment.is_expandable,
        blocks: Vec::new(),
        tag: Some(index as u64),
    })
}

fn segment_row(
    of: &SampleOf,
    source: &Segment,
    segment: &MapSegment,
    measured: Measures,
    heap: &Heap,
    clock: &WallClock,
) -> SegmentRow {
    let kind = if source.is_expandable {
        MemoryKind::VmmPhysical
    } else {
        MemoryKind::Device
    };
    let wall = |ns: u64| (ns != 0).then(|| clock.from_monotonic(ns));
    SegmentRow {
        of: SampleOf {
            gpu_uuid: of.gpu_uuid.as_ref().map(Arc::clone),
            ..of.clone()
        },
        memory_kind: kind.name(),
        // Of a private pool no call tells.
        pool: None,
        segment_type: Some(segment.pool.size.name()),
        stream: source.used.and_then(|used| used.stream),
        expandable: source.is_expandable,
        address: segment.address as i64,
        bytes: segment.bytes as i64,
        allocated_bytes: measured.allocated as i64,
        active_bytes: None,
        requested_bytes: measured.requested.map(|requested| requested as i64),
        largest_free_block_bytes: measured.largest_free_block as i64,
        releasable_bytes: measured.releasable as i64,
        stranded_bytes: measured.stranded as i64,
        stack_id: source.stack_id,
        allocated_ts_ns: wall(source.effect_ns),
        blocks: segment
            .blocks
            .iter()
            .map(|block| {
                let live = block.tag.and_then(|address| heap.blocks().get(&address));
                BlockRow {
                    address: block.address as i64,
                    bytes: block.bytes as i64,
                    requested_bytes: block.requested.map(|requested| requested as i64),
                    state: block.state.name(),
                    stack_id: live.and_then(|live| live.stack_id()),
                    allocated_ts_ns: live.and_then(|live| wall(live.effect_ns)),
                    alloc_seq: live.map(|live| live.seq as i64),
                }
            })
            .collect(),
    }
}
