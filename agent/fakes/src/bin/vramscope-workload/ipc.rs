//! `ipc`: a process exports device memory, a second one, which it starts, opens it.

use std::process::Command;

use anyhow::{Context, ensure};

use super::runtime::{IpcHandle, Runtime};

const MIB: usize = 1 << 20;

const EXPORTED_BYTES: usize = 24 * MIB;
const OWN_BYTES: usize = 3 * MIB;

/// The exporter: its block stays until it ends.
pub fn export() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let block = runtime.malloc(EXPORTED_BYTES)?;
    let handle = runtime.ipc_handle(block)?;
    let hex: String = handle.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let program = std::env::current_exe().context("failed to find this program")?;
    let status = Command::new(program)
        .args(["ipc-open", &hex])
        .status()
        .context("failed to start the opener")?;
    ensure!(status.success(), "the opener failed: {status}");
    Ok(())
}

/// The opener: it has a block of its own, and the exporter's opened when it ends.
pub fn open(hex: &str) -> anyhow::Result<()> {
    let handle = parse(hex).context("a handle is 128 hexadecimal digits")?;
    let runtime = Runtime::load()?;
    runtime.malloc(OWN_BYTES)?;
    let refused = runtime.try_open_ipc(IpcHandle([0; 64]));
    ensure!(refused.is_err(), "a handle of zeros was opened");
    open_twice_and_close(&runtime, handle)?;
    runtime.expect("cudaIpcOpenMemHandle", runtime.try_open_ipc(handle))?;
    Ok(())
}

/// A handle opened twice gives one address, which lasts until the second closing.
#[inline(never)]
fn open_twice_and_close(runtime: &Runtime, handle: IpcHandle) -> anyhow::Result<()> {
    let first = runtime.expect("cudaIpcOpenMemHandle", runtime.try_open_ipc(handle))?;
    let second = runtime.expect("cudaIpcOpenMemHandle", runtime.try_open_ipc(handle))?;
    ensure!(first == second, "one handle has two addresses");
    runtime.close_ipc(first)?;
    runtime.close_ipc(second)
}

fn parse(hex: &str) -> Option<IpcHandle> {
    let mut bytes = [0; 64];
    if hex.len() != 2 * bytes.len() || !hex.is_ascii() {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(IpcHandle(bytes))
}
