//! What a device can do, and the driver's functions by name.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::{
    Out, code,
    codes::{CudaResult, INVALID_DEVICE, INVALID_VALUE, PEER_ACCESS_UNSUPPORTED},
    driver::Driver,
    put, runtime,
};

/// CUdevice_attribute.
const MAX_THREADS_PER_BLOCK: c_int = 1;
const WARP_SIZE: c_int = 10;
const MULTIPROCESSORS: c_int = 16;
const PCI_BUS: c_int = 33;
const MAX_THREADS_PER_MULTIPROCESSOR: c_int = 39;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;

/// cudaDeviceProp of the 13 series: a name, numbers, and room for what is still to come. Only what is
/// set below differs from 0.
#[repr(C, align(8))]
pub struct DeviceProperties([u8; 1008]);

/// Where some of its members lie, as the interface's header has them.
mod offset {
    pub const NAME: usize = 0;
    pub const UUID: usize = 256;
    pub const TOTAL_BYTES: usize = 288;
    pub const SHARED_BYTES_PER_BLOCK: usize = 296;
    pub const REGISTERS_PER_BLOCK: usize = 304;
    pub const WARP_SIZE: usize = 308;
    pub const MAX_THREADS_PER_BLOCK: usize = 320;
    pub const MAX_THREADS: usize = 324;
    pub const MAX_GRID: usize = 336;
    pub const MAJOR: usize = 360;
    pub const MINOR: usize = 364;
    pub const TEXTURE_ALIGNMENT: usize = 368;
    pub const MULTIPROCESSORS: usize = 384;
    pub const CAN_MAP_HOST: usize = 392;
    pub const PCI_BUS: usize = 568;
    pub const UNIFIED_ADDRESSING: usize = 588;
    pub const L2_BYTES: usize = 596;
    pub const MAX_THREADS_PER_MULTIPROCESSOR: usize = 604;
    pub const SHARED_BYTES_PER_MULTIPROCESSOR: usize = 624;
    pub const REGISTERS_PER_MULTIPROCESSOR: usize = 632;
    pub const MANAGED_MEMORY: usize = 636;
    pub const SHARED_BYTES_PER_BLOCK_OPTIN: usize = 672;
}

impl DeviceProperties {
    fn of(driver: &Driver, device: c_int) -> CudaResult<Self> {
        let number = |attribute| driver.device_attribute(attribute, device);
        let mut all = Self([0; 1008]);
        all.put(offset::NAME, &driver.device_name(device)?);
        all.put(offset::UUID, &driver.device_uuid(device)?);
        all.put_word(offset::TOTAL_BYTES, driver.device_bytes(device)?);
        all.put_number(offset::WARP_SIZE, number(WARP_SIZE)?);
        let threads = number(MAX_THREADS_PER_BLOCK)?;
        all.put_number(offset::MAX_THREADS_PER_BLOCK, threads);
        all.put_number(offset::MAJOR, number(MAJOR)?);
        all.put_number(offset::MINOR, number(MINOR)?);
        all.put_number(offset::MULTIPROCESSORS, number(MULTIPROCESSORS)?);
        all.put_number(offset::PCI_BUS, number(PCI_BUS)?);
        let per_multiprocessor = number(MAX_THREADS_PER_MULTIPROCESSOR)?;
        all.put_number(offset::MAX_THREADS_PER_MULTIPROCESSOR, per_multiprocessor);
        // Usual figures of a card of compute capability 9; nothing computes, so nothing hangs on them.
        for (index, (threads, grid)) in [(1024, i32::MAX), (1024, 65535), (64, 65535)]
            .into_iter()
            .enumerate()
        {
            all.put_number(offset::MAX_THREADS + 4 * index, threads);
            all.put_number(offset::MAX_GRID + 4 * index, grid);
        }
        all.put_word(offset::SHARED_BYTES_PER_BLOCK, 48 << 10);
        all.put_word(offset::SHARED_BYTES_PER_BLOCK_OPTIN, 227 << 10);
        all.put_word(offset::SHARED_BYTES_PER_MULTIPROCESSOR, 228 << 10);
        all.put_number(offset::REGISTERS_PER_BLOCK, 1 << 16);
        all.put_number(offset::REGISTERS_PER_MULTIPROCESSOR, 1 << 16);
        all.put_word(offset::TEXTURE_ALIGNMENT, 512);
        all.put_number(offset::L2_BYTES, 50 << 20);
        for yes in [
            offset::CAN_MAP_HOST,
            offset::UNIFIED_ADDRESSING,
            offset::MANAGED_MEMORY,
        ] {
            all.put_number(yes, 1);
        }
        Ok(all)
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let room = self.0.get_mut(offset..offset + bytes.len());
        if let Some(room) = room {
            room.copy_from_slice(bytes);
        }
    }

    fn put_number(&mut self, offset: usize, number: c_int) {
        self.put(offset, &number.to_ne_bytes());
    }

    fn put_word(&mut self, offset: usize, word: usize) {
        self.put(offset, &word.to_ne_bytes());
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceProperties(
    properties: Out<DeviceProperties>,
    device: c_int,
) -> c_int {
    let runtime = runtime::runtime();
    let found = runtime
        .driver()
        .and_then(|d| DeviceProperties::of(d, device));
    put(properties, found)
}

/// The runtime's attributes have the driver's numbers.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    device: c_int,
) -> c_int {
    let driver = runtime::runtime().driver();
    put(
        value,
        driver.and_then(|driver| driver.device_attribute(attribute, device)),
    )
}

/// # Safety
/// `text` must be null or point to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetPCIBusId(
    text: *mut c_char,
    length: c_int,
    device: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { put_bus_id(text, length, device) })
}

/// # Safety
/// As for [`cudaDeviceGetPCIBusId`].
#[inline(never)]
unsafe fn put_bus_id(text: *mut c_char, length: c_int, device: c_int) -> CudaResult<()> {
    let driver = runtime::runtime().driver()?;
    let bus = driver.device_attribute(PCI_BUS, device)?;
    let id = format!("0000:{bus:02X}:00.0\0");
    // 13 characters at least, as documented.
    if text.is_null() || (length as usize) < id.len() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives `length` writable bytes, which are enough.
    unsafe { std::ptr::copy_nonoverlapping(id.as_ptr(), text.cast(), id.len()) };
    Ok(())
}

/// The pretended cards cannot reach each other.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) -> c_int {
    let known = require_device(device).and_then(|()| require_device(peer));
    put(can, known.map(|()| 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceEnablePeerAccess(peer: c_int, _flags: c_uint) -> c_int {
    code(require_device(peer).and(Err(PEER_ACCESS_UNSUPPORTED)))
}

fn require_device(device: c_int) -> CudaResult<()> {
    if (0..runtime::device_count()?).contains(&device) {
        Ok(())
    } else {
        Err(INVALID_DEVICE)
    }
}

/// Graphs have no memory, since there are none.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetGraphMemAttribute(
    device: c_int,
    _attribute: c_int,
    value: Out<u64>,
) -> c_int {
    put(value, require_device(device).map(|()| 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSetGraphMemAttribute(
    device: c_int,
    _attribute: c_int,
    _value: *mut c_void,
) -> c_int {
    code(require_device(device))
}

/// A name that the driver lacks gives a null address and says so in `status`, with success.
///
/// # Safety
/// `symbol` must be null or point to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    version: c_uint,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { entry_point(symbol, function, version, flags, status) })
}

/// # Safety
/// As for [`cudaGetDriverEntryPointByVersion`].
#[inline(never)]
unsafe fn entry_point(
    symbol: *const c_char,
    function: Out<*mut c_void>,
    version: c_uint,
    flags: u64,
    status: Out<c_int>,
) -> CudaResult<()> {
    let function = function.ok_or(INVALID_VALUE)?;
    if symbol.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so the caller vouches for a string that ends in a zero byte.
    let name = unsafe { CStr::from_ptr(symbol) };
    let driver = runtime::runtime().driver()?;
    let (address, found) = driver.entry_point(name, version as c_int, flags);
    function.write(address);
    if let Some(status) = status {
        status.write(found);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolSetAccess(
    pool: usize,
    descriptions: *const c_void,
    count: usize,
) -> c_int {
    code(runtime::with_driver(|driver| {
        driver.set_pool_access(pool, descriptions, count)
    }))
}
