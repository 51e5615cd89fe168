//! Contexts and streams.

use std::ffi::{c_int, c_uint, c_void};

use vramscope_fake_host::card;

use super::{code, put, put_new};
use crate::{Context, Out, Stream, codes::INVALID_VALUE, state};

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<Context>, device: c_int) -> c_int {
    put_new(context, || state::primary_retain(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease(device: c_int) -> c_int {
    distinct!("cuDevicePrimaryCtxRelease");
    code(state::primary_release(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    code(state::primary_release(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset(device: c_int) -> c_int {
    distinct!("cuDevicePrimaryCtxReset");
    code(state::primary_reset(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> c_int {
    code(state::primary_reset(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) -> c_int {
    let (Some(flags), Some(active)) = (flags, active) else {
        return INVALID_VALUE;
    };
    code(state::primary_active(device).map(|is_active| {
        flags.write(0);
        active.write(c_int::from(is_active));
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate(context: Out<Context>, _flags: c_uint, device: c_int) -> c_int {
    distinct!("cuCtxCreate");
    put_new(context, || state::context_create(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v2(context: Out<Context>, _flags: c_uint, device: c_int) -> c_int {
    put_new(context, || state::context_create(device))
}

/// Affinities are for a kind of sharing that the stand-in lacks.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v3(
    context: Out<Context>,
    _affinities: *const c_void,
    affinity_count: c_int,
    _flags: c_uint,
    device: c_int,
) -> c_int {
    if affinity_count != 0 {
        return INVALID_VALUE;
    }
    put_new(context, || state::context_create(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v4(
    context: Out<Context>,
    _parameters: *const c_void,
    _flags: c_uint,
    device: c_int,
) -> c_int {
    distinct!("cuCtxCreate_v4");
    put_new(context, || state::context_create(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy(context: Context) -> c_int {
    distinct!("cuCtxDestroy");
    code(state::context_destroy(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: Context) -> c_int {
    code(state::context_destroy(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<Context>) -> c_int {
    put(context, state::context_current())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Context) -> c_int {
    code(state::context_set_current(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent(context: Context) -> c_int {
    distinct!("cuCtxPushCurrent");
    code(state::context_push(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Context) -> c_int {
    code(state::context_push(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent(context: Out<Context>) -> c_int {
    distinct!("cuCtxPopCurrent");
    pop(context)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: Out<Context>) -> c_int {
    pop(context)
}

/// The output is optional here: the vendor's takes null for "drop it".
fn pop(context: Out<Context>) -> c_int {
    code(state::context_pop().map(|popped| {
        if let Some(context) = context {
            context.write(popped);
        }
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> c_int {
    put(device, state::context_device())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    code(state::context_synchronize(None))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize_v2(context: Context) -> c_int {
    code(state::context_synchronize(Some(context)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    let (Some(free), Some(total)) = (free, total) else {
        return INVALID_VALUE;
    };
    code(state::memory_free().map(|bytes| {
        free.write(bytes as usize);
        total.write(card::device_bytes() as usize);
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: Out<Stream>, _flags: c_uint) -> c_int {
    put_new(stream, state::stream_create)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Stream) -> c_int {
    code(state::stream_destroy(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Stream) -> c_int {
    code(state::stream_synchronize(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize_ptsz(stream: Stream) -> c_int {
    distinct!("cuStreamSynchronize_ptsz");
    code(state::stream_synchronize(stream))
}
