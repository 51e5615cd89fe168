//! The runtime's state, devices and contexts.
//!
//! Invariants:
//! - memory comes from the driver only; a call makes sure first that the primary context of the
//!   thread's device is retained (once a process and device) and current;
//! - the runtime's own books are those of its callers' calls: an allocation is entered after the
//!   driver's return, a free before the driver's entry and taken back if it fails. The lock is not
//!   held across the driver's call, so that calls of several threads overlap as the vendor's do.
//!   With several threads the runtime's peak can therefore lie a little under the driver's;
//! - a process forked from this one starts anew, with empty books.

use std::{
    cell::Cell,
    collections::HashMap,
    ffi::c_int,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use vramscope_fake_host::{
    ledger::{Accounts, Block, Kind, Layer},
    per_process::PerProcess,
};

use crate::{codes::*, driver::Driver};

static RUNTIME: PerProcess<Runtime> = PerProcess::new();

thread_local! {
    /// A new thread's device is 0.
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

pub struct Runtime {
    /// The outcome of loading it, kept: a process without a driver does not get one later.
    driver: OnceLock<CudaResult<Driver>>,
    state: Mutex<State>,
}

pub struct State {
    /// Primary contexts that this runtime retains, by device.
    primaries: HashMap<c_int, usize>,
    pub accounts: Accounts,
}

pub fn runtime() -> &'static Runtime {
    RUNTIME.get(|| Runtime {
        driver: OnceLock::new(),
        state: Mutex::new(State {
            primaries: HashMap::new(),
            accounts: Accounts::new(Layer::Runtime),
        }),
    })
}

impl Runtime {
    pub fn driver(&self) -> CudaResult<&Driver> {
        let loaded = self.driver.get_or_init(|| {
            self.state().accounts.open();
            Driver::load()
        });
        loaded.as_ref().map_err(|code| *code)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver, with the primary context of the thread's device current.
    pub fn with_context(&self) -> CudaResult<&Driver> {
        let driver = self.driver()?;
        let device = device();
        let primary = {
            let mut state = self.state();
            match state.primaries.get(&device) {
                Some(context) => *context,
                None => {
                    let context = driver.primary_retain(device)?;
                    state.primaries.insert(device, context);
                    context
                }
            }
        };
        if driver.current_context()? != primary {
            driver.set_current_context(primary)?;
        }
        Ok(driver)
    }
}

/// The calling thread's device.
pub fn device() -> c_int {
    DEVICE.try_with(Cell::get).unwrap_or(0)
}

pub fn device_count() -> CudaResult<c_int> {
    runtime().driver()?.device_count()
}

/// Makes a device the thread's, and its primary context current, as the vendor's does since 12.0.
pub fn set_device(device: c_int) -> CudaResult<()> {
    if !(0..device_count()?).contains(&device) {
        return Err(INVALID_DEVICE);
    }
    // A thread that is ending keeps device 0.
    let _ = DEVICE.try_with(|current| current.set(device));
    ensure_context()
}

pub fn ensure_context() -> CudaResult<()> {
    runtime().with_context().map(|_| ())
}

/// There is never work in flight, but the driver's pools give back at a synchronisation what they may.
pub fn synchronize_device() -> CudaResult<()> {
    let driver = runtime().with_context()?;
    driver.synchronize_context(driver.current_context()?)
}

/// The driver, for calls that the runtime only passes on. The vendor's passes them on too.
pub fn with_driver<T>(call: impl FnOnce(&Driver) -> CudaResult<T>) -> CudaResult<T> {
    call(runtime().with_context()?)
}

pub fn memory_info() -> CudaResult<(usize, usize)> {
    runtime().with_context()?.memory_info()
}

/// The driver's version; documented to be 0, with success, where there is no driver.
pub fn driver_version() -> CudaResult<c_int> {
    match runtime().driver() {
        Ok(driver) => driver.version(),
        Err(INSUFFICIENT_DRIVER) => Ok(0),
        Err(code) => Err(code),
    }
}

/// Frees everything on the thread's device and drops its primary context.
pub fn reset_device() -> CudaResult<()> {
    let runtime = runtime();
    let driver = runtime.driver()?;
    let device = device();
    let mut state = runtime.state();
    driver.primary_reset(device)?;
    state.primaries.remove(&device);
    for (address, block) in state.accounts.of_device(device as u32) {
        state.accounts.freed(block.kind, address);
    }
    Ok(())
}

impl Runtime {
    pub fn allocated(&self, kind: Kind, address: usize, bytes: u64) {
        let block = Block {
            kind,
            // set_device has checked it.
            device: Some(device() as u32),
            bytes,
            context: 0,
        };
        self.state().accounts.allocated(address, block);
    }

    pub fn allocation_failed(&self, kind: Kind, code: c_int) -> CudaResult<()> {
        let device = Some(device() as u32);
        self.state().accounts.allocation_failed(kind, device);
        Err(code)
    }

    pub fn free_failed(&self, kind: Kind, address: usize, code: c_int) -> CudaResult<()> {
        let device = Some(device() as u32);
        self.state().accounts.free_failed(kind, address, device);
        Err(code)
    }
}
