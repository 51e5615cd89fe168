//! Library files that programs are likely to load, found before any process maps them.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::host::library::{self, FileId};

/// The loader's default places, and the vendor's.
const DEFAULT_FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

/// Folders and what was found in them. A folder is read again only when it has changed: a system
/// folder holds thousands of names.
#[derive(Default)]
pub(super) struct Likely {
    folders: HashMap<PathBuf, (Option<SystemTime>, Vec<PathBuf>)>,
}

impl Likely {
    /// The files, each inode once: those beside the names in `folders` and those in the loader's
    /// default places.
    pub fn find(&mut self, folders: &[PathBuf]) -> Vec<PathBuf> {
        let mut found = HashMap::new();
        let places = folders.iter().map(PathBuf::as_path);
        for folder in places.chain(DEFAULT_FOLDERS.iter().map(Path::new)) {
            for path in self.in_folder(folder) {
                if let Ok(id) = FileId::of(path) {
                    found.entry(id).or_insert_with(|| path.clone());
                }
            }
        }
        found.into_values().collect()
    }

    fn in_folder(&mut self, folder: &Path) -> &[PathBuf] {
        let changed = fs::metadata(folder).and_then(|m| m.modified()).ok();
        let known = self.folders.get(folder).map(|(at, _)| *at);
        // A change within the clock's grain of the last reading would go unseen: a folder is
        // trusted only once it has been at rest for a while.
        let at_rest = changed
            .and_then(|at| at.elapsed().ok())
            .is_some_and(|age| age.as_secs() >= 2);
        if known != Some(changed) || !at_rest {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            let files = entries
                .map(|entry| entry.path())
                .filter(|path| library::layer_of(&path.to_string_lossy()).is_some())
                .collect();
            self.folders.insert(folder.into(), (changed, files));
        }
        self.folders
            .get(folder)
            .map_or(&[], |(_, files)| files.as_slice())
    }
}
