//! The kill switch: a file that says that this host's programs are not to be probed.
//!
//! It is a file so that it works without the agent, survives a reboot, and can be written by any
//! tool that manages the host. Its content is the reason, for people.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context;

/// Why probes are off; `None` if they are on. A file that cannot be read counts: better off than
/// against somebody's will.
pub fn off(file: &Path, probes: bool) -> Option<String> {
    if !probes {
        return Some("switched off: probes = false in the configuration".to_string());
    }
    let place = file.display();
    match fs::read_to_string(file) {
        Ok(reason) if reason.trim().is_empty() => Some(format!("switched off by {place}")),
        Ok(reason) => Some(format!("switched off by {place}: {}", reason.trim())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        // A part of the path is a file: there can be no such file.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => None,
        Err(error) => Some(format!("switched off: {place} cannot be read ({error})")),
    }
}

/// Turns the switch off.
pub fn turn_off(file: &Path, reason: &str) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("failed to create {}", folder.display()))?;
    }
    fs::write(file, format!("{reason}\n"))
        .with_context(|| format!("failed to write {}", file.display()))
}

/// Turns it on again. False if it was on.
pub fn turn_on(file: &Path) -> anyhow::Result<bool> {
    match fs::remove_file(file) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("failed to remove {}", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_and_on() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/off");
        assert_eq!(off(&file, true), None);
        turn_off(&file, "ticket 12").unwrap();
        let reason = off(&file, true).unwrap();
        assert!(reason.ends_with("new/off: ticket 12"), "{reason}");
        assert!(turn_on(&file).unwrap() && !turn_on(&file).unwrap());
        assert_eq!(off(&file, true), None);
        assert!(off(&file, false).unwrap().contains("probes = false"));
        fs::create_dir(&file).unwrap();
        assert!(off(&file, true).unwrap().contains("cannot be read"));
    }
}
