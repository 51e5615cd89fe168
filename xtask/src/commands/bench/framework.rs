//! What tracing costs PyTorch: pairs of an allocation and a free through its real caching allocator
//! (`libc10_cuda.so` on the stand-ins), traced by an agent, against empty programs at the same
//! places, and against nobody.
//!
//! A pair passes four places: the report and the probe of the allocation, the probe and the report
//! of the free. Each side has its own copy of the two libraries, since the kernel hooks files, and
//! its own process, since a process can load them once; the processes work in turns, a few hundred
//! pairs each, and the figures are medians over the rounds.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::daemon::{self, Daemon};
use super::{Figure, Figures, Target};
use crate::children::{self, output};
use crate::progress::Step;
use crate::project::Project;
use crate::torch;

const ROUNDS: usize = 300;
const PAIRS: u32 = 400;
/// Between rounds, for the agent to read the records.
const PAUSE: Duration = Duration::from_millis(5);
const LIBRARIES: [&str; 2] = ["libc10.so", "libc10_cuda.so"];

/// A real training step to hold the cost against: the trace in `medium_1024_training.pickle`, a
/// public memory snapshot of PyTorch, has 7,591 allocations, and nearly as many frees, within
/// 0.647 s.
const STEP_PAIRS: f64 = 7591.0;
const STEP_NS: f64 = 0.647e9;

/// Runs all sides in turns and compares.
pub fn measure(project: &Project) -> Result<Figures> {
    let folder = project.target.join("bench").join("framework");
    daemon::empty(&folder)?;
    let small = torch::small(&torch::cache_folder()?)?;
    let program = torch::pairs(project, &small)?;
    let copy = |name: &str| -> Result<PathBuf> {
        let into = folder.join(name);
        std::fs::create_dir_all(&into)
            .with_context(|| format!("failed to create {}", into.display()))?;
        for library in LIBRARIES {
            let from = small.libraries.join(library);
            std::fs::copy(&from, into.join(library))
                .with_context(|| format!("failed to copy {}", from.display()))?;
        }
        Ok(into)
    };
    let sides = [
        ("bare", copy("bare")?),
        ("empty", copy("empty")?),
        ("traced", copy("traced")?),
    ];

    let traced: Vec<PathBuf> = LIBRARIES.map(|name| sides[2].1.join(name)).to_vec();
    // The other copies are called the same, and are nobody's business. Rounds come faster than the
    // default second between two flushes.
    let only = toml::Value::String(format!("{}/*", sides[2].1.display()));
    let only = format!("only_libraries = [{only}]");
    let settings = ["flush_interval = \"50ms\"", only.as_str()];
    let agent = Daemon::start(project, &folder.join("agent"), &traced, &settings, None)?;
    let holder = Holder::start(project, &sides[1].1)?;
    let mut programs = sides
        .iter()
        .map(|(_, libraries)| Pairs::start(project, &program, libraries, &folder))
        .collect::<Result<Vec<_>>>()?;

    let mut step = Step::start("allocating and freeing in turns");
    step.set_total(ROUNDS as u64);
    let mut times = vec![Vec::with_capacity(ROUNDS); programs.len()];
    for round in 0..=ROUNDS {
        for turn in 0..programs.len() {
            let side = (turn + round) % programs.len();
            let ns = programs[side].make(PAIRS)?;
            // The first round fills caches and page tables.
            if round > 0 {
                times[side].push(ns);
            }
        }
        step.at(round as u64, "");
        children::sleep(PAUSE)?;
    }
    step.done("");
    drop((programs, holder));
    let status = agent.wait_until_read(Duration::from_secs(60))?;
    let pairs = u64::from(PAIRS) * (ROUNDS as u64 + 1);
    // An allocation's report and probe are one event, its free another.
    if status.events + status.lost() < 2 * pairs {
        bail!(
            "the agent saw {} events of {pairs} pairs: the traced copy was not hooked",
            status.events
        );
    }
    let [bare, empty, traced] = [0, 1, 2].map(|side| median(&mut times[side]));
    let added = traced - bare;
    eprintln!(
        "  a training step of {STEP_PAIRS:.0} pairs in {:.0} ms (medium_1024_training.pickle) would \
         take {:.1} % longer if every pair held the step up; most of them do not, since the host \
         runs ahead of the card",
        STEP_NS / 1e6,
        100.0 * STEP_PAIRS * added / STEP_NS
    );
    Ok(Figures::from([
        (
            "pair_ratio",
            Figure::with_target(traced / empty, "x", Target::AtMost(2.2)),
        ),
        ("added_ratio", Figure::watched(added / (empty - bare), "x")),
        ("bare_ns", Figure::watched(bare, "ns")),
        ("empty_ns", Figure::watched(empty, "ns")),
        ("traced_ns", Figure::watched(traced, "ns")),
        (
            "step_share_percent",
            Figure::watched(100.0 * STEP_PAIRS * added / STEP_NS, "%"),
        ),
        ("lost", Figure::watched(status.lost() as f64, "events")),
    ]))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A process that makes pairs.
struct Pairs {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Pairs {
    fn start(project: &Project, program: &Path, libraries: &Path, folder: &Path) -> Result<Self> {
        let standins = project.release_standins();
        let search = std::env::join_paths([libraries, standins.as_path()])
            .context("a folder's name has a colon")?;
        let mut command = Command::new(program);
        children::tie_to_us(&mut command);
        let mut child = command
            .env("LD_LIBRARY_PATH", search)
            .env("LD_PRELOAD", standins.join("libcudart.so.13"))
            .env("VRAMSCOPE_FAKE_DIR", folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("failed to start {}", program.display()))?;
        let input = child.stdin.take().context("it has an input")?;
        let output = BufReader::new(child.stdout.take().context("it has an output")?);
        let mut pairs = Self {
            child,
            input,
            output,
        };
        let line = pairs.line()?;
        if line != "ready" {
            bail!("{} began with {line:?}", program.display());
        }
        Ok(pairs)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output
            .read_line(&mut line)
            .context("the allocating process said nothing")?;
        if line.is_empty() {
            bail!("the allocating process ended early");
        }
        Ok(line.trim().to_string())
    }

    /// Nanoseconds of a pair.
    fn make(&mut self, count: u32) -> Result<f64> {
        writeln!(self.input, "{count}").context("the allocating process is gone")?;
        let line = self.line()?;
        line.parse()
            .with_context(|| format!("the allocating process said {line:?}"))
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that holds empty programs at the places that the agent would hook.
struct Holder {
    child: Child,
}

impl Holder {
    fn start(project: &Project, libraries: &Path) -> Result<Self> {
        let mut command = Command::new(project.release_binary("vramscope-bench"));
        command.arg("hold");
        for library in LIBRARIES {
            let path = libraries.join(library);
            for (offset, counter) in places(project, &path)? {
                command.arg(format!("--place={}={offset}={counter}", path.display()));
            }
        }
        children::tie_to_us(&mut command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("failed to start vramscope-bench")?;
        let output = child.stdout.take().context("it has an output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        if line.trim() != "ready" {
            let _ = child.wait();
            bail!("the empty probes could not be attached");
        }
        Ok(Self { child })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Offset and counter of each place, as the agent finds them.
fn places(project: &Project, library: &Path) -> Result<Vec<(u64, u64)>> {
    let mut command = Command::new(project.release_binary("vramscope-agent"));
    command.args(["inspect", "--json"]).arg(library);
    let output = output(&mut command)?;
    let found: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("nothing was found out about {}", library.display()))?;
    let places = found["places"].as_array().context("no places")?;
    let places: Vec<_> = places
        .iter()
        // An OOM is not part of a pair.
        .filter(|place| place["symbol"] != "c10::reportOutOfMemoryToProfiler")
        .filter_map(|place| Some((place["offset"].as_u64()?, place["counter"].as_u64()?)))
        .collect();
    if places.is_empty() {
        bail!("{} has no place to hook", library.display());
    }
    Ok(places)
}
