//! Virtual memory management.

use std::ffi::{c_int, c_uint, c_void};

use super::{code, put};
use crate::{
    Memory, Out,
    codes::INVALID_VALUE,
    vmm::{self, Properties},
};

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressReserve(
    address: Out<usize>,
    bytes: usize,
    alignment: usize,
    wanted: usize,
    flags: u64,
) -> c_int {
    code(vmm::reserve(address, bytes, alignment, wanted, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(address: usize, bytes: usize) -> c_int {
    code(vmm::unreserve(address, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemCreate(
    handle: Out<Memory>,
    bytes: usize,
    properties: Option<&Properties>,
    flags: u64,
) -> c_int {
    code(vmm::create(handle, bytes, properties, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: Memory) -> c_int {
    code(vmm::release(handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(
    address: usize,
    bytes: usize,
    offset: usize,
    handle: Memory,
    flags: u64,
) -> c_int {
    code(vmm::map(address, bytes, offset, handle, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(address: usize, bytes: usize) -> c_int {
    code(vmm::unmap(address, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(
    address: usize,
    bytes: usize,
    descriptions: *const c_void,
    count: usize,
) -> c_int {
    let count = if descriptions.is_null() { 0 } else { count };
    code(vmm::set_access(address, bytes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationGranularity(
    granularity: Out<usize>,
    properties: Option<&Properties>,
    _option: c_int,
) -> c_int {
    put(granularity, vmm::granularity(properties))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRetainAllocationHandle(handle: Out<Memory>, address: *mut c_void) -> c_int {
    code(vmm::retain(handle, address as usize))
}

/// # Safety
/// `shared` must be null or point to an `int`: file descriptors are the only type there is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    shared: *mut c_void,
    handle: Memory,
    handle_type: c_uint,
    flags: u64,
) -> c_int {
    if shared.is_null() {
        return INVALID_VALUE;
    }
    code(vmm::export(handle, handle_type, flags).map(|descriptor| {
        // SAFETY: the caller's promise, and not null.
        unsafe { shared.cast::<c_int>().write_unaligned(descriptor) }
    }))
}

/// The operating system's handle is a file descriptor, given in the pointer's place.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemImportFromShareableHandle(
    handle: Out<Memory>,
    shared: *mut c_void,
    handle_type: c_uint,
) -> c_int {
    code(vmm::import(handle, shared as c_int, handle_type))
}
