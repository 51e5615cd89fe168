//! What is known of hooks and of the processes that map hooked files; shared between the thread
//! that searches and the one that drains.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::frameworks::Framework;
use crate::host::identity::StartTime;
use crate::host::library::FileId;
use crate::host::procfs::{Mapping, Program};
use crate::probes::bpf::Attachment;
use crate::probes::features::Checks;
use crate::python::Found;

/// The symbol in a row of coverage that is about a whole library.
pub const WHOLE_LIBRARY: &str = "*";

/// See the module's text.
#[derive(Default)]
pub struct Known {
    pub(super) libraries: HashMap<FileId, Hooked>,
    pub(super) processes: HashMap<u32, Seen>,
    pub(super) state: Report,
    /// Interpreters by process.
    pub(super) pythons: HashMap<u32, Found>,
    /// Why the probes are being taken out at this moment.
    pub(super) turning_off: Option<String>,
}

/// What was done with one file.
#[derive(Debug, Clone)]
pub(super) struct Hooked {
    pub path: String,
    pub open_path: PathBuf,
    /// Length and time of change, which a file has through every overlay.
    pub likeness: Likeness,
    /// Its identity is not certain: see [`crate::host::realfile`].
    pub unresolved: Option<String>,
    pub outcome: Outcome,
}

/// What two paths to one file have in common for certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Likeness {
    pub bytes: u64,
    pub changed: (i64, i64),
}

#[derive(Debug, Clone)]
pub(super) enum Outcome {
    Attached(Vec<Attachment>),
    /// The whole file, and why.
    Refused(String),
}

/// A process that maps hooked libraries, as it was when it was looked at: it may be gone when its
/// events are read.
#[derive(Debug, Clone)]
pub struct Seen {
    pub(super) libraries: Vec<FileId>,
    /// What else is to be said of this process: its program has no symbol table.
    pub(super) remarks: Vec<Coverage>,
    pub(super) at: Instant,
    pub start: StartTime,
    pub program: Program,
    /// The framework whose allocator it maps.
    pub framework: Option<Framework>,
    pub mappings: Vec<Mapping>,
}

/// One symbol of one library that a process maps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Coverage {
    pub library: String,
    pub symbol: &'static str,
    pub refused: Option<String>,
}

/// How the search goes, for `status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// New mappings are seen at once; otherwise every process is searched at each interval.
    pub watching: bool,
    /// How new mappings are noticed, and why so.
    pub watch: String,
    /// Records that the watch lost; each time all processes are searched.
    pub watch_lost: u64,
    /// Searches of the list of processes so far.
    pub scans: u64,
    /// Processes whose mappings were read so far.
    pub maps_read: u64,
    /// Frameworks' allocators are hooked.
    #[serde(default)]
    pub framework: bool,
    /// One link hooks a whole library; otherwise there is a perf event for each function.
    pub uprobe_multi: bool,
    /// Why probes are switched off and all out; `None` if they are on.
    pub off: Option<String>,
    /// Interpreters whose frames are read, and the others with the reason: process, file, version.
    #[serde(default)]
    pub pythons: Vec<Python>,
    /// Files that are not hooked as a whole, and why.
    pub refused: Vec<(String, String)>,
    /// What this kernel can do.
    pub checks: Option<Checks>,
}

/// An interpreter, for `status`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Python {
    pub pid: u32,
    pub library: String,
    /// Of a version that is known.
    pub version: Option<String>,
    /// Why its frames are not read.
    pub refused: Option<String>,
}

/// What `coverage.symbol` says in a row about an interpreter.
pub const PYTHON_FRAMES: &str = "python frames";

/// Interpreters that `status` lists.
const LISTED: usize = 64;

impl Known {
    /// The interpreter that was found in a process.
    pub fn python(&self, pid: u32) -> Option<&Found> {
        self.pythons.get(&pid)
    }

    /// Hooks of the libraries that a process maps; empty if none was found (yet).
    pub fn coverage(&self, pid: u32) -> Vec<Coverage> {
        let Some(seen) = self.processes.get(&pid) else {
            return Vec::new();
        };
        let mut coverage: Vec<Coverage> = seen
            .libraries
            .iter()
            .filter_map(|id| self.libraries.get(id))
            .flat_map(Hooked::coverage)
            .collect();
        coverage.extend(seen.remarks.iter().cloned());
        let python = self.pythons.get(&pid);
        if let Some((found, reason)) = python.and_then(|p| Some((p, p.layout.as_ref().err()?))) {
            coverage.push(Coverage {
                library: found.library.clone(),
                symbol: PYTHON_FRAMES,
                refused: Some(reason.clone()),
            });
        }
        coverage
    }

    /// Changes with [`Self::coverage`]; 0 if that is empty.
    pub fn coverage_mark(&self, pid: u32) -> u64 {
        let coverage = self.coverage(pid);
        if coverage.is_empty() {
            return 0;
        }
        let mut hasher = DefaultHasher::new();
        coverage.hash(&mut hasher);
        hasher.finish() | 1
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
        let rows: Vec<_> = self.libraries.values().flat_map(Hooked::coverage).collect();
        let yes = rows.iter().filter(|row| row.refused.is_none()).count();
        (yes, rows.len() - yes)
    }

    pub fn libraries(&self) -> Vec<String> {
        self.libraries
            .values()
            .map(|hooked| hooked.path.clone())
            .collect()
    }

    /// Why probes are switched off, or about to be; `None` if they are on.
    pub fn off(&self) -> Option<&str> {
        let off = self.turning_off.as_ref().or(self.state.off.as_ref());
        off.map(String::as_str)
    }

    pub fn report(&self) -> Report {
        let mut report = self.state.clone();
        report.refused = self
            .libraries
            .values()
            .filter_map(|hooked| match &hooked.outcome {
                Outcome::Refused(reason) => Some((hooked.path.clone(), reason.clone())),
                Outcome::Attached(_) => None,
            })
            .collect();
        report.refused.sort();
        report.pythons = self
            .pythons
            .iter()
            .map(|(pid, found)| Python {
                pid: *pid,
                library: found.library.clone(),
                version: found
                    .layout
                    .as_ref()
                    .ok()
                    .map(|l| format!("3.{}", l.version)),
                refused: found.layout.as_ref().err().cloned(),
            })
            .collect();
        report.pythons.sort();
        report.pythons.truncate(LISTED);
        report
    }
}

impl Hooked {
    /// Whether a path leads to the file, so that a program may load it.
    pub fn is_reachable(&self, id: FileId) -> bool {
        [self.open_path.as_path(), Path::new(&self.path)]
            .iter()
            .any(|path| FileId::of(path).is_ok_and(|found| found == id))
    }

    fn coverage(&self) -> Vec<Coverage> {
        let row = |symbol, refused| Coverage {
            library: self.path.clone(),
            symbol,
            refused,
        };
        match &self.outcome {
            Outcome::Attached(attachments) => attachments
                .iter()
                .map(|a| row(a.symbol, a.refused.clone()))
                .collect(),
            Outcome::Refused(reason) => vec![row(WHOLE_LIBRARY, Some(reason.clone()))],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hooked(outcome: Outcome) -> Hooked {
        Hooked {
            path: "/lib/libcuda.so.1".into(),
            open_path: "/lib/libcuda.so.1".into(),
            likeness: Likeness::default(),
            unresolved: None,
            outcome,
        }
    }

    #[test]
    fn a_refused_library_is_one_row_and_changes_the_mark() {
        let id = FileId {
            device: 1,
            inode: 2,
        };
        let mut known = Known::default();
        known.processes.insert(
            7,
            Seen {
                libraries: vec![id],
                remarks: Vec::new(),
                at: Instant::now(),
                start: StartTime(1),
                program: Program::default(),
                framework: None,
                mappings: Vec::new(),
            },
        );
        assert_eq!(known.coverage_mark(7), 0);
        let attachment = Attachment {
            symbol: "cuMemAlloc_v2",
            refused: None,
        };
        known
            .libraries
            .insert(id, hooked(Outcome::Attached(vec![attachment])));
        let before = known.coverage_mark(7);
        assert_eq!(known.hooked(), (1, 0));
        known
            .libraries
            .insert(id, hooked(Outcome::Refused("because".into())));
        assert_ne!(known.coverage_mark(7), before);
        assert_eq!(
            known.coverage(7),
            [Coverage {
                library: "/lib/libcuda.so.1".into(),
                symbol: "*",
                refused: Some("because".into()),
            }]
        );
        assert_eq!(known.hooked(), (0, 1));
        assert_eq!(known.report().refused[0].1, "because");
    }
}
