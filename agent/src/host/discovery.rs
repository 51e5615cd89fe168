//! Finds processes that map hooked libraries, hooks the libraries, and remembers which process
//! maps which. Runs on a thread of its own: the draining side never waits for it.
//!
//! Libraries are found three ways: files known before any process maps them (configuration, the
//! loader's cache), every process at a fixed interval, and a new program soon after its exec,
//! when its loader has had time to map them.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::identity::StartTime;
use super::library::{self, FileId, Library};
use super::procfs::{self, Mapping, Program};
use crate::probes::bpf::{Attachment, NOT_EXPORTED, Probes};

/// When to look at a program after its exec: the loader needs a moment to map its libraries.
const LOOKS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(5),
    Duration::from_millis(30),
    Duration::from_millis(120),
    Duration::from_millis(500),
];

/// How long a process that is gone is remembered for its events' sake.
const KEEP: Duration = Duration::from_secs(10);

/// What is known of hooks, shared with the draining side.
#[derive(Default)]
pub struct Known {
    libraries: HashMap<FileId, (String, Vec<Attachment>)>,
    processes: HashMap<u32, Seen>,
}

/// A process that maps hooked libraries, as it was when it was looked at: it may be gone when its
/// events are read.
#[derive(Debug, Clone)]
pub struct Seen {
    libraries: Vec<FileId>,
    at: Instant,
    pub start: StartTime,
    pub program: Program,
    pub mappings: Vec<Mapping>,
}

/// One symbol of one library that a process maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    pub library: String,
    pub symbol: &'static str,
    pub refused: Option<String>,
}

impl Known {
    /// Hooks of the libraries that a process maps; empty if none was found (yet).
    pub fn coverage(&self, pid: u32) -> Vec<Coverage> {
        let ids = self
            .processes
            .get(&pid)
            .map_or(&[][..], |seen| seen.libraries.as_slice());
        ids.iter()
            .filter_map(|id| self.libraries.get(id))
            .flat_map(|(path, attachments)| {
                attachments.iter().map(|a| Coverage {
                    library: path.clone(),
                    symbol: a.symbol,
                    refused: a.refused.clone(),
                })
            })
            .collect()
    }

    /// What was seen of a process that maps a hooked library.
    pub fn seen(&self, pid: u32) -> Option<&Seen> {
        self.processes.get(&pid)
    }

    /// Processes that map a hooked library.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.keys().copied().collect()
    }

    /// Hooked functions, and functions that could not be hooked, over all libraries.
    pub fn hooked(&self) -> (usize, usize) {
        let all = self
            .libraries
            .values()
            .flat_map(|(_, attachments)| attachments);
        let (yes, no): (Vec<_>, Vec<_>) = all.partition(|a| a.refused.is_none());
        (yes.len(), no.len())
    }

    pub fn libraries(&self) -> Vec<String> {
        self.libraries
            .values()
            .map(|(path, _)| path.clone())
            .collect()
    }
}

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
}

impl Search {
    /// Hooks files that no process maps yet. Done again at each interval: an upgrade puts a new
    /// file under the old name.
    fn hook_files(&self, probes: &mut Probes, known: &Mutex<Known>) {
        let likely = likely_libraries(&self.folders);
        for file in self.files.iter().chain(&likely) {
            let Ok(library) = Library::from_path(file) else {
                continue;
            };
            if !lock(known).libraries.contains_key(&library.id) {
                hook(probes, known, &library);
            }
        }
    }
}

/// Asks the discovery thread for something.
enum Request {
    Look(u32),
    Gone(u32),
}

/// The draining side's handle.
pub struct Discovery {
    known: Arc<Mutex<Known>>,
    requests: Sender<Request>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Discovery {
    /// Hooks the given files and those of all running processes, then goes on in the background.
    pub fn start(mut probes: Probes, mut search: Search) -> anyhow::Result<Self> {
        let known = Arc::new(Mutex::new(Known::default()));
        for file in &search.files {
            if let Err(error) = Library::from_path(file) {
                warn!("library not hooked: {error:#}");
            }
        }
        search.hook_files(&mut probes, &known);
        scan(&mut probes, &known, search.wanted.as_mut());
        let (requests, receiver) = mpsc::channel();
        let shared = Arc::clone(&known);
        let thread = std::thread::Builder::new()
            .name("discovery".into())
            .spawn(move || run(&mut probes, &shared, &receiver, &mut search))?;
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

    /// A program was started: look at it soon.
    pub fn look(&self, pid: u32) {
        // The thread ends only with this handle, so the send cannot fail while we are here.
        let _ = self.requests.send(Request::Look(pid));
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

    /// A process is gone.
    pub fn gone(&self, pid: u32) {
        let _ = self.requests.send(Request::Gone(pid));
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        // Closing the channel ends the thread.
        self.requests = mpsc::channel().0;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A thread that panicked while it held the lock leaves readable data behind.
fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(
    probes: &mut Probes,
    known: &Mutex<Known>,
    requests: &Receiver<Request>,
    search: &mut Search,
) {
    let interval = search.interval;
    let mut looks: Vec<(Instant, u32)> = Vec::new();
    let mut next_scan = Instant::now() + interval;
    loop {
        let next_look = looks.iter().map(|(at, _)| *at).min();
        let wake = next_look.map_or(next_scan, |at| at.min(next_scan));
        match requests.recv_timeout(wake.saturating_duration_since(Instant::now())) {
            Ok(Request::Look(pid)) => {
                let now = Instant::now();
                looks.extend(LOOKS.iter().map(|delay| (now + *delay, pid)));
            }
            Ok(Request::Gone(pid)) => {
                looks.retain(|(_, looked)| *looked != pid);
                lock(known).processes.remove(&pid);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        let due: Vec<u32> = looks
            .iter()
            .filter(|(at, _)| *at <= now)
            .map(|(_, pid)| *pid)
            .collect();
        looks.retain(|(at, _)| *at > now);
        for pid in due {
            if search.wanted.wants(pid) {
                look_at(probes, known, pid);
            }
        }
        if now >= next_scan {
            search.hook_files(probes, known);
            scan(probes, known, search.wanted.as_mut());
            next_scan = Instant::now() + interval;
        }
    }
}

fn scan(probes: &mut Probes, known: &Mutex<Known>, wanted: &mut dyn Filter) {
    for pid in procfs::pids() {
        if wanted.wants(pid) {
            look_at(probes, known, pid);
        }
    }
}

fn look_at(probes: &mut Probes, known: &Mutex<Known>, pid: u32) {
    let mut ids = Vec::new();
    let mappings = procfs::mappings(pid);
    for mapping in &mappings {
        let Some(layer) = library::layer_of(&mapping.path).filter(|_| mapping.executable) else {
            continue;
        };
        let open_path = mapping.open_path(pid);
        // The process may be gone by now.
        let Ok(id) = FileId::of(&open_path) else {
            continue;
        };
        if !ids.contains(&id) {
            ids.push(id);
        }
        if !lock(known).libraries.contains_key(&id) {
            hook(
                probes,
                known,
                &Library {
                    id,
                    path: mapping.path.clone(),
                    open_path,
                    layer,
                },
            );
        }
    }
    let unchanged = lock(known)
        .processes
        .get(&pid)
        .is_some_and(|seen| seen.mappings == mappings);
    if ids.is_empty() || unchanged {
        return;
    }
    if let Some(start) = StartTime::of(pid) {
        let seen = Seen {
            libraries: ids,
            at: Instant::now(),
            start,
            program: Program::of(pid),
            mappings,
        };
        lock(known).processes.insert(pid, seen);
    }
}

fn hook(probes: &mut Probes, known: &Mutex<Known>, library: &Library) {
    let attachments = probes.attach(library).to_vec();
    let (hooked, refused): (Vec<_>, Vec<_>) = attachments.iter().partition(|a| a.refused.is_none());
    info!(library = library.path, hooked = hooked.len(), "hooked");
    for attachment in refused {
        let reason = attachment.refused.as_deref().unwrap_or_default();
        // Every version lacks some functions of others.
        if reason == NOT_EXPORTED {
            continue;
        }
        warn!(
            library = library.path,
            symbol = attachment.symbol,
            reason,
            "not hooked"
        );
    }
    lock(known)
        .libraries
        .insert(library.id, (library.path.clone(), attachments));
}

/// Library files that a program is likely to load: those beside the names in `folders`, and
/// those in the loader's default places.
fn likely_libraries(folders: &[PathBuf]) -> Vec<PathBuf> {
    const DEFAULT_FOLDERS: [&str; 6] = [
        "/usr/lib/x86_64-linux-gnu",
        "/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/local/cuda/lib64",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
    ];
    let mut found = HashMap::new();
    for folder in folders
        .iter()
        .map(PathBuf::as_path)
        .chain(DEFAULT_FOLDERS.iter().map(Path::new))
    {
        let Ok(entries) = fs::read_dir(folder) else {
            continue;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            if library::layer_of(&path.to_string_lossy()).is_some()
                && let Ok(id) = FileId::of(&path)
            {
                found.entry(id).or_insert(path);
            }
        }
    }
    found.into_values().collect()
}
