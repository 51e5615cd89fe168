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

/// A length of time such as `500ms`, `2s`, `5m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a length of time; write a number with ms, s, m or h");
        // "ms" before "m" and "s", which are its ends.
        let (digits, unit_ms) = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)]
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
        if ms.is_multiple_of(1000) {
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
    /// Where the tables lie; `None` is the data folder, or what was chosen for it before.
    pub lake: Option<String>,
    /// What computes answers.
    pub engine: EngineKeys,
}

impl Config {
    /// Fills in defaults and refuses what cannot work.
    pub fn from_keys(keys: Keys) -> anyhow::Result<Config> {
        let default_max_batch = vramscope_wire::MAX_BATCH_BYTES as u64;
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
            query_memory_bytes: keys.query_memory_bytes.map_or(2 << 30, |size| size.0),
            query_timeout: keys
                .query_timeout
                .map_or(Duration::from_secs(60), |span| span.0),
            query_max_rows: keys.query_max_rows.unwrap_or(10_000_000),
            log: keys
                .log
                .unwrap_or_else(|| "warn,vramscope_collector=info".to_string()),
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

    fn check(&self) -> anyhow::Result<()> {
        if !self.listen.ip().is_loopback() {
            bail!(
                "refusing to listen on {}: no credentials can be configured yet; use a loopback \
                 address such as 127.0.0.1:7717, and a tunnel to reach it from another host",
                self.listen
            );
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
        Ok(())
    }

    /// The effective configuration as TOML that `--config` takes, each key explained.
    pub fn to_toml(&self) -> String {
        let data = match &self.data {
            Some(path) => format!("data = {}", toml::Value::String(path.display().to_string())),
            None => "# data = \"/var/lib/vramscope\"".to_string(),
        };
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

# Address for agents and SQL clients. Loopback only until credentials can be configured.
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
            self.engine.to_toml(),
        )
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
        assert!("2".parse::<Span>().is_err());
    }

    #[test]
    fn printed_configuration_reads_back_the_same() {
        let keys = Keys {
            data: Some("/tmp/a \"b\"".into()),
            commit_interval: Some(Span(Duration::from_millis(1500))),
            wal_limit_bytes: Some(ByteSize(12345)),
            ..Keys::default()
        };
        let config = Config::from_keys(keys).unwrap();
        let again = Config::from_keys(toml::from_str(&config.to_toml()).unwrap()).unwrap();
        assert_eq!(again, config);
    }
}
