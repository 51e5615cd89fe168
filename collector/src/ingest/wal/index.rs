//! What the log holds, in memory.
//!
//! Invariants:
//! - every entry is in exactly one of `waiting` (rows not committed) and `committed` (rows
//!   committed, line in `batches` not), or gone;
//! - a segment's `left` is the number of its entries in either;
//! - entries come in ascending order of record numbers, so that taking from the front takes a
//!   prefix of each agent's line and of each table.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use vramscope_wire::Table;

use super::{Backlog, Entry, SEGMENT_BYTES, StoreError, segment};

/// The current segment is closed, so that it can go, once it holds this much and nothing that
/// anybody waits for.
const WORTH_DELETING: u64 = 1 << 20;

#[derive(Debug, Default)]
pub(super) struct Index {
    waiting: BTreeMap<u64, Entry>,
    committed: BTreeMap<u64, Entry>,
    agents: HashMap<Arc<str>, OfAgent>,
    segments: BTreeMap<u64, Segment>,
    /// Bytes of payloads waiting or being written.
    bytes: u64,
}

#[derive(Debug, Default)]
struct OfAgent {
    entries: u64,
    highest: u64,
}

#[derive(Debug)]
struct Segment {
    file: Arc<File>,
    bytes: u64,
    left: u64,
    is_closed: bool,
}

impl Index {
    pub(super) fn reserve(&mut self, bytes: u64, limit: u64) -> Result<(), StoreError> {
        let on_disk: u64 = self.segments.values().map(|segment| segment.bytes).sum();
        // An empty log takes any batch: a limit below one batch must not stop the line for ever.
        let fits = self.bytes == 0 || self.bytes.saturating_add(bytes) <= limit;
        // Segments go as wholes: one table that cannot be committed keeps others' batches on disk.
        let has_room = on_disk.saturating_add(bytes)
            <= limit.saturating_mul(2).saturating_add(4 * SEGMENT_BYTES);
        if !fits || !has_room {
            return Err(StoreError::Full {
                held: if fits { on_disk } else { self.bytes },
                limit,
            });
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Takes back what was reserved for a batch that was not written.
    pub(super) fn refuse(&mut self, bytes: u64) {
        self.bytes -= bytes;
    }

    pub(super) fn opened(&mut self, number: u64, file: Arc<File>, bytes: u64) {
        let segment = Segment {
            file,
            bytes,
            left: 0,
            is_closed: false,
        };
        self.segments.insert(number, segment);
    }

    pub(super) fn closed(&mut self, number: u64) {
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.is_closed = true;
        }
    }

    pub(super) fn file(&self, segment: u64) -> Option<Arc<File>> {
        self.segments
            .get(&segment)
            .map(|segment| Arc::clone(&segment.file))
    }

    /// Entries found at start; their bytes were not reserved.
    pub(super) fn add(&mut self, entries: Vec<Entry>) {
        self.bytes += entries.iter().map(|entry| entry.bytes).sum::<u64>();
        self.stored(entries);
    }

    /// Entries that were written; their bytes were reserved.
    pub(super) fn stored(&mut self, entries: Vec<Entry>) {
        for entry in entries {
            if let Some(segment) = self.segments.get_mut(&entry.segment) {
                segment.left += 1;
                segment.bytes = segment.bytes.max(entry.offset + entry.bytes);
            }
            let agent = self
                .agents
                .entry(Arc::clone(&entry.batch.agent))
                .or_default();
            agent.entries += 1;
            agent.highest = agent.highest.max(entry.batch.seq);
            self.waiting.insert(entry.number, entry);
        }
    }

    pub(super) fn highest(&self, agent: &str) -> Option<u64> {
        self.agents.get(agent).map(|agent| agent.highest)
    }

    pub(super) fn oldest(&self, table: Table, budget: u64) -> Vec<Entry> {
        let mut taken = Vec::new();
        let mut decoded = 0u64;
        let of_table = self
            .waiting
            .values()
            .filter(|entry| entry.batch.table == table);
        for entry in of_table {
            decoded = decoded.saturating_add(entry.batch.decoded_bytes);
            if !taken.is_empty() && decoded > budget {
                break;
            }
            taken.push(entry.clone());
        }
        taken
    }

    pub(super) fn waiting(&self) -> Vec<Entry> {
        self.waiting.values().cloned().collect()
    }

    pub(super) fn committed(&mut self, entries: &[Entry]) {
        for entry in entries {
            if let Some(entry) = self.waiting.remove(&entry.number) {
                self.committed.insert(entry.number, entry);
            }
        }
    }

    pub(super) fn unledgered(&self) -> Vec<Entry> {
        self.committed.values().cloned().collect()
    }

    pub(super) fn finish(&mut self, entries: &[Entry]) {
        for entry in entries {
            let known = self
                .waiting
                .remove(&entry.number)
                .or_else(|| self.committed.remove(&entry.number));
            let Some(entry) = known else { continue };
            self.bytes -= entry.bytes;
            if let Some(segment) = self.segments.get_mut(&entry.segment) {
                segment.left -= 1;
            }
            if let Some(agent) = self.agents.get_mut(&entry.batch.agent) {
                agent.entries -= 1;
                if agent.entries == 0 {
                    self.agents.remove(&entry.batch.agent);
                }
            }
        }
    }

    /// Whether the segment being written should be closed: large enough, or large enough to be
    /// worth deleting with nothing in it that anybody waits for.
    pub(super) fn wants_closing(&self, number: u64) -> bool {
        self.segments.get(&number).is_some_and(|segment| {
            segment.bytes >= SEGMENT_BYTES || (segment.left == 0 && segment.bytes >= WORTH_DELETING)
        })
    }

    /// Deletes closed segments that hold nothing any more.
    pub(super) fn sweep(&mut self, root: &Path) {
        self.segments.retain(|number, segment| {
            if !segment.is_closed || segment.left > 0 {
                return true;
            }
            let path = segment::path(root, *number);
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "failed to remove a committed part of the log");
            }
            false
        });
    }

    pub(super) fn backlog(&self) -> Backlog {
        let entries = || self.waiting.values().chain(self.committed.values());
        Backlog {
            files: entries().count() as u64,
            bytes: entries().map(|entry| entry.bytes).sum(),
        }
    }
}
