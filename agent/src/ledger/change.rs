//! What changed in the books, for the journal. The books change through this file alone: what
//! is applied while events are booked is what a restart applies again.

use serde::{Deserialize, Serialize};

use super::framework::{Attempt, Heap, HeapChange};
use super::process::{Pool, Primary};
use super::rollup::Place;
use super::vmm::VmmChange;
use super::{Allocation, Key, Process};
use crate::Map;

/// One change of one process's books, or of who is in them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Change {
    Started(Box<Process>),
    Of {
        pid: u32,
        what: What,
    },
    Ended {
        pid: u32,
    },
    /// A window of the roll-ups is over.
    WindowEnded,
}

/// One change of one process's books.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum What {
    Context { context: u64, device: i32 },
    ContextEnded { context: u64 },
    Primary { device: i32, primary: Primary },
    Pool { pool: u64, is: Pool },
    PoolEnded { pool: u64 },
    Owner { name: u64 },
    Born { key: Key, allocation: Allocation },
    Gone { key: Key },
    Vmm(VmmChange),
    Failed { place: Place, begins: bool },
    Heap(HeapChange),
    Attempt { tid: u32, attempt: Option<Attempt> },
    Baseline { gpu_uuid: String },
    Exiting { seq: u64, at_ns: u64 },
    Replaced,
}

/// Applies one change.
pub fn apply(processes: &mut Map<u32, Process>, change: &Change) {
    match change {
        Change::Started(process) => {
            processes.insert(process.pid, (**process).clone());
        }
        Change::Of { pid, what } => {
            if let Some(process) = processes.get_mut(pid) {
                process.apply(what);
            }
        }
        Change::Ended { pid } => {
            processes.remove(pid);
        }
        Change::WindowEnded => {
            for process in processes.values_mut() {
                process.rollup.next_window();
            }
        }
    }
}

impl Process {
    /// Applies one change.
    pub(super) fn apply(&mut self, what: &What) {
        match what {
            What::Context { context, device } => {
                self.contexts.insert(*context, *device);
            }
            What::ContextEnded { context } => {
                self.contexts.remove(context);
            }
            What::Primary { device, primary } => {
                self.primaries.insert(*device, *primary);
            }
            What::Pool { pool, is } => {
                self.pools.insert(*pool, *is);
            }
            What::PoolEnded { pool } => {
                self.pools.remove(pool);
            }
            What::Owner { name } => self.owners.push(*name),
            What::Born { key, allocation } => {
                // A restart must not put the end of a process before what it allocated.
                self.last_seq = self.last_seq.max(allocation.seq);
                self.rollup.born(allocation);
                self.live.insert(*key, *allocation);
                if let Some(heap) = &mut self.heap {
                    heap.memory_born(*key, allocation);
                }
            }
            What::Gone { key } => {
                if let Some(allocation) = self.live.swap_remove(key) {
                    self.rollup.gone(&allocation);
                }
                if let Some(heap) = &mut self.heap {
                    heap.memory_gone(*key);
                }
            }
            What::Vmm(change) => {
                if let Some(heap) = &mut self.heap {
                    heap.follow(&self.vmm, *change);
                }
                self.vmm.apply(*change);
            }
            What::Heap(change) => self.apply_to_heap(*change),
            What::Attempt { tid, attempt } => match attempt {
                Some(attempt) => {
                    self.attempts.insert(*tid, *attempt);
                }
                None => {
                    self.attempts.remove(tid);
                }
            },
            What::Failed { place, begins } => self.rollup.failed(*place, *begins),
            What::Baseline { gpu_uuid } => {
                self.baseline.insert(gpu_uuid.clone());
            }
            What::Exiting { seq, at_ns } => self.exiting = Some((*seq, *at_ns)),
            What::Replaced => self.forget_program(),
        }
    }

    fn apply_to_heap(&mut self, change: HeapChange) {
        if self.heap.is_none() {
            self.heap = Some(Box::new(Heap::of(self)));
        }
        let Some(heap) = &mut self.heap else { return };
        match change {
            HeapChange::Born { block, .. } => {
                self.last_seq = self.last_seq.max(block.seq);
                self.rollup
                    .add(block.place(), block.stack_id(), block.bytes);
            }
            HeapChange::Gone { address } => {
                if let Some(block) = heap.blocks().get(&address) {
                    self.rollup
                        .take(block.place(), block.stack_id(), block.bytes);
                }
            }
            _ => {}
        }
        heap.apply(change);
    }
}
