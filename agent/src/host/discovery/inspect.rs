//! A look at one process: what it runs, and which files that matter it maps.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::frameworks::{self, Framework};
use super::known::{Coverage, Likeness, WHOLE_LIBRARY};
use crate::host::identity::StartTime;
use crate::host::library::{self, FileId, Library, StaticRuntime};
use crate::host::procfs::{self, Mapping, Program};
use crate::host::realfile::RealFile;
use crate::probes::hooks::Layer;

/// A file to hook, and how certain its identity is.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub library: Library,
    pub likeness: Likeness,
    pub unresolved: Option<String>,
    /// Device and inode as `maps` has them, to know the file again when its process is gone.
    pub mapped_as: Option<FileId>,
}

impl Candidate {
    /// `path` is the file's name in the mount namespace of `pid`.
    pub fn new(
        open_path: &Path,
        path: &str,
        pid: u32,
        layer: Layer,
        is_program: bool,
    ) -> std::io::Result<Self> {
        let real = RealFile::of(open_path, path, pid)?;
        let metadata = fs::metadata(&real.open_path)?;
        Ok(Self {
            library: Library {
                id: real.id,
                path: path.to_string(),
                open_path: real.open_path,
                layer,
                is_program,
            },
            likeness: Likeness {
                bytes: metadata.len(),
                changed: (metadata.mtime(), metadata.mtime_nsec()),
            },
            unresolved: real.unresolved,
            mapped_as: None,
        })
    }
}

/// What was found.
#[derive(Debug)]
pub(super) struct Inspection {
    pub candidates: Vec<Candidate>,
    pub remarks: Vec<Coverage>,
    pub start: Option<StartTime>,
    pub program: Program,
    pub framework: Option<Framework>,
    pub mappings: Vec<Mapping>,
}

/// Looks at processes, remembering which programs have a runtime inside.
#[derive(Default)]
pub(super) struct Inspector {
    programs: HashMap<FileId, StaticRuntime>,
    pub maps_read: u64,
}

/// Programs that are remembered at most; beyond it they are looked at anew.
const PROGRAMS: usize = 4096;

impl Inspector {
    /// `Err` with the mappings if the process maps no CUDA library; they are empty if it is gone.
    pub fn inspect(&mut self, pid: u32) -> Result<Inspection, Vec<Mapping>> {
        // Before anything else: a pid may be given out again while it is looked at.
        let start = StartTime::of(pid);
        self.maps_read += 1;
        let mappings = procfs::mappings(pid);
        let mut candidates: Vec<Candidate> = Vec::new();
        for mapping in &mappings {
            let Some(layer) = library::layer_of(&mapping.path).filter(|_| mapping.executable)
            else {
                continue;
            };
            let open_path = mapping.open_path(pid);
            // The process may be gone by now.
            let Ok(mut candidate) = Candidate::new(&open_path, &mapping.path, pid, layer, false)
            else {
                continue;
            };
            candidate.mapped_as = Some(mapping.file_id());
            if !candidates
                .iter()
                .any(|known| known.library.id == candidate.library.id)
            {
                candidates.push(candidate);
            }
        }
        // Every PyTorch has libc10.so, also one without CUDA.
        let is_c10 = |candidate: &Candidate| {
            let name = candidate.library.path.rsplit('/').next();
            name.is_some_and(|name| name.starts_with("libc10.so"))
        };
        if candidates.iter().all(is_c10) {
            return Err(mappings);
        }
        let program = Program::of(pid);
        let framework = frameworks::of_process(pid, &mappings);
        let mut remarks = frameworks::remarks(&mappings);
        let maps = |layer| candidates.iter().any(|c| c.library.layer == layer);
        let (has_driver, has_runtime) = (maps(Layer::Driver), maps(Layer::Runtime));
        if let Some(exe) = program.exe.as_ref().filter(|_| has_driver) {
            match self.runtime_inside(pid, exe) {
                Some((candidate, StaticRuntime::Present)) => candidates.push(candidate),
                Some((_, StaticRuntime::Stripped)) if !has_runtime => remarks.push(Coverage {
                    library: exe.clone(),
                    symbol: WHOLE_LIBRARY,
                    refused: Some(
                        "no symbol table: a runtime linked into it is not hooked; the driver layer sees its calls"
                            .into(),
                    ),
                }),
                _ => {}
            }
        }
        Ok(Inspection {
            candidates,
            remarks,
            start,
            program,
            framework,
            mappings,
        })
    }

    fn runtime_inside(&mut self, pid: u32, exe: &str) -> Option<(Candidate, StaticRuntime)> {
        let open_path = format!("/proc/{pid}/exe");
        let path = exe.strip_suffix(" (deleted)").unwrap_or(exe);
        let candidate =
            Candidate::new(Path::new(&open_path), path, pid, Layer::Runtime, true).ok()?;
        let id = candidate.library.id;
        if let Some(found) = self.programs.get(&id) {
            return Some((candidate, *found));
        }
        // A file that cannot be read as a program has nothing to hook.
        let found = candidate
            .library
            .static_runtime()
            .unwrap_or(StaticRuntime::Absent);
        if self.programs.len() >= PROGRAMS {
            self.programs.clear();
        }
        self.programs.insert(id, found);
        Some((candidate, found))
    }
}
