//! The flight recorder: raw events of frameworks stay on the host, in a bounded ring of Parquet
//! files, and travel when something happens.
//!
//! Framework events can come at 100,000 a second and card. Their roll-ups always travel; the rows
//! themselves come here ([`Recorder::take`]) and go on as ordinary batches ([`Recorder::ship`])
//! when an OOM or a failed allocation of the process, or a collector's request, asks for a span.
//!
//! Invariants:
//! - a flush's rows are in a file here before the journal's frame gives their space in the kernel's
//!   ring back; a file whose number the journal does not know is removed at start. So a kill loses
//!   no row and keeps none twice;
//! - a row travels once: which span has been carried how far is in [`state`], which becomes true in
//!   the same moment as the batches;
//! - a row of an OOM travels at once, as the driver's rows do, and is not among what a span carries;
//! - what is overwritten without having travelled is counted, by process and time;
//! - the ring is bounded in bytes and minutes, has a quota of its own and leaves the file system's
//!   reserve free. New rows that find no room are dropped and counted. Spans travel only while the
//!   spool is less than half full: they never take room from the driver's rows.

mod files;
mod keep;
mod link;
mod ranges;
mod shelf;
mod state;
#[cfg(test)]
mod tests;
mod travel;
pub mod view;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::host::clock;
use crate::spool::room::RECORDER_FULL;
use crate::spool::rows::{AllocRow, Rows};
use crate::spool::tables::Origin;
use files::{Entry, OOM};
pub use link::{Answer, Link, Request};
use shelf::Shelf;
pub use state::Stretch;
use state::{Found, State};

/// Folder below the spool.
pub const FOLDER: &str = "recorder";
/// The layer whose rows come here.
const FRAMEWORK: &str = "framework";
/// Rows of one file at most, as in the spool.
const ROWS_PER_FILE: usize = 65_536;
/// Files at most, whatever their size: a folder is read as a whole.
const MAX_FILES: usize = 20_000;
/// The ring is emptied by this share of it at a time, so that the account of what is gone is
/// seldom written.
const SHARE: u64 = 64;
/// What carrying may take of one flush before the next events have their turn.
const CARRY_TIME: Duration = Duration::from_millis(100);
/// Requests of a collector that are open at a time.
const MAX_REQUESTS: usize = 64;
/// Stacks that are asked for anew in one flush.
const MAX_ASKED: usize = 1024;
/// Asking makes the agent look at all stacks anew: not at every flush.
const ASK_INTERVAL: Duration = Duration::from_secs(10);
/// After the state could not be written, no span is carried for so long.
const CARRY_PAUSE: Duration = Duration::from_secs(60);

/// What becomes of raw framework events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Travel {
    /// They are recorded, and spans travel when something asks for them.
    #[default]
    Triggered,
    /// They travel as the driver's events do, and are not recorded.
    Always,
    /// They are recorded and stay on the host.
    Never,
}

impl std::fmt::Display for Travel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Triggered => "triggered",
            Self::Always => "always",
            Self::Never => "never",
        })
    }
}

/// How the recorder works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub travel: Travel,
    /// 0: nothing is recorded.
    pub max_bytes: u64,
    /// 0: nothing is recorded.
    pub max_age: Duration,
    pub before: Duration,
    pub after: Duration,
    /// How long after a span's end its rows may still come.
    pub settle: Duration,
}

impl Options {
    fn is_off(&self) -> bool {
        self.max_bytes == 0 || self.max_age.is_zero()
    }
}

/// What the recorder needs of the spool: numbers, and a place for batches.
pub trait Carrier {
    /// Who writes; `batch_seq` is the number that comes next.
    fn origin(&self) -> Origin<'_>;

    /// Uses the number up.
    fn advance(&mut self);

    /// Whether a file of that many bytes leaves the file system's reserve free.
    fn leaves_reserve(&self, bytes: u64) -> bool;

    /// Whether a span's file may go into the spool now.
    fn has_room(&self, bytes: u64) -> bool;

    /// Writes a file of events into the spool, under the next number. False if it found no room.
    fn carry(&mut self, parquet: &[u8]) -> anyhow::Result<bool>;
}

/// What a flush did, for whoever keeps count.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Rows by cause, as `agent_windows.lost_by_cause` names it.
    pub counts: BTreeMap<&'static str, u64>,
    /// Stacks that rows refer to and nobody has: they are to be named again.
    pub stacks: Vec<i64>,
    /// Files were written that the journal has to know.
    pub must_commit: bool,
}

impl Taken {
    fn count(&mut self, cause: &'static str, rows: u64) {
        if rows > 0 {
            *self.counts.entry(cause).or_default() += rows;
        }
    }
}

/// What `status` shows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub framework_events: Travel,
    /// False if `recorder_bytes` or `recorder_minutes` is 0.
    pub is_on: bool,
    pub bytes: u64,
    pub bytes_limit: u64,
    pub seconds_limit: u64,
    pub files: usize,
    pub rows: u64,
    /// First and last row that is there, nanoseconds since 1970.
    pub first_ns: Option<i64>,
    pub last_ns: Option<i64>,
    pub stacks: usize,
    /// Since this agent started: rows that were recorded, that found no room, that were not kept.
    pub recorded_rows: u64,
    pub full_rows: u64,
    pub off_rows: u64,
    /// Since the recorder began, over restarts: rows that were overwritten without having
    /// travelled, from when to when; triggers; rows that travelled.
    pub overwritten_rows: u64,
    pub overwritten_first_ns: Option<i64>,
    pub overwritten_last_ns: Option<i64>,
    pub triggers: u64,
    pub triggers_refused: u64,
    pub travelled_rows: u64,
    /// Spans that are under way.
    pub open_spans: usize,
    pub open_requests: usize,
    /// Spans wait until the spool is less than half full.
    pub waits_for_spool: bool,
}

/// See the module's text.
pub struct Recorder {
    folder: PathBuf,
    options: Options,
    link: Arc<Link>,
    entries: Vec<Entry>,
    shelf: Shelf,
    /// The state that the journal vouches for, and the one that it will.
    committed: State,
    state: State,
    refusals: BTreeMap<String, Answer>,
    /// Files from this number on were written by a flush that is not committed.
    uncommitted_from: Option<u64>,
    recorded_rows: u64,
    uncommitted_rows: u64,
    /// The state's file speaks of a batch that is not committed.
    is_staged: bool,
    full_rows: u64,
    off_rows: u64,
    waits_for_spool: bool,
    complained: Option<Instant>,
    asked: Option<Instant>,
    paused: Option<Instant>,
    carry_time: Duration,
    now_ns: fn() -> i64,
}

fn now_ns() -> i64 {
    clock::realtime_ns() as i64
}

fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

impl Recorder {
    /// Opens the ring below a spool folder. `next_batch_seq` is what the journal says: files from
    /// that number on do not count and are removed.
    pub fn open(
        spool: &Path,
        options: Options,
        link: Arc<Link>,
        next_batch_seq: u64,
    ) -> anyhow::Result<Self> {
        let folder = spool.join(FOLDER);
        fs::create_dir_all(&folder)
            .with_context(|| format!("failed to create {}", folder.display()))?;
        let entries = files::list(&folder)?;
        let newest = entries.last().map_or(0, |entry| entry.number);
        let state = match state::load(&folder, Some(next_batch_seq))? {
            Found::State(state) => state,
            Found::Nothing => State::default(),
            Found::Damaged => {
                tracing::error!(
                    state = %folder.join(state::FILE).display(),
                    "the recorder's state is damaged: what it holds stays readable here (vramscope-agent recorder) and does not travel, since it may have; what was overwritten so far is not known any more"
                );
                State {
                    floor: newest + 1,
                    horizon: entries.first().map_or(0, |entry| entry.number),
                    ..State::default()
                }
            }
        };
        let mut recorder = Self {
            shelf: Shelf::open(&folder, newest, options.max_bytes / 4)?,
            folder,
            options,
            link,
            entries,
            committed: state.clone(),
            state,
            refusals: BTreeMap::new(),
            uncommitted_from: Some(next_batch_seq),
            recorded_rows: 0,
            uncommitted_rows: 0,
            is_staged: false,
            full_rows: 0,
            off_rows: 0,
            waits_for_spool: false,
            complained: None,
            asked: None,
            paused: None,
            carry_time: CARRY_TIME,
            now_ns,
        };
        recorder.roll_back()?;
        // Counted as overwritten, and the kill came before they were removed.
        let horizon = recorder.state.horizon;
        for entry in &recorder.entries {
            if entry.number < horizon {
                let _ = fs::remove_file(entry.path(&recorder.folder));
            }
        }
        recorder.entries.retain(|entry| entry.number >= horizon);
        // The numbers of a state that did not come to count are used again.
        state::save(&recorder.folder, &recorder.state, None)?;
        recorder.publish();
        Ok(recorder)
    }

    /// Takes back what a flush wrote that was not committed.
    fn roll_back(&mut self) -> anyhow::Result<()> {
        let Some(from) = self.uncommitted_from.take() else {
            return Ok(());
        };
        self.state = self.committed.clone();
        self.uncommitted_rows = 0;
        if std::mem::take(&mut self.is_staged) {
            // The numbers are given out again, to other batches.
            state::save(&self.folder, &self.committed, None)?;
        }
        let at = self.entries.partition_point(|entry| entry.number < from);
        for entry in self.entries.drain(at..) {
            let path = entry.path(&self.folder);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("failed to remove {}", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes framework rows out of a flush, and looks for what asks for a span.
    pub fn take(
        &mut self,
        rows: &mut Rows,
        carrier: &mut dyn Carrier,
        taken: &mut Taken,
    ) -> anyhow::Result<()> {
        self.roll_back()?;
        taken.must_commit = false;
        self.keep_stacks(rows, carrier);
        if self.options.travel != Travel::Always {
            let is_kept = |row: &AllocRow| row.layer == FRAMEWORK && row.op != OOM;
            let events = &mut rows.alloc_events;
            rows.framework_events
                .extend(events.extract_if(.., |row| is_kept(row)));
            self.record(rows, carrier, taken);
            if self.options.travel == Travel::Triggered {
                self.look_for_triggers(&rows.alloc_events);
            }
        }
        self.age(taken);
        for request in self.link.take() {
            self.accept(request);
        }
        Ok(())
    }

    /// The journal knows what this flush wrote.
    pub fn committed(&mut self) {
        self.uncommitted_from = None;
        self.is_staged = false;
        self.recorded_rows += std::mem::take(&mut self.uncommitted_rows);
        if self.committed != self.state {
            self.committed = self.state.clone();
        }
        self.publish();
    }

    /// Says trouble, at most once a minute: it comes with every flush.
    fn complain(&mut self, error: &anyhow::Error) {
        let is_silent = self
            .complained
            .is_some_and(|said| said.elapsed() < Duration::from_secs(60));
        if !is_silent {
            self.complained = Some(Instant::now());
            tracing::error!(
                recorder = %self.folder.display(),
                "trouble with the flight recorder; rows that it loses are counted as {RECORDER_FULL}: {error:#}"
            );
        }
    }

    pub fn report(&self) -> Report {
        let state = &self.committed;
        let overwritten = || {
            let each = state.overwritten.iter().flat_map(|o| &o.stretches);
            each.chain(&state.overwritten_others)
        };
        let open = || state.spans.iter().filter(|span| !span.is_done);
        Report {
            framework_events: self.options.travel,
            is_on: !self.options.is_off(),
            bytes: self.bytes(),
            bytes_limit: self.options.max_bytes,
            seconds_limit: self.options.max_age.as_secs(),
            files: self.entries.len(),
            rows: self.entries.iter().map(|entry| entry.rows).sum(),
            first_ns: self.entries.iter().map(|entry| entry.first_ns).min(),
            last_ns: self.entries.iter().map(|entry| entry.last_ns).max(),
            stacks: self.shelf.count(),
            recorded_rows: self.recorded_rows,
            full_rows: self.full_rows,
            off_rows: self.off_rows,
            overwritten_rows: state.overwritten_rows,
            overwritten_first_ns: overwritten().map(|stretch| stretch.first_ns).min(),
            overwritten_last_ns: overwritten().map(|stretch| stretch.last_ns).max(),
            triggers: state.triggers,
            triggers_refused: state.triggers_refused,
            travelled_rows: state.travelled_rows,
            open_spans: open().count(),
            open_requests: open().filter(|span| span.of_request().is_some()).count(),
            waits_for_spool: self.waits_for_spool,
        }
    }
}
