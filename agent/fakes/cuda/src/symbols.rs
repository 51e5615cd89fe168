//! `cuGetProcAddress`: which exported function stands for a name at an interface version.
//!
//! As with the vendor's, a name without suffix means the newest variant that the asked version has, of
//! the two for streams the one that the flags ask for; and the answer is exactly the exported
//! symbol's address, so a probe on the export sees the call.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::{
    Out,
    codes::{INVALID_VALUE, NOT_FOUND, SUCCESS},
    doors,
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
    ($($base:literal => $door:ident::$exported:ident, $since:literal .. $until:expr;)*) => {
        &[$(Symbol {
            base: $base,
            exported: stringify!($exported),
            since: $since,
            until: $until,
            address: doors::$door::$exported as *const (),
        }),*]
    };
}

const NEVER: c_int = c_int::MAX;

/// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
const PER_THREAD_STREAM: u64 = 2;
const PER_THREAD_SUFFIX: &str = "_ptsz";

// SAFETY: the addresses are those of functions, which never change.
unsafe impl Sync for Symbol {}

/// Versions are those of the interface's documented history. Variants that the stand-in lacks are
/// gaps, never filled by another variant: the first `cuMemAlloc` has 32-bit addresses.
static TABLE: &[Symbol] = symbols! {
    "cuInit" => devices::cuInit, 2000..NEVER;
    "cuDriverGetVersion" => devices::cuDriverGetVersion, 2020..NEVER;
    "cuDeviceGetCount" => devices::cuDeviceGetCount, 2000..NEVER;
    "cuDeviceGet" => devices::cuDeviceGet, 2000..NEVER;
    "cuDeviceGetName" => devices::cuDeviceGetName, 2000..NEVER;
    "cuDeviceGetUuid" => devices::cuDeviceGetUuid, 9020..11040;
    "cuDeviceGetUuid" => devices::cuDeviceGetUuid_v2, 11040..NEVER;
    "cuDeviceGetAttribute" => devices::cuDeviceGetAttribute, 2000..NEVER;
    "cuDeviceTotalMem" => devices::cuDeviceTotalMem_v2, 3020..NEVER;
    "cuDevicePrimaryCtxRetain" => contexts::cuDevicePrimaryCtxRetain, 7000..NEVER;
    "cuDevicePrimaryCtxRelease" => contexts::cuDevicePrimaryCtxRelease, 7000..11000;
    "cuDevicePrimaryCtxRelease" => contexts::cuDevicePrimaryCtxRelease_v2, 11000..NEVER;
    "cuDevicePrimaryCtxReset" => contexts::cuDevicePrimaryCtxReset, 7000..11000;
    "cuDevicePrimaryCtxReset" => contexts::cuDevicePrimaryCtxReset_v2, 11000..NEVER;
    "cuDevicePrimaryCtxGetState" => contexts::cuDevicePrimaryCtxGetState, 7000..NEVER;
    "cuCtxCreate" => contexts::cuCtxCreate, 2000..3020;
    "cuCtxCreate" => contexts::cuCtxCreate_v2, 3020..11040;
    "cuCtxCreate" => contexts::cuCtxCreate_v3, 11040..12050;
    "cuCtxCreate" => contexts::cuCtxCreate_v4, 12050..NEVER;
    "cuCtxDestroy" => contexts::cuCtxDestroy, 2000..4000;
    "cuCtxDestroy" => contexts::cuCtxDestroy_v2, 4000..NEVER;
    "cuCtxGetCurrent" => contexts::cuCtxGetCurrent, 4000..NEVER;
    "cuCtxSetCurrent" => contexts::cuCtxSetCurrent, 4000..NEVER;
    "cuCtxPushCurrent" => contexts::cuCtxPushCurrent, 2000..4000;
    "cuCtxPushCurrent" => contexts::cuCtxPushCurrent_v2, 4000..NEVER;
    "cuCtxPopCurrent" => contexts::cuCtxPopCurrent, 2000..4000;
    "cuCtxPopCurrent" => contexts::cuCtxPopCurrent_v2, 4000..NEVER;
    "cuCtxGetDevice" => contexts::cuCtxGetDevice, 2000..NEVER;
    "cuCtxSynchronize" => contexts::cuCtxSynchronize, 2000..13000;
    "cuCtxSynchronize" => contexts::cuCtxSynchronize_v2, 13000..NEVER;
    "cuStreamCreate" => contexts::cuStreamCreate, 2000..NEVER;
    "cuStreamDestroy" => contexts::cuStreamDestroy_v2, 4000..NEVER;
    "cuStreamSynchronize" => contexts::cuStreamSynchronize, 2000..NEVER;
    "cuStreamSynchronize" => contexts::cuStreamSynchronize_ptsz, 7000..NEVER;
    "cuMemGetInfo" => contexts::cuMemGetInfo_v2, 3020..NEVER;
    "cuMemAlloc" => blocks::cuMemAlloc_v2, 3020..NEVER;
    "cuMemAllocPitch" => blocks::cuMemAllocPitch_v2, 3020..NEVER;
    "cuMemAllocManaged" => blocks::cuMemAllocManaged, 6000..NEVER;
    "cuMemFree" => blocks::cuMemFree_v2, 3020..NEVER;
    "cuMemAllocHost" => blocks::cuMemAllocHost_v2, 3020..NEVER;
    "cuMemHostAlloc" => blocks::cuMemHostAlloc, 2020..NEVER;
    "cuMemFreeHost" => blocks::cuMemFreeHost, 2000..NEVER;
    "cuMemHostRegister" => blocks::cuMemHostRegister, 4000..6050;
    "cuMemHostRegister" => blocks::cuMemHostRegister_v2, 6050..NEVER;
    "cuMemHostUnregister" => blocks::cuMemHostUnregister, 4000..NEVER;
    "cuArrayCreate" => blocks::cuArrayCreate_v2, 3020..NEVER;
    "cuArray3DCreate" => blocks::cuArray3DCreate_v2, 3020..NEVER;
    "cuArrayDestroy" => blocks::cuArrayDestroy, 2000..NEVER;
    "cuMipmappedArrayCreate" => blocks::cuMipmappedArrayCreate, 5000..NEVER;
    "cuMipmappedArrayDestroy" => blocks::cuMipmappedArrayDestroy, 5000..NEVER;
    "cuMemAllocAsync" => pools::cuMemAllocAsync, 11020..NEVER;
    "cuMemAllocAsync" => pools::cuMemAllocAsync_ptsz, 11020..NEVER;
    "cuMemAllocFromPoolAsync" => pools::cuMemAllocFromPoolAsync, 11020..NEVER;
    "cuMemAllocFromPoolAsync" => pools::cuMemAllocFromPoolAsync_ptsz, 11020..NEVER;
    "cuMemFreeAsync" => pools::cuMemFreeAsync, 11020..NEVER;
    "cuMemFreeAsync" => pools::cuMemFreeAsync_ptsz, 11020..NEVER;
    "cuMemPoolCreate" => pools::cuMemPoolCreate, 11020..NEVER;
    "cuMemPoolDestroy" => pools::cuMemPoolDestroy, 11020..NEVER;
    "cuMemPoolTrimTo" => pools::cuMemPoolTrimTo, 11020..NEVER;
    "cuMemPoolGetAttribute" => pools::cuMemPoolGetAttribute, 11020..NEVER;
    "cuMemPoolSetAttribute" => pools::cuMemPoolSetAttribute, 11020..NEVER;
    "cuDeviceGetDefaultMemPool" => pools::cuDeviceGetDefaultMemPool, 11020..NEVER;
    "cuDeviceGetMemPool" => pools::cuDeviceGetMemPool, 11020..NEVER;
    "cuDeviceSetMemPool" => pools::cuDeviceSetMemPool, 11020..NEVER;
    "cuMemAddressReserve" => vmm::cuMemAddressReserve, 10020..NEVER;
    "cuMemAddressFree" => vmm::cuMemAddressFree, 10020..NEVER;
    "cuMemCreate" => vmm::cuMemCreate, 10020..NEVER;
    "cuMemRelease" => vmm::cuMemRelease, 10020..NEVER;
    "cuMemMap" => vmm::cuMemMap, 10020..NEVER;
    "cuMemUnmap" => vmm::cuMemUnmap, 10020..NEVER;
    "cuMemSetAccess" => vmm::cuMemSetAccess, 10020..NEVER;
    "cuMemGetAllocationGranularity" => vmm::cuMemGetAllocationGranularity, 10020..NEVER;
    "cuMemRetainAllocationHandle" => vmm::cuMemRetainAllocationHandle, 11000..NEVER;
    "cuMemExportToShareableHandle" => vmm::cuMemExportToShareableHandle, 10020..NEVER;
    "cuMemImportFromShareableHandle" => vmm::cuMemImportFromShareableHandle, 10020..NEVER;
    "cuIpcGetMemHandle" => ipc::cuIpcGetMemHandle, 4010..NEVER;
    "cuIpcOpenMemHandle" => ipc::cuIpcOpenMemHandle, 4010..11000;
    "cuIpcOpenMemHandle" => ipc::cuIpcOpenMemHandle_v2, 11000..NEVER;
    "cuIpcCloseMemHandle" => ipc::cuIpcCloseMemHandle, 4010..NEVER;
    "cuGetProcAddress" => names::cuGetProcAddress, 11030..12000;
    "cuGetProcAddress" => names::cuGetProcAddress_v2, 12000..NEVER;
    "cuGetErrorName" => names::cuGetErrorName, 6000..NEVER;
    "cuGetErrorString" => names::cuGetErrorString, 6000..NEVER;
    "cuStreamQuery" => copies::cuStreamQuery, 2000..NEVER;
    "cuMemcpy" => copies::cuMemcpy, 4000..NEVER;
    "cuMemcpyAsync" => copies::cuMemcpyAsync, 4000..NEVER;
    "cuMemsetD8" => copies::cuMemsetD8_v2, 3020..NEVER;
    "cuMemsetD8Async" => copies::cuMemsetD8Async, 3020..NEVER;
    "cuMemsetD32Async" => copies::cuMemsetD32Async, 3020..NEVER;
    "cuMemGetAddressRange" => copies::cuMemGetAddressRange_v2, 3020..NEVER;
    "cuPointerGetAttribute" => copies::cuPointerGetAttribute, 4000..NEVER;
    "cuMemPoolSetAccess" => pools::cuMemPoolSetAccess, 11020..NEVER;
    "cuFuncGetAttribute" => refused::cuFuncGetAttribute, 2020..NEVER;
    "cuFuncSetAttribute" => refused::cuFuncSetAttribute, 9000..NEVER;
    "cuFuncSetCacheConfig" => refused::cuFuncSetCacheConfig, 3000..NEVER;
    "cuLaunchCooperativeKernel" => refused::cuLaunchCooperativeKernel, 9000..NEVER;
    "cuLaunchKernel" => refused::cuLaunchKernel, 4000..NEVER;
    "cuLinkAddData" => refused::cuLinkAddData_v2, 6050..NEVER;
    "cuLinkComplete" => refused::cuLinkComplete, 5050..NEVER;
    "cuLinkCreate" => refused::cuLinkCreate_v2, 6050..NEVER;
    "cuMemGetAllocationPropertiesFromHandle" => refused::cuMemGetAllocationPropertiesFromHandle, 10020..NEVER;
    "cuModuleGetFunction" => refused::cuModuleGetFunction, 2000..NEVER;
    "cuModuleLoad" => refused::cuModuleLoad, 2000..NEVER;
    "cuModuleLoadData" => refused::cuModuleLoadData, 2000..NEVER;
    "cuModuleLoadDataEx" => refused::cuModuleLoadDataEx, 2010..NEVER;
    "cuModuleUnload" => refused::cuModuleUnload, 2000..NEVER;
    "cuOccupancyMaxActiveBlocksPerMultiprocessor" => refused::cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050..NEVER;
    "cuStreamWriteValue32" => refused::cuStreamWriteValue32_v2, 11070..NEVER;
    "cuTensorMapEncodeTiled" => refused::cuTensorMapEncodeTiled, 12000..NEVER;
};

/// Looks a name up, with or without the variant's suffix.
///
/// # Safety
/// `symbol` must be null or point to a string that ends in a zero byte.
pub unsafe fn proc_address(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    cuda_version: c_int,
    flags: u64,
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
    let found = find(name.to_bytes(), cuda_version, flags);
    function.write(found.map_or(std::ptr::null_mut(), |address| address.cast_mut().cast()));
    if let Some(status) = status {
        status.write(found.err().unwrap_or(FOUND));
    }
    if found.is_ok() { SUCCESS } else { NOT_FOUND }
}

fn find(name: &[u8], cuda_version: c_int, flags: u64) -> Result<*const (), c_int> {
    let wants_per_thread = flags & PER_THREAD_STREAM != 0;
    let mut is_known = false;
    let mut found = None;
    for symbol in TABLE {
        let is_variant = symbol.exported.as_bytes() == name && symbol.exported != symbol.base;
        if is_variant {
            return Ok(symbol.address);
        }
        if symbol.base.as_bytes() != name {
            continue;
        }
        is_known = true;
        if !(symbol.since..symbol.until).contains(&cuda_version) {
            continue;
        }
        let is_per_thread = symbol.exported.ends_with(PER_THREAD_SUFFIX);
        // A call that has no variant for the thread's own stream has the one for both.
        if is_per_thread == wants_per_thread || found.is_none() && !is_per_thread {
            found = Some(symbol.address);
        }
    }
    found.ok_or(if is_known {
        VERSION_NOT_SUFFICIENT
    } else {
        SYMBOL_NOT_FOUND
    })
}
