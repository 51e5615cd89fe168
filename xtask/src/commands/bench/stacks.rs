//! What call stacks cost: a traced call whose stack is copied, against an empty pair of probes on the
//! same function; and the agent's unwinding of a copied stack.
//!
//! The calls are those of `probes`, with more stack above them than is copied. A round is short, so
//! that its copies fit into the agent's ring: a call whose stack finds no room is cheaper, and would
//! make the figure better than it is.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::daemon::{self, Daemon};
use super::probes::{Medians, rounds};
use super::{Figure, Figures, Target};
use crate::children::output;
use crate::progress::Step;
use crate::project::Project;

/// Recorded with a stack, and what takes back what it gave.
const STACK: &str = "cuMemAlloc_v2";
const RELEASE: &str = "cuMemFree_v2";
const TURNS: usize = 5;
/// Frames of the stack that is unwound: the target is for so many.
const FRAMES: usize = 40;

/// Sizes of copies, with the figures they give and what those may be.
const SIZES: [(&str, &str, &str, Option<f64>); 3] = [
    ("4KiB", "copied_pair_ratio_4k", "copied_4k_ns", None),
    ("8KiB", "copied_pair_ratio_8k", "copied_8k_ns", Some(3.5)),
    ("16KiB", "copied_pair_ratio", "copied_ns", Some(5.0)),
];

/// Measures both.
pub fn measure(project: &Project) -> Result<Figures> {
    let mut figures = Figures::new();
    unwind(project, &mut figures)?;
    let folder = project.target.join("bench").join("stacks");
    daemon::empty(&folder)?;
    let mut step = Step::start("calling functions whose stack is copied, and empty probes");
    step.set_total((SIZES.len() * TURNS) as u64);
    let mut not_copied = 0;
    for (index, (bytes, ratio, ns, target)) in SIZES.into_iter().enumerate() {
        let copy = |name: &str, file: &str| -> Result<PathBuf> {
            let path = folder.join(bytes).join(name).join(file);
            let into = folder.join(bytes).join(name);
            std::fs::create_dir_all(into)
                .and_then(|()| std::fs::copy(project.callee(), &path).map(|_| ()))
                .with_context(|| format!("failed to make {}", path.display()))?;
            Ok(path)
        };
        // Only the traced copy has a name that agents look for.
        let (empty, traced) = (copy("empty", "callee.so")?, copy("traced", "libcuda.so.1")?);
        let settings = [
            "flush_interval = \"50ms\"".to_string(),
            format!("stack_bytes = \"{bytes}\""),
            "call_stacks = 4000000000".to_string(),
            "stack_ring_bytes = 67108864".to_string(),
        ];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let libraries = std::slice::from_ref(&traced);
        let agent = Daemon::start(
            project,
            &folder.join(bytes).join("agent"),
            libraries,
            &settings,
            None,
        )?;
        let copies = [("empty", empty), ("traced", traced.clone())];
        let mut medians = Medians::default();
        for turn in 0..TURNS {
            step.at((index * TURNS + turn) as u64, bytes);
            let arguments = [
                STACK,
                "--release",
                RELEASE,
                "--deep",
                "131072",
                "--calls",
                "200",
                "--pause-ms",
                "20",
            ];
            medians.add(&rounds(project, &arguments, &copies)?)?;
        }
        let status = agent.wait_until_read(Duration::from_secs(60))?;
        if status.events < medians.calls / 2 {
            bail!(
                "the agent saw {} calls: the traced copy was not hooked",
                status.events
            );
        }
        not_copied += status.not_copied;
        let pair = Some(medians.of("traced").zip(medians.of("empty")));
        let value = pair.flatten().map(|(traced, empty)| traced / empty);
        let figure = match target {
            Some(limit) => Figure::with_target(value, "x", Target::AtMost(limit)),
            None => Figure::watched(value, "x"),
        };
        figures.insert(ratio, figure);
        figures.insert(ns, Figure::watched(medians.of("traced"), "ns"));
    }
    step.done("");
    figures.insert("not_copied", Figure::watched(not_copied as f64, "stacks"));
    Ok(figures)
}

fn unwind(project: &Project, figures: &mut Figures) -> Result<()> {
    let mut command = Command::new(project.release_binary("vramscope-bench"));
    command.args(["unwind", "--frames", &FRAMES.to_string()]);
    let output = output(&mut command)?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("the measuring process failed: {}", errors.trim());
    }
    let told: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("the measuring process printed no JSON")?;
    let number = |name: &str| told[name].as_f64();
    figures.insert(
        "unwind_us",
        Figure::with_target(number("unwind_us"), "us", Target::AtMost(10.0)),
    );
    figures.insert("unwind_cold_us", Figure::watched(number("cold_us"), "us"));
    Ok(())
}
