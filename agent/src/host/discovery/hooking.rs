//! What is hooked, and what is kept free: the half of the finder that acts.
//!
//! Invariant: a file is hooked by one identity at most, and not at all while a process that maps it
//! objects.

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

use tracing::{error, info, warn};

use super::finder::Finder;
use super::inspect::{Candidate, Inspection};
use super::known::{Hooked, Outcome};
use super::lock;
use crate::host::identity::StartTime;
use crate::host::library::{FileId, Library};
use crate::probes::bpf::{Attachment, NOT_EXPORTED};
use crate::probes::hooks::Layer;
use crate::probes::samefile;

/// Why no framework's allocator is hooked.
const NO_FRAMEWORK: &str = "framework = false: frameworks' allocators are not hooked";

impl Finder {
    /// Takes note of what a process objects to.
    pub(super) fn object(&mut self, pid: u32, inspection: &Inspection) {
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
    pub(super) fn withdraw(&mut self, pid: u32, to: &[FileId]) {
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

    pub(super) fn withdraw_dead(&mut self) {
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

    pub(super) fn take_out(&mut self, id: FileId) {
        if let Err(error) = self.probes.detach(id) {
            error!("failed to take hooks out: {error:#}");
        }
    }

    /// A hook holds its file, and the file's file system. Where no process maps it and no path
    /// leads to it any more, as after a container's end, it is let go.
    pub(super) fn let_go(&mut self) {
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

    /// What a file is known by here.
    fn identity(&self, candidate: &Candidate) -> FileId {
        let id = candidate.library.id;
        self.same.get(&id).copied().unwrap_or(id)
    }

    /// Hooks a file if it is not hooked yet and may be; gives what it is known by.
    pub(super) fn hook(&mut self, candidate: &Candidate) -> FileId {
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
        if candidate.library.layer == Layer::Framework && !self.search.framework {
            return Some(NO_FRAMEWORK.to_string());
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
            let points = candidate
                .library
                .points()
                .map_err(|error| format!("{error:#}"))?;
            let point = points.iter().find(|point| {
                let mut hooked = attachments.iter().filter(|a| a.refused.is_none());
                hooked.any(|attachment| attachment.symbol == point.symbol)
            });
            let Some(point) = point else { continue };
            let path = &candidate.library.open_path;
            match samefile::is_hooked_file(path, point.offset, point.counter) {
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
}

fn tell(library: &str, outcome: &Outcome) {
    match outcome {
        Outcome::Attached(attachments) => {
            let (hooked, refused): (Vec<_>, Vec<_>) =
                attachments.iter().partition(|a| a.refused.is_none());
            info!(library, hooked = hooked.len(), "hooked");
            for attachment in refused {
                let reason = attachment.refused.as_deref().unwrap_or_default();
                // Every version lacks some functions of others.
                if reason == NOT_EXPORTED {
                    continue;
                }
                warn!(library, symbol = attachment.symbol, reason, "not hooked");
            }
        }
        Outcome::Refused(reason) => info!(library, reason, "not hooked"),
    }
}
