//! The callee, loaded at run time: a program that linked it would map it under one path only.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::Path;

use anyhow::{Context, Result, bail};

/// A loaded copy of the callee; never unloaded.
pub struct Library {
    handle: *mut c_void,
    path: String,
}

impl Library {
    pub fn load(path: &Path) -> Result<Self> {
        let shown = path.display().to_string();
        let name = CString::new(path.as_os_str().as_encoded_bytes())
            .with_context(|| format!("{shown} has a zero byte"))?;
        // SAFETY: loading runs the library's initialisers, of which the callee has none.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            bail!("failed to load {shown}");
        }
        Ok(Self {
            handle,
            path: shown,
        })
    }

    pub fn address(&self, symbol: &CStr) -> Result<*mut c_void> {
        // SAFETY: an open handle and a string with its zero byte.
        let address = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        if address.is_null() {
            bail!("{} has no {}", self.path, symbol.to_string_lossy());
        }
        Ok(address)
    }
}

pub type Alloc = unsafe extern "C" fn(*mut usize, usize) -> c_int;
pub type Free = unsafe extern "C" fn(usize) -> c_int;

/// The callee's functions.
pub struct Driver {
    alloc: Alloc,
    free: Free,
}

impl Driver {
    /// Also makes a context current, so that the agent knows the device of what follows.
    pub fn start(library: &Library) -> Result<Self> {
        // SAFETY: the callee's signatures, which are the vendor's.
        let (retain, set_current, alloc, free) = unsafe {
            (
                std::mem::transmute::<*mut c_void, Alloc>(
                    library.address(c"cuDevicePrimaryCtxRetain")?,
                ),
                std::mem::transmute::<*mut c_void, Free>(library.address(c"cuCtxSetCurrent")?),
                std::mem::transmute::<*mut c_void, Alloc>(library.address(c"cuMemAlloc_v2")?),
                std::mem::transmute::<*mut c_void, Free>(library.address(c"cuMemFree_v2")?),
            )
        };
        let mut context = 0;
        // SAFETY: an output and device 0; then the context just given.
        let failed = unsafe { retain(&raw mut context, 0) | set_current(context) };
        if failed != 0 {
            bail!("the callee gave no context");
        }
        Ok(Self { alloc, free })
    }

    /// Gives the address.
    pub fn alloc(&self, bytes: usize) -> Result<usize> {
        let mut address = 0;
        // SAFETY: one output and a size.
        if unsafe { (self.alloc)(&raw mut address, bytes) } != 0 {
            bail!("cuMemAlloc_v2 failed");
        }
        Ok(address)
    }

    pub fn free(&self, address: usize) -> Result<()> {
        // SAFETY: an address that `alloc` gave.
        if unsafe { (self.free)(address) } != 0 {
            bail!("cuMemFree_v2 failed");
        }
        Ok(())
    }
}
