//! A serving process with a leak that can be calculated by hand, on host epsilon.
//!
//! Slots of ten minutes, 196 of them, from 2026-11-27 00:00. A day of the load is 24 slots: two at
//! rest, eight with 4 requests at a time, six with 20, eight with 4. In each slot that is not at rest
//! 200 requests complete, evenly. So 24 slots bring 4400 requests.
//!
//! - stack 61 leaks 10,000 bytes a request on top of 500,000,000, always in the middle of a slot;
//! - stack 62 holds 3,000,000,000 bytes of weights;
//! - stack 63 holds 1,000,000 bytes for each request in service.

use serde_json::{Value, json};
use vramscope_wire::Table;

use super::merge;

pub const SLOTS: i64 = 196;
const HOST: &str = "epsilon";
pub const PROCESS: i64 = 601;
/// 2026-11-27 00:00 UTC in seconds since 1970: 20,784 days.
const START: i64 = 20_784 * 86_400;
const WEIGHTS: i64 = 3_000_000_000;
const BASE: i64 = 500_000_000;
const A_REQUEST: i64 = 10_000;

pub fn rows(table: Table) -> Vec<Value> {
    match table {
        Table::Stacks => stacks(),
        Table::Processes => vec![process()],
        Table::StackWindows => stack_windows(),
        Table::DeviceWindows => device_windows(),
        Table::Traffic => traffic(),
        _ => Vec::new(),
    }
}

/// A card with 10,000,000,000 bytes free, for where no other table's rows are compared.
pub fn card() -> Value {
    json!({
        "ts": at(SLOTS * 600), "ts_ns": nanoseconds(SLOTS * 600), "host": HOST, "gpu_uuid": "GPU-L",
        "device": 0, "total_bytes": 80_000_000_000_i64, "used_bytes": 70_000_000_000_i64,
        "free_bytes": 10_000_000_000_i64, "processes": [], "agent_id": "agent-epsilon", "batch_seq": 1,
    })
}

fn at(seconds: i64) -> String {
    format!(
        "2026-11-{:02}T{:02}:{:02}:{:02}Z",
        27 + seconds / 86_400,
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60
    )
}

fn nanoseconds(seconds: i64) -> i64 {
    (START + seconds) * 1_000_000_000
}

fn running(slot: i64) -> i64 {
    match slot % 24 {
        0..2 => 0,
        10..16 => 20,
        _ => 4,
    }
}

fn completed_in(slot: i64) -> i64 {
    if running(slot) > 0 { 200 } else { 0 }
}

fn completed_before(slot: i64) -> i64 {
    (0..slot).map(completed_in).sum()
}

fn stacks() -> Vec<Value> {
    let frame = |function: &str, module: &str| json!({"kind": "native", "function": function, "module": module, "build_id": "b1"});
    let stack = |id: i64, inner: Vec<Value>, folded: &str| {
        json!({
            "stack_id": id, "frames": inner, "folded": folded, "agent_id": "agent-epsilon", "batch_seq": 2})
    };
    vec![
        stack(
            61,
            vec![
                frame("cuMemAlloc_v2", "/lib/libcuda.so.1"),
                frame("remember_session", "/srv/engine/libengine.so"),
                frame("main", "/srv/engine/serve"),
            ],
            "main;remember_session;cuMemAlloc_v2",
        ),
        stack(62, vec![], "main;load_weights"),
        stack(63, vec![], "main;prepare_batch"),
    ]
}

fn process() -> Value {
    json!({
        "ts": at(1), "ts_ns": nanoseconds(1), "host": HOST, "boot_id": "boot", "process_id": PROCESS,
        "pid": 6001, "exe": "/srv/engine/serve", "namespace": "ml", "pod": "chat-7d9f8b6c5d-x2b4z",
        "started": at(0), "coverage": [], "agent_id": "agent-epsilon", "batch_seq": 3,
    })
}

/// A row of a window of a minute that begins so many seconds into a slot.
fn window(slot: i64, into: i64, over: Value) -> Value {
    let from = slot * 600 + into;
    let row = json!({
        "ts": at(from), "ts_ns": nanoseconds(from), "window_end": at(from + 60), "host": HOST,
        "boot_id": "boot", "process_id": PROCESS, "pid": 6001, "gpu_uuid": "GPU-L", "device": 0,
        "memory_kind": "device", "layer": "driver", "alloc_bytes": 0, "alloc_count": 0,
        "free_bytes": 0, "free_count": 0, "lossy": false, "agent_id": "agent-epsilon",
        "batch_seq": 4,
    });
    merge(row, over)
}

fn stack_windows() -> Vec<Value> {
    let mut rows = Vec::new();
    for slot in 0..SLOTS {
        let age = |since: i64| (slot * 600 + 360 - since) * 1_000_000_000;
        let leaked = A_REQUEST * (completed_before(slot) + completed_in(slot));
        let new = A_REQUEST * completed_in(slot) + if slot == 0 { BASE } else { 0 };
        if new > 0 {
            rows.push(window(
                slot,
                300,
                json!({
                "stack_id": 61, "alloc_bytes": new, "alloc_count": 1, "live_bytes": BASE + leaked,
                "live_count": 1 + leaked / A_REQUEST / 200, "oldest_live_age_ns": age(330),
                "peak_live_bytes": BASE + leaked}),
            ));
        }
        // Weights do nothing once they are there: a row every sixtieth minute.
        if slot % 6 == 0 {
            let first = if slot == 0 { WEIGHTS } else { 0 };
            rows.push(window(slot, 0, json!({
                "stack_id": 62, "alloc_bytes": first, "alloc_count": first / WEIGHTS,
                "live_bytes": WEIGHTS, "live_count": 1, "oldest_live_age_ns": (slot * 600 + 60) * 1_000_000_000,
                "peak_live_bytes": WEIGHTS})));
        }
        let (before, now) = (if slot > 0 { running(slot - 1) } else { 0 }, running(slot));
        if before != now {
            rows.push(window(slot, 0, json!({
                "stack_id": 63, "alloc_bytes": 1_000_000 * (now - before).max(0),
                "alloc_count": (now - before).max(0), "free_bytes": 1_000_000 * (before - now).max(0),
                "free_count": (before - now).max(0), "live_bytes": 1_000_000 * now, "live_count": now,
                "oldest_live_age_ns": (now > 0).then_some(30_000_000_000_i64),
                "peak_live_bytes": 1_000_000 * now.max(before)})));
        }
    }
    rows
}

/// A stack that comes in the first half of the last slot that is judged, and goes but for a rest in the
/// second.
pub fn late_burst(stack: i64, bytes: i64, rest: i64) -> [Value; 2] {
    let slot = SLOTS - 2;
    let common = json!({"stack_id": stack, "peak_live_bytes": bytes, "oldest_live_age_ns": 60_000_000_000_i64});
    let first =
        json!({"alloc_bytes": bytes, "alloc_count": 2, "live_bytes": bytes, "live_count": 2});
    let second =
        json!({"free_bytes": bytes - rest, "free_count": 1, "live_bytes": rest, "live_count": 1});
    [(0, first), (300, second)].map(|(into, over)| window(slot, into, merge(common.clone(), over)))
}

/// Windows beside the others: pinned memory every 37 minutes, memory of an unknown card now and then,
/// framework blocks in one window that ends at a moment (04:19:59) and one that begins there.
pub fn scattered_windows() -> Vec<Value> {
    let figures = |live: i64| {
        json!({"failed_allocations": 0, "failed_frees": 0, "live_bytes": live, "live_count": 1,
        "peak_live_bytes": live, "process_peak_bytes": live})
    };
    let mut rows = Vec::new();
    for number in 0..50 {
        let row = window(0, number * 37 * 60, figures(1_000_000 + number));
        rows.push(merge(
            row,
            json!({"memory_kind": "pinned_host", "lossy": number % 3 == 0}),
        ));
    }
    for number in [3, 4, 30, 111] {
        let row = window(0, number * 900, figures(2_000_000 + number));
        rows.push(merge(row, json!({"device": null, "gpu_uuid": null})));
    }
    for (from, live) in [(15_539, 31), (15_599, 32)] {
        let row = window(0, from, figures(live));
        rows.push(merge(
            row,
            json!({"layer": "framework", "memory_kind": "framework_block"}),
        ));
    }
    rows
}

fn device_windows() -> Vec<Value> {
    let row = |slot: i64| {
        let leaked = A_REQUEST * (completed_before(slot) + completed_in(slot));
        let live = WEIGHTS + BASE + leaked + 1_000_000 * running(slot);
        window(
            slot,
            300,
            json!({
                "failed_allocations": 0, "failed_frees": 0, "live_bytes": live, "live_count": 3,
                "peak_live_bytes": live, "process_peak_bytes": live}),
        )
    };
    (0..SLOTS).map(row).collect()
}

/// Five samples a slot, the last one in its last second, so that the slot's requests are in it.
fn traffic() -> Vec<Value> {
    let mut rows = Vec::new();
    for slot in 0..SLOTS {
        for sample in 1..=5 {
            let at_second = slot * 600 + 120 * sample - 1;
            let completed = completed_before(slot) + completed_in(slot) * sample / 5;
            rows.push(json!({
                "ts": at(at_second), "ts_ns": nanoseconds(at_second), "host": HOST, "boot_id": "boot",
                "process_id": PROCESS, "pid": 6001, "engine": "vllm", "running": running(slot),
                "waiting": 0, "completed_total": completed, "agent_id": "agent-epsilon", "batch_seq": 5}));
        }
    }
    rows
}
