//! One process lifetime and what lives in it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Allocation, Key};
use crate::host::clock;
use crate::host::identity::{Host, StartTime};
use crate::host::procfs::{self, Program};

/// A process that allocated, or that maps a hooked library.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub start: StartTime,
    pub process_id: i64,
    pub program: Program,
    /// Device of each context it made.
    pub contexts: HashMap<u64, i32>,
    pub live: HashMap<Key, Allocation>,
    /// Number and time of its leader's exit.
    pub exiting: Option<(u64, u64)>,
    pub last_seq: u64,
}

impl Process {
    /// Asks `/proc` who this is. Of a process that is gone already, what was `seen` of it earlier
    /// tells, and else what its events do.
    pub fn discover(
        host: &Host,
        pid: u32,
        at_monotonic_ns: u64,
        seen: Option<(StartTime, Program)>,
    ) -> Self {
        let (start, program) = match (StartTime::of(pid), seen) {
            // A program seen before may have been replaced by another since.
            (Some(start), _) => (start, Program::of(pid)),
            (None, Some(seen)) => seen,
            (None, None) => {
                let boot_offset = clock::boottime_ns().saturating_sub(clock::monotonic_ns());
                (
                    StartTime::from_boottime_ns(at_monotonic_ns + boot_offset),
                    Program::default(),
                )
            }
        };
        Self {
            pid,
            start,
            process_id: host.process_id(pid, start),
            program,
            contexts: HashMap::new(),
            live: HashMap::new(),
            exiting: None,
            last_seq: 0,
        }
    }

    /// After an exec nothing of the old program is left.
    pub fn forget_program(&mut self) {
        self.contexts.clear();
        self.live.clear();
        self.program = Program::of(self.pid);
    }

    /// True once no thread of it lives.
    pub fn is_gone(&self) -> bool {
        procfs::is_gone(self.pid, self.start.0)
    }

    /// Live counted bytes and blocks.
    pub fn live_totals(&self) -> (u64, u64) {
        let counted = self.live.values().filter(|allocation| allocation.counted);
        counted.fold((0, 0), |(bytes, blocks), allocation| {
            (bytes + allocation.bytes, blocks + 1)
        })
    }
}
