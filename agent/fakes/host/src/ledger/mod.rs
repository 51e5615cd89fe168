//! The ledger: what a process really allocated, written by the stand-in that allocated it.
//!
//! Per (device, kind) a [`Totals`], kept by these rules:
//! - a block counts for the device of the context that was current at its allocation, host kinds too;
//!   a pool's slice for its pool's device; memory made by `cuMemCreate`, and what maps it, for the
//!   device that its properties name;
//! - what names no device counts for none (`without_device`): reserved addresses, and mappings of
//!   imported memory;
//! - its free counts for that same device, whatever is current then;
//! - a failed allocation counts for the device it would have counted for, as far as the call names
//!   one, else for none; a failed free for the block's device if the block is known, else for the
//!   current one; both under the kind of the function called;
//! - a call refused for want of a current context belongs to no device;
//! - frees that a context's end or the last unmapping brings about count as frees;
//! - bytes are the requested ones, never rounded, except that pitched memory has the bytes of its
//!   padded rows and an array those of its descriptor ([`arrays`](crate::arrays));
//! - what belongs to another process (opened or imported) is in that process's books, not here.
//!
//! Beside the totals, per device, what pools hold reserved of the card ([`DeviceLedger`]).
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
    /// Memory that moves between host and card by itself.
    Managed,
    /// An array or mipmapped array; its address is its handle.
    Array,
    /// Memory of the card without an address (`cuMemCreate`); its address is its handle.
    VmmPhysical,
    /// Reserved addresses without memory.
    VmmVirtual,
    /// Addresses that memory is mapped to.
    VmmMapped,
    /// A slice of a pool's memory.
    Pool,
}

impl Kind {
    /// Every kind, in the ledger's order.
    pub const ALL: [Kind; 9] = [
        Kind::Device,
        Kind::PinnedHost,
        Kind::RegisteredHost,
        Kind::Managed,
        Kind::Array,
        Kind::VmmPhysical,
        Kind::VmmVirtual,
        Kind::VmmMapped,
        Kind::Pool,
    ];

    /// Kinds that take a card's memory by themselves. A pool's slices lie in what the pool reserved.
    pub const PHYSICAL: [Kind; 4] = [Kind::Device, Kind::Managed, Kind::Array, Kind::VmmPhysical];

    /// The kind's name in a ledger.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Device => "device",
            Kind::PinnedHost => "pinned_host",
            Kind::RegisteredHost => "registered_host",
            Kind::Managed => "managed",
            Kind::Array => "array",
            Kind::VmmPhysical => "vmm_physical",
            Kind::VmmVirtual => "vmm_virtual",
            Kind::VmmMapped => "vmm_mapped",
            Kind::Pool => "pool",
        }
    }

    /// Whether it takes a card's memory by itself.
    pub fn is_physical(self) -> bool {
        Kind::PHYSICAL.contains(&self)
    }

    /// Whether the end of its context frees it. Pools and mappings belong to the process.
    pub fn ends_with_context(self) -> bool {
        match self {
            Kind::Device
            | Kind::PinnedHost
            | Kind::RegisteredHost
            | Kind::Managed
            | Kind::Array => true,
            Kind::VmmPhysical | Kind::VmmVirtual | Kind::VmmMapped | Kind::Pool => false,
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
    /// Bytes of the card that pools hold, in use or not. The runtime's ledger knows of none.
    pub pool_reserved_bytes: u64,
    /// The highest `pool_reserved_bytes` so far.
    pub pool_reserved_peak_bytes: u64,
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
    /// What belongs to no device, by the kind's name: failures of calls made without a current
    /// context, reserved addresses, mappings of imported memory.
    pub without_device: BTreeMap<String, Totals>,
}

impl ProcessLedger {
    /// Totals of one kind on one device; all zero where the device is unknown.
    pub fn totals(&self, device: u32, kind: Kind) -> Totals {
        self.device(device)
            .and_then(|entry| entry.kinds.get(kind.name()))
            .copied()
            .unwrap_or_default()
    }

    /// One device's part.
    pub fn device(&self, device: u32) -> Option<&DeviceLedger> {
        self.devices.iter().find(|entry| entry.device == device)
    }

    /// Bytes of a device's memory that the process holds: the kinds that are memory of the card, and
    /// what pools hold reserved.
    pub fn physical_bytes(&self, device: u32) -> u64 {
        let kinds = Kind::PHYSICAL.map(|kind| self.totals(device, kind).live_bytes);
        let reserved = self.device(device).map_or(0, |d| d.pool_reserved_bytes);
        kinds.iter().sum::<u64>() + reserved
    }
}
