//! The effective configuration in print: a file that explains itself.

use std::path::PathBuf;

use super::{ByteSize, Config, Span};
use crate::access;

impl Config {
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

# Address for agents and Flight SQL clients. Loopback only, unless credentials are configured (below).
# Port 0 picks a free port. Default "127.0.0.1:7717".
listen = "{}"

# Most connections of agents and Flight SQL clients at a time; one more is closed at once. Each takes
# an open file: the limit of open files is raised as far as the system lets us. Default 16384.
max_connections = {}

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
# At least 128MiB. Default "192MiB".
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
            self.max_connections,
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
