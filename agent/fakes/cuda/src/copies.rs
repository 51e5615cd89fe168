//! What memory of the card holds, and what is known of an address.
//!
//! Programs copy to the card and back. The addresses of the card stay untouchable from the host, as
//! they should, so the bytes lie elsewhere ([`AddressSpace::content`]); pages that were never written
//! are zeros. Copies take effect at once: there is never work in flight. Memory opened from another
//! process has no content here.
//!
//! [`AddressSpace::content`]: crate::memory::AddressSpace::content

use std::ffi::{c_int, c_uint, c_void};

use vramscope_fake_host::ledger::{Block, Kind};

use crate::{
    Stream,
    codes::*,
    state::{State, state},
};

/// CUpointer_attribute.
const CONTEXT: c_uint = 1;
const MEMORY_TYPE: c_uint = 2;
const DEVICE_POINTER: c_uint = 3;
const HOST_POINTER: c_uint = 4;
const IS_MANAGED: c_uint = 8;
const DEVICE_ORDINAL: c_uint = 9;
const RANGE_START: c_uint = 11;
const RANGE_BYTES: c_uint = 12;
const MAPPED: c_uint = 13;

/// CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

impl State {
    /// The live block or mapping that an address lies in.
    fn around(&self, address: usize) -> Option<(usize, Block)> {
        let mut blocks = self.accounts.overlapping(Kind::Device, address, 1);
        let mut mappings = self.accounts.overlapping(Kind::VmmMapped, address, 1);
        blocks.next().or_else(|| mappings.next())
    }

    /// Where the bytes of a range can be read and written: the range itself for the host's memory.
    fn bytes_of(&mut self, address: usize, bytes: usize) -> CuResult<usize> {
        if address == 0 {
            return Err(INVALID_VALUE);
        }
        if !self.addresses.holds(address) {
            return Ok(address);
        }
        // A range may span several mappings, so its ends are looked at.
        let last = address.checked_add(bytes - 1).ok_or(INVALID_VALUE)?;
        if self.around(address).is_none() || self.around(last).is_none() {
            return Err(INVALID_VALUE);
        }
        self.addresses.content(address, bytes).ok_or(OUT_OF_MEMORY)
    }
}

/// Copies between any two of host and card.
///
/// # Safety
/// What is not the card's has to be readable at `source`, writable at `target`, for so many bytes.
pub unsafe fn copy(target: usize, source: usize, bytes: usize) -> CuResult<()> {
    let mut state = state();
    state.current()?;
    if bytes == 0 {
        return Ok(());
    }
    let (to, from) = (
        state.bytes_of(target, bytes)?,
        state.bytes_of(source, bytes)?,
    );
    // SAFETY: of the card's memory both lie in the content's mapping, the rest is the caller's
    // promise; they may overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    Ok(())
}

/// Fills with a value, over and over.
///
/// # Safety
/// As for [`copy`], of `target`.
pub unsafe fn fill<T: Copy>(target: usize, value: T, count: usize) -> CuResult<()> {
    let mut state = state();
    state.current()?;
    let bytes = count.checked_mul(size_of::<T>()).ok_or(INVALID_VALUE)?;
    if !target.is_multiple_of(align_of::<T>()) {
        return Err(INVALID_VALUE);
    }
    if bytes == 0 {
        return Ok(());
    }
    let place = state.bytes_of(target, bytes)? as *mut T;
    for index in 0..count {
        // SAFETY: within the range that was just looked up; the alignment was checked, and the
        // content lies at a distance of whole granules.
        unsafe { place.add(index).write(value) };
    }
    Ok(())
}

/// A stream that exists has nothing left to do.
pub fn stream_query(stream: Stream) -> CuResult<()> {
    state().stream_device(stream).map(|_| ())
}

/// The block around an address: its start and bytes.
pub fn address_range(address: usize) -> CuResult<(usize, usize)> {
    let state = state();
    state.current()?;
    let (start, block) = state.around(address).ok_or(INVALID_VALUE)?;
    Ok((start, block.bytes as usize))
}

/// Writes one attribute of an address.
///
/// # Safety
/// `data` must point to what the attribute gives: an `int`, or a 64-bit number.
pub unsafe fn pointer_attribute(
    data: *mut c_void,
    attribute: c_uint,
    address: usize,
) -> CuResult<()> {
    let state = state();
    state.require_initialised()?;
    if data.is_null() {
        return Err(INVALID_VALUE);
    }
    let (start, block) = state.around(address).ok_or(INVALID_VALUE)?;
    let is_of_host = matches!(block.kind, Kind::PinnedHost | Kind::RegisteredHost);
    let is_managed = block.kind == Kind::Managed;
    let word = match attribute {
        CONTEXT => Some(block.context),
        DEVICE_POINTER => Some(address),
        HOST_POINTER if is_of_host || is_managed => Some(address),
        HOST_POINTER => return Err(INVALID_VALUE),
        RANGE_START => Some(start),
        RANGE_BYTES => Some(block.bytes as usize),
        _ => None,
    };
    let number = match attribute {
        MEMORY_TYPE if is_of_host => HOST as c_int,
        MEMORY_TYPE => DEVICE as c_int,
        IS_MANAGED => c_int::from(is_managed),
        // Memory imported from another process names no device.
        DEVICE_ORDINAL => block.device.map_or(-2, |device| device as c_int),
        MAPPED => 1,
        _ if word.is_some() => 0,
        _ => return Err(INVALID_VALUE),
    };
    // SAFETY: the caller's promise for this attribute, and not null.
    unsafe {
        match word {
            Some(word) => data.cast::<usize>().write_unaligned(word),
            None => data.cast::<c_int>().write_unaligned(number),
        }
    }
    Ok(())
}
