//! The ledger: what a process really allocated, written by the stand-in that allocated it.
//!
//! Per (device, kind) a [`Totals`], kept by these rules:
//! - a block counts for the device of the context that was current at its allocation, host kinds too;
//! - its free counts for that same device, whatever is current then;
//! - a failed allocation counts for the current device; a failed free for the block's device if the
//!   block is known, else for the current device; both under the kind of the function called;
//! - a call refused for want of a current context belongs to no device and is counted apart
//!   (`without_device`);
//! - frees that a context's end brings about count as frees;
//! - bytes are the requested ones, never rounded.
//!
//! With the environment variable `VRAMSCOPE_FAKE_DIR` the books lie in a shared memory mapping of a
//! file there (see [`file`](self) for its format), so they outlive a process that is killed. Without
//! it they stay in memory.

mod accounts;
mod books;
mod file;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use accounts::{Accounts, Block};
pub use file::{LedgerError, read_ledgers};

/// The environment variable that names the folder of the ledgers.
pub const FOLDER_VARIABLE: &str = "VRAMSCOPE_FAKE_DIR";

/// The environment variable that plants a fault: at `1` the driver's ledger counts its first
/// successful allocation twice, so that a comparison with it must fail.
pub const MISCOUNT_VARIABLE: &str = "VRAMSCOPE_FAKE_MISCOUNT";

/// What kind of memory a call is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Memory of the card.
    Device,
    /// Host memory that the driver allocated and pinned.
    PinnedHost,
    /// Host memory of the program, pinned for a while.
    RegisteredHost,
}

impl Kind {
    /// Every kind, in the ledger's order.
    pub const ALL: [Kind; 3] = [Kind::Device, Kind::PinnedHost, Kind::RegisteredHost];

    /// The kind's name in a ledger.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Device => "device",
            Kind::PinnedHost => "pinned_host",
            Kind::RegisteredHost => "registered_host",
        }
    }
}

/// Which library wrote a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layer {
    /// `libcuda.so.1`: the truth about memory.
    Driver,
    /// `libcudart.so.13`: the calls a program made of the runtime.
    Runtime,
}

impl Layer {
    /// The layer's name in a ledger and in its file's name.
    pub fn name(self) -> &'static str {
        match self {
            Layer::Driver => "driver",
            Layer::Runtime => "runtime",
        }
    }
}

/// Sums over a process's life for one kind of memory on one device.
/// Always `live_count = allocations - frees` and `live_bytes = allocated_bytes - freed_bytes`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Allocations that succeeded.
    pub allocations: u64,
    /// Allocations that failed.
    pub failed_allocations: u64,
    /// Frees that succeeded, those brought about by a context's end included.
    pub frees: u64,
    /// Frees that failed and freed nothing.
    pub failed_frees: u64,
    /// Blocks alive.
    pub live_count: u64,
    /// Bytes of the blocks alive.
    pub live_bytes: u64,
    /// The highest `live_bytes` so far.
    pub peak_bytes: u64,
    /// Bytes of all allocations that succeeded.
    pub allocated_bytes: u64,
    /// Bytes of all frees that succeeded.
    pub freed_bytes: u64,
}

/// One device's totals by kind (every name of [`Kind::ALL`] is present).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLedger {
    /// The device's index.
    pub device: u32,
    /// Totals by the kind's name.
    pub kinds: BTreeMap<String, Totals>,
}

/// One layer's ledger of one process lifetime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessLedger {
    /// Process number.
    pub pid: u32,
    /// Start time in clock ticks since boot; with `pid` it names the process lifetime.
    pub start_ticks: u64,
    /// The library that wrote the ledger.
    pub layer: Layer,
    /// Every device, in order, used or not.
    pub devices: Vec<DeviceLedger>,
    /// Failures of calls made without a current context, by the kind's name.
    pub without_device: BTreeMap<String, Totals>,
}

impl ProcessLedger {
    /// Totals of one kind on one device; all zero where the device is unknown.
    pub fn totals(&self, device: u32, kind: Kind) -> Totals {
        self.devices
            .iter()
            .find(|entry| entry.device == device)
            .and_then(|entry| entry.kinds.get(kind.name()))
            .copied()
            .unwrap_or_default()
    }
}
