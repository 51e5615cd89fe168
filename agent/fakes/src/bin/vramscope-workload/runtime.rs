//! The CUDA runtime as the scenarios use it.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::bail;

use super::library::{Library, functions, output};

/// Names of the runtime library, the newest first.
const NAMES: [&CStr; 3] = [c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so"];

functions! {
    Functions {
        get_device_count: c"cudaGetDeviceCount", fn(*mut c_int) -> c_int;
        set_device: c"cudaSetDevice", fn(c_int) -> c_int;
        malloc: c"cudaMalloc", fn(*mut *mut c_void, usize) -> c_int;
        free: c"cudaFree", fn(*mut c_void) -> c_int;
        host_alloc: c"cudaHostAlloc", fn(*mut *mut c_void, usize, c_uint) -> c_int;
        free_host: c"cudaFreeHost", fn(*mut c_void) -> c_int;
        host_register: c"cudaHostRegister", fn(*mut c_void, usize, c_uint) -> c_int;
        host_unregister: c"cudaHostUnregister", fn(*mut c_void) -> c_int;
        device_reset: c"cudaDeviceReset", fn() -> c_int;
        mem_get_info: c"cudaMemGetInfo", fn(*mut usize, *mut usize) -> c_int;
        malloc_managed: c"cudaMallocManaged", fn(*mut *mut c_void, usize, c_uint) -> c_int;
        malloc_pitch: c"cudaMallocPitch", fn(*mut *mut c_void, *mut usize, usize, usize) -> c_int;
        malloc_3d: c"cudaMalloc3D", fn(*mut PitchedPointer, Extent) -> c_int;
        malloc_array: c"cudaMallocArray",
            fn(*mut usize, *const ChannelFormat, usize, usize, c_uint) -> c_int;
        malloc_3d_array: c"cudaMalloc3DArray",
            fn(*mut usize, *const ChannelFormat, Extent, c_uint) -> c_int;
        malloc_mipmapped_array: c"cudaMallocMipmappedArray",
            fn(*mut usize, *const ChannelFormat, Extent, c_uint, c_uint) -> c_int;
        free_array: c"cudaFreeArray", fn(usize) -> c_int;
        free_mipmapped_array: c"cudaFreeMipmappedArray", fn(usize) -> c_int;
        malloc_async: c"cudaMallocAsync", fn(*mut *mut c_void, usize, usize) -> c_int;
        malloc_async_ptsz: c"cudaMallocAsync_ptsz", fn(*mut *mut c_void, usize, usize) -> c_int;
        malloc_from_pool: c"cudaMallocFromPoolAsync",
            fn(*mut *mut c_void, usize, usize, usize) -> c_int;
        free_async: c"cudaFreeAsync", fn(*mut c_void, usize) -> c_int;
        free_async_ptsz: c"cudaFreeAsync_ptsz", fn(*mut c_void, usize) -> c_int;
        stream_synchronize: c"cudaStreamSynchronize", fn(usize) -> c_int;
        default_pool: c"cudaDeviceGetDefaultMemPool", fn(*mut usize, c_int) -> c_int;
        pool_create: c"cudaMemPoolCreate", fn(*mut usize, *const PoolProperties) -> c_int;
        pool_destroy: c"cudaMemPoolDestroy", fn(usize) -> c_int;
        pool_trim: c"cudaMemPoolTrimTo", fn(usize, usize) -> c_int;
        pool_get: c"cudaMemPoolGetAttribute", fn(usize, c_int, *mut c_void) -> c_int;
        pool_set: c"cudaMemPoolSetAttribute", fn(usize, c_int, *mut c_void) -> c_int;
        ipc_get: c"cudaIpcGetMemHandle", fn(*mut IpcHandle, *mut c_void) -> c_int;
        ipc_open: c"cudaIpcOpenMemHandle", fn(*mut *mut c_void, IpcHandle, c_uint) -> c_int;
        ipc_close: c"cudaIpcCloseMemHandle", fn(*mut c_void) -> c_int;
        get_error_name: c"cudaGetErrorName", fn(c_int) -> *const c_char;
    }
}

/// An address of device or pinned memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(pub usize);

/// cudaExtent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// cudaPitchedPtr.
#[repr(C)]
pub(super) struct PitchedPointer {
    pub(super) address: *mut c_void,
    pub(super) pitch: usize,
    width: usize,
    height: usize,
}

/// cudaChannelFormatDesc: bits of each channel; 0 signed, 1 unsigned, 2 floating point.
#[repr(C)]
pub struct ChannelFormat {
    pub bits: [c_int; 4],
    pub kind: c_int,
}

/// cudaMemPoolProps, for pinned memory on a device that is not shared.
#[repr(C)]
pub(super) struct PoolProperties {
    pub(super) allocation_type: c_uint,
    pub(super) handle_types: c_uint,
    pub(super) location_type: c_uint,
    pub(super) location: c_int,
    pub(super) rest: [u64; 9],
}

/// cudaIpcMemHandle_t.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; 64]);

/// Attributes of a pool (cudaMemPoolAttr).
pub const RELEASE_THRESHOLD: c_int = 4;
pub const RESERVED: c_int = 5;
pub const RESERVED_HIGH: c_int = 6;
pub const USED: c_int = 7;
pub const USED_HIGH: c_int = 8;

/// Which stream the calls without one work on: the variant of their names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DefaultStream {
    Legacy,
    PerThread,
}

/// A loaded runtime.
pub struct Runtime {
    pub(super) functions: Functions,
    /// Frees that failed though they should not have: a planted fault, or a broken driver.
    failed_frees: AtomicU64,
}

pub(super) fn of_pointer(pointer: *mut c_void) -> Address {
    Address(pointer as usize)
}

impl Runtime {
    /// Loads the runtime library; the driver's is checked to exist too, since the runtime alone
    /// could only say that it found no driver.
    pub fn load() -> anyhow::Result<Self> {
        let library = Library::runtime(&NAMES)?;
        Library::load(&[c"libcuda.so.1"])?;
        Ok(Self {
            functions: Functions::resolve(&library)?,
            failed_frees: AtomicU64::new(0),
        })
    }

    pub fn check(&self, call: &str, code: c_int) -> anyhow::Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the runtime gives a string that stays valid, or null.
        let name = unsafe {
            let name = (self.functions.get_error_name)(code);
            if name.is_null() {
                "unknown error".into()
            } else {
                CStr::from_ptr(name).to_string_lossy()
            }
        };
        bail!("{call} failed with {code} ({name})");
    }

    pub fn device_count(&self) -> anyhow::Result<c_int> {
        let mut count = 0;
        // SAFETY: one output.
        let code = unsafe { (self.functions.get_device_count)(&mut count) };
        self.check("cudaGetDeviceCount", code)?;
        if count == 0 {
            bail!("the CUDA runtime sees no device");
        }
        Ok(count)
    }

    pub fn set_device(&self, device: c_int) -> anyhow::Result<()> {
        // SAFETY: a plain number.
        let code = unsafe { (self.functions.set_device)(device) };
        self.check("cudaSetDevice", code)
    }

    /// Destroys the current device's primary context.
    pub fn reset_device(&self) -> anyhow::Result<()> {
        // SAFETY: no arguments.
        let code = unsafe { (self.functions.device_reset)() };
        self.check("cudaDeviceReset", code)
    }

    /// The outcome of a cudaMalloc: the address, or the code.
    pub fn try_malloc(&self, bytes: usize) -> Result<Address, c_int> {
        // SAFETY: one output and a plain number.
        output!(|address| unsafe { (self.functions.malloc)(address, bytes) }).map(of_pointer)
    }

    pub fn malloc(&self, bytes: usize) -> anyhow::Result<Address> {
        self.expect("cudaMalloc", self.try_malloc(bytes))
    }

    /// The value of a call that has to succeed.
    pub fn expect<T>(&self, call: &str, outcome: Result<T, c_int>) -> anyhow::Result<T> {
        match outcome {
            Ok(value) => Ok(value),
            Err(code) => {
                self.check(call, code)?;
                bail!("{call} failed without a code")
            }
        }
    }

    /// The code of a cudaFree.
    pub fn try_free(&self, address: Address) -> c_int {
        // SAFETY: the runtime checks the address.
        unsafe { (self.functions.free)(address.0 as *mut c_void) }
    }

    /// Frees a block. A failure leaves it allocated and is counted: a scenario goes on, since a
    /// planted fault is what some tests want.
    pub fn free(&self, address: Address) {
        if self.try_free(address) != 0 {
            self.failed_frees.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn host_alloc(&self, bytes: usize) -> anyhow::Result<Address> {
        self.expect("cudaHostAlloc", self.try_host_alloc(bytes))
    }

    pub fn try_host_alloc(&self, bytes: usize) -> Result<Address, c_int> {
        // SAFETY: one output and plain numbers.
        output!(|address| unsafe { (self.functions.host_alloc)(address, bytes, 0) }).map(of_pointer)
    }

    /// The code of a cudaFreeHost.
    pub fn try_free_host(&self, address: Address) -> c_int {
        // SAFETY: the runtime checks the address.
        unsafe { (self.functions.free_host)(address.0 as *mut c_void) }
    }

    /// The code of a cudaHostRegister.
    pub fn try_host_register(&self, memory: &mut [u8]) -> c_int {
        // SAFETY: the range is the slice's own.
        unsafe { (self.functions.host_register)(memory.as_mut_ptr().cast(), memory.len(), 0) }
    }

    /// The code of a cudaHostUnregister.
    pub fn try_host_unregister(&self, address: Address) -> c_int {
        // SAFETY: the runtime checks the address.
        unsafe { (self.functions.host_unregister)(address.0 as *mut c_void) }
    }

    pub fn free_host(&self, address: Address) {
        if self.try_free_host(address) != 0 {
            self.failed_frees.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn host_register(&self, memory: &mut [u8]) -> anyhow::Result<()> {
        self.check("cudaHostRegister", self.try_host_register(memory))
    }

    pub fn host_unregister(&self, memory: &mut [u8]) {
        let address = Address(memory.as_mut_ptr() as usize);
        if self.try_host_unregister(address) != 0 {
            self.failed_frees.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Capacity of the current device, in bytes.
    pub fn total_bytes(&self) -> anyhow::Result<usize> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two outputs.
        let code = unsafe { (self.functions.mem_get_info)(&mut free, &mut total) };
        self.check("cudaMemGetInfo", code)?;
        Ok(total)
    }

    /// Says on standard error how many frees failed unexpectedly, if any did.
    pub fn report_failed_frees(&self) {
        let failed = self.failed_frees.load(Ordering::Relaxed);
        if failed > 0 {
            eprintln!(
                "vramscope-workload: {failed} frees failed; their blocks are still allocated"
            );
        }
    }
}
