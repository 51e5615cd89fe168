//! Stand-in for `libcudart.so.13`: the documented part of the runtime API that allocates and copies, on
//! top of whatever `libcuda.so.1` the dynamic linker finds, as the vendor's is; and what PyTorch needs
//! besides: events, and kernels that do nothing.
//!
//! This file and [`doors`] are the door: thin functions under the vendor's names and argument orders,
//! which hand over to [`runtime`], [`memory`] and [`events`]. Invariants:
//! - nothing here panics, since a panic must not cross into C: it would end the program;
//! - no exported function calls another one, so that a probe sees one call where the program made one;
//! - every failure becomes the thread's last error;
//! - output parameters are `Option<&mut MaybeUninit<T>>`, which C sees as a pointer that may be
//!   null. That the pointer, where not null, points to a `T` is the caller's part, as with the vendor's.

/// Keeps a function apart from those that do the same: an optimiser folds functions of equal code
/// into one, and this text makes the code unequal. It costs no instruction.
macro_rules! distinct {
    ($name:expr) => {
        // SAFETY: a comment in the assembler's language.
        unsafe {
            std::arch::asm!(
                concat!("# ", $name),
                options(nomem, nostack, preserves_flags)
            )
        }
    };
}

mod codes;
mod doors;
mod driver;
mod events;
mod memory;
mod runtime;

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int},
    mem::MaybeUninit,
};

use codes::{CudaResult, INVALID_VALUE, SUCCESS};

/// An output parameter: in C a pointer.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Version of the runtime, as `cudaRuntimeGetVersion` encodes it.
const RUNTIME_VERSION: c_int = 13000;

thread_local! {
    static LAST_ERROR: Cell<c_int> = const { Cell::new(SUCCESS) };
}

/// The code of a result; a failure is remembered as the thread's last error.
fn code(result: CudaResult<()>) -> c_int {
    let Err(code) = result else {
        return SUCCESS;
    };
    // A thread that is ending has nobody left to ask for its last error.
    let _ = LAST_ERROR.try_with(|last| last.set(code));
    code
}

/// Never inlined: a door's first instruction has to be its frame's, not a look at `out`.
#[inline(never)]
fn put<T>(out: Out<T>, value: CudaResult<T>) -> c_int {
    code(out.ok_or(INVALID_VALUE).and_then(|out| {
        out.write(value?);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceCount(count: Out<c_int>) -> c_int {
    put(count, runtime::device_count())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaSetDevice(device: c_int) -> c_int {
    code(runtime::set_device(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDevice(device: Out<c_int>) -> c_int {
    put(device, Ok(runtime::device()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemGetInfo(free: Out<usize>, total: Out<usize>) -> c_int {
    let (Some(free), Some(total)) = (free, total) else {
        return code(Err(INVALID_VALUE));
    };
    code(runtime::memory_info().map(|(free_bytes, total_bytes)| {
        free.write(free_bytes);
        total.write(total_bytes);
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSynchronize() -> c_int {
    code(runtime::synchronize_device())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceReset() -> c_int {
    code(runtime::reset_device())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> c_int {
    LAST_ERROR
        .try_with(|last| last.replace(SUCCESS))
        .unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> c_int {
    LAST_ERROR.try_with(Cell::get).unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(error: c_int) -> *const c_char {
    codes::describe(error).0.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(error: c_int) -> *const c_char {
    codes::describe(error).1.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaRuntimeGetVersion(version: Out<c_int>) -> c_int {
    put(version, Ok(RUNTIME_VERSION))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDriverGetVersion(version: Out<c_int>) -> c_int {
    put(version, runtime::driver_version())
}

macro_rules! table {
    ($($name:ident),* $(,)?) => {{
        use doors::*;
        vec![$((
            const {
                // A name has no zero byte inside.
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name with a zero byte"),
                }
            },
            $name as *const (),
        )),*]
    }};
}

/// Every function that a workload looks up, by its name, for programs that are linked with this
/// library and look functions up as they would in a loaded one.
pub fn functions() -> Vec<(&'static CStr, *const ())> {
    table![
        cudaGetDeviceCount,
        cudaSetDevice,
        cudaGetDevice,
        cudaMemGetInfo,
        cudaDeviceSynchronize,
        cudaDeviceReset,
        cudaGetLastError,
        cudaPeekAtLastError,
        cudaGetErrorName,
        cudaGetErrorString,
        cudaRuntimeGetVersion,
        cudaDriverGetVersion,
        cudaMalloc,
        cudaMallocPitch,
        cudaMalloc3D,
        cudaMallocManaged,
        cudaFree,
        cudaHostAlloc,
        cudaMallocHost,
        cudaFreeHost,
        cudaHostRegister,
        cudaHostUnregister,
        cudaMallocArray,
        cudaMalloc3DArray,
        cudaMallocMipmappedArray,
        cudaFreeArray,
        cudaFreeMipmappedArray,
        cudaMallocAsync,
        cudaMallocAsync_ptsz,
        cudaMallocFromPoolAsync,
        cudaMallocFromPoolAsync_ptsz,
        cudaFreeAsync,
        cudaFreeAsync_ptsz,
        cudaMemPoolCreate,
        cudaMemPoolDestroy,
        cudaMemPoolTrimTo,
        cudaMemPoolGetAttribute,
        cudaMemPoolSetAttribute,
        cudaDeviceGetDefaultMemPool,
        cudaDeviceGetMemPool,
        cudaDeviceSetMemPool,
        cudaStreamCreate,
        cudaStreamDestroy,
        cudaStreamSynchronize,
        cudaStreamSynchronize_ptsz,
        cudaIpcGetMemHandle,
        cudaIpcOpenMemHandle,
        cudaIpcCloseMemHandle,
    ]
}
