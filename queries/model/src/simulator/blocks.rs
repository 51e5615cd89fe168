//! The blocks of all segments, in chains.
//!
//! Invariant: `prev` and `next` of two neighbours name each other; a block's number stays its own
//! until the block is joined to another or removed.

use std::ops::{Index, IndexMut};

/// No block, no reservation.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Allocated,
    Pending,
    /// Address space of an expandable segment without memory.
    Unmapped,
    /// The number is not in use.
    Vacant,
}

#[derive(Debug, Clone)]
pub(super) struct Block {
    pub address: u64,
    pub bytes: u64,
    /// Of the last request that it served.
    pub requested: u64,
    pub tag: Option<u64>,
    /// The pool's count of calls when the block became free.
    pub idle_since: u64,
    pub prev: u32,
    pub next: u32,
    /// Of its pool and stream.
    pub list: u32,
    /// The expandable segment that it lies in.
    pub reservation: u32,
    pub state: State,
}

impl Block {
    pub fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    pub fn is_mapped(&self) -> bool {
        !matches!(self.state, State::Unmapped | State::Vacant)
    }

    pub fn end(&self) -> u64 {
        self.address + self.bytes
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Blocks {
    all: Vec<Block>,
    vacant: Vec<u32>,
}

impl Index<u32> for Blocks {
    type Output = Block;

    fn index(&self, block: u32) -> &Block {
        &self.all[block as usize]
    }
}

impl IndexMut<u32> for Blocks {
    fn index_mut(&mut self, block: u32) -> &mut Block {
        &mut self.all[block as usize]
    }
}

impl Blocks {
    /// `None` for [`NONE`].
    pub fn get(&self, block: u32) -> Option<&Block> {
        self.all.get(block as usize)
    }

    /// A chain of one free block, in no list.
    pub fn insert(&mut self, address: u64, bytes: u64, list: u32) -> u32 {
        self.put(Block {
            address,
            bytes,
            requested: 0,
            tag: None,
            idle_since: 0,
            prev: NONE,
            next: NONE,
            list,
            reservation: NONE,
            state: State::Free,
        })
    }

    fn put(&mut self, block: Block) -> u32 {
        if let Some(number) = self.vacant.pop() {
            self[number] = block;
            return number;
        }
        // Blocks in use take some 80 bytes each here: memory ends long before the numbers do.
        let number = self.all.len() as u32;
        assert!(number < NONE, "more than 2^32 blocks");
        self.all.push(block);
        number
    }

    /// Cuts the first `bytes` off a block into a block of their own, in its state.
    pub fn split_front(&mut self, block: u32, bytes: u64) -> u32 {
        let rest = &mut self[block];
        let front = Block {
            bytes,
            next: block,
            ..rest.clone()
        };
        rest.address += bytes;
        rest.bytes -= bytes;
        let prev = front.prev;
        let front = self.put(front);
        self[block].prev = front;
        if prev != NONE {
            self[prev].next = front;
        }
        front
    }

    /// Makes two neighbours one; `other`'s number becomes vacant.
    pub fn join(&mut self, block: u32, other: u32) {
        let (address, bytes) = (self[other].address, self[other].bytes);
        let (prev, next) = (self[other].prev, self[other].next);
        let joined = &mut self[block];
        joined.bytes += bytes;
        if joined.prev == other {
            joined.address = address;
            joined.prev = prev;
            if prev != NONE {
                self[prev].next = block;
            }
        } else {
            joined.next = next;
            if next != NONE {
                self[next].prev = block;
            }
        }
        self.vacate(other);
    }

    /// Removes a chain of one block.
    pub fn remove(&mut self, block: u32) {
        self.vacate(block);
    }

    fn vacate(&mut self, block: u32) {
        self[block].state = State::Vacant;
        self.vacant.push(block);
    }

    /// Puts a block behind the last one of a chain.
    pub fn append(&mut self, last: u32, block: u32) {
        self[last].next = block;
        self[block].prev = last;
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Block)> {
        self.all
            .iter()
            .enumerate()
            .filter(|(_, block)| block.state != State::Vacant)
            .map(|(number, block)| (number as u32, block))
    }
}
