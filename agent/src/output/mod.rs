//! Where rows go: into the spool, with the journal (the daemon), or into a trace's folders.

mod trace_folder;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tokio::sync::watch;
use vramscope_wire::Table;

use crate::engine::{Counts, Totals};
use crate::host::discovery::Discovery;
use crate::host::identity::Host;
use crate::ledger::Ledger;
use crate::probes::order::Waiting;
use crate::recorder::{Carrier, Recorder, Taken};
use crate::spool::folder;
use crate::spool::journal::{Frame, Journal, State};
use crate::spool::requeue;
use crate::spool::room::{self, Class, Room};
use crate::spool::rows::{ProcessRow, Rows, StackRow};
use crate::spool::tables::{Origin, tables_with_rows};
use crate::stacks::Stacks;
use crate::status;
use crate::traffic::Scraper;
pub use trace_folder::TraceFolder;

/// The engine's state at a flush.
pub struct Checkpoint<'a> {
    pub generation: u64,
    pub ring_position: u64,
    pub waiting: Waiting,
    pub lost_reported: &'a [u64],
    /// Python frames that were not read or sent, by cause.
    pub python_lost: BTreeMap<String, u64>,
    pub window: &'a Counts,
    pub ledger: &'a mut Ledger,
    pub stacks: &'a Stacks,
    pub totals: &'a Totals,
    pub ring_fill: f64,
    pub discovery: &'a Discovery,
    pub traffic: Option<&'a Scraper>,
}

/// Takes rows for good, or refuses them all: on an error the caller keeps them and tries again.
///
/// A flush is two calls, so that what finds no room is counted in the window that the same
/// flush may close.
pub trait Output: Send {
    /// Prepares rows. What finds no room is taken out of `rows`, counted, and gone.
    fn stage(&mut self, _rows: &mut Rows) -> anyhow::Result<Dropped> {
        Ok(Dropped::default())
    }

    /// Takes the rows that were prepared.
    fn commit(&mut self, rows: &Rows, checkpoint: Checkpoint<'_>) -> anyhow::Result<()>;

    /// There was nothing to take.
    fn idle(&mut self, _checkpoint: &Checkpoint<'_>) {}
}

/// What found no room.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Rows by cause, as `agent_windows.lost_by_cause` names it.
    pub rows: BTreeMap<&'static str, u64>,
    /// Stacks that have no row: they are to be named again when next seen.
    pub stacks: Vec<i64>,
    /// Not even a window's row can be written now: let the window go on.
    pub window_waits: bool,
    /// Rows by cause of which the flight recorder tells.
    pub recorder: BTreeMap<&'static str, u64>,
    /// Files were written of rows that are not in this flush any more.
    pub must_commit: bool,
}

impl Dropped {
    fn add(&mut self, table: Table, rows: usize) {
        if rows > 0 {
            *self.rows.entry(room::cause(table)).or_default() += rows as u64;
        }
    }
}

/// Rows of `alloc_events` in one file at most. A process that ends may free millions at once;
/// one file of these would be more than a message to the collector may hold.
const ROWS_PER_FILE: usize = 65_536;
/// Blocks of `segments` in one file, for the same reason: some 60 bytes each before compression.
const BLOCKS_PER_FILE: usize = 200_000;
/// Stacks and processes that wait for room in memory at most; about 16 MiB at worst.
const OWED: usize = 1024;

/// A spool folder with its journal.
pub struct Spool {
    folder: PathBuf,
    host: Host,
    agent_id: String,
    journal: Journal,
    room: Room,
    next_batch_seq: u64,
    /// Number behind the files that were prepared.
    staged_seq: u64,
    /// Tells the sender up to which number files count.
    committed: watch::Sender<u64>,
    /// A failed commit may have left files that do not count.
    leftovers: bool,
    /// The journal holds no whole state of this run yet.
    first: bool,
    /// Changes whose frame could not be written.
    unwritten: Vec<crate::ledger::Change>,
    /// Rows without room that later rows refer to: they are few, and wait here.
    owed_stacks: Vec<StackRow>,
    owed_processes: Vec<ProcessRow>,
    /// Dropped since the caller was last told.
    dropped: Dropped,
    /// Refused files were given new numbers, which the journal does not know yet.
    requeued: bool,
    recorder: Option<Recorder>,
    /// What the recorder counted since the caller was last told.
    recorded: Taken,
}

impl Spool {
    /// Opens the spool after its journal was read; removes files that the journal does not know.
    pub fn open(
        folder: &Path,
        host: Host,
        agent_id: String,
        journal: Journal,
        next_batch_seq: u64,
        room: Room,
    ) -> anyhow::Result<(Self, watch::Receiver<u64>)> {
        let next_batch_seq = next_batch_seq.max(1);
        let (committed, receiver) = watch::channel(next_batch_seq);
        let mut spool = Self {
            folder: folder.to_path_buf(),
            host,
            agent_id,
            journal,
            room,
            next_batch_seq,
            staged_seq: next_batch_seq,
            committed,
            leftovers: false,
            first: true,
            unwritten: Vec::new(),
            owed_stacks: Vec::new(),
            owed_processes: Vec::new(),
            dropped: Dropped::default(),
            requeued: false,
            recorder: None,
            recorded: Taken::default(),
        };
        spool.remove_uncommitted()?;
        spool.requeue();
        Ok((spool, receiver))
    }

    /// Raw framework rows go into a flight recorder from now on.
    pub fn record_into(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Lets the recorder work with this spool's numbers and room.
    fn with_recorder(
        &mut self,
        work: impl FnOnce(&mut Recorder, &mut Self, &mut Taken) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Some(mut recorder) = self.recorder.take() else {
            return Ok(());
        };
        // Kept apart from what fails: what was counted stays counted.
        let mut recorded = std::mem::take(&mut self.recorded);
        let result = work(&mut recorder, self, &mut recorded);
        self.recorder = Some(recorder);
        self.recorded = recorded;
        result
    }

    fn remove_uncommitted(&mut self) -> anyhow::Result<()> {
        for file in folder::list(&self.folder)? {
            if file.batch_seq >= self.next_batch_seq {
                fs::remove_file(&file.path)
                    .with_context(|| format!("failed to remove {}", file.path.display()))?;
            }
        }
        self.room.recount()
    }

    /// Gives what a collector refused another try, under new numbers: an old number would be taken
    /// for a resend, and the rows be lost. That it fails is no reason not to start.
    fn requeue(&mut self) {
        let mut requeue = || -> anyhow::Result<()> {
            requeue::settle(&self.folder, self.next_batch_seq)?;
            let room = &self.room;
            let next = requeue::requeue(&self.folder, self.next_batch_seq, |bytes| {
                room.fits(Class::Raw, bytes)
            })?;
            self.requeued = next > self.next_batch_seq;
            self.next_batch_seq = next;
            Ok(())
        };
        if let Err(error) = requeue() {
            tracing::warn!("refused files stay in {}/: {error:#}", folder::REJECTED);
        }
        self.staged_seq = self.next_batch_seq;
        if let Err(error) = self.room.recount() {
            tracing::warn!("the spool's size is not known: {error:#}");
        }
    }

    fn write_status(&self, checkpoint: &Checkpoint<'_>) {
        if let Err(error) = status::write(
            &self.folder,
            &self.host,
            &self.agent_id,
            checkpoint,
            &self.room,
            self.recorder.as_ref().map(Recorder::report),
        ) {
            tracing::warn!("status is out of date: {error:#}");
        }
    }

    /// Writes one file. False if there is no room for it.
    fn write_file(&mut self, table: Table, rows: &Rows) -> anyhow::Result<bool> {
        let origin = Origin {
            host: &self.host,
            agent_id: &self.agent_id,
            batch_seq: self.staged_seq as i64,
        };
        let bytes = folder::encode(table, rows, origin)?;
        self.write_bytes(table, &bytes)
    }

    /// The same of a file that is encoded already, under the number that comes next.
    fn write_bytes(&mut self, table: Table, bytes: &[u8]) -> anyhow::Result<bool> {
        let size = bytes.len() as u64;
        let class = room::class(table);
        if !self.room.fits(class, size) {
            return Ok(false);
        }
        let path = folder::spool_path(&self.folder, self.staged_seq, table);
        self.leftovers = true;
        match folder::write_durably(&path, bytes) {
            Ok(()) => {}
            // Somebody else was faster, or has set us a quota.
            Err(error) if class != Class::Always && room::is_no_space(&error) => {
                tracing::warn!("no room for a file of the spool: {error:#}");
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        self.room.usage().add(size);
        self.staged_seq += 1;
        Ok(true)
    }

    /// Oldest first, as many files as there is room for; the rest is taken out and counted.
    fn stage_alloc_events(&mut self, rows: &mut Rows) -> anyhow::Result<()> {
        if rows.alloc_events.len() <= ROWS_PER_FILE {
            if !self.write_file(Table::AllocEvents, rows)? {
                self.dropped
                    .add(Table::AllocEvents, rows.alloc_events.len());
                rows.alloc_events.clear();
            }
            return Ok(());
        }
        let mut written = 0;
        while written < rows.alloc_events.len() {
            let end = rows.alloc_events.len().min(written + ROWS_PER_FILE);
            let part = Rows {
                alloc_events: rows.alloc_events[written..end].to_vec(),
                ..Rows::default()
            };
            if !self.write_file(Table::AllocEvents, &part)? {
                break;
            }
            written = end;
        }
        self.dropped
            .add(Table::AllocEvents, rows.alloc_events.len() - written);
        rows.alloc_events.truncate(written);
        Ok(())
    }

    /// As many files as there is room for, none with more blocks than a message may carry.
    fn stage_segments(&mut self, rows: &mut Rows) -> anyhow::Result<()> {
        let segments = std::mem::take(&mut rows.segments);
        let mut rest = segments.as_slice();
        let mut written = 0;
        while !rest.is_empty() {
            let mut blocks = 0;
            let fitting = rest.iter().take_while(|segment| {
                blocks += segment.blocks.len();
                blocks <= BLOCKS_PER_FILE
            });
            // One that is larger than a file should be has a file of its own.
            let (part, later) = rest.split_at(fitting.count().max(1));
            let part = Rows {
                segments: part.to_vec(),
                ..Rows::default()
            };
            if !self.write_file(Table::Segments, &part)? {
                break;
            }
            written += part.segments.len();
            rest = later;
        }
        self.dropped.add(Table::Segments, segments.len() - written);
        rows.segments = segments;
        rows.segments.truncate(written);
        Ok(())
    }

    fn stage_table(&mut self, table: Table, rows: &mut Rows) -> anyhow::Result<()> {
        match table {
            Table::AllocEvents => return self.stage_alloc_events(rows),
            Table::Segments => return self.stage_segments(rows),
            // Written when the window is closed.
            Table::AgentWindows => return Ok(()),
            _ => {}
        }
        if self.write_file(table, rows)? {
            return Ok(());
        }
        match table {
            Table::Stacks => {
                self.owed_stacks = std::mem::take(&mut rows.stacks);
                let spare = self.owed_stacks.split_off(self.owed_stacks.len().min(OWED));
                // Not counted: they are written once something refers to them again.
                self.dropped
                    .stacks
                    .extend(spare.iter().map(|stack| stack.stack_id));
            }
            Table::Processes => {
                self.owed_processes = std::mem::take(&mut rows.processes);
                let spare = self
                    .owed_processes
                    .split_off(self.owed_processes.len().min(OWED));
                self.dropped.add(table, spare.len());
            }
            Table::Devices => self.dropped.add(table, take(&mut rows.devices)),
            Table::HostBuffers => self.dropped.add(table, take(&mut rows.host_buffers)),
            Table::StackWindows => self.dropped.add(table, take(&mut rows.stack_windows)),
            Table::DeviceWindows => self.dropped.add(table, take(&mut rows.device_windows)),
            Table::AllocatorSamples => self.dropped.add(table, take(&mut rows.allocator_samples)),
            Table::Traffic => self.dropped.add(table, take(&mut rows.traffic)),
            // The first three were dealt with above; no agent has rows of other tables.
            _ => {}
        }
        Ok(())
    }

    fn write_frame(&mut self, rows: &Rows, checkpoint: &mut Checkpoint<'_>) -> anyhow::Result<()> {
        self.unwritten.extend(checkpoint.ledger.take_changes());
        let state = State {
            next_batch_seq: self.staged_seq,
            generation: checkpoint.generation,
            ring_position: checkpoint.ring_position,
            waiting: checkpoint.waiting.clone(),
            lost_reported: checkpoint.lost_reported.to_vec(),
            boot_id: self.host.boot_id.clone(),
            window: Some(checkpoint.window.clone()),
        };
        // On a small disk the journal itself may be what fills it.
        let tight = !self.room.fits(Class::Raw, 0);
        if self.first || self.journal.wants_rewrite(tight) {
            let owed: HashSet<_> = self.owed_stacks.iter().map(|s| s.stack_id).collect();
            let mut stacks = checkpoint.stacks.known();
            stacks.retain(|stack| !owed.contains(stack));
            let frame = Frame {
                state: state.clone(),
                changes: checkpoint.ledger.snapshot().collect(),
                stacks,
            };
            match self.journal.rewrite(&frame) {
                Ok(()) => {
                    self.unwritten.clear();
                    self.first = false;
                    return Ok(());
                }
                // A rewrite needs room for the whole state, what changed needs less.
                Err(error) if !self.first && room::is_no_space(&error) => {}
                Err(error) => return Err(error),
            }
        }
        let frame = Frame {
            state,
            changes: std::mem::take(&mut self.unwritten),
            stacks: rows.stacks.iter().map(|stack| stack.stack_id).collect(),
        };
        if let Err(error) = self.journal.append(&frame) {
            self.unwritten = frame.changes;
            return Err(error);
        }
        Ok(())
    }
}

/// Empties a table; how many rows it had.
fn take<R>(rows: &mut Vec<R>) -> usize {
    std::mem::take(rows).len()
}

impl Output for Spool {
    fn stage(&mut self, rows: &mut Rows) -> anyhow::Result<Dropped> {
        if self.leftovers {
            self.remove_uncommitted()?;
            self.leftovers = false;
        }
        self.staged_seq = self.next_batch_seq;
        self.room.refresh()?;
        // What waited for room comes first.
        rows.stacks.splice(0..0, self.owed_stacks.drain(..));
        rows.processes.splice(0..0, self.owed_processes.drain(..));
        self.with_recorder(|recorder, spool, taken| recorder.take(rows, spool, taken))?;
        for table in tables_with_rows(rows) {
            self.stage_table(table, rows)?;
        }
        self.with_recorder(|recorder, spool, taken| recorder.ship(spool, taken))?;
        let mut dropped = std::mem::take(&mut self.dropped);
        let recorded = std::mem::take(&mut self.recorded);
        dropped.recorder = recorded.counts;
        dropped.stacks.extend(recorded.stacks);
        dropped.must_commit = recorded.must_commit;
        dropped.window_waits = !self.room.fits_window();
        // Rows that wait for room do not make it full: they may be all there is.
        let waiting = self.owed_stacks.len() + self.owed_processes.len();
        if !dropped.rows.is_empty() {
            self.room.set_full(true);
        } else if waiting == 0 && self.room.has_room_again() {
            self.room.set_full(false);
        }
        Ok(dropped)
    }

    fn commit(&mut self, rows: &Rows, mut checkpoint: Checkpoint<'_>) -> anyhow::Result<()> {
        if !rows.agent_windows.is_empty() {
            self.write_file(Table::AgentWindows, rows)?;
        }
        if self.staged_seq > self.next_batch_seq {
            folder::sync_folder(&self.folder)?;
        }
        self.write_frame(rows, &mut checkpoint)?;
        self.leftovers = false;
        self.next_batch_seq = self.staged_seq;
        if std::mem::take(&mut self.requeued)
            && let Err(error) = requeue::settle(&self.folder, self.next_batch_seq)
        {
            tracing::warn!(
                "old copies of files stay in {}/: {error:#}",
                folder::REJECTED
            );
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.committed();
        }
        // Nobody listens when no collector is configured.
        self.committed.send_replace(self.next_batch_seq);
        // The rows are taken: what fails from here on must not have them written again.
        self.write_status(&checkpoint);
        Ok(())
    }

    fn idle(&mut self, checkpoint: &Checkpoint<'_>) {
        if let Some(recorder) = &mut self.recorder {
            recorder.committed();
        }
        self.write_status(checkpoint);
    }
}

impl Carrier for Spool {
    fn origin(&self) -> Origin<'_> {
        Origin {
            host: &self.host,
            agent_id: &self.agent_id,
            batch_seq: self.staged_seq as i64,
        }
    }

    fn advance(&mut self) {
        self.staged_seq += 1;
    }

    fn leaves_reserve(&self, bytes: u64) -> bool {
        self.room.leaves_reserve(bytes)
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.room.fits_in_half(bytes)
    }

    fn carry(&mut self, parquet: &[u8]) -> anyhow::Result<bool> {
        self.write_bytes(Table::AllocEvents, parquet)
    }
}
