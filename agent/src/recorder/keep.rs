//! How rows come into the ring, and how they leave it.

use std::collections::HashSet;
use std::fs;
use std::sync::Arc;
use std::time::Instant;

use vramscope_wire::{Table, parquet_file};

use super::files::{self, Entry, OOM, Pick};
use super::{
    ASK_INTERVAL, Carrier, FRAMEWORK, MAX_ASKED, MAX_FILES, ROWS_PER_FILE, Recorder, SHARE,
    Stretch, Taken, Travel, nanos, state,
};
use crate::spool::room::{RECORDER_FULL, RECORDER_OFF, RECORDER_OVERWRITTEN};
use crate::spool::rows::{AllocRow, Rows};
use crate::spool::{folder, room, tables};

impl Recorder {
    /// New stacks may be referred to by rows that come later.
    pub(super) fn keep_stacks(&mut self, rows: &Rows, carrier: &dyn Carrier) {
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
    pub(super) fn record(&mut self, rows: &mut Rows, carrier: &mut dyn Carrier, taken: &mut Taken) {
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

    pub(super) fn bytes(&self) -> u64 {
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
    pub(super) fn age(&mut self, taken: &mut Taken) {
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
                for state in [&mut self.state, &mut self.committed] {
                    state.overwrite_whole(entry.stretch());
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
                    let pick = span.pick();
                    let is_late = !span.is_done && span.next_file <= entry.number;
                    if rows == 0 || !is_late || !pick.meets(content) {
                        continue;
                    }
                    let stretch = Stretch {
                        first_ns: first_ns.max(span.from_ns),
                        last_ns: last_ns.min(span.to_ns - 1),
                        rows: files::count(&path, pick, &travelled)?.0,
                    };
                    span.lose(stretch);
                }
            }
        }
        Ok(())
    }
}
