//! The journal: one file that says what the agent's state is and which spool files count.
//!
//! Format: eight bytes that name the format, then frames, each `length u32 | crc32 u32 | postcard
//! bytes` (little-endian). The first frame holds the whole state, later ones what changed. A last
//! frame that is cut short or damaged was being written when the agent died, and is cut off. A
//! damaged frame before the last one is left out and said aloud: the books lack its changes.
//!
//! A journal of another format, or without one whole frame, is set aside as `journal.damaged`.
//! Nothing tells then which spool files count, so all are kept, and numbers go on where none can
//! have been used.
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
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::folder;
use super::room::Disk;
use crate::engine::Counts;
use crate::ledger::Change;
use crate::probes::order::Waiting;

const FILE: &str = "journal";
/// Changes whenever a type in [`Frame`] does: postcard cannot tell old bytes from new ones.
const FORMAT: [u8; 8] = *b"vrsjnl04";
/// Space that is taken ahead on large disks, so that a disk which others fill still takes what
/// tells of it.
const AHEAD: u64 = 4 << 20;
/// Below this many bytes a rewrite is not worth its fsync.
const REWRITE_BYTES: u64 = 4 << 20;
const TIGHT_BYTES: u64 = 64 << 10;
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
    damaged: bool,
    lost: bool,
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
        let Decoded {
            frames,
            good,
            damaged,
        } = decode(&bytes);
        let lost = frames.is_empty() && !bytes.is_empty();
        let mut bytes_kept = good as u64;
        if lost {
            let aside = spool.join("journal.damaged");
            std::fs::rename(&path, &aside)
                .with_context(|| format!("failed to move {}", path.display()))?;
            tracing::error!(
                kept = %aside.display(),
                "the journal cannot be read, or is another version's: the books start anew, all spool files are kept, and what happened since it was written may be missing or told twice"
            );
            bytes_kept = 0;
        } else if damaged {
            tracing::error!(
                journal = %path.display(),
                "a frame of the journal is damaged; look at the disk. The books lack what it held"
            );
        } else if good < bytes.len() {
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
        file.set_len(bytes_kept)?;
        let mut journal = Self {
            path,
            file,
            bytes: bytes_kept,
            base_bytes: 0,
            damaged,
            lost,
        };
        journal.reopen()?;
        Ok((journal, frames))
    }

    /// There was a journal, and nothing of it could be read.
    pub fn was_lost(&self) -> bool {
        self.lost
    }

    /// Something of it could not be read: the books are not whole.
    pub fn was_damaged(&self) -> bool {
        self.lost || self.damaged
    }

    fn reopen(&mut self) -> anyhow::Result<()> {
        self.file = OpenOptions::new()
            .append(true)
            .open(&self.path)
            .with_context(|| format!("failed to open {}", self.path.display()))?;
        self.take_ahead();
        Ok(())
    }

    /// Takes space behind the end, where there is plenty. It need not succeed.
    fn take_ahead(&self) {
        let plenty = self
            .path
            .parent()
            .and_then(Disk::of)
            .is_some_and(|disk| disk.free > 16 * AHEAD);
        if plenty {
            // SAFETY: a system call on our own file descriptor; the file's size stays.
            unsafe {
                libc::fallocate(
                    self.file.as_raw_fd(),
                    libc::FALLOC_FL_KEEP_SIZE,
                    self.bytes as libc::off_t,
                    AHEAD as libc::off_t,
                );
            }
        }
    }

    /// True when the next frame should hold the whole state and be given to [`Self::rewrite`].
    /// `tight`: the disk has little room, so that a short journal is worth an fsync.
    pub fn wants_rewrite(&self, tight: bool) -> bool {
        let least = if tight { TIGHT_BYTES } else { REWRITE_BYTES };
        self.bytes > least.max(self.base_bytes * REWRITE_FACTOR)
    }

    /// Appends one frame, durably.
    pub fn append(&mut self, frame: &Frame) -> anyhow::Result<()> {
        let mut bytes = encode(frame)?;
        if self.bytes == 0 {
            bytes.splice(0..0, FORMAT);
        }
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
        let mut bytes = FORMAT.to_vec();
        bytes.extend(encode(frame)?);
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

/// What bytes of a journal hold.
#[derive(Debug, Default)]
pub struct Decoded {
    pub frames: Vec<Frame>,
    /// Bytes up to the end of the last whole frame.
    pub good: usize,
    /// A frame before the last whole one could not be read.
    pub damaged: bool,
}

/// Decodes a journal's bytes, whatever they are.
pub fn decode(bytes: &[u8]) -> Decoded {
    let mut decoded = Decoded::default();
    let Some(frames) = bytes.strip_prefix(&FORMAT) else {
        return decoded;
    };
    let mut at = 0;
    let mut skipped = false;
    while let Some((frame, length)) = frame_at(frames, at) {
        at += length;
        match frame {
            Some(frame) => {
                decoded.damaged |= skipped;
                decoded.frames.push(frame);
                decoded.good = FORMAT.len() + at;
            }
            None => skipped = true,
        }
    }
    decoded
}

/// The frame at an offset, if it is whole, and its length. `None` where no frame can be.
fn frame_at(bytes: &[u8], at: usize) -> Option<(Option<Frame>, usize)> {
    let header = bytes.get(at..at.checked_add(8)?)?;
    let word =
        |i: usize| u32::from_le_bytes([header[i], header[i + 1], header[i + 2], header[i + 3]]);
    let (length, crc) = (word(0), word(4));
    let payload = bytes.get(at + 8..at + 8 + length.min(MAX_FRAME) as usize)?;
    let frame = (crc32fast::hash(payload) == crc)
        .then(|| postcard::from_bytes(payload).ok())
        .flatten();
    Some((frame, 8 + payload.len()))
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
        let first = FORMAT.len() + encode(&frame(1)).unwrap().len();
        for cut in first + 1..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let (mut journal, frames) = Journal::open(spool.path()).unwrap();
            assert_eq!(seqs(&frames), [1], "cut at {cut}");
            journal.append(&frame(3)).unwrap();
            assert_eq!(seqs(&Journal::open(spool.path()).unwrap().1), [1, 3]);
        }
    }

    #[test]
    fn a_damaged_last_frame_is_cut_off_and_one_before_is_left_out() {
        let first = [FORMAT.to_vec(), encode(&frame(1)).unwrap()].concat();
        let two = [first.clone(), encode(&frame(2)).unwrap()].concat();
        for at in 0..two.len() {
            let mut bytes = two.clone();
            bytes[at] ^= 0x40;
            let decoded = decode(&bytes);
            let found = seqs(&decoded.frames);
            if at >= first.len() {
                assert_eq!((found, decoded.good), (vec![1], first.len()), "bit at {at}");
                assert!(!decoded.damaged);
            } else {
                assert!(
                    found.is_empty() || (found == [2] && decoded.damaged),
                    "bit at {at}"
                );
            }
        }
    }

    /// An agent of another version, or a rotten disk: no file may be taken for uncommitted.
    #[test]
    fn a_journal_that_cannot_be_read_is_set_aside() {
        let spool = tempfile::tempdir().unwrap();
        let path = spool.path().join(FILE);
        fs::write(&path, b"vrsjnl99 and whatever it holds").unwrap();
        let (mut journal, frames) = Journal::open(spool.path()).unwrap();
        assert!(frames.is_empty() && journal.was_lost());
        assert!(spool.path().join("journal.damaged").exists());
        journal.append(&frame(7)).unwrap();
        let (journal, frames) = Journal::open(spool.path()).unwrap();
        assert_eq!(seqs(&frames), [7]);
        assert!(!journal.was_damaged());
        let (fresh, _) = Journal::open(tempfile::tempdir().unwrap().path()).unwrap();
        assert!(!fresh.was_lost());
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
