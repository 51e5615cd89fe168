//! A generator of events for the agent: driver calls at a pace, from many distinct stacks.

use std::ffi::{CStr, c_int, c_void};
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};

#[derive(Debug, Args)]
pub struct Churn {
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Events (calls) a second.
    #[arg(long, default_value_t = 10_000)]
    rate: u64,
    #[arg(long, default_value_t = 200)]
    stacks: u32,
    /// Keep this many blocks instead, and wait.
    #[arg(long)]
    live: Option<u64>,
}

struct Driver {
    alloc: unsafe extern "C" fn(*mut usize, usize) -> c_int,
    free: unsafe extern "C" fn(usize) -> c_int,
}

fn function(handle: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: open handle, C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if address.is_null() {
        bail!("no {}", name.to_string_lossy());
    }
    Ok(address)
}

pub fn run(options: &Churn) -> Result<Value> {
    // SAFETY: dlopen.
    let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        bail!("no libcuda.so.1");
    }
    // SAFETY: documented signatures.
    let driver = unsafe {
        let init: unsafe extern "C" fn(u32) -> c_int =
            std::mem::transmute(function(handle, c"cuInit")?);
        let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
            std::mem::transmute(function(handle, c"cuDevicePrimaryCtxRetain")?);
        let set: unsafe extern "C" fn(usize) -> c_int =
            std::mem::transmute(function(handle, c"cuCtxSetCurrent")?);
        let mut context = 0;
        if init(0) != 0 || retain(&raw mut context, 0) != 0 || set(context) != 0 {
            bail!("no context");
        }
        Driver {
            alloc: std::mem::transmute(function(handle, c"cuMemAlloc_v2")?),
            free: std::mem::transmute(function(handle, c"cuMemFree_v2")?),
        }
    };
    if let Some(count) = options.live {
        for i in 0..count {
            let mut address = 0;
            if (i as u32) % 2 == 0 {
                one(&driver, 7, (i % 200) as u32, &mut |d| {
                    alloc(d, 512, &mut address)
                })?;
            } else {
                two(&driver, 7, (i % 200) as u32, &mut |d| {
                    alloc(d, 512, &mut address)
                })?;
            }
        }
        println!("live");
        std::thread::sleep(Duration::from_secs(options.seconds));
        return Ok(json!({}));
    }
    let started = Instant::now();
    let limit = Duration::from_secs(options.seconds);
    let mut done = 0u64;
    let mut stack = 0;
    let pair_ns = 2_000_000_000.0 / options.rate as f64;
    while started.elapsed() < limit {
        let due = (started.elapsed().as_nanos() as f64 / pair_ns) as u64;
        while done < due {
            stack = (stack + 1) % options.stacks;
            let mut address = 0;
            let bytes = 256 + (done as usize % 64) * 512;
            one(&driver, 7, stack, &mut |d| alloc(d, bytes, &mut address))?;
            two(&driver, 7, stack, &mut |d| free(d, address))?;
            done += 1;
            if done % 64 == 0 && started.elapsed() > limit {
                break;
            }
        }
        if options.rate < 100_000 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let took = started.elapsed().as_secs_f64();
    Ok(json!({"events": done * 2, "seconds": took, "rate": done as f64 * 2.0 / took}))
}

fn alloc(driver: &Driver, bytes: usize, address: &mut usize) -> Result<()> {
    // SAFETY: documented.
    if unsafe { (driver.alloc)(address, bytes) } != 0 {
        bail!("alloc failed");
    }
    Ok(())
}
fn free(driver: &Driver, address: usize) -> Result<()> {
    // SAFETY: documented.
    if unsafe { (driver.free)(address) } != 0 {
        bail!("free failed");
    }
    Ok(())
}
type Act<'a> = &'a mut dyn FnMut(&Driver) -> Result<()>;
#[inline(never)]
fn one(driver: &Driver, level: u32, bits: u32, act: Act) -> Result<()> {
    black_box(step(driver, level, bits, act))
}
#[inline(never)]
fn two(driver: &Driver, level: u32, bits: u32, act: Act) -> Result<()> {
    black_box(black_box(step(driver, level, bits, act)))
}
#[inline(never)]
fn step(driver: &Driver, level: u32, bits: u32, act: Act) -> Result<()> {
    if black_box(level) == 0 {
        return black_box(act(driver));
    }
    let r = if bits & 1 == 0 {
        one(driver, level - 1, bits >> 1, act)
    } else {
        two(driver, level - 1, bits >> 1, act)
    };
    black_box(r)
}
