//! What a reader of Delta Lake sees change in a lake: the moments that kills are aimed at.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Names of data files and log entries of the tables, as any reader of Delta Lake sees them.
#[derive(Debug, PartialEq, Eq)]
pub struct Listing(BTreeSet<PathBuf>);

impl Listing {
    /// What is there now.
    pub fn of(data: &Path) -> Listing {
        let mut names = BTreeSet::new();
        let mut folders = vec![data.to_path_buf()];
        while let Some(folder) = folders.pop() {
            // A folder that goes meanwhile has no files.
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = entry.path();
                let name = entry.file_name();
                let is_own = name.to_string_lossy().starts_with('_') && folder == data;
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() && !is_own => folders.push(path),
                    Ok(kind) if kind.is_file() => {
                        names.insert(path);
                    }
                    _ => {}
                }
            }
        }
        Listing(names)
    }

    /// Whether a log entry that is new takes a file out of its table.
    pub fn removes_since(&self, before: &Listing) -> bool {
        let new = self.0.difference(&before.0);
        let mut entries = new.filter(|path| path.extension().is_some_and(|e| e == "json"));
        entries
            .any(|path| std::fs::read_to_string(path).is_ok_and(|text| text.contains("\"remove\"")))
    }
}
