//! Where things are: the checkout, cargo's target folder, and what the builds put there.
//!
//! The target folder is asked of cargo, never assumed: `CARGO_TARGET_DIR` and configuration
//! files may put it anywhere (CI keeps it in the user's cache).

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The checkout and its output folders.
#[derive(Debug, Clone)]
pub struct Project {
    /// The workspace root.
    pub root: PathBuf,
    /// Cargo's target folder.
    pub target: PathBuf,
}

impl Project {
    /// Finds the checkout that cargo runs this program in, or else the one it was built from, and
    /// asks cargo for its target folder. Two checkouts with one target folder share the program.
    pub fn find() -> Result<Self> {
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = package
            .parent()
            .context("xtask lies in no folder")?
            .to_path_buf();
        if !root.join("Cargo.toml").is_file() {
            bail!(
                "{} is gone: run `cargo xtask` in the checkout again",
                root.display()
            );
        }
        let output = Command::new(cargo())
            .args([
                "metadata",
                "--no-deps",
                "--offline",
                "--format-version",
                "1",
            ])
            .current_dir(&root)
            .output()
            .context("failed to run cargo")?;
        if !output.status.success() {
            bail!(
                "cargo metadata failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let metadata: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("failed to read cargo metadata")?;
        let target = metadata["target_directory"]
            .as_str()
            .context("cargo metadata names no target folder")?;
        Ok(Self {
            root,
            target: PathBuf::from(target),
        })
    }

    /// A program of the workspace, as the dev profile builds it.
    pub fn binary(&self, name: &str) -> PathBuf {
        self.target.join("debug").join(name)
    }

    /// Folder of the stand-in libraries.
    pub fn standins(&self) -> PathBuf {
        self.target.join("standins")
    }

    /// A program of the workspace, as the release profile builds it for benchmarks.
    pub fn release_binary(&self, name: &str) -> PathBuf {
        self.target.join("release").join(name)
    }

    /// The library that benchmarks hook and call.
    pub fn callee(&self) -> PathBuf {
        self.target.join("release/libvramscope_bench_callee.so")
    }

    /// Folder of the stand-in libraries of the release profile.
    pub fn release_standins(&self) -> PathBuf {
        self.target.join("release-standins")
    }

    /// The kernel side's object file, which the agent embeds.
    pub fn bpf_object(&self) -> PathBuf {
        self.target.join("ebpf").join("vramscope.bpf.o")
    }
}

/// The cargo that started us, or the one on the path.
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// A cargo command in the checkout, cleaned of what `cargo run` put into our environment, so
/// that builds started here and by hand have the same fingerprints and share their work.
pub fn cargo_command(project: &Project) -> Command {
    let mut command = Command::new(cargo());
    command.current_dir(&project.root);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let from_cargo_run = name.starts_with("CARGO_PKG_")
            || name.starts_with("CARGO_MANIFEST_")
            || name.starts_with("CARGO_BIN_")
            || name == "CARGO_PRIMARY_PACKAGE"
            || name == "CARGO_CRATE_NAME"
            || name == "LD_LIBRARY_PATH";
        if from_cargo_run {
            command.env_remove(&name);
        }
    }
    command
}
