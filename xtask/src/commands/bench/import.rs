//! `vramscope import`: the whole command against a Python process that loads the same snapshot and
//! makes PyTorch's trace view of it; reading and replaying against the part of that which does not
//! go into importing PyTorch; memory, also with a snapshot of a gigabyte.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::measurer::{Measurer, Run};
use super::{Bench, Figure, Figures, Target};
use crate::commands::build;
use crate::progress::Step;
use crate::project::Project;
use crate::torch;

const COMMAND_RATIO: f64 = 10.0;
const PARSE_REPLAY_RATIO: f64 = 3.0;
/// What an import may take: this, and so many times the file.
const BASE_MIB: f64 = 64.0;
const FACTOR: f64 = 8.0;

const ROUNDS: usize = 7;
const MIB: f64 = 1_048_576.0;
const GIGABYTE: u64 = 1_000_000_000;

/// What Python took where it cannot be measured, on a virtual machine of two cores with CPython
/// 3.11 and PyTorch 2.15: the whole process, and the part after importing PyTorch. Seconds.
const RECORDED: (f64, f64) = (2.2, 0.3);

/// Loads a snapshot and makes PyTorch's trace view of it (`python -m torch.cuda._memory_viz trace`).
/// Prints the seconds after the imports.
const VIEW: &str = "
import sys, time, pickle, torch
from torch.cuda import _memory_viz
started = time.perf_counter()
with open(sys.argv[1], 'rb') as file:
    snapshot = pickle.load(file)
view = _memory_viz.trace(snapshot)
assert len(view) > 1000
print(time.perf_counter() - started)
";

/// Measures all of it.
pub fn measure(project: &Project, options: &Bench) -> Result<Figures> {
    let measurer = Measurer::ready(project, options)?;
    let program = program(project, options)?;
    let folder = project.target.join("bench").join("import");
    super::daemon::empty(&folder)?;
    let bench = Runner {
        measurer,
        program,
        folder,
    };
    let mut figures = bench.gigabyte()?;
    match largest_snapshot(project) {
        Some(file) => figures.extend(bench.real(&file, peer(options)?)?),
        None => {
            eprintln!("  no real snapshots beside the project (VRAMSCOPE_SHARED): not measured");
            figures.extend(real_figures(None, None, None));
        }
    }
    Ok(figures)
}

/// The `vramscope` that is measured.
pub(super) fn program(project: &Project, options: &Bench) -> Result<PathBuf> {
    if let Some(path) = &options.vramscope {
        return Ok(path.clone());
    }
    build::query_engine(project)?;
    Ok(project.release_binary("vramscope"))
}

/// A Python that has PyTorch.
fn peer(options: &Bench) -> Result<Option<PathBuf>> {
    let has_torch = |python: &Path| {
        let imported = Command::new(python).args(["-c", "import torch"]).output();
        imported.is_ok_and(|output| output.status.success())
    };
    if let Some(python) = &options.python {
        if !has_torch(python) {
            bail!("{} has no PyTorch", python.display());
        }
        return Ok(Some(python.clone()));
    }
    let cached = torch::cache_folder()
        .ok()
        .and_then(|cache| torch::find_full(&cache))
        .map(|full| full.python);
    let candidates = cached.into_iter().chain([PathBuf::from("python3")]);
    Ok(candidates.into_iter().find(|python| has_torch(python)))
}

/// The largest of the shared snapshots.
fn largest_snapshot(project: &Project) -> Option<PathBuf> {
    let shared = std::env::var_os("VRAMSCOPE_SHARED")
        .map_or_else(|| project.root.join("../shared"), PathBuf::from);
    let files = std::fs::read_dir(shared.join("data/snapshots")).ok()?;
    let files = files.flatten().map(|file| file.path());
    files
        .filter(|path| path.extension().is_some_and(|e| e == "pickle"))
        .max_by_key(|path| path.metadata().map_or(0, |metadata| metadata.len()))
}

struct Runner {
    measurer: Measurer,
    program: PathBuf,
    folder: PathBuf,
}

impl Runner {
    /// Into a folder that is not there yet.
    fn import(&self, file: &Path) -> Result<Run> {
        let data = self.folder.join("data");
        super::daemon::empty(&data)?;
        self.measurer.run(&[
            &self.program.to_string_lossy(),
            "import",
            "--data",
            &data.to_string_lossy(),
            &file.to_string_lossy(),
        ])
    }

    /// In turns with Python, so that both meet the machine's moods.
    fn real(&self, file: &Path, python: Option<PathBuf>) -> Result<Figures> {
        let step = Step::start(&format!("importing {}", file.display()));
        let size = file.metadata().map_or(0, |metadata| metadata.len()) as f64;
        let (mut ours, mut whole, mut view) = (Vec::new(), Vec::new(), Vec::new());
        let mut peak: f64 = 0.0;
        for _ in 0..ROUNDS {
            let run = self.import(file)?;
            ours.push(run.seconds);
            peak = peak.max(run.peak_bytes);
            if let Some(python) = &python {
                let path = file.to_string_lossy();
                let run = self
                    .measurer
                    .run(&[&python.to_string_lossy(), "-c", VIEW, &path])?;
                whole.push(run.seconds);
                view.push(run.output.parse().context("Python printed no seconds")?);
            }
        }
        let read = self.measurer.tell(&["snapshot", &file.to_string_lossy()])?;
        step.done("");
        if python.is_none() {
            eprintln!(
                "  no Python with PyTorch (--python): compared with {} s and {} s, recorded on \
                 another day and perhaps another machine",
                RECORDED.0, RECORDED.1
            );
            (whole, view) = (vec![RECORDED.0], vec![RECORDED.1]);
        }
        let ours = median(&mut ours);
        let read = read["read_replay_seconds"].as_f64();
        let times = Times {
            ours,
            python: median(&mut whole),
            view: median(&mut view),
            read,
        };
        Ok(real_figures(
            Some(times),
            Some(peak / MIB),
            Some(size / MIB),
        ))
    }

    fn gigabyte(&self) -> Result<Figures> {
        let step = Step::start("importing a made-up snapshot of 1 GB");
        let file = self.folder.join("large.pickle");
        let bytes = GIGABYTE.to_string();
        let path = file.to_string_lossy();
        let made = self
            .measurer
            .tell(&["make-snapshot", &path, "--bytes", &bytes])?;
        let size = made["bytes"].as_f64().unwrap_or(0.0) / MIB;
        let run = self.import(&file);
        // Also if it failed: it is large.
        let _ = std::fs::remove_file(&file);
        let run = run?;
        super::daemon::empty(&self.folder.join("data"))?;
        step.done("");
        let limit = Target::AtMost(BASE_MIB + FACTOR * size);
        Ok(Figures::from([
            (
                "gigabyte_peak_mib",
                Figure::with_target(run.peak_bytes / MIB, "MiB", limit),
            ),
            ("gigabyte_seconds", Figure::watched(run.seconds, "s")),
            (
                "gigabyte_events",
                Figure::watched(made["events"].as_f64(), "events"),
            ),
        ]))
    }
}

/// Seconds.
struct Times {
    ours: f64,
    python: f64,
    view: f64,
    read: Option<f64>,
}

fn real_figures(times: Option<Times>, peak: Option<f64>, size: Option<f64>) -> Figures {
    let milliseconds = |seconds: Option<f64>| Figure::watched(seconds.map(|s| s * 1e3), "ms");
    let times = times.as_ref();
    let read = times.and_then(|times| times.read);
    let limit = BASE_MIB + FACTOR * size.unwrap_or(0.0);
    Figures::from([
        (
            "command_ratio",
            Figure::with_target(
                times.map(|times| times.python / times.ours),
                "times",
                Target::AtLeast(COMMAND_RATIO),
            ),
        ),
        (
            "parse_replay_ratio",
            Figure::with_target(
                times.and_then(|times| Some(times.view / times.read?)),
                "times",
                Target::AtLeast(PARSE_REPLAY_RATIO),
            ),
        ),
        (
            "peak_mib",
            Figure::with_target(peak, "MiB", Target::AtMost(limit)),
        ),
        ("command_ms", milliseconds(times.map(|times| times.ours))),
        ("python_ms", milliseconds(times.map(|times| times.python))),
        (
            "python_view_ms",
            milliseconds(times.map(|times| times.view)),
        ),
        ("parse_replay_ms", milliseconds(read)),
    ])
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
