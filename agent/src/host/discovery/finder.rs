//! The thread that searches: decides when to look at which process, and what is hooked.
//!
//! With the watch ([`crate::host::watch`]) a process is looked at when it maps a CUDA library;
//! besides, each new pid once, and all processes in turn over a minute, against whatever was
//! missed. Without the watch every process is looked at in every interval, and a new program
//! several times after its exec.
//!
//! Invariant: a file is hooked by one identity at most. A file that a process objects to
//! ([`crate::host::safety`]) stays free of hooks until no process that maps it objects any more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use super::inspect::{Candidate, Inspection, Inspector};
use super::known::{Hooked, Known, Outcome, Seen};
use super::likely::Likely;
use super::{Request, Search, lock};
use crate::host::identity::StartTime;
use crate::host::library::{FileId, Library};
use crate::host::procfs::{self, Program};
use crate::host::switch;
use crate::host::watch::{Mapped, Sighting, Watch};
use crate::probes::bpf::{Attachment, Probes};
use crate::probes::samefile;

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

pub(super) struct Finder {
    pub probes: Probes,
    pub known: Arc<Mutex<Known>>,
    pub search: Search,
    pub watch: Option<Watch>,
    inspector: Inspector,
    likely: Likely,
    looks: Vec<(Instant, u32)>,
    /// Processes that were looked at once.
    checked: HashSet<u32>,
    /// Where the slow round over all processes stands, and how many it owes.
    round: u32,
    owed: f64,
    /// Who objects to which file, and why.
    objections: HashMap<FileId, BTreeMap<u32, String>>,
    /// Files that proved to be the same as a hooked one.
    same: HashMap<FileId, FileId>,
    /// Files by what `maps` calls them.
    mapped_as: HashMap<FileId, FileId>,
    last_scan: Instant,
}

impl Finder {
    pub fn new(probes: Probes, known: Arc<Mutex<Known>>, search: Search) -> Self {
        Self {
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
        self.follow_switch();
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
            Request::Exec(pid) => self.after_exec(pid),
            Request::Look(pid) => self.look(pid),
            Request::Gone(pid) => {
                self.looks.retain(|(_, looked)| *looked != pid);
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

    /// Takes note of what a process objects to.
    fn object(&mut self, pid: u32, inspection: &Inspection) {
        let policy = &self.search.policy;
        let reason = policy.objection(pid, inspection.program.exe.as_deref());
        let ids: Vec<FileId> = inspection
            .candidates
            .iter()
            .filter(|candidate| !policy.allows(&candidate.library.path))
            .map(|candidate| self.identity(candidate))
            .collect();
        let Some(reason) = reason else {
            self.withdraw(pid, &[]);
            return;
        };
        for id in &ids {
            self.objections
                .entry(*id)
                .or_default()
                .insert(pid, reason.clone());
            self.refuse(*id, &reason);
        }
        self.withdraw(pid, &ids);
    }

    /// A process objects to nothing but `to` any more.
    fn withdraw(&mut self, pid: u32, to: &[FileId]) {
        let mut free = Vec::new();
        self.objections.retain(|id, objectors| {
            let objected = !to.contains(id) && objectors.remove(&pid).is_some();
            if objected && objectors.is_empty() {
                free.push(*id);
            }
            !objectors.is_empty()
        });
        for id in free {
            self.release(id);
        }
    }

    fn withdraw_dead(&mut self) {
        let dead: HashSet<u32> = self
            .objections
            .values()
            .flat_map(BTreeMap::keys)
            .filter(|pid| StartTime::of(**pid).is_none())
            .copied()
            .collect();
        for pid in dead {
            self.withdraw(pid, &[]);
        }
    }

    /// Takes the hooks of a file out, if it has any.
    fn refuse(&mut self, id: FileId, reason: &str) {
        let mut known = lock(&self.known);
        let Some(hooked) = known.libraries.get_mut(&id) else {
            return;
        };
        if matches!(hooked.outcome, Outcome::Refused(_)) {
            return;
        }
        warn!(library = hooked.path, reason, "taking the hooks out");
        hooked.outcome = Outcome::Refused(reason.to_string());
        drop(known);
        self.take_out(id);
    }

    fn take_out(&mut self, id: FileId) {
        if let Err(error) = self.probes.detach(id) {
            error!("failed to take hooks out: {error:#}");
        }
    }

    /// A hook holds its file, and the file's file system. Where no process maps it and no path
    /// leads to it any more, as after a container's end, it is let go.
    fn let_go(&mut self) {
        let known = lock(&self.known);
        let used: HashSet<FileId> = known
            .processes
            .values()
            .flat_map(|seen| seen.libraries.iter().copied())
            .collect();
        let gone: Vec<(FileId, String)> = known
            .libraries
            .iter()
            .filter(|(id, hooked)| !used.contains(id) && !hooked.is_reachable(**id))
            .map(|(id, hooked)| (*id, hooked.path.clone()))
            .collect();
        drop(known);
        for (id, path) in gone {
            info!(library = path, "gone, and used by nobody: letting it go");
            lock(&self.known).libraries.remove(&id);
            self.same.retain(|_, twin| *twin != id);
            self.take_out(id);
        }
    }

    /// Nobody objects to a file any more: who maps it is looked at again.
    fn release(&mut self, id: FileId) {
        let mut known = lock(&self.known);
        known.libraries.remove(&id);
        let users: Vec<u32> = known
            .processes
            .iter()
            .filter(|(_, seen)| seen.libraries.contains(&id))
            .map(|(pid, _)| *pid)
            .collect();
        drop(known);
        let now = Instant::now();
        self.looks.extend(users.into_iter().map(|pid| (now, pid)));
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
                mappings: inspection.mappings,
            };
            known.processes.insert(pid, seen);
        }
    }

    /// What a file is known by here.
    fn identity(&self, candidate: &Candidate) -> FileId {
        let id = candidate.library.id;
        self.same.get(&id).copied().unwrap_or(id)
    }

    /// Hooks a file if it is not hooked yet and may be; gives what it is known by.
    fn hook(&mut self, candidate: &Candidate) -> FileId {
        let id = self.identity(candidate);
        if lock(&self.known).libraries.contains_key(&id) {
            return id;
        }
        let outcome = match self.reason_against(candidate, id) {
            Some(reason) => Outcome::Refused(reason),
            None => match self.twin_of(candidate) {
                Ok(Some(twin)) => {
                    self.same.insert(id, twin);
                    // An earlier agent may have hooked it by this identity.
                    self.take_out(id);
                    return twin;
                }
                Ok(None) => Outcome::Attached(self.attach(&candidate.library)),
                Err(reason) => Outcome::Refused(reason),
            },
        };
        // Its process, and with it the way to open it, may have gone while we tried.
        let vanished = std::fs::metadata(&candidate.library.open_path).is_err();
        let nothing = match &outcome {
            Outcome::Attached(attachments) => attachments.iter().all(|a| a.refused.is_some()),
            Outcome::Refused(_) => false,
        };
        if vanished && nothing {
            self.probes.forget(id);
            return id;
        }
        if matches!(outcome, Outcome::Refused(_)) {
            // An earlier agent may have hooked it.
            self.take_out(id);
        }
        tell(&candidate.library.path, &outcome);
        lock(&self.known).libraries.insert(
            id,
            Hooked {
                path: candidate.library.path.clone(),
                open_path: candidate.library.open_path.clone(),
                likeness: candidate.likeness,
                unresolved: candidate.unresolved.clone(),
                outcome,
            },
        );
        id
    }

    fn reason_against(&self, candidate: &Candidate, id: FileId) -> Option<String> {
        if let Some(off) = lock(&self.known).off() {
            return Some(off.to_string());
        }
        if self.search.policy.excludes(&candidate.library.path) {
            return Some("only_libraries does not name it".to_string());
        }
        if self.search.policy.allows(&candidate.library.path) {
            return None;
        }
        let objectors = self.objections.get(&id)?;
        objectors.values().next().cloned()
    }

    fn attach(&mut self, library: &Library) -> Vec<Attachment> {
        let mut attachments = self.probes.attach(library).to_vec();
        if library.is_program {
            // A linker takes from a runtime what the program needs: the rest is no gap.
            let inside = library.function_offsets().unwrap_or_default();
            attachments.retain(|attachment| inside.contains_key(attachment.symbol));
        }
        attachments
    }

    /// The hooked file that this one is, if one of them has an uncertain identity. An error is a
    /// reason not to hook it: twice would count every call twice.
    fn twin_of(&self, candidate: &Candidate) -> Result<Option<FileId>, String> {
        let known = lock(&self.known);
        let alike: Vec<(FileId, Hooked)> = known
            .libraries
            .iter()
            .filter(|(_, hooked)| {
                hooked.likeness == candidate.likeness
                    && (hooked.unresolved.is_some() || candidate.unresolved.is_some())
            })
            .map(|(id, hooked)| (*id, hooked.clone()))
            .collect();
        drop(known);
        for (id, hooked) in alike {
            let Outcome::Attached(attachments) = &hooked.outcome else {
                continue;
            };
            let offsets = candidate
                .library
                .function_offsets()
                .map_err(|error| format!("{error:#}"))?;
            let offset = attachments
                .iter()
                .filter(|attachment| attachment.refused.is_none())
                .find_map(|attachment| offsets.get(attachment.symbol));
            let Some(offset) = offset else { continue };
            match samefile::is_hooked_file(&candidate.library.open_path, *offset) {
                Ok(true) => return Ok(Some(id)),
                Ok(false) => {}
                Err(error) => {
                    let why = candidate.unresolved.as_ref().or(hooked.unresolved.as_ref());
                    return Err(format!(
                        "it may be the same file as {}, and hooking it twice would count every call twice: {}; the kernel could not be asked: {error}",
                        hooked.path,
                        why.map_or("", String::as_str)
                    ));
                }
            }
        }
        Ok(None)
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
                lock(&self.known).state.off = Some(reason.clone());
                if let Err(error) = self.probes.detach_all() {
                    error!("failed to take probes out: {error:#}");
                }
                let mut known = lock(&self.known);
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

fn tell(library: &str, outcome: &Outcome) {
    match outcome {
        Outcome::Attached(attachments) => {
            let (hooked, refused): (Vec<_>, Vec<_>) =
                attachments.iter().partition(|a| a.refused.is_none());
            info!(library, hooked = hooked.len(), "hooked");
            for attachment in refused {
                let reason = attachment.refused.as_deref().unwrap_or_default();
                warn!(library, symbol = attachment.symbol, reason, "not hooked");
            }
        }
        Outcome::Refused(reason) => warn!(library, reason, "not hooked"),
    }
}
