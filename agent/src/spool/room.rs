//! How much the spool may hold, and what happens when that much is there.
//!
//! Policy: what is in the spool stays, what is new and does not fit is dropped and counted. The
//! ring is read on all the while, so the books stay right and the kernel side overflows nothing.
//! - Raw rows ([`Class::Raw`]) may fill nine tenths of `spool_limit` and leave `spool_reserve`
//!   of the file system free.
//! - What is small and says much ([`Class::Small`]: stacks, processes, roll-ups) may fill all of
//!   the limit and leave half of the reserve: with the raw rows of an hour gone, its totals stay.
//! - `agent_windows` tells of what was dropped. A twentieth above the limit is for them; when that
//!   is full too, the open window goes on and is told once there is room.
//! - The journal stops only for a full disk. Then nothing is dropped: rows wait in memory and
//!   events in the ring, whose size bounds both, and what the ring cannot hold the kernel side
//!   counts as `ring_full`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vramscope_ebpf_abi::Loss;
use vramscope_wire::Table;

use super::folder;

/// What a file takes on the disk is a multiple of this.
const BLOCK: u64 = 4096;
/// Rows may be let in again by someone else's hand: how often that is looked for while full.
const RECOUNT_FULL: Duration = Duration::from_secs(1);
/// How often the sums are checked against the folder otherwise.
const RECOUNT: Duration = Duration::from_secs(60);
/// Between two words about room.
const SILENCE: Duration = Duration::from_secs(60);
/// The reserve if none is configured: this, or a twentieth of a small file system.
const DEFAULT_RESERVE: u64 = 512 << 20;
/// Room for the file of a window, and for the journal's frame.
const WINDOW_BYTES: u64 = 64 << 10;

/// Which share of the limit a table may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    Raw,
    Small,
    Always,
}

/// The share of a table.
pub fn class(table: Table) -> Class {
    match table {
        Table::AllocEvents | Table::HostBuffers | Table::Devices | Table::Segments => Class::Raw,
        Table::AgentWindows => Class::Always,
        // Roll-ups, stacks, processes.
        _ => Class::Small,
    }
}

/// The name of a table's dropped rows in `agent_windows.lost_by_cause`.
pub fn cause(table: Table) -> &'static str {
    match table.name() {
        "alloc_events" => SPOOL_FULL,
        "host_buffers" => "spool_full_host_buffers",
        "devices" => "spool_full_devices",
        "processes" => "spool_full_processes",
        "stacks" => "spool_full_stacks",
        "stack_windows" => "spool_full_stack_windows",
        "device_windows" => "spool_full_device_windows",
        "allocator_samples" => "spool_full_allocator_samples",
        "segments" => "spool_full_segments",
        _ => "spool_full_other",
    }
}

/// Dropped rows of `alloc_events`. Causes that begin with this and go on are of other tables:
/// rows, and no calls.
pub const SPOOL_FULL: &str = "spool_full";

/// Rows of framework events that the flight recorder had no room for.
pub const RECORDER_FULL: &str = "recorder_full";
/// Rows that it overwrote before anything asked for them, as it is meant to.
pub const RECORDER_OVERWRITTEN: &str = "recorder_overwritten";
/// Rows that were not kept, since the recorder is switched off.
pub const RECORDER_OFF: &str = "recorder_off";
/// Causes of the flight recorder.
pub const RECORDER: [&str; 3] = [RECORDER_FULL, RECORDER_OVERWRITTEN, RECORDER_OFF];

/// False for what is told beside the losses and is none: rows that went as the configuration has
/// it (their calls are in the roll-ups), and stacks that are less than they were to be.
pub fn is_loss(cause: &str) -> bool {
    cause != RECORDER_OVERWRITTEN
        && cause != RECORDER_OFF
        && cause != Loss::StackNotCopied.name()
        && cause != Loss::PythonNotRead.name()
}

/// True for a cause that counts calls, which `agent_windows.lost` sums up.
pub fn counts_calls(cause: &str) -> bool {
    is_loss(cause) && (cause == SPOOL_FULL || !cause.starts_with(SPOOL_FULL))
}

/// What lies in the spool, `rejected/` included. Writer and sender share it, so that nobody has
/// to list a folder of a hundred thousand files at every flush.
#[derive(Debug, Default)]
pub struct Usage {
    bytes: AtomicU64,
    files: AtomicU64,
}

/// What a file of that size takes.
pub fn on_disk(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK)
}

impl Usage {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Files that wait; those in `rejected/` are not among them.
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(on_disk(bytes), Ordering::Relaxed);
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    /// A file is gone for good.
    pub fn remove(&self, bytes: u64) {
        let less = |value: &AtomicU64, by: u64| {
            // Always Some, so the update cannot fail.
            let _ = value.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
                Some(now.saturating_sub(by))
            });
        };
        less(&self.bytes, on_disk(bytes));
        less(&self.files, 1);
    }

    /// A file went into `rejected/`: it still takes its bytes.
    pub fn set_aside(&self) {
        let _ = self
            .files
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
                Some(now.saturating_sub(1))
            });
    }

    fn recount(&self, spool: &Path) -> anyhow::Result<()> {
        let count = |folder: &Path| -> anyhow::Result<(u64, u64)> {
            let (mut bytes, mut files) = (0, 0);
            folder::visit(folder, |file| {
                // One that is gone by now was sent.
                if let Ok(metadata) = file.path.metadata() {
                    bytes += on_disk(metadata.len());
                    files += 1;
                }
            })?;
            Ok((bytes, files))
        };
        let (mut bytes, files) = count(spool)?;
        let rejected = spool.join(folder::REJECTED);
        if rejected.is_dir() {
            bytes += count(&rejected)?.0;
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        self.files.store(files, Ordering::Relaxed);
        Ok(())
    }
}

/// Free and all bytes of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    pub free: u64,
    pub total: u64,
}

impl Disk {
    /// `None` where the system does not say. A file system without free inodes has no room.
    pub fn of(path: &Path) -> Option<Self> {
        use std::os::unix::ffi::OsStrExt;
        let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: plain data, filled by the call below or not read.
        let mut answer: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: a terminated path and a valid buffer.
        if unsafe { libc::statvfs(path.as_ptr(), &raw mut answer) } != 0 {
            return None;
        }
        let has_inodes = answer.f_files == 0 || answer.f_favail > 64;
        Some(Self {
            free: if has_inodes {
                answer.f_bavail.saturating_mul(answer.f_frsize)
            } else {
                0
            },
            total: answer.f_blocks.saturating_mul(answer.f_frsize),
        })
    }
}

/// Decides what fits.
pub struct Room {
    spool: PathBuf,
    limit: u64,
    reserve: Option<u64>,
    usage: Arc<Usage>,
    counted: Instant,
    full: bool,
    said: Option<Instant>,
}

impl Room {
    pub fn new(spool: &Path, limit: u64, reserve: Option<u64>) -> anyhow::Result<Self> {
        let usage = Arc::new(Usage::default());
        usage.recount(spool)?;
        Ok(Self {
            spool: spool.to_path_buf(),
            limit,
            reserve,
            usage,
            counted: Instant::now(),
            full: false,
            said: None,
        })
    }

    pub fn usage(&self) -> &Arc<Usage> {
        &self.usage
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// True if rows were dropped at the last flush.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Said when it turns, and at most once a minute: with room for small files and none for large
    /// ones it turns at every flush.
    pub fn set_full(&mut self, full: bool) {
        let turned = full != self.full;
        self.full = full;
        let silent = self.said.is_some_and(|said| said.elapsed() < SILENCE);
        if !turned || silent {
            return;
        }
        self.said = Some(Instant::now());
        if full {
            let disk = Disk::of(&self.spool);
            tracing::error!(
                spool = %self.spool.display(), used = self.usage.bytes(), limit = self.limit,
                free = disk.map(|disk| disk.free), reserve = disk.map(|disk| self.reserve(disk)),
                "the spool is full: what is there is kept, new rows are dropped and counted as {SPOOL_FULL} in agent_windows; start the collector, make room, or raise spool_limit"
            );
        } else {
            tracing::warn!("the spool has room again: rows are written again");
        }
    }

    /// Looks at the folder itself, at times.
    pub fn refresh(&mut self) -> anyhow::Result<()> {
        let due = if self.full { RECOUNT_FULL } else { RECOUNT };
        if self.counted.elapsed() >= due {
            self.recount()?;
        }
        Ok(())
    }

    pub fn recount(&mut self) -> anyhow::Result<()> {
        self.usage.recount(&self.spool)?;
        self.counted = Instant::now();
        Ok(())
    }

    fn reserve(&self, disk: Disk) -> u64 {
        self.reserve
            .unwrap_or_else(|| DEFAULT_RESERVE.min(disk.total / 20))
    }

    /// Whether a file of that many bytes may be written.
    pub fn fits(&self, class: Class, bytes: u64) -> bool {
        fits(
            class,
            on_disk(bytes),
            self.usage.bytes(),
            self.limit,
            Disk::of(&self.spool).map(|disk| (disk.free, self.reserve(disk))),
        )
    }

    /// Whether a file beside the spool, with a quota of its own, leaves the reserve free.
    pub fn leaves_reserve(&self, bytes: u64) -> bool {
        Disk::of(&self.spool)
            .is_none_or(|disk| disk.free.saturating_sub(on_disk(bytes)) >= self.reserve(disk))
    }

    /// Whether what may wait fits: it leaves half of the spool to what cannot.
    pub fn fits_in_half(&self, bytes: u64) -> bool {
        self.fits(Class::Raw, bytes)
            && self.usage.bytes().saturating_add(on_disk(bytes)) <= self.limit / 2
    }

    /// Whether there is some more room than one flush needs, so that it does not turn at each.
    pub fn has_room_again(&self) -> bool {
        self.fits(Class::Raw, self.limit / 20)
    }

    /// Whether a window can be told of. If not, it goes on until it can.
    pub fn fits_window(&self) -> bool {
        let most = self.limit.saturating_add(self.limit / 20 + WINDOW_BYTES);
        if self.usage.bytes() > most {
            return false;
        }
        Disk::of(&self.spool).is_none_or(|disk| disk.free >= WINDOW_BYTES)
    }
}

/// `disk`: free bytes and the reserve, if the system says.
fn fits(class: Class, bytes: u64, used: u64, limit: u64, disk: Option<(u64, u64)>) -> bool {
    let (limit, divisor) = match class {
        Class::Always => return true,
        Class::Small => (limit, 2),
        Class::Raw => (limit - limit / 10, 1),
    };
    let in_limit = used.saturating_add(bytes) <= limit;
    in_limit && disk.is_none_or(|(free, reserve)| free.saturating_sub(bytes) >= reserve / divisor)
}

/// Whether an error says that there is no space, or no more for this user.
pub fn is_no_space(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|error| {
            matches!(
                error.kind(),
                std::io::ErrorKind::StorageFull
                    | std::io::ErrorKind::QuotaExceeded
                    | std::io::ErrorKind::FileTooLarge
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_rows_leave_a_tenth_to_the_small_ones_and_windows_always_fit() {
        let room = |class, used| fits(class, 100, used, 1000, Some((10_000, 500)));
        assert!(room(Class::Raw, 800) && !room(Class::Raw, 801));
        assert!(room(Class::Small, 900) && !room(Class::Small, 901));
        assert!(room(Class::Always, 5000));
    }

    #[test]
    fn the_reserve_of_the_file_system_stays_free() {
        let room = |class, free| fits(class, 100, 0, 1 << 40, Some((free, 500)));
        assert!(room(Class::Raw, 600) && !room(Class::Raw, 599));
        assert!(room(Class::Small, 350) && !room(Class::Small, 349));
        assert!(room(Class::Always, 0));
    }

    #[test]
    fn sums_follow_files_that_come_and_go() {
        let spool = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: usize| {
            std::fs::write(spool.path().join(name), vec![0; bytes]).unwrap();
        };
        write("00000000000000000001-devices.parquet", 5000);
        write("journal", 100_000);
        std::fs::create_dir(spool.path().join("rejected")).unwrap();
        write("rejected/00000000000000000002-devices.parquet", 1);
        let mut room = Room::new(spool.path(), 1 << 30, Some(0)).unwrap();
        assert_eq!((room.usage.bytes(), room.usage.files()), (3 * BLOCK, 1));
        room.usage.add(1);
        room.usage.remove(5000);
        assert_eq!((room.usage.bytes(), room.usage.files()), (2 * BLOCK, 1));
        room.recount().unwrap();
        assert_eq!((room.usage.bytes(), room.usage.files()), (3 * BLOCK, 1));
    }

    #[test]
    fn causes_of_other_tables_are_no_calls() {
        for table in Table::FROM_AGENTS {
            assert_eq!(counts_calls(cause(table)), table == Table::AllocEvents);
        }
        assert!(counts_calls("ring_full") && counts_calls(RECORDER_FULL));
        assert!(!counts_calls(RECORDER_OVERWRITTEN) && !counts_calls(RECORDER_OFF));
    }
}
