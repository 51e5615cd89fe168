//! The keys of the configuration, each a line of the file, a flag and an environment variable.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;

use super::engine::EngineName;
use super::value::{ByteSize, Listen, Span};
use crate::ingest::promise::Promise;
use crate::lake::upkeep::retention::Retention;

/// The keys as one source (file, or flags and environment) gives them.
#[derive(Debug, Default, Clone, clap::Args, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    /// Data folder: one Delta table per folder, and the write-ahead log
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    pub data: Option<PathBuf>,
    /// Address for agents and Flight SQL clients; loopback only, unless credentials are configured
    /// [default: 127.0.0.1:7717]
    #[arg(long, value_name = "ADDRESS:PORT", env = "VRAMSCOPE_COLLECTOR_LISTEN")]
    pub listen: Option<SocketAddr>,
    /// Most connections of agents and Flight SQL clients at a time [default: 16384]
    #[arg(long, value_name = "N", env = "VRAMSCOPE_COLLECTOR_MAX_CONNECTIONS")]
    pub max_connections: Option<usize>,
    /// How often logged batches are merged and committed to the tables [default: 2s]
    #[arg(long, value_name = "TIME", env = "VRAMSCOPE_COLLECTOR_COMMIT_INTERVAL")]
    pub commit_interval: Option<Span>,
    /// Largest batch that is taken [default: 32MiB]
    #[arg(long, value_name = "SIZE", env = "VRAMSCOPE_COLLECTOR_MAX_BATCH_BYTES")]
    pub max_batch_bytes: Option<ByteSize>,
    /// Uncommitted log above which agents are told to come back later [default: 4GiB]
    #[arg(long, value_name = "SIZE", env = "VRAMSCOPE_COLLECTOR_WAL_LIMIT_BYTES")]
    pub wal_limit_bytes: Option<ByteSize>,
    /// Memory that all running queries share [default: 2GiB]
    #[arg(
        long,
        value_name = "SIZE",
        env = "VRAMSCOPE_COLLECTOR_QUERY_MEMORY_BYTES"
    )]
    pub query_memory_bytes: Option<ByteSize>,
    /// Time after which a query is ended [default: 60s]
    #[arg(long, value_name = "TIME", env = "VRAMSCOPE_COLLECTOR_QUERY_TIMEOUT")]
    pub query_timeout: Option<Span>,
    /// Rows after which a query is ended with an error [default: 10000000]
    #[arg(long, value_name = "ROWS", env = "VRAMSCOPE_COLLECTOR_QUERY_MAX_ROWS")]
    pub query_max_rows: Option<u64>,
    /// What is logged to standard error: a level, or target=level pairs
    /// [default: warn,vramscope_collector=info]
    #[arg(long, value_name = "FILTER", env = "VRAMSCOPE_COLLECTOR_LOG")]
    pub log: Option<String>,

    // The HTTP door, and bounds of queries.
    /// Address of the HTTP API, /metrics and /readyz, or "off" [default: 127.0.0.1:7718]
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        env = "VRAMSCOPE_COLLECTOR_HTTP_LISTEN"
    )]
    pub http_listen: Option<Listen>,
    /// Most connections to the HTTP door at a time [default: 2048]
    #[arg(
        long,
        value_name = "N",
        env = "VRAMSCOPE_COLLECTOR_HTTP_MAX_CONNECTIONS"
    )]
    pub http_max_connections: Option<usize>,
    /// How long an HTTP client may take to send a request or to take an answer [default: 20s]
    #[arg(
        long,
        value_name = "TIME",
        env = "VRAMSCOPE_COLLECTOR_HTTP_CLIENT_TIMEOUT"
    )]
    pub http_client_timeout: Option<Span>,
    /// Memory that one query may have [default: half of query_memory_bytes]
    #[arg(
        long,
        value_name = "SIZE",
        env = "VRAMSCOPE_COLLECTOR_QUERY_SHARE_BYTES"
    )]
    pub query_share_bytes: Option<ByteSize>,
    /// Folder that queries spill to [default: _spill in the data folder]
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_SPILL_DIR")]
    pub spill_dir: Option<PathBuf>,
    /// What all queries together may spill [default: 16GiB]
    #[arg(
        long,
        value_name = "SIZE",
        env = "VRAMSCOPE_COLLECTOR_SPILL_LIMIT_BYTES"
    )]
    pub spill_limit_bytes: Option<ByteSize>,
    /// How often rows of query_log are written [default: 5s]
    #[arg(
        long,
        value_name = "TIME",
        env = "VRAMSCOPE_COLLECTOR_QUERY_LOG_INTERVAL"
    )]
    pub query_log_interval: Option<Span>,
    /// Room on the data folder's disk below which /readyz says no [default: 1GiB]
    #[arg(
        long,
        value_name = "SIZE",
        env = "VRAMSCOPE_COLLECTOR_MIN_DISK_FREE_BYTES"
    )]
    pub min_disk_free_bytes: Option<ByteSize>,

    // The PostgreSQL door.
    /// Address for PostgreSQL clients, or "off" [default: 127.0.0.1:7719]
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        env = "VRAMSCOPE_COLLECTOR_POSTGRES_LISTEN"
    )]
    pub postgres_listen: Option<Listen>,
    /// Most PostgreSQL clients at a time [default: 200]
    #[arg(
        long,
        value_name = "N",
        env = "VRAMSCOPE_COLLECTOR_POSTGRES_MAX_CONNECTIONS"
    )]
    pub postgres_max_connections: Option<usize>,
    /// Time after which a PostgreSQL client that asks nothing is sent away [default: 1h]
    #[arg(
        long,
        value_name = "TIME",
        env = "VRAMSCOPE_COLLECTOR_POSTGRES_IDLE_TIMEOUT"
    )]
    pub postgres_idle_timeout: Option<Span>,
    /// The collector's certificate, PEM; with the next three keys it turns on TLS and
    /// credentials on every port
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_COLLECTOR_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_COLLECTOR_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// CA of the agents' certificates, PEM
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_COLLECTOR_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,
    /// Users and tokens, TOML; `vramscope-collector init` makes all four files
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_COLLECTOR_CREDENTIALS")]
    pub credentials: Option<PathBuf>,

    // Intake.
    /// How far ahead of the collector's clock a row's time may be; beyond it the row is kept in
    /// the partition of its arrival [default: 24h]
    #[arg(long, value_name = "TIME", env = "VRAMSCOPE_COLLECTOR_CLOCK_AHEAD")]
    pub clock_ahead: Option<Span>,
    /// How far behind the collector's clock it may be [default: 744h, which is 31 days]
    #[arg(long, value_name = "TIME", env = "VRAMSCOPE_COLLECTOR_CLOCK_BEHIND")]
    pub clock_behind: Option<Span>,
    /// What an acknowledgement stands for: fsync (the batch is on this machine's disk) or store (its
    /// rows are committed to the table, on its storage) [default: fsync]
    #[arg(long, value_name = "PROMISE", env = "VRAMSCOPE_COLLECTOR_PROMISE")]
    pub promise: Option<Promise>,

    // The lake's upkeep.
    /// How long rows are kept, by table: alloc_events=7d,stack_windows=400d; `forever` keeps all
    /// [default: alloc_events=7d, the others 400d]
    #[arg(
        long,
        value_name = "TABLE=TIME,…",
        env = "VRAMSCOPE_COLLECTOR_RETENTION"
    )]
    pub retention: Option<Retention>,
    /// Time between two looks for files to merge [default: 15s]
    #[arg(long, value_name = "TIME", env = "VRAMSCOPE_COLLECTOR_UPKEEP_INTERVAL")]
    pub upkeep_interval: Option<Span>,
    /// Memory that a merge of files may take [default: 192MiB]
    #[arg(
        long,
        value_name = "SIZE",
        env = "VRAMSCOPE_COLLECTOR_UPKEEP_MEMORY_BYTES"
    )]
    pub upkeep_memory_bytes: Option<ByteSize>,
    /// How long a file stays on disk after nothing refers to it any more [default: 1h]
    #[arg(long, value_name = "TIME", env = "VRAMSCOPE_COLLECTOR_VACUUM_AFTER")]
    pub vacuum_after: Option<Span>,

    // The lake's place, and what computes.
    /// Where the tables lie, if not in the data folder: a folder or s3://BUCKET/PREFIX. Several
    /// collectors may write it, each with a data folder of its own
    #[arg(long, value_name = "PLACE", env = "VRAMSCOPE_COLLECTOR_LAKE")]
    pub lake: Option<String>,
    /// What computes answers: local, or distributed over workers [default: local]
    #[arg(long, value_name = "ENGINE", env = "VRAMSCOPE_COLLECTOR_ENGINE")]
    pub engine: Option<EngineName>,
    /// Workers of the distributed engine (`vramscope-collector executor`)
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        env = "VRAMSCOPE_COLLECTOR_WORKERS"
    )]
    pub workers: Option<Vec<String>>,
    /// Certificate shown to workers (PEM), for https:// workers
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_WORKER_CERT")]
    pub worker_cert: Option<PathBuf>,
    /// Key of that certificate (PEM)
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_WORKER_KEY")]
    pub worker_key: Option<PathBuf>,
    /// Authority that workers' certificates are of (PEM)
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_WORKER_CA")]
    pub worker_ca: Option<PathBuf>,
}

impl Keys {
    /// Reads a TOML file. An unknown key is an error that names the key and the file.
    pub fn from_file(path: &Path) -> anyhow::Result<Keys> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("failed to read configuration {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("configuration {} is wrong", path.display()))
    }

    /// `self` where it says something, `below` where it doesn't.
    pub fn over(self, below: Keys) -> Keys {
        Keys {
            data: self.data.or(below.data),
            listen: self.listen.or(below.listen),
            max_connections: self.max_connections.or(below.max_connections),
            commit_interval: self.commit_interval.or(below.commit_interval),
            max_batch_bytes: self.max_batch_bytes.or(below.max_batch_bytes),
            wal_limit_bytes: self.wal_limit_bytes.or(below.wal_limit_bytes),
            query_memory_bytes: self.query_memory_bytes.or(below.query_memory_bytes),
            query_timeout: self.query_timeout.or(below.query_timeout),
            query_max_rows: self.query_max_rows.or(below.query_max_rows),
            log: self.log.or(below.log),
            http_listen: self.http_listen.or(below.http_listen),
            http_max_connections: self.http_max_connections.or(below.http_max_connections),
            http_client_timeout: self.http_client_timeout.or(below.http_client_timeout),
            query_share_bytes: self.query_share_bytes.or(below.query_share_bytes),
            spill_dir: self.spill_dir.or(below.spill_dir),
            spill_limit_bytes: self.spill_limit_bytes.or(below.spill_limit_bytes),
            query_log_interval: self.query_log_interval.or(below.query_log_interval),
            min_disk_free_bytes: self.min_disk_free_bytes.or(below.min_disk_free_bytes),
            postgres_listen: self.postgres_listen.or(below.postgres_listen),
            postgres_max_connections: self
                .postgres_max_connections
                .or(below.postgres_max_connections),
            postgres_idle_timeout: self.postgres_idle_timeout.or(below.postgres_idle_timeout),
            tls_cert: self.tls_cert.or(below.tls_cert),
            tls_key: self.tls_key.or(below.tls_key),
            tls_client_ca: self.tls_client_ca.or(below.tls_client_ca),
            credentials: self.credentials.or(below.credentials),
            clock_ahead: self.clock_ahead.or(below.clock_ahead),
            clock_behind: self.clock_behind.or(below.clock_behind),
            promise: self.promise.or(below.promise),
            retention: self.retention.or(below.retention),
            upkeep_interval: self.upkeep_interval.or(below.upkeep_interval),
            upkeep_memory_bytes: self.upkeep_memory_bytes.or(below.upkeep_memory_bytes),
            vacuum_after: self.vacuum_after.or(below.vacuum_after),
            lake: self.lake.or(below.lake),
            engine: self.engine.or(below.engine),
            workers: self.workers.or(below.workers),
            worker_cert: self.worker_cert.or(below.worker_cert),
            worker_key: self.worker_key.or(below.worker_key),
            worker_ca: self.worker_ca.or(below.worker_ca),
        }
    }
}
