//! Stream-ordered memory and pools.

use std::ffi::{c_int, c_void};

use super::{code, put, put_new};
use crate::{
    Out, Pool, Stream,
    blocks::{self, BY_FREE_ASYNC},
    codes::INVALID_VALUE,
    pools::{self, Attribute, PoolProperties},
};

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(address: Out<usize>, bytes: usize, stream: Stream) -> c_int {
    code(pools::allocate(address, bytes, None, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync_ptsz(address: Out<usize>, bytes: usize, stream: Stream) -> c_int {
    distinct!("cuMemAllocAsync_ptsz");
    code(pools::allocate(address, bytes, None, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocFromPoolAsync(
    address: Out<usize>,
    bytes: usize,
    pool: Pool,
    stream: Stream,
) -> c_int {
    code(pools::allocate(address, bytes, Some(pool), stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocFromPoolAsync_ptsz(
    address: Out<usize>,
    bytes: usize,
    pool: Pool,
    stream: Stream,
) -> c_int {
    distinct!("cuMemAllocFromPoolAsync_ptsz");
    code(pools::allocate(address, bytes, Some(pool), stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: usize, _stream: Stream) -> c_int {
    code(blocks::free(BY_FREE_ASYNC, address))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync_ptsz(address: usize, _stream: Stream) -> c_int {
    distinct!("cuMemFreeAsync_ptsz");
    code(blocks::free(BY_FREE_ASYNC, address))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolCreate(pool: Out<Pool>, properties: Option<&PoolProperties>) -> c_int {
    put_new(pool, || pools::create(properties.ok_or(INVALID_VALUE)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolDestroy(pool: Pool) -> c_int {
    code(pools::destroy(pool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolTrimTo(pool: Pool, keep: usize) -> c_int {
    code(pools::trim_to(pool, keep))
}

/// # Safety
/// `value` must be null or point to an `int` or a 64-bit number, as the attribute has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolGetAttribute(
    pool: Pool,
    attribute: c_int,
    value: *mut c_void,
) -> c_int {
    if value.is_null() {
        return INVALID_VALUE;
    }
    code(pools::attribute(pool, attribute).map(|found| {
        // SAFETY: the caller's promise, and not null.
        unsafe {
            match found {
                Attribute::Int(number) => value.cast::<c_int>().write_unaligned(number),
                Attribute::Bytes(bytes) => value.cast::<u64>().write_unaligned(bytes),
            }
        }
    }))
}

/// # Safety
/// As for [`cuMemPoolGetAttribute`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolSetAttribute(
    pool: Pool,
    attribute: c_int,
    value: *mut c_void,
) -> c_int {
    // SAFETY: the caller keeps this function's own contract.
    code(unsafe { pools::set_attribute(pool, attribute, value) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<Pool>, device: c_int) -> c_int {
    put(pool, pools::default_of(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetMemPool(pool: Out<Pool>, device: c_int) -> c_int {
    put(pool, pools::current_of(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceSetMemPool(device: c_int, pool: Pool) -> c_int {
    code(pools::set_current(device, pool))
}

/// Which devices may reach a pool's memory. Checked, and without effect: no device computes.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAccess(
    pool: Pool,
    descriptions: *const c_void,
    count: usize,
) -> c_int {
    if descriptions.is_null() && count > 0 {
        return INVALID_VALUE;
    }
    code(pools::require(pool))
}
