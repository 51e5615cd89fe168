//! Where rows go: into the spool, with the journal (the daemon), or into a trace's folders.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tokio::sync::watch;

use crate::engine::{Counts, Totals};
use crate::host::discovery::Discovery;
use crate::host::identity::Host;
use crate::ledger::Ledger;
use crate::probes::order::Waiting;
use crate::spool::folder;
use crate::spool::journal::{Frame, Journal, State};
use crate::spool::rows::Rows;
use crate::spool::tables::{Origin, tables_with_rows};
use crate::stacks::Stacks;
use crate::status;

/// The engine's state at a flush.
pub struct Checkpoint<'a> {
    pub generation: u64,
    pub ring_position: u64,
    pub waiting: Waiting,
    pub lost_reported: &'a [u64],
    pub window: &'a Counts,
    pub ledger: &'a mut Ledger,
    pub stacks: &'a Stacks,
    pub totals: &'a Totals,
    pub ring_fill: f64,
    pub discovery: &'a Discovery,
}

/// Takes rows for good, or refuses them all: on an error the caller keeps them and tries again.
pub trait Output: Send {
    fn commit(&mut self, rows: &Rows, checkpoint: Checkpoint<'_>) -> anyhow::Result<()>;

    /// There was nothing to take.
    fn idle(&mut self, _checkpoint: &Checkpoint<'_>) {}
}

/// A spool folder with its journal.
pub struct Spool {
    folder: PathBuf,
    host: Host,
    agent_id: String,
    journal: Journal,
    next_batch_seq: u64,
    /// Tells the sender up to which number files count.
    committed: watch::Sender<u64>,
    /// A failed commit may have left files that do not count.
    leftovers: bool,
    /// The journal holds no whole state of this run yet.
    first: bool,
    /// Changes whose frame could not be written.
    unwritten: Vec<crate::ledger::Change>,
}

impl Spool {
    /// Opens the spool after its journal was read; removes files that the journal does not know.
    pub fn open(
        folder: &Path,
        host: Host,
        agent_id: String,
        journal: Journal,
        next_batch_seq: u64,
    ) -> anyhow::Result<(Self, watch::Receiver<u64>)> {
        let next_batch_seq = next_batch_seq.max(1);
        let (committed, receiver) = watch::channel(next_batch_seq);
        let spool = Self {
            folder: folder.to_path_buf(),
            host,
            agent_id,
            journal,
            next_batch_seq,
            committed,
            leftovers: false,
            first: true,
            unwritten: Vec::new(),
        };
        spool.remove_uncommitted()?;
        Ok((spool, receiver))
    }

    fn remove_uncommitted(&self) -> anyhow::Result<()> {
        for file in folder::list(&self.folder)? {
            if file.batch_seq >= self.next_batch_seq {
                fs::remove_file(&file.path)
                    .with_context(|| format!("failed to remove {}", file.path.display()))?;
            }
        }
        Ok(())
    }

    fn write_status(&self, checkpoint: &Checkpoint<'_>) {
        if let Err(error) = status::write(&self.folder, &self.host, &self.agent_id, checkpoint) {
            tracing::warn!("status is out of date: {error:#}");
        }
    }

    fn write_files(&self, rows: &Rows) -> anyhow::Result<u64> {
        let mut batch_seq = self.next_batch_seq;
        for table in tables_with_rows(rows) {
            let origin = Origin {
                host: &self.host,
                agent_id: &self.agent_id,
                batch_seq: batch_seq as i64,
            };
            folder::write_spool_file(&self.folder, table, rows, origin)?;
            batch_seq += 1;
        }
        if batch_seq > self.next_batch_seq {
            folder::sync_folder(&self.folder)?;
        }
        Ok(batch_seq)
    }

    fn write_frame(
        &mut self,
        rows: &Rows,
        checkpoint: &mut Checkpoint<'_>,
        next_batch_seq: u64,
    ) -> anyhow::Result<()> {
        self.unwritten.extend(checkpoint.ledger.take_changes());
        let state = State {
            next_batch_seq,
            generation: checkpoint.generation,
            ring_position: checkpoint.ring_position,
            waiting: checkpoint.waiting.clone(),
            lost_reported: checkpoint.lost_reported.to_vec(),
            boot_id: self.host.boot_id.clone(),
            window: Some(checkpoint.window.clone()),
        };
        if self.first || self.journal.wants_rewrite() {
            let frame = Frame {
                state,
                changes: checkpoint.ledger.snapshot().collect(),
                stacks: checkpoint.stacks.known(),
            };
            self.journal.rewrite(&frame)?;
        } else {
            let stacks = rows.stacks.iter().map(|stack| stack.stack_id).collect();
            let frame = Frame {
                state,
                changes: std::mem::take(&mut self.unwritten),
                stacks,
            };
            if let Err(error) = self.journal.append(&frame) {
                self.unwritten = frame.changes;
                return Err(error);
            }
        }
        self.unwritten.clear();
        self.first = false;
        Ok(())
    }
}

impl Output for Spool {
    fn commit(&mut self, rows: &Rows, mut checkpoint: Checkpoint<'_>) -> anyhow::Result<()> {
        if self.leftovers {
            self.remove_uncommitted()?;
        }
        self.leftovers = true;
        let next_batch_seq = self.write_files(rows)?;
        self.write_frame(rows, &mut checkpoint, next_batch_seq)?;
        self.leftovers = false;
        self.next_batch_seq = next_batch_seq;
        // Nobody listens when no collector is configured.
        self.committed.send_replace(next_batch_seq);
        // The rows are taken: what fails from here on must not have them written again.
        self.write_status(&checkpoint);
        Ok(())
    }

    fn idle(&mut self, checkpoint: &Checkpoint<'_>) {
        self.write_status(checkpoint);
    }
}

/// Folders of plain Parquet files, one per table.
pub struct TraceFolder {
    folder: PathBuf,
    host: Host,
    agent_id: String,
    next_batch_seq: u64,
}

impl TraceFolder {
    /// Refuses a folder that holds something already.
    pub fn create(folder: &Path, host: Host, agent_id: String) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("failed to create {}", folder.display()))?;
        let mut entries =
            fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))?;
        if entries.next().is_some() {
            anyhow::bail!(
                "{} is not empty; name a new folder for the trace",
                folder.display()
            );
        }
        Ok(Self {
            folder: folder.to_path_buf(),
            host,
            agent_id,
            next_batch_seq: 1,
        })
    }
}

impl Output for TraceFolder {
    fn commit(&mut self, rows: &Rows, checkpoint: Checkpoint<'_>) -> anyhow::Result<()> {
        checkpoint.ledger.take_changes();
        let mut written = Vec::new();
        for table in tables_with_rows(rows) {
            let batch_seq = self.next_batch_seq + written.len() as u64;
            let origin = Origin {
                host: &self.host,
                agent_id: &self.agent_id,
                batch_seq: batch_seq as i64,
            };
            match folder::write_trace_file(&self.folder, table, rows, origin) {
                Ok(path) => written.push(path),
                Err(error) => {
                    // All or nothing: the caller keeps all rows and writes them again.
                    for path in written {
                        let _ = fs::remove_file(path);
                    }
                    return Err(error);
                }
            }
        }
        self.next_batch_seq += written.len() as u64;
        Ok(())
    }
}
