//! Memory pools: which device they are on, and what the program learns of them.
//!
//! What a pool holds is shown by no call: slices in use are its lower bound, and what the program
//! itself asks for is what is known. A destroyed pool ends only in name: its slices live until
//! each is freed, as the interface documents.

use super::change::What;
use super::created::location;
use super::process::Pool;
use super::rows::call_row;
use super::{Desk, Ledger, Turn};
use crate::probes::hooks::{Effect, MemoryKind};

/// CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, the same number in both interfaces.
const RESERVED_CURRENT: u64 = 5;

impl Ledger {
    pub(super) fn pool(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        let process = &self.processes[&call.tgid];
        let what = match (call.hook().effect, call.out) {
            (Effect::CreatePool, Some(pool)) => {
                let location = call.extra.map(|extra| location(extra[1]));
                let device = location.and_then(|(is_device, id)| is_device.then_some(id));
                let is = Pool {
                    device,
                    reserved_bytes: None,
                };
                What::Pool { pool, is }
            }
            (Effect::NamePool, Some(pool)) => {
                let mut is = process.pools.get(&pool).copied().unwrap_or_default();
                let device = Some(call.args[1] as i32);
                if is.device == device {
                    return;
                }
                is.device = device;
                What::Pool { pool, is }
            }
            (Effect::AskPool, Some(value)) if call.args[1] == RESERVED_CURRENT => {
                let pool = call.args[0];
                let mut is = process.pools.get(&pool).copied().unwrap_or_default();
                is.reserved_bytes = Some(value);
                What::Pool { pool, is }
            }
            (Effect::DestroyPool, _) if turn.succeeded() => What::PoolEnded { pool: call.args[0] },
            (Effect::TrimPool, _) => {
                // How much it gives back is not told.
                let mut row = call_row(process, turn, desk.clock);
                row.op = "free";
                row.memory_kind = Some(MemoryKind::Pool.name());
                row.pool = Some(call.args[0] as i64);
                row.device = process.pools.get(&call.args[0]).and_then(|is| is.device);
                let device = row.device;
                row.gpu_uuid = (desk.card)(process, device);
                row.bytes = if turn.succeeded() { None } else { Some(0) };
                desk.rows.push(row);
                if !turn.succeeded() {
                    self.count_failure(turn, MemoryKind::Pool, device, false);
                }
                return;
            }
            _ => return,
        };
        self.commit(call.tgid, what);
    }

    /// Bytes that a device's pools held when the program last asked; `None` if it never did.
    pub fn pool_reserved_bytes(&self, pid: u32, device: Option<i32>) -> Option<u64> {
        let process = self.processes.get(&pid)?;
        let known = process.pools.values().filter(|pool| pool.device == device);
        known
            .filter_map(|pool| pool.reserved_bytes)
            .reduce(|a, b| a + b)
    }
}
