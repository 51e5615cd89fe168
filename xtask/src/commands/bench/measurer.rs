//! `vramscope-bench`: the program that makes data and measures processes. It is not what is
//! measured.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::Bench;
use crate::children::output;
use crate::commands::build;
use crate::project::Project;

/// It, built in the release profile or given.
pub(super) struct Measurer(PathBuf);

/// Seconds, bytes and output of one process.
pub(super) struct Run {
    pub seconds: f64,
    pub peak_bytes: f64,
    /// From storage or its cache.
    pub read_bytes: f64,
    pub output: String,
}

impl Measurer {
    /// Builds it, unless one was named.
    pub fn ready(project: &Project, options: &Bench) -> Result<Self> {
        if let Some(path) = &options.vramscope_bench {
            return Ok(Self(path.clone()));
        }
        build::workspace(
            project,
            "building what measures (release)",
            &["build", "--release", "--locked", "-p", "vramscope-bench"],
        )?;
        Ok(Self(project.release_binary("vramscope-bench")))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Runs it; gives the JSON that it prints.
    pub fn tell<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<Value> {
        let mut command = Command::new(&self.0);
        command.args(arguments);
        let output = output(&mut command)?;
        if !output.status.success() {
            let first = arguments.first().map(AsRef::as_ref).unwrap_or_default();
            bail!(
                "vramscope-bench {} failed: {}",
                first.to_string_lossy(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        serde_json::from_slice(&output.stdout).context("the measurement printed no JSON")
    }

    /// What a process takes, and what it prints.
    pub fn run(&self, command: &[&str]) -> Result<Run> {
        let run = self.tell(&[&["run", "--"], command].concat())?;
        let number = |name: &str| run[name].as_f64().context("a measurement lacks a figure");
        Ok(Run {
            seconds: number("seconds")?,
            peak_bytes: number("peak_bytes")?,
            read_bytes: number("read_bytes")?,
            output: run["output"].as_str().unwrap_or_default().to_string(),
        })
    }
}
