//! The proof of the framework layer against the real PyTorch, on the stand-ins.
//!
//! A program allocates in many ways through PyTorch's own caching allocator and says at checkpoints
//! what that allocator knows: `torch.cuda.memory_stats()` and `memory_snapshot()`. The agent traces it.
//! At each checkpoint what follows from the rows equals the program's account exactly: allocated,
//! reserved, active and requested bytes, retries, out-of-memory errors, and the address map block for
//! block. It is compared twice: from `alloc_events` by a reading of its own (`replay`), and from the
//! `allocator_samples` and `segments` that were written while the program rested.
//!
//! The small variant (the allocator's two libraries, a C++ harness) always runs, and fetches what it
//! needs; the full one (all of PyTorch, from Python) runs if `cargo xtask torch --full` or `cargo xtask
//! test --with-torch` has fetched it. Without network, compiler or root both are skipped aloud.

mod compare;
mod replay;
mod trace;
mod truth;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use xtask::project::Project;
use xtask::torch;

use crate::bench::{cannot_run, say, take_turn};
use compare::{Compared, Differences};
use trace::Trace;
use truth::Checkpoint;

/// How often the agent samples, and how long a program rests at a checkpoint: two samples lie in it if
/// the machine keeps up. None has to.
const WINDOW: &str = "250ms";
const REST: Duration = Duration::from_millis(600);

/// Blocks that the harness asks for by address alone, at its checkpoint "raw", and their bytes.
const RAW: (usize, u64) = (3, ((11 << 20) + 5) + 1111 + (50 << 20));

const EXPANDABLE: &str = "expandable_segments:True";
const SETTINGS: &str = "max_split_size_mb:64,roundup_power2_divisions:4";

/// Runs a program under the agent and compares every checkpoint.
fn prove(project: &Project, program: &[&Path], settings: &str, libraries: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let [out, traced, books] = ["out", "trace", "books"].map(|name| folder.path().join(name));
    std::fs::create_dir(&out).unwrap();
    std::fs::create_dir(&books).unwrap();
    let agent = project.binary("vramscope-agent");
    let standins = project.standins();
    let hooked = [
        standins.join("libcuda.so.1"),
        standins.join("libcudart.so.13"),
        libraries.join("libc10.so"),
        libraries.join("libc10_cuda.so"),
    ];
    let hooked: Vec<String> = hooked
        .iter()
        .map(|path| path.display().to_string())
        .collect();

    // The agent itself must not load the stand-ins: `env` sets them for the program alone.
    let mut environment = Command::new("env");
    torch::on_standins(project, libraries, &mut environment);
    let mut command = Command::new(&agent);
    command
        .args(["trace", "--json", "--window", WINDOW, "-o"])
        .arg(&traced)
        .args(["--libraries", &hooked.join(",")])
        .arg("--off-file")
        .arg(folder.path().join("off"))
        .arg("--nvml-library")
        .arg(standins.join("libnvidia-ml.so.1"))
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("LD_PRELOAD")
        .args(["--", "env"]);
    for (name, value) in environment.get_envs() {
        let value = value.unwrap().to_string_lossy();
        command.arg(format!("{}={value}", name.to_string_lossy()));
    }
    command
        .arg(format!("PYTORCH_CUDA_ALLOC_CONF={settings}"))
        .arg(format!("VRAMSCOPE_FAKE_DIR={}", books.display()))
        .args(program)
        .arg(&out);
    let errors = folder.path().join("errors");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&errors).unwrap())
        .spawn()
        .unwrap();
    let mut go_ahead = child.stdin.take().unwrap();
    let mut names = Vec::new();
    let mut is_done = false;
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some(name) = line.strip_prefix("checkpoint ") {
            names.push(name.to_string());
            std::thread::sleep(REST);
            writeln!(go_ahead).unwrap();
        }
        is_done |= line == "done";
    }
    let status = child.wait().unwrap();
    let said = std::fs::read_to_string(&errors).unwrap();
    assert!(status.success() && is_done, "{status}: {said}");

    let trace = Trace::read(&agent, &traced);
    assert_eq!(trace.lost(), Vec::<&trace::Row>::new(), "{said}");
    let mut differences = Differences::default();
    let mut compared = Compared::default();
    let truths: Vec<Checkpoint> = names
        .iter()
        .map(|name| Checkpoint::read(&out, name))
        .collect();
    for truth in &truths {
        let raw = if truth.name == "raw" { RAW } else { (0, 0) };
        compare::checkpoint(truth, raw, &trace, &mut differences, &mut compared);
    }
    let last = truths.last().unwrap();
    compare::at_events(last, &trace, &mut differences, &mut compared);
    say(&format!(
        "{} {settings}: {compared:?}",
        program[0].display()
    ));
    if !differences.lines.is_empty() {
        let kept = folder.keep();
        let lines = &differences.lines;
        let first: Vec<&String> = lines.iter().take(20).collect();
        panic!(
            "{} differences, the first are {first:#?}; kept in {}",
            lines.len(),
            kept.display()
        );
    }
    // The program did what it is for.
    assert!(names.len() > 10 && compared.blocks > 200, "{compared:?}");
    let pending = truths.iter().map(Checkpoint::pending).sum::<usize>();
    assert!(pending > 0, "no block waited for a stream");
    assert!(last.failures.len() > 3 && last.devices[0].num_alloc_retries > 4);
    assert!(compared.samples > 0, "no sample was taken at rest");
    assert!(compared.sample_segments > 0, "no map was taken at rest");
}

/// The project, and why the tests cannot run.
fn project() -> Result<Project, String> {
    let project = Project::find().unwrap();
    cannot_run(&project).map_or(Ok(project), Err)
}

fn on_the_allocator(test: &str, settings: &str) {
    let prepared = project().and_then(|project| {
        let prepare = || {
            let small = torch::small(&torch::cache_folder()?)?;
            Ok((torch::harness(&project, &small)?, small))
        };
        let prepared: anyhow::Result<_> = prepare();
        let (harness, small) = prepared.map_err(|error| format!("{error:#}"))?;
        Ok((project, harness, small))
    });
    let (project, harness, small) = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => return say(&format!("SKIPPED {test}: {reason}")),
    };
    let _turn = take_turn();
    prove(&project, &[&harness], settings, &small.libraries);
}

fn on_all_of_pytorch(test: &str, settings: &str) {
    let prepared = project().and_then(|project| {
        let cache = torch::cache_folder().map_err(|error| format!("{error:#}"))?;
        let full = torch::find_full(&cache).ok_or_else(|| {
            "all of PyTorch is not in the cache: run `cargo xtask torch --full`, or `cargo xtask \
             test --with-torch`"
                .to_string()
        })?;
        Ok((project, full))
    });
    let (project, full) = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => return say(&format!("SKIPPED {test}: {reason}")),
    };
    let _turn = take_turn();
    let script = project.root.join("agent/fakes/torch/script.py");
    prove(
        &project,
        &[&full.python, &script],
        settings,
        &full.libraries,
    );
}

#[test]
fn rows_equal_the_allocator() {
    on_the_allocator("rows_equal_the_allocator", "");
}

#[test]
fn rows_equal_the_allocator_with_expandable_segments() {
    on_the_allocator(
        "rows_equal_the_allocator_with_expandable_segments",
        EXPANDABLE,
    );
}

#[test]
fn rows_equal_the_allocator_with_other_settings() {
    on_the_allocator("rows_equal_the_allocator_with_other_settings", SETTINGS);
}

#[test]
fn rows_equal_all_of_pytorch() {
    on_all_of_pytorch("rows_equal_all_of_pytorch", "");
}

#[test]
fn rows_equal_all_of_pytorch_with_expandable_segments() {
    on_all_of_pytorch(
        "rows_equal_all_of_pytorch_with_expandable_segments",
        EXPANDABLE,
    );
}
