//! Allocations and frees.

use super::change::What;
use super::rows::{call_row, implicit_free};
use super::{Allocation, Desk, Key, Ledger, Process, Turn};
use crate::probes::TracedCall;
use crate::probes::hooks::{Address, Alloc, Layer, MemoryKind, Space};
use crate::probes::order::Ordered;
use crate::spool::rows::AllocRow;

impl Ledger {
    pub(super) fn allocate(&mut self, turn: Turn<'_>, alloc: Alloc, desk: &mut Desk<'_>) {
        let call = turn.call;
        let hook = call.hook();
        let address = match alloc.address {
            Address::Out(_) => call.out,
            Address::Arg(arg) => Some(call.args[arg as usize]),
        };
        let measured = alloc.size.measure(&call.args, call.extra, hook.narrow);
        let pool = alloc.pool_arg.map(|arg| call.args[arg as usize]);
        let process = &self.processes[&call.tgid];
        let device = match alloc.kind {
            // Addresses belong to the process, not to a card.
            MemoryKind::VmmVirtual => None,
            _ => pool
                .and_then(|pool| process.pools.get(&pool)?.device)
                .or_else(|| device_of(process, turn.ordered, call)),
        };
        let mut row = call_row(process, turn, desk.clock);
        row.op = alloc.kind.alloc_op();
        row.memory_kind = Some(alloc.kind.name());
        row.device = device;
        row.gpu_uuid = (desk.card)(process, device);
        row.stream = alloc.stream_arg.map(|arg| call.args[arg as usize] as i64);
        row.pool = pool.map(|pool| pool as i64);
        row.requested_bytes = measured.requested.map(|bytes| bytes as i64);
        let owner = if alloc.kind == MemoryKind::Pool {
            pool
        } else {
            turn.ordered.context
        };
        let address = address.map(|address| hook.address(address));
        self.begin(
            turn,
            (alloc.space, address),
            alloc.kind,
            measured.given,
            owner,
            row,
            desk,
        );
    }

    /// Enters new memory and writes its row.
    #[expect(clippy::too_many_arguments, reason = "all that is known of new memory")]
    pub(super) fn begin(
        &mut self,
        turn: Turn<'_>,
        (space, address): (Space, Option<u64>),
        kind: MemoryKind,
        bytes: Option<u64>,
        owner: Option<u64>,
        mut row: AllocRow,
        desk: &mut Desk<'_>,
    ) {
        let call = turn.call;
        if !turn.succeeded() {
            row.bytes = Some(0);
            self.count_failure(turn, kind, row.device, true);
            desk.rows.push(row);
            return;
        }
        // A zero-sized allocation succeeds and gives no memory.
        let address = address.filter(|address| *address != 0);
        row.address = row.address.or(address.map(|address| address as i64));
        row.bytes = bytes.map(|bytes| bytes as i64);
        let (Some(address), Some(bytes @ 1..), true) = (address, bytes, turn.stands_for_chain())
        else {
            desk.rows.push(row);
            return;
        };
        let key = (space, address);
        let here = self.processes[&call.tgid].live.get(&key).copied();
        // What the driver gave out at this address while this call of the runtime lasted is what
        // the call gives: its own nested call, which could not be waited for any longer.
        let during = call.enter_ns..=call.exit_ns;
        if here.is_some_and(|a| a.is_driver && !turn.is_driver() && during.contains(&a.effect_ns)) {
            desk.rows.push(row);
            return;
        }
        // Memory cannot be given out twice: the free of what was here has not been seen.
        if here.is_some() {
            self.end_implicitly(
                call.tgid,
                key,
                "address_reuse",
                call.seq,
                call.effect_ns(),
                desk,
            );
        }
        if self.live >= self.limit {
            self.live_full += 1;
            desk.rows.push(row);
            return;
        }
        let owner = owner.map_or(0, |owner| self.owner(call.tgid, owner));
        let stack = turn.ordered.stack.id;
        let allocation = Allocation {
            seq: call.seq,
            effect_ns: call.effect_ns(),
            owner,
            ..Allocation::new(kind, bytes, row.device, turn.is_driver(), stack)
        };
        row.counted = true;
        desk.rows.push(row);
        self.commit(call.tgid, What::Born { key, allocation });
    }

    pub(super) fn free(
        &mut self,
        turn: Turn<'_>,
        space: Space,
        stream_arg: Option<u8>,
        desk: &mut Desk<'_>,
    ) {
        let call = turn.call;
        let address = call.hook().address(call.args[0]);
        // Freeing a null pointer is documented to do nothing (`cudaFree(0)` is how programs
        // start the runtime).
        if address == 0 && turn.succeeded() {
            return;
        }
        let process = &self.processes[&call.tgid];
        let mut row = call_row(process, turn, desk.clock);
        row.address = Some(address as i64);
        row.stream = stream_arg.map(|arg| call.args[arg as usize] as i64);
        let kind = space.kind().unwrap_or(MemoryKind::Device);
        row.op = kind.free_op();
        row.memory_kind = space.kind().map(MemoryKind::name);
        self.finish(turn, (space, address), kind, row, desk);
    }

    /// Ends memory and writes the row of the call that does.
    pub(super) fn finish(
        &mut self,
        turn: Turn<'_>,
        key: Key,
        kind: MemoryKind,
        mut row: AllocRow,
        desk: &mut Desk<'_>,
    ) {
        let call = turn.call;
        let process = &self.processes[&call.tgid];
        // An allocation that took effect later reuses the address: it is not this free's.
        let live = process
            .live
            .get(&key)
            .filter(|allocation| allocation.seq < call.seq)
            .copied();
        // The enclosing call's row comes first and shows the same allocation, but the nested
        // call is the one that ends it.
        let ends = turn.succeeded() && turn.stands_for_chain();
        match live {
            Some(allocation) => {
                row.op = allocation.kind.free_op();
                row.memory_kind = Some(allocation.kind.name());
                row.device = allocation.device();
                row.alloc_seq = Some(allocation.seq as i64);
                row.alloc_stack_id = allocation.stack_id();
                if allocation.kind == MemoryKind::Pool {
                    row.pool = process.owner_at(allocation.owner).map(|pool| pool as i64);
                }
                if turn.succeeded() {
                    row.bytes = Some(allocation.bytes as i64);
                    row.lifetime_ns =
                        Some(call.effect_ns().saturating_sub(allocation.effect_ns) as i64);
                }
                row.counted = ends;
            }
            None => row.device = device_of(process, turn.ordered, call),
        }
        row.gpu_uuid = (desk.card)(process, row.device);
        if !turn.succeeded() {
            row.bytes = Some(0);
        }
        let device = row.device;
        desk.rows.push(row);
        if !turn.succeeded() {
            let kind = live.map_or(kind, |allocation| allocation.kind);
            self.count_failure(turn, kind, device, false);
        } else if ends && let Some(allocation) = live {
            self.end_blocks_in(
                call.tgid,
                key,
                allocation.bytes,
                (call.hook().symbol, call.seq, call.effect_ns()),
                desk,
            );
            if key.0 == Space::Device {
                self.gives_back(call.tgid, call.tid, key.1, allocation.bytes);
            }
            self.commit(call.tgid, What::Gone { key });
        }
    }

    /// Ends memory that no call named.
    pub(super) fn end_implicitly(
        &mut self,
        pid: u32,
        key: Key,
        api: &'static str,
        seq: u64,
        at_ns: u64,
        desk: &mut Desk<'_>,
    ) {
        let process = &self.processes[&pid];
        let Some(allocation) = process.live.get(&key) else {
            return;
        };
        let row = implicit_free(process, key, allocation, api, seq, at_ns, desk);
        let bytes = allocation.bytes;
        self.end_blocks_in(pid, key, bytes, (api, seq, at_ns), desk);
        desk.rows.push(row);
        self.commit(pid, What::Gone { key });
    }

    /// A chain failed; counted where it began, for the device of its row.
    pub(super) fn count_failure(
        &mut self,
        turn: Turn<'_>,
        kind: MemoryKind,
        device: Option<i32>,
        begins: bool,
    ) {
        if !turn.is_outermost() {
            return;
        }
        let pid = turn.call.tgid;
        let place = super::Place {
            device,
            kind,
            layer: turn.call.hook().layer,
        };
        self.commit(pid, What::Failed { place, begins });
        if begins && matches!(kind, MemoryKind::Device | MemoryKind::VmmPhysical) {
            self.had_none(pid, turn.call.tid);
        }
    }

    /// The position of a context or pool in the process's list.
    fn owner(&mut self, pid: u32, name: u64) -> u32 {
        if let Some(at) = self.processes[&pid].owner(name) {
            return at;
        }
        self.commit(pid, What::Owner { name });
        self.processes[&pid].owners.len() as u32
    }
}

/// Driver calls work on the current context; runtime calls on the device the thread chose, and
/// where it never chose one, on that of the context the runtime made current.
pub(super) fn device_of(process: &Process, ordered: &Ordered, call: &TracedCall) -> Option<i32> {
    let of_context = ordered
        .context
        .and_then(|context| process.contexts.get(&context).copied());
    match call.hook().layer {
        Layer::Driver => of_context.or(call.device),
        // A framework says itself which device it means.
        Layer::Runtime | Layer::Framework => call.device.or(of_context),
    }
}
