//! What a traced call costs: the agent's real programs, with its real reader draining the ring,
//! against an empty entry and return probe on the same function, and against bpftrace.
//!
//! The function does nothing (`xtask/bench/src/callee.rs`), and exists in one file for each side,
//! since the kernel hooks files. All sides are called in turns within one process; figures are
//! medians over the rounds (`xtask/bench/src/rounds.rs`).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::daemon::{self, Daemon};
use super::{Figure, Figures, Target};
use crate::children::{Child, output};
use crate::progress::Step;
use crate::project::Project;

/// Recorded without a stack, and with one.
const PLAIN: &str = "cuDevicePrimaryCtxRetain";
const STACK: &str = "cuMemAlloc_v2";

/// Measurements of each function; the median of their ratios is the figure.
const TURNS: usize = 5;
const ROUNDS: usize = 120;

/// Runs both functions in turns and compares.
pub fn measure(project: &Project) -> Result<Figures> {
    let folder = project.target.join("bench").join("probes");
    daemon::empty(&folder)?;
    let built = project
        .target
        .join("release")
        .join("libvramscope_bench_callee.so");
    // Only the traced copy has a name that agents look for.
    let copy = |name: &str, file: &str| -> Result<PathBuf> {
        let path = folder.join(name).join(file);
        std::fs::create_dir_all(folder.join(name))
            .and_then(|()| std::fs::copy(&built, &path).map(|_| ()))
            .with_context(|| format!("failed to copy {} to {}", built.display(), path.display()))?;
        Ok(path)
    };
    let bare = copy("bare", "callee.so")?;
    let empty = copy("empty", "callee.so")?;
    let peer = copy("peer", "callee.so")?;
    let traced = copy("traced", "libcuda.so.1")?;

    let mut copies = vec![("bare", bare), ("empty", empty), ("traced", traced.clone())];
    let bpftrace = Bpftrace::start(&peer, &folder)?;
    if bpftrace.is_some() {
        copies.push(("peer", peer));
    }
    // Rounds come faster than the default second between two flushes.
    // Stacks that are copied have a benchmark of their own.
    let settings = ["flush_interval = \"50ms\"", "stack_bytes = \"0B\""];
    let agent = Daemon::start(project, &folder.join("agent"), &[traced], &settings, None)?;

    let mut step = Step::start("calling traced and untraced functions in turns");
    step.set_total(2 * TURNS as u64);
    let mut plain = Medians::default();
    let mut stack = Medians::default();
    for turn in 0..TURNS {
        step.at(2 * turn as u64, PLAIN);
        plain.add(&rounds(project, &[PLAIN], &copies)?)?;
        step.at(2 * turn as u64 + 1, STACK);
        // The peer's line is for the other function.
        stack.add(&rounds(
            project,
            &[STACK, "--release", "cuMemFree_v2"],
            &copies[..3],
        )?)?;
    }
    step.done("");
    let status = agent.wait_until_read(Duration::from_secs(60))?;
    drop(bpftrace);
    let calls = plain.calls + stack.calls;
    if status.events + status.lost() < calls {
        bail!(
            "the agent saw {} of {calls} calls: the traced copy was not hooked",
            status.events
        );
    }

    if status.lost() > calls / 100 {
        eprintln!(
            "  {} of {calls} calls found the ring full: the machine is too busy for the agent, \
             and the figures are those of lost calls too",
            status.lost()
        );
    }

    let ratio = |side: &Medians, of: &str, to: &str| Some(side.of(of)? / side.of(to)?);
    Ok(Figures::from([
        (
            "pair_ratio",
            Figure::with_target(ratio(&plain, "traced", "empty"), "x", Target::AtMost(1.5)),
        ),
        (
            "stack_ratio",
            Figure::with_target(ratio(&stack, "traced", "empty"), "x", Target::AtMost(2.2)),
        ),
        (
            "bpftrace_ratio",
            Figure::watched(ratio(&plain, "traced", "peer"), "x"),
        ),
        ("bare_ns", Figure::watched(plain.of("bare"), "ns")),
        ("empty_ns", Figure::watched(plain.of("empty"), "ns")),
        ("traced_ns", Figure::watched(plain.of("traced"), "ns")),
        ("stack_ns", Figure::watched(stack.of("traced"), "ns")),
        ("bpftrace_ns", Figure::watched(plain.of("peer"), "ns")),
        ("lost", Figure::watched(status.lost() as f64, "events")),
    ]))
}

/// Nanoseconds of a call by copy, over several measurements.
#[derive(Debug, Default)]
pub struct Medians {
    turns: Vec<Value>,
    pub calls: u64,
}

impl Medians {
    pub fn add(&mut self, measured: &Value) -> Result<()> {
        self.calls += measured["calls"].as_u64().context("no count of calls")?;
        self.turns.push(measured["ns"].clone());
        Ok(())
    }

    pub fn of(&self, copy: &str) -> Option<f64> {
        let mut values: Vec<f64> = self
            .turns
            .iter()
            .filter_map(|turn| turn[copy].as_f64())
            .collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }
}

/// Calls a function in turns in the copies; `symbols` are the function and further arguments.
pub fn rounds(project: &Project, symbols: &[&str], copies: &[(&str, PathBuf)]) -> Result<Value> {
    let mut command = Command::new(project.release_binary("vramscope-bench"));
    command
        .args(["rounds", "--empty", "empty", "--symbol"])
        .args(symbols)
        .args(["--rounds", &ROUNDS.to_string()]);
    for (name, path) in copies {
        command.arg(format!("--copy={name}={}", path.display()));
    }
    let output = output(&mut command)?;
    if !output.status.success() {
        bail!(
            "the measuring process failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    serde_json::from_slice(&output.stdout).context("the measuring process printed no JSON")
}

/// The peer: one line of bpftrace that records size and pointer at entry and return.
struct Bpftrace {
    _child: Child,
}

impl Bpftrace {
    /// `None`, aloud, where it is not installed or does not start.
    fn start(library: &Path, folder: &Path) -> Result<Option<Self>> {
        let probe = format!("{}:{PLAIN}", library.display());
        let script = format!(
            "BEGIN {{ printf(\"attached\\n\"); }} \
             uprobe:{probe} {{ @size[tid] = arg1; @out[tid] = arg0; }} \
             uretprobe:{probe} /@size[tid]/ {{ \
               printf(\"%d %llx %d\\n\", tid, *(uint64*)@out[tid], @size[tid]); \
               delete(@size[tid]); delete(@out[tid]); }}"
        );
        let mut command = Command::new("bpftrace");
        command.args(["-B", "line", "-e", &script]);
        let started = Child::start("bpftrace", &mut command, &folder.join("bpftrace.log"));
        let ready = started.and_then(|mut child| {
            child.wait_for_line(Duration::from_secs(30), |line| {
                (line == "attached").then_some(())
            })?;
            Ok(child)
        });
        match ready {
            Ok(child) => Ok(Some(Self { _child: child })),
            Err(error) => {
                crate::children::check_interrupted()?;
                eprintln!(
                    "skipped: bpftrace_ratio, since bpftrace does not run \
                     (on Debian: apt-get install bpftrace): {error:#}"
                );
                Ok(None)
            }
        }
    }
}
