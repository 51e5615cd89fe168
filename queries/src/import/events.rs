//! The second pass: a row of `alloc_events` for each trace entry.

use std::collections::{BTreeMap, HashMap, HashSet};

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use vramscope_model::map::{AddressMap, Block, BlockState, Segment};
use vramscope_model::rules;
use vramscope_model::settings::Settings;
use vramscope_model::trace::{Replay, Totals};
use vramscope_snapshot::{Action, Event, Memory};
use vramscope_wire::Table;

use super::columns::{self, Origin};
use super::output::{Staged, Writer};
use super::spans::Spans;
use super::survey::{OfMemory, Survey};
use super::{Error, big};

/// Rows that are made into columns at once: what fits the processor's cache.
const BATCH: usize = 2048;

/// No block is larger: device addresses have 57 bits.
const LARGEST: u64 = 1 << 57;

/// What the trace says beyond its rows.
#[derive(Default)]
pub(super) struct Traced {
    pub memories: BTreeMap<Memory, OfTrace>,
}

/// What the trace of one memory says.
#[derive(Default)]
pub(super) struct OfTrace {
    /// `None` of host memory, whose allocator has other rules.
    pub replayed: Option<Replayed>,
    /// Entries that allocated the blocks of the final map, by address.
    pub blocks: HashMap<u64, Allocated>,
    /// When the segments of the final map were taken, by address.
    pub segments: HashMap<u64, i64>,
}

/// What replaying the trace gave.
pub(super) struct Replayed {
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    /// Blocks and gaps of the snapshot's map that the replay's does not have, and the other way
    /// round.
    pub differences: u64,
}

/// The row of an allocation.
#[derive(Clone, Copy)]
pub(super) struct Allocated {
    pub seq: i64,
    pub ts_ns: i64,
}

#[derive(Clone, Copy)]
struct Live {
    at: Allocated,
    stack: Option<i64>,
    bytes: Option<u64>,
    is_freed: bool,
}

/// Where the second pass is in one trace.
struct State<'a> {
    survey: &'a OfMemory,
    entry: u64,
    spans: Spans,
    replay: Option<Replay>,
    live: HashMap<u64, Live>,
    trace: OfTrace,
}

struct Row {
    ts_ns: i64,
    device: Option<i32>,
    stream: i64,
    api: &'static str,
    op: &'static str,
    memory_kind: &'static str,
    address: Option<u64>,
    bytes: Option<u64>,
    requested: Option<u64>,
    result: Option<i32>,
    stack: Option<i64>,
    counted: bool,
    ended: Option<(Allocated, Option<i64>)>,
    seq: i64,
    segment: Option<u64>,
    device_free: Option<u64>,
}

/// Makes rows and writes them.
pub(super) struct Rows<'a> {
    survey: &'a Survey,
    origin: &'a Origin,
    writer: Writer,
    states: BTreeMap<Memory, State<'a>>,
    rows: Vec<Row>,
    next_seq: i64,
}

impl<'a> Rows<'a> {
    pub fn new(survey: &'a Survey, origin: &'a Origin, writer: Writer) -> Self {
        let states = survey.memories.iter().map(|(memory, of)| {
            let mut spans = Spans::default();
            for segment in &of.start.segments {
                spans.add(segment.expandable, segment.address, segment.bytes);
            }
            let replay = Replay::from_map(&of.start, survey.settings.clone());
            let state = State {
                survey: of,
                entry: 0,
                spans,
                // A map that the model made is sound.
                replay: replay.ok().filter(|_| *memory != Memory::Host),
                live: HashMap::new(),
                trace: OfTrace::default(),
            };
            (*memory, state)
        });
        Self {
            survey,
            origin,
            writer,
            states: states.collect(),
            rows: Vec::with_capacity(BATCH),
            next_seq: 1,
        }
    }

    pub fn add(&mut self, event: &Event, stack: Option<i64>) -> Result<(), Error> {
        // A file that changed since the first pass; that is found out at its end.
        let Some(state) = self.states.get_mut(&event.memory) else {
            return Ok(());
        };
        let entry = state.entry;
        state.entry += 1;
        let Some(mut row) = row(event, stack) else {
            return Ok(());
        };
        row.seq = self.next_seq;
        self.next_seq += 1;
        row.ts_ns = event
            .time_us
            .and_then(|us| us.checked_mul(1000))
            .unwrap_or(self.origin.modified_ns);
        let bytes = state.replay(event);
        let bytes = bytes
            .filter(|bytes| *bytes >= event.bytes)
            .or_else(|| rounded(event, &self.survey.settings));
        match event.action {
            Action::Alloc => state.alloc(event, entry, &mut row, bytes),
            Action::FreeRequested | Action::FreeCompleted => state.free(event, &mut row, bytes),
            _ => state.segment(event, &mut row),
        }
        self.rows.push(row);
        if self.rows.len() == BATCH {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        let batch = batch(&self.rows, self.origin)
            .map_err(|error| Error::write(std::path::Path::new("alloc_events"), error))?;
        self.rows.clear();
        self.writer.write(&batch)
    }

    pub fn finish(mut self, staged: &mut Staged<'_>) -> Result<Traced, Error> {
        if !self.rows.is_empty() {
            self.flush()?;
        }
        staged.close(self.writer)?;
        let memories = self.states.into_iter();
        Ok(Traced {
            memories: memories
                .map(|(memory, state)| (memory, state.finish(memory, self.survey)))
                .collect(),
        })
    }
}

impl State<'_> {
    /// Takes an entry into account; how many bytes it made active, or took from what the program
    /// holds or from what was active.
    fn replay(&mut self, event: &Event) -> Option<u64> {
        let replay = self.replay.as_mut()?;
        let event = event.to_trace()?;
        let before = replay.totals(event.device);
        replay.apply(&event);
        let after = replay.totals(event.device);
        let moved = |part: fn(&Totals) -> u64| part(&before).abs_diff(part(&after));
        // Of a completion what is held does not change, of all else it does.
        let bytes = match moved(|totals| totals.allocated) {
            0 => moved(|totals| totals.active),
            bytes => bytes,
        };
        Some(bytes).filter(|bytes| *bytes > 0)
    }

    fn alloc(&mut self, event: &Event, entry: u64, row: &mut Row, bytes: Option<u64>) {
        let Some(address) = event.address else { return };
        let last = self.survey.final_blocks.get(&address);
        let lives_on = last.filter(|block| block.entry == Some(entry));
        let at = Allocated {
            seq: row.seq,
            ts_ns: row.ts_ns,
        };
        row.bytes = match lives_on {
            Some(block) => {
                self.trace.blocks.insert(address, at);
                Some(block.bytes)
            }
            None => bytes,
        };
        row.segment = self.spans.segment_of(address);
        let live = Live {
            at,
            stack: row.stack,
            bytes: row.bytes,
            is_freed: false,
        };
        self.live.insert(address, live);
    }

    fn free(&mut self, event: &Event, row: &mut Row, bytes: Option<u64>) {
        let Some(address) = event.address else { return };
        let is_last = event.action == Action::FreeCompleted;
        let live = if is_last {
            self.live.remove(&address)
        } else {
            self.live.get(&address).copied()
        };
        row.segment = self.spans.segment_of(address);
        row.bytes = match live {
            Some(live) => live.bytes,
            None => bytes,
        };
        if let Some(live) = live {
            row.ended = Some((live.at, live.stack));
        }
        // The first entry that ends a block counts. Of an older block a completion alone does not
        // tell whether the request was before the trace.
        row.counted = match live {
            Some(live) => !live.is_freed,
            None => !is_last,
        };
        if is_last {
            return;
        }
        if let Some(live) = self.live.get_mut(&address) {
            live.is_freed = true;
        }
    }

    fn segment(&mut self, event: &Event, row: &mut Row) {
        let Some(address) = event.address else { return };
        self.spans.apply(event.action, address, event.bytes);
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                self.trace.segments.insert(address, row.ts_ns);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                self.trace.segments.remove(&address);
            }
            _ => {}
        }
    }

    fn finish(mut self, memory: Memory, survey: &Survey) -> OfTrace {
        self.trace.replayed = self.replay.map(|replay| {
            let peaks = replay.peaks(memory.device());
            let own = survey.segments.iter().filter(|s| s.memory == memory);
            let end = AddressMap {
                segments: own.map(|segment| segment.to_map()).collect(),
            };
            Replayed {
                peak_allocated: peaks.allocated,
                peak_reserved: peaks.reserved,
                differences: differences(&end, &replay.map()),
            }
        });
        self.trace
    }
}

/// What a block has at least, of which nothing but the request is known. Pinned host memory is
/// rounded otherwise in each version.
fn rounded(event: &Event, settings: &Settings) -> Option<u64> {
    let is_known = event.memory != Memory::Host && event.bytes <= LARGEST;
    is_known.then(|| rules::round(event.bytes, settings))
}

/// Blocks and gaps of one map that the other does not have. Stacks are not compared, nor pools,
/// which a trace does not tell.
fn differences(one: &AddressMap, other: &AddressMap) -> u64 {
    let tiles = |map: &AddressMap| -> HashSet<(u64, u64, u64, BlockState, Option<u64>)> {
        let in_segment = |segment: &Segment| {
            let begin = segment.address;
            let tile = move |block: &Block| {
                (
                    begin,
                    block.address,
                    block.bytes,
                    block.state,
                    block.requested,
                )
            };
            segment.blocks.iter().map(tile).collect::<Vec<_>>()
        };
        map.segments.iter().flat_map(in_segment).collect()
    };
    tiles(one).symmetric_difference(&tiles(other)).count() as u64
}

/// The columns that an entry alone decides; `None` for one that is no row.
fn row(event: &Event, stack: Option<i64>) -> Option<Row> {
    let is_host = event.memory == Memory::Host;
    let physical = if is_host { "pinned_host" } else { "device" };
    let (op, memory_kind, counted) = match event.action {
        Action::Alloc => ("alloc", "framework_block", true),
        Action::FreeRequested => ("free", "framework_block", true),
        Action::FreeCompleted => ("free", "framework_block", false),
        Action::SegmentAlloc => ("alloc", physical, true),
        Action::SegmentFree => ("free", physical, true),
        Action::SegmentMap => ("alloc", "vmm_physical", true),
        Action::SegmentUnmap => ("free", "vmm_physical", true),
        Action::Oom => ("oom", "framework_block", false),
        Action::Snapshot | Action::Annotate | Action::Other(_) => return None,
    };
    let is_oom = event.action == Action::Oom;
    Some(Row {
        ts_ns: 0,
        device: (!is_host).then(|| event.memory.device()),
        stream: event.stream,
        api: event.action.name()?,
        op,
        memory_kind,
        address: event.address,
        bytes: Some(if is_oom { 0 } else { event.bytes }),
        requested: Some(event.bytes),
        result: (!is_oom).then_some(0),
        stack,
        counted,
        ended: None,
        seq: 0,
        segment: None,
        device_free: event.device_free,
    })
}

fn batch(rows: &[Row], origin: &Origin) -> Result<RecordBatch, ArrowError> {
    use columns::{flags, ints, longs, texts, times};
    let number = |column: fn(&Row) -> Option<u64>| longs(rows.iter().map(|r| column(r).map(big)));
    let long = |column: fn(&Row) -> Option<i64>| longs(rows.iter().map(column));
    let count = rows.len();
    let same = |text| texts(std::iter::repeat_n(Some(text), count));
    let process = std::iter::repeat_n(Some(origin.process_id), count);
    let quality = |row: &Row| row.stack.is_none().then_some("none");
    columns::build(
        Table::AllocEvents,
        count,
        origin,
        vec![
            ("ts", times(rows.iter().map(|r| Some(r.ts_ns)))),
            ("ts_ns", long(|r| Some(r.ts_ns))),
            ("process_id", longs(process)),
            ("pid", ints(std::iter::repeat_n(Some(0), count))),
            ("device", ints(rows.iter().map(|r| r.device))),
            ("stream", long(|r| Some(r.stream))),
            ("layer", same("framework")),
            ("source", same("import")),
            ("api", texts(rows.iter().map(|r| Some(r.api)))),
            ("op", texts(rows.iter().map(|r| Some(r.op)))),
            (
                "memory_kind",
                texts(rows.iter().map(|r| Some(r.memory_kind))),
            ),
            ("address", number(|r| r.address)),
            ("bytes", number(|r| r.bytes)),
            ("requested_bytes", number(|r| r.requested)),
            ("result", ints(rows.iter().map(|r| r.result))),
            ("stack_id", long(|r| r.stack)),
            ("stack_quality", texts(rows.iter().map(quality))),
            ("counted", flags(rows.iter().map(|r| r.counted))),
            ("implicit", flags(std::iter::repeat_n(false, count))),
            ("alloc_seq", long(|r| r.ended.map(|(at, _)| at.seq))),
            (
                "alloc_stack_id",
                long(|r| r.ended.and_then(|(_, stack)| stack)),
            ),
            (
                "lifetime_ns",
                long(|r| r.ended.map(|(at, _)| r.ts_ns.saturating_sub(at.ts_ns))),
            ),
            ("seq", long(|r| Some(r.seq))),
            ("segment_address", number(|r| r.segment)),
            ("device_free_bytes", number(|r| r.device_free)),
        ],
    )
}
