//! Finds the interpreter of a process: libpython, or a program with one inside.
//!
//! Files are opened through `/proc/PID/map_files`, so that containers, virtual environments and
//! replaced files make no difference, and are looked at once each.

use std::collections::HashMap;
use std::path::Path;

use tracing::{info, warn};
use vramscope_ebpf_abi::python::{Interpreter, NO_SPECIFIC};

use super::elf::{self, Image};
use super::layout::{self, DEBUG_OFFSETS, Members};
use super::memory::Memory;
use super::table::Table;
use crate::host::identity::StartTime;
use crate::host::library::FileId;
use crate::host::procfs::Mapping;

/// Files that are remembered at most; beyond it they are looked at anew.
const FILES: usize = 4096;

/// `tp_members` in `PyTypeObject`, and what one `PyMemberDef` takes and holds (`Include/object.h`,
/// `Include/structmember.h`): its name's address at 0, the offset at 16.
const TYPE_MEMBERS: u64 = 240;
const MEMBER_BYTES: u64 = 40;
const MEMBER_OFFSET: u64 = 16;
/// A code object has some twenty members.
const MEMBERS: u64 = 64;

/// An interpreter that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Path of its file, as the process sees it.
    pub library: String,
    /// Where it keeps things, or why its frames are not read.
    pub layout: Result<Interpreter, String>,
}

/// Looks at processes.
#[derive(Default)]
pub struct Detector {
    images: HashMap<FileId, Option<Image>>,
    /// `specific` of each C library.
    specific: HashMap<FileId, Option<u32>>,
}

impl Detector {
    /// The interpreter of a process; `exe`: its program. `None` if it maps none (yet).
    pub fn find(&mut self, pid: u32, exe: Option<&str>, mappings: &[Mapping]) -> Option<Found> {
        let is_candidate = |mapping: &&Mapping| {
            mapping.executable
                && (super::is_library(&mapping.path) || exe == Some(mapping.path.as_str()))
        };
        mappings.iter().filter(is_candidate).find_map(|mapping| {
            let image = self.image(pid, mapping)?;
            Some(Found {
                library: mapping.path.clone(),
                layout: self.layout(pid, mapping, mappings, &image),
            })
        })
    }

    fn image(&mut self, pid: u32, mapping: &Mapping) -> Option<Image> {
        if self.images.len() >= FILES {
            self.images.clear();
        }
        let path = mapping.open_path(pid);
        let image = self.images.entry(mapping.file_id());
        image.or_insert_with(|| Image::read(&path)).clone()
    }

    fn specific(&mut self, pid: u32, mappings: &[Mapping]) -> Option<u32> {
        // Before glibc 2.34 threads had a library of their own.
        let is_libc = |mapping: &&Mapping| {
            let name = mapping.path.rsplit('/').next().unwrap_or_default();
            mapping.executable
                && ["libc.so", "libc-", "libpthread"]
                    .iter()
                    .any(|start| name.starts_with(start))
        };
        if self.specific.len() >= FILES {
            self.specific.clear();
        }
        mappings.iter().filter(is_libc).find_map(|mapping| {
            let path = mapping.open_path(pid);
            let known = self.specific.entry(mapping.file_id());
            *known.or_insert_with(|| elf::pthread_specific(&path))
        })
    }

    fn layout(
        &mut self,
        pid: u32,
        mapping: &Mapping,
        mappings: &[Mapping],
        image: &Image,
    ) -> Result<Interpreter, String> {
        let gone = || "the process is gone".to_string();
        let memory = Memory::of(pid).ok_or_else(gone)?;
        let bias = image
            .bias(mapping)
            .ok_or("its file is mapped in an unknown way")?;
        let address = |at: u64| at.wrapping_add(bias);
        let members = members(&memory, address(image.code_type)).ok_or_else(gone)?;
        let version = match image.version {
            // As in sys.hexversion: major, minor, micro, level.
            Some(at) => {
                let version = memory.u32(address(at)).ok_or_else(gone)?;
                if version >> 24 != 3 {
                    return Err(format!("CPython of version {version:#x} is unknown"));
                }
                version >> 16 & 0xff
            }
            // 3.11 brought the word, 3.10 the line table.
            None if members.table.is_some() => 10,
            None => return Err("CPython before 3.10: frames are read of 3.10 to 3.13".into()),
        };
        let debug = memory
            .bytes(address(image.runtime), DEBUG_OFFSETS)
            .ok_or_else(gone)?;
        let mut layout = layout::layout(version, &members, &debug)?;
        let told = image
            .accessor
            .as_ref()
            .and_then(|(at, code)| layout::key_from_code(code, *at, image.runtime));
        if let Some(told) = told.filter(|told| *told != layout.key) {
            info!(
                pid,
                library = mapping.path,
                told,
                table = layout.key,
                "the interpreter's code tells of another place of its key than the table"
            );
            layout.key = told;
        }
        layout.runtime = address(image.runtime);
        layout.key += layout.runtime + 4;
        layout.code_type = address(image.code_type);
        layout.specific = self.specific(pid, mappings).unwrap_or(NO_SPECIFIC);
        Ok(layout)
    }
}

/// Offsets of the members of code objects, from their type. `None` if it cannot be read.
fn members(memory: &Memory, code_type: u64) -> Option<Members> {
    let mut members = Members::default();
    let mut at = memory.u64(code_type + TYPE_MEMBERS)?;
    for _ in 0..MEMBERS {
        let name = memory.u64(at)?;
        if name == 0 {
            break;
        }
        let offset = u32::try_from(memory.u64(at + MEMBER_OFFSET)?).ok();
        match memory.text(name).as_deref() {
            Some("co_filename") => members.file = offset,
            Some("co_name") => members.name = offset,
            Some("co_qualname") => members.qualified_name = offset,
            Some("co_linetable") => members.table = offset,
            Some("co_firstlineno") => members.first_line = offset,
            _ => {}
        }
        at += MEMBER_BYTES;
    }
    Some(members)
}

/// What the search keeps of Python: looks at processes, and tells the kernel side.
pub struct Pythons {
    detector: Detector,
    table: Option<Table>,
    /// What all entries have in common.
    pub fsbase: u32,
    pub framework_limit: u32,
    /// What was told of which process, by its time of start.
    known: HashMap<u32, (StartTime, Found)>,
}

impl Pythons {
    /// `table`: the kernel side's, if it can read frames and is to.
    pub fn new(table: Option<Table>, fsbase: u32, framework_limit: u32) -> Self {
        Self {
            detector: Detector::default(),
            table,
            fsbase,
            framework_limit,
            known: HashMap::new(),
        }
    }

    /// Looks for a process's interpreter, unless it is known. Gives what is new.
    pub fn look(
        &mut self,
        pid: u32,
        start: StartTime,
        exe: Option<&str>,
        mappings: &[Mapping],
    ) -> Option<&Found> {
        let table = self.table.as_mut()?;
        if self.known.get(&pid).is_some_and(|(then, _)| *then == start) {
            return None;
        }
        let mut found = self.detector.find(pid, exe, mappings)?;
        match &mut found.layout {
            Ok(layout) => {
                layout.fsbase = self.fsbase;
                layout.framework_limit = self.framework_limit;
                if let Err(error) = table.set(pid, layout) {
                    found.layout = Err(format!("{error:#}"));
                }
            }
            Err(reason) => {
                warn!(pid, library = found.library, %reason, "Python frames are not read");
            }
        }
        self.known.insert(pid, (start, found));
        self.known.get(&pid).map(|(_, found)| found)
    }

    /// A process is gone, or runs another program.
    pub fn forget(&mut self, pid: u32) {
        if self.known.remove(&pid).is_some()
            && let Some(table) = &mut self.table
        {
            table.remove(pid);
        }
    }

    /// Takes out what an earlier agent told of processes that are gone.
    pub fn clean(&mut self) {
        let Some(table) = &mut self.table else { return };
        for pid in table.pids() {
            if !Path::new(&format!("/proc/{pid}")).exists() {
                table.remove(pid);
            }
        }
    }
}
