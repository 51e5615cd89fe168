//! Scenarios about how a process ends, and what it leaves then.

use anyhow::{bail, ensure};

use super::runtime::Runtime;

const MIB: usize = 1 << 20;

const BEFORE_FORK_BYTES: usize = 7 * MIB;
const CHILD_BYTES: usize = 5 * MIB;
const PARENT_BYTES: usize = 3 * MIB;
const HELD_BYTES: usize = 64 * MIB;
const HELD_PINNED_BYTES: usize = 2 * MIB;

/// Allocates device and pinned memory, which stays until the process ends.
#[inline(never)]
pub fn hold_memory() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    runtime.malloc(HELD_BYTES)?;
    runtime.host_alloc(HELD_PINNED_BYTES)?;
    Ok(())
}

/// Forks a child that allocates twice, frees once and exits; then the parent allocates.
pub fn fork(after_use: bool) -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    if after_use {
        runtime.malloc(BEFORE_FORK_BYTES)?;
    }
    // SAFETY: this program has one thread, so the child finds no lock held by a thread it lacks.
    let child = unsafe { libc::fork() };
    match child {
        -1 => bail!("fork failed: {}", std::io::Error::last_os_error()),
        0 => {
            let code = match allocate_in_child(&runtime) {
                Ok(()) => 0,
                Err(error) => {
                    eprintln!("vramscope-workload: child: {error:#}");
                    1
                }
            };
            std::process::exit(code);
        }
        _ => {}
    }
    let mut status = 0;
    // SAFETY: the child just made, and one output.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    ensure!(
        waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "the child failed"
    );
    allocate_in_parent(&runtime)
}

#[inline(never)]
fn allocate_in_child(runtime: &Runtime) -> anyhow::Result<()> {
    runtime.malloc(CHILD_BYTES)?;
    let second = runtime.malloc(CHILD_BYTES)?;
    runtime.free(second);
    Ok(())
}

#[inline(never)]
fn allocate_in_parent(runtime: &Runtime) -> anyhow::Result<()> {
    runtime.malloc(PARENT_BYTES)?;
    Ok(())
}
