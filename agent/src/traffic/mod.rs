//! What serving engines say of their own load: their Prometheus pages, read now and then into rows of
//! `traffic`.
//!
//! All of it happens on one thread of its own, which the event path never waits for: rows go through
//! a bounded channel, and what finds no place in it is counted. An engine is asked once an interval,
//! over one connection that is closed after the answer; whoever fails or turns out to be no engine is
//! asked ever more rarely. At most [`MAX_PAGES`] pages are asked, and one page of at most
//! [`fetch::MAX_PAGE`] bytes is in memory at a time.

pub mod endpoint;
pub mod engines;
pub mod exposition;
mod fetch;
mod find;
mod sockets;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::{error, info, warn};
use ureq::http::Uri;

use crate::config::Config;
use crate::host::clock;
use crate::host::identity::{Host, StartTime};
use crate::spool::rows::TrafficRow;
use endpoint::Endpoint;
use exposition::Page;
use fetch::{Fetcher, Namespaces};
use find::Census;

/// Pages that are asked at most; what is more is counted.
const MAX_PAGES: usize = 64;
/// How long an engine may take over a whole answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Answers that wait for the engine loop at most.
const WAITING: usize = 256;
/// After failures a page is asked every 2nd, 4th, … round, up to this one.
const MAX_PAUSE: u32 = 16;
/// The same for what answers and is no engine.
const MAX_PAUSE_STRANGER: u32 = 256;

/// What to read, and how often.
#[derive(Debug, Clone)]
pub struct Options {
    pub interval: Duration,
    /// Look for engines' pages by their processes.
    pub discover: bool,
    /// Only what this process started, and traced processes, are looked at.
    pub below: Option<u32>,
    pub endpoints: Vec<Endpoint>,
}

impl Options {
    /// What the configuration says; `None` if nothing is to be read.
    pub fn configured(config: &Config) -> Option<Self> {
        let nothing = !config.traffic_discovery && config.traffic.is_empty();
        (config.scrape && !nothing).then(|| Self {
            interval: config.traffic_interval.0,
            discover: config.traffic_discovery,
            below: None,
            endpoints: config.traffic.clone(),
        })
    }
}

/// How it goes, for `status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Pages that are asked now.
    pub pages: Vec<PageReport>,
    pub scrapes: u64,
    pub failures: u64,
    pub rows: u64,
    /// Rows that nobody took in time.
    pub dropped_rows: u64,
    /// Lines of engines' pages that made no sense.
    pub bad_lines: u64,
    /// Pages beyond the limit, at the last round.
    pub left_out: u64,
    /// Why nothing is asked any more.
    pub stopped: Option<String>,
}

/// One page.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageReport {
    pub url: String,
    /// Who answers, or whose load the page tells of, by the configuration.
    pub pid: Option<u32>,
    /// The engine, once it was seen to be one.
    pub engine: Option<String>,
    pub scrapes: u64,
    pub failures: u64,
    /// What was wrong the last time; `None` if nothing was.
    pub error: Option<String>,
}

/// What the draining side knows of processes.
#[derive(Debug, Default)]
struct Traced {
    pids: BTreeSet<u32>,
    /// The kill switch: nobody is asked.
    is_off: bool,
}

/// The draining side's handle.
pub struct Scraper {
    rows: Receiver<Vec<TrafficRow>>,
    report: Arc<Mutex<Report>>,
    traced: Arc<Mutex<Traced>>,
    stopping: Arc<AtomicBool>,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Scraper {
    pub fn start(host: Host, options: Options) -> anyhow::Result<Self> {
        let (sender, rows) = mpsc::sync_channel(WAITING);
        let (stop, stopped) = mpsc::channel();
        let report = Arc::new(Mutex::new(Report::default()));
        let traced = Arc::new(Mutex::new(Traced::default()));
        let stopping = Arc::new(AtomicBool::new(false));
        let mut worker = Worker {
            host,
            fetcher: Fetcher::new(DEADLINE.min(options.interval)),
            namespaces: Namespaces::open()?,
            options,
            pages: HashMap::new(),
            round: 0,
            rows: sender,
            report: Arc::clone(&report),
            traced: Arc::clone(&traced),
            stopping: Arc::clone(&stopping),
        };
        let thread = std::thread::Builder::new()
            .name("traffic".into())
            .spawn(move || worker.run(&stopped))?;
        Ok(Self {
            rows,
            report,
            traced,
            stopping,
            stop,
            thread: Some(thread),
        })
    }

    /// Rows since the last call.
    pub fn take(&self) -> Vec<TrafficRow> {
        self.rows.try_iter().flatten().collect()
    }

    pub fn report(&self) -> Report {
        lock(&self.report).clone()
    }

    /// Which processes are traced now, and whether the kill switch is thrown.
    pub fn tell(&self, pids: impl IntoIterator<Item = u32>, is_off: bool) {
        let mut traced = lock(&self.traced);
        traced.pids.clear();
        traced.pids.extend(pids);
        traced.is_off = is_off;
    }
}

impl Drop for Scraper {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A thread that panicked while it held the lock leaves readable data behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A page to ask.
#[derive(Debug, Clone)]
struct Target {
    key: Key,
    uri: Uri,
    /// In whose namespace; the agent's if none.
    enter: Option<u32>,
    /// Who answers.
    listener: Option<u32>,
    /// Whose load it is.
    served: Vec<u32>,
    /// It is known to be an engine: by the configuration or its command line.
    is_named: bool,
}

/// What tells one page from another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    namespace: u64,
    url: String,
}

/// What is remembered of a page.
#[derive(Debug, Default)]
struct State {
    report: PageReport,
    /// Rounds to wait after the next failure.
    pause: u32,
    /// The next round in which it is asked.
    due: u64,
}

struct Worker {
    host: Host,
    options: Options,
    fetcher: Fetcher,
    namespaces: Namespaces,
    pages: HashMap<Key, State>,
    round: u64,
    rows: SyncSender<Vec<TrafficRow>>,
    report: Arc<Mutex<Report>>,
    traced: Arc<Mutex<Traced>>,
    stopping: Arc<AtomicBool>,
}

impl Worker {
    fn run(&mut self, stop: &Receiver<()>) {
        loop {
            let began = std::time::Instant::now();
            let (traced, is_off) = {
                let traced = lock(&self.traced);
                (traced.pids.clone(), traced.is_off)
            };
            if !is_off && let Err(error) = self.round(&traced) {
                // This thread is in a network namespace that is not the agent's.
                error!(
                    "traffic is read no more: the way back to the agent's network namespace failed: {error}"
                );
                lock(&self.report).stopped = Some(error.to_string());
                return;
            }
            let wait = self.options.interval.saturating_sub(began.elapsed());
            // A round that took longer than the interval is followed by a rest all the same.
            let wait = wait.max(self.options.interval / 4);
            if stop.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    /// Asks every page that is due. An error: this thread must do nothing more.
    fn round(&mut self, traced: &BTreeSet<u32>) -> io::Result<()> {
        self.round += 1;
        let mut targets = self.targets(traced);
        let left_out = targets.len().saturating_sub(MAX_PAGES);
        targets.truncate(MAX_PAGES);
        let keys: BTreeSet<String> = targets.iter().map(|t| t.key.text()).collect();
        self.pages.retain(|key, _| keys.contains(&key.text()));
        for target in targets {
            if self.stopping.load(Ordering::Relaxed) {
                return Ok(());
            }
            let state = self.pages.entry(target.key.clone()).or_default();
            state.report.url.clone_from(&target.key.url);
            state.report.pid = target.listener;
            if state.due <= self.round {
                self.ask(&target)?;
            }
        }
        let mut report = lock(&self.report);
        report.left_out = left_out as u64;
        report.pages = self
            .pages
            .values()
            .map(|state| state.report.clone())
            .collect();
        report
            .pages
            .sort_by(|a, b| (&a.url, a.pid).cmp(&(&b.url, b.pid)));
        Ok(())
    }

    /// Pages of the configuration first, so that they are not what is left out.
    fn targets(&self, traced: &BTreeSet<u32>) -> Vec<Target> {
        let census = Census::take();
        let found = if self.options.discover {
            census.find(traced, self.options.below)
        } else {
            Vec::new()
        };
        let mut targets: Vec<Target> = Vec::new();
        for endpoint in &self.options.endpoints {
            targets.extend(self.configured(endpoint, &census, traced, &found));
        }
        for page in found {
            let url = format!("http://{}/metrics", page.address);
            let key = Key {
                namespace: page.namespace,
                url,
            };
            // Whatever the configuration calls it, it is asked once.
            let is_there = |target: &Target| {
                target.key.namespace == key.namespace && leads_to(&target.uri, page.address)
            };
            let Ok(uri) = key.url.parse() else { continue };
            if !targets.iter().any(is_there) {
                targets.push(Target {
                    key,
                    uri,
                    enter: Some(page.pid),
                    listener: Some(page.pid),
                    served: page.served,
                    is_named: page.is_named,
                });
            }
        }
        targets
    }

    fn configured(
        &self,
        endpoint: &Endpoint,
        census: &Census,
        traced: &BTreeSet<u32>,
        found: &[find::Found],
    ) -> Vec<Target> {
        // Checked when the configuration was read.
        let Ok(uri) = endpoint.uri() else {
            return Vec::new();
        };
        let target = |namespace, enter, listener, served| Target {
            key: Key {
                namespace,
                url: uri.to_string(),
            },
            uri: uri.clone(),
            enter,
            listener,
            served,
            is_named: true,
        };
        let pids = match (endpoint.pid, &endpoint.process) {
            (Some(pid), _) => vec![pid],
            (None, Some(pattern)) => census.matching(pattern),
            (None, None) => {
                let own = self.namespaces.own_id();
                let behind = found
                    .iter()
                    .find(|f| f.namespace == own && leads_to(&uri, f.address));
                let (listener, served) = match behind {
                    Some(page) => (Some(page.pid), page.served.clone()),
                    None => (None, Vec::new()),
                };
                return vec![target(own, None, listener, served)];
            }
        };
        let mut targets: Vec<Target> = Vec::new();
        for pid in pids {
            let Ok(namespace) = fetch::namespace_of(pid) else {
                continue;
            };
            let served = census.served(pid, traced);
            // Several processes behind one address are asked once.
            match targets
                .iter_mut()
                .find(|target| target.key.namespace == namespace)
            {
                Some(target) => {
                    target.served.extend(served);
                    target.served.sort_unstable();
                    target.served.dedup();
                }
                None => targets.push(target(namespace, Some(pid), Some(pid), served)),
            }
        }
        targets
    }

    fn ask(&mut self, target: &Target) -> io::Result<()> {
        let (fetcher, uri) = (&self.fetcher, &target.uri);
        let answer = self.namespaces.within(target.enter, || fetcher.get(uri))?;
        let at_ns = clock::realtime_ns() as i64;
        let mut bad_lines = 0;
        let loads = answer.and_then(|page| page).and_then(|bytes| {
            let page = Page::read(&bytes, engines::is_wanted);
            bad_lines = page.bad_lines;
            let loads = engines::read(&page);
            if loads.is_empty() {
                return Err("answers, and has no metrics of a serving engine that is known".into());
            }
            Ok(loads)
        });
        let Some(state) = self.pages.get_mut(&target.key) else {
            return Ok(());
        };
        let was_engine = state.report.engine.is_some();
        state.report.scrapes += 1;
        let mut report = lock(&self.report);
        report.scrapes += 1;
        let loads = match loads {
            Ok(loads) => loads,
            Err(error) => {
                state.report.failures += 1;
                report.failures += 1;
                let is_stranger = !target.is_named && !was_engine;
                let most = if is_stranger {
                    MAX_PAUSE_STRANGER
                } else {
                    MAX_PAUSE
                };
                state.pause = (state.pause * 2).clamp(1, most);
                state.due = self.round + u64::from(state.pause);
                if state.report.error.is_none() && !is_stranger {
                    warn!(
                        "traffic of {} is not known: {error}; asking again ever more rarely",
                        target.key.url
                    );
                }
                state.report.error = Some(error);
                return Ok(());
            }
        };
        report.bad_lines += bad_lines;
        if !was_engine || state.report.error.is_some() {
            info!(
                "reading the load of {} at {}",
                loads[0].engine, target.key.url
            );
        }
        state.report.engine = Some(loads[0].engine.to_string());
        state.report.error = None;
        (state.pause, state.due) = (0, self.round + 1);
        let whose: Vec<Option<(u32, i64)>> = self.whose(target);
        let rows: Vec<TrafficRow> = loads
            .iter()
            .flat_map(|load| whose.iter().map(move |process| (load, process)))
            .map(|(load, process)| TrafficRow {
                ts_ns: at_ns,
                process_id: process.map(|(_, id)| id),
                pid: process.map(|(pid, _)| pid),
                endpoint: target.key.url.clone(),
                load: load.clone(),
            })
            .collect();
        let count = rows.len() as u64;
        match self.rows.try_send(rows) {
            Ok(()) => report.rows += count,
            Err(_) => report.dropped_rows += count,
        }
        Ok(())
    }

    /// Processes that the rows of a page are about: the traced ones of that engine; who answers if
    /// none is; nobody if that is not known either.
    fn whose(&self, target: &Target) -> Vec<Option<(u32, i64)>> {
        let identified = |pid: &u32| {
            let id = self.host.process_id(*pid, StartTime::of(*pid)?);
            Some((*pid, id))
        };
        let served: Vec<_> = target
            .served
            .iter()
            .filter_map(identified)
            .map(Some)
            .collect();
        if served.is_empty() {
            vec![target.listener.as_ref().and_then(identified)]
        } else {
            served
        }
    }
}

impl Key {
    fn text(&self) -> String {
        format!("{} {}", self.namespace, self.url)
    }
}

/// Whether a configured page is the one at an address.
fn leads_to(uri: &Uri, address: SocketAddr) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_host = match host.parse::<IpAddr>() {
        Ok(ip) => ip == address.ip(),
        Err(_) => host == "localhost" && address.ip().is_loopback(),
    };
    is_host && uri.port_u16().unwrap_or(80) == address.port()
}
