//! The whole agent, ring to Parquet: how much one core carries, what it costs when little
//! happens, and what a live allocation costs in memory.
//!
//! The agent has one CPU to itself and the generator another; the generator is a real process
//! that calls the stand-ins, whose ledger tells how many calls there were.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use vramscope_fakes::ledger::read_ledgers;

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
const STACKS: u64 = 200;

const SLOW_RATE: u64 = 10_000;
const SLOW: Duration = Duration::from_secs(15);

const LIVE: u64 = 1_000_000;
/// 96 MiB and 96 bytes for each live allocation.
const TARGET_RSS_MIB: f64 = 96.0 + 96.0 * LIVE as f64 / (1 << 20) as f64;

/// Longest wait for an agent that is behind.
const PATIENCE: Duration = Duration::from_secs(180);

/// Runs the three scenes, each with an agent of its own.
pub fn measure(project: &Project) -> Result<Figures> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus <= AGENT_CPU.max(GENERATOR_CPU) {
        bail!("this benchmark needs two CPUs, one for the agent and one for what it traces");
    }
    let scene = |name: &str| Scene::start(project, &project.target.join("bench").join(name));
    let mut figures = Figures::new();
    fast(&mut scene("agent-fast")?, &mut figures)?;
    slow(&mut scene("agent-slow")?, &mut figures)?;
    live(&mut scene("agent-live")?, &mut figures)?;
    Ok(figures)
}

/// An agent and where its generators run.
pub struct Scene {
    pub agent: Daemon,
    workload: PathBuf,
    standins: PathBuf,
    folder: PathBuf,
}

impl Scene {
    pub fn start(project: &Project, folder: &Path) -> Result<Self> {
        let standins = project.release_standins();
        let libraries = [
            standins.join("libcuda.so.1"),
            standins.join("libcudart.so.13"),
        ];
        let agent = Daemon::start(
            project,
            &folder.join("agent"),
            &libraries,
            &[],
            Some(AGENT_CPU),
        )?;
        let scene = Self {
            agent,
            workload: project.release_binary("vramscope-workload"),
            standins,
            folder: folder.to_path_buf(),
        };
        daemon::empty(&scene.ledgers())?;
        Ok(scene)
    }

    fn ledgers(&self) -> PathBuf {
        self.folder.join("ledgers")
    }

    pub fn generator(&self, arguments: &[&str]) -> Result<Child> {
        let mut command = Command::new(&self.workload);
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", &self.standins)
            .env("VRAMSCOPE_FAKE_DIR", self.ledgers());
        daemon::pin(&mut command, GENERATOR_CPU);
        Child::start("workload", &mut command, &self.folder.join("workload.log"))
    }

    /// Calls that the stand-ins counted, of both layers.
    pub fn calls(&self) -> Result<u64> {
        let ledgers = read_ledgers(&self.ledgers()).context("failed to read the ledgers")?;
        let totals = ledgers.iter().flat_map(|ledger| {
            let by_device = ledger
                .devices
                .iter()
                .flat_map(|device| device.kinds.values());
            by_device.chain(ledger.without_device.values())
        });
        let calls = totals.map(|totals| {
            totals.allocations + totals.failed_allocations + totals.frees + totals.failed_frees
        });
        Ok(calls.sum())
    }
}

fn fast(scene: &mut Scene, figures: &mut Figures) -> Result<()> {
    let step = Step::start(&format!("{RATE} events a second for {} s", LONG.as_secs()));
    let pid = scene.agent.pid()?;
    let cpu_before = daemon::cpu_time(pid)?;
    let started = Instant::now();
    scene
        .generator(&churn(LONG, RATE).each_ref().map(String::as_str))?
        .wait_success(LONG + PATIENCE)?;
    let wall = started.elapsed();
    let status = scene.agent.wait_until_quiet(PATIENCE)?;
    let cpu = daemon::cpu_time(pid)? - cpu_before;
    scene.agent.stop()?;
    step.done(&format!("{} events", status.events));
    for (cause, count) in &status.lost {
        eprintln!("  lost by {cause}: {count}");
    }

    let events = status.events as f64;
    let calls = scene.calls()?;
    let unaccounted = calls as f64 - events - status.lost() as f64;
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
        Figure::with_target(
            events / wall.as_secs_f64(),
            "events/s",
            Target::AtLeast(TARGET_RATE),
        ),
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
    let mut generator = scene.generator(&churn(SLOW, SLOW_RATE).each_ref().map(String::as_str))?;
    // The first seconds name the stacks, which is done once.
    children::sleep(Duration::from_secs(3))?;
    let (cpu_before, started) = (daemon::cpu_time(pid)?, Instant::now());
    children::sleep(SLOW - Duration::from_secs(5))?;
    let cpu = daemon::cpu_time(pid)? - cpu_before;
    let wall = started.elapsed();
    generator.wait_success(SLOW + PATIENCE)?;
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
    let mut step = Step::start(&format!("{LIVE} live allocations"));
    step.set_total(LIVE);
    let pid = scene.agent.pid()?;
    let before = daemon::memory_mib(pid, "VmRSS")?;
    let generator = scene.generator(&["live", "--count", &LIVE.to_string()])?;
    let until = Instant::now() + PATIENCE;
    loop {
        let live = scene.agent.status()?.live_blocks;
        step.at(live, "live");
        if live >= LIVE {
            break;
        }
        if Instant::now() > until {
            bail!(
                "the agent knows {live} live allocations of {LIVE} after {} s",
                PATIENCE.as_secs()
            );
        }
        children::sleep(Duration::from_millis(200))?;
    }
    // What the last flush left is given back.
    children::sleep(Duration::from_secs(3))?;
    let rss = daemon::memory_mib(pid, "VmRSS")?;
    let peak = daemon::memory_mib(pid, "VmHWM")?;
    drop(generator);
    scene.agent.stop()?;
    step.done("");
    figures.insert(
        "rss_mib_at_1m_live",
        Figure::with_target(rss, "MiB", Target::AtMost(TARGET_RSS_MIB)),
    );
    figures.insert("rss_mib_peak", Figure::watched(peak, "MiB"));
    figures.insert("rss_mib_idle", Figure::watched(before, "MiB"));
    Ok(())
}

/// Arguments of the workload that allocates and frees at a pace.
pub fn churn(time: Duration, rate: u64) -> [String; 7] {
    [
        "churn".into(),
        "--seconds".into(),
        time.as_secs().to_string(),
        "--rate".into(),
        rate.to_string(),
        "--stacks".into(),
        STACKS.to_string(),
    ]
}
