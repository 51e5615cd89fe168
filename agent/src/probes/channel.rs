//! What the draining side needs of the kernel side: the ring, the loss counters, and which ring
//! it is.

use std::os::fd::AsFd;

use anyhow::Context;
use aya::maps::{Array, Map, MapData, PerCpuArray};
use vramscope_ebpf_abi::Loss;
use vramscope_ebpf_abi::python::Lost;

use super::ring::Ring;
use crate::python::table::{Counts, PYTHON_LOST};

/// What the draining side needs of the kernel side.
pub struct Channel {
    pub ring: Ring,
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
        let lost = PerCpuArray::try_from(Map::PerCpuArray(map("LOST")?))?;
        let python = Counts::open(map(PYTHON_LOST)?)?;
        if let Some(next_seq) = next_seq {
            let mut seq = Array::<_, u64>::try_from(Map::Array(map("SEQ")?))?;
            seq.set(0, next_seq, 0)?;
        }
        let generation = Array::<_, u64>::try_from(Map::Array(map("GENERATION")?))?.get(&0, 0)?;
        Ok(Self {
            ring,
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

    /// Losses since the maps were made, by cause.
    pub fn lost(&self) -> anyhow::Result<[u64; Loss::COUNT as usize]> {
        let mut totals = [0; Loss::COUNT as usize];
        for (index, total) in totals.iter_mut().enumerate() {
            *total = self.lost.get(&(index as u32), 0)?.iter().sum();
        }
        Ok(totals)
    }
}
