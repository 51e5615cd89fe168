//! Result codes (cudaError_t) that the stand-in returns, with the names the interface documents.
//!
//! The driver's codes that can come through have the same numbers here, so they pass unchanged.

use std::ffi::{CStr, c_int};

pub type CudaResult<T> = Result<T, c_int>;

pub const SUCCESS: c_int = 0;
pub const INVALID_VALUE: c_int = 1;
pub const INVALID_CHANNEL_DESCRIPTOR: c_int = 20;
pub const INSUFFICIENT_DRIVER: c_int = 35;
pub const INVALID_DEVICE: c_int = 101;
pub const PEER_ACCESS_UNSUPPORTED: c_int = 217;
pub const INVALID_RESOURCE_HANDLE: c_int = 400;
pub const NOT_SUPPORTED: c_int = 801;

/// A code's name and a description in our own words.
pub fn describe(code: c_int) -> (&'static CStr, &'static CStr) {
    match code {
        SUCCESS => (c"cudaSuccess", c"no error"),
        INVALID_VALUE => (c"cudaErrorInvalidValue", c"invalid argument"),
        2 => (c"cudaErrorMemoryAllocation", c"out of memory"),
        INVALID_CHANNEL_DESCRIPTOR => (
            c"cudaErrorInvalidChannelDescriptor",
            c"invalid channel descriptor",
        ),
        3 => (c"cudaErrorInitializationError", c"initialization error"),
        INSUFFICIENT_DRIVER => (
            c"cudaErrorInsufficientDriver",
            c"no CUDA driver, or one too old for this runtime",
        ),
        INVALID_DEVICE => (c"cudaErrorInvalidDevice", c"invalid device ordinal"),
        201 => (c"cudaErrorDeviceUninitialized", c"no valid context"),
        205 => (
            c"cudaErrorMapBufferObjectFailed",
            c"memory cannot be mapped",
        ),
        PEER_ACCESS_UNSUPPORTED => (
            c"cudaErrorPeerAccessUnsupported",
            c"devices cannot reach each other's memory",
        ),
        INVALID_RESOURCE_HANDLE => (c"cudaErrorInvalidResourceHandle", c"no such handle"),
        500 => (c"cudaErrorSymbolNotFound", c"name not found"),
        709 => (
            c"cudaErrorContextIsDestroyed",
            c"the current context has been destroyed",
        ),
        712 => (
            c"cudaErrorHostMemoryAlreadyRegistered",
            c"host memory is already registered",
        ),
        713 => (
            c"cudaErrorHostMemoryNotRegistered",
            c"host memory is not registered",
        ),
        NOT_SUPPORTED => (c"cudaErrorNotSupported", c"not supported"),
        // The vendor's says the same of a code that it does not know.
        _ => (c"unrecognized error code", c"unrecognized error code"),
    }
}
