//! What follows from the rows of `alloc_events` alone, by the plainest means: a second reading of them,
//! apart from the agent's own books and from the allocator simulator.

use std::collections::BTreeMap;

use crate::torch::trace::{Moment, Row, Trace, is, moment, number, required, text};

/// What a program holds at a moment.
#[derive(Debug, Default)]
pub struct State {
    /// Blocks of the framework by address.
    pub blocks: BTreeMap<u64, Block>,
    /// Memory from `cudaMalloc` by address.
    device: BTreeMap<u64, Memory>,
    /// Memory from `cuMemCreate` by handle.
    created: BTreeMap<u64, Memory>,
    /// Reserved addresses: bytes by address.
    reserved: BTreeMap<u64, u64>,
    /// Mappings: bytes by address.
    mapped: BTreeMap<u64, u64>,
    pub ooms: BTreeMap<u32, u64>,
    pub retries: BTreeMap<u32, u64>,
    /// What the allocator said last of a device: allocated and reserved.
    pub said: BTreeMap<u32, (u64, u64)>,
    /// Threads whose last request for memory of the card failed.
    refused: BTreeMap<i64, bool>,
}

#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub bytes: u64,
    pub requested: Option<u64>,
    pub device: u32,
    pub stream: Option<i64>,
    pub segment: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Memory {
    bytes: u64,
    /// Not known of a thread that chose its device before the agent came.
    device: Option<u32>,
}

/// Memory that the allocator holds, as a snapshot shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub address: u64,
    pub bytes: u64,
    pub expandable: bool,
}

impl State {
    /// All that took effect before a moment.
    pub fn at(trace: &Trace, moment_of_it: Moment) -> Self {
        let mut state = Self::default();
        for row in &trace.events {
            if moment(row) >= moment_of_it {
                break;
            }
            state.take(row);
        }
        state
    }

    fn take(&mut self, row: &Row) {
        let (op, kind) = (text(row, "op"), text(row, "memory_kind"));
        let tid = number(row, "tid").unwrap_or(0);
        let failed = number(row, "result").is_some_and(|result| result != 0);
        if text(row, "layer") == "framework" {
            self.take_of_framework(row, op, tid);
            return;
        }
        let is_of_card = kind == "device" || kind == "vmm_physical";
        if failed && op == "alloc" && is_of_card {
            self.refused.insert(tid, true);
        }
        if failed || !is(row, "counted") {
            return;
        }
        let address = || required(row, "address");
        let memory = || Memory {
            bytes: required(row, "bytes"),
            device: number(row, "device").map(|device| device as u32),
        };
        let gives = matches!(op, "alloc" | "reserve" | "map");
        match kind {
            "device" if gives => drop(self.device.insert(address(), memory())),
            "device" => drop(self.device.remove(&address())),
            "vmm_physical" if gives => drop(self.created.insert(address(), memory())),
            "vmm_physical" => drop(self.created.remove(&address())),
            "vmm_virtual" if gives => {
                self.reserved.insert(address(), required(row, "bytes"));
            }
            "vmm_virtual" => drop(self.reserved.remove(&address())),
            "vmm_mapped" if gives => {
                self.mapped.insert(address(), required(row, "bytes"));
            }
            "vmm_mapped" => drop(self.mapped.remove(&address())),
            _ => {}
        }
    }

    fn take_of_framework(&mut self, row: &Row, op: &str, tid: i64) {
        if op == "free" && !is(row, "counted") {
            // Of a block that was given before the agent came.
            return;
        }
        let device = required(row, "device") as u32;
        match op {
            "oom" => {
                *self.ooms.entry(device).or_default() += 1;
                // An allocator gives up only after it has flushed and asked again.
                *self.retries.entry(device).or_default() += 1;
                self.refused.remove(&tid);
            }
            "alloc" => {
                if self.refused.remove(&tid).is_some() {
                    *self.retries.entry(device).or_default() += 1;
                }
                let block = Block {
                    bytes: required(row, "bytes"),
                    requested: number(row, "requested_bytes").map(|bytes| bytes as u64),
                    device,
                    stream: number(row, "stream"),
                    segment: number(row, "segment_address").map(|address| address as u64),
                };
                let before = self.blocks.insert(required(row, "address"), block);
                assert!(before.is_none(), "a block was given out twice: {row:?}");
            }
            "free" => {
                let gone = self.blocks.remove(&required(row, "address"));
                assert!(gone.is_some(), "a block was taken back twice: {row:?}");
            }
            _ => panic!("op of a framework's row: {row:?}"),
        }
        assert!(op == "oom" || is(row, "counted"), "{row:?}");
        let said = (
            number(row, "allocator_allocated_bytes"),
            number(row, "allocator_reserved_bytes"),
        );
        if let (Some(allocated), Some(reserved)) = said {
            self.said
                .insert(device, (allocated as u64, reserved as u64));
        }
    }

    pub fn blocks_of(&self, device: u32) -> impl Iterator<Item = &Block> {
        self.blocks
            .values()
            .filter(move |block| block.device == device)
    }

    /// Bytes that the process took of a card; none if of some it is not known which card they are of.
    pub fn reserved_bytes(&self, device: u32) -> Option<u64> {
        let all = || self.device.values().chain(self.created.values());
        if all().any(|memory| memory.device.is_none()) {
            return None;
        }
        let of_device = all().filter(|memory| memory.device == Some(device));
        Some(of_device.map(|memory| memory.bytes).sum())
    }

    /// By address: allocations, and contiguous mappings within one reservation.
    pub fn segments(&self) -> Vec<Segment> {
        let plain = self.device.iter().map(|(address, memory)| Segment {
            address: *address,
            bytes: memory.bytes,
            expandable: false,
        });
        let mut segments: Vec<Segment> = plain.collect();
        for (start, length) in &self.reserved {
            let mut of_it: Vec<Segment> = Vec::new();
            for (address, bytes) in self.mapped.range(*start..start + length) {
                match of_it.last_mut() {
                    Some(last) if last.address + last.bytes == *address => last.bytes += bytes,
                    _ => of_it.push(Segment {
                        address: *address,
                        bytes: *bytes,
                        expandable: true,
                    }),
                }
            }
            segments.extend(of_it);
        }
        segments.sort_unstable_by_key(|segment| segment.address);
        segments
    }

    /// Blocks and gaps of a segment: address, bytes, and the block where it is one.
    pub fn tiles(&self, segment: &Segment) -> Vec<(u64, u64, Option<Block>)> {
        let end = segment.address + segment.bytes;
        let mut tiles = Vec::new();
        let mut next = segment.address;
        for (address, block) in self.blocks.range(segment.address..end) {
            if *address > next {
                tiles.push((next, address - next, None));
            }
            tiles.push((*address, block.bytes, Some(*block)));
            next = address + block.bytes;
        }
        if next < end {
            tiles.push((next, end - next, None));
        }
        tiles
    }
}
