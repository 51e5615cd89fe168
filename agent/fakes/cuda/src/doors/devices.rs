//! Start-up and devices.

use std::ffi::{c_char, c_int, c_uint};

use vramscope_fake_host::card;

use super::{code, put};
use crate::{
    Out,
    codes::{INVALID_VALUE, SUCCESS},
    state,
};

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    code(state::init(flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    put(version, Ok(card::CUDA_VERSION))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    put(count, state::device_count())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> c_int {
    put(device, state::device(ordinal).map(|_| ordinal))
}

/// # Safety
/// `name` must be null or point to `len` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int {
    if name.is_null() || len <= 0 {
        return INVALID_VALUE;
    }
    if let Err(code) = state::device(device) {
        return code;
    }
    let shown = card::NAME.len().min(len as usize - 1);
    // SAFETY: the caller gives `len` writable bytes, and shown + 1 <= len.
    unsafe {
        std::ptr::copy_nonoverlapping(card::NAME.as_ptr(), name.cast(), shown);
        name.add(shown).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    distinct!("cuDeviceGetUuid");
    put(uuid, state::device_uuid(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    put(uuid, state::device_uuid(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    device: c_int,
) -> c_int {
    put(value, state::device_attribute(attribute, device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> c_int {
    let total = state::device(device).map(|_| card::device_bytes() as usize);
    put(bytes, total)
}
