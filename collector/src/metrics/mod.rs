//! The collector's numbers about itself, for Prometheus: see `docs/collector-metrics.md`, which a
//! test compares with what is registered here.
//!
//! Invariants:
//! - counters begin at 0 with the process; nothing here is read back by the collector, but
//!   [`Metrics::failing`] and [`Metrics::last_commit`], which tell whether it is ready;
//! - labels have few values, none of which a client chooses;
//! - there is one set for the process: it counts from anywhere, without being handed around.

mod access;
pub mod health;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use vramscope_wire::{SCHEMA_VERSION, Table};

pub use access::{AccessMetrics, ReloadLabels};

/// The process's metrics.
pub static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// What became of a batch, and why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BatchLabels {
    /// stored, duplicate, rejected or retry.
    pub outcome: &'static str,
    /// Of batches that were not taken; empty for others.
    pub cause: &'static str,
}

/// One table's commits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CommitLabels {
    /// The table.
    pub table: &'static str,
    /// ok or failed.
    pub outcome: &'static str,
}

/// Questions of a door.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct QueryLabels {
    /// flight, http or postgres.
    pub door: &'static str,
    /// ok, error, cancelled or refused.
    pub outcome: &'static str,
}

/// Requests to the HTTP door.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// The path as it is documented; `other` for all that are not.
    pub path: &'static str,
    /// The answer's status.
    pub status: u16,
}

/// What a connection was turned away from, and why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DoorLabels {
    /// The port: grpc (agents and Flight SQL) or http.
    pub door: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
    schema_version: u32,
}

type Histograms<L> = Family<L, Histogram>;

/// All of them. What is counted where it happens is public; what is measured when somebody asks
/// is set by [`health`].
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    failing: Mutex<BTreeMap<Table, Failing>>,
    last_commit: Mutex<Option<Instant>>,

    /// Batches answered, by outcome and cause.
    pub batches: Family<BatchLabels, Counter>,
    batch_rows: Counter,
    batch_bytes: Counter,
    /// From the whole batch received to its acknowledgement.
    pub ack_seconds: Histogram,
    /// Agents' streams that are open.
    pub streams: Gauge,
    /// Numbers that agents left out before a batch that was stored.
    pub missing: Counter,
    /// Rows whose time was not believed.
    pub misdated_rows: Counter,
    /// Batches sent again with other content.
    pub conflicts: Counter,
    /// Batches that one fsync of the log made durable.
    pub group_batches: Histogram,
    /// How long such an fsync took.
    pub group_seconds: Histogram,

    commits: Family<CommitLabels, Counter>,
    commit_seconds: Histogram,
    commit_rows: Histogram,
    /// Files that wait to be merged into larger ones.
    pub compaction_backlog_files: Gauge,
    /// Files that compaction replaced.
    pub compacted_files: Counter,

    /// Questions, by door and outcome.
    pub queries: Family<QueryLabels, Counter>,
    /// How long they took.
    pub query_seconds: Histograms<QueryLabels>,
    /// Rows handed to clients.
    pub query_rows: Counter,
    /// Bytes read from the tables' files.
    pub query_bytes_scanned: Counter,
    /// Rows of `query_log` that did not fit.
    pub query_log_dropped: Counter,
    queries_running: Gauge,
    queries_waiting: Gauge,
    query_memory: Gauge,
    query_spilled: Gauge,

    /// Requests to the HTTP door.
    pub http_requests: Family<RequestLabels, Counter>,
    /// Connections that are open, by door.
    pub connections: Family<DoorLabels, Gauge>,
    /// Connections turned away because there were too many, by door.
    pub connections_refused: Family<DoorLabels, Counter>,

    /// Whom the doors turned away.
    pub access: AccessMetrics,

    backlog_batches: Gauge,
    backlog_bytes: Gauge,
    disk_free: Gauge,
    disk_size: Gauge,
    last_commit_age: Gauge<f64, std::sync::atomic::AtomicU64>,
    ready: Gauge,
    resident: Gauge,
}

/// A table whose commits fail.
#[derive(Debug, Clone)]
pub struct Failing {
    /// Since when.
    pub since: Instant,
    /// How often in a row.
    pub times: u64,
    /// What was said last.
    pub error: String,
}

/// From 1 ms to 65 s.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 17))
}

impl Metrics {
    fn new() -> Metrics {
        let mut registry = Registry::with_prefix("vramscope");
        let build = Info::new(BuildLabels {
            version: env!("CARGO_PKG_VERSION"),
            schema_version: SCHEMA_VERSION,
        });
        registry.register(
            "build",
            "Version of the collector and of its schemas",
            build,
        );
        let counts = || Histogram::new(exponential_buckets(1.0, 4.0, 10));
        let metrics = Metrics {
            registry: Registry::default(),
            failing: Mutex::default(),
            last_commit: Mutex::default(),
            batches: Family::default(),
            batch_rows: Counter::default(),
            batch_bytes: Counter::default(),
            ack_seconds: seconds(),
            streams: Gauge::default(),
            missing: Counter::default(),
            misdated_rows: Counter::default(),
            conflicts: Counter::default(),
            group_batches: counts(),
            group_seconds: seconds(),
            commits: Family::default(),
            commit_seconds: seconds(),
            commit_rows: counts(),
            compaction_backlog_files: Gauge::default(),
            compacted_files: Counter::default(),
            queries: Family::default(),
            query_seconds: Family::new_with_constructor(seconds),
            query_rows: Counter::default(),
            query_bytes_scanned: Counter::default(),
            query_log_dropped: Counter::default(),
            queries_running: Gauge::default(),
            queries_waiting: Gauge::default(),
            query_memory: Gauge::default(),
            query_spilled: Gauge::default(),
            http_requests: Family::default(),
            connections: Family::default(),
            connections_refused: Family::default(),
            access: AccessMetrics::default(),
            backlog_batches: Gauge::default(),
            backlog_bytes: Gauge::default(),
            disk_free: Gauge::default(),
            disk_size: Gauge::default(),
            last_commit_age: Gauge::default(),
            ready: Gauge::default(),
            resident: Gauge::default(),
        };
        metrics.begin_at_zero();
        metrics.register_ingest(&mut registry);
        metrics.register_lake(&mut registry);
        metrics.register_queries(&mut registry);
        metrics.access.register(&mut registry);
        metrics.register_process(&mut registry);
        Metrics {
            registry,
            ..metrics
        }
    }

    /// Makes what has labels, so that a first event is an increase and not a new series.
    fn begin_at_zero(&self) {
        for outcome in ["stored", "duplicate", "rejected", "retry"] {
            let cause = "";
            let labels = BatchLabels { outcome, cause };
            drop(self.batches.get_or_create(&labels));
        }
        for table in Table::ALL {
            for outcome in ["ok", "failed"] {
                let table = table.name();
                let labels = CommitLabels { table, outcome };
                drop(self.commits.get_or_create(&labels));
            }
        }
        for door in ["flight", "http", "postgres"] {
            for outcome in ["ok", "error", "cancelled", "refused"] {
                let labels = QueryLabels { door, outcome };
                drop(self.queries.get_or_create(&labels));
                drop(self.query_seconds.get_or_create(&labels));
            }
        }
        // PostgreSQL's are not counted.
        for door in ["grpc", "http"] {
            let labels = DoorLabels { door };
            drop(self.connections.get_or_create(&labels));
            drop(self.connections_refused.get_or_create(&labels));
        }
        self.access.begin_at_zero();
    }

    fn register_ingest(&self, registry: &mut Registry) {
        registry.register(
            "ingest_batches",
            "Batches answered, by outcome, and by cause if they were not taken",
            self.batches.clone(),
        );
        registry.register(
            "ingest_rows",
            "Rows of batches stored",
            self.batch_rows.clone(),
        );
        registry.register_with_unit(
            "ingest",
            "Bytes of batches stored",
            Unit::Bytes,
            self.batch_bytes.clone(),
        );
        registry.register_with_unit(
            "ingest_ack",
            "Time from a whole batch received to its acknowledgement",
            Unit::Seconds,
            self.ack_seconds.clone(),
        );
        registry.register(
            "ingest_streams",
            "Open streams of agents",
            self.streams.clone(),
        );
        registry.register(
            "ingest_missing_batches",
            "Numbers that agents left out before batches that were stored",
            self.missing.clone(),
        );
        registry.register(
            "ingest_misdated_rows",
            "Rows stored whose time is too far from the collector's clock",
            self.misdated_rows.clone(),
        );
        registry.register(
            "ingest_conflicts",
            "Batches refused because the same number was stored with other content",
            self.conflicts.clone(),
        );
        registry.register(
            "wal_group_batches",
            "Batches made durable by one fsync of the write-ahead log",
            self.group_batches.clone(),
        );
        registry.register_with_unit(
            "wal_group",
            "Time of one write and fsync of the write-ahead log",
            Unit::Seconds,
            self.group_seconds.clone(),
        );
        registry.register(
            "wal_backlog_batches",
            "Batches in the write-ahead log that no table holds yet",
            self.backlog_batches.clone(),
        );
        registry.register_with_unit(
            "wal_backlog",
            "Bytes in the write-ahead log that no table holds yet",
            Unit::Bytes,
            self.backlog_bytes.clone(),
        );
    }

    fn register_lake(&self, registry: &mut Registry) {
        registry.register(
            "commits",
            "Commits of merged batches, by table and outcome",
            self.commits.clone(),
        );
        registry.register_with_unit(
            "commit",
            "Time of one commit, from the log to the table",
            Unit::Seconds,
            self.commit_seconds.clone(),
        );
        registry.register(
            "commit_rows",
            "Rows of one commit",
            self.commit_rows.clone(),
        );
        registry.register_with_unit(
            "last_commit_age",
            "Time since the last commit of any table; since the start if there was none",
            Unit::Seconds,
            self.last_commit_age.clone(),
        );
        registry.register(
            "compaction_backlog_files",
            "Data files that wait to be merged into larger ones",
            self.compaction_backlog_files.clone(),
        );
        registry.register(
            "compacted_files",
            "Data files that compaction replaced",
            self.compacted_files.clone(),
        );
    }

    fn register_queries(&self, registry: &mut Registry) {
        registry.register(
            "queries",
            "Questions, by door and outcome",
            self.queries.clone(),
        );
        registry.register_with_unit(
            "query",
            "Time of a question from its arrival to its last row, by door and outcome",
            Unit::Seconds,
            self.query_seconds.clone(),
        );
        registry.register(
            "query_rows",
            "Rows handed to clients",
            self.query_rows.clone(),
        );
        registry.register_with_unit(
            "query_scanned",
            "Bytes that queries read from the tables' files",
            Unit::Bytes,
            self.query_bytes_scanned.clone(),
        );
        registry.register(
            "queries_running",
            "Queries that run",
            self.queries_running.clone(),
        );
        registry.register(
            "queries_waiting",
            "Questions that wait for a place",
            self.queries_waiting.clone(),
        );
        registry.register_with_unit(
            "query_memory",
            "Memory that running queries have reserved",
            Unit::Bytes,
            self.query_memory.clone(),
        );
        registry.register_with_unit(
            "query_spilled",
            "What running queries hold in the spill folder",
            Unit::Bytes,
            self.query_spilled.clone(),
        );
        registry.register(
            "query_log_dropped",
            "Rows of query_log that were lost because too many waited",
            self.query_log_dropped.clone(),
        );
        registry.register(
            "http_requests",
            "Requests to the HTTP door, by path and status",
            self.http_requests.clone(),
        );
        registry.register(
            "connections",
            "Open connections of clients, by door",
            self.connections.clone(),
        );
        registry.register(
            "connections_refused",
            "Connections turned away because there were too many, by door",
            self.connections_refused.clone(),
        );
    }

    fn register_process(&self, registry: &mut Registry) {
        registry.register(
            "ready",
            "1 if /readyz says so, 0 if it gives reasons why not",
            self.ready.clone(),
        );
        registry.register_with_unit(
            "disk_free",
            "Room left on the data folder's disk for this process",
            Unit::Bytes,
            self.disk_free.clone(),
        );
        registry.register_with_unit(
            "disk_size",
            "Size of the data folder's disk",
            Unit::Bytes,
            self.disk_size.clone(),
        );
        registry.register_with_unit(
            "resident_memory",
            "Memory of the process that is in RAM (RSS)",
            Unit::Bytes,
            self.resident.clone(),
        );
    }

    /// A batch was answered.
    pub fn batch(&self, outcome: &'static str, cause: &'static str, waited: Duration) {
        let labels = BatchLabels { outcome, cause };
        self.batches.get_or_create(&labels).inc();
        self.ack_seconds.observe(waited.as_secs_f64());
    }

    /// A batch was stored.
    pub fn stored(&self, rows: u64, bytes: u64) {
        self.batch_rows.inc_by(rows);
        self.batch_bytes.inc_by(bytes);
    }

    /// A table has new rows.
    pub fn committed(&self, table: Table, rows: u64, took: Duration) {
        self.count_commit(table, "ok");
        self.commit_seconds.observe(took.as_secs_f64());
        self.commit_rows.observe(rows as f64);
        lock(&self.failing).remove(&table);
        *lock(&self.last_commit) = Some(Instant::now());
    }

    /// A table's commit failed.
    pub fn commit_failed(&self, table: Table, error: &dyn fmt::Display) {
        self.count_commit(table, "failed");
        let mut failing = lock(&self.failing);
        let entry = failing.entry(table).or_insert_with(|| Failing {
            since: Instant::now(),
            times: 0,
            error: String::new(),
        });
        entry.times += 1;
        entry.error = error.to_string();
    }

    fn count_commit(&self, table: Table, outcome: &'static str) {
        let labels = CommitLabels {
            table: table.name(),
            outcome,
        };
        self.commits.get_or_create(&labels).inc();
    }

    /// Tables whose last commit failed.
    pub fn failing(&self) -> BTreeMap<Table, Failing> {
        lock(&self.failing).clone()
    }

    /// When a commit last went through.
    pub fn last_commit(&self) -> Option<Instant> {
        *lock(&self.last_commit)
    }

    /// All of them as OpenMetrics text.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
