//! The final address map: rows of `segments`, and of `allocator_samples`, one a memory.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use vramscope_model::map::{AddressMap, BlockState, MapMeasures, Measures};
use vramscope_snapshot::{Memory, Segment, StackId};
use vramscope_wire::{Table, schema};
use xxhash_rust::xxh3::xxh3_64;

use super::big;
use super::columns::{self, Origin};
use super::events::{OfTrace, Traced};
use super::source::positive;
use super::survey::Survey;

/// The map with what the rows say of it.
pub(super) struct Maps {
    /// When the snapshot was taken: its last entry's time, else the file's.
    pub ts_ns: i64,
    pub memories: BTreeMap<Memory, OfMap>,
    segments: Vec<SegmentRow>,
}

/// The sum over one memory.
pub(super) struct OfMap {
    pub measures: Measures,
    pub blocks: u64,
    /// Over the trace; `None` without one.
    pub peak_allocated: Option<u64>,
    pub peak_reserved: Option<u64>,
    /// Blocks that replaying the trace leads to otherwise; `None` without a trace.
    pub differences: Option<u64>,
    snapshot_id: i64,
}

struct SegmentRow {
    memory: Memory,
    snapshot_id: i64,
    pool: String,
    size: Option<&'static str>,
    stream: i64,
    expandable: bool,
    address: u64,
    measures: Measures,
    stack: Option<i64>,
    ts_ns: Option<i64>,
    blocks: Vec<BlockRow>,
}

struct BlockRow {
    address: u64,
    bytes: u64,
    requested: Option<u64>,
    state: &'static str,
    stack: Option<i64>,
    ts_ns: Option<i64>,
    seq: Option<i64>,
}

pub(super) fn rows(
    survey: &Survey,
    traced: &Traced,
    origin: &Origin,
    mut stack_id: impl FnMut(Option<StackId>) -> Option<i64>,
) -> Maps {
    let nothing = OfTrace::default();
    let mut maps = Maps {
        ts_ns: survey
            .last_us
            .and_then(|us| us.checked_mul(1000))
            .unwrap_or(origin.modified_ns),
        memories: BTreeMap::new(),
        segments: Vec::with_capacity(survey.segments.len()),
    };
    for memory in survey.memories.keys() {
        let of = OfMap {
            measures: Measures::default(),
            blocks: 0,
            peak_allocated: None,
            peak_reserved: None,
            differences: None,
            snapshot_id: snapshot_id(origin, *memory),
        };
        maps.memories.insert(*memory, of);
    }
    for segment in &survey.segments {
        let trace = traced.memories.get(&segment.memory).unwrap_or(&nothing);
        let row = segment_row(survey, segment, trace, origin, &mut stack_id);
        // Every memory with a segment has an entry.
        if let Some(of) = maps.memories.get_mut(&segment.memory) {
            of.measures += row.measures;
            let is_held = |block: &&BlockRow| block.state == BlockState::Allocated.name();
            of.blocks += row.blocks.iter().filter(is_held).count() as u64;
        }
        maps.segments.push(row);
    }
    for (memory, of) in &mut maps.memories {
        let has_trace = survey
            .memories
            .get(memory)
            .is_some_and(|m| m.total_events > 0);
        let Some(trace) = traced.memories.get(memory).filter(|_| has_trace) else {
            continue;
        };
        if let Some(replayed) = &trace.replayed {
            of.peak_allocated = Some(replayed.peak_allocated.max(of.measures.allocated));
            of.peak_reserved = Some(replayed.peak_reserved.max(of.measures.reserved));
            of.differences = Some(replayed.differences);
        }
    }
    maps
}

fn snapshot_id(origin: &Origin, memory: Memory) -> i64 {
    let mut key = origin.process_id.to_le_bytes().to_vec();
    key.extend(memory.device().to_le_bytes());
    positive(xxh3_64(&key))
}

fn segment_row(
    survey: &Survey,
    segment: &Segment,
    trace: &OfTrace,
    origin: &Origin,
    stack_id: &mut impl FnMut(Option<StackId>) -> Option<i64>,
) -> SegmentRow {
    let map = AddressMap {
        segments: vec![segment.to_map()],
    };
    let blocks = segment.blocks.iter().map(|block| {
        let at = trace.blocks.get(&block.address);
        let at = at.filter(|_| block.state != BlockState::Inactive);
        BlockRow {
            address: block.address,
            bytes: block.bytes,
            requested: block.requested,
            state: block.state.name(),
            // Of a gap it is the stack of the last owner.
            stack: match block.state {
                BlockState::Inactive => None,
                _ => stack_id(block.stack),
            },
            ts_ns: at.map(|at| at.ts_ns),
            seq: at.map(|at| at.seq),
        }
    });
    let blocks = blocks.collect();
    SegmentRow {
        memory: segment.memory,
        snapshot_id: snapshot_id(origin, segment.memory),
        pool: match segment.private_pool {
            None => "default".to_string(),
            Some((first, second)) => format!("({first}, {second})"),
        },
        size: segment.size.map(|size| size.name()),
        stream: segment.stream,
        expandable: segment.expandable,
        address: segment.address,
        measures: MapMeasures::of(&map, &survey.settings).total(),
        stack: stack_id(segment.stack),
        ts_ns: trace.segments.get(&segment.address).copied(),
        blocks,
    }
}

fn device(memory: Memory) -> Option<i32> {
    match memory {
        Memory::Device(device) => Some(device),
        Memory::Host => None,
    }
}

impl Maps {
    /// The columns that say of whom and when.
    fn key(
        &self,
        origin: &Origin,
        rows: &[(Memory, i64)],
    ) -> Vec<(&'static str, arrow::array::ArrayRef)> {
        let count = rows.len();
        let same = |text| columns::texts(std::iter::repeat_n(Some(text), count));
        let time = || std::iter::repeat_n(Some(self.ts_ns), count);
        let process = std::iter::repeat_n(Some(origin.process_id), count);
        vec![
            ("ts", columns::times(time())),
            ("ts_ns", columns::longs(time())),
            ("process_id", columns::longs(process)),
            ("pid", columns::ints(std::iter::repeat_n(Some(0), count))),
            (
                "device",
                columns::ints(rows.iter().map(|(m, _)| device(*m))),
            ),
            ("framework", same("pytorch")),
            ("source", same("import")),
            ("reason", same("import")),
            (
                "snapshot_id",
                columns::longs(rows.iter().map(|(_, id)| Some(*id))),
            ),
        ]
    }

    pub fn segments(&self, origin: &Origin) -> Result<RecordBatch, ArrowError> {
        use columns::{flags, longs, texts};
        let rows = &self.segments;
        let number = |column: fn(&SegmentRow) -> Option<u64>| {
            longs(rows.iter().map(|row| column(row).map(big)))
        };
        let blocks: Vec<&BlockRow> = rows.iter().flat_map(|row| &row.blocks).collect();
        let of_block =
            |column: fn(&BlockRow) -> Option<i64>| longs(blocks.iter().map(|block| column(block)));
        let list = columns::list(
            schema::block_fields(),
            rows.iter().map(|row| row.blocks.len()).collect(),
            vec![
                of_block(|b| Some(big(b.address))),
                of_block(|b| Some(big(b.bytes))),
                of_block(|b| b.requested.map(big)),
                texts(blocks.iter().map(|b| Some(b.state))),
                of_block(|b| b.stack),
                of_block(|b| b.ts_ns),
                of_block(|b| b.seq),
            ],
        )?;
        let kind = |row: &SegmentRow| match (row.memory, row.expandable) {
            (Memory::Host, _) => "pinned_host",
            (Memory::Device(_), true) => "vmm_physical",
            (Memory::Device(_), false) => "device",
        };
        let keys: Vec<_> = rows
            .iter()
            .map(|row| (row.memory, row.snapshot_id))
            .collect();
        let mut all = self.key(origin, &keys);
        all.extend([
            ("memory_kind", texts(rows.iter().map(|r| Some(kind(r))))),
            ("pool", texts(rows.iter().map(|r| Some(&r.pool)))),
            ("segment_type", texts(rows.iter().map(|r| r.size))),
            ("stream", longs(rows.iter().map(|r| Some(r.stream)))),
            ("expandable", flags(rows.iter().map(|r| r.expandable))),
            ("address", number(|r| Some(r.address))),
            ("bytes", number(|r| Some(r.measures.reserved))),
            ("allocated_bytes", number(|r| Some(r.measures.allocated))),
            ("active_bytes", number(|r| Some(r.measures.active))),
            ("requested_bytes", number(|r| requested(&r.blocks))),
            (
                "largest_free_block_bytes",
                number(|r| Some(r.measures.largest_free_block)),
            ),
            ("releasable_bytes", number(|r| Some(r.measures.releasable))),
            ("stranded_bytes", number(|r| Some(r.measures.stranded))),
            ("stack_id", longs(rows.iter().map(|r| r.stack))),
            ("allocated_ts_ns", longs(rows.iter().map(|r| r.ts_ns))),
            ("blocks", list),
        ]);
        columns::build(Table::Segments, rows.len(), origin, all)
    }

    pub fn samples(&self, origin: &Origin, survey: &Survey) -> Result<RecordBatch, ArrowError> {
        use columns::{flags, longs, texts};
        let rows: Vec<(&Memory, &OfMap)> = self.memories.iter().collect();
        let number = |column: fn(&OfMap) -> Option<u64>| {
            longs(rows.iter().map(|(_, of)| column(of).map(big)))
        };
        let of_survey = |memory: &Memory| &survey.memories[memory];
        let requested = rows.iter().map(|(memory, _)| {
            let own = self.segments.iter().filter(|row| row.memory == **memory);
            let sum: Option<u64> = own.map(|row| self::requested(&row.blocks)).sum();
            sum.map(big)
        });
        let ooms = rows.iter().map(|(memory, _)| {
            let of = of_survey(memory);
            // Of a trace that begins in mid-life there may have been more.
            of.is_whole().then(|| big(of.ooms()))
        });
        let is_lossy = |(memory, of): &(&Memory, &OfMap)| {
            of_survey(memory).contradictions > 0 || of.differences.is_some_and(|count| count > 0)
        };
        let lossy = rows.iter().map(is_lossy);
        let settings = rows.iter().map(|_| survey.settings_text.as_deref());
        let keys: Vec<_> = rows.iter().map(|(m, of)| (**m, of.snapshot_id)).collect();
        let mut all = self.key(origin, &keys);
        all.extend([
            ("allocated_bytes", number(|r| Some(r.measures.allocated))),
            ("reserved_bytes", number(|r| Some(r.measures.reserved))),
            ("active_bytes", number(|r| Some(r.measures.active))),
            ("requested_bytes", longs(requested)),
            ("peak_allocated_bytes", number(|r| r.peak_allocated)),
            ("peak_reserved_bytes", number(|r| r.peak_reserved)),
            ("ooms", longs(ooms)),
            (
                "largest_free_block_bytes",
                number(|r| Some(r.measures.largest_free_block)),
            ),
            ("releasable_bytes", number(|r| Some(r.measures.releasable))),
            ("stranded_bytes", number(|r| Some(r.measures.stranded))),
            ("segment_count", number(|r| Some(r.measures.segments))),
            ("block_count", number(|r| Some(r.blocks))),
            ("lossy", flags(lossy)),
            ("settings", texts(settings)),
        ]);
        columns::build(Table::AllocatorSamples, rows.len(), origin, all)
    }
}

/// Asked for by the blocks that the program holds; `None` if that is not known of one of them.
fn requested(blocks: &[BlockRow]) -> Option<u64> {
    let held = blocks
        .iter()
        .filter(|block| block.state == BlockState::Allocated.name());
    held.map(|block| block.requested).sum()
}
