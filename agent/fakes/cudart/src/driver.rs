//! The driver's functions, resolved at run time as the vendor's runtime does: the library by its
//! plain name, and every function through `cuGetProcAddress`.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    mem::MaybeUninit,
};

use crate::codes::{CudaResult, INSUFFICIENT_DRIVER, SUCCESS};

/// The interface version that function variants are asked for.
const CUDA_VERSION: c_int = 13000;

type GetProcAddress =
    unsafe extern "C" fn(*const libc::c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

macro_rules! driver {
    ($($field:ident: $name:literal, fn($($argument:ty),*);)*) => {
        /// The driver's functions.
        pub struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Driver {
            fn resolve(get: GetProcAddress) -> CudaResult<Self> {
                Ok(Self {
                    $($field: {
                        let address = address_of(get, $name)?;
                        // SAFETY: the driver documents this signature for this name and version.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> c_int,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}

driver! {
    init: c"cuInit", fn(c_uint);
    driver_get_version: c"cuDriverGetVersion", fn(*mut c_int);
    device_get_count: c"cuDeviceGetCount", fn(*mut c_int);
    primary_ctx_retain: c"cuDevicePrimaryCtxRetain", fn(*mut usize, c_int);
    primary_ctx_reset: c"cuDevicePrimaryCtxReset", fn(c_int);
    ctx_get_current: c"cuCtxGetCurrent", fn(*mut usize);
    ctx_set_current: c"cuCtxSetCurrent", fn(usize);
    mem_get_info: c"cuMemGetInfo", fn(*mut usize, *mut usize);
    mem_alloc: c"cuMemAlloc", fn(*mut usize, usize);
    mem_free: c"cuMemFree", fn(usize);
    mem_host_alloc: c"cuMemHostAlloc", fn(*mut usize, usize, c_uint);
    mem_free_host: c"cuMemFreeHost", fn(usize);
    mem_host_register: c"cuMemHostRegister", fn(usize, usize, c_uint);
    mem_host_unregister: c"cuMemHostUnregister", fn(usize);
}

fn address_of(get: GetProcAddress, name: &CStr) -> CudaResult<*mut c_void> {
    let mut address = std::ptr::null_mut();
    let mut status = 0;
    // SAFETY: a string with its zero byte and two outputs, as documented.
    let code = unsafe { get(name.as_ptr(), &mut address, CUDA_VERSION, 0, &mut status) };
    if code != SUCCESS || address.is_null() {
        return Err(INSUFFICIENT_DRIVER);
    }
    Ok(address)
}

fn check(code: c_int) -> CudaResult<()> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}

/// Runs a call that writes one output.
fn output<T>(call: impl FnOnce(*mut T) -> c_int) -> CudaResult<T> {
    let mut value = MaybeUninit::uninit();
    check(call(value.as_mut_ptr()))?;
    // SAFETY: the driver has written the output of a call that succeeded.
    Ok(unsafe { value.assume_init() })
}

impl Driver {
    /// Loads the driver and initialises it.
    ///
    /// # Errors
    /// cudaErrorInsufficientDriver where there is none or it lacks a function.
    pub fn load() -> CudaResult<Self> {
        // SAFETY: loading runs the library's initialisers, which is what the program asked for.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(INSUFFICIENT_DRIVER);
        }
        // SAFETY: a handle just opened, never closed, and a string with its zero byte.
        let get = unsafe { libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr()) };
        if get.is_null() {
            return Err(INSUFFICIENT_DRIVER);
        }
        // SAFETY: the driver documents this signature for this name.
        let get = unsafe { std::mem::transmute::<*mut c_void, GetProcAddress>(get) };
        let driver = Self::resolve(get)?;
        // SAFETY: a plain number.
        check(unsafe { (driver.init)(0) })?;
        Ok(driver)
    }

    pub fn version(&self) -> CudaResult<c_int> {
        // SAFETY: one output.
        output(|version| unsafe { (self.driver_get_version)(version) })
    }

    pub fn device_count(&self) -> CudaResult<c_int> {
        // SAFETY: one output.
        output(|count| unsafe { (self.device_get_count)(count) })
    }

    pub fn primary_retain(&self, device: c_int) -> CudaResult<usize> {
        // SAFETY: one output and a plain number.
        output(|context| unsafe { (self.primary_ctx_retain)(context, device) })
    }

    pub fn primary_reset(&self, device: c_int) -> CudaResult<()> {
        // SAFETY: a plain number.
        check(unsafe { (self.primary_ctx_reset)(device) })
    }

    pub fn current_context(&self) -> CudaResult<usize> {
        // SAFETY: one output.
        output(|context| unsafe { (self.ctx_get_current)(context) })
    }

    pub fn set_current_context(&self, context: usize) -> CudaResult<()> {
        // SAFETY: a handle that the driver gave; it checks it.
        check(unsafe { (self.ctx_set_current)(context) })
    }

    /// Free and total bytes of the current device.
    pub fn memory_info(&self) -> CudaResult<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two outputs.
        check(unsafe { (self.mem_get_info)(&mut free, &mut total) })?;
        Ok((free, total))
    }

    pub fn allocate(&self, bytes: usize) -> CudaResult<usize> {
        // SAFETY: one output and a plain number.
        output(|address| unsafe { (self.mem_alloc)(address, bytes) })
    }

    pub fn free(&self, address: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the address.
        check(unsafe { (self.mem_free)(address) })
    }

    pub fn allocate_host(&self, bytes: usize, flags: c_uint) -> CudaResult<usize> {
        // SAFETY: one output and plain numbers.
        output(|address| unsafe { (self.mem_host_alloc)(address, bytes, flags) })
    }

    pub fn free_host(&self, address: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the address.
        check(unsafe { (self.mem_free_host)(address) })
    }

    pub fn register_host(&self, address: usize, bytes: usize, flags: c_uint) -> CudaResult<()> {
        // SAFETY: the driver checks that the range exists.
        check(unsafe { (self.mem_host_register)(address, bytes, flags) })
    }

    pub fn unregister_host(&self, address: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the address.
        check(unsafe { (self.mem_host_unregister)(address) })
    }
}
