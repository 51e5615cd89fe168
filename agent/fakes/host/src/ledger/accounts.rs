//! The allocation map and the books over it: one value, so one lock guards both.

use std::collections::BTreeMap;

use super::{Kind, Layer, books::Books};
use crate::card::DEVICES;

/// A live block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The kind of memory.
    pub kind: Kind,
    /// The device it counts for, below [`DEVICES`]; `None` for what belongs to no device.
    pub device: Option<u32>,
    /// Bytes as the ledger's rules count them.
    pub bytes: u64,
    /// The context it belongs to, or 0 where the owner keeps none or the kind outlives it.
    pub context: usize,
}

/// Addresses and handles of these kinds are numbers of worlds that may overlap: a mapping begins
/// where its reservation does.
const WORLDS: usize = 5;

fn world(kind: Kind) -> usize {
    match kind {
        Kind::Device | Kind::PinnedHost | Kind::RegisteredHost | Kind::Managed | Kind::Pool => 0,
        Kind::Array => 1,
        Kind::VmmPhysical => 2,
        Kind::VmmVirtual => 3,
        Kind::VmmMapped => 4,
    }
}

/// The live blocks of one layer in one process, and its books.
pub struct Accounts {
    blocks: [BTreeMap<usize, Block>; WORLDS],
    /// Bytes in use of each card. Apart from the books, whose planted fault must not change what
    /// the card can hold.
    used: [u64; DEVICES],
    books: Books,
}

impl Accounts {
    /// Empty, with the settings of the environment. Writes nothing yet.
    pub fn new(layer: Layer) -> Self {
        Self {
            blocks: Default::default(),
            used: [0; DEVICES],
            books: Books::new(layer),
        }
    }

    /// Creates the ledger's file if there should be one and is none.
    pub fn open(&mut self) {
        self.books.open();
    }

    /// Bytes in use of a card: blocks of the physical kinds, and what pools hold reserved.
    pub fn used_bytes(&self, device: u32) -> u64 {
        self.used[device as usize]
    }

    /// The live block that begins at an address, among those whose addresses are of the same world
    /// as `kind`'s (one for all memory that has an address of its own). Its kind may be another.
    pub fn block(&self, kind: Kind, address: usize) -> Option<Block> {
        self.blocks[world(kind)].get(&address).copied()
    }

    /// The live blocks of `kind`'s world that overlap a range, the highest first.
    pub fn overlapping(
        &self,
        kind: Kind,
        address: usize,
        bytes: usize,
    ) -> impl Iterator<Item = (usize, Block)> + '_ {
        let end = address.saturating_add(bytes);
        // Blocks do not overlap each other, so going down from the range's end the first one that
        // ends before the range is the last to look at.
        self.blocks[world(kind)]
            .range(..end)
            .rev()
            .take_while(move |(start, block)| **start + block.bytes as usize > address)
            .map(|(start, block)| (*start, *block))
    }

    /// The live blocks of a context, with their addresses.
    pub fn of_context(&self, context: usize) -> Vec<(usize, Block)> {
        self.select(|block| block.context == context)
    }

    /// The live blocks that the end of a device's context frees, with their addresses.
    pub fn of_device(&self, device: u32) -> Vec<(usize, Block)> {
        self.select(|block| block.device == Some(device) && block.kind.ends_with_context())
    }

    fn select(&self, wanted: impl Fn(&Block) -> bool) -> Vec<(usize, Block)> {
        let all = self.blocks.iter().flatten();
        all.filter(|(_, block)| wanted(block))
            .map(|(address, block)| (*address, *block))
            .collect()
    }

    /// An allocation succeeded.
    pub fn allocated(&mut self, address: usize, block: Block) {
        self.insert(address, block);
        self.books.allocated(block.kind, block.device, block.bytes);
    }

    /// An allocation failed that would have counted for `device`.
    pub fn allocation_failed(&mut self, kind: Kind, device: Option<u32>) {
        self.books.allocation_failed(kind, device);
    }

    /// The block at an address of `kind`'s world is freed; nothing happens if there is none.
    pub fn freed(&mut self, kind: Kind, address: usize) -> Option<Block> {
        let block = self.blocks[world(kind)].remove(&address)?;
        if let Some(used) = self.used_by(block) {
            *used -= block.bytes;
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
        let known = self.block(kind, address);
        let device = known.map_or(current, |block| block.device);
        self.books.free_failed(kind, device);
    }

    /// A pool took memory of a card.
    pub fn pool_grew(&mut self, device: u32, bytes: u64) {
        self.used[device as usize] += bytes;
        self.books.pool_grew(device, bytes);
    }

    /// A pool gave memory of a card back.
    pub fn pool_shrank(&mut self, device: u32, bytes: u64) {
        self.used[device as usize] -= bytes;
        self.books.pool_shrank(device, bytes);
    }

    fn insert(&mut self, address: usize, block: Block) {
        if let Some(used) = self.used_by(block) {
            *used += block.bytes;
        }
        self.blocks[world(block.kind)].insert(address, block);
    }

    fn used_by(&mut self, block: Block) -> Option<&mut u64> {
        let device = block.device.filter(|_| block.kind.is_physical())?;
        self.used.get_mut(device as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Totals;

    fn block(kind: Kind, device: u32, bytes: u64) -> Block {
        Block {
            kind,
            device: Some(device),
            bytes,
            context: 1,
        }
    }

    #[test]
    fn totals_follow_the_rules() {
        let mut accounts = Accounts::new(Layer::Runtime);
        accounts.allocated(0x1000, block(Kind::Device, 0, 100));
        accounts.allocated(0x2000, block(Kind::Device, 0, 50));
        assert_eq!(
            accounts.freed(Kind::Device, 0x1000),
            Some(block(Kind::Device, 0, 100))
        );
        accounts.allocated(0x3000, block(Kind::Device, 0, 20));
        // A known block's failed free is its device's, an unknown one's the current device's.
        accounts.free_failed(Kind::Device, 0x2000, Some(1));
        accounts.free_failed(Kind::Device, 0x9000, Some(1));
        accounts.allocation_failed(Kind::PinnedHost, Some(1));
        assert_eq!(accounts.freed(Kind::Device, 0x9000), None);

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
        let freed = accounts.freed(Kind::Device, 0x1000).unwrap();
        accounts.free_undone(0x1000, freed);
        let totals = accounts.books.totals(Kind::Device, 1);
        assert_eq!((totals.frees, totals.failed_frees), (0, 1));
        assert_eq!((totals.live_count, totals.live_bytes), (1, 100));
        assert_eq!(accounts.block(Kind::Device, 0x1000), Some(freed));
    }

    #[test]
    fn overlaps_are_found_at_both_ends() {
        let mut accounts = Accounts::new(Layer::Driver);
        accounts.allocated(100, block(Kind::RegisteredHost, 0, 10));
        accounts.allocated(120, block(Kind::RegisteredHost, 0, 10));
        let found = |address, bytes| -> Vec<usize> {
            let blocks = accounts.overlapping(Kind::Device, address, bytes);
            blocks.map(|(start, _)| start).collect()
        };
        assert_eq!(found(90, 10), Vec::<usize>::new());
        assert_eq!(found(90, 11), [100]);
        assert_eq!(found(109, 1), [100]);
        assert_eq!(found(110, 10), Vec::<usize>::new());
        assert_eq!(found(109, 12), [120, 100]);
    }

    #[test]
    fn a_mapping_may_begin_where_its_reservation_does() {
        let mut accounts = Accounts::new(Layer::Driver);
        let reserved = Block {
            device: None,
            ..block(Kind::VmmVirtual, 0, 300)
        };
        accounts.allocated(0x1000, reserved);
        accounts.allocated(0x1000, block(Kind::VmmMapped, 1, 200));
        assert_eq!(accounts.used_bytes(1), 0, "neither is memory of the card");
        assert_eq!(accounts.freed(Kind::VmmVirtual, 0x1000), Some(reserved));
        assert_eq!(accounts.books.totals(Kind::VmmMapped, 1).live_bytes, 200);
        accounts.pool_grew(1, 64);
        accounts.pool_shrank(1, 32);
        assert_eq!(accounts.used_bytes(1), 32);
    }
}
