//! Kernels: programs register and launch them, and they do nothing.
//!
//! The functions with two underscores are what the vendor's compiler makes host code call. They are
//! known by that code's headers and do here what keeps it going.

use std::{
    cell::RefCell,
    ffi::{c_int, c_uint, c_void},
};

use crate::{
    Out, code,
    codes::{CudaResult, INVALID_VALUE, SUCCESS},
    put, runtime,
};

/// dim3.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent3 {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

type Configuration = (Extent3, Extent3, usize, usize);

thread_local! {
    /// Configurations of launches that were begun.
    static CONFIGURATIONS: RefCell<Vec<Configuration>> = const { RefCell::new(Vec::new()) };
}

/// Threads that fit a multiprocessor, as the driver's attribute has them.
const THREADS: c_int = 2048;

/// cudaFuncAttributes begins so; the rest is 0.
#[repr(C)]
pub struct FunctionAttributes {
    shared_bytes: usize,
    constant_bytes: usize,
    local_bytes: usize,
    max_threads: c_int,
    registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    rest: [u64; 13],
}

fn launched() -> c_int {
    code(runtime::ensure_context())
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(_binary: *const c_void) -> *mut *mut c_void {
    // Any address that is not null does for a handle: nobody looks behind it.
    std::ptr::dangling_mut()
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *mut *mut c_void) {
    distinct!("__cudaRegisterFatBinaryEnd");
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(_handle: *mut *mut c_void) {
    distinct!("__cudaUnregisterFatBinary");
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFunction() {
    distinct!("__cudaRegisterFunction");
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterVar() {
    distinct!("__cudaRegisterVar");
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    grid: Extent3,
    block: Extent3,
    shared_bytes: usize,
    stream: usize,
) -> c_uint {
    push((grid, block, shared_bytes, stream))
}

#[inline(never)]
fn push(configuration: Configuration) -> c_uint {
    // A thread that is ending launches no more.
    let _ = CONFIGURATIONS.try_with(|all| {
        if let Ok(mut all) = all.try_borrow_mut() {
            all.push(configuration);
        }
    });
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaPopCallConfiguration(
    grid: Out<Extent3>,
    block: Out<Extent3>,
    shared_bytes: Out<usize>,
    stream: Out<usize>,
) -> c_int {
    code(pop(grid, block, shared_bytes, stream))
}

#[inline(never)]
fn pop(
    grid: Out<Extent3>,
    block: Out<Extent3>,
    shared_bytes: Out<usize>,
    stream: Out<usize>,
) -> CudaResult<()> {
    let last = CONFIGURATIONS.try_with(|all| all.try_borrow_mut().ok()?.pop());
    let last = last.ok().flatten().ok_or(INVALID_VALUE)?;
    let (Some(grid), Some(block), Some(shared_bytes), Some(stream)) =
        (grid, block, shared_bytes, stream)
    else {
        return Err(INVALID_VALUE);
    };
    grid.write(last.0);
    block.write(last.1);
    shared_bytes.write(last.2);
    stream.write(last.3);
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaGetKernel(kernel: Out<*const c_void>, function: *const c_void) -> c_int {
    put(kernel, Ok(function))
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaLaunchKernel() -> c_int {
    distinct!("__cudaLaunchKernel");
    launched()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchKernel() -> c_int {
    distinct!("cudaLaunchKernel");
    launched()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchKernelExC() -> c_int {
    distinct!("cudaLaunchKernelExC");
    launched()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchCooperativeKernel() -> c_int {
    distinct!("cudaLaunchCooperativeKernel");
    launched()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncGetAttributes(
    attributes: Out<FunctionAttributes>,
    _function: *const c_void,
) -> c_int {
    let usual = FunctionAttributes {
        shared_bytes: 0,
        constant_bytes: 0,
        local_bytes: 0,
        max_threads: 1024,
        registers: 32,
        ptx_version: 90,
        binary_version: 90,
        rest: [0; 13],
    };
    put(attributes, Ok(usual))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncSetAttribute() -> c_int {
    distinct!("cudaFuncSetAttribute");
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaKernelSetAttributeForDevice() -> c_int {
    distinct!("cudaKernelSetAttributeForDevice");
    SUCCESS
}

/// Variables of the card exist by name alone.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyToSymbol() -> c_int {
    distinct!("cudaMemcpyToSymbol");
    SUCCESS
}

fn blocks_per_multiprocessor(block_threads: c_int) -> CudaResult<c_int> {
    if block_threads <= 0 {
        return Err(INVALID_VALUE);
    }
    Ok(THREADS / block_threads)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<c_int>,
    _function: *const c_void,
    block_threads: c_int,
    _shared_bytes: usize,
) -> c_int {
    put(blocks, blocks_per_multiprocessor(block_threads))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: Out<c_int>,
    _function: *const c_void,
    block_threads: c_int,
    _shared_bytes: usize,
    _flags: c_uint,
) -> c_int {
    distinct!("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags");
    put(blocks, blocks_per_multiprocessor(block_threads))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStart() -> c_int {
    distinct!("cudaProfilerStart");
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStop() -> c_int {
    distinct!("cudaProfilerStop");
    SUCCESS
}
