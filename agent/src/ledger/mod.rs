//! The books: which memory lives, whose it is, and what each call did to it.
//!
//! Invariants:
//! - a byte counts once: of the calls of one chain, the driver's row is the counted one, and the
//!   runtime's only where no driver call was seen under it;
//! - a failed allocation is a row and not memory; a failed free leaves its memory alive;
//! - a free goes to the device that allocated, whatever device is current;
//! - a free ends only an allocation that took effect before it;
//! - nothing is evicted: what lives stays in the books until it is freed or its process ends.
//!   Beyond the limit new memory is not entered, and counted as `live_full`;
//! - what is not known is not counted: memory of an unknown address or size is a row only.

mod baseline;
mod booking;
mod change;
mod contexts;
mod created;
pub mod framework;
mod pools;
mod process;
pub mod rollup;
mod rows;
mod vmm;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::Map;
use crate::host::clock::WallClock;
use crate::host::identity::{Host, StartTime};
use crate::host::procfs::Program;
use crate::probes::TracedCall;
use crate::probes::hooks::{Effect, Layer, MemoryKind, Space};
use crate::probes::order::Ordered;
use crate::spool::rows::AllocRow;
pub use change::Change;
use change::What;
pub use process::Process;
use rollup::Place;

/// Memory that lives: 40 bytes, since there may be millions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    pub seq: u64,
    pub bytes: u64,
    /// CLOCK_MONOTONIC nanoseconds.
    pub effect_ns: u64,
    /// 0 stands for none.
    stack: i64,
    /// Context it was allocated in, or pool it is a slice of; see `Process::owner_at`.
    pub owner: u32,
    /// `i16::MIN` stands for none.
    device: i16,
    pub kind: MemoryKind,
    pub is_driver: bool,
}

impl Allocation {
    /// Memory without a time, an order or an owner yet.
    pub fn new(
        kind: MemoryKind,
        bytes: u64,
        device: Option<i32>,
        is_driver: bool,
        stack_id: Option<i64>,
    ) -> Self {
        Self {
            seq: 0,
            bytes,
            effect_ns: 0,
            stack: stack_id.unwrap_or(0),
            owner: 0,
            device: device
                .and_then(|device| i16::try_from(device).ok())
                .unwrap_or(i16::MIN),
            kind,
            is_driver,
        }
    }

    pub fn stack_id(&self) -> Option<i64> {
        (self.stack != 0).then_some(self.stack)
    }

    pub fn device(&self) -> Option<i32> {
        (self.device != i16::MIN).then_some(i32::from(self.device))
    }

    pub fn layer(&self) -> Layer {
        if self.is_driver {
            Layer::Driver
        } else {
            Layer::Runtime
        }
    }

    /// Where roll-ups book it.
    pub fn place(&self) -> Place {
        Place {
            device: self.device(),
            kind: self.kind,
            layer: self.layer(),
        }
    }
}

/// What an address or handle names, space by space.
pub type Key = (Space, u64);

/// The card that a process means by a device.
pub type CardOf<'a> = dyn Fn(&Process, Option<i32>) -> Option<Arc<str>> + 'a;

/// What booking a call needs besides the books, and where its rows go.
pub struct Desk<'a> {
    pub clock: &'a WallClock,
    pub card: &'a CardOf<'a>,
    pub rows: &'a mut Vec<AllocRow>,
}

/// A call in its turn.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    pub ordered: &'a Ordered,
    pub call: &'a TracedCall,
}

impl Turn<'_> {
    fn succeeded(&self) -> bool {
        self.call.result == 0
    }

    /// Failures are counted once a chain, where it began.
    fn is_outermost(&self) -> bool {
        self.call.parent_enter_ns.is_none()
    }

    /// Whether this row stands for what its chain did.
    fn stands_for_chain(&self) -> bool {
        !self.ordered.nested_success
    }

    fn is_driver(&self) -> bool {
        self.call.hook().layer == Layer::Driver
    }
}

/// The books of one host.
pub struct Ledger {
    host: Host,
    processes: Map<u32, Process>,
    changes: Vec<Change>,
    /// Allocations alive in all processes.
    live: usize,
    limit: usize,
    /// Allocations that were not entered since there were too many.
    live_full: u64,
    /// Events booked without their stack, of processes that are gone.
    stacks_full: u64,
}

impl Ledger {
    /// `limit`: how many allocations may be alive in the books.
    pub fn new(host: Host, limit: usize) -> Self {
        Self {
            host,
            processes: Map::default(),
            changes: Vec::new(),
            live: 0,
            limit,
            live_full: 0,
            stacks_full: 0,
        }
    }

    /// Rebuilds the books from a journal, change by change.
    pub fn restore(&mut self, change: &Change) {
        change::apply(&mut self.processes, change);
    }

    /// The journal was read to its end.
    pub fn restored(&mut self) {
        self.live = self.processes.values().map(Process::live_count).sum();
    }

    /// Everything as changes that rebuild it from nothing.
    pub fn snapshot(&self) -> impl Iterator<Item = Change> {
        self.processes
            .values()
            .map(|process| Change::Started(Box::new(process.clone())))
    }

    /// Changes since the last call.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.processes.values()
    }

    /// The process of that pid, if it is in the books.
    pub fn get(&self, pid: u32) -> Option<&Process> {
        self.processes.get(&pid)
    }

    /// Allocations alive in all processes.
    pub fn live(&self) -> usize {
        self.live
    }

    /// Since the start: allocations not entered, and events booked without their stack, since
    /// there were too many.
    pub fn overflows(&self) -> (u64, u64) {
        let living: u64 = self.processes.values().map(|p| p.rollup.stacks_full).sum();
        (self.live_full, self.stacks_full + living)
    }

    /// The process of that pid; a new one is entered in the books. `seen` is what an earlier look
    /// at it told.
    pub fn meet(
        &mut self,
        pid: u32,
        at_ns: u64,
        seen: Option<(StartTime, Program)>,
    ) -> &mut Process {
        let host = &self.host;
        let changes = &mut self.changes;
        self.processes.entry(pid).or_insert_with(|| {
            let process = Process::discover(host, pid, at_ns, seen);
            changes.push(Change::Started(Box::new(process.clone())));
            process
        })
    }

    fn commit(&mut self, pid: u32, what: What) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let before = process.live_count();
        process.apply(&what);
        self.live = self.live + process.live_count() - before;
        self.changes.push(Change::Of { pid, what });
    }

    /// Books one call; its rows go to the desk. For a reused address that is also the row of the
    /// free that was never seen, and for a call that ends memory besides what it names, a row
    /// for each.
    pub fn apply(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let process = self.meet(call.tgid, call.enter_ns, None);
        process.last_seq = process.last_seq.max(call.seq);
        match call.hook().effect {
            Effect::Alloc(alloc) => self.allocate(turn, alloc, desk),
            Effect::Free { space, stream_arg } => self.free(turn, space, stream_arg, desk),
            Effect::Create => self.create(turn, desk),
            Effect::Retain => self.retain(turn, desk),
            Effect::Import => self.import(turn, desk),
            Effect::Release => self.release(turn, desk),
            Effect::Map => self.map(turn, desk),
            Effect::Unmap => self.unmap(turn, desk),
            Effect::OpenIpc | Effect::CloseIpc => self.foreign(turn, desk),
            Effect::CreatePool
            | Effect::DestroyPool
            | Effect::TrimPool
            | Effect::AskPool
            | Effect::NamePool => self.pool(turn, desk),
            Effect::ContextOfDevice { .. }
            | Effect::RetainPrimary
            | Effect::ReleasePrimary
            | Effect::ResetPrimary
            | Effect::ResetDevice
            | Effect::EndContext => self.context(turn, desk),
            Effect::AskMemory => self.asked_memory(turn),
            // Kept in the kernel.
            Effect::SetContext | Effect::PushContext | Effect::PopContext | Effect::SetDevice => {}
        }
    }

    /// A process is going: its memory is gone once its last thread is.
    pub fn exiting(&mut self, pid: u32, seq: u64, at_ns: u64) {
        self.commit(pid, What::Exiting { seq, at_ns });
    }

    /// A process runs another program now: what it had is gone.
    pub fn replaced(&mut self, pid: u32, seq: u64, at_ns: u64, desk: &mut Desk<'_>) {
        self.end_live(pid, "process_exec", seq, at_ns, usize::MAX, desk);
        self.commit(pid, What::Replaced);
    }

    /// Ends what lives in a process that is gone, at most `limit` allocations a call, since a
    /// process may leave millions. True once nothing lives.
    pub fn end_some(&mut self, pid: u32, now_ns: u64, limit: usize, desk: &mut Desk<'_>) -> bool {
        let Some(process) = self.processes.get(&pid) else {
            return true;
        };
        let (seq, at_ns) = process.exiting.unwrap_or((0, now_ns));
        self.end_live(pid, "process_exit", seq, at_ns, limit, desk)
    }

    /// Takes a process that is gone out of the books.
    pub fn end(&mut self, pid: u32, now_ns: u64) -> Option<Process> {
        let mut process = self.processes.remove(&pid)?;
        self.live -= process.live_count();
        self.stacks_full += process.rollup.stacks_full;
        process.exiting = process.exiting.or(Some((0, now_ns)));
        self.changes.push(Change::Ended { pid });
        Some(process)
    }

    /// A window of the roll-ups is over.
    pub fn next_window(&mut self) {
        let change = Change::WindowEnded;
        change::apply(&mut self.processes, &change);
        self.changes.push(change);
    }

    fn end_live(
        &mut self,
        pid: u32,
        api: &'static str,
        seq: u64,
        at_ns: u64,
        limit: usize,
        desk: &mut Desk<'_>,
    ) -> bool {
        let Some(process) = self.processes.get(&pid) else {
            return true;
        };
        // Calls that a last thread finished after its leader was gone come before.
        let seq = seq.max(process.last_seq);
        let blocks = self.end_blocks(pid, api, seq, at_ns, limit, desk);
        let limit = limit - blocks;
        let process = &self.processes[&pid];
        let mut ended: Vec<Key> = process.live.keys().rev().take(limit).copied().collect();
        ended.sort_unstable_by_key(|key| process.live[key].seq);
        for key in ended {
            self.end_implicitly(pid, key, api, seq, at_ns, desk);
        }
        self.processes[&pid].live_count() == 0
    }
}

#[cfg(test)]
mod tests;
