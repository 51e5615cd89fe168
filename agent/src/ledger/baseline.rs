//! What a process held before anybody looked, as NVML tells it.

use std::sync::Arc;

use super::change::What;
use super::rows::empty_row;
use super::{Desk, Ledger};
use crate::probes::hooks::Class;

impl Ledger {
    /// A process older than the probes uses `used` bytes of a card, says NVML. Written down once
    /// a card: the part that no call we saw explains, the context's own memory included. It
    /// counts for nothing, since nobody sees its frees.
    pub fn baseline(
        &mut self,
        pid: u32,
        card: &Arc<str>,
        used: u64,
        at_ns: i64,
        desk: &mut Desk<'_>,
    ) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        if process.baseline.contains(&**card) {
            return;
        }
        let seen: u64 = process
            .live
            .values()
            .filter(|allocation| {
                matches!(
                    allocation.kind.class(),
                    Class::Physical | Class::SubAllocated
                ) && (desk.card)(process, allocation.device()).as_ref() == Some(card)
            })
            .map(|allocation| allocation.bytes)
            .sum();
        let mut row = empty_row(process);
        row.ts_ns = at_ns;
        row.gpu_uuid = Some(Arc::clone(card));
        row.layer = "driver";
        row.source = "nvml";
        row.api = "baseline";
        row.op = "alloc";
        row.bytes = Some(used.saturating_sub(seen) as i64);
        row.implicit = true;
        row.seq = process.last_seq as i64;
        desk.rows.push(row);
        let gpu_uuid = card.to_string();
        self.commit(pid, What::Baseline { gpu_uuid });
    }
}
