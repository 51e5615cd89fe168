//! What tracing adds to a cudaMalloc/cudaFree pair. On the stand-ins a pair is four traced calls:
//! the two of the runtime, and the two of the driver under them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{Figure, Figures, median};
use crate::children::output;
use crate::progress::Step;
use crate::project::Project;
use crate::system::{Driver, System};

/// Turns of untraced and traced measurement.
const TURNS: u64 = 3;

/// Pairs of one measurement: few enough that the ring holds what the agent has not yet read.
const PAIRS: u64 = 2000;

/// Four calls, each an entry and a return probe with a stack: the kernel's own floor for the two
/// probes is 1.1-1.3 us on a virtual machine, and three times that floor is accepted for the
/// arguments, the stack and the ring.
const TARGET_NS: f64 = 4.0 * 3.0 * 1300.0;

/// Measures in turns, so that a drift of the machine's speed meets both sides.
pub fn measure(project: &Project) -> Result<Figures> {
    refuse_other_agents()?;
    // Fresh files: probes that some agent left in the kernel belong to the old ones.
    let libraries = project.target.join("bench").join("standins");
    copy_libraries(&project.standins(), &libraries)?;
    let driver = Driver::StandIns {
        folder: libraries.clone(),
    };
    let mut step = Step::start("measuring cudaMalloc/cudaFree pairs");
    step.set_total(2 * TURNS);
    let mut untraced = Vec::new();
    let mut traced = Vec::new();
    for turn in 0..TURNS {
        step.at(2 * turn, "untraced");
        untraced.push(pair_ns(project, &libraries)?);
        step.at(2 * turn + 1, "traced");
        let folder = project.target.join("bench").join("probes");
        let mut system = System::new(project, &folder, driver.clone())?;
        system.start_agent()?;
        traced.push(pair_ns(project, &libraries)?);
        system.stop_agent()?;
    }
    step.done(&format!("{TURNS} turns of {PAIRS} pairs"));
    let untraced = median(&mut untraced);
    let traced = median(&mut traced);
    Ok(Figures::from([
        ("untraced_pair", Figure::watched(untraced, "ns")),
        ("traced_pair", Figure::watched(traced, "ns")),
        (
            "added_to_pair",
            Figure::at_most(traced - untraced, "ns", TARGET_NS),
        ),
    ]))
}

/// Another agent finds every process that maps a CUDA library, and would trace the untraced side.
fn refuse_other_agents() -> Result<()> {
    let processes = std::fs::read_dir("/proc").context("failed to read /proc")?;
    for process in processes.flatten() {
        let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        // The kernel keeps 15 characters of a name.
        if name.trim() == "vramscope-agent" {
            bail!(
                "process {} is another agent, which would trace the untraced side too: stop it",
                process.file_name().to_string_lossy()
            );
        }
    }
    Ok(())
}

fn copy_libraries(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        std::fs::remove_dir_all(to).with_context(|| format!("failed to empty {}", to.display()))?;
    }
    std::fs::create_dir_all(to).with_context(|| format!("failed to create {}", to.display()))?;
    for entry in
        std::fs::read_dir(from).with_context(|| format!("failed to read {}", from.display()))?
    {
        let source = entry.context("failed to read a folder")?.path();
        let target = to.join(source.file_name().unwrap_or_default());
        std::fs::copy(&source, &target)
            .with_context(|| format!("failed to copy {}", source.display()))?;
    }
    Ok(())
}

/// Measures in a process of its own: one mapped library, one context, nothing of ours.
fn pair_ns(project: &Project, libraries: &Path) -> Result<f64> {
    // Not our own executable: the build has just replaced it.
    let mut command = Command::new(project.binary("xtask"));
    command
        .args(["bench", "--pairs"])
        .arg(libraries.join("libcudart.so.13"))
        .arg(PAIRS.to_string())
        .env("LD_LIBRARY_PATH", libraries);
    let output = output(&mut command)?;
    if !output.status.success() {
        bail!(
            "the measuring process failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim()
        .parse()
        .with_context(|| format!("the measuring process printed {text:?}"))
}
