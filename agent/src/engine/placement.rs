//! Where pinned and registered host memory lies, measured when it was just given.

use super::Engine;
use crate::host::{clock, numa};
use crate::probes::hooks::MemoryKind;
use crate::spool::rows::{AllocRow, HostBufferRow};

impl Engine {
    /// Measures host buffers among the rows from `before` on.
    pub(super) fn place_new(&mut self, before: usize) {
        let new = &self.rows.alloc_events[before..];
        let placed: Vec<HostBufferRow> = new.iter().filter_map(|row| self.place(row)).collect();
        self.rows.host_buffers.extend(placed);
    }

    fn place(&self, row: &AllocRow) -> Option<HostBufferRow> {
        let host_kinds = [
            MemoryKind::PinnedHost.name(),
            MemoryKind::RegisteredHost.name(),
        ];
        let kind = row.memory_kind.filter(|kind| host_kinds.contains(kind))?;
        let begins = row.counted && matches!(row.op, "alloc" | "register");
        let (address, bytes) = (row.address?, row.bytes.filter(|_| begins)?);
        // Gone already, or not to be asked: no row is better than a wrong one.
        let placement = numa::placement(row.pid, address as u64, bytes as u64)?;
        let gpu_node = row.gpu_uuid.as_deref().and_then(|uuid| {
            let card = self.cards.iter().find(|card| card.uuid == uuid)?;
            card.numa_node
        });
        let misplaced = placement
            .misplaced_bytes(gpu_node, bytes as u64)
            .map(|bytes| bytes as i64);
        Some(HostBufferRow {
            ts_ns: clock::realtime_ns() as i64,
            process_id: row.process_id,
            pid: row.pid,
            seq: row.seq,
            address,
            bytes,
            memory_kind: kind,
            placement,
            gpu_uuid: row.gpu_uuid.clone(),
            device: row.device,
            gpu_node,
            misplaced_bytes: misplaced,
            stack_id: row.stack_id,
        })
    }
}
