//! A run's rows in the product's tables: a folder that `vramscope` reads as a trace.
//!
//! Written piece by piece: memory holds one host, and what Parquet gathers of a row group.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray,
    TimestampMicrosecondArray, new_null_array,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::json::ReaderBuilder;
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use vramscope_leaksim::{Run, Window};
use vramscope_wire::{Table, parquet_file};

/// 2026-11-02 00:00:00 UTC, seconds since 1970.
pub const BEGIN: i64 = 20_759 * 86_400;

/// Bytes of the card. Larger than what a run holds: a card that fills up is not simulated.
const CARD_BYTES: i64 = 192 << 30;

/// What the driver itself and other code hold.
const OTHER_BYTES: i64 = 2 << 30;

type Writer = ArrowWriter<BufWriter<File>>;

/// The tables of one folder, being written.
pub struct Tables {
    writers: BTreeMap<Table, Writer>,
}

const WRITTEN: [Table; 6] = [
    Table::StackWindows,
    Table::DeviceWindows,
    Table::Traffic,
    Table::Processes,
    Table::Stacks,
    Table::Devices,
];

/// When and where a host's rows are.
struct Host<'a> {
    name: &'a str,
    agent: String,
    card: String,
    begin: i64,
}

impl Host<'_> {
    fn microseconds(&self, seconds: f64) -> i64 {
        self.begin * 1_000_000 + (seconds * 1e6) as i64
    }
}

/// When a run begins, seconds since 1970: agents start at any second.
pub fn begin(run: &Run) -> i64 {
    BEGIN + (run.truth.seed * 97 % 3600) as i64
}

/// Leaves out what an agent would not have written by then.
pub fn cut(run: &mut Run, until: f64) {
    let window = f64::from(run.window_seconds);
    run.windows.retain(|row| row.start + window <= until);
    run.traffic.retain(|sample| sample.at <= until);
    run.processes.retain(|process| process.start < until);
    for process in &mut run.processes {
        process.lives |= process.end > until;
        process.end = process.end.min(until);
    }
}

impl Tables {
    /// Makes the folder and the files.
    pub fn create(folder: &Path) -> Result<Self> {
        let mut writers = BTreeMap::new();
        for table in WRITTEN {
            let folder = folder.join(table.name());
            std::fs::create_dir_all(&folder)
                .with_context(|| format!("failed to create {}", folder.display()))?;
            let path = folder.join("1.parquet");
            let file = File::create_new(&path)
                .with_context(|| format!("failed to create {}", path.display()))?;
            let writer = parquet_file::writer(table, BufWriter::new(file))
                .with_context(|| format!("failed to begin {}", path.display()))?;
            writers.insert(table, writer);
        }
        Ok(Self { writers })
    }

    /// Adds a host.
    pub fn write(&mut self, host: &str, run: &Run) -> Result<()> {
        let host = Host {
            name: host,
            agent: format!("agent-{host}"),
            card: format!("GPU-{host}"),
            begin: begin(run),
        };
        let (device_windows, devices) = roll_up(&host, run)?;
        let batches = [
            (Table::StackWindows, stack_windows(&host, run)?),
            (Table::DeviceWindows, device_windows),
            (Table::Traffic, traffic(&host, run)?),
            (Table::Processes, processes(&host, run)?),
            (Table::Stacks, stacks(&host, run)?),
            (Table::Devices, devices),
        ];
        for (table, batch) in batches {
            let Some(writer) = self.writers.get_mut(&table) else {
                bail!("{} is not written", table.name());
            };
            let failed = || format!("failed to write {}", table.name());
            writer.write(&batch).with_context(failed)?;
        }
        Ok(())
    }

    /// Ends the files.
    pub fn finish(self) -> Result<()> {
        for (table, writer) in self.writers {
            let failed = || format!("failed to end {}", table.name());
            writer.close().with_context(failed)?;
        }
        Ok(())
    }
}

/// A batch of a table from some of its columns; the others are NULL.
pub fn batch(table: Table, rows: usize, columns: Vec<(&str, ArrayRef)>) -> Result<RecordBatch> {
    let mut columns: BTreeMap<&str, ArrayRef> = columns.into_iter().collect();
    let schema = table.schema();
    let ordered = schema.fields().iter().map(|field| {
        columns
            .remove(field.name().as_str())
            .unwrap_or_else(|| new_null_array(field.data_type(), rows))
    });
    let ordered = ordered.collect();
    if let Some(unknown) = columns.keys().next() {
        bail!("{} has no column {unknown}", table.name());
    }
    Ok(RecordBatch::try_new(schema, ordered)?)
}

pub fn times(microseconds: Vec<i64>) -> ArrayRef {
    Arc::new(TimestampMicrosecondArray::from(microseconds).with_timezone("UTC"))
}

pub fn integers(values: impl IntoIterator<Item = i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(values))
}

pub fn texts<'a>(values: impl IntoIterator<Item = &'a str>) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(values))
}

/// `ts`, `ts_ns` and what is the same in every row.
fn common<'a>(host: &Host, microseconds: Vec<i64>) -> Vec<(&'a str, ArrayRef)> {
    let rows = microseconds.len();
    let same = |text: &str| texts(std::iter::repeat_n(text, rows));
    vec![
        ("ts_ns", integers(microseconds.iter().map(|us| us * 1000))),
        ("ts", times(microseconds)),
        ("host", same(host.name)),
        ("boot_id", same("boot")),
        ("agent_id", same(&host.agent)),
        ("batch_seq", integers(std::iter::repeat_n(1, rows))),
    ]
}

fn stack_windows(host: &Host, run: &Run) -> Result<RecordBatch> {
    let rows = &run.windows;
    let length = f64::from(run.window_seconds);
    let starts = rows.iter().map(|row| host.microseconds(row.start));
    let ends = rows.iter().map(|row| host.microseconds(row.start + length));
    let of_process = |row: &Window| &run.processes[row.process];
    let of_stack = |row: &Window| &run.stacks[row.stack];
    let number = |of: fn(&Window) -> i64| integers(rows.iter().map(of));
    let ages = rows
        .iter()
        .map(|row| row.oldest_live_age.map(|age| (age * 1e9) as i64));
    let pids = rows.iter().map(|row| of_process(row).pid);
    // Pinned host memory belongs to no card.
    let on_card = |row: &&Window| of_stack(row).memory_kind != "pinned_host";
    let cards = rows
        .iter()
        .map(|row| on_card(&row).then_some(host.card.as_str()));
    let devices = rows.iter().map(|row| on_card(&row).then_some(0));
    let mut columns = common(host, starts.collect());
    columns.extend([
        ("window_end", times(ends.collect())),
        (
            "process_id",
            integers(rows.iter().map(|row| of_process(row).process_id)),
        ),
        (
            "pid",
            Arc::new(Int32Array::from_iter_values(pids)) as ArrayRef,
        ),
        (
            "gpu_uuid",
            Arc::new(StringArray::from_iter(cards)) as ArrayRef,
        ),
        (
            "device",
            Arc::new(Int32Array::from_iter(devices)) as ArrayRef,
        ),
        (
            "memory_kind",
            texts(rows.iter().map(|row| of_stack(row).memory_kind)),
        ),
        ("layer", texts(rows.iter().map(|row| of_stack(row).layer))),
        (
            "stack_id",
            integers(rows.iter().map(|row| of_stack(row).stack_id)),
        ),
        ("alloc_bytes", number(|row| row.alloc_bytes)),
        ("alloc_count", number(|row| row.alloc_count)),
        ("free_bytes", number(|row| row.free_bytes)),
        ("free_count", number(|row| row.free_count)),
        ("live_bytes", number(|row| row.live_bytes)),
        ("live_count", number(|row| row.live_count)),
        (
            "oldest_live_age_ns",
            Arc::new(Int64Array::from_iter(ages)) as ArrayRef,
        ),
        ("peak_live_bytes", number(|row| row.peak_live_bytes)),
        (
            "lossy",
            Arc::new(BooleanArray::from(vec![false; rows.len()])) as ArrayRef,
        ),
    ]);
    batch(Table::StackWindows, rows.len(), columns)
}

/// Sums of one process by kind of memory.
#[derive(Default, Clone, Copy)]
struct Sums {
    alloc_bytes: i64,
    alloc_count: i64,
    free_bytes: i64,
    free_count: i64,
    live_bytes: i64,
    live_count: i64,
    peak: i64,
}

/// `device_windows` and `devices`, added up from the stacks' rows.
fn roll_up(host: &Host, run: &Run) -> Result<(RecordBatch, RecordBatch)> {
    let length = f64::from(run.window_seconds);
    let mut rows = Vec::new();
    let mut samples = Vec::new();
    let mut live: BTreeMap<(usize, usize), (i64, i64)> = BTreeMap::new();
    let mut sums: BTreeMap<(usize, &str, &str), Sums> = BTreeMap::new();
    let mut windows = run.windows.iter().peekable();
    while let Some(start) = windows.peek().map(|row| row.start) {
        for of_kind in sums.values_mut() {
            *of_kind = Sums {
                live_bytes: of_kind.live_bytes,
                live_count: of_kind.live_count,
                peak: of_kind.peak,
                ..Sums::default()
            };
        }
        while let Some(row) = windows.next_if(|row| row.start == start) {
            let stack = &run.stacks[row.stack];
            let key = (row.process, stack.memory_kind, stack.layer);
            let of_kind = sums.entry(key).or_default();
            let now = (row.live_bytes, row.live_count);
            let before = live.insert((row.process, row.stack), now).unwrap_or((0, 0));
            of_kind.alloc_bytes += row.alloc_bytes;
            of_kind.alloc_count += row.alloc_count;
            of_kind.free_bytes += row.free_bytes;
            of_kind.free_count += row.free_count;
            of_kind.live_bytes += now.0 - before.0;
            of_kind.live_count += now.1 - before.1;
        }
        let mut used = OTHER_BYTES;
        for ((process, kind, layer), of_kind) in &mut sums {
            // Peaks of stacks fall on different moments: what the sum surely reached is its level.
            of_kind.peak = of_kind.peak.max(of_kind.live_bytes);
            if *kind == "device" {
                used += of_kind.live_bytes;
            }
            if of_kind.alloc_count + of_kind.free_count > 0 {
                rows.push((start, *process, *kind, *layer, *of_kind));
            }
        }
        samples.push((start + length, used.min(CARD_BYTES)));
    }
    let of_process = |process: usize| &run.processes[process];
    let number = |of: fn(&Sums) -> i64| integers(rows.iter().map(|row| of(&row.4)));
    let nothing = || integers(std::iter::repeat_n(0, rows.len()));
    let on_card = |kind: &str| kind != "pinned_host";
    let cards = rows
        .iter()
        .map(|row| on_card(row.2).then_some(host.card.as_str()));
    let devices = rows.iter().map(|row| on_card(row.2).then_some(0));
    let pids = rows.iter().map(|row| of_process(row.1).pid);
    let starts = rows.iter().map(|row| host.microseconds(row.0));
    let ends = rows.iter().map(|row| host.microseconds(row.0 + length));
    let mut columns = common(host, starts.collect());
    columns.extend([
        ("window_end", times(ends.collect())),
        (
            "process_id",
            integers(rows.iter().map(|row| of_process(row.1).process_id)),
        ),
        (
            "pid",
            Arc::new(Int32Array::from_iter_values(pids)) as ArrayRef,
        ),
        (
            "gpu_uuid",
            Arc::new(StringArray::from_iter(cards)) as ArrayRef,
        ),
        (
            "device",
            Arc::new(Int32Array::from_iter(devices)) as ArrayRef,
        ),
        ("memory_kind", texts(rows.iter().map(|row| row.2))),
        ("layer", texts(rows.iter().map(|row| row.3))),
        ("alloc_bytes", number(|sums| sums.alloc_bytes)),
        ("alloc_count", number(|sums| sums.alloc_count)),
        ("free_bytes", number(|sums| sums.free_bytes)),
        ("free_count", number(|sums| sums.free_count)),
        ("live_bytes", number(|sums| sums.live_bytes)),
        ("live_count", number(|sums| sums.live_count)),
        ("peak_live_bytes", number(|sums| sums.live_bytes)),
        ("process_peak_bytes", number(|sums| sums.peak)),
        ("failed_allocations", nothing()),
        ("failed_frees", nothing()),
        (
            "lossy",
            Arc::new(BooleanArray::from(vec![false; rows.len()])) as ArrayRef,
        ),
    ]);
    let device_windows = batch(Table::DeviceWindows, rows.len(), columns)?;
    Ok((device_windows, devices_of(host, &samples)?))
}

fn devices_of(host: &Host, samples: &[(f64, i64)]) -> Result<RecordBatch> {
    let rows: Vec<Value> = samples
        .iter()
        .map(|(at, used)| {
            json!({
                "ts": host.microseconds(*at), "ts_ns": host.microseconds(*at) * 1000,
                "host": host.name, "gpu_uuid": host.card, "device": 0,
                "total_bytes": CARD_BYTES, "used_bytes": used, "free_bytes": CARD_BYTES - used,
                "processes": [], "agent_id": host.agent, "batch_seq": 1,
            })
        })
        .collect();
    from_json(Table::Devices, &rows)
}

fn traffic(host: &Host, run: &Run) -> Result<RecordBatch> {
    let rows = &run.traffic;
    let at = rows.iter().map(|row| host.microseconds(row.at));
    let of_process = |row: &vramscope_leaksim::Traffic| &run.processes[row.process];
    let number = |of: fn(&vramscope_leaksim::Traffic) -> i64| integers(rows.iter().map(of));
    let usage = rows
        .iter()
        .map(|row| row.kv_used_pages as f64 / row.kv_total_pages as f64);
    let mut columns = common(host, at.collect());
    columns.extend([
        (
            "process_id",
            integers(rows.iter().map(|row| of_process(row).process_id)),
        ),
        (
            "pid",
            Arc::new(Int32Array::from_iter_values(
                rows.iter().map(|row| of_process(row).pid),
            )) as ArrayRef,
        ),
        ("engine", texts(rows.iter().map(|_| "vllm"))),
        (
            "endpoint",
            texts(rows.iter().map(|_| "http://127.0.0.1:8000/metrics")),
        ),
        ("running", number(|row| row.running)),
        ("waiting", number(|row| row.waiting)),
        ("completed_total", number(|row| row.completed_total)),
        ("prompt_tokens_total", number(|row| row.prompt_tokens_total)),
        (
            "generation_tokens_total",
            number(|row| row.generation_tokens_total),
        ),
        (
            "kv_usage_ratio",
            Arc::new(Float64Array::from_iter_values(usage)) as ArrayRef,
        ),
        ("kv_page_tokens", number(|row| row.kv_page_tokens)),
        ("kv_total_pages", number(|row| row.kv_total_pages)),
        ("kv_used_pages", number(|row| row.kv_used_pages)),
        ("preemptions_total", number(|_| 0)),
    ]);
    batch(Table::Traffic, rows.len(), columns)
}

/// A row when a process is met, and one when it ends.
fn processes(host: &Host, run: &Run) -> Result<RecordBatch> {
    let mut rows = Vec::new();
    for process in &run.processes {
        let started = host.microseconds(process.start);
        let ended = (!process.lives).then(|| host.microseconds(process.end));
        let states = [(started, None)].into_iter();
        for (at, ended) in states.chain(ended.map(|ended| (ended, Some(ended)))) {
            rows.push(json!({
                "ts": at, "ts_ns": at * 1000, "host": host.name, "boot_id": "boot",
                "process_id": process.process_id, "pid": process.pid,
                "exe": "/usr/bin/serve", "command": "serve --model model",
                "started": started, "ended": ended, "pod": format!("serve-{}", host.name),
                "namespace": "models", "coverage": [], "agent_id": host.agent, "batch_seq": 1,
            }));
        }
    }
    from_json(Table::Processes, &rows)
}

fn stacks(host: &Host, run: &Run) -> Result<RecordBatch> {
    let rows: Vec<Value> = run
        .stacks
        .iter()
        .map(|stack| {
            let frames: Vec<Value> = stack
                .functions
                .iter()
                .rev()
                .enumerate()
                .map(|(depth, function)| {
                    json!({
                        "kind": "native", "module": stack.module, "function": function,
                        "offset": 4096 + depth * 64,
                    })
                })
                .collect();
            json!({
                "stack_id": stack.stack_id, "frames": frames, "folded": stack.functions.join(";"),
                "agent_id": host.agent, "batch_seq": 1,
            })
        })
        .collect();
    from_json(Table::Stacks, &rows)
}

/// Times as microseconds: the JSON reader takes them for plain numbers first, since it would look
/// up the time zone in a database that this program does not carry.
pub fn from_json(table: Table, rows: &[Value]) -> Result<RecordBatch> {
    let schema = table.schema();
    let plain: Vec<Field> = schema
        .fields()
        .iter()
        .map(|field| match field.data_type() {
            DataType::Timestamp(..) => {
                Field::new(field.name(), DataType::Int64, field.is_nullable())
            }
            _ => field.as_ref().clone(),
        })
        .collect();
    let mut decoder = ReaderBuilder::new(Arc::new(Schema::new(plain)))
        .with_strict_mode(true)
        .build_decoder()?;
    decoder.serialize(rows)?;
    let Some(read) = decoder.flush()? else {
        return Ok(RecordBatch::new_empty(schema));
    };
    let columns = read.columns().iter().zip(schema.fields());
    let columns = columns.map(|(column, field)| cast(column, field.data_type()));
    Ok(RecordBatch::try_new(
        schema.clone(),
        columns.collect::<Result<_, _>>()?,
    )?)
}
