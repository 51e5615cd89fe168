//! The doors for memory, pools, streams and other processes' memory; below them those for the rest.

pub mod copies;
pub mod devices;
pub mod kernels;
pub mod refused;
pub mod streams;

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    Out, code,
    codes::INVALID_VALUE,
    driver::{DefaultStream, IpcHandle},
    memory::{self, ArrayCall, ChannelFormat, Extent, PitchedPointer},
    put, runtime,
};

#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc(address: Out<*mut c_void>, bytes: usize) -> c_int {
    code(memory::allocate_device(address, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocPitch(
    address: Out<*mut c_void>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
) -> c_int {
    code(memory::allocate_pitched(address, pitch, width, height))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc3D(pointer: Out<PitchedPointer>, extent: Extent) -> c_int {
    code(memory::allocate_3d(pointer, extent))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocManaged(
    address: Out<*mut c_void>,
    bytes: usize,
    flags: c_uint,
) -> c_int {
    code(memory::allocate_managed(address, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(address: *mut c_void) -> c_int {
    code(memory::free_device(address as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostAlloc(address: Out<*mut c_void>, bytes: usize, flags: c_uint) -> c_int {
    code(memory::allocate_host(address, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocHost(address: Out<*mut c_void>, bytes: usize) -> c_int {
    code(memory::allocate_host(address, bytes, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeHost(address: *mut c_void) -> c_int {
    code(memory::free_host(address as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(address: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    code(memory::register(address, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(address: *mut c_void) -> c_int {
    code(memory::unregister(address as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocArray(
    array: Out<usize>,
    format: Option<&ChannelFormat>,
    width: usize,
    height: usize,
    flags: c_uint,
) -> c_int {
    let extent = Extent {
        width,
        height,
        depth: 0,
    };
    let call = ArrayCall::Flat;
    code(memory::allocate_array(array, format, extent, flags, call))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc3DArray(
    array: Out<usize>,
    format: Option<&ChannelFormat>,
    extent: Extent,
    flags: c_uint,
) -> c_int {
    let call = ArrayCall::Deep;
    code(memory::allocate_array(array, format, extent, flags, call))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocMipmappedArray(
    array: Out<usize>,
    format: Option<&ChannelFormat>,
    extent: Extent,
    levels: c_uint,
    flags: c_uint,
) -> c_int {
    let call = ArrayCall::Mipmapped(levels);
    code(memory::allocate_array(array, format, extent, flags, call))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeArray(array: usize) -> c_int {
    code(memory::free_array(array))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeMipmappedArray(array: usize) -> c_int {
    code(memory::free_mipmapped_array(array))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocAsync(address: Out<*mut c_void>, bytes: usize, stream: usize) -> c_int {
    let default = DefaultStream::Legacy;
    code(memory::allocate_async(
        address, bytes, None, stream, default,
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocAsync_ptsz(
    address: Out<*mut c_void>,
    bytes: usize,
    stream: usize,
) -> c_int {
    let default = DefaultStream::PerThread;
    code(memory::allocate_async(
        address, bytes, None, stream, default,
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocFromPoolAsync(
    address: Out<*mut c_void>,
    bytes: usize,
    pool: usize,
    stream: usize,
) -> c_int {
    let (pool, default) = (Some(pool), DefaultStream::Legacy);
    code(memory::allocate_async(
        address, bytes, pool, stream, default,
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocFromPoolAsync_ptsz(
    address: Out<*mut c_void>,
    bytes: usize,
    pool: usize,
    stream: usize,
) -> c_int {
    let (pool, default) = (Some(pool), DefaultStream::PerThread);
    code(memory::allocate_async(
        address, bytes, pool, stream, default,
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeAsync(address: *mut c_void, stream: usize) -> c_int {
    let default = DefaultStream::Legacy;
    code(memory::free_async(address as usize, stream, default))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeAsync_ptsz(address: *mut c_void, stream: usize) -> c_int {
    let default = DefaultStream::PerThread;
    code(memory::free_async(address as usize, stream, default))
}

/// # Safety
/// `properties` must be null or point to a cudaMemPoolProps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemPoolCreate(pool: Out<usize>, properties: *const c_void) -> c_int {
    let Some(out) = pool else {
        return code(Err(INVALID_VALUE));
    };
    // SAFETY: the caller's promise.
    let made = runtime::with_driver(|driver| unsafe { driver.create_pool(properties) });
    put(Some(out), made)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolDestroy(pool: usize) -> c_int {
    code(runtime::with_driver(|driver| driver.destroy_pool(pool)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolTrimTo(pool: usize, keep: usize) -> c_int {
    code(runtime::with_driver(|driver| driver.trim_pool(pool, keep)))
}

/// # Safety
/// `value` must be null or point to an `int` or a 64-bit number, as the attribute has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemPoolGetAttribute(
    pool: usize,
    attribute: c_int,
    value: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise. The runtime's attributes have the driver's numbers.
    code(runtime::with_driver(|driver| unsafe {
        driver.pool_attribute(pool, attribute, value)
    }))
}

/// # Safety
/// As for [`cudaMemPoolGetAttribute`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemPoolSetAttribute(
    pool: usize,
    attribute: c_int,
    value: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    code(runtime::with_driver(|driver| unsafe {
        driver.set_pool_attribute(pool, attribute, value)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetDefaultMemPool(pool: Out<usize>, device: c_int) -> c_int {
    put(
        pool,
        runtime::with_driver(|driver| driver.default_pool(device)),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetMemPool(pool: Out<usize>, device: c_int) -> c_int {
    put(
        pool,
        runtime::with_driver(|driver| driver.current_pool(device)),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSetMemPool(device: c_int, pool: usize) -> c_int {
    code(runtime::with_driver(|driver| {
        driver.set_current_pool(device, pool)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreate(stream: Out<usize>) -> c_int {
    let Some(out) = stream else {
        return code(Err(INVALID_VALUE));
    };
    put(
        Some(out),
        runtime::with_driver(|driver| driver.create_stream()),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamDestroy(stream: usize) -> c_int {
    code(runtime::with_driver(|driver| driver.destroy_stream(stream)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSynchronize(stream: usize) -> c_int {
    code(runtime::with_driver(|driver| {
        driver.synchronize_stream(stream, DefaultStream::Legacy)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSynchronize_ptsz(stream: usize) -> c_int {
    code(runtime::with_driver(|driver| {
        driver.synchronize_stream(stream, DefaultStream::PerThread)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcGetMemHandle(handle: Out<IpcHandle>, address: *mut c_void) -> c_int {
    let address = address as usize;
    put(
        handle,
        runtime::with_driver(|driver| driver.ipc_handle(address)),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcOpenMemHandle(
    address: Out<*mut c_void>,
    handle: IpcHandle,
    flags: c_uint,
) -> c_int {
    let Some(out) = address else {
        return code(Err(INVALID_VALUE));
    };
    let opened = runtime::with_driver(|driver| driver.open_ipc(handle, flags));
    put(Some(out), opened.map(|place| place as *mut c_void))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcCloseMemHandle(address: *mut c_void) -> c_int {
    let address = address as usize;
    code(runtime::with_driver(|driver| driver.close_ipc(address)))
}
