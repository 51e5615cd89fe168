//! `driver`: the driver interface alone, as programs with a static runtime or none use it.

use std::ffi::{CStr, c_char, c_int, c_uint};

use anyhow::{bail, ensure};

use super::library::{Library, functions};

const MIB: usize = 1 << 20;

const TENSOR_BYTES: usize = 10 * MIB;
const KEPT_BYTES: usize = 6 * MIB;
const PINNED_BYTES: usize = 2 * MIB;
const REGISTERED_BYTES: usize = MIB;

functions! {
    Functions {
        init: c"cuInit", fn(c_uint) -> c_int;
        device_get: c"cuDeviceGet", fn(*mut c_int, c_int) -> c_int;
        ctx_create: c"cuCtxCreate_v2", fn(*mut usize, c_uint, c_int) -> c_int;
        ctx_destroy: c"cuCtxDestroy_v2", fn(usize) -> c_int;
        mem_get_info: c"cuMemGetInfo_v2", fn(*mut usize, *mut usize) -> c_int;
        mem_alloc: c"cuMemAlloc_v2", fn(*mut usize, usize) -> c_int;
        mem_free: c"cuMemFree_v2", fn(usize) -> c_int;
        mem_host_alloc: c"cuMemHostAlloc", fn(*mut usize, usize, c_uint) -> c_int;
        mem_free_host: c"cuMemFreeHost", fn(usize) -> c_int;
        mem_host_register: c"cuMemHostRegister_v2", fn(usize, usize, c_uint) -> c_int;
        mem_host_unregister: c"cuMemHostUnregister", fn(usize) -> c_int;
        get_error_name: c"cuGetErrorName", fn(c_int, *mut *const c_char) -> c_int;
    }
}

/// The driver with a context of device 0 current.
struct Driver {
    functions: Functions,
}

/// Two contexts on device 0: the first is destroyed with memory in it, which frees that memory; the
/// second one's memory lives until the process ends.
pub fn run() -> anyhow::Result<()> {
    let library = Library::load(&[c"libcuda.so.1"])?;
    let driver = Driver {
        functions: Functions::resolve(&library)?,
    };
    driver.initialise()?;
    let first = driver.create_context()?;
    driver.allocate_and_free()?;
    driver.keep_tensor()?;
    driver.destroy_context(first)?;

    driver.create_context()?;
    driver.keep_tensor()?;
    driver.stage_in_pinned_memory()?;
    driver.stage_in_registered_memory()?;
    driver.ask_for_more_than_the_card()
}

impl Driver {
    fn check(&self, call: &str, code: c_int) -> anyhow::Result<()> {
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

    fn initialise(&self) -> anyhow::Result<()> {
        // SAFETY: a plain number.
        self.check("cuInit", unsafe { (self.functions.init)(0) })
    }

    fn create_context(&self) -> anyhow::Result<usize> {
        let (mut device, mut context) = (0, 0);
        // SAFETY: one output and a plain number.
        let code = unsafe { (self.functions.device_get)(&mut device, 0) };
        self.check("cuDeviceGet", code)?;
        // SAFETY: one output and plain numbers.
        let code = unsafe { (self.functions.ctx_create)(&mut context, 0, device) };
        self.check("cuCtxCreate", code)?;
        Ok(context)
    }

    fn destroy_context(&self, context: usize) -> anyhow::Result<()> {
        // SAFETY: a context of this program.
        let code = unsafe { (self.functions.ctx_destroy)(context) };
        self.check("cuCtxDestroy", code)
    }

    #[inline(never)]
    fn allocate(&self, bytes: usize) -> anyhow::Result<usize> {
        let mut address = 0;
        // SAFETY: one output and a plain number.
        let code = unsafe { (self.functions.mem_alloc)(&mut address, bytes) };
        self.check("cuMemAlloc", code)?;
        Ok(address)
    }

    #[inline(never)]
    fn allocate_and_free(&self) -> anyhow::Result<()> {
        let tensor = self.allocate(TENSOR_BYTES)?;
        // SAFETY: a block just allocated.
        self.check("cuMemFree", unsafe { (self.functions.mem_free)(tensor) })
    }

    #[inline(never)]
    fn keep_tensor(&self) -> anyhow::Result<()> {
        self.allocate(KEPT_BYTES)?;
        Ok(())
    }

    #[inline(never)]
    fn stage_in_pinned_memory(&self) -> anyhow::Result<()> {
        let mut address = 0;
        // SAFETY: one output and plain numbers.
        let code = unsafe { (self.functions.mem_host_alloc)(&mut address, PINNED_BYTES, 0) };
        self.check("cuMemHostAlloc", code)?;
        // SAFETY: a block just allocated.
        let code = unsafe { (self.functions.mem_free_host)(address) };
        self.check("cuMemFreeHost", code)
    }

    #[inline(never)]
    fn stage_in_registered_memory(&self) -> anyhow::Result<()> {
        let mut memory = vec![0u8; REGISTERED_BYTES];
        let address = memory.as_mut_ptr() as usize;
        // SAFETY: the range is the vector's own.
        let code = unsafe { (self.functions.mem_host_register)(address, memory.len(), 0) };
        self.check("cuMemHostRegister", code)?;
        // SAFETY: a range just registered.
        let code = unsafe { (self.functions.mem_host_unregister)(address) };
        self.check("cuMemHostUnregister", code)
    }

    #[inline(never)]
    fn ask_for_more_than_the_card(&self) -> anyhow::Result<()> {
        let (mut free, mut total, mut address) = (0, 0, 0);
        // SAFETY: two outputs.
        let code = unsafe { (self.functions.mem_get_info)(&mut free, &mut total) };
        self.check("cuMemGetInfo", code)?;
        // SAFETY: one output and a plain number.
        let code = unsafe { (self.functions.mem_alloc)(&mut address, total + MIB) };
        ensure!(code != 0, "an allocation larger than the card succeeded");
        Ok(())
    }
}
