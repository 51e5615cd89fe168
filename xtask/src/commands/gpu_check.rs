//! `cargo xtask gpu-check`: one self-contained folder to carry to a machine with a GPU. What it
//! checks there is in `xtask/gpu-check/gpu_check.py`; how to use it, in `docs/gpu-check.md`.
//!
//! Nothing is built or fetched on that machine: the folder holds the agent, stripped, and two
//! scripts.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::build;
use crate::progress::Step;
use crate::project::Project;

const SCRIPTS: [(&str, &str); 2] = [
    ("run.sh", include_str!("../../gpu-check/run.sh")),
    ("gpu_check.py", include_str!("../../gpu-check/gpu_check.py")),
];

/// The folder travels over links with limits.
const LIMIT_BYTES: u64 = 60 << 20;

/// Prepares a folder whose run.sh checks vramscope on a machine with a GPU.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask gpu-check                    prepare target/gpu-check
  cargo xtask gpu-check --output /mnt/usb/check
  sudo target/gpu-check/run.sh > report.json    on the machine with the GPU")]
pub struct GpuCheck {
    /// Where to; what is there under the same names is replaced
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// The command.
pub fn run(project: &Project, options: &GpuCheck) -> Result<()> {
    let folder = options
        .output
        .clone()
        .unwrap_or_else(|| project.target.join("gpu-check"));
    build::for_measuring(project)?;
    prepare(&project.release_binary("vramscope-agent"), &folder)?;
    println!("{}", folder.display());
    Ok(())
}

/// Fills the folder with an agent and the scripts.
pub fn prepare(agent: &Path, folder: &Path) -> Result<()> {
    let step = Step::start("filling the folder");
    std::fs::create_dir_all(folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    let stripped = folder.join("vramscope-agent");
    strip(agent, &stripped)?;
    for (name, text) in SCRIPTS {
        let path = folder.join(name);
        std::fs::write(&path, text)
            .and_then(|()| std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)))
            .with_context(|| format!("failed to write {}", path.display()))?;
    }
    let mut bytes = 0;
    for name in SCRIPTS
        .map(|(name, _)| name)
        .iter()
        .chain(&["vramscope-agent"])
    {
        let path = folder.join(name);
        let metadata = std::fs::metadata(&path)
            .with_context(|| format!("failed to weigh {}", path.display()))?;
        bytes += metadata.len();
    }
    if bytes > LIMIT_BYTES {
        bail!(
            "{} holds {} MiB, more than {} MiB",
            folder.display(),
            bytes >> 20,
            LIMIT_BYTES >> 20
        );
    }
    step.done(&format!("{} MiB", bytes.div_ceil(1 << 20)));
    Ok(())
}

/// Copies a program without its symbols; as it is where there is no `strip`.
fn strip(from: &Path, to: &Path) -> Result<()> {
    // A running program's file cannot be written to, and may be replaced.
    let partial = to.with_extension("partial");
    let stripped = Command::new("strip")
        .arg("-o")
        .arg(&partial)
        .arg(from)
        .status();
    if !stripped.is_ok_and(|status| status.success()) {
        std::fs::copy(from, &partial)
            .with_context(|| format!("failed to copy {}", from.display()))?;
    }
    std::fs::set_permissions(&partial, PermissionsExt::from_mode(0o755))
        .and_then(|()| std::fs::rename(&partial, to))
        .with_context(|| format!("failed to write {}", to.display()))
}
