//! What the SQL says against what the stand-ins' own ledgers say, process by process.
//!
//! The ledger is written by the code that allocated and knows nothing of the agent; the SQL side
//! is the view `process_totals` over what agent and collector made of the probes' records. Both
//! are brought into [`Totals`] and must be equal to the byte.
//!
//! Rules:
//! - the driver's ledger is the truth (the runtime's calls all end there);
//! - what the ledger still holds when its process has ended is what the SQL calls freed by
//!   `process_exit`;
//! - failed frees are compared per process: a free of an unknown address has no memory kind in
//!   SQL, while the ledger enters it under the kind of the function called;
//! - processes that have no ledger are not looked at: the agent sees the whole host.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use vramscope_fakes::ledger::{Layer, ProcessLedger, Totals as LedgerTotals};

/// A row as JSON gives it.
pub type Row = Map<String, Value>;

/// The totals of every process as SQL. Frees at process exit are split off since the view adds
/// all implicit frees up.
pub const TOTALS_SQL: &str = include_str!("compare.sql");

/// Process, device as the process sees it, kind of memory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Process id.
    pub pid: u32,
    /// Device ordinal; None where the call had no current context.
    pub device: Option<u32>,
    /// Kind of memory.
    pub memory_kind: String,
}

/// What both sides know about one place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Calls that gave memory.
    pub allocations: u64,
    /// Bytes they gave.
    pub allocated_bytes: u64,
    /// Allocations that ended before the process did.
    pub frees: u64,
    /// Their bytes.
    pub freed_bytes: u64,
    /// Calls that failed to give memory.
    pub failed_allocations: u64,
    /// Allocations that the end of the process ended.
    pub live_at_exit: u64,
    /// Their bytes.
    pub live_at_exit_bytes: u64,
    /// Largest live bytes at any moment.
    pub peak_bytes: u64,
}

/// One side of the comparison.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Side {
    /// Processes that have an entry at all.
    pub processes: BTreeSet<u32>,
    /// Totals, without places where nothing happened.
    pub totals: BTreeMap<Place, Totals>,
    /// Calls that failed to free, by process, without zeros.
    pub failed_frees: BTreeMap<u32, u64>,
}

/// Brings ledgers of processes that have ended into totals.
pub fn from_ledgers(ledgers: &[ProcessLedger]) -> Result<Side> {
    let mut side = Side::default();
    for ledger in ledgers.iter().filter(|l| l.layer == Layer::Driver) {
        if !side.processes.insert(ledger.pid) {
            bail!(
                "two processes had the pid {}: the comparison goes by pid; run it again",
                ledger.pid
            );
        }
        let mut failed_frees = 0;
        let with_device = ledger.devices.iter().map(|d| (Some(d.device), &d.kinds));
        let without = std::iter::once((None, &ledger.without_device));
        for (device, kinds) in with_device.chain(without) {
            for (kind, totals) in kinds {
                failed_frees += totals.failed_frees;
                let place = Place {
                    pid: ledger.pid,
                    device,
                    memory_kind: kind.clone(),
                };
                side.insert(place, of_ledger(totals));
            }
        }
        side.insert_failed_frees(ledger.pid, failed_frees);
    }
    Ok(side)
}

fn of_ledger(totals: &LedgerTotals) -> Totals {
    Totals {
        allocations: totals.allocations,
        allocated_bytes: totals.allocated_bytes,
        frees: totals.frees,
        freed_bytes: totals.freed_bytes,
        failed_allocations: totals.failed_allocations,
        live_at_exit: totals.live_count,
        live_at_exit_bytes: totals.live_bytes,
        peak_bytes: totals.peak_bytes,
    }
}

/// Brings rows of [`TOTALS_SQL`] into totals, for the processes asked about.
pub fn from_rows(rows: &[Row], processes: &BTreeSet<u32>) -> Result<Side> {
    let mut side = Side::default();
    for row in rows {
        let pid = number(row, "pid")?.context("a row of process_totals has no pid")?;
        let pid = u32::try_from(pid).context("a pid is out of range")?;
        if !processes.contains(&pid) {
            continue;
        }
        side.processes.insert(pid);
        let device = match number(row, "device")? {
            Some(device) => Some(u32::try_from(device).context("a device is out of range")?),
            None => None,
        };
        let kind = row.get("memory_kind").and_then(Value::as_str);
        let count = |column: &str| -> Result<u64> {
            number(row, column)?.with_context(|| format!("{column} of process {pid} is NULL"))
        };
        let at_exit = count("exit_frees")?;
        let at_exit_bytes = count("exit_bytes")?;
        let totals = Totals {
            allocations: count("allocations")?,
            allocated_bytes: count("allocated_bytes")?,
            frees: (count("frees")? + count("implicit_frees")?).saturating_sub(at_exit),
            freed_bytes: (count("freed_bytes")? + count("implicit_bytes")?)
                .saturating_sub(at_exit_bytes),
            failed_allocations: count("failed_allocations")?,
            live_at_exit: at_exit,
            live_at_exit_bytes: at_exit_bytes,
            peak_bytes: count("peak_bytes")?,
        };
        let place = Place {
            pid,
            device,
            memory_kind: kind.unwrap_or("unknown").to_string(),
        };
        side.insert(place, totals);
        side.insert_failed_frees(pid, count("failed_frees")?);
    }
    Ok(side)
}

impl Side {
    fn insert(&mut self, place: Place, totals: Totals) {
        if totals != Totals::default() {
            self.totals.insert(place, totals);
        }
    }

    fn insert_failed_frees(&mut self, pid: u32, count: u64) {
        if count > 0 {
            *self.failed_frees.entry(pid).or_default() += count;
        }
    }
}

/// Every difference as a line for people; none if the SQL equals the ledger.
pub fn differences(ledger: &Side, sql: &Side) -> Vec<String> {
    let mut found = Vec::new();
    for pid in ledger.processes.difference(&sql.processes) {
        let silent = !ledger.totals.keys().any(|place| place.pid == *pid)
            && !ledger.failed_frees.contains_key(pid);
        // A process that never called has no row, and should have none.
        if !silent {
            found.push(format!("process {pid} is in the ledger, not in the SQL"));
        }
    }
    let places: BTreeSet<&Place> = ledger.totals.keys().chain(sql.totals.keys()).collect();
    for place in places {
        let truth = ledger.totals.get(place).copied().unwrap_or_default();
        let answer = sql.totals.get(place).copied().unwrap_or_default();
        for (what, truth, answer) in columns(&truth, &answer) {
            if truth != answer {
                found.push(format!(
                    "{}: {what} {truth} in the ledger, {answer} in SQL",
                    spell(place)
                ));
            }
        }
    }
    for pid in &ledger.processes {
        let truth = ledger.failed_frees.get(pid).copied().unwrap_or_default();
        let answer = sql.failed_frees.get(pid).copied().unwrap_or_default();
        if truth != answer {
            found.push(format!(
                "process {pid}: failed_frees {truth} in the ledger, {answer} in SQL"
            ));
        }
    }
    found
}

fn columns(a: &Totals, b: &Totals) -> [(&'static str, u64, u64); 8] {
    [
        ("allocations", a.allocations, b.allocations),
        ("allocated_bytes", a.allocated_bytes, b.allocated_bytes),
        ("frees", a.frees, b.frees),
        ("freed_bytes", a.freed_bytes, b.freed_bytes),
        (
            "failed_allocations",
            a.failed_allocations,
            b.failed_allocations,
        ),
        ("live_at_exit", a.live_at_exit, b.live_at_exit),
        (
            "live_at_exit_bytes",
            a.live_at_exit_bytes,
            b.live_at_exit_bytes,
        ),
        ("peak_bytes", a.peak_bytes, b.peak_bytes),
    ]
}

fn spell(place: &Place) -> String {
    let mut text = format!("process {}", place.pid);
    match place.device {
        Some(device) => {
            // Writing to a String cannot fail.
            let _ = write!(text, " device {device}");
        }
        None => text.push_str(" without a device"),
    }
    text.push(' ');
    text.push_str(&place.memory_kind);
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
mod tests {
    use super::*;
    use serde_json::json;

    /// A process that allocated 100 + 50 + 20 bytes on device 1, freed the 100 first, kept the
    /// rest to its end, failed to allocate once and to free twice (one of them with the device
    /// unknown). Peak 150: worked out by hand.
    fn ledger() -> Vec<ProcessLedger> {
        let zero = json!({
            "allocations": 0, "failed_allocations": 0, "frees": 0, "failed_frees": 0,
            "live_count": 0, "live_bytes": 0, "peak_bytes": 0,
            "allocated_bytes": 0, "freed_bytes": 0
        });
        let device = json!({
            "allocations": 3, "failed_allocations": 1, "frees": 1, "failed_frees": 1,
            "live_count": 2, "live_bytes": 70, "peak_bytes": 150,
            "allocated_bytes": 170, "freed_bytes": 100
        });
        let mut failed_free = zero.clone();
        failed_free["failed_frees"] = json!(1);
        let text = json!([
            {"pid": 7, "start_ticks": 1, "layer": "driver",
             "devices": [
                {"device": 0, "kinds": {"device": failed_free, "pinned_host": zero}},
                {"device": 1, "kinds": {"device": device}}],
             "without_device": {"device": zero}},
            {"pid": 7, "start_ticks": 1, "layer": "runtime", "devices": [], "without_device": {}}
        ]);
        serde_json::from_value(text).unwrap()
    }

    fn rows() -> Vec<Row> {
        let rows = json!([
            {"pid": 7, "device": 1, "memory_kind": "device",
             "allocations": 3, "allocated_bytes": 170, "frees": 1, "freed_bytes": 100,
             "implicit_frees": 2, "implicit_bytes": 70, "exit_frees": 2, "exit_bytes": 70,
             "failed_allocations": 1, "failed_frees": 1, "peak_bytes": 150},
            {"pid": 7, "device": null, "memory_kind": null,
             "allocations": 0, "allocated_bytes": 0, "frees": 0, "freed_bytes": 0,
             "implicit_frees": 0, "implicit_bytes": 0, "exit_frees": 0, "exit_bytes": 0,
             "failed_allocations": 0, "failed_frees": 1, "peak_bytes": 0},
            {"pid": 8, "device": 0, "memory_kind": "device",
             "allocations": 9, "allocated_bytes": 9, "frees": 0, "freed_bytes": 0,
             "implicit_frees": 9, "implicit_bytes": 9, "exit_frees": 9, "exit_bytes": 9,
             "failed_allocations": 0, "failed_frees": 0, "peak_bytes": 9}
        ]);
        serde_json::from_value(rows).unwrap()
    }

    fn compare(rows: &[Row]) -> Vec<String> {
        let ledger = from_ledgers(&ledger()).unwrap();
        let sql = from_rows(rows, &ledger.processes).unwrap();
        differences(&ledger, &sql)
    }

    /// Equal sides have no differences; a process without a ledger is not looked at.
    #[test]
    fn equal_sides_match() {
        assert_eq!(compare(&rows()), Vec::<String>::new());
    }

    /// One more allocation, one byte, one failed free: each is found and named.
    #[test]
    fn every_column_is_looked_at() {
        for column in [
            "allocations",
            "allocated_bytes",
            "frees",
            "freed_bytes",
            "exit_frees",
            "exit_bytes",
            "failed_allocations",
            "failed_frees",
            "peak_bytes",
        ] {
            let mut rows = rows();
            let value = rows[0][column].as_u64().unwrap();
            rows[0][column] = json!(value + 1);
            assert!(!compare(&rows).is_empty(), "{column} is not compared");
        }
    }

    /// A process the SQL does not know, and a place the ledger does not know, are differences.
    #[test]
    fn missing_and_surplus_rows_are_found() {
        assert!(compare(&[])[0].contains("process 7 is in the ledger"));
        let mut surplus = rows();
        surplus[2]["pid"] = json!(7);
        assert!(!compare(&surplus).is_empty());
    }

    /// Two lifetimes with one pid cannot be told apart here and are refused.
    #[test]
    fn a_reused_pid_is_refused() {
        let twice = [ledger(), ledger()].concat();
        assert!(from_ledgers(&twice).is_err());
    }
}
