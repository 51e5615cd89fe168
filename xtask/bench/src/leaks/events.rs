//! Many events of many stacks, and the roll-up that an agent makes of them, as tables of the
//! product: what the question for leaks costs.
//!
//! Processes on hosts of their own live for a day. Each event is an allocation or the end of one; a
//! stack holds a queue of blocks around a mean length, and a few stacks leak besides. `stack_windows` are added up here
//! from the same events, so that both tables tell the same. With a fixed seed.

use std::collections::VecDeque;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use arrow::array::{ArrayRef, BooleanArray, Int32Array, Int64Array, StringArray};
use clap::Args;
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use vramscope_wire::{Table, parquet_file};

use super::tables::{BEGIN, batch, integers, texts, times};

/// Options of `leak-events`.
#[derive(Debug, Args)]
pub struct Events {
    /// Folder to write the tables to; it must not hold any
    #[arg(long)]
    into: PathBuf,
    /// Events
    #[arg(long)]
    rows: usize,
    /// Processes, each on a host of its own
    #[arg(long, default_value_t = 4)]
    hosts: usize,
    /// Call stacks of a process
    #[arg(long, default_value_t = 500)]
    stacks: usize,
}

pub const DAY_NS: i64 = 86_400_000_000_000;
pub const WINDOW_NS: i64 = 60_000_000_000;
pub const PIECE: usize = 65_536;

/// Blocks that a stack holds on average.
const HELD: usize = 40;

/// One stack in twenty-five leaks: it never frees one block of three hundred.
const LEAKING: usize = 25;

type Writer = ArrowWriter<BufWriter<File>>;

fn create(folder: &Path, table: Table, number: usize) -> Result<Writer> {
    let folder = folder.join(table.name());
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    let path = folder.join(format!("{number}.parquet"));
    let file =
        File::create_new(&path).with_context(|| format!("failed to create {}", path.display()))?;
    Ok(parquet_file::writer(table, BufWriter::new(file))?)
}

/// Writes them.
pub fn events(options: &Events) -> Result<Value> {
    if options.hosts == 0 || options.stacks < LEAKING {
        bail!("at least one host and {LEAKING} stacks are needed");
    }
    let mut windows = 0;
    let mut rows = 0;
    for number in 0..options.hosts {
        let count = options.rows / options.hosts;
        let mut host = Host::new(number, options.stacks, count);
        let mut events = create(&options.into, Table::AllocEvents, number + 1)?;
        let mut roll_up = create(&options.into, Table::StackWindows, number + 1)?;
        while host.written < count {
            let piece = host.piece(PIECE.min(count - host.written));
            rows += piece.len();
            events.write(&host.event_rows(&piece)?)?;
            let closed = std::mem::take(&mut host.closed);
            windows += closed.len();
            roll_up.write(&host.window_rows(&closed)?)?;
        }
        host.close_window();
        let closed = std::mem::take(&mut host.closed);
        windows += closed.len();
        roll_up.write(&host.window_rows(&closed)?)?;
        events.close().context("failed to end the events")?;
        roll_up.close().context("failed to end the roll-up")?;
        let mut traffic = create(&options.into, Table::Traffic, number + 1)?;
        traffic.write(&host.traffic_rows()?)?;
        traffic.close().context("failed to end the traffic")?;
    }
    Ok(json!({"events": rows, "windows": windows}))
}

/// A small generator of its own: draws take less time than writing the row.
struct Draw(u64);

impl Draw {
    /// Xorshift64* (Marsaglia 2003, Vigna 2016).
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((self.next() >> 33) as usize) % bound
    }
}

#[derive(Clone, Copy)]
struct Block {
    bytes: i64,
    born: i64,
    seq: i64,
}

#[derive(Clone, Copy, Default)]
struct Leaked {
    count: i64,
    since: Option<i64>,
}

pub struct Event {
    at: i64,
    stack: usize,
    block: Block,
    is_free: bool,
    seq: i64,
}

#[derive(Clone, Copy, Default)]
struct Window {
    alloc_bytes: i64,
    alloc_count: i64,
    free_bytes: i64,
    free_count: i64,
    peak: i64,
}

pub struct Closed {
    pub start: i64,
    stack: usize,
    window: Window,
    live_bytes: i64,
    live_count: i64,
    oldest_ns: Option<i64>,
}

/// One process on a host of its own, for a day.
pub struct Host {
    pub name: String,
    pub agent: String,
    pub card: String,
    pub process_id: i64,
    pub pid: i32,
    draw: Draw,
    written: usize,
    step: i64,
    window: i64,
    held: Vec<VecDeque<Block>>,
    leaked: Vec<Leaked>,
    live: Vec<i64>,
    open: Vec<Window>,
    closed: Vec<Closed>,
}

impl Host {
    /// One that has so many stacks and events.
    pub fn new(number: usize, stacks: usize, events: usize) -> Self {
        let name = format!("events-{number}");
        Self {
            agent: format!("agent-{name}"),
            card: format!("GPU-{name}"),
            name,
            process_id: 7_000_000_001 + number as i64,
            pid: 4000 + number as i32,
            draw: Draw(0x9e37_79b9_7f4a_7c15 ^ number as u64),
            written: 0,
            step: DAY_NS / events.max(1) as i64,
            window: 0,
            held: vec![VecDeque::new(); stacks],
            leaked: vec![Leaked::default(); stacks],
            live: vec![0; stacks],
            open: vec![Window::default(); stacks],
            closed: Vec::new(),
        }
    }

    /// The id of a stack that allocates; that of its frees is one more.
    pub fn stack_id(stack: usize) -> i64 {
        1_000_003 * (stack as i64 + 1)
    }

    fn piece(&mut self, count: usize) -> Vec<Event> {
        (0..count).map(|_| self.event()).collect()
    }

    /// The next events before a moment of the day, a piece at most.
    pub fn until(&mut self, end: i64) -> Vec<Event> {
        let mut events = Vec::new();
        while events.len() < PIECE && (self.written as i64) * self.step < end {
            events.push(self.event());
        }
        events
    }

    /// The windows that ended since the last call; the open one ends too.
    pub fn windows(&mut self) -> Vec<Closed> {
        self.close_window();
        std::mem::take(&mut self.closed)
    }

    /// Bytes and count of what lives.
    pub fn live(&self) -> (i64, i64) {
        let held = self.held.iter().map(|held| held.len() as i64).sum::<i64>();
        let leaked = self.leaked.iter().map(|leaked| leaked.count).sum::<i64>();
        (self.live.iter().sum(), held + leaked)
    }

    fn event(&mut self) -> Event {
        let at = self.written as i64 * self.step;
        if at / WINDOW_NS > self.window {
            self.close_window();
            self.window = at / WINDOW_NS;
        }
        // The square of an even draw: some stacks are busy, some hardly ever.
        let stacks = self.held.len();
        let stack = self.draw.below(stacks) * self.draw.below(stacks) / stacks;
        let leaks = stack.is_multiple_of(LEAKING) && self.draw.below(300) == 0;
        // The more it holds the more likely one goes: the length wanders around its mean.
        let frees = self.draw.below(2 * HELD) < self.held[stack].len() && !leaks;
        let seq = self.written as i64 + 1;
        self.written += 1;
        let window = &mut self.open[stack];
        let oldest = frees.then(|| self.held[stack].pop_front()).flatten();
        let (block, is_free) = match oldest {
            Some(block) => {
                window.free_bytes += block.bytes;
                window.free_count += 1;
                self.live[stack] -= block.bytes;
                (block, true)
            }
            None => {
                let block = Block {
                    bytes: 512 * (1 + self.draw.below(8192) as i64),
                    born: at,
                    seq,
                };
                window.alloc_bytes += block.bytes;
                window.alloc_count += 1;
                self.live[stack] += block.bytes;
                window.peak = window.peak.max(self.live[stack]);
                if leaks {
                    self.leaked[stack].count += 1;
                    self.leaked[stack].since.get_or_insert(at);
                } else {
                    self.held[stack].push_back(block);
                }
                (block, false)
            }
        };
        Event {
            at,
            stack,
            block,
            is_free,
            seq,
        }
    }

    fn close_window(&mut self) {
        let start = self.window * WINDOW_NS;
        for stack in 0..self.open.len() {
            let window = std::mem::take(&mut self.open[stack]);
            self.open[stack].peak = self.live[stack];
            if window.alloc_count + window.free_count == 0 {
                continue;
            }
            let leaked = self.leaked[stack];
            let oldest = self.held[stack].front().map(|block| block.born);
            let oldest = oldest.into_iter().chain(leaked.since).min();
            self.closed.push(Closed {
                start,
                stack,
                window,
                live_bytes: self.live[stack],
                live_count: self.held[stack].len() as i64 + leaked.count,
                oldest_ns: oldest.map(|born| start + WINDOW_NS - born),
            });
        }
    }

    /// What every row of a table has.
    fn common<'a>(&self, at: &[i64]) -> Vec<(&'a str, ArrayRef)> {
        let begin = BEGIN * 1_000_000_000;
        let rows = at.len();
        let same = |text: &str| texts(std::iter::repeat_n(text, rows));
        vec![
            ("ts_ns", integers(at.iter().map(|at| begin + at))),
            (
                "ts",
                times(at.iter().map(|at| (begin + at) / 1000).collect()),
            ),
            ("host", same(&self.name)),
            ("boot_id", same("boot")),
            (
                "process_id",
                integers(std::iter::repeat_n(self.process_id, rows)),
            ),
            (
                "pid",
                Arc::new(Int32Array::from(vec![self.pid; rows])) as ArrayRef,
            ),
            ("agent_id", same(&self.agent)),
            ("batch_seq", integers(std::iter::repeat_n(1, rows))),
        ]
    }

    /// Where the memory is.
    fn place<'a>(&self, rows: usize) -> Vec<(&'a str, ArrayRef)> {
        let same = |text: &str| texts(std::iter::repeat_n(text, rows));
        vec![
            ("gpu_uuid", same(&self.card)),
            (
                "device",
                Arc::new(Int32Array::from(vec![0; rows])) as ArrayRef,
            ),
            ("layer", same("driver")),
            ("memory_kind", same("device")),
        ]
    }

    /// As rows of `alloc_events`.
    pub fn event_rows(&self, events: &[Event]) -> Result<arrow::array::RecordBatch> {
        let rows = events.len();
        let at: Vec<i64> = events.iter().map(|event| event.at).collect();
        let same = |text: &str| texts(std::iter::repeat_n(text, rows));
        let number = |of: fn(&Event) -> i64| integers(events.iter().map(of));
        let of_free = |of: fn(&Event) -> i64| {
            let values = events.iter().map(|event| event.is_free.then(|| of(event)));
            Arc::new(Int64Array::from_iter(values)) as ArrayRef
        };
        let either = |free: &'static str, alloc: &'static str| {
            let values = events
                .iter()
                .map(|event| if event.is_free { free } else { alloc });
            Arc::new(StringArray::from_iter_values(values)) as ArrayRef
        };
        let begin = BEGIN * 1_000_000_000;
        let mut columns = self.common(&at);
        columns.extend(self.place(rows));
        columns.extend([
            (
                "ts_enter",
                times(at.iter().map(|at| (begin + at) / 1000 - 3).collect()),
            ),
            (
                "tid",
                Arc::new(Int32Array::from(vec![self.pid; rows])) as ArrayRef,
            ),
            ("source", same("uprobe")),
            ("api", either("cuMemFree_v2", "cuMemAlloc_v2")),
            ("op", either("free", "alloc")),
            (
                "address",
                number(|event| 0x7f00_0000_0000 + event.block.seq * 0x40_0000),
            ),
            ("bytes", number(|event| event.block.bytes)),
            ("requested_bytes", number(|event| event.block.bytes)),
            (
                "result",
                Arc::new(Int32Array::from(vec![0; rows])) as ArrayRef,
            ),
            ("duration_ns", number(|event| 1000 + event.seq * 37 % 3000)),
            // A free is called from a stack of its own.
            (
                "stack_id",
                number(|event| Host::stack_id(event.stack) + i64::from(event.is_free)),
            ),
            ("stack_quality", same("full")),
            (
                "counted",
                Arc::new(BooleanArray::from(vec![true; rows])) as ArrayRef,
            ),
            (
                "implicit",
                Arc::new(BooleanArray::from(vec![false; rows])) as ArrayRef,
            ),
            ("alloc_seq", of_free(|event| event.block.seq)),
            (
                "alloc_stack_id",
                of_free(|event| Host::stack_id(event.stack)),
            ),
            ("lifetime_ns", of_free(|event| event.at - event.block.born)),
            ("seq", number(|event| event.seq)),
        ]);
        batch(Table::AllocEvents, rows, columns)
    }

    /// As rows of `stack_windows`.
    pub fn window_rows(&self, closed: &[Closed]) -> Result<arrow::array::RecordBatch> {
        let rows = closed.len();
        let at: Vec<i64> = closed.iter().map(|row| row.start).collect();
        let number = |of: fn(&Closed) -> i64| integers(closed.iter().map(of));
        let ages = closed.iter().map(|row| row.oldest_ns);
        let begin = BEGIN * 1_000_000_000;
        let ends = at.iter().map(|at| (begin + at + WINDOW_NS) / 1000);
        let mut columns = self.common(&at);
        columns.extend(self.place(rows));
        columns.extend([
            ("window_end", times(ends.collect())),
            ("stack_id", number(|row| Host::stack_id(row.stack))),
            ("alloc_bytes", number(|row| row.window.alloc_bytes)),
            ("alloc_count", number(|row| row.window.alloc_count)),
            ("free_bytes", number(|row| row.window.free_bytes)),
            ("free_count", number(|row| row.window.free_count)),
            ("live_bytes", number(|row| row.live_bytes)),
            ("live_count", number(|row| row.live_count)),
            (
                "oldest_live_age_ns",
                Arc::new(Int64Array::from_iter(ages)) as ArrayRef,
            ),
            ("peak_live_bytes", number(|row| row.window.peak)),
            (
                "lossy",
                Arc::new(BooleanArray::from(vec![false; rows])) as ArrayRef,
            ),
        ]);
        batch(Table::StackWindows, rows, columns)
    }

    /// Three requests a second, a sample a minute.
    fn traffic_rows(&self) -> Result<arrow::array::RecordBatch> {
        let at: Vec<i64> = (1..=1440).map(|minute| minute * WINDOW_NS).collect();
        let rows = at.len();
        let number = |of: fn(i64) -> i64| integers((1..=rows as i64).map(of));
        let mut columns = self.common(&at);
        columns.extend([
            ("engine", texts(std::iter::repeat_n("vllm", rows))),
            ("running", number(|minute| 8 + minute * 13 % 9)),
            ("waiting", number(|_| 0)),
            ("completed_total", number(|minute| minute * 180)),
            ("prompt_tokens_total", number(|minute| minute * 180_000)),
            ("generation_tokens_total", number(|minute| minute * 36_000)),
            ("kv_page_tokens", number(|_| 16)),
            ("kv_total_pages", number(|_| 10_000)),
            ("kv_used_pages", number(|minute| 2000 + minute * 7 % 500)),
        ]);
        batch(Table::Traffic, rows, columns)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use arrow::array::AsArray;
    use arrow::datatypes::Int64Type;

    use super::*;

    /// The last row of every stack in the roll-up is the sum over its events.
    #[test]
    fn the_roll_up_is_the_sum_of_the_events() {
        let folder = tempfile::tempdir().unwrap();
        let options = Events {
            into: folder.path().to_path_buf(),
            rows: 100_000,
            hosts: 2,
            stacks: 100,
        };
        let written = events(&options).unwrap();
        assert_eq!(written["events"], 100_000);
        for number in 1..=2 {
            let read = |table: Table| {
                let path = folder.path().join(table.name());
                let file = File::open(path.join(format!("{number}.parquet"))).unwrap();
                parquet_file::decode(table, file).unwrap()
            };
            let mut sums: BTreeMap<i64, i64> = BTreeMap::new();
            for batch in read(Table::AllocEvents) {
                let column = |name: &str| {
                    let column = batch.column_by_name(name).unwrap();
                    column.as_primitive::<Int64Type>().clone()
                };
                let (stacks, of_free) = (column("stack_id"), column("alloc_stack_id"));
                let bytes = column("bytes");
                let ops = batch.column_by_name("op").unwrap().as_string::<i32>();
                for row in 0..batch.num_rows() {
                    match ops.value(row) {
                        "alloc" => *sums.entry(stacks.value(row)).or_default() += bytes.value(row),
                        _ => *sums.entry(of_free.value(row)).or_default() -= bytes.value(row),
                    }
                }
            }
            let mut last = BTreeMap::new();
            for batch in read(Table::StackWindows) {
                let column = |name: &str| {
                    let column = batch.column_by_name(name).unwrap();
                    column.as_primitive::<Int64Type>().clone()
                };
                let (stacks, live) = (column("stack_id"), column("live_bytes"));
                for row in 0..batch.num_rows() {
                    last.insert(stacks.value(row), live.value(row));
                }
            }
            assert_eq!(sums, last);
        }
    }
}
