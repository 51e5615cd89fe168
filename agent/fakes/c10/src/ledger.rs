//! What the stand-in handed out and took back.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// What requests are rounded up to.
const GRAIN: u64 = 512;
/// Where the first block lies: no real memory, and an address that a C `int` can hold.
const FIRST: u64 = 0x1000_0000;
/// Memory is "taken from the driver" in such pieces.
const SEGMENT: u64 = 64 << 20;

/// A block in use.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub address: u64,
    pub bytes: u64,
    pub device: u8,
    stream: i64,
    asked: Option<(u64, i64)>,
}

/// Sums of one device and stream.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    allocations: u64,
    frees: u64,
    allocated_bytes: u64,
    requested_bytes: u64,
}

/// See the module's text.
pub struct Ledger {
    blocks: BTreeMap<u64, Block>,
    /// Freed addresses by size: they are given out again.
    free: BTreeMap<u64, Vec<u64>>,
    next: u64,
    allocated: [u64; 2],
    held: [u64; 2],
    /// By device and, where a probe told of it, the stream.
    sums: BTreeMap<(u8, Option<i64>), Sums>,
    pub ooms: u64,
}

impl Ledger {
    pub const fn new() -> Self {
        Self {
            blocks: BTreeMap::new(),
            free: BTreeMap::new(),
            next: FIRST,
            allocated: [0; 2],
            held: [0; 2],
            sums: BTreeMap::new(),
            ooms: 0,
        }
    }

    pub fn allocate(
        &mut self,
        requested: u64,
        device: u8,
        stream: i64,
        asked: Option<(u64, i64)>,
    ) -> Block {
        let bytes = requested.next_multiple_of(GRAIN);
        let again = self.free.get_mut(&bytes).and_then(Vec::pop);
        let address = again.unwrap_or_else(|| {
            let address = self.next;
            self.next += bytes;
            address
        });
        let block = Block {
            address,
            bytes,
            device,
            stream,
            asked,
        };
        self.blocks.insert(address, block);
        self.allocated[usize::from(device)] += bytes;
        let held = &mut self.held[usize::from(device)];
        *held = (*held).max(self.allocated[usize::from(device)].next_multiple_of(SEGMENT));
        let sums = self
            .sums
            .entry((device, asked.map(|_| stream)))
            .or_default();
        sums.allocations += 1;
        sums.allocated_bytes += bytes;
        sums.requested_bytes += asked.map_or(0, |(requested, _)| requested);
        block
    }

    pub fn free(&mut self, address: u64) -> Option<Block> {
        let block = self.blocks.remove(&address)?;
        self.free.entry(block.bytes).or_default().push(address);
        self.allocated[usize::from(block.device)] -= block.bytes;
        let key = (block.device, block.asked.map(|_| block.stream));
        self.sums.entry(key).or_default().frees += 1;
        Some(block)
    }

    /// Bytes handed out and held on a device.
    pub fn totals(&self, device: u8) -> (u64, u64) {
        let index = usize::from(device);
        (self.allocated[index], self.held[index])
    }

    pub fn to_json(&self) -> Value {
        let sums: Vec<Value> = self
            .sums
            .iter()
            .map(|((device, stream), sums)| {
                json!({
                    "device": device,
                    "stream": stream,
                    "allocations": sums.allocations,
                    "frees": sums.frees,
                    "allocated_bytes": sums.allocated_bytes,
                    "requested_bytes": sums.requested_bytes,
                })
            })
            .collect();
        let live: Vec<Value> = self
            .blocks
            .values()
            .map(|block| {
                json!({
                    "address": block.address,
                    "bytes": block.bytes,
                    "requested": block.asked.map(|(requested, _)| requested),
                })
            })
            .collect();
        json!({"sums": sums, "live": live, "ooms": self.ooms})
    }
}
