//! The write-ahead log: what makes an acknowledgement true.
//!
//! On disk, below the data folder:
//!
//! ```text
//! _wal/AGENT_ID/00000000000000000042-alloc_events-1c291ca3.parquet   one batch, as it came
//! _wal/AGENT_ID/.tmp-42                                              a batch being written
//! _wal/damaged/AGENT_ID-00000000000000000042-alloc_events-1c291ca3.parquet
//! ```
//!
//! A name holds the `batch_seq` (20 digits), the table, and the CRC-32 of the file (8 hex
//! digits), which the committer checks again: bit rot inside a page can decode without error.
//!
//! Invariants:
//! - a name without `.tmp-` stands for a whole file; names appear by rename, after the bytes
//!   were fsynced, and a batch counts as stored once the folder was fsynced too;
//! - of one agent, batches are stored in ascending `batch_seq`, one at a time (the caller holds
//!   the agent's lock), so that for each table "highest committed" stands for all below it;
//! - a file goes away only after its rows are durable in the table (or, damaged, by moving to
//!   `_wal/damaged/`);
//! - at start, a file whose `batch_seq` is not above the table's committed transaction of that
//!   agent is a leftover of a crash between commit and removal; the opener removes it;
//! - an agent's folder stays when it is empty: it is how `status` knows the agents.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use parquet::file::metadata::ParquetMetaDataReader;
use vramscope_wire::Table;

use crate::folder;

const TEMPORARY: &str = ".tmp-";
const DAMAGED: &str = "damaged";

/// One stored batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Agent that sent it.
    pub agent: Arc<str>,
    /// Its number in the agent's line.
    pub seq: u64,
    /// Table it belongs to.
    pub table: Table,
    /// CRC-32 of the file.
    pub crc32: u32,
    /// Size of the file.
    pub bytes: u64,
    /// Rows; `None` if the file's footer could not be read after a restart.
    pub rows: Option<u64>,
    /// Memory the rows take when decoded, measured or (after a restart) estimated.
    pub decoded_bytes: u64,
}

impl Entry {
    fn file_name(&self) -> String {
        format!(
            "{:020}-{}-{:08x}.parquet",
            self.seq,
            self.table.name(),
            self.crc32
        )
    }

    /// Where the batch lies in the log whose folder is `root`.
    pub fn path(&self, root: &Path) -> PathBuf {
        root.join(&*self.agent).join(self.file_name())
    }
}

/// Why a batch could not be stored now.
#[derive(Debug, thiserror::Error)]
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
        source: io::Error,
    },
}

/// Files and bytes that wait for their commit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Batches.
    pub files: u64,
    /// Bytes of their files.
    pub bytes: u64,
}

/// The open log. The index of what waits is in memory; the disk is read at start only.
#[derive(Debug)]
pub struct Wal {
    root: PathBuf,
    limit: u64,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    /// By order of arrival, so that taking from the front takes a prefix of each agent's line.
    waiting: BTreeMap<u64, Entry>,
    arrivals: u64,
    /// Bytes waiting or being written.
    bytes: u64,
}

impl Index {
    fn add(&mut self, entry: Entry) {
        self.arrivals += 1;
        self.waiting.insert(self.arrivals, entry);
    }
}

impl Wal {
    /// Opens the log below a data folder, creates it if missing, removes temporary files.
    pub fn open(data: &Path, limit: u64) -> io::Result<Wal> {
        let root = data.join("_wal");
        folder::create_dir_durably(&root)?;
        let mut index = Index::default();
        for listed in list(&root, Leftovers::Remove)? {
            index.bytes += listed.bytes;
            index.add(listed);
        }
        Ok(Wal {
            root,
            limit,
            index: Mutex::new(index),
        })
    }

    /// The folder of the log.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Stores one batch: when this returns, the batch is on disk and will be committed even if
    /// the machine stops now. Blocks on the disk.
    pub fn store(&self, entry: Entry, parquet: &[u8]) -> Result<(), StoreError> {
        self.reserve(entry.bytes)?;
        match self.write(&entry, parquet) {
            Ok(()) => {
                self.lock().add(entry);
                Ok(())
            }
            Err(error) => {
                self.lock().bytes -= entry.bytes;
                Err(error)
            }
        }
    }

    fn reserve(&self, bytes: u64) -> Result<(), StoreError> {
        let mut index = self.lock();
        // An empty log takes any batch: a limit below one batch must not stop the line for ever.
        let fits = index.bytes == 0 || index.bytes.saturating_add(bytes) <= self.limit;
        if !fits {
            return Err(StoreError::Full {
                held: index.bytes,
                limit: self.limit,
            });
        }
        index.bytes += bytes;
        Ok(())
    }

    fn write(&self, entry: &Entry, parquet: &[u8]) -> Result<(), StoreError> {
        let path = entry.path(&self.root);
        let dir = self.root.join(&*entry.agent);
        let write = || -> io::Result<()> {
            if !dir.is_dir() {
                folder::create_dir_durably(&dir)?;
            }
            let temporary = dir.join(format!("{TEMPORARY}{}", entry.seq));
            let temporary = folder::write_temporary(temporary, std::iter::once(parquet))?;
            fs::rename(&temporary, &path)?;
            folder::sync_dir(&dir)
        };
        write().map_err(|source| StoreError::Io {
            path: path.clone(),
            source,
        })
    }

    /// The highest `batch_seq` of an agent that waits in the log.
    pub fn highest(&self, agent: &str) -> Option<u64> {
        let index = self.lock();
        index
            .waiting
            .values()
            .filter(|entry| &*entry.agent == agent)
            .map(|entry| entry.seq)
            .max()
    }

    /// The oldest waiting batches of a table, at least one if there is one, until their decoded
    /// rows reach `budget` bytes of memory. They stay in the log.
    pub fn oldest(&self, table: Table, budget: u64) -> Vec<Entry> {
        let index = self.lock();
        let mut taken = Vec::new();
        let mut decoded = 0u64;
        for entry in index.waiting.values().filter(|entry| entry.table == table) {
            if !taken.is_empty() && decoded.saturating_add(entry.decoded_bytes) > budget {
                break;
            }
            decoded = decoded.saturating_add(entry.decoded_bytes);
            taken.push(entry.clone());
        }
        taken
    }

    /// Everything that waits.
    pub fn waiting(&self) -> Vec<Entry> {
        self.lock().waiting.values().cloned().collect()
    }

    /// How much waits.
    pub fn backlog(&self) -> Backlog {
        let index = self.lock();
        Backlog {
            files: index.waiting.len() as u64,
            bytes: index.waiting.values().map(|entry| entry.bytes).sum(),
        }
    }

    /// Removes batches whose rows are durable in their table. A file that cannot be removed is
    /// harmless (the next start removes it), so it only earns a warning.
    pub fn remove(&self, entries: &[Entry]) {
        for entry in entries {
            let path = entry.path(&self.root);
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "failed to remove a committed batch from the log");
            }
        }
        self.forget(entries);
    }

    /// Moves a damaged batch out of the line, to `_wal/damaged/`.
    pub fn set_aside(&self, entry: &Entry) -> io::Result<PathBuf> {
        let dir = self.root.join(DAMAGED);
        folder::create_dir_durably(&dir)?;
        let aside = dir.join(format!("{}-{}", entry.agent, entry.file_name()));
        let moved = fs::rename(entry.path(&self.root), &aside);
        match moved {
            // Already gone: somebody removed it by hand.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
            Ok(()) => folder::sync_dir(&dir)?,
        }
        self.forget(std::slice::from_ref(entry));
        Ok(aside)
    }

    fn forget(&self, entries: &[Entry]) {
        let gone: HashSet<(&str, u64)> = entries
            .iter()
            .map(|entry| (&*entry.agent, entry.seq))
            .collect();
        let mut index = self.lock();
        let mut freed = 0;
        index.waiting.retain(|_, entry| {
            let goes = gone.contains(&(&*entry.agent, entry.seq));
            freed += if goes { entry.bytes } else { 0 };
            !goes
        });
        index.bytes -= freed;
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        // Nothing inside the critical sections can panic half-way through a change.
        self.index
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// What to do with temporary files while listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftovers {
    /// Remove them: they were never acknowledged. For the process that holds the folder.
    Remove,
    /// Leave them alone.
    Keep,
}

/// Lists the batches in a log folder, each agent's in ascending order.
pub fn list(root: &Path, leftovers: Leftovers) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for (agent, dir) in agent_dirs(root)? {
        let agent: Arc<str> = agent.into();
        for file in fs::read_dir(&dir)? {
            let file = file?;
            let name = file.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(TEMPORARY) {
                if leftovers == Leftovers::Remove {
                    fs::remove_file(file.path())?;
                }
                continue;
            }
            match parse_name(name) {
                Some(named) => match entry_of(&agent, named, &file.path()) {
                    Ok(entry) => entries.push(entry),
                    // A collector at work removes files while `status` lists them.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                },
                None => {
                    tracing::warn!(path = %file.path().display(), "not a file of the log, left alone")
                }
            }
        }
    }
    entries.sort_by_key(|entry| entry.seq);
    Ok(entries)
}

/// The agents that ever stored something here, by folder name.
pub fn agents(root: &Path) -> io::Result<Vec<String>> {
    Ok(agent_dirs(root)?.into_keys().collect())
}

/// Files that were set aside as damaged.
pub fn damaged(root: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(root.join(DAMAGED)) {
        Ok(files) => files.map(|file| file.map(|file| file.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn agent_dirs(root: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
    let mut dirs = BTreeMap::new();
    let listing = match fs::read_dir(root) {
        Ok(listing) => listing,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(dirs),
        Err(error) => return Err(error),
    };
    for dir in listing {
        let dir = dir?;
        let name = dir.file_name();
        let Some(name) = name.to_str() else { continue };
        if dir.file_type()?.is_dir() && is_agent_id(name) {
            dirs.insert(name.to_string(), dir.path());
        }
    }
    Ok(dirs)
}

/// Whether a name is safe as an agent's folder: it comes over the network.
pub fn is_agent_id(id: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=128).contains(&id.len()) && id.chars().all(plain) && !id.starts_with('.') && id != DAMAGED
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Named {
    seq: u64,
    table: Table,
    crc32: u32,
}

fn parse_name(name: &str) -> Option<Named> {
    let mut parts = name.strip_suffix(".parquet")?.split('-');
    let (seq, table, crc32) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || seq.len() != 20 {
        return None;
    }
    Some(Named {
        seq: seq.parse().ok()?,
        table: Table::by_name(table)?,
        crc32: u32::from_str_radix(crc32, 16).ok()?,
    })
}

fn entry_of(agent: &Arc<str>, named: Named, path: &Path) -> io::Result<Entry> {
    /// Arrow memory of a wide row with short texts; only steers how much one commit takes.
    const ROW_BYTES_GUESS: u64 = 600;
    let file = fs::File::open(path)?;
    let bytes = file.metadata()?.len();
    // A damaged footer is the committer's to report; here it only means that rows are unknown.
    let footer = ParquetMetaDataReader::new().parse_and_finish(&file).ok();
    let rows = footer.and_then(|footer| u64::try_from(footer.file_metadata().num_rows()).ok());
    Ok(Entry {
        agent: Arc::clone(agent),
        seq: named.seq,
        table: named.table,
        crc32: named.crc32,
        bytes,
        rows,
        decoded_bytes: rows
            .unwrap_or(0)
            .saturating_mul(ROW_BYTES_GUESS)
            .max(bytes * 8),
    })
}

/// The highest `batch_seq` of each agent among entries.
pub fn highest_by_agent(entries: &[Entry]) -> HashMap<Arc<str>, u64> {
    let mut highest = HashMap::new();
    for entry in entries {
        let mark = highest.entry(Arc::clone(&entry.agent)).or_insert(entry.seq);
        *mark = entry.seq.max(*mark);
    }
    highest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(agent: &str, seq: u64, bytes: u64) -> Entry {
        Entry {
            agent: agent.into(),
            seq,
            table: Table::Stacks,
            crc32: 0xdead_beef,
            bytes,
            rows: Some(1),
            decoded_bytes: 100,
        }
    }

    #[test]
    fn names_lead_back() {
        let name = entry("a", 42, 1).file_name();
        assert_eq!(name, "00000000000000000042-stacks-deadbeef.parquet");
        assert_eq!(
            parse_name(&name),
            Some(Named {
                seq: 42,
                table: Table::Stacks,
                crc32: 0xdead_beef
            })
        );
        for wrong in [
            "42-stacks-deadbeef.parquet",
            "x",
            "00000000000000000042-nonesuch-deadbeef.parquet",
        ] {
            assert_eq!(parse_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn hostile_agent_names_are_refused() {
        for wrong in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "a\\b",
            ".tmp",
            "damaged",
            "a b",
            "ä",
            "a\0",
            &"x".repeat(129),
        ] {
            assert!(!is_agent_id(wrong), "{wrong:?}");
        }
        for right in ["a", "0c2f7a-9.b_c", &"x".repeat(128)] {
            assert!(is_agent_id(right), "{right:?}");
        }
    }

    #[test]
    fn the_limit_counts_what_waits_and_ends_with_the_commit() {
        let data = tempfile::tempdir().unwrap();
        let wal = Wal::open(data.path(), 10).unwrap();
        wal.store(entry("a", 1, 6), b"123456").unwrap();
        let full = wal.store(entry("a", 2, 6), b"123456").unwrap_err();
        assert!(
            matches!(full, StoreError::Full { held: 6, limit: 10 }),
            "{full}"
        );
        assert_eq!(wal.highest("a"), Some(1));
        wal.remove(&wal.oldest(Table::Stacks, u64::MAX));
        assert_eq!(wal.backlog(), Backlog::default());
        wal.store(entry("a", 2, 6), b"123456").unwrap();
        assert_eq!(wal.highest("a"), Some(2));
    }

    #[test]
    fn the_oldest_are_a_prefix_within_the_budget() {
        let data = tempfile::tempdir().unwrap();
        let wal = Wal::open(data.path(), 1000).unwrap();
        for (agent, seq) in [("a", 1), ("b", 7), ("a", 2), ("a", 3)] {
            wal.store(entry(agent, seq, 1), b"x").unwrap();
        }
        let seqs = |budget| {
            wal.oldest(Table::Stacks, budget)
                .iter()
                .map(|entry| entry.seq)
                .collect::<Vec<_>>()
        };
        assert_eq!(seqs(0), [1]);
        assert_eq!(seqs(250), [1, 7]);
        assert_eq!(seqs(u64::MAX), [1, 7, 2, 3]);
    }

    #[test]
    fn a_reopened_log_holds_what_was_stored_and_no_temporary_file() {
        let data = tempfile::tempdir().unwrap();
        let wal = Wal::open(data.path(), 1000).unwrap();
        wal.store(entry("a", 1, 1), b"x").unwrap();
        let temporary = wal.root().join("a/.tmp-2");
        fs::write(&temporary, b"half").unwrap();
        let again = Wal::open(data.path(), 1000).unwrap();
        assert_eq!(again.highest("a"), Some(1));
        assert_eq!(again.backlog(), Backlog { files: 1, bytes: 1 });
        assert!(!temporary.exists());
    }
}
