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
mod link;
mod ranges;
mod shelf;
mod state;
#[cfg(test)]
mod tests;
pub mod view;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use vramscope_wire::{Table, parquet_file};

use crate::host::clock;
use crate::spool::room::{RECORDER_FULL, RECORDER_OFF, RECORDER_OVERWRITTEN};
use crate::spool::rows::{AllocRow, Rows};
use crate::spool::tables::{self, Origin};
use crate::spool::{folder, room};
use files::{Entry, OOM, Pick};
pub use link::{Answer, Link, Request};
use shelf::Shelf;
pub use state::Stretch;
use state::{Cause, Found, MAX_SPANS, Span, State};

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

    /// New stacks may be referred to by rows that come later.
    fn keep_stacks(&mut self, rows: &Rows, carrier: &dyn Carrier) {
        if rows.stacks.is_empty() || self.options.is_off() || self.options.travel == Travel::Always
        {
            return;
        }
        let new: Vec<_> = rows
            .stacks
            .iter()
            .filter(|stack| !self.shelf.has(stack.stack_id))
            .cloned()
            .collect();
        if new.is_empty() || !carrier.leaves_reserve(0) {
            return;
        }
        let ids: Vec<i64> = new.iter().map(|stack| stack.stack_id).collect();
        let origin = carrier.origin();
        let used = origin.batch_seq as u64;
        let only = Rows {
            stacks: new,
            ..Rows::default()
        };
        let kept = tables::batches(Table::Stacks, &only, origin)
            .collect::<Result<Vec<_>, _>>()
            .map_err(anyhow::Error::from)
            .and_then(|batches| self.shelf.put(&ids, &batches, used));
        if let Err(error) = kept {
            self.complain(&error);
        }
    }

    /// Writes the rows of a flush as files of the ring. What finds no room is counted and gone.
    fn record(&mut self, rows: &mut Rows, carrier: &mut dyn Carrier, taken: &mut Taken) {
        let of_ooms = |row: &&AllocRow| row.layer == FRAMEWORK && row.op == OOM;
        let ooms: Vec<AllocRow> = rows.alloc_events.iter().filter(of_ooms).cloned().collect();
        if self.options.is_off() {
            let not_kept = rows.framework_events.len() as u64;
            rows.framework_events.clear();
            self.off_rows += not_kept;
            taken.count(RECORDER_OFF, not_kept);
            return;
        }
        let mut written = 0;
        let mut ooms = ooms.as_slice();
        while written < rows.framework_events.len() || !ooms.is_empty() {
            let end = rows.framework_events.len().min(written + ROWS_PER_FILE);
            let piece = &rows.framework_events[written..end];
            match self.write(piece, ooms, carrier, taken) {
                Ok(true) => {}
                Ok(false) => break,
                // Whatever it is: the other rows must not wait for the recorder's.
                Err(error) => {
                    self.complain(&error);
                    break;
                }
            }
            written = end;
            ooms = &[];
        }
        let dropped = (rows.framework_events.len() - written) as u64;
        if dropped > 0 {
            self.full_rows += dropped;
            taken.count(RECORDER_FULL, dropped);
            rows.framework_events.truncate(written);
        }
    }

    /// Writes one file. False if there is no room for it.
    fn write(
        &mut self,
        events: &[AllocRow],
        ooms: &[AllocRow],
        carrier: &mut dyn Carrier,
        taken: &mut Taken,
    ) -> anyhow::Result<bool> {
        let all = || events.iter().chain(ooms);
        let contents = files::contents(all());
        let (Some(first_ns), Some(last_ns)) = (
            contents.iter().map(|content| content.first_ns).min(),
            contents.iter().map(|content| content.last_ns).max(),
        ) else {
            return Ok(true);
        };
        let origin = carrier.origin();
        let number = origin.batch_seq as u64;
        let batches =
            tables::event_batches(events, origin).chain(tables::event_batches(ooms, origin));
        let note = serde_json::to_string(&contents)?;
        let bytes = parquet_file::encode_with_note(Table::AllocEvents, batches, Some(note))?;
        let size = room::on_disk(bytes.len() as u64);
        self.make_room(size, taken);
        if self.bytes() + size > self.options.max_bytes {
            self.complain(&anyhow::anyhow!(
                "one flush does not fit recorder_bytes = {}; raise it",
                self.options.max_bytes
            ));
            return Ok(false);
        }
        if !carrier.leaves_reserve(size) {
            self.complain(&anyhow::anyhow!(
                "the file system has no room besides its reserve"
            ));
            return Ok(false);
        }
        let entry = Entry {
            number,
            first_ns,
            last_ns,
            rows: (events.len() + ooms.len()) as u64,
            bytes: bytes.len() as u64,
            contents: Some(Arc::new(contents)),
        };
        folder::write_durably(&entry.path(&self.folder), &bytes)?;
        self.uncommitted_from.get_or_insert(number);
        carrier.advance();
        taken.must_commit = true;
        self.uncommitted_rows += entry.rows;
        self.entries.push(entry);
        let mut missing = HashSet::new();
        for id in all()
            .flat_map(|row| [row.stack_id, row.alloc_stack_id])
            .flatten()
        {
            if !self.shelf.use_it(id, number) && missing.len() < MAX_ASKED {
                missing.insert(id);
            }
        }
        if !missing.is_empty() && self.asked.is_none_or(|at| at.elapsed() >= ASK_INTERVAL) {
            self.asked = Some(Instant::now());
            taken.stacks.extend(missing);
        }
        Ok(true)
    }

    fn bytes(&self) -> u64 {
        let of_events = self.entries.iter().map(|entry| room::on_disk(entry.bytes));
        of_events.sum::<u64>() + self.shelf.bytes()
    }

    /// Overwrites the oldest files until one of that size fits.
    fn make_room(&mut self, size: u64, taken: &mut Taken) {
        let limit = self.options.max_bytes;
        let held = self.bytes();
        if held + size <= limit && self.entries.len() < MAX_FILES {
            return;
        }
        let wanted = limit.saturating_sub(size).saturating_sub(limit / SHARE);
        let (mut left, mut count) = (held, 0);
        let most_files = MAX_FILES - MAX_FILES / SHARE as usize;
        for entry in &self.entries {
            if left <= wanted && self.entries.len() - count < most_files {
                break;
            }
            left = left.saturating_sub(room::on_disk(entry.bytes));
            count += 1;
        }
        self.overwrite(count, taken);
    }

    /// Overwrites what is too old, or all of it if nothing is to be kept.
    fn age(&mut self, taken: &mut Taken) {
        if self.options.is_off() {
            return self.overwrite(self.entries.len(), taken);
        }
        let age = nanos(self.options.max_age);
        let oldest_kept = (self.now_ns)().saturating_sub(age);
        let is_due = self
            .entries
            .first()
            .is_some_and(|entry| entry.last_ns < oldest_kept - age / SHARE as i64);
        if !is_due {
            return;
        }
        let count = self
            .entries
            .iter()
            .take_while(|entry| entry.last_ns < oldest_kept)
            .count();
        self.overwrite(count, taken);
    }

    /// Lets the oldest `count` files go: counted first, then removed, so that a kill in between
    /// removes them at the next start and counts nothing twice. Files of a flush that is not
    /// committed stay.
    fn overwrite(&mut self, count: usize, taken: &mut Taken) {
        let from = self.uncommitted_from.unwrap_or(u64::MAX);
        let committed = self.entries.partition_point(|entry| entry.number < from);
        let count = count.min(committed);
        if count == 0 {
            return;
        }
        let mut gone: Vec<Entry> = self.entries.drain(..count).collect();
        let before = self.state.overwritten_rows;
        for entry in &mut gone {
            if let Err(error) = self.book_overwritten(entry) {
                // Nothing can be said of its processes: it counts as a whole.
                tracing::warn!("a file of the recorder cannot be read: {error:#}");
                let stretch = Stretch {
                    first_ns: entry.first_ns,
                    last_ns: entry.last_ns,
                    rows: entry.rows,
                };
                for state in [&mut self.state, &mut self.committed] {
                    state.overwritten_rows += entry.rows;
                    match &mut state.overwritten_others {
                        Some(others) => others.join(stretch),
                        None => state.overwritten_others = Some(stretch),
                    }
                }
            }
        }
        taken.count(RECORDER_OVERWRITTEN, self.state.overwritten_rows - before);
        let oldest = self.entries.first().map(|entry| entry.number);
        let horizon = gone.last().map_or(0, |last| last.number + 1);
        for state in [&mut self.state, &mut self.committed] {
            state.horizon = horizon;
            state.forget(oldest);
        }
        // True whether this flush is committed or not: nothing of it is in these files.
        let saved = state::save(&self.folder, &self.committed, None);
        for entry in &gone {
            let _ = fs::remove_file(entry.path(&self.folder));
        }
        // A disk that is full to the last block takes it now.
        if saved.is_err()
            && let Err(error) = state::save(&self.folder, &self.committed, None)
        {
            self.complain(&error);
        }
        self.shelf.sweep(oldest);
    }

    fn book_overwritten(&mut self, entry: &mut Entry) -> anyhow::Result<()> {
        let contents = entry.contents(&self.folder)?;
        let path = entry.path(&self.folder);
        for content in contents.iter() {
            let (first_ns, last_ns) = (content.first_ns, content.last_ns);
            let travelled = self.committed.travelled(entry.number, content.process_id);
            let all = Pick {
                process_id: Some(content.process_id),
                from_ns: i64::MIN,
                to_ns: i64::MAX,
            };
            let rows = if !travelled.touches(first_ns, last_ns) {
                content.rows
            } else if travelled.covers(first_ns, last_ns) {
                0
            } else {
                files::count(&path, all, &travelled)?.0
            };
            let stretch = Stretch {
                first_ns,
                last_ns,
                rows,
            };
            for state in [&mut self.state, &mut self.committed] {
                state.overwrite(content.process_id, content.pid, stretch);
                // Spans that were on their way to it come too late.
                for span in &mut state.spans {
                    let pick = Pick {
                        process_id: Some(span.process_id),
                        from_ns: span.from_ns,
                        to_ns: span.to_ns,
                    };
                    let is_late = !span.is_done && span.next_file <= entry.number;
                    if rows == 0 || !is_late || !pick.meets(content) {
                        continue;
                    }
                    let stretch = Stretch {
                        first_ns: first_ns.max(span.from_ns),
                        last_ns: last_ns.min(span.to_ns - 1),
                        rows: files::count(&path, pick, &travelled)?.0,
                    };
                    match span.gone.last_mut() {
                        Some(last) => last.join(stretch),
                        None => span.gone.push(stretch),
                    }
                }
            }
        }
        Ok(())
    }

    /// An OOM, or an allocation that the driver or the runtime refused.
    fn look_for_triggers(&mut self, rows: &[AllocRow]) {
        for row in rows {
            let is_failed =
                row.op == "alloc" && row.layer != FRAMEWORK && row.result.is_some_and(|r| r != 0);
            if row.op == OOM {
                self.trigger(Cause::Oom, row.process_id, row.ts_ns);
            } else if is_failed {
                self.trigger(Cause::FailedAllocation, row.process_id, row.ts_ns);
            }
        }
    }

    /// When the last row of a span that ends then has come: rows come late by as much as an event
    /// waits for another one, or for an agent that was held up until now.
    fn over_ns(&self, to_ns: i64) -> i64 {
        let settle = nanos(self.options.settle);
        to_ns.max((self.now_ns)()).saturating_add(settle)
    }

    fn trigger(&mut self, cause: Cause, process_id: i64, ts_ns: i64) {
        self.state.triggers += 1;
        let from_ns = ts_ns.saturating_sub(nanos(self.options.before));
        let to_ns = ts_ns.saturating_add(nanos(self.options.after));
        let over_ns = self.over_ns(to_ns);
        // One that goes on is made longer, unless rows behind its end were passed by already.
        let goes_on = self.state.spans.iter_mut().find(|span| {
            let is_alike = span.process_id == process_id && span.cause == cause;
            is_alike
                && !span.is_done
                && span.from_ns <= from_ns
                && from_ns <= span.to_ns
                && (to_ns <= span.to_ns || span.seen_ns < span.to_ns)
        });
        if let Some(span) = goes_on {
            span.to_ns = span.to_ns.max(to_ns);
            span.over_ns = span.over_ns.max(over_ns);
            span.triggers += 1;
        } else if !self.add(cause, process_id, from_ns, to_ns) {
            self.state.triggers_refused += 1;
        }
    }

    fn add(&mut self, cause: Cause, process_id: i64, from_ns: i64, to_ns: i64) -> bool {
        if self.state.spans.len() >= MAX_SPANS {
            return false;
        }
        let over_ns = self.over_ns(to_ns);
        let span = Span {
            cause,
            process_id,
            from_ns,
            to_ns,
            triggers: 1,
            next_file: self.state.horizon.max(self.state.floor),
            seen_ns: i64::MIN,
            is_done: false,
            rows: 0,
            rows_before: 0,
            last_batch_seq: 0,
            gone: Vec::new(),
            over_ns,
        };
        if span.of_request().is_some() {
            // It came from elsewhere, so it does not depend on whether this flush comes to count.
            self.committed.spans.push(span.clone());
        }
        self.state.spans.push(span);
        true
    }

    /// Takes a request on, or refuses it.
    fn accept(&mut self, request: Request) {
        let of_request = |span: &&Span| span.of_request() == Some(&request.id);
        if self.state.spans.iter().any(|span| of_request(&span)) {
            return;
        }
        let open = |span: &&Span| !span.is_done && span.of_request().is_some();
        let open = self.state.spans.iter().filter(open).count();
        let why = if request.from_ns >= request.to_ns {
            Some("its end is not behind its beginning".to_string())
        } else if self.options.travel == Travel::Never {
            Some("raw framework events stay on this host (framework_events = \"never\"); use `vramscope-agent recorder export` there".to_string())
        } else if self.options.travel == Travel::Always && self.entries.is_empty() {
            Some("this agent records nothing: raw framework events travel anyway (framework_events = \"always\")".to_string())
        } else if self.options.is_off() {
            Some(
                "this agent's recorder is off (recorder_bytes or recorder_minutes is 0)"
                    .to_string(),
            )
        } else if request.to_ns.saturating_sub((self.now_ns)()) > nanos(self.options.max_age) {
            Some("it ends further in the future than the recorder reaches".to_string())
        } else if open >= MAX_REQUESTS {
            Some(format!(
                "{MAX_REQUESTS} requests are open already; ask again later"
            ))
        } else {
            None
        };
        let Request {
            id,
            process_id,
            from_ns,
            to_ns,
            reason,
        } = request;
        let why = match why {
            Some(why) => why,
            None => {
                let cause = Cause::Request {
                    id: id.clone(),
                    reason,
                };
                if self.add(cause, process_id, from_ns, to_ns) {
                    return;
                }
                format!("{MAX_SPANS} spans are remembered already; ask again later")
            }
        };
        // The collector keeps refusals; here the last ones do.
        while self.refusals.len() >= MAX_REQUESTS {
            self.refusals.pop_first();
        }
        self.refusals.insert(id, Answer::refusal(why));
    }

    /// Carries rows of open spans into the spool, for a while, and writes down how far they came.
    pub fn ship(&mut self, carrier: &mut dyn Carrier, taken: &mut Taken) -> anyhow::Result<()> {
        self.waits_for_spool = false;
        if self.paused.is_some_and(|at| at.elapsed() < CARRY_PAUSE) {
            return Ok(());
        }
        let end = Instant::now() + self.carry_time;
        let mut carried = None;
        for index in 0..self.state.spans.len() {
            if !self.state.spans[index].is_done {
                self.ship_span(index, carrier, end, &mut carried)?;
            }
        }
        taken.must_commit |= carried.is_some();
        if self.state != self.committed {
            // Without a batch it is true at once.
            let staged = (carried.unwrap_or(0), &self.state);
            if let Err(error) = state::save(&self.folder, &self.committed, Some(staged)) {
                // What was carried must not count then. Without it the next flush goes on.
                self.paused = Some(Instant::now());
                if carried.is_some() {
                    return Err(error);
                }
                self.complain(&error);
            }
            self.is_staged = carried.is_some();
        }
        Ok(())
    }

    fn ship_span(
        &mut self,
        index: usize,
        carrier: &mut dyn Carrier,
        end: Instant,
        carried: &mut Option<u64>,
    ) -> anyhow::Result<()> {
        let span = self.state.spans[index].clone();
        let pick = Pick {
            process_id: Some(span.process_id),
            from_ns: span.from_ns,
            to_ns: span.to_ns,
        };
        let first = self
            .entries
            .partition_point(|entry| entry.number < span.next_file);
        for at in first..self.entries.len() {
            if Instant::now() >= end {
                return Ok(());
            }
            let (number, last_ns) = (self.entries[at].number, self.entries[at].last_ns);
            let travelled = self.state.travelled(number, span.process_id);
            let found = self.entries[at]
                .contents(&self.folder)
                .map(|contents| contents.iter().any(|content| pick.meets(content)))
                .and_then(|meets| {
                    let path = self.entries[at].path(&self.folder);
                    let batch_seq = carrier.origin().batch_seq as u64;
                    meets
                        .then(|| files::pick_untravelled(&path, pick, &travelled, batch_seq))
                        .transpose()
                });
            let picked = match found {
                Ok(picked) => picked.unwrap_or_default(),
                // A damaged file must not hold up the others. It is counted when it goes.
                Err(error) => {
                    self.complain(&error);
                    files::Picked::default()
                }
            };
            if picked.rows > 0 {
                let bytes = parquet_file::encode(Table::AllocEvents, &picked.batches)?;
                if !carrier.has_room(bytes.len() as u64) {
                    self.waits_for_spool = true;
                    return Ok(());
                }
                let batch_seq = carrier.origin().batch_seq as u64;
                if !carrier.carry(&bytes)? {
                    self.waits_for_spool = true;
                    return Ok(());
                }
                self.uncommitted_from.get_or_insert(batch_seq);
                *carried = Some(batch_seq);
                self.state.travelled_rows += picked.rows;
            }
            let span = &mut self.state.spans[index];
            if picked.rows > 0 {
                span.last_batch_seq = carrier.origin().batch_seq as u64 - 1;
            }
            span.rows += picked.rows;
            span.rows_before += picked.rows_before;
            span.next_file = number + 1;
            span.seen_ns = span.seen_ns.max(last_ns);
        }
        self.state.spans[index].is_done = (self.now_ns)() >= span.over_ns;
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

    fn publish(&self) {
        let mut answers = self.refusals.clone();
        for span in &self.committed.spans {
            if let (Some(id), true) = (span.of_request(), span.is_done) {
                answers.insert(id.to_string(), self.answer(span));
            }
        }
        self.link.publish(answers);
    }

    fn answer(&self, span: &Span) -> Answer {
        let state = &self.committed;
        let holds = match (self.entries.first(), self.entries.last()) {
            (Some(first), Some(last)) => format!(
                "the recorder holds {} to {}",
                view::time(first.first_ns),
                view::time(last.last_ns)
            ),
            _ => "the recorder is empty".to_string(),
        };
        let doubt = if state.floor > state.horizon {
            "; files from before its state was damaged do not travel"
        } else {
            ""
        };
        Answer {
            refused: None,
            remark: format!("{holds}{doubt}"),
            rows: span.rows,
            rows_before: span.rows_before,
            last_batch_seq: span.last_batch_seq,
            overwritten: state.overwritten_in(span.process_id, span.from_ns, span.to_ns),
        }
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
