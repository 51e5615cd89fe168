//! What a framework's allocator holds in one process: the memory it took from the driver, and the
//! blocks it handed out of it.
//!
//! Invariants:
//! - it follows from the ledger's changes alone, in their order, so a journal rebuilds it;
//! - blocks never overlap;
//! - memory becomes a segment when the first block lies in it, and stays one until it goes;
//! - of an expandable segment (reserved addresses, mapped piece by piece) a segment is one
//!   contiguous mapped range, and ranges never reach beyond their reservation.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::vmm::{Vmm, VmmChange};
use super::block::Block;
use crate::ledger::{Allocation, Key, Process};
use crate::probes::hooks::{MemoryKind, Space};

/// Requests up to here come from the small pool (`kSmallSize` of PyTorch's allocator).
const SMALL_REQUEST: u64 = 1 << 20;

/// What is known of the allocator's use of some memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    pub device: Option<i32>,
    /// All blocks in it are of one stream.
    pub stream: Option<i64>,
    /// It serves requests up to 1 MiB.
    pub is_small: bool,
}

/// One allocation of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub bytes: u64,
    pub effect_ns: u64,
    pub stack_id: Option<i64>,
    /// Set once a block lay in it.
    pub used: Option<Use>,
}

/// Addresses that were reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    pub bytes: u64,
    pub effect_ns: u64,
    pub stack_id: Option<i64>,
    /// Bytes mapped in it.
    pub mapped: u64,
    pub used: Option<Use>,
}

/// What the allocator holds on one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Blocks in the books.
    pub blocks: u64,
    pub blocks_bytes: u64,
    /// Asked for by those blocks of which it is known, and how many others there are.
    pub requested_bytes: u64,
    pub requested_unknown: u64,
    /// Segments in the books.
    pub segments_bytes: u64,
    /// What the allocator itself said last, less what the books say: (allocated, reserved).
    pub off: Option<(i64, i64)>,
    /// That was more than nothing at some time: blocks were there before, or events were lost.
    pub strayed: bool,
    pub peak_allocated: u64,
    pub peak_reserved: u64,
    pub retries: u64,
    pub ooms: u64,
}

impl Totals {
    /// Bytes handed out, by the allocator's own account.
    pub fn allocated(&self) -> Option<u64> {
        Some(self.blocks_bytes.saturating_add_signed(self.off?.0))
    }

    /// Bytes held, by the allocator's own account.
    pub fn reserved(&self) -> Option<u64> {
        Some(self.segments_bytes.saturating_add_signed(self.off?.1))
    }

    /// Whether the books know all that the allocator tells.
    pub fn is_whole(&self) -> bool {
        self.off == Some((0, 0))
    }
}

/// A memory that blocks may lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub address: u64,
    pub bytes: u64,
    pub is_expandable: bool,
    pub effect_ns: u64,
    pub stack_id: Option<i64>,
    pub used: Option<Use>,
}

/// See the module's text.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Heap {
    blocks: BTreeMap<u64, Block>,
    memory: BTreeMap<u64, Memory>,
    reserved: BTreeMap<u64, Reserved>,
    /// Contiguous mapped ranges: bytes by address.
    runs: BTreeMap<u64, u64>,
    devices: BTreeMap<i32, Totals>,
    /// Its allocator reports blocks, so frees are not to be taken from elsewhere.
    pub reports: bool,
    /// Its last state was sampled.
    pub is_sampled: bool,
}

/// What changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeapChange {
    /// It was found that the process has one.
    Found,
    /// A block was handed out.
    Born {
        address: u64,
        block: Block,
    },
    /// What was asked for became known.
    Completed {
        address: u64,
        requested: u64,
        stream: i64,
    },
    /// A block was taken back.
    Gone {
        address: u64,
    },
    /// The allocator told its totals.
    Reported {
        device: i32,
        allocated: u64,
        reserved: u64,
    },
    /// It gave back what it held to get more.
    Retried {
        device: i32,
    },
    Oom {
        device: Option<i32>,
    },
    /// The process is over, and its last state was sampled.
    Sampled,
}

impl Heap {
    /// A heap in a process of which the books know memory already.
    pub fn of(process: &Process) -> Self {
        let mut heap = Self::default();
        for (key, allocation) in &process.live {
            heap.memory_born(*key, allocation);
        }
        for (address, mapping) in process.vmm.mapped_in(0, u64::MAX) {
            heap.mapped(address, mapping.bytes);
        }
        heap
    }

    pub fn blocks(&self) -> &BTreeMap<u64, Block> {
        &self.blocks
    }

    pub fn devices(&self) -> impl Iterator<Item = (i32, &Totals)> {
        self.devices
            .iter()
            .map(|(device, totals)| (*device, totals))
    }

    pub fn totals(&self, device: i32) -> Totals {
        self.devices.get(&device).copied().unwrap_or_default()
    }

    /// Blocks that lie at least partly in a range, by address.
    pub fn blocks_in(&self, address: u64, bytes: u64) -> Vec<u64> {
        let before = self.blocks.range(..address).next_back();
        let reaches_in = before
            .filter(|(start, block)| start.saturating_add(block.bytes) > address)
            .map(|(start, _)| *start);
        let inside = self.blocks.range(address..address.saturating_add(bytes));
        reaches_in
            .into_iter()
            .chain(inside.map(|(start, _)| *start))
            .collect()
    }

    /// The memory that an address lies in.
    pub fn segment_at(&self, address: u64) -> Option<Segment> {
        if let Some((start, memory)) = self.memory.range(..=address).next_back()
            && address - start < memory.bytes
        {
            return Some(Segment {
                address: *start,
                bytes: memory.bytes,
                is_expandable: false,
                effect_ns: memory.effect_ns,
                stack_id: memory.stack_id,
                used: memory.used,
            });
        }
        let (start, bytes) = self.runs.range(..=address).next_back()?;
        (address - start < *bytes).then(|| self.run(*start, *bytes))
    }

    fn run(&self, address: u64, bytes: u64) -> Segment {
        let reserved = self.reservation(address).map(|(_, reserved)| reserved);
        Segment {
            address,
            bytes,
            is_expandable: true,
            effect_ns: reserved.map_or(0, |reserved| reserved.effect_ns),
            stack_id: reserved.and_then(|reserved| reserved.stack_id),
            used: reserved.and_then(|reserved| reserved.used),
        }
    }

    fn reservation(&self, address: u64) -> Option<(u64, &Reserved)> {
        let (start, reserved) = self.reserved.range(..=address).next_back()?;
        (address - start < reserved.bytes).then_some((*start, reserved))
    }

    /// What the allocator holds, by address.
    pub fn segments(&self) -> Vec<Segment> {
        let plain = self
            .memory
            .iter()
            .filter(|(_, memory)| memory.used.is_some());
        let mut segments: Vec<Segment> = plain
            .filter_map(|(address, _)| self.segment_at(*address))
            .collect();
        let runs = self
            .runs
            .iter()
            .map(|(start, bytes)| self.run(*start, *bytes));
        segments.extend(runs.filter(|segment| segment.used.is_some()));
        segments.sort_unstable_by_key(|segment| segment.address);
        segments
    }

    pub fn apply(&mut self, change: HeapChange) {
        match change {
            HeapChange::Found => {}
            HeapChange::Sampled => self.is_sampled = true,
            HeapChange::Born { address, block } => self.born(address, block),
            HeapChange::Completed {
                address,
                requested,
                stream,
            } => {
                if let Some(mut block) = self.take(address) {
                    block.complete(requested, stream);
                    self.born(address, block);
                }
            }
            HeapChange::Gone { address } => {
                self.take(address);
            }
            HeapChange::Reported {
                device,
                allocated,
                reserved,
            } => {
                self.reports = true;
                let totals = self.devices.entry(device).or_default();
                let off = |said: u64, ours: u64| said.wrapping_sub(ours) as i64;
                totals.off = Some((
                    off(allocated, totals.blocks_bytes),
                    off(reserved, totals.segments_bytes),
                ));
                totals.strayed |= totals.off != Some((0, 0));
                totals.peak_allocated = totals.peak_allocated.max(allocated);
                totals.peak_reserved = totals.peak_reserved.max(reserved);
            }
            HeapChange::Retried { device } => {
                self.devices.entry(device).or_default().retries += 1;
            }
            HeapChange::Oom { device } => {
                if let Some(device) = device {
                    self.devices.entry(device).or_default().ooms += 1;
                }
            }
        }
    }

    fn born(&mut self, address: u64, block: Block) {
        self.blocks.insert(address, block);
        if let Some(device) = block.device() {
            let totals = self.devices.entry(device).or_default();
            totals.blocks += 1;
            totals.blocks_bytes += block.bytes;
            match block.requested() {
                Some(requested) => totals.requested_bytes += requested,
                None => totals.requested_unknown += 1,
            }
        }
        self.make_segment(address, &block);
    }

    fn take(&mut self, address: u64) -> Option<Block> {
        let block = self.blocks.remove(&address)?;
        if let Some(totals) = block
            .device()
            .and_then(|device| self.devices.get_mut(&device))
        {
            totals.blocks = totals.blocks.saturating_sub(1);
            totals.blocks_bytes = totals.blocks_bytes.saturating_sub(block.bytes);
            match block.requested() {
                Some(requested) => {
                    totals.requested_bytes = totals.requested_bytes.saturating_sub(requested);
                }
                None => totals.requested_unknown = totals.requested_unknown.saturating_sub(1),
            }
        }
        Some(block)
    }

    /// The memory that a block lies in is the allocator's.
    fn make_segment(&mut self, address: u64, block: &Block) {
        let is_new = Use {
            device: block.device(),
            stream: block.stream(),
            is_small: block.requested().unwrap_or(block.bytes) <= SMALL_REQUEST,
        };
        let memory = self.memory.range_mut(..=address).next_back();
        let bytes = if let Some((start, memory)) = memory
            && address - *start < memory.bytes
        {
            mark(&mut memory.used, is_new).then_some(memory.bytes)
        } else if let Some((start, reserved)) = self.reserved.range_mut(..=address).next_back()
            && address - *start < reserved.bytes
        {
            mark(&mut reserved.used, is_new).then_some(reserved.mapped)
        } else {
            None
        };
        if let (Some(bytes), Some(device)) = (bytes, block.device()) {
            self.devices.entry(device).or_default().segments_bytes += bytes;
        }
    }

    /// Memory that the driver gave, or addresses.
    pub fn memory_born(&mut self, (space, address): Key, allocation: &Allocation) {
        let (bytes, effect_ns, stack_id) = (
            allocation.bytes,
            allocation.effect_ns,
            allocation.stack_id(),
        );
        match space {
            // Slices of a pool are no place for blocks.
            Space::Device if allocation.kind != MemoryKind::Pool => {
                let memory = Memory {
                    bytes,
                    effect_ns,
                    stack_id,
                    used: None,
                };
                self.memory.insert(address, memory);
            }
            Space::Reserved => {
                let runs = self.runs.range(address..address.saturating_add(bytes));
                let reserved = Reserved {
                    bytes,
                    effect_ns,
                    stack_id,
                    mapped: runs.map(|(_, bytes)| bytes).sum(),
                    used: None,
                };
                self.reserved.insert(address, reserved);
            }
            _ => {}
        }
    }

    /// Memory or addresses that are gone.
    pub fn memory_gone(&mut self, (space, address): Key) {
        let (used, bytes) = match space {
            Space::Device => match self.memory.remove(&address) {
                Some(memory) => (memory.used, memory.bytes),
                None => return,
            },
            Space::Reserved => match self.reserved.remove(&address) {
                Some(reserved) => (reserved.used, reserved.mapped),
                None => return,
            },
            _ => return,
        };
        self.segments_shrink(used, bytes);
    }

    fn segments_shrink(&mut self, used: Option<Use>, bytes: u64) {
        let device = used.and_then(|used| used.device);
        if let Some(totals) = device.and_then(|device| self.devices.get_mut(&device)) {
            totals.segments_bytes = totals.segments_bytes.saturating_sub(bytes);
        }
    }

    /// Memory shows at these addresses.
    pub fn mapped(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        let home = self.reservation(address).map(|(start, _)| start);
        let (mut start, mut length) = (address, bytes);
        let before = self.runs.range(..address).next_back();
        if let Some((before, run)) = before.map(|(start, run)| (*start, *run))
            && before + run == address
            && self.reservation(before).map(|(start, _)| start) == home
        {
            (start, length) = (before, run + length);
        }
        if let Some(after) = self.runs.get(&end).copied()
            && self.reservation(end).map(|(start, _)| start) == home
        {
            self.runs.remove(&end);
            length += after;
        }
        self.runs.insert(start, length);
        let Some(reserved) = home.and_then(|home| self.reserved.get_mut(&home)) else {
            return;
        };
        reserved.mapped += bytes;
        let device = reserved.used.and_then(|used| used.device);
        if let Some(device) = device {
            self.devices.entry(device).or_default().segments_bytes += bytes;
        }
    }

    /// Follows what is about to change among mappings.
    pub fn follow(&mut self, vmm: &Vmm, change: VmmChange) {
        match change {
            VmmChange::Mapped { address, mapping } => {
                // Addresses cannot be mapped twice: the unmapping of what was there was not seen.
                if let Some(bytes) = vmm.mapped_bytes(address) {
                    self.unmapped(address, bytes);
                }
                self.mapped(address, mapping.bytes);
            }
            VmmChange::Unmapped { address } => {
                if let Some(bytes) = vmm.mapped_bytes(address) {
                    self.unmapped(address, bytes);
                }
            }
            VmmChange::Created { .. } | VmmChange::Retained { .. } | VmmChange::Released { .. } => {
            }
        }
    }

    /// Nothing shows there any more.
    pub fn unmapped(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        let run = self.runs.range(..=address).next_back();
        let Some((start, length)) = run.map(|(start, length)| (*start, *length)) else {
            return;
        };
        let run_end = start + length;
        if address >= run_end {
            return;
        }
        self.runs.remove(&start);
        if address > start {
            self.runs.insert(start, address - start);
        }
        if run_end > end {
            self.runs.insert(end, run_end - end);
        }
        let home = self.reservation(address).map(|(start, _)| start);
        let Some(reserved) = home.and_then(|home| self.reserved.get_mut(&home)) else {
            return;
        };
        reserved.mapped = reserved.mapped.saturating_sub(bytes);
        let used = reserved.used;
        self.segments_shrink(used, bytes);
    }
}

/// True if the memory was not known to be the allocator's before.
fn mark(used: &mut Option<Use>, is_new: Use) -> bool {
    match used {
        Some(used) => {
            used.stream = used.stream.or(is_new.stream);
            false
        }
        None => {
            *used = Some(is_new);
            true
        }
    }
}
