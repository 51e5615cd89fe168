//! `cargo xtask one-copy`: refuses a second version of the crates whose types cross crate
//! borders. Two versions of arrow compile side by side and fail only where a batch of one meets
//! a function of the other, so the lock file is checked instead.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::project::Project;

/// Crates that must be there in exactly one version.
const SINGLE: [&str; 5] = ["arrow", "parquet", "tonic", "prost", "object_store"];

/// Checks that shared crates are locked in one version each.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask one-copy    fails, naming the versions, if Cargo.lock has two of arrow, …")]
pub struct OneCopy {}

/// The command.
pub fn run(project: &Project, _options: &OneCopy) -> Result<()> {
    let path = project.root.join("Cargo.lock");
    let lock = std::fs::read_to_string(&path)
        .with_context(|| format!("failed to read {}", path.display()))?;
    for (name, version) in check(&lock)? {
        println!("{name} {version}");
    }
    Ok(())
}

/// The one version of each single crate, or an error that names every duplicate.
pub fn check(lock: &str) -> Result<BTreeMap<&'static str, String>> {
    let locked = versions(lock);
    let mut single = BTreeMap::new();
    let mut complaints = Vec::new();
    for name in SINGLE {
        match locked.get(name).map(Vec::as_slice) {
            Some([version]) => {
                single.insert(name, version.clone());
            }
            Some(several) => complaints.push(format!("{name} in versions {}", several.join(", "))),
            None => complaints.push(format!("no {name} at all")),
        }
    }
    if !complaints.is_empty() {
        bail!(
            "Cargo.lock has {}; `cargo tree --invert NAME@VERSION` says who asks for it",
            complaints.join("; ")
        );
    }
    Ok(single)
}

/// Versions by crate name. A lock file is TOML, but the `name`/`version` lines of its
/// `[[package]]` blocks are stable enough that a parser would only be another dependency.
fn versions(lock: &str) -> BTreeMap<&str, Vec<String>> {
    let mut found: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut name = None;
    for line in lock.lines() {
        if line == "[[package]]" {
            name = None;
        } else if let Some(value) = quoted(line, "name") {
            name = Some(value);
        } else if let (Some(version), Some(name)) = (quoted(line, "version"), name) {
            found.entry(name).or_default().push(version.to_string());
        }
    }
    found
}

fn quoted<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let value = line.strip_prefix(key)?.strip_prefix(" = \"")?;
    value.strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
version = 4

[[package]]
name = "arrow"
version = "59.3.2"
dependencies = [
 "arrow-array",
]

[[package]]
name = "arrow-array"
version = "58.0.0"

[[package]]
name = "object_store"
version = "0.13.2"

[[package]]
name = "parquet"
version = "59.3.2"

[[package]]
name = "prost"
version = "0.14.1"

[[package]]
name = "tonic"
version = "0.14.9"
"#;

    /// One version each passes; crates with a longer name do not count.
    #[test]
    fn one_of_each_passes() {
        let single = check(GOOD).unwrap();
        assert_eq!(single["arrow"], "59.3.2");
        assert_eq!(single.len(), SINGLE.len());
    }

    /// A second version fails, and both are named.
    #[test]
    fn a_second_version_is_named() {
        let two = format!("{GOOD}\n[[package]]\nname = \"arrow\"\nversion = \"57.1.0\"\n");
        let error = check(&two).unwrap_err().to_string();
        assert!(
            error.contains("arrow in versions 59.3.2, 57.1.0"),
            "{error}"
        );
    }

    /// A crate that vanished means the list here is out of date: say so.
    #[test]
    fn a_missing_crate_fails() {
        let without = GOOD.replace("name = \"tonic\"", "name = \"tonik\"");
        assert!(
            check(&without)
                .unwrap_err()
                .to_string()
                .contains("no tonic")
        );
    }

    /// The checkout's own lock file passes.
    #[test]
    fn the_real_lock_file_passes() {
        let path = format!(
            "{}/../Cargo.lock",
            std::env::var("CARGO_MANIFEST_DIR").unwrap()
        );
        check(&std::fs::read_to_string(path).unwrap()).unwrap();
    }
}
