//! Files with code that stacks run through, held open so that names can still be found when the
//! process is gone or the file was replaced.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use object::{Object, ReadCache};

use super::rules::Rules;
use crate::host::procfs::Mapping;

/// Index into [`Modules`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleId(usize);

/// One file.
pub struct Module {
    /// Path as the process that mapped it first sees it.
    pub path: String,
    /// Hexadecimal GNU build id, if the file has one.
    pub build_id: Option<String>,
    /// `None` if it could not be opened any more.
    file: Option<File>,
    /// Rules for unwinding its code.
    rules: Option<Arc<Rules>>,
}

/// What stands for code of no file, which a program made while it ran.
const ANONYMOUS: &str = "[jit]";

/// Files that are held open, well below the usual limit of 1024 open files; beyond it modules
/// keep path and build id alone.
const MAX_OPEN: usize = 512;

impl Module {
    /// What names the code on every host.
    pub fn identity(&self) -> &str {
        self.build_id.as_deref().unwrap_or_else(|| self.file_name())
    }

    pub fn file_name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// A path that opens this very file.
    pub fn open_path(&self) -> Option<PathBuf> {
        self.file
            .as_ref()
            .map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()).into())
    }
}

/// All modules seen, by device and inode.
#[derive(Default)]
pub struct Modules {
    all: Vec<Module>,
    by_file: HashMap<(u64, u64, String), ModuleId>,
}

impl Modules {
    pub fn get(&self, id: ModuleId) -> &Module {
        &self.all[id.0]
    }

    /// The module of a mapping. The path is part of the key: an inode number is given out again
    /// after its file was removed.
    pub fn intern(&mut self, pid: u32, mapping: &Mapping) -> ModuleId {
        let key = (mapping.device, mapping.inode, mapping.path.clone());
        if let Some(id) = self.by_file.get(&key) {
            return *id;
        }
        let file = open(pid, mapping);
        let rules = file.as_ref().and_then(Rules::read).map(Arc::new);
        let build_id = file.as_ref().and_then(build_id);
        let file = file.filter(|_| self.all.len() < MAX_OPEN);
        let id = ModuleId(self.all.len());
        self.all.push(Module {
            path: mapping.path.clone(),
            build_id,
            file,
            rules,
        });
        self.by_file.insert(key, id);
        id
    }

    /// Rules for unwinding a module's code, if it has any.
    pub fn rules(&self, id: ModuleId) -> Option<Arc<Rules>> {
        self.get(id).rules.clone()
    }

    /// What stands for code of no file. It has the same name everywhere, so that stacks through it
    /// group.
    pub fn anonymous(&mut self) -> ModuleId {
        let key = (0, 0, ANONYMOUS.to_string());
        *self.by_file.entry(key).or_insert_with(|| {
            self.all.push(Module {
                path: ANONYMOUS.to_string(),
                build_id: None,
                file: None,
                rules: None,
            });
            ModuleId(self.all.len() - 1)
        })
    }
}

/// The mapped file. Of a process that is gone, the file at its path will do if it is the same one.
fn open(pid: u32, mapping: &Mapping) -> Option<File> {
    File::open(mapping.open_path(pid)).ok().or_else(|| {
        let file = File::open(&mapping.path).ok()?;
        let found = file.metadata().ok()?;
        ((found.dev(), found.ino()) == (mapping.device, mapping.inode)).then_some(file)
    })
}

fn build_id(file: &File) -> Option<String> {
    let cache = ReadCache::new(file.try_clone().ok()?);
    let elf = object::File::parse(&cache).ok()?;
    let bytes = elf.build_id().ok()??;
    Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
