//! The driver's functions, resolved at run time as the vendor's runtime does: the library by its
//! plain name, and every function through `cuGetProcAddress`.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem::MaybeUninit,
};

use crate::codes::{CudaResult, INSUFFICIENT_DRIVER, SUCCESS};

mod work;

/// The interface version that function variants are asked for.
const CUDA_VERSION: c_int = 13000;

type GetProcAddress =
    unsafe extern "C" fn(*const libc::c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// Asks for the variant that works on the calling thread's own stream.
const PER_THREAD_STREAM: u64 = 2;

macro_rules! driver {
    ($($field:ident: $name:literal $($flags:ident)?, fn($($argument:ty),*);)*) => {
        /// The driver's functions.
        pub struct Driver {
            get: GetProcAddress,
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Driver {
            fn resolve(get: GetProcAddress) -> CudaResult<Self> {
                Ok(Self {
                    get,
                    $($field: {
                        let address = address_of(get, $name, 0 $(| $flags)?)?;
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
    ctx_synchronize: c"cuCtxSynchronize", fn(usize);
    stream_create: c"cuStreamCreate", fn(*mut usize, c_uint);
    stream_destroy: c"cuStreamDestroy", fn(usize);
    stream_synchronize: c"cuStreamSynchronize", fn(usize);
    stream_synchronize_ptsz: c"cuStreamSynchronize" PER_THREAD_STREAM, fn(usize);
    mem_alloc_pitch: c"cuMemAllocPitch", fn(*mut usize, *mut usize, usize, usize, c_uint);
    mem_alloc_managed: c"cuMemAllocManaged", fn(*mut usize, usize, c_uint);
    mem_alloc_async: c"cuMemAllocAsync", fn(*mut usize, usize, usize);
    mem_alloc_async_ptsz: c"cuMemAllocAsync" PER_THREAD_STREAM, fn(*mut usize, usize, usize);
    mem_alloc_from_pool: c"cuMemAllocFromPoolAsync", fn(*mut usize, usize, usize, usize);
    mem_alloc_from_pool_ptsz:
        c"cuMemAllocFromPoolAsync" PER_THREAD_STREAM, fn(*mut usize, usize, usize, usize);
    mem_free_async: c"cuMemFreeAsync", fn(usize, usize);
    mem_free_async_ptsz: c"cuMemFreeAsync" PER_THREAD_STREAM, fn(usize, usize);
    array_create: c"cuArrayCreate", fn(*mut usize, *const ArrayDescriptor);
    array_3d_create: c"cuArray3DCreate", fn(*mut usize, *const Array3DDescriptor);
    array_destroy: c"cuArrayDestroy", fn(usize);
    mipmapped_array_create:
        c"cuMipmappedArrayCreate", fn(*mut usize, *const Array3DDescriptor, c_uint);
    mipmapped_array_destroy: c"cuMipmappedArrayDestroy", fn(usize);
    mem_pool_create: c"cuMemPoolCreate", fn(*mut usize, *const c_void);
    mem_pool_destroy: c"cuMemPoolDestroy", fn(usize);
    mem_pool_trim_to: c"cuMemPoolTrimTo", fn(usize, usize);
    mem_pool_get_attribute: c"cuMemPoolGetAttribute", fn(usize, c_int, *mut c_void);
    mem_pool_set_attribute: c"cuMemPoolSetAttribute", fn(usize, c_int, *mut c_void);
    device_get_default_mem_pool: c"cuDeviceGetDefaultMemPool", fn(*mut usize, c_int);
    device_get_mem_pool: c"cuDeviceGetMemPool", fn(*mut usize, c_int);
    device_set_mem_pool: c"cuDeviceSetMemPool", fn(c_int, usize);
    device_get_attribute: c"cuDeviceGetAttribute", fn(*mut c_int, c_int, c_int);
    device_get_name: c"cuDeviceGetName", fn(*mut c_char, c_int, c_int);
    device_get_uuid: c"cuDeviceGetUuid", fn(*mut [u8; 16], c_int);
    device_total_mem: c"cuDeviceTotalMem", fn(*mut usize, c_int);
    stream_query: c"cuStreamQuery", fn(usize);
    memcpy: c"cuMemcpy", fn(usize, usize, usize);
    memcpy_async: c"cuMemcpyAsync", fn(usize, usize, usize, usize);
    memset: c"cuMemsetD8", fn(usize, u8, usize);
    memset_async: c"cuMemsetD8Async", fn(usize, u8, usize, usize);
    pointer_get_attribute: c"cuPointerGetAttribute", fn(*mut c_void, c_uint, usize);
    mem_pool_set_access: c"cuMemPoolSetAccess", fn(usize, *const c_void, usize);
    ipc_get_mem_handle: c"cuIpcGetMemHandle", fn(*mut IpcHandle, usize);
    ipc_open_mem_handle: c"cuIpcOpenMemHandle", fn(*mut usize, IpcHandle, c_uint);
    ipc_close_mem_handle: c"cuIpcCloseMemHandle", fn(usize);
}

/// CUDA_ARRAY_DESCRIPTOR.
#[repr(C)]
pub struct ArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub format: c_uint,
    pub channels: c_uint,
}

/// CUDA_ARRAY3D_DESCRIPTOR.
#[repr(C)]
pub struct Array3DDescriptor {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: c_uint,
    pub channels: c_uint,
    pub flags: c_uint,
}

/// CUipcMemHandle and cudaIpcMemHandle_t: 64 opaque bytes, passed by value on the stack.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle {
    words: [u64; 8],
}

/// Which stream a call without one works on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DefaultStream {
    Legacy,
    PerThread,
}

fn address_of(get: GetProcAddress, name: &CStr, flags: u64) -> CudaResult<*mut c_void> {
    let mut address = std::ptr::null_mut();
    let mut status = 0;
    // SAFETY: a string with its zero byte and two outputs, as documented.
    let code = unsafe {
        get(
            name.as_ptr(),
            &mut address,
            CUDA_VERSION,
            flags,
            &mut status,
        )
    };
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

    pub fn synchronize_context(&self, context: usize) -> CudaResult<()> {
        // SAFETY: a handle that the driver gave; it checks it.
        check(unsafe { (self.ctx_synchronize)(context) })
    }

    pub fn create_stream(&self) -> CudaResult<usize> {
        // SAFETY: one output and a plain number.
        output(|stream| unsafe { (self.stream_create)(stream, 0) })
    }

    pub fn destroy_stream(&self, stream: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the handle.
        check(unsafe { (self.stream_destroy)(stream) })
    }

    pub fn synchronize_stream(&self, stream: usize, default: DefaultStream) -> CudaResult<()> {
        let function = match default {
            DefaultStream::Legacy => self.stream_synchronize,
            DefaultStream::PerThread => self.stream_synchronize_ptsz,
        };
        // SAFETY: the driver checks the handle.
        check(unsafe { function(stream) })
    }

    /// The address and the bytes of a row.
    pub fn allocate_pitched(&self, width: usize, height: usize) -> CudaResult<(usize, usize)> {
        let (mut address, mut pitch) = (0, 0);
        // SAFETY: two outputs and plain numbers. Elements of 4 bytes do for any type.
        check(unsafe { (self.mem_alloc_pitch)(&mut address, &mut pitch, width, height, 4) })?;
        Ok((address, pitch))
    }

    pub fn allocate_managed(&self, bytes: usize, flags: c_uint) -> CudaResult<usize> {
        // SAFETY: one output and plain numbers.
        output(|address| unsafe { (self.mem_alloc_managed)(address, bytes, flags) })
    }

    /// A slice of a pool, or of the device's current one.
    pub fn allocate_async(
        &self,
        bytes: usize,
        pool: Option<usize>,
        stream: usize,
        default: DefaultStream,
    ) -> CudaResult<usize> {
        let (current, from_pool) = match default {
            DefaultStream::Legacy => (self.mem_alloc_async, self.mem_alloc_from_pool),
            DefaultStream::PerThread => (self.mem_alloc_async_ptsz, self.mem_alloc_from_pool_ptsz),
        };
        // SAFETY: one output, plain numbers, and handles that the driver checks.
        output(|address| unsafe {
            match pool {
                None => current(address, bytes, stream),
                Some(pool) => from_pool(address, bytes, pool, stream),
            }
        })
    }

    pub fn free_async(
        &self,
        address: usize,
        stream: usize,
        default: DefaultStream,
    ) -> CudaResult<()> {
        let function = match default {
            DefaultStream::Legacy => self.mem_free_async,
            DefaultStream::PerThread => self.mem_free_async_ptsz,
        };
        // SAFETY: the driver checks the address and the handle.
        check(unsafe { function(address, stream) })
    }

    pub fn create_array(&self, descriptor: &ArrayDescriptor) -> CudaResult<usize> {
        // SAFETY: one output and a descriptor that lives through the call.
        output(|array| unsafe { (self.array_create)(array, descriptor) })
    }

    pub fn create_3d_array(&self, descriptor: &Array3DDescriptor) -> CudaResult<usize> {
        // SAFETY: one output and a descriptor that lives through the call.
        output(|array| unsafe { (self.array_3d_create)(array, descriptor) })
    }

    pub fn destroy_array(&self, array: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the handle.
        check(unsafe { (self.array_destroy)(array) })
    }

    pub fn create_mipmapped_array(
        &self,
        descriptor: &Array3DDescriptor,
        levels: c_uint,
    ) -> CudaResult<usize> {
        // SAFETY: one output, a descriptor that lives through the call, and a plain number.
        output(|array| unsafe { (self.mipmapped_array_create)(array, descriptor, levels) })
    }

    pub fn destroy_mipmapped_array(&self, array: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the handle.
        check(unsafe { (self.mipmapped_array_destroy)(array) })
    }

    /// The runtime's properties have the driver's layout.
    ///
    /// # Safety
    /// `properties` must be null or point to the documented struct.
    pub unsafe fn create_pool(&self, properties: *const c_void) -> CudaResult<usize> {
        // SAFETY: one output, and the caller's promise.
        output(|pool| unsafe { (self.mem_pool_create)(pool, properties) })
    }

    pub fn destroy_pool(&self, pool: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the handle.
        check(unsafe { (self.mem_pool_destroy)(pool) })
    }

    pub fn trim_pool(&self, pool: usize, keep: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the handle.
        check(unsafe { (self.mem_pool_trim_to)(pool, keep) })
    }

    /// # Safety
    /// `value` must be null or point to what the attribute wants.
    pub unsafe fn pool_attribute(
        &self,
        pool: usize,
        attribute: c_int,
        value: *mut c_void,
    ) -> CudaResult<()> {
        // SAFETY: the caller's promise.
        check(unsafe { (self.mem_pool_get_attribute)(pool, attribute, value) })
    }

    /// # Safety
    /// As for [`Driver::pool_attribute`].
    pub unsafe fn set_pool_attribute(
        &self,
        pool: usize,
        attribute: c_int,
        value: *mut c_void,
    ) -> CudaResult<()> {
        // SAFETY: the caller's promise.
        check(unsafe { (self.mem_pool_set_attribute)(pool, attribute, value) })
    }

    pub fn default_pool(&self, device: c_int) -> CudaResult<usize> {
        // SAFETY: one output and a plain number.
        output(|pool| unsafe { (self.device_get_default_mem_pool)(pool, device) })
    }

    pub fn current_pool(&self, device: c_int) -> CudaResult<usize> {
        // SAFETY: one output and a plain number.
        output(|pool| unsafe { (self.device_get_mem_pool)(pool, device) })
    }

    pub fn set_current_pool(&self, device: c_int, pool: usize) -> CudaResult<()> {
        // SAFETY: a plain number and a handle that the driver checks.
        check(unsafe { (self.device_set_mem_pool)(device, pool) })
    }

    pub fn ipc_handle(&self, address: usize) -> CudaResult<IpcHandle> {
        // SAFETY: one output; the driver checks the address.
        output(|handle| unsafe { (self.ipc_get_mem_handle)(handle, address) })
    }

    pub fn open_ipc(&self, handle: IpcHandle, flags: c_uint) -> CudaResult<usize> {
        // SAFETY: one output; the driver checks the handle.
        output(|address| unsafe { (self.ipc_open_mem_handle)(address, handle, flags) })
    }

    pub fn close_ipc(&self, address: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the address.
        check(unsafe { (self.ipc_close_mem_handle)(address) })
    }
}
