//! Requests for spans of agents' flight recorders: who asked for what, and what became of it.
//!
//! On disk, below the data folder:
//!
//! ```text
//! _requests/1795957500123-1c291ca3.json     one request
//! ```
//!
//! Invariants:
//! - a request is a file from the moment it is made, fsynced; it stays until it is answered,
//!   refused or expired, however often collector and agent restart, and [`KEPT`] longer;
//! - whoever asks makes a new file and changes none; the collector that holds the folder is the
//!   only one that changes files, each by rename. So asking needs no running collector;
//! - files that await an answer are bounded by [`MAX_OPEN`].

pub mod service;

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

use crate::config;
use crate::folder;

/// Folder below the data folder.
pub const FOLDER: &str = "_requests";
/// Requests without an answer at most.
pub const MAX_OPEN: usize = 1000;
/// How long a request is kept after its end.
pub const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Longest reason, in bytes.
const MAX_REASON: usize = 256;

/// How far a request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// It waits for its agent.
    Requested,
    /// The agent has it.
    Sent,
    /// All that was there has arrived.
    Answered,
    /// The agent will not.
    Refused,
    /// Nobody answered in time.
    Expired,
}

impl Stage {
    /// Whether an answer can still come.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Requested | Self::Sent)
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Requested => "requested",
            Self::Sent => "sent",
            Self::Answered => "answered",
            Self::Refused => "refused",
            Self::Expired => "expired",
        }
    }
}

/// Rows that the recorder no longer had, from the first to the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overwritten {
    /// Nanoseconds since 1970.
    pub first_ns: i64,
    /// Nanoseconds since 1970.
    pub last_ns: i64,
    /// At most so many.
    pub rows: u64,
}

/// One request, as its file has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its name, for ever.
    pub id: String,
    /// Host whose agent is meant; the first agent of that host gets it.
    pub host: Option<String>,
    /// Agent that is meant, or that got it.
    pub agent: Option<String>,
    /// Process lifetime.
    pub process_id: i64,
    /// Rows with `from_ns <= ts_ns < to_ns`, nanoseconds since 1970.
    pub from_ns: i64,
    /// See `from_ns`.
    pub to_ns: i64,
    /// Who asks, and why.
    pub reason: String,
    /// When it was made, nanoseconds since 1970.
    pub made_ns: i64,
    /// Until when an answer is waited for.
    pub expires_ns: i64,
    /// How far it came.
    pub stage: Stage,
    /// When that was, nanoseconds since 1970.
    pub stage_ns: i64,
    /// Rows that were sent for it.
    pub rows: u64,
    /// Rows of the span that were here before it was asked for.
    pub rows_before: u64,
    /// What the recorder no longer had.
    pub overwritten: Vec<Overwritten>,
    /// What the agent says to it.
    pub message: String,
}

/// What somebody asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// Host or agent, one of them.
    pub host: Option<String>,
    /// See `host`.
    pub agent: Option<String>,
    /// Process lifetime.
    pub process_id: i64,
    /// Nanoseconds since 1970.
    pub from_ns: i64,
    /// Nanoseconds since 1970.
    pub to_ns: i64,
    /// Who asks, and why.
    pub reason: String,
    /// How long an answer is waited for.
    pub expires: Duration,
}

/// Nanoseconds since 1970.
pub fn now_ns() -> i64 {
    Utc::now().timestamp_nanos_opt().unwrap_or(i64::MAX)
}

/// A moment for people.
pub fn time(ns: i64) -> String {
    DateTime::<Utc>::from_timestamp_nanos(ns).to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// A moment on the command line, nanoseconds since 1970: RFC 3339, nanoseconds since 1970, `now`,
/// or a length of time ago.
pub fn moment(text: &str) -> Result<i64, String> {
    let now = now_ns();
    if text == "now" {
        return Ok(now);
    }
    if let Ok(ns) = text.parse::<i64>() {
        return Ok(ns);
    }
    if let Ok(ago) = text.parse::<config::Span>() {
        let ago = i64::try_from(ago.0.as_nanos()).unwrap_or(i64::MAX);
        return Ok(now.saturating_sub(ago));
    }
    DateTime::parse_from_rfc3339(text)
        .ok()
        .and_then(|time| time.timestamp_nanos_opt())
        .ok_or_else(|| {
            format!(
                "{text:?} is not a time; write 2026-11-30T12:00:00Z, nanoseconds since 1970, now, or a length of time ago such as 5m"
            )
        })
}

fn path(data: &Path, id: &str) -> PathBuf {
    data.join(FOLDER).join(format!("{id}.json"))
}

/// Ids become file names.
fn is_id(id: &str) -> bool {
    (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn new_id() -> anyhow::Result<String> {
    let source = "/proc/sys/kernel/random/uuid";
    let random =
        std::fs::read_to_string(source).with_context(|| format!("failed to read {source}"))?;
    let random = random
        .get(..8)
        .context("the kernel's random name is short")?;
    Ok(format!("{}-{random}", now_ns() / 1_000_000))
}

fn save(data: &Path, request: &Request) -> anyhow::Result<()> {
    let dir = data.join(FOLDER);
    let to = path(data, &request.id);
    let writing = || format!("failed to write {}", to.display());
    let bytes = serde_json::to_vec_pretty(request).with_context(writing)?;
    let temporary = folder::write_temporary(
        dir.join(format!(".tmp-{}", request.id)),
        std::iter::once(bytes.as_slice()),
    )
    .with_context(writing)?;
    std::fs::rename(&temporary, &to).with_context(writing)?;
    folder::sync_dir(&dir).with_context(writing)
}

fn load(path: &Path) -> anyhow::Result<Request> {
    let reading = || format!("failed to read {}", path.display());
    let bytes = std::fs::read(path).with_context(reading)?;
    serde_json::from_slice(&bytes).with_context(reading)
}

/// Ids of all requests of a data folder, oldest first. None if nobody ever asked.
fn ids(data: &Path) -> anyhow::Result<Vec<String>> {
    let dir = data.join(FOLDER);
    let reading = || format!("failed to read {}", dir.display());
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(reading),
    };
    let mut ids = Vec::new();
    for entry in entries {
        let name = entry.with_context(reading)?.file_name();
        let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
        ids.extend(id.filter(|id| is_id(id)).map(str::to_string));
    }
    ids.sort();
    Ok(ids)
}

/// All requests of a data folder, oldest first, whether a collector runs on it or not; and files
/// that are none.
pub fn list(data: &Path) -> anyhow::Result<(Vec<Request>, Vec<String>)> {
    let (mut requests, mut damaged) = (Vec::new(), Vec::new());
    for id in ids(data)? {
        match load(&path(data, &id)) {
            Ok(request) => requests.push(request),
            Err(error) => damaged.push(format!("{error:#}")),
        }
    }
    Ok((requests, damaged))
}

/// One request.
pub fn find(data: &Path, id: &str) -> anyhow::Result<Request> {
    if !is_id(id) {
        bail!("{id:?} is not the id of a request; see `vramscope-collector requests`");
    }
    load(&path(data, id))
}

/// Makes a request, durably. Rules and alerts ask in the same way as people do.
pub fn make(data: &Path, wish: Wish) -> anyhow::Result<Request> {
    if wish.from_ns >= wish.to_ns {
        bail!(
            "--from {} is not before --to {}",
            time(wish.from_ns),
            time(wish.to_ns)
        );
    }
    if wish.host.is_some() == wish.agent.is_some() {
        bail!("say either --host or --agent");
    }
    if wish.reason.len() > MAX_REASON {
        bail!(
            "the reason has {} bytes, at most {MAX_REASON} are kept",
            wish.reason.len()
        );
    }
    if !data.is_dir() {
        bail!("there is no data folder {}", data.display());
    }
    folder::create_dir_durably(&data.join(FOLDER))
        .with_context(|| format!("failed to create {}", data.join(FOLDER).display()))?;
    let open = list(data)?.0;
    let open = open
        .iter()
        .filter(|request| request.stage.is_open())
        .count();
    if open >= MAX_OPEN {
        bail!("{open} requests wait for an answer already; see `vramscope-collector requests`");
    }
    let made_ns = now_ns();
    let expires = i64::try_from(wish.expires.as_nanos()).unwrap_or(i64::MAX);
    let request = Request {
        id: new_id()?,
        host: wish.host,
        agent: wish.agent,
        process_id: wish.process_id,
        from_ns: wish.from_ns,
        to_ns: wish.to_ns,
        reason: wish.reason,
        made_ns,
        expires_ns: made_ns.saturating_add(expires),
        stage: Stage::Requested,
        stage_ns: made_ns,
        rows: 0,
        rows_before: 0,
        overwritten: Vec::new(),
        message: String::new(),
    };
    save(data, &request)?;
    Ok(request)
}

impl Request {
    /// Whether it is for that agent.
    pub fn is_for(&self, agent: &str, host: &str) -> bool {
        match &self.agent {
            Some(wanted) => wanted == agent,
            None => self.host.as_deref() == Some(host),
        }
    }

    /// What became of it, in a line.
    pub fn outcome(&self) -> String {
        let mut text = self.stage.name().to_string();
        // Writing to a string cannot fail.
        if self.stage == Stage::Answered {
            let _ = write!(text, " with {} rows", self.rows + self.rows_before);
            if self.rows_before > 0 {
                let _ = write!(text, " ({} were here before)", self.rows_before);
            }
            for gone in &self.overwritten {
                let _ = write!(
                    text,
                    "; OVERWRITTEN {} to {}, up to {} rows",
                    time(gone.first_ns),
                    time(gone.last_ns),
                    gone.rows
                );
            }
        }
        if !self.message.is_empty() {
            let _ = write!(text, ": {}", self.message);
        }
        text
    }
}

/// The printed form of a list.
pub fn text(requests: &[Request], damaged: &[String]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{:<24} {:<24} {:>20}  {:<24}  {:<24}  outcome",
        "request", "host or agent", "process", "from", "to"
    );
    for request in requests {
        let whom = request.host.as_ref().or(request.agent.as_ref());
        let _ = writeln!(
            text,
            "{:<24} {:<24} {:>20}  {:<24}  {:<24}  {}",
            request.id,
            whom.map_or("-", String::as_str),
            request.process_id,
            time(request.from_ns),
            time(request.to_ns),
            request.outcome()
        );
        if !request.reason.is_empty() {
            let _ = writeln!(text, "    {}", request.reason);
        }
    }
    for problem in damaged {
        let _ = writeln!(text, "DAMAGED: {problem}");
    }
    text
}
