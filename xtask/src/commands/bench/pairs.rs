//! Calls cudaMalloc and cudaFree in this process and measures them from inside, so that starting
//! a process is not part of the figure. Runs as a child of `bench probes`, under the library path
//! of the stand-ins.

use std::ffi::{CStr, CString, c_int, c_void};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::median;

/// Size of the block; the stand-ins' cost does not depend on it.
const BYTES: usize = 4096;

/// Calls before the clock starts: first use of the context, page faults.
const WARM_UP: u64 = 200;

type Malloc = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Prints the nanoseconds of one pair: the median of `PAIRS`, since on a busy machine the mean is
/// that of the interruptions.
pub fn print(arguments: &[String]) -> Result<()> {
    let [library, pairs] = arguments else {
        bail!("expected a library and a count");
    };
    let pairs: u64 = pairs.parse().context("the count is no number")?;
    let name = CString::new(library.as_str()).context("the library's path has a zero byte")?;
    // SAFETY: loading runs the library's initialisers, which is what we are for.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        bail!("failed to load {library}");
    }
    // SAFETY: the CUDA runtime documents these signatures for these names.
    let (malloc, free) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Malloc>(function(handle, c"cudaMalloc")?),
            std::mem::transmute::<*mut c_void, Free>(function(handle, c"cudaFree")?),
        )
    };
    for _ in 0..WARM_UP {
        pair(malloc, free)?;
    }
    let mut times = Vec::new();
    for _ in 0..pairs {
        let started = Instant::now();
        pair(malloc, free)?;
        times.push(started.elapsed().as_nanos() as f64);
    }
    println!("{}", median(&mut times));
    Ok(())
}

#[inline(never)]
fn pair(malloc: Malloc, free: Free) -> Result<()> {
    let mut address = std::ptr::null_mut();
    // SAFETY: one output and a size, as documented; the block is freed once.
    let (allocated, freed) = unsafe { (malloc(&mut address, BYTES), free(address)) };
    if allocated != 0 || freed != 0 {
        bail!("cudaMalloc gave {allocated}, cudaFree {freed}");
    }
    Ok(())
}

fn function(handle: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: an open handle and a string with its zero byte.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if address.is_null() {
        bail!("the library has no {}", name.to_string_lossy());
    }
    Ok(address)
}
