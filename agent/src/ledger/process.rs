//! One process lifetime and what lives in it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Allocation, Key};
use crate::host::identity::{Host, StartTime};
use crate::host::{clock, procfs};

/// A process that allocated, or that maps a hooked library.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub start: StartTime,
    pub process_id: i64,
    pub exe: Option<String>,
    pub command: Option<String>,
    /// `CUDA_VISIBLE_DEVICES` it was started with.
    pub visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER` it was started with.
    pub device_order: Option<String>,
    /// Device of each context it made.
    pub contexts: HashMap<u64, i32>,
    pub live: HashMap<Key, Allocation>,
    /// Number and time of its leader's exit.
    pub exiting: Option<(u64, u64)>,
    pub last_seq: u64,
}

impl Process {
    /// Asks `/proc` who this is. A process that is gone already keeps what its events tell.
    pub fn discover(host: &Host, pid: u32, at_monotonic_ns: u64) -> Self {
        let start = StartTime::of(pid).unwrap_or_else(|| {
            let boot_offset = clock::boottime_ns().saturating_sub(clock::monotonic_ns());
            StartTime::from_boottime_ns(at_monotonic_ns + boot_offset)
        });
        let mut process = Self {
            pid,
            start,
            process_id: host.process_id(pid, start),
            exe: None,
            command: None,
            visible_devices: None,
            device_order: None,
            contexts: HashMap::new(),
            live: HashMap::new(),
            exiting: None,
            last_seq: 0,
        };
        process.read_program();
        process
    }

    fn read_program(&mut self) {
        self.exe = procfs::exe(self.pid);
        self.command = procfs::command(self.pid);
        self.visible_devices = procfs::environment_variable(self.pid, "CUDA_VISIBLE_DEVICES");
        self.device_order = procfs::environment_variable(self.pid, "CUDA_DEVICE_ORDER");
    }

    /// After an exec nothing of the old program is left.
    pub fn forget_program(&mut self) {
        self.contexts.clear();
        self.live.clear();
        self.read_program();
    }

    /// True once no thread of it lives.
    pub fn is_gone(&self) -> bool {
        procfs::is_gone(self.pid, self.start.0)
    }

    /// Live counted bytes and blocks.
    pub fn live_totals(&self) -> (u64, u64) {
        let counted = self.live.values().filter(|allocation| allocation.counted);
        counted.fold((0, 0), |(bytes, blocks), allocation| (bytes + allocation.bytes, blocks + 1))
    }
}
