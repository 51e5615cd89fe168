//! Finds processes that map hooked libraries, hooks the libraries, and remembers which process
//! maps which. Runs on a thread of its own: the draining side never waits for it.
//!
//! Libraries are found three ways: files known before any process maps them (configuration, the
//! loader's usual folders), processes that the kernel tells of as they map one, and a search over
//! the list of processes.

mod finder;
mod frameworks;
mod hooking;
mod inspect;
mod known;
mod likely;

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use tracing::{info, warn};

pub use frameworks::Framework;
pub use known::{Coverage, Known, PYTHON_FRAMES, Python, Report, Seen, WHOLE_LIBRARY};

use super::library::Library;
use super::safety::Policy;
use super::watch::{Sighting, Watch};
use crate::config::Config;
use crate::probes::bpf::Probes;
use crate::probes::features::Checks;
use finder::Finder;

/// How long a process that is gone is remembered for its events' sake.
const KEEP: Duration = Duration::from_secs(10);

/// Decides which processes are looked at.
pub trait Filter: Send {
    fn wants(&mut self, pid: u32) -> bool;

    /// The process has ended; its pid may be given out again.
    fn forget(&mut self, _pid: u32) {}
}

/// Every process of the host.
pub struct Everyone;

impl Filter for Everyone {
    fn wants(&mut self, _pid: u32) -> bool {
        true
    }
}

/// What to search, and how often.
pub struct Search {
    /// Files to hook before any process maps them.
    pub files: Vec<PathBuf>,
    /// Folders to search for such files, besides the usual ones.
    pub folders: Vec<PathBuf>,
    pub wanted: Box<dyn Filter>,
    pub interval: Duration,
    /// How long a round over all processes takes where the watch works.
    pub round: Duration,
    pub policy: Policy,
    /// The kill switch.
    pub off_file: PathBuf,
    /// False: nothing is hooked.
    pub probes: bool,
    /// False: frameworks' allocators are not hooked.
    pub framework: bool,
    /// False: the kernel is not asked to tell of new mappings.
    pub watch: bool,
    /// How often a second and thread Python frames are read for a framework's events; `None`: Python
    /// frames are not read at all.
    pub python: Option<usize>,
    /// What was found out about this kernel.
    pub checks: Checks,
}

impl Search {
    /// What `config` says of the search; all processes unless `wanted` is another.
    pub fn configured(config: &Config, checks: Checks, wanted: Box<dyn Filter>) -> Self {
        Self {
            files: config.libraries.clone(),
            folders: Vec::new(),
            wanted,
            interval: config.scan_interval.0,
            round: config.rescan_interval.0,
            policy: Policy::new(config, &checks.preflight),
            off_file: config.off_file.clone(),
            probes: config.probes,
            framework: config.framework,
            watch: config.watch,
            python: config.python.then_some(config.python_framework_rate),
            checks,
        }
    }
}

/// Asks the discovery thread for something.
enum Request {
    /// It runs a new program.
    Exec(u32),
    Look(u32),
    Gone(u32),
    Sighting(Sighting),
    End,
}

/// The draining side's handle.
pub struct Discovery {
    known: Arc<Mutex<Known>>,
    requests: Sender<Request>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Discovery {
    /// Hooks the given files and those of all running processes, then goes on in the background.
    pub fn start(probes: Probes, search: Search) -> anyhow::Result<Self> {
        let known = Arc::new(Mutex::new(Known::default()));
        for file in &search.files {
            if let Err(error) = Library::from_path(file) {
                warn!("library not hooked: {error:#}");
            }
        }
        let (requests, receiver) = mpsc::channel();
        let wants_watch = search.watch;
        lock(&known).state.checks = Some(search.checks.clone());
        let mut finder = Finder::new(probes, Arc::clone(&known), search);
        // Before the first search, so that nothing slips through between the two.
        let watch = if wants_watch {
            let tell = requests.clone();
            Watch::start(move |sighting| {
                // Nobody listens any more when the agent ends.
                let _ = tell.send(Request::Sighting(sighting));
            })
            .map_err(|error| error.to_string())
        } else {
            Err("watch = false".to_string())
        };
        match watch {
            Ok(watch) => finder.watch = Some(watch),
            Err(reason) => {
                info!("searching all processes at each interval: {reason}");
                lock(&known).state.watch =
                    format!("all processes are searched at each interval: {reason}");
            }
        }
        finder.begin();
        let thread = std::thread::Builder::new()
            .name("discovery".into())
            .spawn(move || finder.run(&receiver))?;
        Ok(Self {
            known,
            requests,
            thread: Some(thread),
        })
    }

    /// What is known now.
    pub fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.known)
    }

    /// A process runs a new program.
    pub fn look(&self, pid: u32) {
        self.ask(Request::Exec(pid));
    }

    /// A process calls hooked functions, and nothing is known of it: a child that shares its
    /// parent's mappings.
    pub fn meet(&self, pid: u32) {
        self.ask(Request::Look(pid));
    }

    /// A process is gone and nothing is known of it; its events may still be on their way.
    pub fn gone_if_old(&self, pid: u32) {
        let is_old = self
            .known()
            .seen(pid)
            .is_some_and(|seen| seen.at.elapsed() > KEEP);
        if is_old {
            self.gone(pid);
        }
    }

    /// A process is gone. What was seen of it is forgotten at once: its pid may be another's.
    pub fn gone(&self, pid: u32) {
        self.known().processes.remove(&pid);
        self.ask(Request::Gone(pid));
    }

    fn ask(&self, request: Request) {
        // The thread ends only with this handle, so the send cannot fail while we are here.
        let _ = self.requests.send(request);
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        // The watch holds the channel too, so that closing it would not be noticed.
        self.ask(Request::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A thread that panicked while it held the lock leaves readable data behind.
fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}
