//! Shared libraries loaded at run time, never unloaded, and the runtime where it is linked into the
//! program instead.

use std::{
    ffi::{CStr, c_void},
    sync::OnceLock,
};

use anyhow::{Context, bail};

/// None of a library's names could be loaded.
#[derive(Debug, thiserror::Error)]
#[error(
    "no CUDA library found: {tried}; install one, or set LD_LIBRARY_PATH to the folder of the stand-ins"
)]
pub struct LibraryMissing {
    tried: String,
}

/// Finds a function of the linked runtime by its name.
type Linked = fn(&CStr) -> Option<*mut c_void>;

/// The runtime that the program was linked with, if it was.
static LINKED_RUNTIME: OnceLock<Linked> = OnceLock::new();

/// Makes the runtime one that is part of the program, where it would have been loaded.
#[allow(
    dead_code,
    reason = "the program with the runtime linked in is another one"
)]
pub fn use_linked_runtime(find: Linked) {
    // A second call has nothing to add.
    let _ = LINKED_RUNTIME.set(find);
}

/// A library whose functions can be had.
pub enum Library {
    Loaded(*mut c_void),
    Linked(Linked),
}

impl Library {
    /// The runtime: the one linked into the program, else as [`Library::load`].
    pub fn runtime(names: &[&CStr]) -> Result<Self, LibraryMissing> {
        match LINKED_RUNTIME.get() {
            Some(find) => Ok(Self::Linked(*find)),
            None => Self::load(names),
        }
    }

    /// Loads the first of some names that the dynamic linker finds.
    pub fn load(names: &[&CStr]) -> Result<Self, LibraryMissing> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: loading runs the library's initialisers, which is what the program is for.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            if !handle.is_null() {
                return Ok(Self::Loaded(handle));
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
        let address = match self {
            // SAFETY: an open handle and a string with its zero byte.
            Self::Loaded(handle) => unsafe { libc::dlsym(*handle, name.as_ptr()) },
            Self::Linked(find) => find(name).unwrap_or(std::ptr::null_mut()),
        };
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
        pub(super) struct $name {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $name {
            fn resolve(library: &super::library::Library) -> anyhow::Result<Self> {
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

/// Runs a call that writes one output: its value, or the call's code. A macro and not a function, so
/// that it does not show in the stacks that are looked at.
macro_rules! output {
    (|$output:ident $(: $type:ty)?| $call:expr) => {{
        let mut value = std::mem::MaybeUninit::uninit();
        let $output $(: $type)? = value.as_mut_ptr();
        match $call {
            // SAFETY: a call that succeeded has written its output.
            0 => Ok(unsafe { value.assume_init() }),
            code => Err(code),
        }
    }};
}
pub(crate) use output;
