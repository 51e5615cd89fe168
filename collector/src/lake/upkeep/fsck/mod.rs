//! Proves a data folder: every file that a log names is there and whole, and every acknowledged
//! row is there once.
//!
//! Reads only, and may run beside a collector. What it finds is a **problem** (rows are missing,
//! there twice, or cannot be read) or a **note** (files that nobody needs, batches that are still on
//! their way).
//!
//! - [`files`]: the files of each table against its log, and, if asked, every value of them;
//! - [`rows`]: rows for each agent and batch against the acknowledgements, against the agents'
//!   marks in the log, and rows against their partition. This is SQL on the product's own engine,
//!   with its memory limit, so it takes what it is given whatever the lake's size.

mod files;
mod rows;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use vramscope_queries::folder::Folder;
use vramscope_queries::session::Options;

use crate::folder::Lock;
use crate::lake::Lake;

/// Findings of one kind that are listed; the rest is counted.
const LISTED: usize = 100;

/// How it is done.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// Decode every value of every file.
    pub deep: bool,
    /// Memory for the questions about rows, in bytes.
    pub memory_bytes: usize,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// In which table.
    pub table: &'static str,
    /// Of which kind, a word for scripts.
    pub kind: &'static str,
    /// What, for people.
    pub detail: String,
}

/// One table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TableReport {
    /// Its name.
    pub table: &'static str,
    /// The version that was looked at.
    pub version: u64,
    /// Live files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their rows, by their footers.
    pub rows: u64,
    /// Files below the table's folder that are not live.
    pub unreferenced_files: u64,
    /// Their bytes.
    pub unreferenced_bytes: u64,
    /// Rows that retention took out.
    pub expired_rows: u64,
    /// Rows of stacks that merges left out, since the stack was there.
    pub same_stacks: u64,
    /// Rows that were acknowledged, as far as the ledger goes; `None` without a ledger.
    pub acknowledged_rows: Option<u64>,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The data folder.
    pub data: PathBuf,
    /// Whether a collector was running on it.
    pub running: bool,
    /// Whether nothing is wrong.
    pub sound: bool,
    /// The tables.
    pub tables: Vec<TableReport>,
    /// What is wrong.
    pub problems: Vec<Finding>,
    /// What is worth knowing.
    pub notes: Vec<Finding>,
}

/// Findings on their way into the report.
#[derive(Debug, Default)]
pub(super) struct Findings {
    problems: Vec<Finding>,
    notes: Vec<Finding>,
}

impl Findings {
    fn problem(&mut self, table: &'static str, kind: &'static str, detail: String) {
        self.problems.push(Finding {
            table,
            kind,
            detail,
        });
    }

    fn note(&mut self, table: &'static str, kind: &'static str, detail: String) {
        self.notes.push(Finding {
            table,
            kind,
            detail,
        });
    }
}

/// Looks at everything. `step` is told what is looked at next, and how far it is.
pub async fn check(
    data: &Path,
    check: Check,
    step: &(dyn Fn(&str, u64, u64) + Sync),
) -> anyhow::Result<Report> {
    let data = data
        .canonicalize()
        .with_context(|| format!("failed to open data folder {}", data.display()))?;
    let running = Lock::is_held(&data)
        .with_context(|| format!("failed to look at the lock in {}", data.display()))?;
    let options = Options {
        memory_bytes: check.memory_bytes,
        ..Options::default()
    };
    // Rows before logs: an agent's mark only grows, so what was there before is below it.
    let folder = Folder::open(&data, options).await?;
    let session = folder.session().await?;
    let lake = Lake::attach(&data).await?;
    let mut findings = Findings::default();
    let mut tables = Vec::new();
    for table in lake.tables() {
        tables.push(files::check(&lake, table, check.deep, &mut findings, step).await?);
    }
    let whole = findings.problems.is_empty();
    if whole {
        rows::check(
            &data,
            &folder,
            session,
            &lake,
            running,
            &mut tables,
            &mut findings,
            step,
        )
        .await?;
    } else {
        findings.note(
            "",
            "rows_not_counted",
            "rows were not counted, since files are missing or damaged".to_string(),
        );
    }
    Ok(Report {
        data,
        running,
        sound: findings.problems.is_empty(),
        tables,
        problems: findings.problems,
        notes: findings.notes,
    })
}

impl Report {
    /// For people.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<18} {:>8} {:>7} {:>14} {:>14} {:>14} {:>7}",
            "table", "version", "files", "bytes", "rows", "acknowledged", "unused"
        );
        for table in &self.tables {
            let acknowledged = table
                .acknowledged_rows
                .map_or("-".to_string(), |rows| rows.to_string());
            let _ = writeln!(
                text,
                "{:<18} {:>8} {:>7} {:>14} {:>14} {:>14} {:>7}",
                table.table,
                table.version,
                table.files,
                table.bytes,
                table.rows,
                acknowledged,
                table.unreferenced_files
            );
        }
        listed(&mut text, "note", &self.notes);
        listed(&mut text, "PROBLEM", &self.problems);
        let verdict = match self.problems.len() {
            0 => "sound".to_string(),
            count => format!("{count} problems"),
        };
        let _ = writeln!(text, "{}: {verdict}", self.data.display());
        text
    }
}

fn listed(text: &mut String, word: &str, findings: &[Finding]) {
    for finding in findings.iter().take(LISTED) {
        let of = if finding.table.is_empty() {
            String::new()
        } else {
            format!("{}: ", finding.table)
        };
        let _ = writeln!(text, "{word}: {of}{}", finding.detail);
    }
    if findings.len() > LISTED {
        let _ = writeln!(
            text,
            "… and {} more; --json lists all",
            findings.len() - LISTED
        );
    }
}
