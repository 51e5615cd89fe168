//! Who a row is about: host, boot, and process lifetimes.

use std::fs;

use super::clock;
use super::procfs;

/// Keeps hashes inside the positive half of a BIGINT.
const MASK_63: u64 = (1 << 63) - 1;

/// Identity of this host and boot.
#[derive(Debug, Clone)]
pub struct Host {
    pub name: String,
    pub boot_id: String,
}

impl Host {
    /// `name` overrides the kernel's host name.
    pub fn detect(name: Option<String>) -> Self {
        let read = |path: &str| {
            fs::read_to_string(path)
                .map(|s| s.trim().to_string())
                .unwrap_or_default()
        };
        let name = name.unwrap_or_else(|| read("/proc/sys/kernel/hostname"));
        Self {
            name,
            boot_id: read("/proc/sys/kernel/random/boot_id"),
        }
    }

    /// One process lifetime as one number, so that a reused pid is another process.
    pub fn process_id(&self, pid: u32, start: StartTime) -> i64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(self.name.as_bytes());
        hash.update(&[0]);
        hash.update(self.boot_id.as_bytes());
        hash.update(&pid.to_le_bytes());
        hash.update(&start.0.to_le_bytes());
        (hash.digest() & MASK_63) as i64
    }
}

/// When a process started: clock ticks since boot, field 22 of `/proc/PID/stat`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct StartTime(pub u64);

impl StartTime {
    pub fn of(pid: u32) -> Option<Self> {
        procfs::stat(pid).map(|stat| Self(stat.start_ticks))
    }

    /// Stands in for a process that was gone before it could be asked: the tick of its first event.
    pub fn from_boottime_ns(ns: u64) -> Self {
        Self(ns / (1_000_000_000 / ticks_per_second()))
    }

    /// Nanoseconds since 1970, exact to one clock tick.
    pub fn wall_ns(self) -> i64 {
        let since_boot = self.0 * (1_000_000_000 / ticks_per_second());
        clock::realtime_ns() as i64 - clock::boottime_ns() as i64 + since_boot as i64
    }
}

fn ticks_per_second() -> u64 {
    // SAFETY: a query without side effects.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks).ok().filter(|t| *t > 0).unwrap_or(100)
}
