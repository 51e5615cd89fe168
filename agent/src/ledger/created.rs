//! Memory without an address (cuMemCreate) and addresses that show it.

use super::booking::device_of;
use super::change::What;
use super::rows::call_row;
use super::vmm::{Mapping, VmmChange};
use super::{Desk, Ledger, Turn};
use crate::probes::hooks::{Effect, MemoryKind, Space};

/// CU_MEM_LOCATION_TYPE_DEVICE; the other types are places in main memory.
const LOCATION_DEVICE: u64 = 1;

/// The device of a location in a structure's second word: type and id.
pub(super) fn location(word: u64) -> (bool, i32) {
    (word & 0xffff_ffff == LOCATION_DEVICE, (word >> 32) as i32)
}

impl Ledger {
    /// handle out, size, properties.
    pub(super) fn create(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let process = &self.processes[&call.tgid];
        let location = call.extra.map(|extra| location(extra[1]));
        let (kind, device) = match location {
            Some((true, device)) => (MemoryKind::VmmPhysical, Some(device)),
            Some((false, _)) => (MemoryKind::PinnedHost, None),
            None => (MemoryKind::VmmPhysical, None),
        };
        let mut row = call_row(process, turn, desk.clock);
        row.op = kind.alloc_op();
        row.memory_kind = Some(kind.name());
        row.device = device;
        row.gpu_uuid = (desk.card)(process, device);
        row.requested_bytes = Some(call.args[1] as i64);
        let handle = call.out.filter(|_| turn.succeeded());
        row.address = handle.map(|handle| handle as i64);
        // Memory cannot have a handle that other memory has: that one's release was not seen.
        if let Some(handle) = handle
            && let Some(ended) = self.processes[&call.tgid].vmm.release_ends(handle)
        {
            let key = (Space::Physical, ended);
            let at_ns = call.effect_ns();
            self.end_implicitly(call.tgid, key, "address_reuse", call.seq, at_ns, desk);
        }
        let key = (Space::Physical, handle.map(|_| call.seq));
        self.begin(turn, key, kind, Some(call.args[1]), None, row, desk);
        if let Some(handle) = handle {
            // Not entered in the books if there was no room, but its handle is known.
            let memory = call.seq;
            self.commit(call.tgid, What::Vmm(VmmChange::Released { handle }));
            self.commit(call.tgid, What::Vmm(VmmChange::Created { handle, memory }));
        }
    }

    /// handle out, an address where it is mapped.
    pub(super) fn retain(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let process = &self.processes[&call.tgid];
        let memory = process.vmm.memory_at(call.args[1]);
        let mut row = call_row(process, turn, desk.clock);
        row.op = "alloc";
        row.memory_kind = Some(MemoryKind::VmmPhysical.name());
        row.address = call.out.map(|handle| handle as i64);
        row.bytes = Some(0);
        row.device = memory
            .and_then(|memory| process.live.get(&(Space::Physical, memory)))
            .and_then(|allocation| allocation.device());
        let device = row.device;
        row.gpu_uuid = (desk.card)(process, device);
        desk.rows.push(row);
        if !turn.succeeded() {
            self.count_failure(turn, MemoryKind::VmmPhysical, device, true);
        } else if let (Some(handle), Some(memory)) = (call.out, memory) {
            self.commit(call.tgid, What::Vmm(VmmChange::Retained { handle, memory }));
        }
    }

    /// handle out. The bytes are the exporter's, and how many is not told.
    pub(super) fn import(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let process = &self.processes[&call.tgid];
        let mut row = call_row(process, turn, desk.clock);
        row.op = "alloc";
        row.memory_kind = Some(MemoryKind::VmmPhysical.name());
        row.address = call.out.map(|handle| handle as i64);
        row.bytes = if turn.succeeded() { None } else { Some(0) };
        let known = call.out.and_then(|handle| process.vmm.memory(handle));
        desk.rows.push(row);
        if !turn.succeeded() {
            self.count_failure(turn, MemoryKind::VmmPhysical, None, true);
        } else if let Some(handle) = call.out {
            let change = match known {
                // What this process exported itself may come back under the handle it has.
                Some(memory) => VmmChange::Retained { handle, memory },
                None => VmmChange::Created {
                    handle,
                    memory: call.seq,
                },
            };
            self.commit(call.tgid, What::Vmm(change));
        }
    }

    /// handle.
    pub(super) fn release(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let handle = call.args[0];
        let process = &self.processes[&call.tgid];
        let mut row = call_row(process, turn, desk.clock);
        row.op = "free";
        row.memory_kind = Some(MemoryKind::VmmPhysical.name());
        row.address = Some(handle as i64);
        let memory = process.vmm.memory(handle);
        let ended = process.vmm.release_ends(handle);
        let is_entered = |memory: &u64| process.live.contains_key(&(Space::Physical, *memory));
        match ended.filter(is_entered) {
            Some(ended) if turn.succeeded() => {
                let kind = MemoryKind::VmmPhysical;
                self.finish(turn, (Space::Physical, ended), kind, row, desk);
            }
            _ => {
                // Only a reference ends, or memory whose creation was not seen.
                row.device = memory
                    .and_then(|memory| process.live.get(&(Space::Physical, memory)))
                    .and_then(|allocation| allocation.device());
                let device = row.device;
                row.gpu_uuid = (desk.card)(process, device);
                let knows = !turn.succeeded() || (memory.is_some() && ended.is_none());
                row.bytes = knows.then_some(0);
                desk.rows.push(row);
                if !turn.succeeded() {
                    self.count_failure(turn, MemoryKind::VmmPhysical, device, false);
                }
            }
        }
        if turn.succeeded() {
            self.commit(call.tgid, What::Vmm(VmmChange::Released { handle }));
        }
    }

    /// address, size, offset, handle.
    pub(super) fn map(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let [address, bytes, _, handle, ..] = call.args;
        let process = &self.processes[&call.tgid];
        let memory = process.vmm.memory(handle);
        let mut row = call_row(process, turn, desk.clock);
        row.op = "map";
        row.memory_kind = Some(MemoryKind::VmmMapped.name());
        row.requested_bytes = Some(bytes as i64);
        row.address = Some(address as i64);
        row.device = memory
            .and_then(|memory| process.live.get(&(Space::Physical, memory)))
            .and_then(|allocation| allocation.device());
        row.gpu_uuid = (desk.card)(process, row.device);
        let key = (Space::Mapped, Some(address));
        let kind = MemoryKind::VmmMapped;
        self.begin(turn, key, kind, Some(bytes), None, row, desk);
        if turn.succeeded() {
            let mapping = Mapping { bytes, memory };
            self.commit(call.tgid, What::Vmm(VmmChange::Mapped { address, mapping }));
        }
    }

    /// address, size: ends every mapping in the range, and the memory that nothing uses then.
    pub(super) fn unmap(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let [address, bytes, ..] = call.args;
        let process = &self.processes[&call.tgid];
        let kind = MemoryKind::VmmMapped;
        let mut row = call_row(process, turn, desk.clock);
        row.op = kind.free_op();
        row.memory_kind = Some(kind.name());
        row.address = Some(address as i64);
        row.requested_bytes = Some(bytes as i64);
        let ended = if turn.succeeded() {
            process.vmm.mapped_in(address, bytes)
        } else {
            Vec::new()
        };
        self.finish(turn, (Space::Mapped, address), kind, row, desk);
        let (pid, at_ns) = (call.tgid, call.effect_ns());
        let api = call.hook().symbol;
        for (start, mapping) in ended {
            let key = (Space::Mapped, start);
            self.gives_back(pid, call.tid, start, mapping.bytes);
            self.end_implicitly(pid, key, api, call.seq, at_ns, desk);
            self.commit(pid, What::Vmm(VmmChange::Unmapped { address: start }));
            if let Some(memory) = mapping.memory
                && self.processes[&pid].vmm.is_unused(memory)
            {
                let key = (Space::Physical, memory);
                self.end_implicitly(pid, key, api, call.seq, at_ns, desk);
            }
        }
    }

    /// Another process's memory at an address of this one, and the end of that. No byte of it
    /// counts here.
    pub(super) fn foreign(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let opens = call.hook().effect == Effect::OpenIpc;
        let process = &self.processes[&call.tgid];
        let kind = MemoryKind::Ipc;
        let mut row = call_row(process, turn, desk.clock);
        row.op = if opens {
            kind.alloc_op()
        } else {
            kind.free_op()
        };
        row.memory_kind = Some(kind.name());
        let address = if opens { call.out } else { Some(call.args[0]) };
        row.address = address.map(|address| address as i64);
        row.bytes = if turn.succeeded() { None } else { Some(0) };
        let device = device_of(process, turn.ordered, call);
        row.device = device;
        row.gpu_uuid = (desk.card)(process, device);
        desk.rows.push(row);
        if !turn.succeeded() {
            self.count_failure(turn, kind, device, opens);
        }
    }
}
