//! `cargo xtask test`: set-up, build, then every test of the workspace.

use anyhow::{Context, Result, bail};
use clap::Args;

use super::build;
use crate::children::{Interrupted, check_interrupted, tie_to_us};
use crate::progress::spell;
use crate::project::{Project, cargo_command};
use crate::torch;

/// Sets up, builds and runs all tests.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask test                              every test of the workspace
  cargo xtask test -p vramscope-wire            one crate's
  cargo xtask test -p xtask --test end_to_end   agent, collector and SQL on the stand-ins
  cargo xtask test --with-torch                 prove the framework layer on all of PyTorch as well
  cargo xtask test -- --nocapture               options of the test programs")]
pub struct Test {
    /// Fetch all of PyTorch first if it is not in the cache (2.8 GB to download, 5.2 GB kept), so
    /// that no test is skipped for want of it
    #[arg(long)]
    pub with_torch: bool,

    /// Arguments of `cargo test`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

/// A machine that cannot have it is told so, and tests the rest.
fn fetch_torch() -> Result<()> {
    let fetched = torch::cache_folder().and_then(|cache| torch::full(&cache));
    check_interrupted()?;
    if let Err(error) = fetched {
        eprintln!("SKIPPED the tests on all of PyTorch: {error:#}");
    }
    Ok(())
}

/// The command.
pub fn run(project: &Project, options: &Test) -> Result<()> {
    let started = std::time::Instant::now();
    if options.with_torch {
        fetch_torch()?;
    }
    build::everything(project)?;

    let selects_packages = options
        .arguments
        .iter()
        .take_while(|argument| *argument != "--")
        .any(|argument| argument.starts_with("-p") || argument.starts_with("--package"));
    let mut selection = vec!["test", "--locked"];
    if !selects_packages {
        selection.push("--workspace");
    }
    let for_cargo = options
        .arguments
        .iter()
        .take_while(|argument| *argument != "--")
        .map(String::as_str);
    let mut compile: Vec<&str> = selection.clone();
    compile.push("--no-run");
    compile.extend(for_cargo);
    build::workspace(project, "building the tests", &compile)?;

    eprintln!("running the tests");
    let mut command = cargo_command(project);
    command.args(&selection).args(&options.arguments);
    tie_to_us(&mut command);
    // Another process group than the terminal's may not read from it.
    command.stdin(std::process::Stdio::null());
    let mut child = command.spawn().context("failed to start cargo")?;
    let status = loop {
        if let Some(status) = child.try_wait().context("failed to wait for cargo")? {
            break status;
        }
        if check_interrupted().is_err() {
            // SAFETY: plain system call; the group is led by our own child, not yet waited for.
            unsafe {
                libc::kill(-(child.id() as libc::pid_t), libc::SIGTERM);
            }
            let _ = child.wait();
            return Err(Interrupted.into());
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    if !status.success() {
        bail!("tests failed");
    }
    eprintln!("✓ all tests passed ({} in all)", spell(started.elapsed()));
    Ok(())
}
