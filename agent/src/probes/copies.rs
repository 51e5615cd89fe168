//! Copied stacks (`vramscope_ebpf_abi::stack`), found by the number of the record that each belongs
//! to.
//!
//! A copy is in its ring before its record is in the other one, so whoever has the record finds the
//! copy, unless the ring was emptied meanwhile. Threads write side by side, so the two rings agree in
//! order only roughly: copies that were passed on the way to the one looked for wait for their
//! own record.
//!
//! Invariants:
//! - at most the ring's size is kept, and nothing is copied out of it;
//! - space is given back when the record's rows are durable, so that after a kill the next agent finds
//!   record and copy again; but earlier when half of the ring is full: a stack that was unwound is
//!   worth less than room for the next ones. Such a record comes without its copy after a kill, and has
//!   the first of its callers alone;
//! - a copy whose record does not come (it found no room) is given up when two turns have passed.

use std::collections::VecDeque;

use vramscope_ebpf_abi::MAX_DEPTH;
use vramscope_ebpf_abi::stack as abi;

use super::record::long;
use super::ring::{Peeked, Ring};
use crate::Map;

/// Fill of the ring from which on space is given back at once.
const FILL: f64 = 0.5;
/// Turns in which a copy's record has to come.
const TURNS: u64 = 2;

/// A thread's registers and a piece of its stack.
#[derive(Debug, Clone, Copy)]
pub struct Copied<'a> {
    /// Whither the probed function returns, and stack and frame pointer then.
    pub ip: u64,
    pub sp: u64,
    pub bp: u64,
    /// Return addresses that return probes have replaced: where each lies, and what it was. Zeros
    /// where there is none.
    pub returns: [(u64, u64); MAX_DEPTH],
    /// The stack from `sp` upwards.
    pub bytes: &'a [u8],
}

impl<'a> Copied<'a> {
    /// `None` for bytes that are no copy.
    pub fn decode(record: &'a [u8]) -> Option<Self> {
        let header = size_of::<abi::Copied>();
        macro_rules! at {
            ($field:ident) => {
                long(record, core::mem::offset_of!(abi::Copied, $field))?
            };
        }
        let returns = core::mem::offset_of!(abi::Copied, returns);
        let bytes = usize::try_from(at!(bytes)).ok()?;
        let mut copied = Self {
            ip: at!(ip),
            sp: at!(sp),
            bp: at!(bp),
            returns: [(0, 0); MAX_DEPTH],
            bytes: record.get(header..header.checked_add(bytes)?)?,
        };
        for (index, entry) in copied.returns.iter_mut().enumerate() {
            let place = returns + 16 * index;
            *entry = (long(record, place)?, long(record, place + 8)?);
        }
        Some(copied)
    }
}

/// One record of the ring.
struct Passed {
    position: u64,
    /// `None` while the kernel side writes it.
    seq: Option<u64>,
    turn: u64,
    /// Nothing asks for it any more.
    done: bool,
}

/// See the module's text.
pub struct Copies {
    ring: Ring,
    /// In the ring's order; all before them may be given back.
    passed: VecDeque<Passed>,
    /// Numbers of those that wait for their record, and where they lie.
    waiting: Map<u64, u64>,
    /// The position behind the last one passed.
    position: u64,
    /// Some of those passed were still being written.
    has_busy: bool,
    turn: u64,
}

impl Copies {
    pub(super) fn new(ring: Ring) -> Self {
        Self {
            position: ring.position(),
            ring,
            passed: VecDeque::new(),
            waiting: Map::default(),
            has_busy: false,
            turn: 0,
        }
    }

    /// The copy that belongs to a record. It is good until the next turn ends.
    pub fn find(&mut self, seq: u64) -> Option<Copied<'_>> {
        if self.has_busy {
            self.look_again();
        }
        let mut found = self.waiting.remove(&seq);
        while found.is_none() {
            let position = self.position;
            if self.pass()? == Some(seq) {
                self.waiting.remove(&seq);
                found = Some(position);
            }
        }
        let position = found?;
        // In order, so this is near.
        let index = self
            .passed
            .partition_point(|passed| passed.position < position);
        if let Some(passed) = self.passed.get_mut(index) {
            passed.done = true;
        }
        match self.ring.peek(position)? {
            (Peeked::Record(record), _) => Copied::decode(record),
            _ => None,
        }
    }

    /// Goes over one record: its number, if it is there yet. `None` at the end.
    fn pass(&mut self) -> Option<Option<u64>> {
        let (peeked, next) = self.ring.peek(self.position)?;
        let seq = match peeked {
            Peeked::Record(record) => long(record, core::mem::offset_of!(abi::Copied, seq)),
            Peeked::Busy | Peeked::Discarded => None,
        };
        self.has_busy |= matches!(peeked, Peeked::Busy);
        self.passed.push_back(Passed {
            position: self.position,
            seq,
            turn: self.turn,
            done: matches!(peeked, Peeked::Discarded),
        });
        if let Some(seq) = seq {
            self.waiting.insert(seq, self.position);
        }
        self.position = next;
        Some(seq)
    }

    /// Sees whether those are finished now that were being written.
    fn look_again(&mut self) {
        self.has_busy = false;
        for passed in &mut self.passed {
            if passed.seq.is_some() || passed.done {
                continue;
            }
            match self.ring.peek(passed.position) {
                Some((Peeked::Record(record), _)) => {
                    passed.seq = long(record, core::mem::offset_of!(abi::Copied, seq));
                    match passed.seq {
                        Some(seq) => {
                            self.waiting.insert(seq, passed.position);
                        }
                        // Shorter than a number: no copy.
                        None => passed.done = true,
                    }
                }
                Some((Peeked::Busy, _)) => self.has_busy = true,
                Some((Peeked::Discarded, _)) | None => passed.done = true,
            }
        }
    }

    /// A turn of the reader is over; `is_empty`: it has read all records that there were.
    pub fn end_turn(&mut self, is_empty: bool) {
        self.turn += 1;
        if is_empty {
            // What belongs to no record would fill the ring for ever.
            while self.pass().is_some() {}
            self.look_again();
        }
        while let Some(first) = self.passed.front() {
            let is_old = first.seq.is_some() && first.turn + TURNS < self.turn;
            if !(first.done || is_old) {
                break;
            }
            if let Some(seq) = first.seq {
                self.waiting.remove(&seq);
            }
            self.passed.pop_front();
        }
        if self.ring.fill() > FILL {
            self.release();
        }
    }

    /// Gives back the space of those that are done with.
    pub fn release(&mut self) {
        let first = self.passed.front();
        self.ring
            .release(first.map_or(self.position, |first| first.position));
    }
}
