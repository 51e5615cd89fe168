//! What the SQL says against what the stand-ins' own ledgers say, process by process.
//!
//! The ledger is written by the code that allocated and knows nothing of the agent; the SQL side
//! is what agent and collector made of the probes' records ([`Source`]). Both are brought into
//! [`Side`] and must be equal to the byte, in every kind of memory that either side knows.
//!
//! Rules:
//! - the driver's ledger is the truth (the runtime's calls all end there);
//! - what the ledger still holds when its process has ended is what the SQL calls freed by
//!   `process_exit`; what a program left alive that another one replaced (exec) is freed, on both
//!   sides;
//! - the ledger's `without_device` is a NULL device;
//! - failed frees are compared per process: a free of an unknown address has no memory kind in
//!   SQL, while the ledger enters it under the kind of the function called;
//! - memory of kind `ipc` is left out: it is another process's, whose ledger has it, and a failure
//!   to open or close it is in no ledger;
//! - several processes with one pid are told apart by their order: the first by the ledger's start
//!   is the first by `processes.started`. Both sides leave out processes that did nothing;
//! - processes that have no ledger are not looked at: the agent sees the whole host.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use vramscope_fakes::ledger::{Layer, ProcessLedger, Totals};

/// A row as JSON gives it.
pub type Row = Map<String, Value>;

/// What is compared with the ledgers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The view `process_totals`, over events.
    Totals,
    /// The roll-up by device, added up over its windows.
    DeviceWindows,
    /// The roll-up by stack, added up over its windows and stacks.
    StackWindows,
}

/// A column: its name in the SQL, and the same from the ledger.
struct Figure {
    name: &'static str,
    truth: fn(&Totals) -> u64,
    per_process: bool,
}

const fn figure(name: &'static str, truth: fn(&Totals) -> u64) -> Figure {
    Figure {
        name,
        truth,
        per_process: false,
    }
}

const ALLOCATIONS: Figure = figure("allocations", |t| t.allocations);
const ALLOCATED_BYTES: Figure = figure("allocated_bytes", |t| t.allocated_bytes);
const FAILED_ALLOCATIONS: Figure = figure("failed_allocations", |t| t.failed_allocations);
const PEAK_BYTES: Figure = figure("peak_bytes", |t| t.peak_bytes);
const FAILED_FREES: Figure = Figure {
    name: "failed_frees",
    truth: |t| t.failed_frees,
    per_process: true,
};
/// A roll-up does not tell apart by what something ended.
const ENDS: Figure = figure("ends", |t| t.frees + t.live_count);
const ENDED_BYTES: Figure = figure("ended_bytes", |t| t.freed_bytes + t.live_bytes);
/// Nothing lives once its process has ended.
const LEFT_COUNT: Figure = figure("left_count", |_| 0);
const LEFT_BYTES: Figure = figure("left_bytes", |_| 0);

impl Source {
    /// All of them.
    pub const ALL: [Source; 3] = [Source::Totals, Source::DeviceWindows, Source::StackWindows];

    /// What to ask.
    pub fn sql(self) -> &'static str {
        match self {
            Source::Totals => include_str!("compare/totals.sql"),
            Source::DeviceWindows => include_str!("compare/device_windows.sql"),
            Source::StackWindows => include_str!("compare/stack_windows.sql"),
        }
    }

    fn figures(self) -> &'static [Figure] {
        const TOTALS: &[Figure] = &[
            ALLOCATIONS,
            ALLOCATED_BYTES,
            figure("frees", |t| t.frees),
            figure("freed_bytes", |t| t.freed_bytes),
            FAILED_ALLOCATIONS,
            FAILED_FREES,
            figure("live_at_exit", |t| t.live_count),
            figure("live_at_exit_bytes", |t| t.live_bytes),
            PEAK_BYTES,
        ];
        const DEVICE_WINDOWS: &[Figure] = &[
            ALLOCATIONS,
            ALLOCATED_BYTES,
            ENDS,
            ENDED_BYTES,
            LEFT_COUNT,
            LEFT_BYTES,
            FAILED_ALLOCATIONS,
            FAILED_FREES,
            PEAK_BYTES,
            figure("window_peak_bytes", |t| t.peak_bytes),
        ];
        const STACK_WINDOWS: &[Figure] = &[
            ALLOCATIONS,
            ALLOCATED_BYTES,
            ENDS,
            ENDED_BYTES,
            LEFT_COUNT,
            LEFT_BYTES,
        ];
        match self {
            Source::Totals => TOTALS,
            Source::DeviceWindows => DEVICE_WINDOWS,
            Source::StackWindows => STACK_WINDOWS,
        }
    }
}

/// One process lifetime: the `nth` of those with this pid, 0 the earliest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Life {
    /// Process id.
    pub pid: u32,
    /// Which of them.
    pub nth: usize,
}

/// What a figure is of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Process lifetime.
    pub life: Life,
    /// Device ordinal as the process sees it; None where there is none, or for a whole process.
    pub device: Option<u32>,
    /// Kind of memory; None for a whole process.
    pub memory_kind: Option<String>,
}

/// One side of the comparison: figures by name, without zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Side(BTreeMap<Place, BTreeMap<&'static str, u64>>);

impl Side {
    fn add(&mut self, place: Place, name: &'static str, value: u64) {
        if value > 0 {
            *self.0.entry(place).or_default().entry(name).or_default() += value;
        }
    }

    /// True if nothing happened.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A figure of one place; 0 if there is none.
    pub fn get(&self, place: &Place, name: &str) -> u64 {
        let figures = self.0.get(place);
        figures.and_then(|f| f.get(name)).copied().unwrap_or(0)
    }

    /// Every place where something happened.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.0.keys()
    }

    /// Without some processes.
    pub fn without(mut self, pids: &[u32]) -> Self {
        self.0.retain(|place, _| !pids.contains(&place.life.pid));
        self
    }
}

/// The drivers' ledgers in which something is written, each with its lifetime.
pub fn lives(ledgers: &[ProcessLedger]) -> Result<Vec<(Life, &ProcessLedger)>> {
    let mut by_pid: BTreeMap<u32, BTreeMap<u64, &ProcessLedger>> = BTreeMap::new();
    for ledger in ledgers.iter().filter(|l| l.layer == Layer::Driver) {
        if places(ledger).all(|(_, _, totals)| *totals == Totals::default()) {
            continue;
        }
        let starts = by_pid.entry(ledger.pid).or_default();
        if starts.insert(ledger.start_ticks, ledger).is_some() {
            bail!("two ledgers are of one process, {}", ledger.pid);
        }
    }
    let numbered = by_pid.into_iter().flat_map(|(pid, starts)| {
        let in_order = starts.into_values().enumerate();
        in_order.map(move |(nth, ledger)| (Life { pid, nth }, ledger))
    });
    Ok(numbered.collect())
}

/// Everything a ledger has: device, kind, totals.
fn places(ledger: &ProcessLedger) -> impl Iterator<Item = (Option<u32>, &String, &Totals)> {
    let with_device = ledger.devices.iter().map(|d| (Some(d.device), &d.kinds));
    let without = std::iter::once((None, &ledger.without_device));
    with_device.chain(without).flat_map(|(device, kinds)| {
        kinds
            .iter()
            .map(move |(kind, totals)| (device, kind, totals))
    })
}

/// Brings ledgers of processes that have ended into the form of a source.
pub fn from_ledgers(source: Source, ledgers: &[ProcessLedger]) -> Result<Side> {
    let mut side = Side::default();
    for (life, ledger) in lives(ledgers)? {
        for (device, kind, totals) in places(ledger) {
            for figure in source.figures() {
                let place = place(figure, life, device, Some(kind));
                side.add(place, figure.name, (figure.truth)(totals));
            }
        }
    }
    Ok(side)
}

/// Brings a source's rows into the same form, for the pids asked about.
pub fn from_rows(source: Source, rows: &[Row], pids: &BTreeSet<u32>) -> Result<Side> {
    let mut ours = Vec::new();
    let mut starts: BTreeMap<u32, BTreeSet<(Option<u64>, u64)>> = BTreeMap::new();
    for row in rows {
        let pid = number(row, "pid")?.context("a row has no pid")?;
        let pid = u32::try_from(pid).context("a pid is out of range")?;
        let kind = row.get("memory_kind").and_then(Value::as_str);
        if kind == Some("ipc") || !pids.contains(&pid) {
            continue;
        }
        let process_id = number(row, "process_id")?.context("a row has no process_id")?;
        let start = (number(row, "started")?, process_id);
        starts.entry(pid).or_default().insert(start);
        ours.push((pid, start, kind, row));
    }
    let mut side = Side::default();
    for (pid, start, kind, row) in ours {
        let nth = starts[&pid].iter().take_while(|s| **s < start).count();
        let life = Life { pid, nth };
        let device = match number(row, "device")? {
            Some(device) => Some(u32::try_from(device).context("a device is out of range")?),
            None => None,
        };
        for figure in source.figures() {
            let value = number(row, figure.name)?
                .with_context(|| format!("{} of process {pid} is NULL", figure.name))?;
            let place = place(figure, life, device, kind.or(Some("unknown")));
            side.add(place, figure.name, value);
        }
    }
    Ok(side)
}

fn place(
    figure: &Figure,
    life: Life,
    device: Option<u32>,
    kind: Option<impl Into<String>>,
) -> Place {
    if figure.per_process {
        return Place {
            life,
            device: None,
            memory_kind: None,
        };
    }
    Place {
        life,
        device,
        memory_kind: kind.map(Into::into),
    }
}

/// Every difference as a line for people; none if the SQL equals the ledger.
pub fn differences(ledger: &Side, sql: &Side) -> Vec<String> {
    let mut found = Vec::new();
    let known: BTreeSet<Life> = sql.0.keys().map(|place| place.life).collect();
    let missing: BTreeSet<Life> = ledger.0.keys().map(|place| place.life).collect();
    let missing: BTreeSet<_> = missing.difference(&known).copied().collect();
    for life in &missing {
        found.push(format!("{} is in the ledger, not in SQL", spell(*life)));
    }
    let places: BTreeSet<&Place> = ledger.0.keys().chain(sql.0.keys()).collect();
    for place in places {
        if missing.contains(&place.life) {
            continue;
        }
        let of = |side: &Side| side.0.get(place).cloned().unwrap_or_default();
        let (truth, answer) = (of(ledger), of(sql));
        let names: BTreeSet<_> = truth.keys().chain(answer.keys()).collect();
        for name in names {
            let value = |figures: &BTreeMap<_, _>| figures.get(name).copied().unwrap_or(0);
            let (truth, answer): (u64, u64) = (value(&truth), value(&answer));
            if truth != answer {
                found.push(format!(
                    "{}: {name} {truth} in the ledger, {answer} in SQL",
                    spell_place(place)
                ));
            }
        }
    }
    found
}

fn spell(life: Life) -> String {
    match life.nth {
        0 => format!("process {}", life.pid),
        nth => format!("process {} (number {} of that pid)", life.pid, nth + 1),
    }
}

fn spell_place(place: &Place) -> String {
    let mut text = spell(place.life);
    let Some(kind) = &place.memory_kind else {
        return text;
    };
    match place.device {
        Some(device) => {
            // Writing to a String cannot fail.
            let _ = write!(text, " device {device}");
        }
        None => text.push_str(" without a device"),
    }
    text.push(' ');
    text.push_str(kind);
    text
}

/// A count or id of a row: a JSON number, or a string of digits (JSON has no 64-bit integers,
/// so writers differ).
pub fn number(row: &Row, column: &str) -> Result<Option<u64>> {
    match row.get(column) {
        // Writers leave NULLs out or write null.
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(value)) => value
            .as_u64()
            .map(Some)
            .with_context(|| format!("{column} is {value}, expected a count")),
        Some(Value::String(value)) => value
            .parse()
            .map(Some)
            .with_context(|| format!("{column} is {value:?}, expected a count")),
        Some(other) => bail!("{column} is {other}, expected a count"),
    }
}

#[cfg(test)]
mod tests;
