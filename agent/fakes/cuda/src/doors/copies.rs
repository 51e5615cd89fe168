//! What memory holds, and what is known of an address.

use std::ffi::{c_int, c_uint, c_void};

use super::code;
use crate::{Out, Stream, copies};

/// # Safety
/// What is not the card's has to be readable at `source`, writable at `target`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy(target: usize, source: usize, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { copies::copy(target, source, bytes) })
}

/// # Safety
/// As for [`cuMemcpy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(
    target: usize,
    source: usize,
    bytes: usize,
    stream: Stream,
) -> c_int {
    code(copies::stream_query(stream).and_then(|()| {
        // SAFETY: the caller's promise.
        unsafe { copies::copy(target, source, bytes) }
    }))
}

/// # Safety
/// What is not the card's has to be writable at `target`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(target: usize, value: u8, count: usize) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { copies::fill(target, value, count) })
}

/// # Safety
/// As for [`cuMemsetD8_v2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    target: usize,
    value: u8,
    count: usize,
    stream: Stream,
) -> c_int {
    code(copies::stream_query(stream).and_then(|()| {
        // SAFETY: the caller's promise.
        unsafe { copies::fill(target, value, count) }
    }))
}

/// # Safety
/// As for [`cuMemsetD8_v2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD32Async(
    target: usize,
    value: u32,
    count: usize,
    stream: Stream,
) -> c_int {
    code(copies::stream_query(stream).and_then(|()| {
        // SAFETY: the caller's promise.
        unsafe { copies::fill(target, value, count) }
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: Stream) -> c_int {
    code(copies::stream_query(stream))
}

/// Either output may be null.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(
    base: Out<usize>,
    bytes: Out<usize>,
    address: usize,
) -> c_int {
    code(copies::address_range(address).map(|(start, length)| {
        if let Some(base) = base {
            base.write(start);
        }
        if let Some(bytes) = bytes {
            bytes.write(length);
        }
    }))
}

/// # Safety
/// `data` must be null or point to what the attribute gives: an `int`, or a 64-bit number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_uint,
    address: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { copies::pointer_attribute(data, attribute, address) })
}
