//! What memory holds, and what is known of an address.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    Out, code,
    codes::{CudaResult, INVALID_VALUE},
    put, runtime,
};

/// cudaMemcpyKind: host to host up to "as the addresses say".
const LAST_KIND: c_int = 4;

/// CUpointer_attribute.
const MEMORY_TYPE: c_uint = 2;
const IS_MANAGED: c_uint = 8;
const DEVICE_ORDINAL: c_uint = 9;

/// cudaPointerAttributes. The last words are reserved.
#[repr(C)]
pub struct PointerAttributes {
    memory_type: c_int,
    device: c_int,
    device_pointer: *mut c_void,
    host_pointer: *mut c_void,
    reserved: [u64; 8],
}

/// cudaMemoryType.
const UNREGISTERED: c_int = 0;
const HOST: c_int = 1;
const DEVICE: c_int = 2;
const MANAGED: c_int = 3;

/// # Safety
/// What is not the card's has to be readable at `source`, writable at `target`.
unsafe fn copy(
    target: *mut c_void,
    source: *const c_void,
    bytes: usize,
    kind: c_int,
    stream: Option<usize>,
) -> CudaResult<()> {
    if !(0..=LAST_KIND).contains(&kind) {
        return Err(INVALID_VALUE);
    }
    // The addresses say which is the card's, whatever the kind.
    runtime::with_driver(|driver| {
        // SAFETY: the caller's promise.
        unsafe { driver.copy(target as usize, source as usize, bytes, stream) }
    })
}

/// # Safety
/// What is not the card's has to be readable at `source`, writable at `target`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpy(
    target: *mut c_void,
    source: *const c_void,
    bytes: usize,
    kind: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { copy(target, source, bytes, kind, None) })
}

/// # Safety
/// As for [`cudaMemcpy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpyAsync(
    target: *mut c_void,
    source: *const c_void,
    bytes: usize,
    kind: c_int,
    stream: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { copy(target, source, bytes, kind, Some(stream)) })
}

/// # Safety
/// As for [`cudaMemcpy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpyPeerAsync(
    target: *mut c_void,
    _target_device: c_int,
    source: *const c_void,
    _source_device: c_int,
    bytes: usize,
    stream: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    code(unsafe { copy(target, source, bytes, LAST_KIND, Some(stream)) })
}

/// # Safety
/// As for [`cudaMemcpy`], of `height` rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpy2DAsync(
    target: *mut c_void,
    target_pitch: usize,
    source: *const c_void,
    source_pitch: usize,
    width: usize,
    height: usize,
    kind: c_int,
    stream: usize,
) -> c_int {
    let mut result = Ok(());
    if width > target_pitch || width > source_pitch {
        result = Err(INVALID_VALUE);
    }
    for row in 0..height {
        if result.is_err() {
            break;
        }
        let to = target.wrapping_byte_add(row * target_pitch);
        let from = source.wrapping_byte_add(row * source_pitch);
        // SAFETY: the caller's promise for this row.
        result = unsafe { copy(to, from, width, kind, Some(stream)) };
    }
    code(result)
}

/// # Safety
/// What is not the card's has to be writable at `target`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemset(target: *mut c_void, value: c_int, bytes: usize) -> c_int {
    // The value is converted to an unsigned char, as documented. SAFETY: the caller's promise.
    code(runtime::with_driver(|driver| unsafe {
        driver.fill(target as usize, value as u8, bytes, None)
    }))
}

/// # Safety
/// As for [`cudaMemset`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemsetAsync(
    target: *mut c_void,
    value: c_int,
    bytes: usize,
    stream: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    code(runtime::with_driver(|driver| unsafe {
        driver.fill(target as usize, value as u8, bytes, Some(stream))
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPointerGetAttributes(
    attributes: Out<PointerAttributes>,
    address: *const c_void,
) -> c_int {
    put(attributes, pointer_attributes(address))
}

/// Of memory that the driver does not know only that, with success, as documented.
fn pointer_attributes(address: *const c_void) -> CudaResult<PointerAttributes> {
    let known = runtime::with_driver(|driver| {
        let number = |attribute| driver.pointer_number(attribute, address as usize);
        let Ok(memory_type) = number(MEMORY_TYPE) else {
            return Ok(None);
        };
        let memory_type = match (number(IS_MANAGED)?, memory_type) {
            (1, _) => MANAGED,
            (_, HOST) => HOST,
            _ => DEVICE,
        };
        Ok(Some((memory_type, number(DEVICE_ORDINAL)?)))
    });
    let known = known?;
    let (memory_type, device) = known.unwrap_or((UNREGISTERED, -2));
    let host_sees = memory_type != DEVICE;
    let card_sees = memory_type != UNREGISTERED;
    let null = std::ptr::null_mut();
    Ok(PointerAttributes {
        memory_type,
        device,
        device_pointer: if card_sees { address.cast_mut() } else { null },
        host_pointer: if host_sees { address.cast_mut() } else { null },
        reserved: [0; 8],
    })
}
