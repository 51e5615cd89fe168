//! The CUDA runtime as the scenarios use it.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::bail;

use crate::library::{Library, functions};

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
        mem_get_info: c"cudaMemGetInfo", fn(*mut usize, *mut usize) -> c_int;
        get_error_name: c"cudaGetErrorName", fn(c_int) -> *const c_char;
    }
}

/// An address of device or pinned memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(pub usize);

/// A loaded runtime.
pub struct Runtime {
    functions: Functions,
    /// Frees that failed though they should not have: a planted fault, or a broken driver.
    failed_frees: AtomicU64,
}

impl Runtime {
    /// Loads the runtime library; the driver's is checked to exist too, since the runtime alone
    /// could only say that it found no driver.
    pub fn load() -> anyhow::Result<Self> {
        let library = Library::load(&NAMES)?;
        Library::load(&[c"libcuda.so.1"])?;
        Ok(Self {
            functions: Functions::resolve(&library)?,
            failed_frees: AtomicU64::new(0),
        })
    }

    fn check(&self, call: &str, code: c_int) -> anyhow::Result<()> {
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

    /// The outcome of a cudaMalloc: the address, or the code.
    pub fn try_malloc(&self, bytes: usize) -> Result<Address, c_int> {
        let mut address = std::ptr::null_mut();
        // SAFETY: one output and a plain number.
        match unsafe { (self.functions.malloc)(&mut address, bytes) } {
            0 => Ok(Address(address as usize)),
            code => Err(code),
        }
    }

    pub fn malloc(&self, bytes: usize) -> anyhow::Result<Address> {
        match self.try_malloc(bytes) {
            Ok(address) => Ok(address),
            Err(code) => {
                self.check("cudaMalloc", code)?;
                bail!("cudaMalloc failed without a code")
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
        let mut address = std::ptr::null_mut();
        // SAFETY: one output and plain numbers.
        let code = unsafe { (self.functions.host_alloc)(&mut address, bytes, 0) };
        self.check("cudaHostAlloc", code)?;
        Ok(Address(address as usize))
    }

    pub fn free_host(&self, address: Address) {
        // SAFETY: the runtime checks the address.
        if unsafe { (self.functions.free_host)(address.0 as *mut c_void) } != 0 {
            self.failed_frees.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn host_register(&self, memory: &mut [u8]) -> anyhow::Result<()> {
        let address = memory.as_mut_ptr().cast();
        // SAFETY: the range is the slice's own.
        let code = unsafe { (self.functions.host_register)(address, memory.len(), 0) };
        self.check("cudaHostRegister", code)
    }

    pub fn host_unregister(&self, memory: &mut [u8]) {
        // SAFETY: the runtime checks the address.
        if unsafe { (self.functions.host_unregister)(memory.as_mut_ptr().cast()) } != 0 {
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
