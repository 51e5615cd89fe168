//! The CUDA driver as the scenarios use it, beside the runtime or alone.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use anyhow::bail;

use super::library::{Library, functions, output};

functions! {
    Functions {
        init: c"cuInit", fn(c_uint) -> c_int;
        ctx_create_v2: c"cuCtxCreate_v2", fn(*mut usize, c_uint, c_int) -> c_int;
        ctx_create_v3: c"cuCtxCreate_v3",
            fn(*mut usize, *const c_void, c_int, c_uint, c_int) -> c_int;
        ctx_create_v4: c"cuCtxCreate_v4", fn(*mut usize, *const c_void, c_uint, c_int) -> c_int;
        ctx_destroy: c"cuCtxDestroy_v2", fn(usize) -> c_int;
        ctx_set_current: c"cuCtxSetCurrent", fn(usize) -> c_int;
        ctx_push: c"cuCtxPushCurrent_v2", fn(usize) -> c_int;
        ctx_pop: c"cuCtxPopCurrent_v2", fn(*mut usize) -> c_int;
        primary_retain: c"cuDevicePrimaryCtxRetain", fn(*mut usize, c_int) -> c_int;
        primary_release_v1: c"cuDevicePrimaryCtxRelease", fn(c_int) -> c_int;
        primary_release_v2: c"cuDevicePrimaryCtxRelease_v2", fn(c_int) -> c_int;
        primary_reset: c"cuDevicePrimaryCtxReset_v2", fn(c_int) -> c_int;
        mem_alloc: c"cuMemAlloc_v2", fn(*mut usize, usize) -> c_int;
        mem_alloc_pitch: c"cuMemAllocPitch_v2",
            fn(*mut usize, *mut usize, usize, usize, c_uint) -> c_int;
        mem_alloc_managed: c"cuMemAllocManaged", fn(*mut usize, usize, c_uint) -> c_int;
        mem_alloc_host: c"cuMemAllocHost_v2", fn(*mut usize, usize) -> c_int;
        mem_alloc_async: c"cuMemAllocAsync", fn(*mut usize, usize, usize) -> c_int;
        mem_free: c"cuMemFree_v2", fn(usize) -> c_int;
        array_create: c"cuArrayCreate_v2", fn(*mut usize, *const ArrayDescriptor) -> c_int;
        address_reserve: c"cuMemAddressReserve",
            fn(*mut usize, usize, usize, usize, u64) -> c_int;
        address_free: c"cuMemAddressFree", fn(usize, usize) -> c_int;
        mem_create: c"cuMemCreate", fn(*mut usize, usize, *const Properties, u64) -> c_int;
        mem_release: c"cuMemRelease", fn(usize) -> c_int;
        mem_map: c"cuMemMap", fn(usize, usize, usize, usize, u64) -> c_int;
        mem_unmap: c"cuMemUnmap", fn(usize, usize) -> c_int;
        mem_set_access: c"cuMemSetAccess", fn(usize, usize, *const Access, usize) -> c_int;
        mem_retain: c"cuMemRetainAllocationHandle", fn(*mut usize, usize) -> c_int;
        mem_export: c"cuMemExportToShareableHandle",
            fn(*mut c_int, usize, c_uint, u64) -> c_int;
        mem_import: c"cuMemImportFromShareableHandle", fn(*mut usize, usize, c_uint) -> c_int;
        get_error_name: c"cuGetErrorName", fn(c_int, *mut *const c_char) -> c_int;
    }
}

/// CUDA_ARRAY_DESCRIPTOR.
#[repr(C)]
pub(super) struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// CUmemAllocationProp, for pinned memory on a device.
#[repr(C)]
pub(super) struct Properties {
    allocation_type: c_uint,
    handle_types: c_uint,
    location_type: c_uint,
    location: c_int,
    rest: [u64; 2],
}

/// CUmemAccessDesc.
#[repr(C)]
pub(super) struct Access {
    location_type: c_uint,
    location: c_int,
    flags: c_uint,
}

/// CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
/// CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ATTACH_GLOBAL, CU_AD_FORMAT_FLOAT.
const PINNED: c_uint = 1;
const ON_DEVICE: c_uint = 1;
const FILE_DESCRIPTOR: c_uint = 1;
const READ_WRITE: c_uint = 3;
const ATTACH_GLOBAL: c_uint = 1;
const FORMAT_FLOAT: c_uint = 0x20;

/// A loaded driver.
pub struct Driver {
    functions: Functions,
}

/// Which of the calls that create a context.
#[derive(Clone, Copy)]
pub enum Creation {
    V2,
    V3,
    V4,
}

/// Calls that give a code are for scenarios that want a failure; [`Driver::check`] judges it.
impl Driver {
    /// Loads the driver and initialises it.
    pub fn load() -> anyhow::Result<Self> {
        let library = Library::load(&[c"libcuda.so.1"])?;
        let driver = Self {
            functions: Functions::resolve(&library)?,
        };
        // SAFETY: a plain number.
        driver.check("cuInit", unsafe { (driver.functions.init)(0) })?;
        Ok(driver)
    }

    pub fn check(&self, call: &str, code: c_int) -> anyhow::Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: one output.
        unsafe { (self.functions.get_error_name)(code, &mut name) };
        let name = if name.is_null() {
            "unknown error".into()
        } else {
            // SAFETY: the driver's names are constant strings.
            unsafe { CStr::from_ptr(name) }.to_string_lossy()
        };
        bail!("{call} failed with {code} ({name})");
    }

    fn expect<T>(&self, call: &str, outcome: Result<T, c_int>) -> anyhow::Result<T> {
        match outcome {
            Ok(value) => Ok(value),
            Err(code) => {
                self.check(call, code)?;
                bail!("{call} failed without a code")
            }
        }
    }

    /// A new context, current to this thread.
    pub fn create_context(&self, creation: Creation, device: c_int) -> anyhow::Result<usize> {
        let functions = &self.functions;
        let nothing = std::ptr::null();
        // SAFETY: one output, no parameters, plain numbers.
        let made = output!(|context| unsafe {
            match creation {
                Creation::V2 => (functions.ctx_create_v2)(context, 0, device),
                Creation::V3 => (functions.ctx_create_v3)(context, nothing, 0, 0, device),
                Creation::V4 => (functions.ctx_create_v4)(context, nothing, 0, device),
            }
        });
        self.expect("cuCtxCreate", made)
    }

    pub fn destroy_context(&self, context: usize) -> anyhow::Result<()> {
        // SAFETY: the driver checks the handle.
        let code = unsafe { (self.functions.ctx_destroy)(context) };
        self.check("cuCtxDestroy", code)
    }

    pub fn set_current(&self, context: usize) -> anyhow::Result<()> {
        // SAFETY: the driver checks the handle.
        let code = unsafe { (self.functions.ctx_set_current)(context) };
        self.check("cuCtxSetCurrent", code)
    }

    pub fn push_context(&self, context: usize) -> anyhow::Result<()> {
        // SAFETY: the driver checks the handle.
        let code = unsafe { (self.functions.ctx_push)(context) };
        self.check("cuCtxPushCurrent", code)
    }

    pub fn pop_context(&self) -> anyhow::Result<usize> {
        // SAFETY: one output.
        let popped = output!(|context| unsafe { (self.functions.ctx_pop)(context) });
        self.expect("cuCtxPopCurrent", popped)
    }

    pub fn retain_primary(&self, device: c_int) -> anyhow::Result<usize> {
        let function = self.functions.primary_retain;
        // SAFETY: one output and a plain number.
        let retained = output!(|context| unsafe { function(context, device) });
        self.expect("cuDevicePrimaryCtxRetain", retained)
    }

    pub fn release_primary(&self, device: c_int) -> anyhow::Result<()> {
        // SAFETY: a plain number.
        let code = unsafe { (self.functions.primary_release_v2)(device) };
        self.check("cuDevicePrimaryCtxRelease_v2", code)
    }

    /// By the older of the two names.
    pub fn release_primary_v1(&self, device: c_int) -> anyhow::Result<()> {
        // SAFETY: a plain number.
        let code = unsafe { (self.functions.primary_release_v1)(device) };
        self.check("cuDevicePrimaryCtxRelease", code)
    }

    pub fn reset_primary(&self, device: c_int) -> anyhow::Result<()> {
        // SAFETY: a plain number.
        let code = unsafe { (self.functions.primary_reset)(device) };
        self.check("cuDevicePrimaryCtxReset_v2", code)
    }

    pub fn try_allocate(&self, bytes: usize) -> Result<usize, c_int> {
        // SAFETY: one output and a plain number.
        output!(|address| unsafe { (self.functions.mem_alloc)(address, bytes) })
    }

    pub fn allocate(&self, bytes: usize) -> anyhow::Result<usize> {
        self.expect("cuMemAlloc", self.try_allocate(bytes))
    }

    pub fn try_free(&self, address: usize) -> c_int {
        // SAFETY: the driver checks the address.
        unsafe { (self.functions.mem_free)(address) }
    }

    pub fn free(&self, address: usize) -> anyhow::Result<()> {
        self.check("cuMemFree", self.try_free(address))
    }

    /// The address and the bytes of a row.
    pub fn allocate_pitch(&self, width: usize, height: usize) -> anyhow::Result<(usize, usize)> {
        let (mut address, mut pitch) = (0, 0);
        let function = self.functions.mem_alloc_pitch;
        // SAFETY: two outputs and plain numbers.
        let code = unsafe { function(&mut address, &mut pitch, width, height, 4) };
        self.check("cuMemAllocPitch", code)?;
        Ok((address, pitch))
    }

    pub fn allocate_managed(&self, bytes: usize) -> anyhow::Result<usize> {
        let function = self.functions.mem_alloc_managed;
        // SAFETY: one output and plain numbers.
        let made = output!(|address| unsafe { function(address, bytes, ATTACH_GLOBAL) });
        self.expect("cuMemAllocManaged", made)
    }

    pub fn allocate_host(&self, bytes: usize) -> anyhow::Result<usize> {
        // SAFETY: one output and a plain number.
        let made = output!(|address| unsafe { (self.functions.mem_alloc_host)(address, bytes) });
        self.expect("cuMemAllocHost", made)
    }

    /// On the default stream.
    pub fn allocate_async(&self, bytes: usize) -> anyhow::Result<usize> {
        let function = self.functions.mem_alloc_async;
        // SAFETY: one output, a plain number, the default stream.
        let made = output!(|address| unsafe { function(address, bytes, 0) });
        self.expect("cuMemAllocAsync", made)
    }

    /// A flat array of single floating-point numbers.
    pub fn create_array(&self, width: usize, height: usize) -> anyhow::Result<usize> {
        let descriptor = ArrayDescriptor {
            width,
            height,
            format: FORMAT_FLOAT,
            channels: 1,
        };
        // SAFETY: one output, and a descriptor that lives through the call.
        let made = output!(|array| unsafe { (self.functions.array_create)(array, &descriptor) });
        self.expect("cuArrayCreate", made)
    }

    pub fn try_reserve(&self, bytes: usize) -> Result<usize, c_int> {
        let function = self.functions.address_reserve;
        // SAFETY: one output and plain numbers.
        output!(|address| unsafe { function(address, bytes, 0, 0, 0) })
    }

    pub fn reserve(&self, bytes: usize) -> anyhow::Result<usize> {
        self.expect("cuMemAddressReserve", self.try_reserve(bytes))
    }

    pub fn try_unreserve(&self, address: usize, bytes: usize) -> c_int {
        // SAFETY: the driver checks the range.
        unsafe { (self.functions.address_free)(address, bytes) }
    }

    /// Memory on a device, which can be shared by a file descriptor.
    pub fn try_create(&self, bytes: usize, device: c_int) -> Result<usize, c_int> {
        let properties = Properties {
            allocation_type: PINNED,
            handle_types: FILE_DESCRIPTOR,
            location_type: ON_DEVICE,
            location: device,
            rest: [0; 2],
        };
        let function = self.functions.mem_create;
        // SAFETY: one output, and properties that live through the call.
        output!(|handle| unsafe { function(handle, bytes, &properties, 0) })
    }

    pub fn create(&self, bytes: usize, device: c_int) -> anyhow::Result<usize> {
        self.expect("cuMemCreate", self.try_create(bytes, device))
    }

    pub fn try_release(&self, handle: usize) -> c_int {
        // SAFETY: the driver checks the handle.
        unsafe { (self.functions.mem_release)(handle) }
    }

    pub fn release(&self, handle: usize) -> anyhow::Result<()> {
        self.check("cuMemRelease", self.try_release(handle))
    }

    pub fn try_map(&self, address: usize, bytes: usize, handle: usize) -> c_int {
        // SAFETY: the driver checks range and handle.
        unsafe { (self.functions.mem_map)(address, bytes, 0, handle, 0) }
    }

    pub fn map(&self, address: usize, bytes: usize, handle: usize) -> anyhow::Result<()> {
        self.check("cuMemMap", self.try_map(address, bytes, handle))
    }

    pub fn try_unmap(&self, address: usize, bytes: usize) -> c_int {
        // SAFETY: the driver checks the range.
        unsafe { (self.functions.mem_unmap)(address, bytes) }
    }

    pub fn unmap(&self, address: usize, bytes: usize) -> anyhow::Result<()> {
        self.check("cuMemUnmap", self.try_unmap(address, bytes))
    }

    pub fn allow_access(&self, address: usize, bytes: usize, device: c_int) -> anyhow::Result<()> {
        let access = Access {
            location_type: ON_DEVICE,
            location: device,
            flags: READ_WRITE,
        };
        // SAFETY: one description that lives through the call; the driver checks the range.
        let code = unsafe { (self.functions.mem_set_access)(address, bytes, &access, 1) };
        self.check("cuMemSetAccess", code)
    }

    pub fn try_retain(&self, address: usize) -> Result<usize, c_int> {
        // SAFETY: one output; the driver checks the address.
        output!(|handle| unsafe { (self.functions.mem_retain)(handle, address) })
    }

    pub fn retain(&self, address: usize) -> anyhow::Result<usize> {
        self.expect("cuMemRetainAllocationHandle", self.try_retain(address))
    }

    /// A file descriptor for memory.
    pub fn export(&self, handle: usize) -> anyhow::Result<c_int> {
        let function = self.functions.mem_export;
        // SAFETY: one output of the type that the handle type has.
        let made = output!(|shared| unsafe { function(shared, handle, FILE_DESCRIPTOR, 0) });
        self.expect("cuMemExportToShareableHandle", made)
    }

    pub fn try_import(&self, descriptor: c_int) -> Result<usize, c_int> {
        let function = self.functions.mem_import;
        // SAFETY: one output; the driver checks the descriptor.
        output!(|handle| unsafe { function(handle, descriptor as usize, FILE_DESCRIPTOR) })
    }

    pub fn import(&self, descriptor: c_int) -> anyhow::Result<usize> {
        self.expect(
            "cuMemImportFromShareableHandle",
            self.try_import(descriptor),
        )
    }
}
