//! What the draining side needs of the kernel side: the rings, the loss counters, the settings, and
//! which ring it is.

use std::os::fd::AsFd;

use anyhow::Context;
use aya::maps::{Array, Map, MapData, PerCpuArray};
use vramscope_ebpf_abi::Loss;
use vramscope_ebpf_abi::python::Lost;
use vramscope_ebpf_abi::stack::SIZES;

use crate::config::Config;

use super::copies::Copies;
use super::ring::Ring;
use crate::python::table::{Counts, PYTHON_LOST};

/// What the draining side needs of the kernel side.
pub struct Channel {
    pub ring: Ring,
    /// Copied stacks of the ring's records.
    pub copies: Copies,
    settings: Array<MapData, [u64; 2]>,
    lost: PerCpuArray<MapData, u64>,
    python: Counts,
    /// When the ring was made, nanoseconds since boot. It names the ring: two agents that see the
    /// same value in one boot read the same ring.
    pub generation: u64,
    /// False if the probes were there before this agent.
    pub fresh: bool,
}

impl Channel {
    pub(super) fn open(
        mut map: impl FnMut(&str) -> anyhow::Result<MapData>,
        next_seq: Option<u64>,
    ) -> anyhow::Result<Self> {
        let events = map("EVENTS")?;
        // Pinned by an earlier agent, it may have another size than ours would.
        let bytes = events.info().context("failed to ask for the ring's size")?;
        let ring = Ring::open(events.fd().as_fd(), bytes.max_entries())
            .context("failed to map the ring buffer")?;
        let stacks = map("STACKS")?;
        let bytes = stacks.info().context("failed to ask for a ring's size")?;
        let copies = Ring::open(stacks.fd().as_fd(), bytes.max_entries())
            .context("failed to map the ring of stacks")?;
        let lost = PerCpuArray::try_from(Map::PerCpuArray(map("LOST")?))?;
        let python = Counts::open(map(PYTHON_LOST)?)?;
        if let Some(next_seq) = next_seq {
            let mut seq = Array::<_, u64>::try_from(Map::Array(map("SEQ")?))?;
            seq.set(0, next_seq, 0)?;
        }
        let generation = Array::<_, u64>::try_from(Map::Array(map("GENERATION")?))?.get(&0, 0)?;
        Ok(Self {
            ring,
            copies: Copies::new(copies),
            settings: Array::try_from(Map::Array(map("SETTINGS")?))?,
            lost,
            python,
            generation,
            fresh: true,
        })
    }

    /// Python frames that were not read or sent since the maps were made, by cause.
    pub fn python_lost(&self) -> anyhow::Result<[u64; Lost::COUNT as usize]> {
        self.python.read()
    }

    /// How stacks are taken from now on.
    pub fn set(&mut self, taking: Taking) -> anyhow::Result<()> {
        self.settings
            .set(0, taking.packed(), 0)
            .context("failed to tell the kernel side how stacks are taken")
    }

    /// What came before `position` is durable, and so is what belongs to it.
    pub fn release(&mut self, position: u64) {
        self.ring.release(position);
        self.copies.release();
    }

    /// Losses since the maps were made, by cause.
    pub fn lost(&self) -> anyhow::Result<[u64; Loss::COUNT as usize]> {
        let mut totals = [0; Loss::COUNT as usize];
        for (index, total) in totals.iter_mut().enumerate() {
            *total = self.lost.get(&(index as u32), 0)?.iter().sum();
        }
        Ok(totals)
    }
}

/// How stacks are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taking {
    /// Bytes of the stack that are copied with a call; 0 for none.
    pub stack_bytes: u32,
    /// How many stacks of calls are copied in a second of each thread.
    pub call_stacks: u32,
    /// The same for a framework's events.
    pub framework_stacks: u32,
}

impl Taking {
    /// # Errors
    /// Names the value that the kernel side has no record for.
    pub fn of(config: &Config) -> anyhow::Result<Self> {
        let stack_bytes = u32::try_from(config.stack_bytes.0).ok();
        let stack_bytes = stack_bytes
            .filter(|bytes| *bytes == 0 || SIZES.contains(bytes))
            .with_context(|| {
                format!(
                    "stack_bytes is {}: it has to be 0B, 4KiB, 8KiB, 16KiB, 32KiB or 64KiB",
                    config.stack_bytes
                )
            })?;
        let number = |name: &str, value: usize| {
            u32::try_from(value)
                .with_context(|| format!("{name} is {value}: it has to be below 4294967296"))
        };
        Ok(Self {
            stack_bytes,
            call_stacks: number("call_stacks", config.call_stacks)?,
            framework_stacks: number("framework_stacks", config.framework_stacks)?,
        })
    }

    /// As `vramscope_ebpf_abi::stack::Settings` lies in memory.
    const fn packed(self) -> [u64; 2] {
        [
            self.stack_bytes as u64 | (self.call_stacks as u64) << 32,
            self.framework_stacks as u64,
        ]
    }
}
