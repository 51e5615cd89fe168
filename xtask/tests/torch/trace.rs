//! The agent's rows of one run, and when the program was at rest among them.

use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value};

pub type Row = Map<String, Value>;

/// The tables of a trace that are compared.
pub struct Trace {
    /// In the order in which the calls took effect.
    pub events: Vec<Row>,
    pub samples: Vec<Row>,
    pub segments: Vec<Row>,
    /// Losses, by window.
    pub windows: Vec<Row>,
}

/// A number of a row; NULL is left out of rows.
pub fn number(row: &Row, column: &str) -> Option<i64> {
    row.get(column).and_then(Value::as_i64)
}

/// A number that every such row has.
#[track_caller]
pub fn required(row: &Row, column: &str) -> u64 {
    let value = number(row, column).and_then(|value| u64::try_from(value).ok());
    value.unwrap_or_else(|| panic!("no {column} in {row:?}"))
}

pub fn text<'a>(row: &'a Row, column: &str) -> &'a str {
    row.get(column).and_then(Value::as_str).unwrap_or("")
}

pub fn is(row: &Row, column: &str) -> bool {
    row.get(column).and_then(Value::as_bool).unwrap_or(false)
}

/// A time and the order of calls within it: what happened before a checkpoint lies below it.
pub type Moment = (u64, u64);

pub fn moment(row: &Row) -> Moment {
    (required(row, "ts_ns"), required(row, "seq"))
}

/// From when to when the program did nothing.
#[derive(Debug, Clone, Copy)]
pub struct Rest {
    /// The mark's buffer was given: all before belongs to the checkpoint.
    pub begins: Moment,
    /// The mark's buffer was taken back.
    pub quiet_from_ns: u64,
    /// The first call after.
    pub quiet_to_ns: u64,
}

impl Trace {
    pub fn read(agent: &Path, folder: &Path) -> Self {
        let mut events = rows(agent, folder, "alloc_events");
        events.sort_by_key(moment);
        Self {
            events,
            samples: rows(agent, folder, "allocator_samples"),
            segments: rows(agent, folder, "segments"),
            windows: rows(agent, folder, "agent_windows"),
        }
    }

    /// Finds a checkpoint by the size of its mark.
    pub fn rest(&self, mark_bytes: u64) -> Rest {
        let is_mark = |row: &&Row| {
            text(row, "memory_kind") == "pinned_host"
                && is(row, "counted")
                && number(row, "bytes") == Some(mark_bytes as i64)
        };
        let marks: Vec<&Row> = self.events.iter().filter(is_mark).collect();
        let [given, taken] = marks[..] else {
            panic!("a mark of {mark_bytes} bytes should be given and taken once: {marks:?}");
        };
        assert_eq!((text(given, "op"), text(taken, "op")), ("alloc", "free"));
        let quiet_from_ns = required(taken, "ts_ns");
        // The runtime's row of the same free may come after the driver's.
        let is_of_mark = |row: &Row| {
            text(row, "op") == "free" && number(row, "address") == number(taken, "address")
        };
        let mut after = self.events.iter().filter(|row| moment(row) > moment(taken));
        let next = after.find(|row| !is_of_mark(row));
        Rest {
            begins: moment(given),
            quiet_from_ns,
            quiet_to_ns: next.map_or(u64::MAX, |row| required(row, "ts_ns")),
        }
    }

    pub fn lost(&self) -> Vec<&Row> {
        let lossy = |row: &&Row| is(row, "lossy");
        self.windows.iter().filter(lossy).collect()
    }
}

/// All rows of a table.
pub fn rows(agent: &Path, folder: &Path, table: &str) -> Vec<Row> {
    let output = Command::new(agent)
        .arg("rows")
        .arg(folder)
        .args(["--table", table])
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}
