//! The whole agent, ring to Parquet: how much one core carries, what it costs when little
//! happens, and what a live allocation costs in memory.
//!
//! The agent has one CPU to itself and the generator another. The generator is a real process that
//! calls a library hooked as the driver's is (`xtask/bench/src/callee.rs`), and tells how many calls
//! it made.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::daemon::{self, Daemon};
use super::{Figure, Figures, Target};
use crate::children::{self, Child};
use crate::progress::Step;
use crate::project::Project;

const AGENT_CPU: usize = 1;
const GENERATOR_CPU: usize = 0;

/// A little above the target, so that a pace that is not quite held still shows it.
const RATE: u64 = 315_000;
const TARGET_RATE: f64 = 300_000.0;
const LONG: Duration = Duration::from_secs(30);
/// Of allocations, and as many of frees.
const STACKS: u64 = 100;

const SLOW_RATE: u64 = 10_000;
const SLOW: Duration = Duration::from_secs(15);

const LIVE: u64 = 1_000_000;
const LIVE_RATE: u64 = 20_000;
/// 96 MiB and 96 bytes for each live allocation.
const TARGET_RSS_MIB: f64 = 96.0 + 96.0 * LIVE as f64 / (1 << 20) as f64;

/// Longest wait for an agent that is behind.
const PATIENCE: Duration = Duration::from_secs(180);

/// Runs the three scenes, each with an agent of its own.
pub fn measure(project: &Project) -> Result<Figures> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus < 2 {
        bail!("this benchmark needs two CPUs, one for the agent and one for what it traces");
    }
    let scene = |name: &str| Scene::start(project, &project.target.join("bench").join(name));
    let mut figures = Figures::new();
    fast(&mut scene("agent-fast")?, &mut figures)?;
    slow(&mut scene("agent-slow")?, &mut figures)?;
    live(&mut scene("agent-live")?, &mut figures)?;
    Ok(figures)
}

/// An agent, the library it hooks, and where generators run.
pub struct Scene {
    pub agent: Daemon,
    program: PathBuf,
    library: PathBuf,
    folder: PathBuf,
}

impl Scene {
    pub fn start(project: &Project, folder: &Path) -> Result<Self> {
        daemon::empty(folder)?;
        // The name is what agents look for.
        let library = folder.join("libcuda.so.1");
        let built = project.callee();
        std::fs::copy(&built, &library)
            .with_context(|| format!("failed to copy {}", built.display()))?;
        let agent = Daemon::start(
            project,
            &folder.join("agent"),
            std::slice::from_ref(&library),
            &[],
            Some(AGENT_CPU),
        )?;
        Ok(Self {
            agent,
            program: project.release_binary("vramscope-bench"),
            library,
            folder: folder.to_path_buf(),
        })
    }

    fn generator(&self, part: &str, arguments: &[(&str, u64)]) -> Result<Child> {
        let mut command = Command::new(&self.program);
        command.arg(part).arg(&self.library);
        for (name, value) in arguments {
            command.arg(format!("--{name}={value}"));
        }
        daemon::pin(&mut command, GENERATOR_CPU);
        Child::start(
            "generator",
            &mut command,
            &self.folder.join("generator.log"),
        )
    }

    /// A stream of allocations and frees.
    pub fn churn(&self, time: Duration, rate: u64) -> Result<Child> {
        let arguments = [
            ("seconds", time.as_secs()),
            ("rate", rate),
            ("stacks", STACKS),
        ];
        self.generator("churn", &arguments)
    }
}

/// Waits for a stream's end; calls made, and the seconds they took.
pub fn wait_for_calls(generator: &mut Child, time: Duration) -> Result<(f64, f64)> {
    let told: Value =
        generator.wait_for_line(time + PATIENCE, |line| serde_json::from_str(line).ok())?;
    let number = |name: &str| told[name].as_f64().context("the generator told no numbers");
    Ok((number("calls")?, number("seconds")?))
}

fn fast(scene: &mut Scene, figures: &mut Figures) -> Result<()> {
    let step = Step::start(&format!("{RATE} events a second for {} s", LONG.as_secs()));
    let pid = scene.agent.pid()?;
    let cpu_before = daemon::cpu_time(pid)?;
    let mut generator = scene.churn(LONG, RATE)?;
    let (calls, seconds) = wait_for_calls(&mut generator, LONG)?;
    let status = scene.agent.wait_until_read(PATIENCE)?;
    let cpu = daemon::cpu_time(pid)? - cpu_before;
    scene.agent.stop()?;
    step.done(&format!("{} events", status.events));
    for (cause, count) in &status.lost {
        eprintln!("  lost by {cause}: {count}");
    }

    let events = status.events as f64;
    // Two calls more tell the agent the device.
    let unaccounted = calls - events - status.lost() as f64;
    figures.insert(
        "events_per_core_second",
        Figure::with_target(
            events / cpu.as_secs_f64(),
            "events/s",
            Target::AtLeast(TARGET_RATE),
        ),
    );
    figures.insert(
        "events_per_second",
        Figure::with_target(events / seconds, "events/s", Target::AtLeast(TARGET_RATE)),
    );
    figures.insert(
        "lost",
        Figure::with_target(status.lost() as f64, "events", Target::AtMost(0.0)),
    );
    figures.insert("unaccounted", Figure::watched(unaccounted, "calls"));
    Ok(())
}

fn slow(scene: &mut Scene, figures: &mut Figures) -> Result<()> {
    let step = Step::start(&format!("{SLOW_RATE} events a second"));
    let pid = scene.agent.pid()?;
    let mut generator = scene.churn(SLOW, SLOW_RATE)?;
    // The first seconds name the stacks, which is done once.
    children::sleep(Duration::from_secs(3))?;
    let (cpu_before, started) = (daemon::cpu_time(pid)?, Instant::now());
    children::sleep(SLOW - Duration::from_secs(5))?;
    let cpu = daemon::cpu_time(pid)? - cpu_before;
    let wall = started.elapsed();
    wait_for_calls(&mut generator, SLOW)?;
    scene.agent.stop()?;
    step.done("");
    let percent = 100.0 * cpu.as_secs_f64() / wall.as_secs_f64();
    figures.insert(
        "cpu_percent_at_10k",
        Figure::with_target(percent, "% of a core", Target::Below(5.0)),
    );
    Ok(())
}

fn live(scene: &mut Scene, figures: &mut Figures) -> Result<()> {
    let step = Step::start(&format!("{LIVE} live allocations"));
    let pid = scene.agent.pid()?;
    let idle = daemon::memory_mib(pid, "VmRSS")?;
    let arguments = [("count", LIVE), ("rate", LIVE_RATE)];
    let mut generator = scene.generator("live", &arguments)?;
    let time = Duration::from_secs(LIVE / LIVE_RATE);
    generator.wait_for_line(time + PATIENCE, |line| (line == "live").then_some(()))?;
    let status = scene.agent.wait_until_read(PATIENCE)?;
    let rss = daemon::memory_mib(pid, "VmRSS")?;
    let peak = daemon::memory_mib(pid, "VmHWM")?;
    // While they live: their end would be a million rows more.
    scene.agent.stop()?;
    drop(generator);
    step.done(&format!("{} known to the agent", status.live_blocks));
    let all_known = status.live_blocks >= LIVE;
    if !all_known {
        eprintln!(
            "  rss_mib_at_1m_live is unknown: the agent lost {} events on the way",
            status.lost()
        );
    }
    figures.insert(
        "rss_mib_at_1m_live",
        Figure::with_target(
            all_known.then_some(rss),
            "MiB",
            Target::AtMost(TARGET_RSS_MIB),
        ),
    );
    figures.insert("rss_mib_peak", Figure::watched(peak, "MiB"));
    figures.insert("rss_mib_idle", Figure::watched(idle, "MiB"));
    Ok(())
}
