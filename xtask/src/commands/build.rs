//! The build that demo, tests and benchmarks share: kernel side, workspace, stand-ins. It is the
//! dev profile throughout (see docs/decisions/0004-dev-profile.md).

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::{ebpf, setup};
use crate::progress::{self, Step};
use crate::project::{Project, cargo_command};

/// Every library and program of the workspace, and one small test. The test is here because cargo
/// takes the features that development dependencies ask of shared crates into account only if it
/// builds a test: without it, `cargo test` would build DataFusion and all below it again with one
/// feature more (a quarter of an hour on two cores).
const PROGRAMS: [&str; 7] = [
    "build",
    "--workspace",
    "--locked",
    "--lib",
    "--bins",
    "--test",
    "end_to_end",
];

/// What benchmarks measure, in the release profile: small programs only, nothing that needs the
/// query engine, so that it takes minutes and not an hour.
const MEASURED: [&str; 19] = [
    "build",
    "--release",
    "--locked",
    "--lib",
    "--bins",
    "-p",
    "vramscope-agent",
    "-p",
    "vramscope-bench",
    "-p",
    "vramscope-fakes",
    "-p",
    "vramscope-fake-cuda",
    "-p",
    "vramscope-fake-cudart",
    "-p",
    "vramscope-fake-cupti",
    "-p",
    "vramscope-fake-nvml",
];

/// Builds everything the demo needs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask build    set up, then build the kernel side, the programs and the stand-ins")]
pub struct Build {}

/// The command.
pub fn run(project: &Project, _options: &Build) -> Result<()> {
    everything(project)
}

/// Sets up and builds kernel side, programs and stand-ins.
pub fn everything(project: &Project) -> Result<()> {
    let toolchain = setup::ensure(project)?;
    ebpf::build(project, &toolchain)?;
    workspace(project, "building the programs", &PROGRAMS)?;
    install_standins(&project.binary("vramscope-fakes"), &project.standins())
}

/// Sets up and builds what benchmarks measure, and the stand-ins they run on.
pub fn for_measuring(project: &Project) -> Result<()> {
    let toolchain = setup::ensure(project)?;
    ebpf::build(project, &toolchain)?;
    workspace(project, "building what is measured (release)", &MEASURED)?;
    install_standins(
        &project.release_binary("vramscope-fakes"),
        &project.release_standins(),
    )
}

/// Builds the programs with the query engine in the release profile. Both in one command, whichever
/// is wanted: cargo takes the features of all packages it is asked for together, and the engine
/// would be built once more for each of them alone.
pub fn query_engine(project: &Project) -> Result<()> {
    workspace(
        project,
        "building vramscope and vramscope-collector (release: with the query engine, up to 40 minutes)",
        &[
            "build",
            "--release",
            "--locked",
            "-p",
            "vramscope-queries",
            "-p",
            "vramscope-collector",
            "-p",
            "vramscope-agent",
            "--bin",
            "vramscope",
            "--bin",
            "vramscope-collector",
        ],
    )
}

/// Runs a cargo command that builds, with a bar over the packages it works through.
pub fn workspace(project: &Project, what: &str, arguments: &[&str]) -> Result<()> {
    let mut step = Step::start(what);
    if let Some(total) = count_packages(project) {
        step.set_total(total);
    }
    let mut command = cargo_command(project);
    command
        .args(arguments)
        .args(["--message-format", "json-render-diagnostics"]);
    let mut finished = HashSet::new();
    let mut current = String::new();
    progress::run(step, &mut command, |line, step| {
        let is_message = line.starts_with("{\"reason\":");
        if is_message {
            if let Some(package) = finished_package(line) {
                finished.insert(package);
            }
        } else if let Some(compiling) = line.trim().strip_prefix("Compiling ") {
            current = compiling.to_string();
        }
        step.at(finished.len() as u64, &current);
        is_message
    })
}

/// The package a `compiler-artifact` message is about.
fn finished_package(line: &str) -> Option<String> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    // A build script's own artifact comes long before its package is done.
    if message["target"]["kind"][0] == "custom-build" {
        return None;
    }
    Some(message["package_id"].as_str()?.to_string())
}

/// How many packages a build of the workspace goes through; None if cargo cannot say, in which
/// case there is simply no bar.
fn count_packages(project: &Project) -> Option<u64> {
    let mut command = cargo_command(project);
    command.args(["tree", "--workspace", "--locked", "--edges", "normal,build"]);
    command.args(["--prefix", "none", "--format", "{p}"]);
    let output = command.output().ok()?;
    if !output.status.success() {
        return None;
    }
    let text = String::from_utf8(output.stdout).ok()?;
    let distinct: HashSet<&str> = text
        .lines()
        // `name v1.2.3 (proc-macro) (*)` is the same package as without the remarks.
        .map(|line| {
            line.trim_end_matches(" (*)")
                .trim_end_matches(" (proc-macro)")
        })
        .filter(|line| !line.is_empty())
        .collect();
    Some(distinct.len() as u64)
}

/// Copies the stand-in libraries that lie beside `program` to `folder`, under the names that
/// programs load.
fn install_standins(program: &Path, folder: &Path) -> Result<()> {
    let output = Command::new(program)
        .arg("install")
        .arg(folder)
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .with_context(|| format!("failed to run {}", program.display()))?;
    if !output.status.success() {
        bail!(
            "failed to install the stand-in libraries to {}: {}",
            folder.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages as cargo 1.95 writes them, shortened.
    #[test]
    fn counts_libraries_and_not_build_scripts() {
        let library = r#"{"reason":"compiler-artifact","package_id":"registry+x#libc@0.2.1","target":{"kind":["lib"],"name":"libc"},"fresh":true}"#;
        let script = r#"{"reason":"compiler-artifact","package_id":"registry+x#libc@0.2.1","target":{"kind":["custom-build"],"name":"build-script-build"}}"#;
        let other = r#"{"reason":"build-finished","success":true}"#;
        assert_eq!(
            finished_package(library).as_deref(),
            Some("registry+x#libc@0.2.1")
        );
        assert_eq!(finished_package(script), None);
        assert_eq!(finished_package(other), None);
    }
}
