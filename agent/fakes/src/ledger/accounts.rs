//! The allocation map and the books over it: one value, so one lock guards both.

use std::collections::BTreeMap;

use super::{Kind, Layer, books::Books};
use crate::card::DEVICES;

/// A live block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The kind of memory.
    pub kind: Kind,
    /// The device that was current at the allocation; below [`DEVICES`].
    pub device: u32,
    /// Requested bytes.
    pub bytes: u64,
    /// The context it belongs to, or 0 where the owner keeps none.
    pub context: usize,
}

/// The live blocks of one layer in one process, and its books.
pub struct Accounts {
    blocks: BTreeMap<usize, Block>,
    /// Live bytes of device memory by device. Apart from the books, whose planted fault must not
    /// change what the card can hold.
    used: [u64; DEVICES],
    books: Books,
}

impl Accounts {
    /// Empty, with the settings of the environment. Writes nothing yet.
    pub fn new(layer: Layer) -> Self {
        Self {
            blocks: BTreeMap::new(),
            used: [0; DEVICES],
            books: Books::new(layer),
        }
    }

    /// Creates the ledger's file if there should be one and is none.
    pub fn open(&mut self) {
        self.books.open();
    }

    /// Live device memory on a device, in bytes.
    pub fn used_bytes(&self, device: u32) -> u64 {
        self.used[device as usize]
    }

    /// The live block that begins at an address.
    pub fn block(&self, address: usize) -> Option<Block> {
        self.blocks.get(&address).copied()
    }

    /// The live blocks that overlap a range, with their addresses.
    pub fn overlapping(
        &self,
        address: usize,
        bytes: usize,
    ) -> impl Iterator<Item = (usize, Block)> + '_ {
        let end = address.saturating_add(bytes);
        // Blocks do not overlap each other, so going down from the range's end the first one that
        // ends before the range is the last to look at.
        self.blocks
            .range(..end)
            .rev()
            .take_while(move |(start, block)| **start + block.bytes as usize > address)
            .map(|(start, block)| (*start, *block))
    }

    /// Addresses of the live blocks of a context.
    pub fn of_context(&self, context: usize) -> Vec<usize> {
        self.addresses(|block| block.context == context)
    }

    /// Addresses of the live blocks of a device.
    pub fn of_device(&self, device: u32) -> Vec<usize> {
        self.addresses(|block| block.device == device)
    }

    fn addresses(&self, wanted: impl Fn(&Block) -> bool) -> Vec<usize> {
        let blocks = self.blocks.iter().filter(|(_, block)| wanted(block));
        blocks.map(|(address, _)| *address).collect()
    }

    /// An allocation succeeded.
    pub fn allocated(&mut self, address: usize, block: Block) {
        self.insert(address, block);
        self.books.allocated(block.kind, block.device, block.bytes);
    }

    /// An allocation failed while `device` was current.
    pub fn allocation_failed(&mut self, kind: Kind, device: Option<u32>) {
        self.books.allocation_failed(kind, device);
    }

    /// The block at an address is freed; nothing happens if there is none.
    pub fn freed(&mut self, address: usize) -> Option<Block> {
        let block = self.blocks.remove(&address)?;
        if block.kind == Kind::Device {
            self.used[block.device as usize] -= block.bytes;
        }
        self.books.freed(block.kind, block.device, block.bytes);
        Some(block)
    }

    /// A free that was entered by [`Accounts::freed`] turned out to fail: the block lives on.
    pub fn free_undone(&mut self, address: usize, block: Block) {
        self.insert(address, block);
        self.books
            .free_undone(block.kind, block.device, block.bytes);
    }

    /// A free by a function for `kind` failed while `current` was the current device.
    pub fn free_failed(&mut self, kind: Kind, address: usize, current: Option<u32>) {
        let device = self.block(address).map(|block| block.device).or(current);
        self.books.free_failed(kind, device);
    }

    fn insert(&mut self, address: usize, block: Block) {
        if block.kind == Kind::Device {
            self.used[block.device as usize] += block.bytes;
        }
        self.blocks.insert(address, block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Totals;

    fn block(kind: Kind, device: u32, bytes: u64) -> Block {
        Block {
            kind,
            device,
            bytes,
            context: 1,
        }
    }

    #[test]
    fn totals_follow_the_rules() {
        let mut accounts = Accounts::new(Layer::Runtime);
        accounts.allocated(0x1000, block(Kind::Device, 0, 100));
        accounts.allocated(0x2000, block(Kind::Device, 0, 50));
        assert_eq!(accounts.freed(0x1000), Some(block(Kind::Device, 0, 100)));
        accounts.allocated(0x3000, block(Kind::Device, 0, 20));
        // A known block's failed free is its device's, an unknown one's the current device's.
        accounts.free_failed(Kind::Device, 0x2000, Some(1));
        accounts.free_failed(Kind::Device, 0x9000, Some(1));
        accounts.allocation_failed(Kind::PinnedHost, Some(1));
        assert_eq!(accounts.freed(0x9000), None);

        let expected = Totals {
            allocations: 3,
            failed_allocations: 0,
            frees: 1,
            failed_frees: 1,
            live_count: 2,
            live_bytes: 70,
            peak_bytes: 150,
            allocated_bytes: 170,
            freed_bytes: 100,
        };
        assert_eq!(accounts.books.totals(Kind::Device, 0), expected);
        assert_eq!(accounts.books.totals(Kind::Device, 1).failed_frees, 1);
        let pinned = accounts.books.totals(Kind::PinnedHost, 1);
        assert_eq!(pinned.failed_allocations, 1);
        assert_eq!(accounts.used_bytes(0), 70);
    }

    #[test]
    fn an_undone_free_leaves_the_block_alive() {
        let mut accounts = Accounts::new(Layer::Runtime);
        accounts.allocated(0x1000, block(Kind::Device, 1, 100));
        let freed = accounts.freed(0x1000).unwrap();
        accounts.free_undone(0x1000, freed);
        let totals = accounts.books.totals(Kind::Device, 1);
        assert_eq!((totals.frees, totals.failed_frees), (0, 1));
        assert_eq!((totals.live_count, totals.live_bytes), (1, 100));
        assert_eq!(accounts.block(0x1000), Some(freed));
    }

    #[test]
    fn overlaps_are_found_at_both_ends() {
        let mut accounts = Accounts::new(Layer::Driver);
        accounts.allocated(100, block(Kind::RegisteredHost, 0, 10));
        accounts.allocated(120, block(Kind::RegisteredHost, 0, 10));
        let found = |address, bytes| -> Vec<usize> {
            let blocks = accounts.overlapping(address, bytes);
            blocks.map(|(start, _)| start).collect()
        };
        assert_eq!(found(90, 10), Vec::<usize>::new());
        assert_eq!(found(90, 11), [100]);
        assert_eq!(found(109, 1), [100]);
        assert_eq!(found(110, 10), Vec::<usize>::new());
        assert_eq!(found(109, 12), [120, 100]);
    }
}
