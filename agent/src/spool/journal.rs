//! The journal: one file that says what the agent's state is and which spool files count.
//!
//! Format: frames, each `length u32 | crc32 u32 | postcard bytes` (little-endian). The first
//! frame holds the whole state, later ones what changed. A frame that is cut short or damaged
//! ends the journal: it was being written when the agent died.
//!
//! Invariants:
//! - a flush writes its spool files, then appends one frame and fsyncs: that is the moment at
//!   which rows count as taken. Spool files with a `batch_seq` the journal does not know are
//!   removed at start;
//! - the ring's space is given back only after that, so an event is in the ring or in the
//!   journal's account, never in neither;
//! - the file is rewritten when it has grown to [`REWRITE_FACTOR`] times the state.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::folder;
use crate::engine::Counts;
use crate::ledger::Change;
use crate::probes::order::Waiting;

const FILE: &str = "journal";
/// Below this many bytes a rewrite is not worth its fsync.
const REWRITE_BYTES: u64 = 4 << 20;
const REWRITE_FACTOR: u64 = 4;
/// No frame is larger; a length beyond it is damage and must not be allocated.
const MAX_FRAME: u32 = 1 << 30;

/// The agent's state besides the ledger. Small, so every frame has all of it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct State {
    /// Number of the next spool file.
    pub next_batch_seq: u64,
    /// Names the ring that `ring_position` belongs to.
    pub generation: u64,
    /// Everything before it is in the spool or in `waiting`.
    pub ring_position: u64,
    pub waiting: Waiting,
    /// Losses already reported, by cause, as the kernel counts them.
    pub lost_reported: Vec<u64>,
    /// Boot in which the ring was made.
    pub boot_id: String,
    /// The window that was open.
    pub window: Option<Counts>,
}

/// One flush.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Frame {
    pub state: State,
    pub changes: Vec<Change>,
    /// Stacks that were written to the spool.
    pub stacks: Vec<i64>,
}

/// An open journal.
pub struct Journal {
    path: PathBuf,
    file: File,
    bytes: u64,
    base_bytes: u64,
}

impl Journal {
    /// Opens the journal of a spool folder and gives what it holds: its frames, oldest first.
    pub fn open(spool: &Path) -> anyhow::Result<(Self, Vec<Frame>)> {
        let path = spool.join(FILE);
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(mut file) => {
                file.read_to_end(&mut bytes)
                    .with_context(|| format!("failed to read {}", path.display()))?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(error).with_context(|| format!("failed to open {}", path.display()));
            }
        }
        let (frames, good) = decode(&bytes);
        if good < bytes.len() {
            tracing::warn!(
                journal = %path.display(), whole = good, size = bytes.len(),
                "the journal's last frame is incomplete: the agent was stopped while it wrote; going on from the frame before"
            );
        }
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("failed to open {} for writing", path.display()))?;
        file.set_len(good as u64)?;
        let mut journal = Self {
            path,
            file,
            bytes: good as u64,
            base_bytes: 0,
        };
        journal.reopen()?;
        Ok((journal, frames))
    }

    fn reopen(&mut self) -> anyhow::Result<()> {
        self.file = OpenOptions::new()
            .append(true)
            .open(&self.path)
            .with_context(|| format!("failed to open {}", self.path.display()))?;
        Ok(())
    }

    /// True when the next frame should hold the whole state and be given to [`Self::rewrite`].
    pub fn wants_rewrite(&self) -> bool {
        self.bytes > REWRITE_BYTES.max(self.base_bytes * REWRITE_FACTOR)
    }

    /// Appends one frame, durably.
    pub fn append(&mut self, frame: &Frame) -> anyhow::Result<()> {
        let bytes = encode(frame)?;
        let result = self
            .file
            .write_all(&bytes)
            .and_then(|()| self.file.sync_data());
        if let Err(error) = result {
            // A half-written frame would hide the frames after it.
            let _ = self.file.set_len(self.bytes);
            return Err(error).with_context(|| format!("failed to write {}", self.path.display()));
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Replaces the journal by one frame that holds the whole state, durably.
    pub fn rewrite(&mut self, frame: &Frame) -> anyhow::Result<()> {
        let bytes = encode(frame)?;
        folder::write_durably(&self.path, &bytes)?;
        if let Some(parent) = self.path.parent() {
            folder::sync_folder(parent)?;
        }
        self.bytes = bytes.len() as u64;
        self.base_bytes = self.bytes;
        self.reopen()
    }
}

fn encode(frame: &Frame) -> anyhow::Result<Vec<u8>> {
    let payload = postcard::to_stdvec(frame)?;
    let length =
        u32::try_from(payload.len()).context("the agent's state is too large for its journal")?;
    let mut bytes = Vec::with_capacity(8 + payload.len());
    bytes.extend(length.to_le_bytes());
    bytes.extend(crc32fast::hash(&payload).to_le_bytes());
    bytes.extend(payload);
    Ok(bytes)
}

/// Decodes whole frames; gives them and how many bytes they take.
fn decode(bytes: &[u8]) -> (Vec<Frame>, usize) {
    let mut frames = Vec::new();
    let mut at = 0;
    while let Some(header) = bytes.get(at..at + 8) {
        let word =
            |i: usize| u32::from_le_bytes([header[i], header[i + 1], header[i + 2], header[i + 3]]);
        let (length, crc) = (word(0), word(4));
        let Some(payload) = bytes.get(at + 8..at + 8 + length.min(MAX_FRAME) as usize) else {
            break;
        };
        if crc32fast::hash(payload) != crc {
            break;
        }
        let Ok(frame) = postcard::from_bytes(payload) else {
            break;
        };
        frames.push(frame);
        at += 8 + payload.len();
    }
    (frames, at)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn frame(next_batch_seq: u64) -> Frame {
        Frame {
            state: State {
                next_batch_seq,
                ..State::default()
            },
            ..Frame::default()
        }
    }

    fn seqs(frames: &[Frame]) -> Vec<u64> {
        frames
            .iter()
            .map(|frame| frame.state.next_batch_seq)
            .collect()
    }

    #[test]
    fn frames_come_back_and_a_torn_one_is_cut_off() {
        let spool = tempfile::tempdir().unwrap();
        let (mut journal, frames) = Journal::open(spool.path()).unwrap();
        assert!(frames.is_empty());
        journal.append(&frame(1)).unwrap();
        journal.append(&frame(2)).unwrap();
        drop(journal);
        let path = spool.path().join(FILE);
        let whole = fs::read(&path).unwrap();
        for cut in whole.len() / 2 + 1..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let (mut journal, frames) = Journal::open(spool.path()).unwrap();
            assert_eq!(seqs(&frames), [1], "cut at {cut}");
            journal.append(&frame(3)).unwrap();
            assert_eq!(seqs(&Journal::open(spool.path()).unwrap().1), [1, 3]);
        }
    }

    #[test]
    fn damage_ends_the_journal_and_does_not_crash() {
        let mut bytes = encode(&frame(1)).unwrap();
        bytes.extend(encode(&frame(2)).unwrap());
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert!(
                decode(&damaged).0.len() < 2,
                "a flipped bit at {at} went unnoticed"
            );
        }
    }

    #[test]
    fn a_rewrite_replaces_all_frames() {
        let spool = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(spool.path()).unwrap();
        journal.append(&frame(1)).unwrap();
        journal.rewrite(&frame(2)).unwrap();
        journal.append(&frame(3)).unwrap();
        assert_eq!(seqs(&Journal::open(spool.path()).unwrap().1), [2, 3]);
    }
}
