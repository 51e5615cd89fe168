//! What reading Python frames costs the kernel side: the time of its own programs, as the kernel
//! counts it (`kernel.bpf_stats_enabled`), with as many Python frames on the stack, read and not
//! read. The difference of the two is the reading, and that of two depths the frames.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::daemon::{self, Daemon};
use super::{Figure, Figures, Target};
use crate::children::{sleep, tie_to_us};
use crate::progress::Step;
use crate::project::Project;

const SCRIPT: &str = include_str!("python.py");
/// Frames on the stack.
const DEPTHS: [u64; 3] = [3, 10, 40];
const TURNS: usize = 5;
/// Pairs of calls in a turn, and how many of them come at once: they fit into the agent's ring.
const PAIRS: u64 = 4000;
const AT_ONCE: u64 = 200;
/// Both calls of a pair have a stack.
const STACKS: f64 = 2.0 * PAIRS as f64;
/// How long an agent may take to look at a process.
const LOOK: Duration = Duration::from_secs(30);
const STATS: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Measures it with the interpreter that `python3` is.
pub fn measure(project: &Project) -> Result<Figures> {
    let folder = project.target.join("bench").join("python");
    daemon::empty(&folder)?;
    let _stats = Stats::on()?;
    let mut step = Step::start("calling from Python, with frames read and not read");
    step.set_total(2);
    let read = of_agent(project, &folder, true)?;
    step.at(1, "read");
    let bare = of_agent(project, &folder, false)?;
    step.done("");
    let cost: Vec<f64> = read
        .iter()
        .zip(&bare)
        .map(|(with, without)| with - without)
        .collect();
    // From 10 to 40 frames; what is left of 10 is the walk's own.
    let frame = (cost[2] - cost[1]) / (DEPTHS[2] - DEPTHS[1]) as f64;
    let walk = cost[1] - frame * DEPTHS[1] as f64;
    let mut figures = Figures::new();
    let mut limited = |name, value, limit| {
        figures.insert(
            name,
            Figure::with_target(Some(value), "ns", Target::AtMost(limit)),
        );
    };
    limited("python_frame_ns", frame, 250.0);
    limited("python_walk_ns", walk, 500.0);
    for (name, value) in [
        ("python_3_frames_ns", cost[0]),
        ("python_10_frames_ns", cost[1]),
        ("python_40_frames_ns", cost[2]),
    ] {
        figures.insert(name, Figure::watched(value, "ns"));
    }
    Ok(figures)
}

/// Nanoseconds of the kernel side for a call, by depth: the least of the turns.
fn of_agent(project: &Project, folder: &Path, reads: bool) -> Result<Vec<f64>> {
    let folder = folder.join(if reads { "read" } else { "bare" });
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("failed to make {}", folder.display()))?;
    let library = folder.join("libcuda.so.1");
    std::fs::copy(project.callee(), &library)
        .with_context(|| format!("failed to make {}", library.display()))?;
    let python = format!("python = {reads}");
    let settings = ["flush_interval = \"50ms\"", &python];
    let libraries = std::slice::from_ref(&library);
    let agent = Daemon::start(project, &folder.join("agent"), libraries, &settings, None)?;
    let mut script = Script::start(&folder, &library)?;
    script.wait_until_known(&agent, reads)?;
    let mut least = vec![f64::INFINITY; DEPTHS.len()];
    for _ in 0..TURNS {
        for (depth, least) in DEPTHS.iter().zip(&mut least) {
            let before = run_time(agent.pid()?)?;
            script.run(*depth)?;
            let after = run_time(agent.pid()?)?;
            *least = least.min((after - before) as f64 / STACKS);
        }
    }
    Ok(least)
}

/// What the programs that the agent holds have run so far, nanoseconds.
fn run_time(agent: u32) -> Result<u64> {
    let folder = format!("/proc/{agent}/fdinfo");
    let entries = std::fs::read_dir(&folder).with_context(|| format!("failed to read {folder}"))?;
    let mut all: Vec<(u64, u64)> = entries
        .flatten()
        .filter_map(|entry| {
            let text = std::fs::read_to_string(entry.path()).ok()?;
            let number = |name: &str| -> Option<u64> {
                let line = text.lines().find_map(|line| line.strip_prefix(name))?;
                line.trim().parse().ok()
            };
            Some((number("prog_id:")?, number("run_time_ns:")?))
        })
        .collect();
    // A program may be open more than once.
    all.sort_unstable();
    all.dedup_by_key(|(id, _)| *id);
    Ok(all.iter().map(|(_, ns)| ns).sum())
}

/// The kernel counts its programs' time as long as this lives.
struct Stats(String);

impl Stats {
    fn on() -> Result<Self> {
        let before =
            std::fs::read_to_string(STATS).with_context(|| format!("failed to read {STATS}"))?;
        std::fs::write(STATS, "1").with_context(|| format!("failed to write {STATS}"))?;
        Ok(Self(before))
    }
}

impl Drop for Stats {
    fn drop(&mut self) {
        let _ = std::fs::write(STATS, self.0.trim());
    }
}

struct Script {
    child: std::process::Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pid: u64,
}

impl Script {
    fn start(folder: &Path, library: &Path) -> Result<Self> {
        let path: PathBuf = folder.join("python.py");
        std::fs::write(&path, SCRIPT)
            .with_context(|| format!("failed to write {}", path.display()))?;
        let mut command = Command::new("python3");
        command
            .arg(&path)
            .arg(library)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        tie_to_us(&mut command);
        let mut child = command.spawn().context("failed to start python3")?;
        let input = child.stdin.take().context("no input")?;
        let output = BufReader::new(child.stdout.take().context("no output")?);
        let mut script = Self {
            child,
            input,
            output,
            pid: 0,
        };
        let ready = script.line()?;
        let pid = ready
            .strip_prefix("ready ")
            .and_then(|pid| pid.parse().ok());
        script.pid = pid.with_context(|| format!("the script said {ready:?}"))?;
        Ok(script)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("the script broke off");
        }
        Ok(line.trim().to_string())
    }

    fn run(&mut self, depth: u64) -> Result<()> {
        writeln!(self.input, "{depth} {PAIRS} {AT_ONCE}")?;
        let said = self.line()?;
        if said != "done" {
            bail!("the script said {said:?}");
        }
        Ok(())
    }

    /// Waits until the agent reads its frames, if it is to.
    fn wait_until_known(&self, agent: &Daemon, reads: bool) -> Result<()> {
        let path = agent.spool().join("status.json");
        let end = Instant::now() + LOOK;
        if !reads {
            return Ok(());
        }
        loop {
            let text = std::fs::read(&path).unwrap_or_default();
            let status: Value = serde_json::from_slice(&text).unwrap_or(Value::Null);
            let pythons = status["discovery"]["pythons"].as_array();
            let own = pythons
                .into_iter()
                .flatten()
                .find(|python| python["pid"].as_u64() == Some(self.pid));
            match own.map(|python| &python["refused"]) {
                Some(Value::Null) => return Ok(()),
                Some(reason) => bail!("frames of python3 are not read: {reason}"),
                None if Instant::now() > end => bail!("the agent never looked at the script"),
                None => sleep(Duration::from_millis(50))?,
            }
        }
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
