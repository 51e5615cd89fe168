//! What benchmarks call: a library named as the driver's, so that an agent hooks it, whose
//! functions do nothing but hand out addresses. The stand-ins proper keep a ledger and map address
//! space, which costs several times what a probe does and would be what is measured.
//!
//! Invariant: each function starts with `push %rbp` as the vendor's do (the workspace's
//! `force-frame-pointers`), which is the instruction that the kernel emulates under a probe.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

const FIRST: usize = 0x7f00_0000_0000;
/// Address space of one block, whatever its size.
const BLOCK_BYTES: usize = 1 << 21;
const CONTEXT: usize = 0x10_0000;

/// A freed address is the next to be given out, as allocators like it.
struct Addresses {
    free: Vec<usize>,
    next: usize,
}

static ADDRESSES: Mutex<Addresses> = Mutex::new(Addresses {
    free: Vec::new(),
    next: FIRST,
});

/// An allocation: recorded with its stack.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: Option<&mut usize>, _bytes: usize) -> c_int {
    let mut addresses = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(address) = address {
        *address = addresses.free.pop().unwrap_or_else(|| {
            addresses.next += BLOCK_BYTES;
            addresses.next
        });
    }
    0
}

/// Its end: recorded with its stack.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    let mut addresses = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    addresses.free.push(address);
    0
}

/// A call whose outcome is recorded, but no stack with it.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Option<&mut usize>, _device: c_int) -> c_int {
    if let Some(context) = context {
        *context = CONTEXT;
    }
    0
}

/// Tells the agent on which device the thread works.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    c_int::from(context != CONTEXT)
}
