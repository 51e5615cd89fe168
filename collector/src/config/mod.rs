//! The collector's configuration: one TOML file, every key also a flag and an environment
//! variable. A flag wins over the environment, the environment over the file, the file over
//! the default.

mod engine;
mod keys;
mod printed;
mod value;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;

use crate::access::{self, tls::TlsFiles};
use crate::ingest::placing::Clock;
use crate::ingest::promise::Promise;
use crate::lake::upkeep::{self, vacuum};
pub use engine::{EngineKeys, EngineName};
pub use keys::Keys;
pub use value::{ByteSize, Listen, Span};

/// The effective configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Data folder. `None` only under `--print-config`.
    pub data: Option<PathBuf>,
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Most connections of agents and Flight SQL clients at a time.
    pub max_connections: usize,
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
            max_connections: keys.max_connections.unwrap_or(16_384),
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
                memory_bytes: keys.upkeep_memory_bytes.map_or(192 << 20, |size| size.0),
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
        if self.max_connections == 0 {
            bail!("max_connections is 0; agents need at least one");
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
