//! The thread that searches: decides when to look at which process, and what is hooked.
//!
//! With the watch ([`crate::host::watch`]) a process is looked at when it maps a CUDA library;
//! besides, each new pid once, and all processes in turn over a minute, against whatever was
//! missed. Without the watch every process is looked at in every interval, and a new program
//! several times after its exec.
//!
//! What it then does with what it found is in [`super::hooking`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use super::inspect::{Candidate, Inspection, Inspector};
use super::known::{Known, Outcome, Seen};
use super::likely::Likely;
use super::{Request, Search, lock};
use crate::host::identity::StartTime;
use crate::host::library::{FileId, Library};
use crate::host::procfs::{self, Program};
use crate::host::switch;
use crate::host::watch::{Mapped, Sighting, Watch};
use crate::probes::bpf::Probes;
use crate::python::btf;
use crate::python::detect::Pythons;

/// When to look at a program after its exec, or after it mapped a library: the loader needs a
/// moment to map the others.
const LOOKS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(5),
    Duration::from_millis(30),
    Duration::from_millis(120),
    Duration::from_millis(500),
];
/// How often the kill switch is looked at.
const SWITCH: Duration = Duration::from_millis(250);

/// What is to be done about interpreters.
fn pythons(probes: &mut Probes, search: &Search) -> Pythons {
    let table = probes.python.take();
    let (Some(table), Some(rate)) = (table, search.python) else {
        return Pythons::new(None, 0, 0);
    };
    match btf::fsbase(btf::VMLINUX.as_ref()) {
        // The kernel side counts by tenths of a second.
        Ok(fsbase) => {
            let limit = u32::try_from(rate.div_ceil(10)).unwrap_or(u32::MAX);
            Pythons::new(Some(table), fsbase, limit)
        }
        Err(error) => {
            warn!("Python frames are not read: {error}");
            Pythons::new(None, 0, 0)
        }
    }
}

pub(super) struct Finder {
    pub probes: Probes,
    pub known: Arc<Mutex<Known>>,
    pub search: Search,
    pub watch: Option<Watch>,
    inspector: Inspector,
    pythons: Pythons,
    likely: Likely,
    pub(super) looks: Vec<(Instant, u32)>,
    /// Processes that were looked at once.
    checked: HashSet<u32>,
    /// Where the slow round over all processes stands, and how many it owes.
    round: u32,
    owed: f64,
    /// Who objects to which file, and why.
    pub(super) objections: HashMap<FileId, BTreeMap<u32, String>>,
    /// Files that proved to be the same as a hooked one.
    pub(super) same: HashMap<FileId, FileId>,
    /// Files by what `maps` calls them.
    mapped_as: HashMap<FileId, FileId>,
    last_scan: Instant,
}

impl Finder {
    pub fn new(mut probes: Probes, known: Arc<Mutex<Known>>, search: Search) -> Self {
        let pythons = pythons(&mut probes, &search);
        Self {
            pythons,
            probes,
            known,
            search,
            watch: None,
            inspector: Inspector::default(),
            likely: Likely::default(),
            looks: Vec::new(),
            checked: HashSet::new(),
            round: 0,
            owed: 0.0,
            objections: HashMap::new(),
            same: HashMap::new(),
            mapped_as: HashMap::new(),
            last_scan: Instant::now(),
        }
    }

    /// The first search: all processes, then files that none maps yet.
    pub fn begin(&mut self) {
        lock(&self.known).state.uprobe_multi = self.probes.uses_multi();
        lock(&self.known).state.framework = self.search.framework;
        self.follow_switch();
        self.pythons.clean();
        self.search_everything();
        // What an earlier agent hooked and nobody uses: some of it may be on disks to be detached.
        let mut left = self.probes.pinned();
        left.retain(|id| !lock(&self.known).libraries.contains_key(id));
        left.into_iter().for_each(|id| self.take_out(id));
        self.report();
    }

    pub fn run(&mut self, requests: &Receiver<Request>) {
        let interval = self.search.interval;
        let mut next_scan = Instant::now() + interval;
        let mut next_switch = Instant::now() + SWITCH;
        loop {
            let next_look = self.looks.iter().map(|(at, _)| *at).min();
            let next = next_scan.min(next_switch);
            let wake = next_look.map_or(next, |at| at.min(next));
            match requests.recv_timeout(wake.saturating_duration_since(Instant::now())) {
                Ok(Request::End) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(request) => self.take(request),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = Instant::now();
            self.look_at_due(now);
            if now >= next_switch {
                self.follow_switch();
                next_switch = now + SWITCH;
            }
            if now >= next_scan {
                self.scan();
                next_scan = Instant::now() + interval;
            }
            self.report();
        }
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Exec(pid) => {
                self.forget_python(pid);
                self.after_exec(pid);
            }
            Request::Look(pid) => self.look(pid),
            Request::Gone(pid) => {
                self.looks.retain(|(_, looked)| *looked != pid);
                self.forget_python(pid);
                lock(&self.known).processes.remove(&pid);
                self.withdraw(pid, &[]);
            }
            Request::Sighting(Sighting::Mapped(mapped)) => {
                if self.search.wanted.wants(mapped.pid) {
                    self.sighted(&mapped);
                }
            }
            Request::Sighting(Sighting::Overflow) => {
                warn!("records of new mappings were lost; searching all processes");
                self.search_everything();
            }
            Request::End => {}
        }
    }

    /// With the watch, only a program that was known needs a look: it may map nothing any more.
    fn after_exec(&mut self, pid: u32) {
        if self.watch.is_none() {
            self.plan_looks(pid);
        } else if lock(&self.known).processes.contains_key(&pid) {
            self.look(pid);
        }
    }

    fn plan_looks(&mut self, pid: u32) {
        let now = Instant::now();
        self.looks.retain(|(_, planned)| *planned != pid);
        self.looks
            .extend(LOOKS.iter().map(|delay| (now + *delay, pid)));
    }

    fn look_at_due(&mut self, now: Instant) {
        let due: Vec<u32> = self
            .looks
            .iter()
            .filter(|(at, _)| *at <= now)
            .map(|(_, pid)| *pid)
            .collect();
        self.looks.retain(|(at, _)| *at > now);
        for pid in due {
            self.look(pid);
        }
    }

    fn look(&mut self, pid: u32) {
        if !self.search.wanted.wants(pid) {
            return;
        }
        match self.inspector.inspect(pid) {
            Ok(inspection) => {
                self.look_for_python(pid, &inspection);
                self.object(pid, &inspection);
                self.settle(pid, inspection);
            }
            // It lives and maps nothing of ours (any more).
            Err(mappings) if !mappings.is_empty() => {
                let known = lock(&self.known).processes.remove(&pid).is_some();
                if known {
                    self.withdraw(pid, &[]);
                }
            }
            Err(_) => {}
        }
    }

    /// Before anything is hooked, which may take longer than a program that knows its way needs to
    /// its first call.
    fn look_for_python(&mut self, pid: u32, inspection: &Inspection) {
        let Some(start) = inspection.start else {
            return;
        };
        let exe = inspection.program.exe.as_deref();
        let exe = exe.map(|exe| exe.strip_suffix(" (deleted)").unwrap_or(exe));
        if let Some(found) = self.pythons.look(pid, start, exe, &inspection.mappings) {
            lock(&self.known).pythons.insert(pid, found.clone());
        }
    }

    fn forget_python(&mut self, pid: u32) {
        self.pythons.forget(pid);
        lock(&self.known).pythons.remove(&pid);
    }

    /// The watch saw it map a library. If it is over already, what the watch knows has to do.
    fn sighted(&mut self, mapped: &Mapped) {
        let pid = mapped.pid;
        self.plan_looks(pid);
        self.looks
            .retain(|(at, planned)| *planned != pid || *at > Instant::now());
        self.look(pid);
        let is_gone = StartTime::of(pid).is_none();
        if !is_gone || mapped.mappings.is_empty() {
            return;
        }
        let libraries: Vec<FileId> = mapped
            .mappings
            .iter()
            .filter_map(|mapping| self.mapped_as.get(&mapping.file_id()).copied())
            .collect();
        if libraries.is_empty() {
            return;
        }
        let boot_offset =
            crate::host::clock::boottime_ns().saturating_sub(crate::host::clock::monotonic_ns());
        let seen = Seen {
            libraries,
            remarks: Vec::new(),
            at: Instant::now(),
            start: StartTime::from_boottime_ns(mapped.at_ns + boot_offset),
            program: Program {
                exe: mapped.exe.clone(),
                ..Program::default()
            },
            framework: None,
            mappings: mapped.mappings.clone(),
        };
        // What was read of it while it lived tells more.
        lock(&self.known).processes.entry(pid).or_insert(seen);
    }

    /// Looks at every process, objections first: nothing is hooked that has to be unhooked at once.
    fn search_everything(&mut self) {
        let pids = procfs::pids();
        let mut found = Vec::new();
        for pid in &pids {
            if self.search.wanted.wants(*pid)
                && let Ok(inspection) = self.inspector.inspect(*pid)
            {
                self.look_for_python(*pid, &inspection);
                self.object(*pid, &inspection);
                found.push((*pid, inspection));
            }
        }
        // What an earlier agent has hooked goes first: a file that is the same is then known to be.
        let pinned = self.probes.pinned();
        found.sort_by_key(|(_, inspection)| {
            let mut candidates = inspection.candidates.iter();
            !candidates.any(|candidate| pinned.contains(&candidate.library.id))
        });
        for (pid, inspection) in found {
            self.settle(pid, inspection);
        }
        self.checked = pids.into_iter().collect();
        self.hook_files();
        self.count_scan();
    }

    /// What is done at each interval.
    fn scan(&mut self) {
        if self.watch.is_none() {
            self.withdraw_dead();
            self.search_everything();
            return;
        }
        let mut pids = procfs::pids();
        pids.sort_unstable();
        let new: Vec<u32> = pids
            .iter()
            .filter(|pid| !self.checked.contains(pid))
            .copied()
            .collect();
        // The slow round goes on where it stood, by pid, so that it meets each once.
        self.owed += pids.len() as f64 * self.last_scan.elapsed().as_secs_f64()
            / self.search.round.as_secs_f64();
        let again = (self.owed as usize).min(pids.len());
        self.owed -= again as f64;
        let from = pids.partition_point(|pid| *pid <= self.round);
        let round: Vec<u32> = pids
            .iter()
            .cycle()
            .skip(from)
            .take(again)
            .copied()
            .collect();
        if from + again > pids.len() {
            self.let_go();
        }
        self.round = round.last().copied().unwrap_or(self.round);
        self.checked = pids.into_iter().collect();
        self.withdraw_dead();
        for pid in new.into_iter().chain(round) {
            self.look(pid);
        }
        if self.search.policy.can_change() {
            let known = lock(&self.known).pids();
            for pid in known {
                self.look(pid);
            }
        }
        self.hook_files();
        self.count_scan();
    }

    fn count_scan(&mut self) {
        self.last_scan = Instant::now();
        lock(&self.known).state.scans += 1;
    }

    /// Hooks files that no process maps yet. Done again at each interval: an upgrade puts a new
    /// file under the old name.
    fn hook_files(&mut self) {
        let likely = self.likely.find(&self.search.folders);
        let me = std::process::id();
        for file in self.search.files.clone().iter().chain(&likely) {
            let Ok(library) = Library::from_path(file) else {
                continue;
            };
            let candidate = Candidate::new(file, &library.path, me, library.layer, false);
            if let Ok(candidate) = candidate {
                self.hook(&candidate);
            }
        }
    }

    /// Hooks what a process maps, and remembers the process.
    fn settle(&mut self, pid: u32, inspection: Inspection) {
        let mut libraries = Vec::new();
        for candidate in &inspection.candidates {
            let id = self.hook(candidate);
            if let Some(mapped_as) = candidate.mapped_as {
                self.mapped_as.insert(mapped_as, id);
            }
            if !libraries.contains(&id) {
                libraries.push(id);
            }
        }
        let Some(start) = inspection.start else {
            return;
        };
        let mut known = lock(&self.known);
        let unchanged = known.processes.get(&pid).is_some_and(|seen| {
            seen.start == start
                && seen.mappings == inspection.mappings
                && seen.libraries == libraries
        });
        if !unchanged {
            let seen = Seen {
                libraries,
                remarks: inspection.remarks,
                at: Instant::now(),
                start,
                program: inspection.program,
                framework: inspection.framework,
                mappings: inspection.mappings,
            };
            known.processes.insert(pid, seen);
        }
    }

    /// Does what the kill switch says.
    fn follow_switch(&mut self) {
        let off = switch::off(&self.search.off_file, self.search.probes);
        let before = lock(&self.known).state.off.clone();
        if off == before {
            return;
        }
        match &off {
            Some(reason) => {
                warn!(reason, "taking all probes out");
                lock(&self.known).turning_off = Some(reason.clone());
                if let Err(error) = self.probes.detach_all() {
                    error!("failed to take probes out: {error:#}");
                }
                let mut known = lock(&self.known);
                known.turning_off = None;
                known.state.off = Some(reason.clone());
                for hooked in known.libraries.values_mut() {
                    hooked.outcome = Outcome::Refused(reason.clone());
                }
            }
            None => {
                info!("switched on: putting the probes back");
                if let Err(error) = self.probes.reattach() {
                    error!("failed to put probes back: {error:#}");
                }
                let mut known = lock(&self.known);
                known.state.off = None;
                known.libraries.clear();
                drop(known);
                self.same.clear();
                self.search_everything();
            }
        }
    }

    fn report(&mut self) {
        let mut known = lock(&self.known);
        known.state.maps_read = self.inspector.maps_read;
        if let Some(watch) = &self.watch {
            let figures = &watch.figures;
            let cpus = figures.cpus.load(std::sync::atomic::Ordering::Relaxed);
            known.state.watching = true;
            known.state.watch = format!("the kernel tells of new mappings on {cpus} CPUs");
            known.state.watch_lost = figures.lost.load(std::sync::atomic::Ordering::Relaxed);
        }
    }
}
