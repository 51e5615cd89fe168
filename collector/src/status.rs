//! What an operator asks of a data folder: which agents, how far, what waits, how large.
//!
//! Reads only, and works whether a collector runs on the folder or not. While one runs the
//! numbers are of a moment: a batch can move from the log to a table between two of them.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use vramscope_wire::Table;

use crate::folder::Lock;
use crate::ingest::wal::{self, Leftovers};
use crate::lake;
use crate::lake::place::Home;
use crate::lake::shared::Shared;

/// Everything `status` tells.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The data folder.
    pub data: PathBuf,
    /// Whether a collector holds the folder now.
    pub running: bool,
    /// Agents that ever stored a batch here.
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
    let waiting = wal::list(&log_root, Leftovers::Keep).with_context(reading_log)?;
    let damaged = wal::damaged(&log_root).with_context(reading_log)?;

    let mut agents = Vec::new();
    for agent_id in wal::agents(&log_root).with_context(reading_log)? {
        let of_agent = waiting.iter().filter(|entry| *entry.agent == *agent_id);
        let highest_batch_seq = of_agent.clone().map(|entry| entry.seq).max().unwrap_or(0);
        let waiting_batches = of_agent.count() as u64;
        agents.push(Agent {
            agent_id,
            highest_batch_seq,
            waiting_batches,
        });
    }
    let mut tables = Vec::new();
    let home = Home::of(&data)?;
    for table in Table::ALL {
        tables.push(table_state(&home, table, &mut agents).await?);
    }
    let log = Log {
        batches: waiting.len() as u64,
        bytes: waiting.iter().map(|entry| entry.bytes).sum(),
        damaged_files: damaged.len() as u64,
    };
    Ok(Report {
        data,
        running,
        agents,
        log,
        tables,
    })
}

/// The state of one table; raises the agents' marks by what it holds.
async fn table_state(
    home: &Home,
    table: Table,
    agents: &mut [Agent],
) -> anyhow::Result<TableState> {
    let mut state = TableState {
        table: table.name(),
        version: None,
        rows: Some(0),
        files: 0,
        bytes: 0,
    };
    let path = home.place.table_path(table);
    let opening = || format!("failed to open table {}", path.display());
    let found = vramscope_queries::lake::open(&home.place, table).await;
    let Some(delta) = found.with_context(opening)? else {
        state.rows = None;
        return Ok(state);
    };
    let shared = home.shared_as.as_deref().map(Shared::new);
    if let Some(shared) = &shared {
        shared.catch_up(table, &delta).await.with_context(opening)?;
    }
    for agent in agents {
        let committed = match &shared {
            Some(shared) => shared.highest(table, &agent.agent_id),
            None => lake::transaction(&delta, &agent.agent_id)
                .await
                .with_context(opening)?,
        };
        agent.highest_batch_seq = agent.highest_batch_seq.max(committed);
    }
    state.version = delta.version();
    for file in delta.snapshot().with_context(opening)?.log_data() {
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
            "\n{:<40} {:>16} {:>8}",
            "agent", "highest batch", "waiting"
        );
        for agent in &self.agents {
            let _ = writeln!(
                text,
                "{:<40} {:>16} {:>8}",
                agent.agent_id, agent.highest_batch_seq, agent.waiting_batches
            );
        }
        text
    }
}
