//! Result codes (CUresult) that the stand-in returns, with the names the interface documents.

use std::ffi::{CStr, c_char, c_int};

use crate::Out;

pub type CuResult<T> = Result<T, c_int>;

pub const SUCCESS: c_int = 0;
pub const INVALID_VALUE: c_int = 1;
pub const OUT_OF_MEMORY: c_int = 2;
pub const NOT_INITIALIZED: c_int = 3;
pub const INVALID_DEVICE: c_int = 101;
pub const INVALID_CONTEXT: c_int = 201;
pub const MAP_FAILED: c_int = 205;
pub const INVALID_HANDLE: c_int = 400;
pub const NOT_FOUND: c_int = 500;
pub const CONTEXT_IS_DESTROYED: c_int = 709;
pub const HOST_MEMORY_ALREADY_REGISTERED: c_int = 712;
pub const HOST_MEMORY_NOT_REGISTERED: c_int = 713;
pub const NOT_SUPPORTED: c_int = 801;

/// A code's name and a description in our own words.
pub fn describe(code: c_int) -> Option<(&'static CStr, &'static CStr)> {
    let known = match code {
        SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"driver not initialized"),
        INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"no such device"),
        INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"no valid context"),
        MAP_FAILED => (c"CUDA_ERROR_MAP_FAILED", c"memory cannot be mapped"),
        INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"no such handle"),
        NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"not supported"),
        NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"name not found"),
        CONTEXT_IS_DESTROYED => (
            c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
            c"the current context has been destroyed",
        ),
        HOST_MEMORY_ALREADY_REGISTERED => (
            c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            c"host memory is already registered",
        ),
        HOST_MEMORY_NOT_REGISTERED => (
            c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            c"host memory is not registered",
        ),
        _ => return None,
    };
    Some(known)
}

/// Hands a text out; an unknown code gives a null text and CUDA_ERROR_INVALID_VALUE.
pub fn put_text(out: Out<*const c_char>, text: Option<&'static CStr>) -> c_int {
    let Some(out) = out else {
        return INVALID_VALUE;
    };
    out.write(text.map_or(std::ptr::null(), CStr::as_ptr));
    if text.is_some() {
        SUCCESS
    } else {
        INVALID_VALUE
    }
}
