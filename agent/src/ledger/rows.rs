//! Rows of `alloc_events` as the books write them.

use super::{Allocation, Key, Process, Stack};
use crate::host::clock::WallClock;
use crate::probes::TracedCall;
use crate::probes::hooks::Layer;
use crate::probes::order::Ordered;
use crate::spool::rows::AllocRow;

/// The columns that every call fills alike.
pub fn call_row(
    process: &mut Process,
    call: &TracedCall,
    ordered: &Ordered,
    stack: Stack,
    clock: &WallClock,
) -> AllocRow {
    process.last_seq = process.last_seq.max(call.seq);
    AllocRow {
        ts_ns: clock.from_monotonic(call.effect_ns()),
        ts_enter_ns: Some(clock.from_monotonic(call.enter_ns)),
        process_id: process.process_id,
        pid: process.pid,
        tid: Some(call.tid),
        gpu_uuid: None,
        device: None,
        context: ordered.context.map(|context| context as i64),
        layer: call.hook().layer.name(),
        source: "uprobe",
        api: call.hook().symbol,
        op: "",
        memory_kind: None,
        address: None,
        bytes: None,
        requested_bytes: None,
        result: Some(call.result),
        duration_ns: Some(call.exit_ns.saturating_sub(call.enter_ns) as i64),
        stack_id: stack.id,
        stack_quality: stack.quality,
        counted: false,
        parent_seq: ordered.parent_seq.map(|seq| seq as i64),
        implicit: false,
        alloc_seq: None,
        alloc_stack_id: None,
        lifetime_ns: None,
        seq: call.seq as i64,
    }
}

/// Rows for all that lives, which ends with its process or program. The process has nothing after.
pub fn implicit_frees(
    process: &mut Process,
    api: &'static str,
    seq: u64,
    at_ns: u64,
    clock: &WallClock,
) -> Vec<AllocRow> {
    // Calls that a last thread finished after its leader was gone come before.
    let seq = seq.max(process.last_seq);
    let mut live: Vec<_> = std::mem::take(&mut process.live).into_iter().collect();
    live.sort_unstable_by_key(|(_, allocation)| allocation.seq);
    live.iter()
        .map(|(key, allocation)| implicit_free(process, *key, allocation, api, seq, at_ns, clock))
        .collect()
}

/// The row of a free that no call asked for.
pub fn implicit_free(
    process: &Process,
    (kind, address): Key,
    allocation: &Allocation,
    api: &'static str,
    seq: u64,
    at_ns: u64,
    clock: &WallClock,
) -> AllocRow {
    let layer = if allocation.layer_is_driver {
        Layer::Driver
    } else {
        Layer::Runtime
    };
    AllocRow {
        ts_ns: clock.from_monotonic(at_ns),
        ts_enter_ns: None,
        process_id: process.process_id,
        pid: process.pid,
        tid: None,
        gpu_uuid: allocation.gpu_uuid.clone(),
        device: allocation.device,
        context: None,
        layer: layer.name(),
        source: "agent",
        api,
        op: kind.free_op(),
        memory_kind: Some(kind.name()),
        address: Some(address as i64),
        bytes: Some(allocation.bytes as i64),
        requested_bytes: None,
        result: None,
        duration_ns: None,
        stack_id: None,
        stack_quality: None,
        counted: allocation.counted,
        parent_seq: None,
        implicit: true,
        alloc_seq: Some(allocation.seq as i64),
        alloc_stack_id: allocation.stack_id,
        lifetime_ns: Some(at_ns.saturating_sub(allocation.effect_ns) as i64),
        seq: seq as i64,
    }
}
