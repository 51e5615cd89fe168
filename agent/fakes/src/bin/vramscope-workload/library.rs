//! Shared libraries loaded at run time, never unloaded.

use std::ffi::{CStr, c_void};

use anyhow::{Context, bail};

/// None of a library's names could be loaded.
#[derive(Debug, thiserror::Error)]
#[error(
    "no CUDA library found: {tried}; install one, or set LD_LIBRARY_PATH to the folder of the stand-ins"
)]
pub struct LibraryMissing {
    tried: String,
}

/// A loaded library.
pub struct Library {
    handle: *mut c_void,
}

impl Library {
    /// Loads the first of some names that the dynamic linker finds.
    pub fn load(names: &[&CStr]) -> Result<Self, LibraryMissing> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: loading runs the library's initialisers, which is what the program is for.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            if !handle.is_null() {
                return Ok(Self { handle });
            }
            // SAFETY: after a failed dlopen, dlerror gives null or a string valid until the next call.
            let reason = unsafe {
                let text = libc::dlerror();
                if text.is_null() {
                    name.to_string_lossy().into_owned()
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            };
            tried.push(reason);
        }
        Err(LibraryMissing {
            tried: tried.join("; "),
        })
    }

    /// The address of a function.
    pub fn function(&self, name: &CStr) -> anyhow::Result<*mut c_void> {
        // SAFETY: an open handle and a string with its zero byte.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        let shown = name.to_str().context("a function's name is no text")?;
        if address.is_null() {
            bail!("the CUDA library lacks {shown}");
        }
        Ok(address)
    }
}

/// Declares a struct of a library's functions and how to resolve them.
macro_rules! functions {
    ($name:ident { $($field:ident: $symbol:literal, fn($($argument:ty),*) -> $result:ty;)* }) => {
        struct $name {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $name {
            fn resolve(library: &crate::library::Library) -> anyhow::Result<Self> {
                Ok(Self {
                    $($field: {
                        let address = library.function($symbol)?;
                        // SAFETY: the interface documents this signature for this name.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($argument),*) -> $result,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}
pub(crate) use functions;
