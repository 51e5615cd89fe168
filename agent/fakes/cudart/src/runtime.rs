//! The runtime's state and what its calls do with it.
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
    ffi::{c_int, c_uint, c_void},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use vramscope_fakes::{
    ledger::{Accounts, Block, Kind, Layer},
    per_process::PerProcess,
};

use crate::{Out, codes::*, driver::Driver};

static RUNTIME: PerProcess<Runtime> = PerProcess::new();

thread_local! {
    /// A new thread's device is 0.
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

struct Runtime {
    /// The outcome of loading it, kept: a process without a driver does not get one later.
    driver: OnceLock<CudaResult<Driver>>,
    state: Mutex<State>,
}

struct State {
    /// Primary contexts that this runtime retains, by device.
    primaries: HashMap<c_int, usize>,
    accounts: Accounts,
}

fn runtime() -> &'static Runtime {
    RUNTIME.get(|| Runtime {
        driver: OnceLock::new(),
        state: Mutex::new(State {
            primaries: HashMap::new(),
            accounts: Accounts::new(Layer::Runtime),
        }),
    })
}

impl Runtime {
    fn driver(&self) -> CudaResult<&Driver> {
        let loaded = self.driver.get_or_init(|| {
            self.state().accounts.open();
            Driver::load()
        });
        loaded.as_ref().map_err(|code| *code)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver, with the primary context of the thread's device current.
    fn with_context(&self) -> CudaResult<&Driver> {
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
    for address in state.accounts.of_device(device as u32) {
        state.accounts.freed(address);
    }
    Ok(())
}

pub fn allocate(
    kind: Kind,
    address: Out<*mut c_void>,
    bytes: usize,
    flags: c_uint,
) -> CudaResult<()> {
    let runtime = runtime();
    let Some(out) = address else {
        return runtime.allocation_failed(kind, INVALID_VALUE);
    };
    let driver = match runtime.with_context() {
        Ok(driver) => driver,
        Err(code) => return runtime.allocation_failed(kind, code),
    };
    if bytes == 0 {
        // The vendor's succeeds with a null pointer: nothing is allocated, so nothing counts.
        out.write(std::ptr::null_mut());
        return Ok(());
    }
    let allocated = match kind {
        Kind::Device => driver.allocate(bytes),
        Kind::PinnedHost | Kind::RegisteredHost => driver.allocate_host(bytes, flags),
    };
    match allocated {
        Ok(place) => {
            out.write(place as *mut c_void);
            runtime.allocated(kind, place, bytes);
            Ok(())
        }
        Err(code) => runtime.allocation_failed(kind, code),
    }
}

pub fn register(address: *mut c_void, bytes: usize, flags: c_uint) -> CudaResult<()> {
    let runtime = runtime();
    let registered = runtime
        .with_context()
        .and_then(|driver| driver.register_host(address as usize, bytes, flags));
    match registered {
        Ok(()) => {
            runtime.allocated(Kind::RegisteredHost, address as usize, bytes);
            Ok(())
        }
        Err(code) => runtime.allocation_failed(Kind::RegisteredHost, code),
    }
}

/// Frees, or unregisters. A null pointer is fine, except to unregister.
pub fn free(kind: Kind, address: *mut c_void) -> CudaResult<()> {
    let runtime = runtime();
    let address = address as usize;
    let driver = match runtime.with_context() {
        Ok(driver) => driver,
        Err(code) => return runtime.free_failed(kind, address, code),
    };
    if address == 0 && kind != Kind::RegisteredHost {
        return Ok(());
    }
    let entered = {
        let mut state = runtime.state();
        let known = state.accounts.block(address);
        known
            .filter(|block| block.kind == kind)
            .and_then(|_| state.accounts.freed(address))
    };
    let freed = match kind {
        Kind::Device => driver.free(address),
        Kind::PinnedHost => driver.free_host(address),
        Kind::RegisteredHost => driver.unregister_host(address),
    };
    match (freed, entered) {
        // A block of the driver's that this runtime did not allocate is not in its books.
        (Ok(()), _) => Ok(()),
        (Err(code), Some(block)) => {
            runtime.state().accounts.free_undone(address, block);
            Err(code)
        }
        (Err(code), None) => runtime.free_failed(kind, address, code),
    }
}

impl Runtime {
    fn allocated(&self, kind: Kind, address: usize, bytes: usize) {
        let block = Block {
            kind,
            // set_device has checked it.
            device: device() as u32,
            bytes: bytes as u64,
            context: 0,
        };
        self.state().accounts.allocated(address, block);
    }

    fn allocation_failed(&self, kind: Kind, code: c_int) -> CudaResult<()> {
        let device = Some(device() as u32);
        self.state().accounts.allocation_failed(kind, device);
        Err(code)
    }

    fn free_failed(&self, kind: Kind, address: usize, code: c_int) -> CudaResult<()> {
        let device = Some(device() as u32);
        self.state().accounts.free_failed(kind, address, device);
        Err(code)
    }
}
