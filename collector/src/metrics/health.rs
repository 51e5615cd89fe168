//! Whether the collector can do its work: takes batches, commits them, has room.
//!
//! Invariants:
//! - ready means that a batch sent now would be taken and become visible; anything that speaks
//!   against it is a reason, and every reason is told;
//! - looking costs no more than a few system calls, and no disk access but for asking its room.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use utoipa::ToSchema;

use super::METRICS;
use crate::ingest::wal::Wal;
use crate::query::Gate;

/// Commits of a table may fail so long before it counts; the next try may go through.
const FAILING: Duration = Duration::from_secs(30);
/// Something that waits for a commit so long waits for too long.
const STALE: Duration = Duration::from_secs(60);
/// Share of the log's limit, in percent, from which agents will soon be put off.
const BACKLOG_PERCENT: u64 = 90;

/// What is looked at.
pub struct Health {
    data: PathBuf,
    wal: Arc<Wal>,
    wal_limit_bytes: u64,
    min_disk_free_bytes: u64,
    /// How long a commit may keep others waiting in the ordinary way.
    commit_interval: Duration,
    gate: Gate,
    started: Instant,
    stopping: AtomicBool,
}

/// What `/readyz` says.
#[derive(Debug, Serialize, ToSchema)]
pub struct Readiness {
    /// Whether a batch sent now would be taken and become visible.
    pub ready: bool,
    /// Why not.
    pub reasons: Vec<Reason>,
    /// Batches in the write-ahead log that no table holds yet.
    pub backlog_batches: u64,
    /// Their bytes.
    pub backlog_bytes: u64,
    /// Room left on the data folder's disk, in bytes; absent if the system does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_free_bytes: Option<u64>,
    /// Seconds since the last commit of any table; absent if there was none since the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_commit_age_seconds: Option<f64>,
    /// The collector's version.
    pub version: &'static str,
}

/// One thing that speaks against it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Reason {
    /// stopping, backlog, disk, commits_failing or commits_late.
    pub cause: &'static str,
    /// In words, with numbers.
    pub detail: String,
}

struct Disk {
    free: u64,
    size: u64,
}

impl Health {
    /// Looks at a running collector.
    pub fn new(
        data: PathBuf,
        wal: Arc<Wal>,
        wal_limit_bytes: u64,
        min_disk_free_bytes: u64,
        commit_interval: Duration,
        gate: Gate,
    ) -> Health {
        Health {
            data,
            wal,
            wal_limit_bytes,
            min_disk_free_bytes,
            commit_interval,
            gate,
            started: Instant::now(),
            stopping: AtomicBool::new(false),
        }
    }

    /// From now on it is not ready.
    pub fn stops(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether it is ready now, and if not, why.
    pub fn readiness(&self) -> Readiness {
        let backlog = self.wal.backlog();
        let disk = self.disk();
        let mut reasons = Vec::new();
        let mut reason = |cause, detail| reasons.push(Reason { cause, detail });
        if self.stopping.load(Ordering::Relaxed) {
            reason("stopping", "the collector is shutting down".to_string());
        }
        if backlog.bytes > self.wal_limit_bytes / 100 * BACKLOG_PERCENT {
            reason(
                "backlog",
                format!(
                    "{} bytes wait in the write-ahead log, {BACKLOG_PERCENT} % of its limit of {}; agents are or will be put off",
                    backlog.bytes, self.wal_limit_bytes
                ),
            );
        }
        if let Some(disk) = &disk
            && disk.free < self.min_disk_free_bytes
        {
            reason(
                "disk",
                format!(
                    "{} bytes are free in {}, less than min_disk_free_bytes {}",
                    disk.free,
                    self.data.display(),
                    self.min_disk_free_bytes
                ),
            );
        }
        for (table, failing) in METRICS.failing() {
            if failing.since.elapsed() > FAILING {
                reason(
                    "commits_failing",
                    format!(
                        "table {}: {} commits in a row failed in {} s: {}",
                        table.name(),
                        failing.times,
                        failing.since.elapsed().as_secs(),
                        failing.error
                    ),
                );
            }
        }
        let last_commit = METRICS.last_commit();
        let since = last_commit.unwrap_or(self.started).elapsed();
        if backlog.files > 0 && since > STALE + 2 * self.commit_interval {
            reason(
                "commits_late",
                format!(
                    "{} batches wait, and no commit went through for {} s",
                    backlog.files,
                    since.as_secs()
                ),
            );
        }
        Readiness {
            ready: reasons.is_empty(),
            reasons,
            backlog_batches: backlog.files,
            backlog_bytes: backlog.bytes,
            disk_free_bytes: disk.map(|disk| disk.free),
            last_commit_age_seconds: last_commit.map(|at| at.elapsed().as_secs_f64()),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// The metrics, with those that are measured when somebody asks.
    pub fn metrics(&self) -> Result<String, std::fmt::Error> {
        let readiness = self.readiness();
        let load = self.gate.load();
        METRICS.ready.set(readiness.ready.into());
        METRICS
            .backlog_batches
            .set(signed(readiness.backlog_batches));
        METRICS.backlog_bytes.set(signed(readiness.backlog_bytes));
        if let Some(disk) = self.disk() {
            METRICS.disk_free.set(signed(disk.free));
            METRICS.disk_size.set(signed(disk.size));
        }
        let since = METRICS.last_commit().unwrap_or(self.started).elapsed();
        METRICS.last_commit_age.set(since.as_secs_f64());
        METRICS.queries_running.set(load.running as i64);
        METRICS.queries_waiting.set(load.waiting as i64);
        METRICS.query_memory.set(signed(load.memory_bytes as u64));
        METRICS.query_spilled.set(signed(load.spilled_bytes));
        if let Some(bytes) = resident_bytes() {
            METRICS.resident.set(signed(bytes));
        }
        METRICS.encode()
    }

    fn disk(&self) -> Option<Disk> {
        let found = rustix::fs::statvfs(&self.data).ok()?;
        Some(Disk {
            // What is left for processes without privileges.
            free: found.f_bavail.saturating_mul(found.f_frsize),
            size: found.f_blocks.saturating_mul(found.f_frsize),
        })
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// `VmRSS` of `/proc/self/status`, which is in KiB.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
