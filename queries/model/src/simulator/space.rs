//! Device addresses. The driver's choice of addresses cannot be foretold: new ranges are put one
//! behind the other and never used again, except where a recorded trace suggests an address.
//!
//! Invariant: ranges never overlap.

use std::collections::BTreeMap;

/// The driver aligns to this.
const ALIGNMENT: u64 = 2 << 20;
/// Device addresses stay below 2^57; what is invented above them stays below this.
const END: u64 = 1 << 62;

#[derive(Debug, Clone)]
pub(super) struct Space {
    /// Ranges in use: begin and bytes.
    used: BTreeMap<u64, u64>,
    next: u64,
    /// Begin and bytes of ranges that the recorded allocator took at this point.
    suggested: Vec<(u64, u64)>,
}

impl Default for Space {
    fn default() -> Self {
        Self {
            used: BTreeMap::new(),
            next: 1 << 40,
            suggested: Vec::new(),
        }
    }
}

impl Space {
    /// Addresses from `address` on are free to be invented.
    pub fn begin_above(&mut self, address: u64) {
        if address < END {
            self.next = self.next.max(address.next_multiple_of(ALIGNMENT));
        }
    }

    /// What the recorded allocator took for the coming request.
    pub fn suggest(&mut self, address: u64, bytes: u64) {
        if address.checked_add(bytes).is_some_and(|end| end <= END) {
            self.suggested.push((address, bytes));
        }
    }

    pub fn forget_suggestions(&mut self) {
        self.suggested.clear();
    }

    /// A place for a segment of `bytes`; `None` where there are no addresses left.
    pub fn segment(&mut self, bytes: u64) -> Option<u64> {
        let suggestion = self
            .suggested
            .iter()
            .position(|(address, suggested)| *suggested == bytes && self.is_free(*address, bytes));
        let address = match suggestion {
            Some(index) => self.suggested.remove(index).0,
            None => self.invent(bytes)?,
        };
        self.used.insert(address, bytes);
        Some(address)
    }

    /// A place for a reservation of `bytes`, and how many it got: one that begins where a trace
    /// suggests ends before what is in use already.
    pub fn reservation(&mut self, bytes: u64, least: u64, chunk: u64) -> Option<(u64, u64)> {
        let suggestion = self.suggested.iter().find_map(|(address, _)| {
            let room = self.room(*address).min(bytes);
            let room = room - room % chunk;
            (room >= least).then_some((*address, room))
        });
        let (address, bytes) = match suggestion {
            Some(place) => place,
            None => (self.invent(bytes)?, bytes),
        };
        self.used.insert(address, bytes);
        Some((address, bytes))
    }

    /// Takes a range that a map has.
    pub fn occupy(&mut self, address: u64, bytes: u64) {
        self.used.insert(address, bytes);
        self.begin_above(address.saturating_add(bytes));
    }

    pub fn release(&mut self, address: u64) {
        self.used.remove(&address);
    }

    fn invent(&mut self, bytes: u64) -> Option<u64> {
        let mut address = self.next;
        while !self.is_free(address, bytes) {
            let reach = address.checked_add(bytes)?;
            let (begin, used) = self.used.range(..reach).next_back()?;
            let behind = begin.checked_add(*used)?;
            address = behind.checked_next_multiple_of(ALIGNMENT)?;
        }
        let end = address.checked_add(bytes)?;
        if end >= END {
            return None;
        }
        self.begin_above(end);
        Some(address)
    }

    fn is_free(&self, address: u64, bytes: u64) -> bool {
        self.room(address) >= bytes
    }

    /// Free bytes from `address` on.
    fn room(&self, address: u64) -> u64 {
        let before = self.used.range(..=address).next_back();
        if before.is_some_and(|(begin, bytes)| begin.saturating_add(*bytes) > address) {
            return 0;
        }
        let after = self.used.range(address..).next();
        after.map_or(u64::MAX - address, |(begin, _)| begin - address)
    }
}
