//! Which process, device and moment a command is about, and the data folder or collector it asks.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use vramscope_queries::Error;
use vramscope_queries::session::{Limits, Options};

use crate::door::Door;
use crate::login::{Address, Login};
use crate::rows::{Row, quoted};

/// Answered.
pub const ANSWERED: u8 = 0;
/// The data could not be opened, or a query failed.
pub const FAILED: u8 = 1;
/// Wrong usage.
pub const USAGE: u8 = 2;
/// The data holds nothing to answer with.
pub const NOTHING: u8 = 3;

/// Where the data is.
#[derive(Args)]
pub struct Place {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    login: Login,
    /// Stop a query after this many seconds; 0 is never
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// Go on without the damaged files of a trace, and name them
    #[arg(long)]
    skip_damaged: bool,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
pub struct Source {
    /// Data folder: a trace (of `vramscope-agent trace -o` or `vramscope import`) or a collector's;
    /// or a lake's URL, s3://BUCKET/PREFIX
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Collector to ask by Flight SQL, for example http://127.0.0.1:7717
    #[arg(long, value_name = "URL")]
    collector: Option<String>,
    /// Collector to ask by the protocol of the URL: http(s), grpc(s) or postgresql
    #[arg(long, value_name = "URL")]
    url: Option<String>,
}

impl Source {
    pub fn target(&self) -> Target {
        // The argument group makes sure that one of the three is there.
        match (&self.data, &self.collector, &self.url) {
            (Some(dir), _, _) => Target::Data(dir.clone()),
            (None, Some(url), _) => Target::Collector(url.clone()),
            (None, None, url) => Target::Url(url.clone().unwrap_or_default()),
        }
    }
}

impl Place {
    pub async fn open(&self) -> Result<Door, Error> {
        let options = Options {
            skip_damaged: self.skip_damaged,
            ..Options::default()
        };
        self.source.target().open(options, &self.login).await
    }

    pub fn limits(&self) -> Limits {
        limits(self.timeout)
    }
}

/// Bounds of a command's queries; 0 seconds is no bound.
pub fn limits(timeout_seconds: u64) -> Limits {
    Limits {
        time: (timeout_seconds > 0).then(|| Duration::from_secs(timeout_seconds)),
        rows: None,
    }
}

/// Something that can be asked.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// A data folder.
    Data(PathBuf),
    /// A collector's URL, for Flight SQL.
    Collector(String),
    /// A collector's URL, for the protocol that it says.
    Url(String),
}

impl Target {
    /// `options` are for a data folder, `login` is for a collector.
    pub async fn open(&self, options: Options, login: &Login) -> Result<Door, Error> {
        match self {
            Target::Data(dir) => Door::folder(dir, options).await,
            Target::Collector(url) => Door::collector(&Address::of_collector(url)?, login).await,
            Target::Url(url) => Door::collector(&Address::of_url(url)?, login).await,
        }
    }
}

/// What narrows the choice.
#[derive(Args)]
pub struct Chosen {
    /// The process, by process_id (one process lifetime; of an import the file)
    #[arg(long, value_name = "ID", allow_hyphen_values = true)]
    pub process: Option<i64>,
    /// The process, by pid
    #[arg(long, value_name = "PID")]
    pub pid: Option<i32>,
    /// The device, as the process numbers it
    #[arg(long, value_name = "N")]
    pub device: Option<i32>,
}

impl Chosen {
    /// Conditions on process_id, pid and device, each with an AND before it.
    pub fn conditions(&self) -> String {
        let mut sql = String::new();
        if let Some(process) = self.process {
            sql.push_str(&format!(" AND process_id = {process}"));
        }
        if let Some(pid) = self.pid {
            sql.push_str(&format!(" AND pid = {pid}"));
        }
        if let Some(device) = self.device {
            sql.push_str(&format!(" AND device = {device}"));
        }
        sql
    }

    /// As the user said it, for messages.
    pub fn words(&self) -> String {
        let parts = [
            self.process.map(|process| format!("process {process}")),
            self.pid.map(|pid| format!("pid {pid}")),
            self.device.map(|device| format!("device {device}")),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        if parts.is_empty() {
            String::new()
        } else {
            format!(" of {}", parts.join(", "))
        }
    }
}

/// One moment of one allocator.
#[derive(Debug, Clone)]
pub struct Moment {
    pub process_id: i64,
    pub pid: i64,
    pub host: String,
    pub device: i64,
    pub gpu_uuid: Option<String>,
    pub snapshot_id: i64,
    pub ts: String,
    pub ts_ns: i64,
    pub reason: String,
    pub source: String,
}

impl Moment {
    /// Rows of these columns, one a (process, device, snapshot), out of a table that has them.
    pub fn query(table: &str, conditions: &str) -> String {
        format!(
            "SELECT process_id, max(pid) AS pid, max(host) AS host, device, max(gpu_uuid) AS gpu_uuid,
                snapshot_id, max(ts) AS ts, max(ts_ns) AS ts_ns, max(reason) AS reason, max(source) AS source
             FROM {table}
             WHERE device IS NOT NULL{conditions}
             GROUP BY process_id, device, snapshot_id
             ORDER BY 8 DESC, 1, 4"
        )
    }

    pub fn from_row(row: Row<'_>) -> anyhow::Result<Moment> {
        let text = |name| -> anyhow::Result<String> { Ok(row.text(name)?.unwrap_or_default()) };
        let number = |name| -> anyhow::Result<i64> { Ok(row.number(name)?.unwrap_or_default()) };
        Ok(Moment {
            process_id: number("process_id")?,
            pid: number("pid")?,
            host: text("host")?,
            device: number("device")?,
            gpu_uuid: row.text("gpu_uuid")?,
            snapshot_id: number("snapshot_id")?,
            ts: text("ts")?,
            ts_ns: number("ts_ns")?,
            reason: text("reason")?,
            source: text("source")?,
        })
    }

    /// Process and device, as a heading has them.
    pub fn title(&self) -> String {
        if self.source == "import" {
            return format!("{}, device {}", self.host, self.device);
        }
        format!("pid {} on {}, device {}", self.pid, self.host, self.device)
    }

    /// Conditions for this moment's rows of `segments`, `memory_map` and `fragmentation`.
    pub fn conditions(&self) -> String {
        format!(
            "process_id = {} AND device = {} AND snapshot_id = {}",
            self.process_id, self.device, self.snapshot_id
        )
    }

    /// The host as SQL text.
    pub fn quoted_host(&self) -> String {
        quoted(&self.host)
    }
}
