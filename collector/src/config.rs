//! The collector's configuration: one TOML file, every key also a flag and an environment
//! variable. A flag wins over the environment, the environment over the file, the file over
//! the default.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Deserializer};
use vramscope_queries::engine::{Cluster, Engine};

use crate::access::{self, tls::TlsFiles};
use crate::ingest::placing::Clock;
use crate::ingest::promise::Promise;
use crate::lake::upkeep::retention::Retention;
use crate::lake::upkeep::{self, vacuum};

/// A number of bytes: a plain integer, or text such as `64MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?} is not a size; write bytes, or a number with KiB, MiB, GiB or TiB")
        };
        let (digits, unit) = UNITS
            .into_iter()
            .find_map(|(name, unit)| text.strip_suffix(name).map(|digits| (digits, unit)))
            .unwrap_or((text, 1));
        let number: u64 = digits.trim().parse().map_err(|_| wrong())?;
        number.checked_mul(unit).map(ByteSize).ok_or_else(wrong)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS
            .into_iter()
            .find(|(_, unit)| self.0 > 0 && self.0.is_multiple_of(*unit))
        {
            Some((name, unit)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Number(u64),
            Text(String),
        }
        match Spelling::deserialize(deserializer)? {
            Spelling::Number(bytes) => Ok(ByteSize(bytes)),
            Spelling::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// A length of time such as `500ms`, `2s`, `5m`, `12h`, `7d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

/// "ms" before "m" and "s", which are its ends.
const TIMES: [(&str, u64); 5] = [
    ("ms", 1),
    ("s", 1_000),
    ("m", 60_000),
    ("h", 3_600_000),
    ("d", 86_400_000),
];

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a length of time; write a number with ms, s, m, h or d");
        let (digits, unit_ms) = TIMES
            .into_iter()
            .find_map(|(name, ms)| text.strip_suffix(name).map(|digits| (digits, ms)))
            .ok_or_else(wrong)?;
        let number: u64 = digits.trim().parse().map_err(|_| wrong())?;
        let ms = number.checked_mul(unit_ms).ok_or_else(wrong)?;
        Ok(Span(Duration::from_millis(ms)))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if ms > 0 && ms.is_multiple_of(86_400_000) {
            write!(f, "{}d", ms / 86_400_000)
        } else if ms.is_multiple_of(1000) {
            write!(f, "{}s", ms / 1000)
        } else {
            write!(f, "{ms}ms")
        }
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// Where a door listens, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listen {
    /// It is closed.
    Off,
    /// On this address.
    At(SocketAddr),
}

impl Listen {
    fn loopback(port: u16) -> Listen {
        Listen::At(SocketAddr::from(([127, 0, 0, 1], port)))
    }

    /// The address, if it is open.
    pub fn address(self) -> Option<SocketAddr> {
        match self {
            Listen::Off => None,
            Listen::At(address) => Some(address),
        }
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Listen::Off);
        }
        text.parse().map(Listen::At).map_err(|_| {
            format!("{text:?} is no address such as 127.0.0.1:7718 or [::1]:7718, nor \"off\"")
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Off => f.write_str("off"),
            Listen::At(address) => address.fmt(f),
        }
    }
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// The keys as one source (file, or flags and environment) gives them.
#[derive(Debug, Default, Clone, clap::Args, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    /// Data folder: one Delta table per folder, and the write-ahead log
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    pub data: Option<PathBuf>,
    /// Address for agents and SQL clients; loopback only [default: 127.0.0.1:7717]
    #[arg(long, value_name = "ADDRESS:PORT", env = "VRAMSCOPE_COLLECTOR_LISTEN")]
    pub listen: Option<SocketAddr>,
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
    /// Memory that a merge of files may take [default: 256MiB]
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

/// What computes answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EngineName {
    /// The collector itself.
    Local,
    /// Workers, each over a part of the files.
    Distributed,
}

/// What computes answers, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineKeys {
    /// Which.
    pub name: EngineName,
    /// URLs of workers.
    pub workers: Vec<String>,
    /// Certificate, key and authority.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
    /// The authority.
    pub ca: Option<PathBuf>,
}

impl EngineKeys {
    /// The engine itself; reads the certificates.
    pub fn engine(&self) -> anyhow::Result<Engine> {
        if self.name == EngineName::Local {
            return Ok(Engine::Local);
        }
        let files = (
            self.ca.as_deref(),
            self.cert.as_deref(),
            self.key.as_deref(),
        );
        let identity = crate::executor::identity(files.0, files.1, files.2)?;
        Ok(Engine::Distributed(Cluster::new(&self.workers, identity)?))
    }

    fn to_toml(&self) -> String {
        let name = match self.name {
            EngineName::Local => "local",
            EngineName::Distributed => "distributed",
        };
        let text = |value: &str| toml::Value::String(value.to_string()).to_string();
        let mut lines = vec![format!("engine = \"{name}\"")];
        if self.workers.is_empty() {
            lines.push("# workers = [\"http://127.0.0.1:7720\", \"http://127.0.0.1:7721\"]".into());
        } else {
            let workers: Vec<String> = self.workers.iter().map(|url| text(url)).collect();
            lines.push(format!("workers = [{}]", workers.join(", ")));
        }
        let files = [
            ("worker_cert", &self.cert),
            ("worker_key", &self.key),
            ("worker_ca", &self.ca),
        ];
        for (key, file) in files {
            lines.push(match file {
                Some(file) => format!("{key} = {}", text(&file.display().to_string())),
                None => format!("# {key} = \"/etc/vramscope/{}.pem\"", &key[7..]),
            });
        }
        lines.join("\n")
    }
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

/// The effective configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Data folder. `None` only under `--print-config`.
    pub data: Option<PathBuf>,
    /// Address to listen on.
    pub listen: SocketAddr,
    /// How often logged batches are committed.
    pub commit_interval: Duration,
    /// Largest Parquet file of a batch.
    pub max_batch_bytes: u64,
    /// Uncommitted log, in bytes, above which batches are answered RETRY.
    pub wal_limit_bytes: u64,
    /// Memory that all running queries share, in bytes.
    pub query_memory_bytes: u64,
    /// Time after which a query is ended.
    pub query_timeout: Duration,
    /// Rows after which a query is ended with an error.
    pub query_max_rows: u64,
    /// Filter of the log on standard error.
    pub log: String,
    /// Where the HTTP door listens.
    pub http_listen: Listen,
    /// Most connections to it at a time.
    pub http_max_connections: usize,
    /// How long a client may take to send a request, and to take some of an answer.
    pub http_client_timeout: Duration,
    /// Memory that one query may have, in bytes.
    pub query_share_bytes: u64,
    /// Where queries spill to; `None` is `_spill` in the data folder.
    pub spill_dir: Option<PathBuf>,
    /// What all queries together may spill, in bytes.
    pub spill_limit_bytes: u64,
    /// How often rows of `query_log` are written.
    pub query_log_interval: Duration,
    /// Room on the data folder's disk below which the collector is not ready, in bytes.
    pub min_disk_free_bytes: u64,
    /// Where the PostgreSQL door listens.
    pub postgres_listen: Listen,
    /// Most PostgreSQL clients at a time.
    pub postgres_max_connections: usize,
    /// Time after which a PostgreSQL client that asks nothing is sent away.
    pub postgres_idle_timeout: Duration,
    /// Certificates and credentials; `None`: loopback only, and everybody is let in.
    pub access: Option<access::Files>,
    /// Which times of rows are believed.
    pub clock: Clock,
    /// What an acknowledgement stands for.
    pub promise: Promise,
    /// How the lake is kept up.
    pub upkeep: upkeep::Settings,
    /// Where the tables lie; `None` is the data folder, or what was chosen for it before.
    pub lake: Option<String>,
    /// What computes answers.
    pub engine: EngineKeys,
}

impl Config {
    /// Fills in defaults and refuses what cannot work.
    pub fn from_keys(keys: Keys) -> anyhow::Result<Config> {
        let default_max_batch = vramscope_wire::MAX_BATCH_BYTES as u64;
        let query_memory_bytes = keys.query_memory_bytes.map_or(2 << 30, |size| size.0);
        let config = Config {
            data: keys.data,
            listen: keys
                .listen
                .unwrap_or(SocketAddr::from(([127, 0, 0, 1], 7717))),
            commit_interval: keys
                .commit_interval
                .map_or(Duration::from_secs(2), |span| span.0),
            max_batch_bytes: keys
                .max_batch_bytes
                .map_or(default_max_batch, |size| size.0),
            wal_limit_bytes: keys.wal_limit_bytes.map_or(4 << 30, |size| size.0),
            query_memory_bytes,
            query_timeout: keys
                .query_timeout
                .map_or(Duration::from_secs(60), |span| span.0),
            query_max_rows: keys.query_max_rows.unwrap_or(10_000_000),
            log: keys
                .log
                .unwrap_or_else(|| "warn,vramscope_collector=info".to_string()),
            http_listen: keys.http_listen.unwrap_or(Listen::loopback(7718)),
            http_max_connections: keys.http_max_connections.unwrap_or(2048),
            http_client_timeout: keys
                .http_client_timeout
                .map_or(Duration::from_secs(20), |span| span.0),
            query_share_bytes: keys
                .query_share_bytes
                .map_or(query_memory_bytes / 2, |size| size.0),
            spill_dir: keys.spill_dir,
            spill_limit_bytes: keys.spill_limit_bytes.map_or(16 << 30, |size| size.0),
            query_log_interval: keys
                .query_log_interval
                .map_or(Duration::from_secs(5), |span| span.0),
            min_disk_free_bytes: keys.min_disk_free_bytes.map_or(1 << 30, |size| size.0),
            postgres_listen: keys.postgres_listen.unwrap_or(Listen::loopback(7719)),
            postgres_max_connections: keys.postgres_max_connections.unwrap_or(200),
            postgres_idle_timeout: keys
                .postgres_idle_timeout
                .map_or(Duration::from_secs(3600), |span| span.0),
            access: access_files(
                keys.tls_cert,
                keys.tls_key,
                keys.tls_client_ca,
                keys.credentials,
            )?,
            clock: Clock {
                ahead: keys
                    .clock_ahead
                    .map_or(Duration::from_secs(24 * 3600), |span| span.0),
                behind: keys
                    .clock_behind
                    .map_or(Duration::from_secs(31 * 24 * 3600), |span| span.0),
            },
            promise: keys.promise.unwrap_or(Promise::Fsync),
            upkeep: upkeep::Settings {
                interval: keys
                    .upkeep_interval
                    .map_or(Duration::from_secs(15), |span| span.0),
                memory_bytes: keys.upkeep_memory_bytes.map_or(256 << 20, |size| size.0),
                vacuum_after: keys
                    .vacuum_after
                    .map_or(Duration::from_secs(3600), |span| span.0),
                retention: keys.retention.unwrap_or_default(),
            },
            lake: keys.lake,
            engine: EngineKeys {
                name: keys.engine.unwrap_or(EngineName::Local),
                workers: keys.workers.unwrap_or_default(),
                cert: keys.worker_cert,
                key: keys.worker_key,
                ca: keys.worker_ca,
            },
        };
        config.check()?;
        Ok(config)
    }

    /// Nothing but loopback without credentials.
    fn check_listen(&self, key: &str, address: SocketAddr) -> anyhow::Result<()> {
        if self.access.is_none() && !address.ip().is_loopback() {
            bail!(
                "refusing {key} {address}: no credentials are configured; make them with \
                 `vramscope-collector init` and set tls_cert, tls_key, tls_client_ca and \
                 credentials, or use a loopback address such as 127.0.0.1:{}",
                address.port()
            );
        }
        Ok(())
    }

    fn check(&self) -> anyhow::Result<()> {
        self.check_listen("listen", self.listen)?;
        if let Some(address) = self.http_listen.address() {
            self.check_listen("http_listen", address)?;
        }
        if let Some(address) = self.postgres_listen.address() {
            self.check_listen("postgres_listen", address)?;
        }
        if self.postgres_max_connections == 0 {
            bail!(
                "postgres_max_connections is 0; to close the door, set postgres_listen to \"off\""
            );
        }
        if self.postgres_idle_timeout.is_zero() {
            bail!("postgres_idle_timeout is 0; it must be at least 1ms");
        }
        if self.http_max_connections == 0 {
            bail!("http_max_connections is 0; to close the door, set http_listen to \"off\"");
        }
        if self.http_client_timeout.is_zero() {
            bail!("http_client_timeout is 0; it must be at least 1ms");
        }
        if self.query_share_bytes == 0 || self.query_share_bytes > self.query_memory_bytes {
            bail!(
                "query_share_bytes is {}; it must lie between 1 and query_memory_bytes {}",
                ByteSize(self.query_share_bytes),
                ByteSize(self.query_memory_bytes)
            );
        }
        if self.query_log_interval.is_zero() {
            bail!("query_log_interval is 0; it must be at least 1ms");
        }
        if self.commit_interval.is_zero() {
            bail!("commit_interval is 0; it must be at least 1ms");
        }
        if self.max_batch_bytes == 0
            || self.max_batch_bytes > vramscope_wire::MAX_BATCH_BYTES as u64
        {
            bail!(
                "max_batch_bytes is {}; it must lie between 1 and {}, which is what agents may send",
                ByteSize(self.max_batch_bytes),
                ByteSize(vramscope_wire::MAX_BATCH_BYTES as u64)
            );
        }
        if self.query_timeout.is_zero() {
            bail!("query_timeout is 0; it must be at least 1ms");
        }
        self.check_upkeep()
    }

    fn check_upkeep(&self) -> anyhow::Result<()> {
        const LEAST_MEMORY: u64 = 128 << 20;
        let upkeep = &self.upkeep;
        if upkeep.interval.is_zero() {
            bail!("upkeep_interval is 0; it must be at least 1ms");
        }
        if upkeep.memory_bytes < LEAST_MEMORY {
            bail!(
                "upkeep_memory_bytes is {}; a merge of two files takes up to {}",
                ByteSize(upkeep.memory_bytes),
                ByteSize(LEAST_MEMORY)
            );
        }
        let (least, most) = (vacuum::LEAST.max(2 * self.query_timeout), vacuum::MOST);
        if upkeep.vacuum_after < least || upkeep.vacuum_after > most {
            bail!(
                "vacuum_after is {}; it must lie between {} (10 minutes, and twice the query_timeout) \
                 and {}",
                Span(upkeep.vacuum_after),
                Span(least),
                Span(most)
            );
        }
        Ok(())
    }

    /// The effective configuration as TOML that `--config` takes, each key explained.
    pub fn to_toml(&self) -> String {
        let access = |name: &str, pick: fn(&access::Files) -> &PathBuf| match &self.access {
            Some(files) => {
                let path = pick(files).display().to_string();
                format!("{name} = {}", toml::Value::String(path))
            }
            None => format!("# {name} is not set"),
        };
        let path_or = |name: &str, path: &Option<PathBuf>, example: &str| match path {
            Some(path) => {
                let text = toml::Value::String(path.display().to_string());
                format!("{name} = {text}")
            }
            None => format!("# {name} = \"{example}\""),
        };
        let data = path_or("data", &self.data, "/var/lib/vramscope");
        let spill_dir = path_or("spill_dir", &self.spill_dir, "/var/tmp/vramscope");
        let lake = match &self.lake {
            Some(place) => format!("lake = {}", toml::Value::String(place.clone())),
            None => "# lake = \"s3://BUCKET/PREFIX\"".to_string(),
        };
        format!(
            r#"# Configuration of vramscope-collector. Each key is also a flag (--commit-interval) and an
# environment variable (VRAMSCOPE_COLLECTOR_COMMIT_INTERVAL). Delete a line to go back to its
# default.

# Data folder: one Delta table per folder, and the write-ahead log in _wal. One collector at a
# time. No default.
{data}

# Address for agents and SQL clients. Loopback only, unless credentials are configured (below).
# Port 0 picks a free port. Default "127.0.0.1:7717".
listen = "{}"

# How often logged batches are merged and committed to the tables. Longer: fewer, larger files
# and later answers. Nothing is at risk meanwhile: the log is durable. Default "2s".
commit_interval = "{}"

# Largest batch (one Parquet file) that is taken; a larger one is rejected. At most 32MiB,
# which is what agents may send. Default "32MiB".
max_batch_bytes = "{}"

# Uncommitted log above which agents are told to keep their batches and come back later.
# Default "4GiB".
wal_limit_bytes = "{}"

# Memory that all running queries share; a query that needs more fails. Default "2GiB".
query_memory_bytes = "{}"

# Time after which a query is ended with an error. Default "60s".
query_timeout = "{}"

# Rows after which a query is ended with an error. Default 10000000.
query_max_rows = {}

# What is logged to standard error: a level (error, warn, info, debug), or target=level pairs.
# ERROR: data was lost or will be. WARN: degraded, nothing lost. INFO: the life of the process.
# Default "warn,vramscope_collector=info".
log = {}

# The HTTP door: POST /api/v1/sql, /metrics, /healthz, /readyz. An address, or "off". Port 0 picks
# a free port. Default "127.0.0.1:7718".
http_listen = "{}"

# Most connections to the HTTP door at a time; one more is closed at once. Default 2048.
http_max_connections = {}

# How long an HTTP client may take for a request's head, for its body, and to take some of what
# was written to it; then its connection is closed. Default "20s".
http_client_timeout = "{}"

# Memory that one query may have, so that others find some too. Sorts, joins and aggregations that
# need more spill to disk; what cannot spill fails. Default half of query_memory_bytes.
query_share_bytes = "{}"

# Folder that queries spill to. Default "_spill" in the data folder.
{spill_dir}

# What all queries together may spill; a query that needs more fails. Default "16GiB".
spill_limit_bytes = "{}"

# How often rows of the table query_log are written, many in one commit. A crash loses those of
# the last interval. Default "5s".
query_log_interval = "{}"

# Room on the data folder's disk below which /readyz says that the collector is not ready.
# Default "1GiB".
min_disk_free_bytes = "{}"

# The door for PostgreSQL clients (psql, Grafana, DBeaver, drivers). An address, or "off". Port 0
# picks a free port. Default "127.0.0.1:7719".
postgres_listen = "{}"

# Most PostgreSQL clients at a time; one more is told so and sent away. Default 200.
postgres_max_connections = {}

# Time after which a PostgreSQL client that asks nothing is sent away. Default "1h".
postgres_idle_timeout = "{}"

# TLS and credentials: all four files or none. With them every port speaks TLS, agents show a
# certificate of tls_client_ca that names their host, and people show a token or a password.
# Without them everybody who reaches the ports is let in, and only loopback is listened on. The
# files are read anew when they change, and on SIGHUP. `vramscope-collector init` makes them.
{}
{}
{}
{}

# How far from the collector's clock the time of a row may be. A row beyond it is kept with its
# time as it was sent, in the partition of the hour in which it arrived, and counted in
# batches.misdated_rows: a host with a wrong clock makes no partitions in other centuries.
# Defaults "24h" and "744h" (31 days).
clock_ahead = "{}"
clock_behind = "{}"

# What an acknowledgement stands for. "fsync": the batch is on this machine's disk (in _wal), and
# goes to the tables within commit_interval. "store": its rows are committed to the tables, on
# their storage, before it is acknowledged; nothing is lost with this machine, each batch takes some
# hundred milliseconds. Default "fsync".
promise = "{}"

# How long rows are kept, by table: a time, or "forever". Whole hours go when their last moment is
# older. Queries answer for what is kept. Default: alloc_events "7d", all others "400d".
retention = {}

# Time between two looks for small files to merge. Default "15s".
upkeep_interval = "{}"

# Memory that a merge of files may take; it takes fewer files at a time rather than more memory.
# At least 128MiB. Default "256MiB".
upkeep_memory_bytes = "{}"

# How long a file stays on disk after nothing refers to it any more: queries and other readers that
# began before have so long to end. Between 10 minutes and 7 days. Default "1h".
vacuum_after = "{}"

# Where the tables lie, if not in the data folder: a folder, or a prefix of a bucket that speaks S3
# (endpoint, region and keys come from the AWS_* environment variables). Several collectors may
# write one lake, each with a data folder of its own. Default: the data folder.
{lake}

# What computes answers: "local", or "distributed" over workers, each a `vramscope-collector
# executor` over the same lake. Workers at https:// need a certificate. Default "local".
{}
"#,
            self.listen,
            Span(self.commit_interval),
            ByteSize(self.max_batch_bytes),
            ByteSize(self.wal_limit_bytes),
            ByteSize(self.query_memory_bytes),
            Span(self.query_timeout),
            self.query_max_rows,
            toml::Value::String(self.log.clone()),
            self.http_listen,
            self.http_max_connections,
            Span(self.http_client_timeout),
            ByteSize(self.query_share_bytes),
            ByteSize(self.spill_limit_bytes),
            Span(self.query_log_interval),
            ByteSize(self.min_disk_free_bytes),
            self.postgres_listen,
            self.postgres_max_connections,
            Span(self.postgres_idle_timeout),
            access("tls_cert", |files| &files.tls.cert),
            access("tls_key", |files| &files.tls.key),
            access("tls_client_ca", |files| &files.tls.client_ca),
            access("credentials", |files| &files.credentials),
            Span(self.clock.ahead),
            Span(self.clock.behind),
            self.promise,
            self.upkeep.retention.to_toml(),
            Span(self.upkeep.interval),
            ByteSize(self.upkeep.memory_bytes),
            Span(self.upkeep.vacuum_after),
            self.engine.to_toml(),
        )
    }
}

/// All four, or none.
fn access_files(
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    credentials: Option<PathBuf>,
) -> anyhow::Result<Option<access::Files>> {
    let missing: Vec<&str> = [
        ("tls_cert", tls_cert.is_none()),
        ("tls_key", tls_key.is_none()),
        ("tls_client_ca", tls_client_ca.is_none()),
        ("credentials", credentials.is_none()),
    ]
    .into_iter()
    .filter_map(|(name, is_missing)| is_missing.then_some(name))
    .collect();
    match (tls_cert, tls_key, tls_client_ca, credentials) {
        (Some(cert), Some(key), Some(client_ca), Some(credentials)) => Ok(Some(access::Files {
            credentials,
            tls: TlsFiles {
                cert,
                key,
                client_ca,
            },
        })),
        (None, None, None, None) => Ok(None),
        _ => bail!(
            "{} not set: TLS and credentials take all of tls_cert, tls_key, tls_client_ca and \
             credentials; `vramscope-collector init` makes the files",
            match missing.as_slice() {
                [one] => format!("{one} is"),
                some => format!("{} are", some.join(" and ")),
            }
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_as_written() {
        assert_eq!("4096".parse(), Ok(ByteSize(4096)));
        assert_eq!("64MiB".parse(), Ok(ByteSize(67_108_864)));
        assert!("64MB".parse::<ByteSize>().is_err());
        assert!("99999999999TiB".parse::<ByteSize>().is_err());
        assert_eq!("500ms".parse(), Ok(Span(Duration::from_millis(500))));
        assert_eq!("2m".parse(), Ok(Span(Duration::from_secs(120))));
        assert_eq!("7d".parse(), Ok(Span(Duration::from_secs(604_800))));
        assert_eq!(Span(Duration::from_secs(604_800)).to_string(), "7d");
        assert!("2".parse::<Span>().is_err());
    }

    #[test]
    fn nothing_but_loopback_without_credentials() {
        let keys = |listen: &str, files: usize| {
            let file = |n: usize| (n < files).then(|| PathBuf::from(format!("/f{n}")));
            Config::from_keys(Keys {
                listen: Some(listen.parse().unwrap()),
                tls_cert: file(0),
                tls_key: file(1),
                tls_client_ca: file(2),
                credentials: file(3),
                ..Keys::default()
            })
        };
        let fails = |listen, files, part: &str| {
            let error = format!("{:#}", keys(listen, files).unwrap_err());
            assert!(error.contains(part), "{error}");
        };
        fails("0.0.0.0:7717", 0, "no credentials are configured");
        fails("[::]:7717", 0, "no credentials are configured");
        fails("127.0.0.1:1", 3, "credentials is not set");
        fails("0.0.0.0:1", 2, "tls_client_ca and credentials are not set");
        assert!(keys("0.0.0.0:7717", 4).is_ok());
        assert!(keys("[::1]:7717", 0).is_ok());
    }

    #[test]
    fn printed_configuration_reads_back_the_same() {
        let keys = Keys {
            tls_cert: Some("/c".into()),
            tls_key: Some("/k".into()),
            tls_client_ca: Some("/a \"b\"".into()),
            credentials: Some("/p".into()),
            data: Some("/tmp/a \"b\"".into()),
            commit_interval: Some(Span(Duration::from_millis(1500))),
            wal_limit_bytes: Some(ByteSize(12345)),
            http_listen: Some(Listen::Off),
            postgres_idle_timeout: Some(Span(Duration::from_secs(90))),
            spill_dir: Some("/tmp/spill".into()),
            clock_ahead: Some(Span(Duration::from_secs(60))),
            promise: Some(Promise::Store),
            retention: Some("alloc_events=36h,traffic=forever".parse().unwrap()),
            ..Keys::default()
        };
        let config = Config::from_keys(keys).unwrap();
        let again = Config::from_keys(toml::from_str(&config.to_toml()).unwrap()).unwrap();
        assert_eq!(again, config);
    }
}
