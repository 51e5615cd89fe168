//! Device memory of another process.
//!
//! A handle holds who exported which block. Opened memory is the exporter's: it takes address space
//! here, is in no book here, and takes nothing of the card. Opening a handle again in the same context
//! gives the same address and one more reference, as documented.

use std::ffi::c_uint;

use vramscope_fake_host::{ledger::Kind, process};

use crate::{
    Context,
    codes::*,
    state::{State, state},
};

/// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which a caller has to give.
const LAZY_PEER_ACCESS: c_uint = 1;
const MARK: u64 = u64::from_ne_bytes(*b"VSIPCMEM");

/// CUipcMemHandle: 64 bytes, opaque to callers. Larger than two words, so C passes it by value on
/// the stack.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    words: [u64; 8],
}

/// Opened memory, by address.
pub struct Opened {
    pub context: Context,
    handle: Handle,
    bytes: usize,
    references: u32,
}

impl State {
    pub fn close_opened(&mut self, address: usize) {
        if let Some(opened) = self.opened.remove(&address) {
            self.addresses.give(address, opened.bytes);
        }
    }
}

/// Only memory of `cuMemAlloc` and its like can be exported.
pub fn export(address: usize) -> CuResult<Handle> {
    let state = state();
    state.current()?;
    let inside = state.accounts.overlapping(Kind::Device, address, 1).next();
    let (start, block) = inside.ok_or(INVALID_VALUE)?;
    if block.kind != Kind::Device {
        return Err(INVALID_VALUE);
    }
    let pid = std::process::id();
    let ticks = process::start_ticks(pid).ok_or(NOT_SUPPORTED)?;
    let (start, device) = (start as u64, u64::from(block.device.unwrap_or(0)));
    Ok(Handle {
        words: [
            MARK,
            u64::from(pid),
            ticks,
            start,
            block.bytes,
            device,
            0,
            0,
        ],
    })
}

pub fn open(handle: Handle, flags: c_uint) -> CuResult<usize> {
    let mut state = state();
    let (context, _) = state.current()?;
    let [mark, pid, ticks, _, bytes, ..] = handle.words;
    if flags != LAZY_PEER_ACCESS {
        return Err(INVALID_VALUE);
    }
    let pid = u32::try_from(pid).map_err(|_| INVALID_HANDLE)?;
    let bytes = usize::try_from(bytes).map_err(|_| INVALID_HANDLE)?;
    if mark != MARK || bytes == 0 {
        return Err(INVALID_HANDLE);
    }
    // A process cannot open its own memory.
    if pid == std::process::id() {
        return Err(INVALID_CONTEXT);
    }
    if !process::is_alive(pid, ticks) {
        return Err(MAP_FAILED);
    }
    let again = state
        .opened
        .iter_mut()
        .find(|(_, opened)| opened.handle == handle && opened.context == context);
    if let Some((address, opened)) = again {
        opened.references += 1;
        return Ok(*address);
    }
    let address = state.addresses.take(bytes, 1).ok_or(MAP_FAILED)?;
    let opened = Opened {
        context,
        handle,
        bytes,
        references: 1,
    };
    state.opened.insert(address, opened);
    Ok(address)
}

pub fn close(address: usize) -> CuResult<()> {
    let mut state = state();
    state.current()?;
    let opened = state.opened.get_mut(&address).ok_or(INVALID_VALUE)?;
    opened.references -= 1;
    if opened.references == 0 {
        state.close_opened(address);
    }
    Ok(())
}
