//! `cargo xtask ebpf`: builds the kernel side and puts the object where the agent's build
//! embeds it.
//!
//! The kernel side is a workspace of its own: another target, another `core`, and none of the
//! flags, toolchain overrides or target settings that the outer cargo was started with.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use super::setup::{self, Toolchain};
use crate::progress::{self, Step};
use crate::project::{Project, cargo_command};

const TARGET: &str = "bpfel-unknown-none";
/// Name of the binary in `ebpf/Cargo.toml`.
const BINARY: &str = "vramscope";
/// The flags of `ebpf/.cargo/config.toml`, which explains them. They are said again in the
/// environment because it replaces configured flags, while cargo would add those of the
/// checkout's own configuration (frame pointers) to the kernel side's.
const RUSTFLAGS: &str = "-C linker=bpf-linker -C target-cpu=v3 -C debuginfo=2 -C link-arg=--btf";

/// Builds the kernel side (sets up its tools first).
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask ebpf    build target/ebpf/vramscope.bpf.o; the next build of the agent embeds it")]
pub struct Ebpf {}

/// The command.
pub fn run(project: &Project, _options: &Ebpf) -> Result<()> {
    let toolchain = setup::ensure(project)?;
    build(project, &toolchain)?;
    println!("{}", project.bpf_object().display());
    Ok(())
}

/// Builds the object and copies it to [`Project::bpf_object`] if it changed.
pub fn build(project: &Project, toolchain: &Toolchain) -> Result<()> {
    let folder = project.target.join("ebpf");
    let mut command = command(project, toolchain, &folder);
    let step = Step::start("building the kernel side");
    progress::run(step, &mut command, |line, step| {
        step.at(0, line);
        false
    })?;
    let built = folder.join(TARGET).join("release").join(BINARY);
    copy_if_changed(&built, &project.bpf_object())
}

fn command(project: &Project, toolchain: &Toolchain, folder: &Path) -> Command {
    let mut command = cargo_command(project);
    // Not the outer build's: another rustc works here, with other flags, for another target.
    for name in [
        "RUSTUP_TOOLCHAIN",
        "CARGO",
        "RUSTC",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "CARGO_BUILD_RUSTFLAGS",
    ] {
        command.env_remove(name);
    }
    command
        .current_dir(project.root.join("ebpf"))
        .env("RUSTFLAGS", RUSTFLAGS);
    match toolchain {
        Toolchain::Packaged { rustc } => {
            // The packaged rustc is a stable one; aya-ebpf uses unstable features.
            command.env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "1");
        }
        Toolchain::Nightly => {
            command
                .env("RUSTUP_TOOLCHAIN", "nightly")
                .env_remove("RUSTC_BOOTSTRAP")
                .args(["-Z", "build-std=core"]);
        }
    }
    command
        .args(["build", "--release", "--target", TARGET, "--target-dir"])
        .arg(folder);
    command
}

/// An unchanged object keeps its time stamp, so that the agent is not built again.
fn copy_if_changed(from: &Path, to: &Path) -> Result<()> {
    let new = std::fs::read(from).with_context(|| format!("failed to read {}", from.display()))?;
    let unchanged = std::fs::read(to).is_ok_and(|old| old == new);
    if unchanged {
        return Ok(());
    }
    let partial = to.with_extension("partial");
    std::fs::write(&partial, &new)
        .and_then(|()| std::fs::rename(&partial, to))
        .with_context(|| format!("failed to write {}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Building here and building by hand in `ebpf/` use the same flags.
    #[test]
    fn flags_are_those_of_the_configuration() {
        let path = format!(
            "{}/../ebpf/.cargo/config.toml",
            std::env::var("CARGO_MANIFEST_DIR").unwrap()
        );
        let config = std::fs::read_to_string(path).unwrap();
        let line = config
            .lines()
            .find_map(|line| line.strip_prefix("rustflags = "))
            .unwrap();
        let flags: Vec<String> = serde_json::from_str(line).unwrap();
        assert_eq!(flags.join(" "), RUSTFLAGS);
    }

    /// Copying an equal object leaves the copy alone; a different one replaces it.
    #[test]
    fn copies_only_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b.o"));
        std::fs::write(&from, b"one").unwrap();
        copy_if_changed(&from, &to).unwrap();
        let written = std::fs::metadata(&to).unwrap().modified().unwrap();
        copy_if_changed(&from, &to).unwrap();
        assert_eq!(std::fs::metadata(&to).unwrap().modified().unwrap(), written);
        std::fs::write(&from, b"two").unwrap();
        copy_if_changed(&from, &to).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"two");
    }
}
