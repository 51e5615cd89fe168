//! Public data sets that lie beside the project, not in it.

use std::path::{Path, PathBuf};

/// The folder of data sets: `shared/data` beside the project, or under the folder that
/// `VRAMSCOPE_SHARED` names.
pub fn data(file: &str) -> Option<PathBuf> {
    let project = Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../..");
    let shared = std::env::var_os("VRAMSCOPE_SHARED")
        .map_or_else(|| project.join("../shared"), PathBuf::from);
    let path = shared.join("data").join(file);
    if path.is_file() {
        return Some(path);
    }
    eprintln!("SKIPPED: no {} here", path.display());
    None
}
