//! What an operator asks of a data folder: which agents, how far, what waits, how large.
//!
//! Reads only, and works whether a collector runs on the folder or not. While one runs the
//! numbers are of a moment: a batch can move from the log to a table between two of them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use deltalake::DeltaTable;
use serde::Serialize;
use vramscope_queries::store::Place;
use vramscope_wire::Table;

use crate::folder::Lock;
use crate::ingest::wal::{self, legacy};
use crate::lake;
use crate::lake::committer;

/// Everything `status` tells.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The data folder.
    pub data: PathBuf,
    /// Whether a collector holds the folder now.
    pub running: bool,
    /// Agents that stored a batch here, as far as `batches` and the log know.
    pub agents: Vec<Agent>,
    /// The write-ahead log.
    pub log: Log,
    /// The tables.
    pub tables: Vec<TableState>,
}

/// One agent.
#[derive(Debug, Serialize)]
pub struct Agent {
    /// Its id.
    pub agent_id: String,
    /// Highest `batch_seq` that is durable, in the log or in a table.
    pub highest_batch_seq: u64,
    /// Batches that wait in the log.
    pub waiting_batches: u64,
    /// Numbers between its first and its highest batch here that no batch came for: the agent
    /// left them out, sent them elsewhere, or was refused.
    pub missing_batches: u64,
}

/// The write-ahead log.
#[derive(Debug, Serialize)]
pub struct Log {
    /// Batches that wait for their commit.
    pub batches: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files set aside as damaged; their rows are lost.
    pub damaged_files: u64,
}

/// One table.
#[derive(Debug, Serialize)]
pub struct TableState {
    /// Its name.
    pub table: &'static str,
    /// Version of its last commit; `None` if the table is not there.
    pub version: Option<u64>,
    /// Rows, from the files' statistics; `None` if one has none.
    pub rows: Option<u64>,
    /// Live data files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Looks at a data folder.
pub async fn report(data: &Path) -> anyhow::Result<Report> {
    let data = data
        .canonicalize()
        .with_context(|| format!("failed to open data folder {}", data.display()))?;
    let running = Lock::is_held(&data)
        .with_context(|| format!("failed to look at the lock in {}", data.display()))?;
    let log_root = data.join("_wal");
    let reading_log = || format!("failed to read the log in {}", log_root.display());
    // The log before the tables: a batch goes from the one to the other.
    let log = wal::list(&log_root).with_context(reading_log)?;
    let old_log = legacy::list(&log_root).with_context(reading_log)?;
    let damaged = wal::damaged(&log_root).with_context(reading_log)?;

    let place = Place::of_data(&data)?;
    let mut deltas = BTreeMap::new();
    for table in Table::ALL {
        if let Some(delta) = vramscope_queries::lake::open(&place, table).await? {
            deltas.insert(table, delta);
        }
    }
    let mut agents: BTreeMap<String, Seen> = BTreeMap::new();
    if let Some(ledger) = deltas.get(&Table::Batches) {
        let see = |known: committer::Acknowledged<'_>| match agents.get_mut(known.agent) {
            Some(seen) => seen.batch(known.seq),
            None => {
                let mut seen = Seen::default();
                seen.batch(known.seq);
                agents.insert(known.agent.to_string(), seen);
            }
        };
        committer::acknowledged(ledger, None, see)
            .await
            .context("failed to read table batches")?;
    }
    let mut waiting = (0, 0);
    // Of each table, up to which record of the log it has the rows, and `batches` the lines. Asked
    // once: every answer reads the table's own log, and the collector's can have thousands of records.
    let mut marks: BTreeMap<Table, [u64; 2]> = BTreeMap::new();
    for entry in log.entries {
        let table = entry.batch.table;
        let [committed, lines] = match marks.get(&table) {
            Some(known) => *known,
            None => {
                let id = log.id.as_deref().unwrap_or_default();
                let of = |delta, mark: String| async move {
                    match delta {
                        Some(delta) => lake::transaction(delta, &mark).await,
                        None => Ok(0),
                    }
                };
                let rows = of(deltas.get(&table), committer::own_transaction(id));
                let lines = of(
                    deltas.get(&Table::Batches),
                    committer::ledger_transaction(id, table.name()),
                );
                let failed = || format!("failed to read the log of table {}", table.name());
                let found = [
                    rows.await.with_context(failed)?,
                    lines.await.with_context(failed)?,
                ];
                marks.insert(table, found);
                found
            }
        };
        let (has_rows, has_line) = (entry.number <= committed, entry.number <= lines);
        let seen = agents.entry(entry.batch.agent.to_string()).or_default();
        if !has_line {
            seen.batch(entry.batch.seq);
        }
        if !has_rows {
            seen.waiting += 1;
            waiting = (waiting.0 + 1, waiting.1 + entry.bytes);
        }
    }
    for old in &old_log {
        let seen = agents.entry(old.agent.to_string()).or_default();
        seen.batch(old.seq);
        seen.waiting += 1;
        let bytes = std::fs::metadata(&old.path).map_or(0, |file| file.len());
        waiting = (waiting.0 + 1, waiting.1 + bytes);
    }
    for agent in legacy::agents(&log_root).with_context(reading_log)? {
        let seen = agents.entry(agent.clone()).or_default();
        for delta in deltas.values() {
            seen.highest = seen.highest.max(lake::transaction(delta, &agent).await?);
        }
    }
    let mut tables = Vec::new();
    for table in Table::ALL {
        tables.push(table_state(table, deltas.get(&table))?);
    }
    Ok(Report {
        data,
        running,
        agents: agents.into_iter().map(Seen::agent).collect(),
        log: Log {
            batches: waiting.0,
            bytes: waiting.1,
            damaged_files: damaged.len() as u64,
        },
        tables,
    })
}

/// What was seen of an agent's batches.
#[derive(Debug, Default)]
struct Seen {
    first: Option<u64>,
    highest: u64,
    batches: u64,
    waiting: u64,
}

impl Seen {
    fn batch(&mut self, seq: u64) {
        self.first = Some(self.first.map_or(seq, |first| first.min(seq)));
        self.highest = self.highest.max(seq);
        self.batches += 1;
    }

    fn agent((agent_id, seen): (String, Seen)) -> Agent {
        let span = seen.first.map_or(0, |first| seen.highest - first + 1);
        Agent {
            agent_id,
            highest_batch_seq: seen.highest,
            waiting_batches: seen.waiting,
            missing_batches: span.saturating_sub(seen.batches),
        }
    }
}

fn table_state(table: Table, delta: Option<&DeltaTable>) -> anyhow::Result<TableState> {
    let mut state = TableState {
        table: table.name(),
        version: None,
        rows: Some(0),
        files: 0,
        bytes: 0,
    };
    let Some(delta) = delta else {
        state.rows = None;
        return Ok(state);
    };
    state.version = delta.version();
    let snapshot = delta
        .snapshot()
        .with_context(|| format!("failed to read table {}", table.name()))?;
    for file in snapshot.log_data() {
        state.files += 1;
        state.bytes += u64::try_from(file.size()).unwrap_or(0);
        state.rows = state
            .rows
            .zip(file.num_records())
            .map(|(sum, rows)| sum + rows as u64);
    }
    Ok(state)
}

impl Report {
    /// For people.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let state = if self.running {
            "a collector is running"
        } else {
            "no collector is running"
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}: {state}", self.data.display());
        let _ = writeln!(
            text,
            "log: {} batches, {} bytes wait for their commit",
            self.log.batches, self.log.bytes
        );
        if self.log.damaged_files > 0 {
            let _ = writeln!(
                text,
                "log: {} DAMAGED files in _wal/damaged, their rows are lost",
                self.log.damaged_files
            );
        }
        let _ = writeln!(
            text,
            "\n{:<16} {:>8} {:>14} {:>8} {:>16}",
            "table", "version", "rows", "files", "bytes"
        );
        for table in &self.tables {
            let known =
                |number: Option<u64>| number.map_or("-".to_string(), |number| number.to_string());
            let _ = writeln!(
                text,
                "{:<16} {:>8} {:>14} {:>8} {:>16}",
                table.table,
                known(table.version),
                known(table.rows),
                table.files,
                table.bytes
            );
        }
        let _ = writeln!(
            text,
            "\n{:<40} {:>16} {:>8} {:>8}",
            "agent", "highest batch", "waiting", "missing"
        );
        for agent in &self.agents {
            let _ = writeln!(
                text,
                "{:<40} {:>16} {:>8} {:>8}",
                agent.agent_id,
                agent.highest_batch_seq,
                agent.waiting_batches,
                agent.missing_batches
            );
        }
        text
    }
}
