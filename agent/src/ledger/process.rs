//! One process lifetime and what lives in it.

use std::collections::{BTreeMap, BTreeSet};

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::framework::{Attempt, Heap};
use super::rollup::Rollup;
use super::vmm::Vmm;
use super::{Allocation, Key};
use crate::Map;
use crate::host::clock;
use crate::host::identity::{Host, StartTime};
use crate::host::procfs::{self, Program};

/// What lives, in one table of 64 bytes an entry and an index of 9 to 18.
pub type Live = IndexMap<Key, Allocation, foldhash::fast::RandomState>;

/// A device's primary context.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Primary {
    pub context: u64,
    /// Retains seen and not released. Earlier ones of an older process were not seen.
    pub retains: u32,
}

/// A memory pool that the program named.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Pool {
    pub device: Option<i32>,
    /// Bytes it held when the program last asked.
    pub reserved_bytes: Option<u64>,
}

/// A process that allocated, or that maps a hooked library.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub start: StartTime,
    pub process_id: i64,
    pub program: Program,
    /// Device of each context it made.
    pub contexts: Map<u64, i32>,
    pub primaries: Map<i32, Primary>,
    pub pools: Map<u64, Pool>,
    /// Contexts and pools that allocations name by their position here.
    pub owners: Vec<u64>,
    #[serde(with = "pairs")]
    pub live: Live,
    pub vmm: Vmm,
    /// What a framework's allocator holds, if it has one.
    pub heap: Option<Box<Heap>>,
    /// What threads that are looking for memory have met, by thread.
    pub attempts: BTreeMap<u32, Attempt>,
    pub rollup: Rollup,
    /// Cards on which its memory from before the agent was written down.
    pub baseline: BTreeSet<String>,
    /// Number and time of its leader's exit.
    pub exiting: Option<(u64, u64)>,
    pub last_seq: u64,
}

impl Process {
    /// Asks `/proc` who this is. Of a process that is gone already, what was `seen` of it earlier
    /// tells, and else what its events do. Whoever started after the event is not who made it: the
    /// pid has been given out again.
    pub fn discover(
        host: &Host,
        pid: u32,
        at_monotonic_ns: u64,
        seen: Option<(StartTime, Program)>,
    ) -> Self {
        let boot_offset = clock::boottime_ns().saturating_sub(clock::monotonic_ns());
        let event = StartTime::from_boottime_ns(at_monotonic_ns + boot_offset);
        let now = StartTime::of(pid).filter(|start| *start <= event);
        let seen = seen.filter(|(start, _)| *start <= event);
        let (start, program) = match (now, seen) {
            // A program seen before may have been replaced by another since.
            (Some(start), _) => (start, Program::of(pid)),
            (None, Some(seen)) => seen,
            (None, None) => (event, Program::default()),
        };
        Self {
            pid,
            start,
            process_id: host.process_id(pid, start),
            program,
            contexts: Map::default(),
            primaries: Map::default(),
            pools: Map::default(),
            owners: Vec::new(),
            live: Live::default(),
            vmm: Vmm::default(),
            heap: None,
            attempts: BTreeMap::new(),
            rollup: Rollup::default(),
            baseline: BTreeSet::new(),
            exiting: None,
            last_seq: 0,
        }
    }

    /// After an exec nothing of the old program is left. What it did stays in the roll-ups.
    pub fn forget_program(&mut self) {
        self.contexts.clear();
        self.primaries.clear();
        self.pools.clear();
        self.owners.clear();
        self.live = Live::default();
        self.vmm = Vmm::default();
        self.heap = None;
        self.attempts.clear();
        self.program = Program::of(self.pid);
    }

    /// Allocations and blocks that live.
    pub fn live_count(&self) -> usize {
        self.live.len() + self.heap.as_ref().map_or(0, |heap| heap.blocks().len())
    }

    /// True once no thread of it lives.
    pub fn is_gone(&self) -> bool {
        procfs::is_gone(self.pid, self.start.0)
    }

    /// The position of a context or pool, if it is known; 0 stands for none.
    pub fn owner(&self, name: u64) -> Option<u32> {
        let at = self.owners.iter().rposition(|owner| *owner == name)?;
        Some(at as u32 + 1)
    }

    /// The context or pool at a position.
    pub fn owner_at(&self, position: u32) -> Option<u64> {
        self.owners
            .get((position as usize).checked_sub(1)?)
            .copied()
    }
}

/// The table as a list of pairs. (The map's own feature for this would build half of the workspace
/// anew, as every other crate that uses it.)
mod pairs {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::{Allocation, Key, Live};

    pub fn serialize<S: Serializer>(live: &Live, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(live)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Live, D::Error> {
        let pairs: Vec<(Key, Allocation)> = Vec::deserialize(deserializer)?;
        Ok(pairs.into_iter().collect())
    }
}
