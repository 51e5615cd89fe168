//! The write-ahead log: what makes an acknowledgement true.
//!
//! # On disk
//!
//! Below the data folder; all numbers little endian:
//!
//! ```text
//! _wal/00000000000000000007.wal      a segment: batches of many agents, in the order they came
//! _wal/log-id                        this log's own name, 32 hexadecimal digits
//! _wal/damaged/…                     what rotted, for people to look at
//!
//! segment:  8  magic "VSWAL\0\0\x01"
//!           8  the segment's number, as in its name
//!           8  bytes of the previous segment that were on disk when it was closed; 0 if it is gone
//!           …  records, one behind the other
//!
//! record:   4  magic "VSb1"; of a void (bytes nobody needs any more) "VSv1"
//!           4  length of the head; of a void 0
//!           8  length of the payload
//!           4  CRC-32 of the payload, as the agent sent it; of a void 0
//!           4  CRC-32 of these 20 bytes and of the head
//!           …  head ([`record::Head`]): record number, synced length, agent, batch_seq, host, table, …
//!           …  payload: the batch, a Parquet file
//! ```
//!
//! Record numbers ascend over all segments for ever. They name a batch to the tables: a commit
//! carries this log's id with the number of the last of its records as an application
//! transaction, so that a restart knows exactly which records it has committed.
//!
//! # How it is written
//!
//! One thread writes. It takes every batch that came within a few milliseconds, appends them,
//! calls `fdatasync` once, and only then are all of them acknowledged (group commit). A segment of
//! [`SEGMENT_BYTES`] is closed and the next begun. A segment whose batches are all committed is
//! deleted.
//!
//! # Invariants
//!
//! - a batch is acknowledged only after the `fdatasync` that covers it has succeeded. When one
//!   fails, nobody can know what it left on disk: the segment is closed, its last group refused;
//! - when an append fails (no space), the segment is cut back to what was good, and the group
//!   refused;
//! - a segment is appended to only by the process that made it: a start begins a new one;
//! - within a segment, everything before the highest `synced` of any record (or before the length
//!   that the next segment's header tells) was on disk once. What cannot be read there has rotted:
//!   it is set aside, counted, and named at ERROR. What cannot be read behind it was never
//!   acknowledged (a torn write): it is cut off. In a closed segment, whole records behind it
//!   belong to a refused group and are ignored;
//! - of one agent, batches are stored in ascending `batch_seq`, one at a time (the caller holds
//!   the agent's lock), and in ascending record numbers; for each table, records are committed in
//!   ascending order;
//! - a record goes away only after its rows are durable in the table and its line in `batches` is.
//!   One that is not to be committed from here (damaged, with a copy in `_wal/damaged/`, or
//!   committed by another collector) is overwritten with a void first;
//! - the one record of a (agent, batch_seq) that counts is the last: an earlier one is of a group
//!   that was refused, and was sent again.
//!
//! Logs of an earlier version, one file per batch and a folder per agent, are taken in at start
//! ([`legacy`]).

mod index;
pub mod legacy;
mod record;
mod segment;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use bytes::Bytes;
use tokio::sync::oneshot;
use vramscope_wire::Table;

use super::placing::Placing;
use crate::folder;
use index::Index;
use writer::{Disk, Job, LocalDisk};

const DAMAGED: &str = "damaged";
const ID_FILE: &str = "log-id";

/// A segment is closed and another begun at this size.
pub const SEGMENT_BYTES: u64 = 64 << 20;

/// One batch on its way into the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBatch {
    /// Agent that sent it; its id was checked.
    pub agent: Arc<str>,
    /// Its number in the agent's line.
    pub seq: u64,
    /// Host, as the batch says.
    pub host: Option<Arc<str>>,
    /// Table it belongs to.
    pub table: Table,
    /// CRC-32 of the file.
    pub crc32: u32,
    /// Rows in the file.
    pub rows: u64,
    /// Memory that the rows take when decoded.
    pub decoded_bytes: u64,
    /// Earliest and latest `ts`, microseconds since 1970; `None` without rows or without times.
    pub times: Option<(i64, i64)>,
    /// When it came, and which times were believed then.
    pub placing: Placing,
    /// Rows whose time was not believed.
    pub misdated: u64,
}

/// One stored batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Number of its record.
    pub number: u64,
    /// What it is.
    pub batch: NewBatch,
    /// Size of the file.
    pub bytes: u64,
    segment: u64,
    /// Where its record begins.
    start: u64,
    /// Where its payload begins.
    offset: u64,
}

impl Entry {
    /// Agent and number, the batch's name.
    fn key(&self) -> (Arc<str>, u64) {
        (Arc::clone(&self.batch.agent), self.batch.seq)
    }
}

/// Why a batch could not be stored now.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The uncommitted log is as large as it may become.
    #[error("the log holds {held} uncommitted bytes and the limit is {limit} (wal_limit_bytes)")]
    Full {
        /// Bytes in the log.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// The file system said no.
    #[error("failed to write {path}: {source}")]
    Io {
        /// What was to be written.
        path: PathBuf,
        /// What it said.
        source: Arc<io::Error>,
    },
    /// The writer is gone; only while the collector stops.
    #[error("the log is closed")]
    Closed,
}

/// Batches and bytes that wait for their commit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Batches.
    pub files: u64,
    /// Bytes of their files.
    pub bytes: u64,
}

/// The open log. What waits is known in memory; segments are read at start and to commit.
#[derive(Debug)]
pub struct Wal {
    shared: Arc<Shared>,
    work: Mutex<Option<mpsc::Sender<Job>>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

/// What the writer's thread and everybody else have in common.
#[derive(Debug)]
struct Shared {
    root: PathBuf,
    id: String,
    limit: u64,
    index: Mutex<Index>,
    next_number: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Index> {
        // Nothing inside the critical sections can panic half-way through a change.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wal {
    /// Opens the log below a data folder and creates it if missing. Cuts torn tails, sets aside
    /// what rotted. For the holder of the folder's lock.
    pub fn open(data: &Path, limit: u64) -> io::Result<Wal> {
        Self::open_on(data, limit, Box::new(LocalDisk))
    }

    fn open_on(data: &Path, limit: u64, disk: Box<dyn Disk>) -> io::Result<Wal> {
        let root = data.join("_wal");
        folder::create_dir_durably(&root)?;
        let id = own_id(&root)?;
        let found = segment::recover(&root)?;
        let mut index = Index::default();
        let mut highest = 0;
        for segment in found.segments {
            highest = highest.max(segment.number);
            index.opened(segment.number, segment.file, segment.bytes);
            index.closed(segment.number);
        }
        let next_number = found.entries.last().map_or(1, |last| last.number + 1);
        index.add(newest_of_each(found.entries));
        index.sweep(&root);
        let shared = Arc::new(Shared {
            root,
            id,
            limit,
            index: Mutex::new(index),
            next_number: AtomicU64::new(next_number),
        });
        let (work, jobs) = mpsc::channel();
        let writer = writer::Writer::new(Arc::clone(&shared), disk, highest, found.synced);
        let thread = std::thread::Builder::new()
            .name("wal".to_string())
            .spawn(move || writer.run(&jobs))?;
        Ok(Wal {
            shared,
            work: Mutex::new(Some(work)),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The log's own name, by which the tables know its records: 32 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// The folder of the log.
    pub fn root(&self) -> &Path {
        &self.shared.root
    }

    /// Makes record numbers go on above `number`, the highest that the tables know of this log.
    pub fn continue_after(&self, number: u64) {
        self.shared
            .next_number
            .fetch_max(number + 1, Ordering::Relaxed);
    }

    /// Stores one batch: when the future is ready, the batch is on disk and will be committed even
    /// if the machine stops then. Batches are stored in the order of the calls.
    pub fn store(
        &self,
        batch: NewBatch,
        parquet: Bytes,
    ) -> impl Future<Output = Result<(), StoreError>> + use<> {
        let stored = self.hand_over(batch, parquet, self.shared.limit);
        async { stored?.await.unwrap_or(Err(StoreError::Closed)) }
    }

    /// The same whatever the limit: for batches that were acknowledged before.
    pub fn store_regardless(
        &self,
        batch: NewBatch,
        parquet: Bytes,
    ) -> impl Future<Output = Result<(), StoreError>> + use<> {
        let stored = self.hand_over(batch, parquet, u64::MAX);
        async { stored?.await.unwrap_or(Err(StoreError::Closed)) }
    }

    fn hand_over(
        &self,
        batch: NewBatch,
        parquet: Bytes,
        limit: u64,
    ) -> Result<oneshot::Receiver<Result<(), StoreError>>, StoreError> {
        self.shared.lock().reserve(parquet.len() as u64, limit)?;
        let (done, stored) = oneshot::channel();
        self.send(Job {
            batch,
            parquet,
            done,
        })?;
        Ok(stored)
    }

    fn send(&self, job: Job) -> Result<(), StoreError> {
        let sender = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = sender.as_ref().ok_or(StoreError::Closed)?;
        sender.send(job).map_err(|_| StoreError::Closed)
    }

    /// The bytes of a stored batch. They are as good as the disk: check their CRC-32.
    pub fn read(&self, entry: &Entry) -> io::Result<Bytes> {
        let file =
            self.shared.lock().file(entry.segment).ok_or_else(|| {
                io::Error::new(io::ErrorKind::NotFound, "the segment was deleted")
            })?;
        segment::read_payload(&file, entry.offset, entry.bytes)
    }

    /// The segment that holds a batch.
    pub fn path(&self, entry: &Entry) -> PathBuf {
        segment::path(&self.shared.root, entry.segment)
    }

    /// The highest `batch_seq` of an agent in the log.
    pub fn highest(&self, agent: &str) -> Option<u64> {
        self.shared.lock().highest(agent)
    }

    /// The oldest batches of a table whose rows wait for their commit, at least one if there is
    /// one, until their decoded rows reach `budget` bytes of memory. They stay in the log.
    pub fn oldest(&self, table: Table, budget: u64) -> Vec<Entry> {
        self.shared.lock().oldest(table, budget)
    }

    /// Everything whose rows wait for their commit, in order of record numbers.
    pub fn waiting(&self) -> Vec<Entry> {
        self.shared.lock().waiting()
    }

    /// Says that the rows of batches are durable in their table. What is left is their line in
    /// `batches`.
    pub fn committed(&self, entries: &[Entry]) {
        self.shared.lock().committed(entries);
    }

    /// Batches whose rows are committed, and whose line in `batches` is not.
    pub fn unledgered(&self) -> Vec<Entry> {
        self.shared.lock().unledgered()
    }

    /// Lets go of batches; deletes segments that hold nothing else. A segment that cannot be
    /// deleted is harmless (its records are known as committed), so it only earns a warning.
    pub fn finish(&self, entries: &[Entry]) {
        let mut index = self.shared.lock();
        index.finish(entries);
        index.sweep(&self.shared.root);
    }

    /// How much waits for its commit.
    pub fn backlog(&self) -> Backlog {
        self.shared.lock().backlog()
    }

    /// Copies a damaged batch to `_wal/damaged/` and takes it out of the line.
    pub fn set_aside(&self, entry: &Entry) -> io::Result<PathBuf> {
        let name = format!(
            "{}-{:020}-{}-{:08x}.parquet",
            entry.batch.agent,
            entry.batch.seq,
            entry.batch.table.name(),
            entry.batch.crc32
        );
        // What the disk gives up cannot be copied; an empty file still tells and counts.
        let bytes = self.read(entry).unwrap_or_default();
        let aside = segment::set_aside(&self.shared.root, &name, &bytes)?;
        self.void(std::slice::from_ref(entry))?;
        Ok(aside)
    }

    /// Lets go of batches that will not be committed from here: a restart must not take them for
    /// committed because later ones are.
    pub fn void(&self, entries: &[Entry]) -> io::Result<()> {
        for entry in entries {
            let file = self.shared.lock().file(entry.segment);
            if let Some(file) = file {
                segment::blank(&file, &(entry.start..entry.offset + entry.bytes))?;
                file.sync_data()?;
            }
        }
        self.finish(entries);
        Ok(())
    }

    /// Ends the writer and, if nothing waits, deletes every segment. For the end of the process.
    pub fn close(&self) {
        let sender = self
            .work
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(sender);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // A panic of the writer has refused what it held; there is nothing to add here.
            let _ = thread.join();
        }
        self.shared.lock().sweep(&self.shared.root);
    }
}

impl Drop for Wal {
    fn drop(&mut self) {
        self.close();
    }
}

/// What lies in a log, for whoever only looks. A collector may be at work on it.
pub struct Listing {
    /// The log's own name; `None` if there is no log yet.
    pub id: Option<String>,
    /// Whole records, in order of their numbers.
    pub entries: Vec<Entry>,
}

/// Lists the log in a folder without changing it.
pub fn list(root: &Path) -> io::Result<Listing> {
    let id = match fs::read_to_string(root.join(ID_FILE)) {
        Ok(id) => Some(id.trim().to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    Ok(Listing {
        id,
        entries: newest_of_each(segment::list(root)?),
    })
}

/// Of several records of one batch the last; the others are of groups that were refused.
fn newest_of_each(entries: Vec<Entry>) -> Vec<Entry> {
    let by_name: HashMap<_, Entry> = entries
        .into_iter()
        .map(|entry| (entry.key(), entry))
        .collect();
    let by_number: BTreeMap<u64, Entry> = by_name
        .into_values()
        .map(|entry| (entry.number, entry))
        .collect();
    by_number.into_values().collect()
}

/// Files that were set aside as damaged.
pub fn damaged(root: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(root.join(DAMAGED)) {
        Ok(files) => files
            .map(|file| file.map(|file| file.path()))
            .filter(|path| !path.as_ref().is_ok_and(|path| path.ends_with(".tmp")))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Whether a name is safe as an agent's: it comes over the network, and becomes part of names of
/// files and transactions.
pub fn is_agent_id(id: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=128).contains(&id.len()) && id.chars().all(plain) && !id.starts_with('.') && id != DAMAGED
}

/// Reads the log's own name, or makes one up.
fn own_id(root: &Path) -> io::Result<String> {
    let path = root.join(ID_FILE);
    match fs::read_to_string(&path) {
        Ok(id) if is_own_id(id.trim()) => return Ok(id.trim().to_string()),
        Ok(id) => {
            let wrong = format!(
                "{} holds {:?} instead of 32 hexadecimal digits; if it was damaged, stop the \
                 collector and delete it: the log in it goes to the tables under a new name",
                path.display(),
                id.chars().take(40).collect::<String>()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, wrong));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut random = [0; 16];
    io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut random)?;
    let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let temporary = folder::write_temporary(root.join(".tmp-id"), std::iter::once(id.as_bytes()))?;
    fs::rename(temporary, &path)?;
    folder::sync_dir(root)?;
    Ok(id)
}

fn is_own_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests;
