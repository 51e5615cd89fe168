//! Functions and errors by name, and the hook for tests.

use std::ffi::{c_char, c_int, c_void};

use crate::{Out, codes, hook, symbols};

/// # Safety
/// `symbol` must be null or point to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    cuda_version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { symbols::proc_address(symbol, function, cuda_version, flags, None) }
}

/// # Safety
/// `symbol` must be null or point to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    cuda_version: c_int,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { symbols::proc_address(symbol, function, cuda_version, flags, status) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: c_int, text: Out<*const c_char>) -> c_int {
    codes::put_text(text, codes::describe(error).map(|known| known.0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: c_int, text: Out<*const c_char>) -> c_int {
    codes::put_text(text, codes::describe(error).map(|known| known.1))
}

/// Not the vendor's: see [`hook`]. `moment` is 0 for before the allocation, 1 for after it.
#[unsafe(no_mangle)]
pub extern "C" fn vramscope_fake_hook(
    function: Option<hook::Hook>,
    argument: *mut c_void,
    moment: c_int,
) {
    hook::install(function, argument, moment);
}
