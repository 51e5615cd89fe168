//! Rows of `alloc_events` as the books write them.

use super::{Allocation, Desk, Key, Process, Turn};
use crate::host::clock::WallClock;
use crate::probes::hooks::{MemoryKind, Space};
use crate::spool::rows::AllocRow;

/// A row that tells whose it is and nothing else.
pub fn empty_row(process: &Process) -> AllocRow {
    AllocRow {
        process_id: process.process_id,
        pid: process.pid,
        ..AllocRow::default()
    }
}

/// The columns that every call fills alike.
pub fn call_row(process: &Process, turn: Turn<'_>, clock: &WallClock) -> AllocRow {
    let (call, ordered) = (turn.call, turn.ordered);
    AllocRow {
        ts_ns: clock.from_monotonic(call.effect_ns()),
        ts_enter_ns: Some(clock.from_monotonic(call.enter_ns)),
        tid: Some(call.tid),
        context: ordered.context.map(|context| context as i64),
        layer: call.hook().layer.name(),
        source: "uprobe",
        api: call.hook().symbol,
        result: Some(call.result),
        duration_ns: Some(call.exit_ns.saturating_sub(call.enter_ns) as i64),
        stack_id: ordered.stack.id,
        stack_quality: Some(ordered.stack.quality.name()),
        parent_seq: ordered.parent_seq.map(|seq| seq as i64),
        seq: call.seq as i64,
        ..empty_row(process)
    }
}

/// The row of a free that no call asked for.
pub fn implicit_free(
    process: &Process,
    (space, address): Key,
    allocation: &Allocation,
    api: &'static str,
    seq: u64,
    at_ns: u64,
    desk: &Desk<'_>,
) -> AllocRow {
    let device = allocation.device();
    let pool = (allocation.kind == MemoryKind::Pool)
        .then(|| process.owner_at(allocation.owner))
        .flatten();
    AllocRow {
        ts_ns: desk.clock.from_monotonic(at_ns),
        gpu_uuid: (desk.card)(process, device),
        device,
        pool: pool.map(|pool| pool as i64),
        layer: allocation.layer().name(),
        source: "agent",
        api,
        op: allocation.kind.free_op(),
        memory_kind: Some(allocation.kind.name()),
        // Created memory has no address, and its handle may be somebody else's by now.
        address: (space != Space::Physical).then_some(address as i64),
        bytes: Some(allocation.bytes as i64),
        counted: true,
        implicit: true,
        alloc_seq: Some(allocation.seq as i64),
        alloc_stack_id: allocation.stack_id(),
        lifetime_ns: Some(at_ns.saturating_sub(allocation.effect_ns) as i64),
        seq: seq as i64,
        ..empty_row(process)
    }
}
