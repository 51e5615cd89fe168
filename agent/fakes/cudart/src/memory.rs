//! What the runtime's calls do with memory: the driver's call, and the runtime's own books of it.
//!
//! An allocation of no bytes succeeds with a null pointer, and a free of a null pointer succeeds:
//! neither is counted. Everything else counts as the driver's books count it.

use std::ffi::{c_int, c_uint, c_void};

use vramscope_fake_host::{arrays::Shape, ledger::Kind};

use crate::{
    Out,
    codes::*,
    driver::{Array3DDescriptor, ArrayDescriptor, DefaultStream, Driver},
    runtime::runtime,
};

/// Calls the driver, which gives an address or handle and the bytes that count, and enters the
/// outcome. `None` from the driver: nothing was allocated, so nothing counts.
fn allocate(
    kind: Kind,
    call: impl FnOnce(&Driver) -> CudaResult<Option<(usize, u64)>>,
) -> CudaResult<()> {
    let runtime = runtime();
    match runtime.with_context().and_then(call) {
        Ok(Some((address, bytes))) => {
            runtime.allocated(kind, address, bytes);
            Ok(())
        }
        Ok(None) => Ok(()),
        Err(code) => runtime.allocation_failed(kind, code),
    }
}

/// As [`allocate`], for calls that give an address of as many bytes as were asked for.
fn allocate_bytes(
    kind: Kind,
    address: Out<*mut c_void>,
    bytes: usize,
    call: impl FnOnce(&Driver) -> CudaResult<usize>,
) -> CudaResult<()> {
    allocate(kind, |driver| {
        let out = address.ok_or(INVALID_VALUE)?;
        if bytes == 0 {
            out.write(std::ptr::null_mut());
            return Ok(None);
        }
        let place = call(driver)?;
        out.write(place as *mut c_void);
        Ok(Some((place, bytes as u64)))
    })
}

pub fn allocate_device(address: Out<*mut c_void>, bytes: usize) -> CudaResult<()> {
    allocate_bytes(Kind::Device, address, bytes, |driver| {
        driver.allocate(bytes)
    })
}

pub fn allocate_host(address: Out<*mut c_void>, bytes: usize, flags: c_uint) -> CudaResult<()> {
    allocate_bytes(Kind::PinnedHost, address, bytes, |driver| {
        driver.allocate_host(bytes, flags)
    })
}

/// The vendor's refuses to allocate no bytes of managed memory.
pub fn allocate_managed(address: Out<*mut c_void>, bytes: usize, flags: c_uint) -> CudaResult<()> {
    allocate(Kind::Managed, |driver| {
        let out = address.ok_or(INVALID_VALUE)?;
        let place = driver.allocate_managed(bytes, flags)?;
        out.write(place as *mut c_void);
        Ok(Some((place, bytes as u64)))
    })
}

pub fn allocate_async(
    address: Out<*mut c_void>,
    bytes: usize,
    pool: Option<usize>,
    stream: usize,
    default: DefaultStream,
) -> CudaResult<()> {
    allocate_bytes(Kind::Pool, address, bytes, |driver| {
        driver.allocate_async(bytes, pool, stream, default)
    })
}

pub fn allocate_pitched(
    address: Out<*mut c_void>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
) -> CudaResult<()> {
    allocate(Kind::Device, |driver| {
        let (Some(address), Some(pitch)) = (address, pitch) else {
            return Err(INVALID_VALUE);
        };
        if width == 0 || height == 0 {
            address.write(std::ptr::null_mut());
            pitch.write(0);
            return Ok(None);
        }
        let (place, row) = driver.allocate_pitched(width, height)?;
        address.write(place as *mut c_void);
        pitch.write(row);
        Ok(Some((place, (row * height) as u64)))
    })
}

/// cudaExtent: three words, so C passes it by value on the stack.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// cudaPitchedPtr.
#[repr(C)]
pub struct PitchedPointer {
    address: *mut c_void,
    pitch: usize,
    width: usize,
    height: usize,
}

/// Slices of padded rows, one after the other: pitched memory of height times depth rows.
pub fn allocate_3d(pointer: Out<PitchedPointer>, extent: Extent) -> CudaResult<()> {
    let Extent {
        width,
        height,
        depth,
    } = extent;
    allocate(Kind::Device, |driver| {
        let out = pointer.ok_or(INVALID_VALUE)?;
        let rows = height.checked_mul(depth).ok_or(INVALID_VALUE)?;
        if width == 0 || rows == 0 {
            out.write(PitchedPointer {
                address: std::ptr::null_mut(),
                pitch: 0,
                width,
                height,
            });
            return Ok(None);
        }
        let (place, pitch) = driver.allocate_pitched(width, rows)?;
        out.write(PitchedPointer {
            address: place as *mut c_void,
            pitch,
            width,
            height,
        });
        Ok(Some((place, (pitch * rows) as u64)))
    })
}

/// cudaChannelFormatDesc: bits of each of four channels, and what they hold.
#[repr(C)]
pub struct ChannelFormat {
    bits: [c_int; 4],
    kind: c_int,
}

impl ChannelFormat {
    /// The driver's format, the number of channels, and the bytes of an element.
    fn driver_format(&self) -> CudaResult<(c_uint, c_uint, usize)> {
        const SIGNED: c_int = 0;
        const UNSIGNED: c_int = 1;
        const FLOAT: c_int = 2;
        let bits = self.bits[0];
        let channels = self.bits.iter().take_while(|width| **width == bits).count();
        let rest_is_empty = self.bits[channels..].iter().all(|width| *width == 0);
        if !matches!(channels, 1 | 2 | 4) || !rest_is_empty {
            return Err(INVALID_CHANNEL_DESCRIPTOR);
        }
        let format = match (self.kind, bits) {
            (UNSIGNED, 8) => 0x01,
            (UNSIGNED, 16) => 0x02,
            (UNSIGNED, 32) => 0x03,
            (SIGNED, 8) => 0x08,
            (SIGNED, 16) => 0x09,
            (SIGNED, 32) => 0x0a,
            (FLOAT, 16) => 0x10,
            (FLOAT, 32) => 0x20,
            _ => return Err(INVALID_CHANNEL_DESCRIPTOR),
        };
        // The match has made sure that bits is one of 8, 16 and 32.
        Ok((format, channels as c_uint, bits as usize / 8 * channels))
    }
}

/// cudaArrayLayered | cudaArrayCubemap.
const LAYERED_FLAGS: c_uint = 0x1 | 0x4;

/// How an array is asked for.
#[derive(Clone, Copy)]
pub enum ArrayCall {
    /// One or two dimensions.
    Flat,
    /// Three dimensions or layers.
    Deep,
    /// So many levels.
    Mipmapped(c_uint),
}

/// A flat array without flags is made by the driver's call for flat ones, every other by the one
/// for three dimensions.
pub fn allocate_array(
    array: Out<usize>,
    format: Option<&ChannelFormat>,
    extent: Extent,
    flags: c_uint,
    call: ArrayCall,
) -> CudaResult<()> {
    let Extent {
        width,
        height,
        depth,
    } = extent;
    allocate(Kind::Array, |driver| {
        let (Some(out), Some(format)) = (array, format) else {
            return Err(INVALID_VALUE);
        };
        let (format, channels, element_bytes) = format.driver_format()?;
        let descriptor = Array3DDescriptor {
            width,
            height,
            depth,
            format,
            channels,
            flags,
        };
        let shape = Shape {
            width,
            height,
            depth,
            element_bytes,
            is_layered: flags & LAYERED_FLAGS != 0,
        };
        let (handle, bytes) = match call {
            ArrayCall::Flat if flags == 0 => {
                let flat = ArrayDescriptor {
                    width,
                    height,
                    format,
                    channels,
                };
                (driver.create_array(&flat)?, shape.bytes())
            }
            ArrayCall::Flat | ArrayCall::Deep => {
                (driver.create_3d_array(&descriptor)?, shape.bytes())
            }
            ArrayCall::Mipmapped(levels) => (
                driver.create_mipmapped_array(&descriptor, levels)?,
                shape.mipmapped_bytes(levels),
            ),
        };
        out.write(handle);
        // The driver has refused what has no size.
        Ok(Some((handle, bytes.unwrap_or(0))))
    })
}

pub fn register(address: *mut c_void, bytes: usize, flags: c_uint) -> CudaResult<()> {
    allocate(Kind::RegisteredHost, |driver| {
        driver.register_host(address as usize, bytes, flags)?;
        Ok(Some((address as usize, bytes as u64)))
    })
}

/// What a function that frees may free, and the kind its failures count under, the first of them.
type Freeable = &'static [Kind];
const BY_FREE: Freeable = &[Kind::Device, Kind::Managed, Kind::Pool];
const BY_FREE_ASYNC: Freeable = &[Kind::Pool, Kind::Device, Kind::Managed];

/// The books are told before the driver is, and again if it fails: another thread may be given the
/// address before this one's call returns.
fn free(
    kinds: Freeable,
    address: usize,
    call: impl FnOnce(&Driver) -> CudaResult<()>,
) -> CudaResult<()> {
    let runtime = runtime();
    // No caller's list is empty.
    let kind = kinds.first().copied().unwrap_or(Kind::Device);
    let driver = match runtime.with_context() {
        Ok(driver) => driver,
        Err(code) => return runtime.free_failed(kind, address, code),
    };
    if address == 0 && kind != Kind::RegisteredHost {
        return Ok(());
    }
    let entered = {
        let mut state = runtime.state();
        let known = state.accounts.block(kind, address);
        known
            .filter(|block| kinds.contains(&block.kind))
            .and_then(|block| state.accounts.freed(block.kind, address))
    };
    match (call(driver), entered) {
        // A block of the driver's that this runtime did not allocate is not in its books.
        (Ok(()), _) => Ok(()),
        (Err(code), Some(block)) => {
            runtime.state().accounts.free_undone(address, block);
            Err(code)
        }
        (Err(code), None) => runtime.free_failed(kind, address, code),
    }
}

pub fn free_device(address: usize) -> CudaResult<()> {
    free(BY_FREE, address, |driver| driver.free(address))
}

pub fn free_async(address: usize, stream: usize, default: DefaultStream) -> CudaResult<()> {
    free(BY_FREE_ASYNC, address, |driver| {
        driver.free_async(address, stream, default)
    })
}

pub fn free_host(address: usize) -> CudaResult<()> {
    free(&[Kind::PinnedHost], address, |driver| {
        driver.free_host(address)
    })
}

pub fn unregister(address: usize) -> CudaResult<()> {
    free(&[Kind::RegisteredHost], address, |driver| {
        driver.unregister_host(address)
    })
}

pub fn free_array(array: usize) -> CudaResult<()> {
    free(&[Kind::Array], array, |driver| driver.destroy_array(array))
}

pub fn free_mipmapped_array(array: usize) -> CudaResult<()> {
    free(&[Kind::Array], array, |driver| {
        driver.destroy_mipmapped_array(array)
    })
}
