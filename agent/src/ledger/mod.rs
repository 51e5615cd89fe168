//! The books: which memory lives, whose it is, and what each call did to it.
//!
//! Invariants:
//! - a byte counts once: of the calls of one chain, the driver's row is the counted one, and the
//!   runtime's only where no driver call was seen under it;
//! - a failed allocation is a row and not memory; a failed free leaves its memory alive;
//! - a free goes to the device that allocated, whatever device is current;
//! - a free ends only an allocation that took effect before it;
//! - nothing is evicted: what lives stays in the books until it is freed or its process ends.

mod process;
mod rows;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::host::clock::WallClock;
use crate::host::identity::{Host, StartTime};
use crate::host::procfs::Program;
use crate::probes::TracedCall;
use crate::probes::hooks::{Address, Effect, Layer, MemoryKind};
use crate::probes::order::Ordered;
use crate::spool::rows::AllocRow;
pub use process::Process;
use rows::{call_row, implicit_free, implicit_frees};

/// Memory that lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    pub seq: u64,
    pub bytes: u64,
    pub effect_ns: u64,
    pub device: Option<i32>,
    pub gpu_uuid: Option<String>,
    pub layer_is_driver: bool,
    pub counted: bool,
    pub stack_id: Option<i64>,
    /// Context it was allocated in, if known.
    pub context: Option<u64>,
}

/// Addresses of different kinds are different books: a registered range may lie where pinned
/// memory was, and a free names its kind by the function called.
pub type Key = (MemoryKind, u64);

/// What changed, for the journal. Applying all changes in order rebuilds the books.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Change {
    Started(Box<Process>),
    Context {
        pid: u32,
        context: u64,
        device: i32,
    },
    Born {
        pid: u32,
        key: Key,
        allocation: Allocation,
    },
    Gone {
        pid: u32,
        key: Key,
    },
    Exiting {
        pid: u32,
        seq: u64,
        at_ns: u64,
    },
    Replaced {
        pid: u32,
    },
    Ended {
        pid: u32,
    },
}

/// What the caller knows of a call that the books do not.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stack {
    pub id: Option<i64>,
    pub quality: Option<&'static str>,
}

/// The books of one host.
pub struct Ledger {
    host: Host,
    processes: HashMap<u32, Process>,
    changes: Vec<Change>,
}

/// A process whose memory went away with it.
#[derive(Debug)]
pub struct Ended {
    pub process: Process,
    pub rows: Vec<AllocRow>,
}

impl Ledger {
    pub fn new(host: Host) -> Self {
        Self {
            host,
            processes: HashMap::new(),
            changes: Vec::new(),
        }
    }

    /// Rebuilds the books from a journal.
    pub fn restore(&mut self, change: Change) {
        let live = |processes: &mut HashMap<u32, Process>,
                    pid: u32,
                    edit: &mut dyn FnMut(&mut Process)| {
            if let Some(process) = processes.get_mut(&pid) {
                edit(process);
            }
        };
        match change {
            Change::Started(process) => {
                self.processes.insert(process.pid, *process);
            }
            Change::Context {
                pid,
                context,
                device,
            } => live(&mut self.processes, pid, &mut |p| {
                p.contexts.insert(context, device);
            }),
            Change::Born {
                pid,
                key,
                allocation,
            } => live(&mut self.processes, pid, &mut |p| {
                p.live.insert(key, allocation.clone());
            }),
            Change::Gone { pid, key } => live(&mut self.processes, pid, &mut |p| {
                p.live.remove(&key);
            }),
            Change::Exiting { pid, seq, at_ns } => {
                live(&mut self.processes, pid, &mut |p| {
                    p.exiting = Some((seq, at_ns))
                });
            }
            Change::Replaced { pid } => {
                live(&mut self.processes, pid, &mut Process::forget_program)
            }
            Change::Ended { pid } => {
                self.processes.remove(&pid);
            }
        }
    }

    /// Everything as changes that rebuild it from nothing.
    pub fn snapshot(&self) -> Vec<Change> {
        self.processes
            .values()
            .map(|process| Change::Started(Box::new(process.clone())))
            .collect()
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

    /// Books one call; gives its row and, for a reused address, the row of the free that was
    /// never seen. `None` for calls that are no allocation calls.
    pub fn apply(
        &mut self,
        ordered: &Ordered,
        call: &TracedCall,
        stack: Stack,
        clock: &WallClock,
        card: &dyn Fn(&Process, Option<i32>) -> Option<String>,
    ) -> Vec<AllocRow> {
        let hook = call.hook();
        match hook.effect {
            Effect::Alloc {
                kind,
                address,
                size_arg,
            } => {
                let address = match address {
                    Address::Out(_) => call.out,
                    Address::Arg(arg) => Some(call.args[arg as usize]),
                };
                let requested = call.args[size_arg as usize];
                self.allocate(ordered, call, stack, clock, card, kind, address, requested)
            }
            Effect::Free { kind, address_arg } => {
                let address = call.args[address_arg as usize];
                // Freeing a null pointer is documented to do nothing (`cudaFree(0)` is how
                // programs start the runtime).
                if address == 0 && call.result == 0 {
                    return Vec::new();
                }
                vec![self.free(ordered, call, stack, clock, card, (kind, address))]
            }
            Effect::ContextOfDevice { device_arg, .. } => {
                if let (0, Some(context)) = (call.result, call.out) {
                    let device = call.args[device_arg as usize] as i32;
                    let process = self.meet(call.tgid, call.enter_ns, None);
                    process.contexts.insert(context, device);
                    self.changes.push(Change::Context {
                        pid: call.tgid,
                        context,
                        device,
                    });
                }
                Vec::new()
            }
            Effect::EndContext if call.result == 0 => self.end_context(call, clock),
            Effect::EndContext | Effect::SetContext | Effect::SetDevice | Effect::ForgetContext => {
                Vec::new()
            }
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one call with all that is known of it"
    )]
    fn allocate(
        &mut self,
        ordered: &Ordered,
        call: &TracedCall,
        stack: Stack,
        clock: &WallClock,
        card: &dyn Fn(&Process, Option<i32>) -> Option<String>,
        kind: MemoryKind,
        address: Option<u64>,
        requested: u64,
    ) -> Vec<AllocRow> {
        let process = self.meet(call.tgid, call.enter_ns, None);
        let succeeded = call.result == 0;
        let device = device_of(process, ordered, call);
        let gpu_uuid = card(process, device);
        let mut row = call_row(process, call, ordered, stack, clock);
        row.op = kind.alloc_op();
        row.memory_kind = Some(kind.name());
        row.device = device;
        row.gpu_uuid.clone_from(&gpu_uuid);
        row.requested_bytes = Some(requested as i64);
        row.bytes = Some(if succeeded { requested as i64 } else { 0 });
        // A zero-sized allocation succeeds and gives no memory.
        let address = address.filter(|address| *address != 0 && succeeded);
        row.address = address.map(|address| address as i64);
        row.counted = succeeded && !ordered.nested_success && requested > 0;
        let Some(address) = address.filter(|_| row.counted) else {
            return vec![row];
        };

        let key = (kind, address);
        let allocation = Allocation {
            seq: call.seq,
            bytes: requested,
            effect_ns: call.effect_ns(),
            device,
            gpu_uuid,
            layer_is_driver: call.hook().layer == Layer::Driver,
            counted: true,
            stack_id: stack.id,
            context: ordered.context,
        };
        let mut rows = Vec::with_capacity(2);
        // Memory cannot be given out twice: the free of what was here has not been seen.
        if let Some(old) = process.live.insert(key, allocation.clone()) {
            let mut freed = implicit_free(
                process,
                key,
                &old,
                "address_reuse",
                call.seq,
                call.effect_ns(),
                clock,
            );
            freed.seq = row.seq;
            rows.push(freed);
        }
        self.changes.push(Change::Born {
            pid: call.tgid,
            key,
            allocation,
        });
        rows.push(row);
        rows
    }

    fn free(
        &mut self,
        ordered: &Ordered,
        call: &TracedCall,
        stack: Stack,
        clock: &WallClock,
        card: &dyn Fn(&Process, Option<i32>) -> Option<String>,
        key: Key,
    ) -> AllocRow {
        let process = self.meet(call.tgid, call.enter_ns, None);
        let (kind, address) = key;
        let mut row = call_row(process, call, ordered, stack, clock);
        row.op = kind.free_op();
        row.address = Some(address as i64);
        row.memory_kind = Some(kind.name());
        let succeeded = call.result == 0;
        // An allocation that took effect later reuses the address: it is not this free's.
        let live = process
            .live
            .get(&key)
            .filter(|allocation| allocation.seq < call.seq)
            .cloned();
        // The enclosing call's row comes first and shows the same allocation, but the nested
        // call is the one that ends it.
        let ends = succeeded && !ordered.nested_success;
        match live {
            Some(allocation) => {
                row.device = allocation.device;
                row.gpu_uuid.clone_from(&allocation.gpu_uuid);
                row.alloc_seq = Some(allocation.seq as i64);
                row.alloc_stack_id = allocation.stack_id;
                if succeeded {
                    row.bytes = Some(allocation.bytes as i64);
                    row.lifetime_ns =
                        Some(call.effect_ns().saturating_sub(allocation.effect_ns) as i64);
                } else {
                    row.bytes = Some(0);
                }
                row.counted = ends && allocation.counted;
                if ends {
                    process.live.remove(&key);
                    self.changes.push(Change::Gone {
                        pid: call.tgid,
                        key,
                    });
                }
            }
            None => {
                let device = device_of(process, ordered, call);
                row.gpu_uuid = card(process, device);
                row.device = device;
                if !succeeded {
                    row.bytes = Some(0);
                }
            }
        }
        row
    }

    /// A context is gone, and what was allocated in it. Registered memory is the program's own.
    fn end_context(&mut self, call: &TracedCall, clock: &WallClock) -> Vec<AllocRow> {
        let context = call.args[0];
        let Some(process) = self.processes.get_mut(&call.tgid) else {
            return Vec::new();
        };
        process.last_seq = process.last_seq.max(call.seq);
        let mut ended: Vec<(Key, Allocation)> = process
            .live
            .iter()
            .filter(|((kind, _), allocation)| {
                allocation.context == Some(context)
                    && allocation.seq < call.seq
                    && *kind != MemoryKind::RegisteredHost
            })
            .map(|(key, allocation)| (*key, allocation.clone()))
            .collect();
        ended.sort_unstable_by_key(|(_, allocation)| allocation.seq);
        let mut rows = Vec::with_capacity(ended.len());
        for (key, allocation) in ended {
            process.live.remove(&key);
            self.changes.push(Change::Gone {
                pid: call.tgid,
                key,
            });
            let api = call.hook().symbol;
            rows.push(implicit_free(
                process,
                key,
                &allocation,
                api,
                call.seq,
                call.effect_ns(),
                clock,
            ));
        }
        rows
    }

    /// A process is going: its memory is gone once its last thread is.
    pub fn exiting(&mut self, pid: u32, seq: u64, at_ns: u64) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.exiting = Some((seq, at_ns));
            self.changes.push(Change::Exiting { pid, seq, at_ns });
        }
    }

    /// A process runs another program now: what it had is gone.
    pub fn replaced(&mut self, pid: u32, seq: u64, at_ns: u64, clock: &WallClock) -> Vec<AllocRow> {
        let Some(process) = self.processes.get_mut(&pid) else {
            return Vec::new();
        };
        let rows = implicit_frees(process, "process_exec", seq, at_ns, clock);
        process.forget_program();
        self.changes.push(Change::Replaced { pid });
        rows
    }

    /// Takes a process that is gone out of the books.
    pub fn end(&mut self, pid: u32, seq: u64, now_ns: u64, clock: &WallClock) -> Option<Ended> {
        let mut process = self.processes.remove(&pid)?;
        self.changes.push(Change::Ended { pid });
        let (seq, at_ns) = process.exiting.unwrap_or((seq, now_ns));
        process.exiting = Some((seq, at_ns));
        let rows = implicit_frees(&mut process, "process_exit", seq, at_ns, clock);
        Some(Ended { process, rows })
    }
}

/// Driver calls work on the current context; runtime calls on the device the thread chose, and
/// where it never chose one, on that of the context the runtime made current.
fn device_of(process: &Process, ordered: &Ordered, call: &TracedCall) -> Option<i32> {
    let of_context = ordered
        .context
        .and_then(|context| process.contexts.get(&context).copied());
    match call.hook().layer {
        Layer::Driver => of_context.or(call.device),
        Layer::Runtime => call.device.or(of_context),
    }
}

#[cfg(test)]
mod tests;
