//! `cuGetProcAddress`: which exported function stands for a name at an interface version.
//!
//! As with the vendor's, a name without suffix means the newest variant that the asked version has,
//! and the answer is exactly the exported symbol's address, so a probe on the export sees the call.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::{
    Out,
    codes::{INVALID_VALUE, NOT_FOUND, SUCCESS},
};

/// CUdriverProcAddressQueryResult.
const FOUND: c_int = 0;
const SYMBOL_NOT_FOUND: c_int = 1;
const VERSION_NOT_SUFFICIENT: c_int = 2;

struct Symbol {
    /// Name without suffix.
    base: &'static str,
    exported: &'static str,
    /// The first interface version in which the base name means this variant.
    since: c_int,
    /// The first version in which it means another variant.
    until: c_int,
    address: *const (),
}

macro_rules! symbols {
    ($($base:literal => $exported:ident, $since:literal .. $until:expr;)*) => {
        [$(Symbol {
            base: $base,
            exported: stringify!($exported),
            since: $since,
            until: $until,
            address: crate::$exported as *const (),
        }),*]
    };
}

const NEVER: c_int = c_int::MAX;

/// Versions are those of the interface's documented history. Variants that the stand-in lacks are
/// gaps, never filled by another variant: `cuCtxCreate` has other arguments from 11.4 on.
fn table() -> [Symbol; 31] {
    symbols! {
        "cuInit" => cuInit, 2000..NEVER;
        "cuDriverGetVersion" => cuDriverGetVersion, 2020..NEVER;
        "cuDeviceGetCount" => cuDeviceGetCount, 2000..NEVER;
        "cuDeviceGet" => cuDeviceGet, 2000..NEVER;
        "cuDeviceGetName" => cuDeviceGetName, 2000..NEVER;
        "cuDeviceGetUuid" => cuDeviceGetUuid, 9020..11040;
        "cuDeviceGetUuid" => cuDeviceGetUuid_v2, 11040..NEVER;
        "cuDeviceGetAttribute" => cuDeviceGetAttribute, 2000..NEVER;
        "cuDeviceTotalMem" => cuDeviceTotalMem_v2, 3020..NEVER;
        "cuDevicePrimaryCtxRetain" => cuDevicePrimaryCtxRetain, 7000..NEVER;
        "cuDevicePrimaryCtxRelease" => cuDevicePrimaryCtxRelease_v2, 11000..NEVER;
        "cuDevicePrimaryCtxReset" => cuDevicePrimaryCtxReset_v2, 11000..NEVER;
        "cuDevicePrimaryCtxGetState" => cuDevicePrimaryCtxGetState, 7000..NEVER;
        "cuCtxCreate" => cuCtxCreate_v2, 3020..11040;
        "cuCtxDestroy" => cuCtxDestroy_v2, 4000..NEVER;
        "cuCtxGetCurrent" => cuCtxGetCurrent, 4000..NEVER;
        "cuCtxSetCurrent" => cuCtxSetCurrent, 4000..NEVER;
        "cuCtxPushCurrent" => cuCtxPushCurrent_v2, 4000..NEVER;
        "cuCtxPopCurrent" => cuCtxPopCurrent_v2, 4000..NEVER;
        "cuCtxGetDevice" => cuCtxGetDevice, 2000..NEVER;
        "cuMemGetInfo" => cuMemGetInfo_v2, 3020..NEVER;
        "cuMemAlloc" => cuMemAlloc_v2, 3020..NEVER;
        "cuMemFree" => cuMemFree_v2, 3020..NEVER;
        "cuMemHostAlloc" => cuMemHostAlloc, 2020..NEVER;
        "cuMemFreeHost" => cuMemFreeHost, 2000..NEVER;
        "cuMemHostRegister" => cuMemHostRegister_v2, 6050..NEVER;
        "cuMemHostUnregister" => cuMemHostUnregister, 4000..NEVER;
        "cuGetProcAddress" => cuGetProcAddress, 11030..12000;
        "cuGetProcAddress" => cuGetProcAddress_v2, 12000..NEVER;
        "cuGetErrorName" => cuGetErrorName, 6000..NEVER;
        "cuGetErrorString" => cuGetErrorString, 6000..NEVER;
    }
}

/// Looks a name up, with or without the variant's suffix.
///
/// # Safety
/// `symbol` must be null or point to a string that ends in a zero byte.
pub unsafe fn proc_address(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    cuda_version: c_int,
    status: Out<c_int>,
) -> c_int {
    let Some(function) = function else {
        return INVALID_VALUE;
    };
    if symbol.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, so the caller vouches for a string that ends in a zero byte.
    let name = unsafe { CStr::from_ptr(symbol) };
    let found = find(name.to_bytes(), cuda_version);
    function.write(found.map_or(std::ptr::null_mut(), |address| address.cast_mut().cast()));
    if let Some(status) = status {
        status.write(found.err().unwrap_or(FOUND));
    }
    if found.is_ok() { SUCCESS } else { NOT_FOUND }
}

fn find(name: &[u8], cuda_version: c_int) -> Result<*const (), c_int> {
    let mut is_known = false;
    for symbol in table() {
        let is_variant = symbol.exported.as_bytes() == name && symbol.exported != symbol.base;
        if is_variant {
            return Ok(symbol.address);
        }
        if symbol.base.as_bytes() == name {
            is_known = true;
            if (symbol.since..symbol.until).contains(&cuda_version) {
                return Ok(symbol.address);
            }
        }
    }
    Err(if is_known {
        VERSION_NOT_SUFFICIENT
    } else {
        SYMBOL_NOT_FOUND
    })
}
