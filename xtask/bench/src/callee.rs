//! Functions under test of `cargo xtask bench probes`: named as the driver's, so that an agent
//! hooks them, and doing nothing but what the probes read.
//!
//! Invariant: each starts with `push %rbp` as the vendor's functions do (the workspace's
//! `force-frame-pointers`), which is the instruction that the kernel emulates under a probe.

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Addresses are given out in turn from a few, so that the agent's books stay small.
static NEXT: AtomicUsize = AtomicUsize::new(0);
const BLOCKS: usize = 1024;
const FIRST: usize = 0x7f00_0000_0000;
const BLOCK_BYTES: usize = 1 << 21;

/// An allocation: recorded with its stack.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: Option<&mut usize>, _bytes: usize) -> c_int {
    if let Some(address) = address {
        let block = NEXT.fetch_add(1, Ordering::Relaxed) % BLOCKS;
        *address = FIRST + block * BLOCK_BYTES;
    }
    0
}

/// A call whose outcome is recorded, but no stack with it.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Option<&mut usize>, _device: c_int) -> c_int {
    if let Some(context) = context {
        *context = 0x10_0000;
    }
    0
}
