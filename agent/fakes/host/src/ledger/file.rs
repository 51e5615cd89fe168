//! The ledger's file, `PID-STARTTICKS.LAYER.ledger`.
//!
//! All numbers are 64-bit words in the machine's byte order (the file never leaves the machine):
//!
//! | words | content |
//! |---|---|
//! | 0 | the bytes `VSLEDGER` |
//! | 1 | format version, 2 |
//! | 2 | layer: 0 driver, 1 runtime |
//! | 3, 4 | process number, start time in clock ticks |
//! | 5, 6 | devices, kinds |
//! | 7 | generation: how many updates there have been |
//! | 8.. | bank 0, then bank 1 |
//!
//! A bank holds (devices + 1) rows (the last for what belongs to no device) of a [`Totals`] per kind,
//! each nine words in the order of its fields; then per device two words, what pools hold reserved
//! and its peak. Invariants:
//! - the bank `generation % 2` is whole; an update writes the other bank and only then raises the
//!   generation, so a process killed half-way through leaves the state before the call;
//! - the other bank is exactly one update behind: an update writes there what itself and the one
//!   before changed, some twenty words, not the whole bank;
//! - a file gets its name only once it is complete, so a short file is damaged, not young.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{DeviceLedger, Kind, Layer, ProcessLedger, Totals};
use crate::card::DEVICES;

const MAGIC: u64 = u64::from_ne_bytes(*b"VSLEDGER");
const VERSION: u64 = 2;
const KINDS: usize = Kind::ALL.len();
const FIELDS: usize = 9;
const GENERATION: usize = 7;
const HEADER_WORDS: usize = 8;

/// Rows of a bank: the devices, then the row for what belongs to none.
const ROWS: usize = DEVICES + 1;
pub(super) const NO_DEVICE: usize = DEVICES;
const TOTALS_WORDS: usize = ROWS * KINDS * FIELDS;
const POOL_FIELDS: usize = 2;
const BANK_WORDS: usize = TOTALS_WORDS + DEVICES * POOL_FIELDS;
const WORDS: usize = HEADER_WORDS + 2 * BANK_WORDS;
const BYTES: usize = WORDS * 8;

/// How often a reader looks again at a file that changes under it: each look takes microseconds,
/// an update far less.
const READ_TRIES: usize = 10_000;

/// What pools hold reserved of one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PoolTotals {
    pub reserved: u64,
    pub peak: u64,
}

/// The books' content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub rows: [[Totals; KINDS]; ROWS],
    pub pools: [PoolTotals; DEVICES],
}

impl Content {
    fn to_words(&self) -> Vec<u64> {
        let totals = self.rows.iter().flatten().flat_map(|t| t.to_words());
        let pools = self.pools.iter().flat_map(|p| [p.reserved, p.peak]);
        totals.chain(pools).collect()
    }

    fn from_words(words: &[u64]) -> Self {
        let mut content = Self::default();
        let (totals, pools) = words.split_at(TOTALS_WORDS);
        let records = totals.chunks_exact(FIELDS);
        for (totals, record) in content.rows.iter_mut().flatten().zip(records) {
            *totals = Totals::from_words(record);
        }
        for (pool, record) in content
            .pools
            .iter_mut()
            .zip(pools.chunks_exact(POOL_FIELDS))
        {
            *pool = PoolTotals {
                reserved: record[0],
                peak: record[1],
            };
        }
        content
    }

    /// What a program leaves that another replaces: its totals, nothing alive.
    fn replaced(mut self) -> Self {
        for totals in self.rows.iter_mut().flatten() {
            totals.frees += totals.live_count;
            totals.freed_bytes += totals.live_bytes;
            totals.live_count = 0;
            totals.live_bytes = 0;
        }
        for pool in &mut self.pools {
            pool.reserved = 0;
        }
        self
    }
}

/// What an update changed.
#[derive(Debug, Clone, Copy)]
enum Changed {
    Nothing,
    Totals { row: usize, kind: Kind },
    Pools,
}

/// Why ledgers could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The folder or a file in it cannot be read.
    #[error("failed to read {path}: {source}")]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file is not a whole ledger.
    #[error("{path} is no valid ledger: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Totals {
    fn to_words(self) -> [u64; FIELDS] {
        [
            self.allocations,
            self.failed_allocations,
            self.frees,
            self.failed_frees,
            self.live_count,
            self.live_bytes,
            self.peak_bytes,
            self.allocated_bytes,
            self.freed_bytes,
        ]
    }

    fn from_words(words: &[u64]) -> Self {
        Self {
            allocations: words[0],
            failed_allocations: words[1],
            frees: words[2],
            failed_frees: words[3],
            live_count: words[4],
            live_bytes: words[5],
            peak_bytes: words[6],
            allocated_bytes: words[7],
            freed_bytes: words[8],
        }
    }
}

/// A ledger file mapped into the process that writes it.
pub(super) struct Mapping {
    words: NonNull<AtomicU64>,
    /// The last update: what the other bank still lacks.
    last: Changed,
}

// SAFETY: the mapping is only reached through this value, whose words are atomic.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Creates this process lifetime's file in `folder` (and the folder itself), holding
    /// `content`.
    ///
    /// If the lifetime has a file already, an earlier program of it wrote that, which `exec`
    /// replaced: `content` then continues its totals, with what it left alive counted as freed.
    pub(super) fn create(folder: &Path, layer: Layer, content: &mut Content) -> io::Result<Self> {
        let pid = std::process::id();
        let start_ticks = crate::process::start_ticks(pid)
            .ok_or_else(|| io::Error::other("/proc/self/stat has no start time"))?;
        fs::create_dir_all(folder)?;
        let name = format!("{pid}-{start_ticks}.{}.ledger", layer.name());
        let path = folder.join(&name);
        if let Ok(words) = read_stable(&path) {
            *content = bank(&words).replaced();
        }

        let mut words = vec![0u64; WORDS];
        words[..GENERATION].copy_from_slice(&[
            MAGIC,
            VERSION,
            layer as u64,
            u64::from(pid),
            start_ticks,
            DEVICES as u64,
            KINDS as u64,
        ]);
        let bank = content.to_words();
        words[HEADER_WORDS..HEADER_WORDS + BANK_WORDS].copy_from_slice(&bank);
        words[HEADER_WORDS + BANK_WORDS..].copy_from_slice(&bank);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let temporary = folder.join(format!(".{name}.new"));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)?;
        file.write_all(&bytes)?;
        let mapping = Self::map(&file)?;
        fs::rename(&temporary, &path)?;
        Ok(mapping)
    }

    fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that is BYTES long.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(address.cast())
            .map(|words| Self {
                words,
                last: Changed::Nothing,
            })
            .ok_or_else(|| io::Error::other("mmap returned a null address"))
    }

    /// Publishes a change of one kind's totals in one row, all at once for readers.
    pub(super) fn publish(&mut self, content: &Content, row: usize, kind: Kind) {
        self.publish_change(content, Changed::Totals { row, kind });
    }

    /// Publishes a change of what pools hold.
    pub(super) fn publish_pools(&mut self, content: &Content) {
        self.publish_change(content, Changed::Pools);
    }

    fn publish_change(&mut self, content: &Content, changed: Changed) {
        // SAFETY: the mapping is WORDS words long, page-aligned, and lives as long as `self`.
        let words = unsafe { std::slice::from_raw_parts(self.words.as_ptr(), WORDS) };
        let generation = words[GENERATION].load(Ordering::Relaxed) + 1;
        let start = HEADER_WORDS + BANK_WORDS * (generation % 2) as usize;
        let bank = &words[start..start + BANK_WORDS];
        write_changed(bank, content, self.last);
        write_changed(bank, content, changed);
        words[GENERATION].store(generation, Ordering::Release);
        self.last = changed;
    }
}

fn write_changed(bank: &[AtomicU64], content: &Content, changed: Changed) {
    match changed {
        Changed::Nothing => {}
        Changed::Totals { row, kind } => {
            let kind = kind as usize;
            let start = (row * KINDS + kind) * FIELDS;
            store(&bank[start..], &content.rows[row][kind].to_words());
        }
        Changed::Pools => {
            let places = bank[TOTALS_WORDS..].chunks_exact(POOL_FIELDS);
            for (place, pool) in places.zip(&content.pools) {
                store(place, &[pool.reserved, pool.peak]);
            }
        }
    }
}

fn store(words: &[AtomicU64], values: &[u64]) {
    for (word, value) in words.iter().zip(values) {
        word.store(*value, Ordering::Relaxed);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and nothing refers to it any more.
        unsafe { libc::munmap(self.words.as_ptr().cast(), BYTES) };
    }
}

/// Reads every ledger in a folder, ordered by process, start time and layer. Files with other
/// endings are passed over.
///
/// # Errors
/// Names the folder or file that cannot be read, or that is no whole ledger.
pub fn read_ledgers(folder: &Path) -> Result<Vec<ProcessLedger>, LedgerError> {
    let failed = |source| LedgerError::Io {
        path: folder.to_owned(),
        source,
    };
    let mut ledgers = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|ending| ending == "ledger") {
            ledgers.push(read_ledger(&path)?);
        }
    }
    ledgers.sort_by_key(|ledger| (ledger.pid, ledger.start_ticks, ledger.layer));
    Ok(ledgers)
}

fn read_ledger(path: &Path) -> Result<ProcessLedger, LedgerError> {
    let words = read_stable(path)?;
    let content = bank(&words);
    let layer = match words[2] {
        0 => Layer::Driver,
        1 => Layer::Runtime,
        other => return Err(malformed(path, format!("layer {other} is unknown"))),
    };
    let pid = u32::try_from(words[3])
        .map_err(|_| malformed(path, format!("{} is no process number", words[3])))?;
    let by_kind = |row: &[Totals; KINDS]| {
        let names = Kind::ALL.iter().map(|kind| kind.name().to_owned());
        names.zip(row.iter().copied()).collect()
    };
    Ok(ProcessLedger {
        pid,
        start_ticks: words[4],
        layer,
        devices: (0u32..)
            .zip(content.rows.iter().zip(&content.pools))
            .map(|(device, (row, pools))| DeviceLedger {
                device,
                kinds: by_kind(row),
                pool_reserved_bytes: pools.reserved,
                pool_reserved_peak_bytes: pools.peak,
            })
            .collect(),
        without_device: by_kind(&content.rows[NO_DEVICE]),
    })
}

/// The file's words, with a whole current bank: read twice, until no update came between.
fn read_stable(path: &Path) -> Result<Vec<u64>, LedgerError> {
    let failed = |source| LedgerError::Io {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(failed)?;
    for _ in 0..READ_TRIES {
        let first = read_words(&mut file, path)?;
        let second = read_words(&mut file, path)?;
        if first[GENERATION] == second[GENERATION] {
            return Ok(first);
        }
        std::thread::yield_now();
    }
    Err(malformed(
        path,
        "it kept changing while it was read".to_owned(),
    ))
}

fn read_words(file: &mut File, path: &Path) -> Result<Vec<u64>, LedgerError> {
    let mut bytes = Vec::with_capacity(BYTES);
    file.rewind()
        .and_then(|()| file.read_to_end(&mut bytes))
        .map_err(|source| LedgerError::Io {
            path: path.to_owned(),
            source,
        })?;
    if bytes.len() != BYTES {
        let reason = format!("{} bytes long, {BYTES} expected", bytes.len());
        return Err(malformed(path, reason));
    }
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        // A chunk of eight bytes always fits an array of eight.
        .map(|chunk| u64::from_ne_bytes(chunk.try_into().unwrap()))
        .collect();
    if words[0] != MAGIC || words[1] != VERSION {
        let reason = "it does not begin with this version's mark".to_owned();
        return Err(malformed(path, reason));
    }
    if words[5] != DEVICES as u64 || words[6] != KINDS as u64 {
        let reason = format!("{} devices and {} kinds", words[5], words[6]);
        return Err(malformed(path, reason));
    }
    Ok(words)
}

/// The current bank of a file's words.
fn bank(words: &[u64]) -> Content {
    let start = HEADER_WORDS + BANK_WORDS * (words[GENERATION] % 2) as usize;
    Content::from_words(&words[start..start + BANK_WORDS])
}

fn malformed(path: &Path, reason: String) -> LedgerError {
    LedgerError::Malformed {
        path: path.to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live_block(bytes: u64) -> Totals {
        Totals {
            allocations: 1,
            live_count: 1,
            live_bytes: bytes,
            peak_bytes: bytes,
            allocated_bytes: bytes,
            ..Totals::default()
        }
    }

    #[test]
    fn what_was_published_last_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut content = Content::default();
        let mut mapping = Mapping::create(folder.path(), Layer::Driver, &mut content).unwrap();
        for bytes in 1..=3 {
            content.rows[1][Kind::PinnedHost as usize] = live_block(bytes);
            mapping.publish(&content, 1, Kind::PinnedHost);
            let ledgers = read_ledgers(folder.path()).unwrap();
            assert_eq!(ledgers.len(), 1);
            assert_eq!(ledgers[0].pid, std::process::id());
            assert_eq!(ledgers[0].layer, Layer::Driver);
            assert_eq!(ledgers[0].totals(1, Kind::PinnedHost), live_block(bytes));
            assert_eq!(ledgers[0].totals(0, Kind::PinnedHost), Totals::default());
        }
    }

    #[test]
    fn alternating_changes_are_all_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut content = Content::default();
        let mut mapping = Mapping::create(folder.path(), Layer::Driver, &mut content).unwrap();
        for bytes in 1..=9u64 {
            let (row, kind) = ((bytes % 3) as usize, Kind::ALL[(bytes % 4) as usize]);
            content.rows[row][kind as usize] = live_block(bytes);
            mapping.publish(&content, row, kind);
            if bytes % 2 == 0 {
                content.pools[1].reserved = bytes;
                mapping.publish_pools(&content);
            }
            let path = fs::read_dir(folder.path()).unwrap().next().unwrap();
            let words = read_stable(&path.unwrap().path()).unwrap();
            assert_eq!(bank(&words), content);
        }
    }

    #[test]
    fn a_half_written_update_does_not_show() {
        let folder = tempfile::tempdir().unwrap();
        let mut content = Content::default();
        content.rows[0][0] = live_block(5);
        let mapping = Mapping::create(folder.path(), Layer::Driver, &mut content).unwrap();
        // The first word of the bank that the next update would write, without that update's end.
        // SAFETY: the mapping is WORDS words long.
        let words = unsafe { std::slice::from_raw_parts(mapping.words.as_ptr(), WORDS) };
        words[HEADER_WORDS + BANK_WORDS].store(99, Ordering::Relaxed);
        let ledgers = read_ledgers(folder.path()).unwrap();
        assert_eq!(ledgers[0].totals(0, Kind::Device), live_block(5));
    }

    #[test]
    fn a_program_that_replaces_another_continues_its_totals_without_its_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut before = Content::default();
        before.rows[0][0] = live_block(100);
        drop(Mapping::create(folder.path(), Layer::Driver, &mut before).unwrap());
        let mut after = Content::default();
        let _mapping = Mapping::create(folder.path(), Layer::Driver, &mut after).unwrap();
        let totals = read_ledgers(folder.path()).unwrap()[0].totals(0, Kind::Device);
        let expected = Totals {
            allocations: 1,
            frees: 1,
            peak_bytes: 100,
            allocated_bytes: 100,
            freed_bytes: 100,
            ..Totals::default()
        };
        assert_eq!(totals, expected);
    }

    #[test]
    fn damaged_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("7-42.driver.ledger");
        let mut content = Content::default();
        drop(Mapping::create(folder.path(), Layer::Driver, &mut content).unwrap());
        let whole = fs::read_dir(folder.path()).unwrap().next().unwrap();
        let whole = fs::read(whole.unwrap().path()).unwrap();
        let mut other_version = whole.clone();
        other_version[8] = 1;
        for content in [&[][..], &whole[..whole.len() - 1], &other_version[..]] {
            fs::write(&path, content).unwrap();
            let text = read_ledgers(folder.path()).unwrap_err().to_string();
            assert!(text.contains("7-42.driver.ledger"), "{text}");
        }
        fs::remove_file(&path).unwrap();
        fs::write(folder.path().join("notes.txt"), "not a ledger").unwrap();
        assert_eq!(read_ledgers(folder.path()).unwrap().len(), 1);
    }
}
