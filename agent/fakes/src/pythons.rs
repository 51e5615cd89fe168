//! Interpreters that are installed here, for tests.

use std::path::{Path, PathBuf};
use std::process::Command;

/// An interpreter of that version: on the search path, or installed by pyenv. `None` if there is
/// none.
pub fn find(minor: u32) -> Option<PathBuf> {
    let name = format!("python3.{minor}");
    let runs = |program: &Path| {
        let code = "import sys; print(sys.executable, *sys.version_info[:2])";
        let output = Command::new(program).args(["-c", code]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let exe = text.trim().strip_suffix(&format!(" 3 {minor}"))?;
        Some(PathBuf::from(exe))
    };
    // A launcher of pyenv's may have another version behind it, or none.
    runs(Path::new(&name)).or_else(|| {
        let output = Command::new("pyenv")
            .args(["versions", "--bare"])
            .output()
            .ok()?;
        let versions = String::from_utf8(output.stdout).ok()?;
        let prefix = format!("3.{minor}.");
        let version = versions
            .lines()
            .map(str::trim)
            .find(|v| v.starts_with(&prefix))?;
        let output = Command::new("pyenv")
            .args(["prefix", version])
            .output()
            .ok()?;
        let folder = String::from_utf8(output.stdout).ok()?;
        runs(&Path::new(folder.trim()).join("bin").join(&name))
    })
}
