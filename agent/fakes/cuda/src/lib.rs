//! Stand-in for `libcuda.so.1`: the documented part of the driver API that allocates, on two cards
//! of 8 GiB that are really address space of the process.
//!
//! This file is the door: thin functions under the vendor's names and argument orders, which hand
//! over to [`driver`]. Invariants:
//! - nothing here panics, since a panic must not cross into C: it would end the program;
//! - a null output pointer is refused with CUDA_ERROR_INVALID_VALUE;
//! - output parameters are `Option<&mut MaybeUninit<T>>`, which C sees as a pointer that may be
//!   null. That the pointer, where not null, points to a `T` is the caller's part, as with the vendor's.

mod codes;
mod driver;
mod memory;
mod symbols;

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem::MaybeUninit,
};

use codes::{CuResult, INVALID_VALUE, SUCCESS};
use vramscope_fakes::{card, ledger::Kind};

/// An output parameter: in C a pointer.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// CUcontext: an opaque handle, 0 for none.
type Context = usize;

fn code(result: CuResult<()>) -> c_int {
    match result {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}

/// Writes a result to where the caller wants it.
fn put<T>(out: Out<T>, value: CuResult<T>) -> c_int {
    let Some(out) = out else {
        return INVALID_VALUE;
    };
    code(value.map(|value| {
        out.write(value);
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    code(driver::init(flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    put(version, Ok(card::CUDA_VERSION))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    put(count, driver::device_count())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> c_int {
    put(device, driver::device(ordinal).map(|_| ordinal))
}

/// # Safety
/// `name` must be null or point to `len` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int {
    if name.is_null() || len <= 0 {
        return INVALID_VALUE;
    }
    if let Err(code) = driver::device(device) {
        return code;
    }
    let shown = card::NAME.len().min(len as usize - 1);
    // SAFETY: the caller gives `len` writable bytes, and shown + 1 <= len.
    unsafe {
        std::ptr::copy_nonoverlapping(card::NAME.as_ptr(), name.cast(), shown);
        name.add(shown).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    put(uuid, driver::device_uuid(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    put(uuid, driver::device_uuid(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    device: c_int,
) -> c_int {
    put(value, driver::device_attribute(attribute, device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> c_int {
    let total = driver::device(device).map(|_| card::DEVICE_BYTES as usize);
    put(bytes, total)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<Context>, device: c_int) -> c_int {
    let Some(context) = context else {
        return INVALID_VALUE;
    };
    put(Some(context), driver::primary_retain(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    code(driver::primary_release(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> c_int {
    code(driver::primary_reset(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) -> c_int {
    let (Some(flags), Some(active)) = (flags, active) else {
        return INVALID_VALUE;
    };
    code(driver::primary_active(device).map(|is_active| {
        flags.write(0);
        active.write(c_int::from(is_active));
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v2(context: Out<Context>, flags: c_uint, device: c_int) -> c_int {
    let Some(context) = context else {
        return INVALID_VALUE;
    };
    put(Some(context), driver::context_create(flags, device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: Context) -> c_int {
    code(driver::context_destroy(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<Context>) -> c_int {
    put(context, driver::context_current())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Context) -> c_int {
    code(driver::context_set_current(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Context) -> c_int {
    code(driver::context_push(context))
}

/// The output is optional here: the vendor's takes null for "drop it".
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: Out<Context>) -> c_int {
    code(driver::context_pop().map(|popped| {
        if let Some(context) = context {
            context.write(popped);
        }
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> c_int {
    put(device, driver::context_device())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    let (Some(free), Some(total)) = (free, total) else {
        return INVALID_VALUE;
    };
    code(driver::memory_free().map(|bytes| {
        free.write(bytes as usize);
        total.write(card::DEVICE_BYTES as usize);
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: Out<usize>, bytes: usize) -> c_int {
    code(driver::allocate(Kind::Device, address, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    // The vendor's frees nothing, successfully, at address 0, as cudaFree is documented to.
    if address == 0 {
        return code(driver::require_context());
    }
    code(driver::free(Kind::Device, address))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(address: Out<usize>, bytes: usize, flags: c_uint) -> c_int {
    code(driver::allocate_pinned(address, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: *mut c_void) -> c_int {
    code(driver::free(Kind::PinnedHost, address as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    code(driver::register(address as usize, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(address: *mut c_void) -> c_int {
    code(driver::free(Kind::RegisteredHost, address as usize))
}

/// # Safety
/// `symbol` must be null or point to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    cuda_version: c_int,
    _flags: u64,
) -> c_int {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { symbols::proc_address(symbol, function, cuda_version, None) }
}

/// # Safety
/// `symbol` must be null or point to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    cuda_version: c_int,
    _flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { symbols::proc_address(symbol, function, cuda_version, status) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: c_int, text: Out<*const c_char>) -> c_int {
    codes::put_text(text, codes::describe(error).map(|known| known.0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: c_int, text: Out<*const c_char>) -> c_int {
    codes::put_text(text, codes::describe(error).map(|known| known.1))
}
