//! What the kernel side is told of interpreters, and what it counts.

use anyhow::Context;
use aya::maps::{HashMap, Map, MapData, PerCpuArray};
use vramscope_ebpf_abi::python::{Interpreter, Lost};

/// Names of the maps.
pub const PYTHON: &str = "PYTHON";
pub const PYTHON_THREADS: &str = "PYTHON_THREADS";
pub const PYTHON_SEEN: &str = "PYTHON_SEEN";
pub const PYTHON_LOST: &str = "PYTHON_LOST";
pub const MAPS: [&str; 5] = [
    PYTHON,
    PYTHON_THREADS,
    "NEW_PYTHON_THREAD",
    PYTHON_SEEN,
    PYTHON_LOST,
];

#[derive(Clone, Copy)]
#[repr(transparent)]
struct InterpreterPod(Interpreter);

// SAFETY: words alone, without padding (checked in the abi crate).
unsafe impl aya::Pod for InterpreterPod {}

/// Interpreters by process, as the kernel side reads them.
pub struct Table {
    map: HashMap<MapData, u32, InterpreterPod>,
}

impl Table {
    pub fn open(map: MapData) -> anyhow::Result<Self> {
        Ok(Self {
            map: HashMap::try_from(Map::HashMap(map))?,
        })
    }

    pub fn set(&mut self, pid: u32, interpreter: &Interpreter) -> anyhow::Result<()> {
        self.map
            .insert(pid, InterpreterPod(*interpreter), 0)
            .with_context(|| format!("failed to tell the kernel side of process {pid}'s Python"))
    }

    pub fn remove(&mut self, pid: u32) {
        // The kernel side may have done so at its end.
        let _ = self.map.remove(&pid);
    }

    /// Processes that are told of.
    pub fn pids(&self) -> Vec<u32> {
        self.map.keys().flatten().collect()
    }
}

/// The kernel side's counts of what it could not read or send.
pub struct Counts {
    map: PerCpuArray<MapData, u64>,
}

impl Counts {
    pub fn open(map: MapData) -> anyhow::Result<Self> {
        Ok(Self {
            map: PerCpuArray::try_from(Map::PerCpuArray(map))?,
        })
    }

    /// Since the maps were made, by cause.
    pub fn read(&self) -> anyhow::Result<[u64; Lost::COUNT as usize]> {
        let mut totals = [0; Lost::COUNT as usize];
        for (index, total) in totals.iter_mut().enumerate() {
            *total = self.map.get(&(index as u32), 0)?.iter().sum();
        }
        Ok(totals)
    }
}

/// What an earlier agent was sent, this one was not: names of code objects are to be sent again.
pub fn forget_seen(map: MapData) -> anyhow::Result<()> {
    let mut seen: HashMap<_, [u64; 3], u8> = HashMap::try_from(Map::LruHashMap(map))?;
    let keys: Vec<[u64; 3]> = seen.keys().flatten().collect();
    for key in keys {
        // Pushed out meanwhile.
        let _ = seen.remove(&key);
    }
    Ok(())
}
