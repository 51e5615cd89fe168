//! The framework layer of the seeded data: host delta with processes that run PyTorch or fail
//! without it, and an imported snapshot. Sizes in bytes unless they say MiB.
//!
//! | seq | s | process | what |
//! |---|---|---|---|
//! | 10, 11 | 0 | 401 | cuMemAlloc 20 MiB under cudaMalloc: segment S1 |
//! | 12 | 0 | 401 | block of 4,000,256 (4,000,000 asked for) at the begin of S1, stack 41 |
//! | 13 | 1 | 401 | block of 6 MiB behind it, stack 42 |
//! | 14 | 2 | 401 | the first block is freed |
//! | 15 | 3 | 401 | cuMemAlloc 2 MiB: segment S2 |
//! | 17 | 3 | 401 | block of 1024 (1000 asked for) at the begin of S2, stack 43 |
//! | 20 to 23 | 10 | 401 | cuMemAlloc of 20 MiB fails under cudaMalloc, twice |
//! | 24 | 10 | 401 | … and PyTorch reports that it is out of memory, 8 MiB being free |
//! | 30 | 20 | 401 | cuMemAlloc of 16 MiB fails … |
//! | 32 | 20 | 401 | … and succeeds: segment S3 |
//! | 33 | 20 | 401 | block of 15 MiB in S3, stack 41 |
//! | 34 | 25 | 401 | it is freed |
//! | 50 | 50 | 403 | cuMemAlloc of 5,000,000 fails while others hold most of GPU-F |
//! | 60 | 60 | 404 | cuMemAlloc of 4 MiB fails while 6 MiB of GPU-H are free |
//! | 61 | 61 | 404 | cuMemAlloc of 8 MiB fails |
//! | 70 | 200 | 405 | PyTorch is out of memory; each request before left 5000 bytes behind |
//!
//! Maps: snapshot 9001 of process 401 at the failure (S1, S2), 9002 at second 30 (S1, S2, S3 and a
//! pinned segment). A sample without a map: 9003 of process 402.
//!
//! The import, process 501, snapshot 9501: its trace begins when 2 MiB were reserved and 512 of
//! them held; it ends with a block of 10,000,384 that waits for a stream.

mod maps;

use serde_json::{Value, json};
use vramscope_wire::Table;

use super::{alloc, at, event, free, merge, nanoseconds};

const HOST: &str = "delta";
const IMPORT: &str = "snap.pickle";
const MIB: i64 = 1 << 20;
const S1: i64 = 0x7f00_0000_0000;
const S2: i64 = 0x7f00_1000_0000;
const S3: i64 = 0x7f00_2000_0000;
/// Segments of the import.
const A: i64 = 0x7e00_0000_0000;
const B: i64 = 0x7e10_0000_0000;

pub fn rows(table: Table) -> Vec<Value> {
    match table {
        Table::AllocEvents => [traced(), failures(), imported()].concat(),
        Table::Stacks => stacks(),
        Table::Processes => processes(),
        Table::Devices => devices(),
        Table::AllocatorSamples => maps::samples(),
        Table::Segments => maps::segments(),
        Table::Traffic => traffic(),
        Table::DeviceWindows => vec![blocks_of_401()],
        _ => Vec::new(),
    }
}

fn on_card(process: i64, card: &str) -> Value {
    json!({"gpu_uuid": card, "device": 0, "pid": 3600 + process, "tid": 3600 + process})
}

fn of_401(more: Value) -> Value {
    merge(on_card(401, "GPU-F"), more)
}

/// A block's row, with the allocator's own totals after it.
fn block(totals: [i64; 2], segment: i64, more: Value) -> Value {
    let framework = json!({
        "layer": "framework", "source": "usdt", "memory_kind": "framework_block", "stream": 0,
        "segment_address": segment, "allocator_allocated_bytes": totals[0],
        "allocator_reserved_bytes": totals[1],
    });
    of_401(merge(framework, more))
}

fn refused(process: i64, seq: i64, s: i64, bytes: i64, over: Value) -> Value {
    let failed = json!({
        "result": 2, "bytes": 0, "requested_bytes": bytes, "address": null, "counted": false,
    });
    alloc(HOST, process, seq, s, bytes, 41, merge(failed, over))
}

fn traced() -> Vec<Value> {
    let call = |over: Value| of_401(over);
    let runtime = json!({"layer": "runtime", "api": "cudaMalloc", "counted": false});
    let under = |seq: i64| json!({"parent_seq": seq});
    let gives = json!({"api": "pytorch:malloc"});
    let takes = json!({"api": "pytorch:free"});
    let at_address = |address: i64, requested: i64| {
        merge(
            gives.clone(),
            json!({"address": address, "requested_bytes": requested}),
        )
    };
    let failed_call = |seq: i64, over: Value| refused(401, seq, 10, 20 * MIB, call(over));
    vec![
        alloc(
            HOST,
            401,
            10,
            0,
            20 * MIB,
            41,
            call(merge(under(11), json!({"address": S1}))),
        ),
        alloc(
            HOST,
            401,
            11,
            0,
            20 * MIB,
            41,
            call(merge(runtime.clone(), json!({"address": S1}))),
        ),
        alloc(
            HOST,
            401,
            12,
            0,
            4_000_256,
            41,
            block([4_000_256, 20 * MIB], S1, at_address(S1, 4_000_000)),
        ),
        alloc(
            HOST,
            401,
            13,
            1,
            6 * MIB,
            42,
            block(
                [10_291_712, 20 * MIB],
                S1,
                at_address(S1 + 4_000_256, 6 * MIB),
            ),
        ),
        free(
            HOST,
            401,
            14,
            2,
            12,
            4_000_256,
            block(
                [6 * MIB, 20 * MIB],
                S1,
                merge(takes.clone(), json!({"address": S1, "alloc_stack_id": 41})),
            ),
        ),
        alloc(HOST, 401, 15, 3, 2 * MIB, 43, call(json!({"address": S2}))),
        alloc(
            HOST,
            401,
            17,
            3,
            1024,
            43,
            block([6_292_480, 22 * MIB], S2, at_address(S2, 1000)),
        ),
        failed_call(20, under(21)),
        failed_call(21, runtime.clone()),
        failed_call(22, under(23)),
        failed_call(23, runtime),
        event(
            HOST,
            401,
            24,
            10,
            block(
                [6_292_480, 22 * MIB],
                0,
                json!({
            "op": "oom", "api": "c10::reportOutOfMemoryToProfiler", "memory_kind": null, "bytes": 0,
            "requested_bytes": 20 * MIB, "result": null, "device_free_bytes": 8 * MIB, "stack_id": 42,
            "counted": false, "segment_address": null}),
            ),
        ),
        refused(401, 30, 20, 16 * MIB, call(json!({}))),
        alloc(
            HOST,
            401,
            32,
            20,
            16 * MIB,
            41,
            call(json!({"address": S3})),
        ),
        alloc(
            HOST,
            401,
            33,
            20,
            15 * MIB,
            41,
            block([22_021_120, 38 * MIB], S3, at_address(S3, 15 * MIB)),
        ),
        free(
            HOST,
            401,
            34,
            25,
            33,
            15 * MIB,
            block(
                [6_292_480, 38 * MIB],
                S3,
                merge(takes, json!({"address": S3, "alloc_stack_id": 41})),
            ),
        ),
    ]
}

/// What the agent's roll-up says of the blocks of process 401: as many as there are rows, so all of
/// them are here.
fn blocks_of_401() -> Value {
    json!({
        "ts": at(0), "ts_ns": nanoseconds(0), "window_end": at(60), "host": "delta",
        "boot_id": "boot", "process_id": 401, "pid": 1002, "gpu_uuid": "GPU-F", "device": 0,
        "memory_kind": "framework_block", "layer": "framework",
        "alloc_bytes": 26_021_376, "alloc_count": 4, "free_bytes": 19_728_896, "free_count": 2,
        "live_bytes": 6_292_480, "live_count": 2, "peak_live_bytes": 22_021_120,
        "process_peak_bytes": 22_021_120, "failed_allocations": 0, "failed_frees": 0,
        "lossy": false, "agent_id": "agent-delta", "batch_seq": 1,
    })
}

fn failures() -> Vec<Value> {
    vec![
        refused(403, 50, 50, 5_000_000, on_card(403, "GPU-F")),
        refused(404, 60, 60, 4 * MIB, on_card(404, "GPU-H")),
        refused(404, 61, 61, 8 * MIB, on_card(404, "GPU-H")),
        event(
            HOST,
            405,
            70,
            200,
            merge(
                on_card(405, "GPU-I"),
                json!({
            "layer": "framework", "source": "usdt", "op": "oom", "api": "c10::reportOutOfMemoryToProfiler",
            "bytes": 0, "requested_bytes": 8 * MIB, "result": null, "device_free_bytes": MIB,
            "allocator_allocated_bytes": 2 * MIB, "allocator_reserved_bytes": 2 * MIB, "stack_id": 42,
            "counted": false}),
            ),
        ),
    ]
}

fn imported() -> Vec<Value> {
    let row = |seq: i64, s: i64, action: &str, op: &str, bytes: i64, over: Value| {
        let base = json!({
            "layer": "framework", "source": "import", "api": action, "op": op, "boot_id": "",
            "memory_kind": "framework_block", "bytes": bytes, "device": 0, "pid": 0, "tid": null,
            "stream": 0, "agent_id": "import", "stack_id": 51, "result": null,
        });
        event(IMPORT, 501, seq, s, merge(base, over))
    };
    let not_counted = json!({"counted": false});
    vec![
        row(
            1,
            0,
            "alloc",
            "alloc",
            1024,
            json!({"requested_bytes": 600, "address": A + 512}),
        ),
        row(
            2,
            1,
            "free_requested",
            "free",
            1024,
            json!({"address": A + 512, "alloc_seq": 1, "alloc_stack_id": 51}),
        ),
        row(
            3,
            2,
            "free_completed",
            "free",
            1024,
            merge(not_counted.clone(), json!({"address": A + 512})),
        ),
        row(
            4,
            3,
            "segment_map",
            "alloc",
            20 * MIB,
            json!({"memory_kind": "vmm_physical", "address": B}),
        ),
        row(
            5,
            4,
            "alloc",
            "alloc",
            10_000_384,
            json!({"requested_bytes": 10_000_000, "address": B}),
        ),
        row(
            6,
            5,
            "oom",
            "oom",
            0,
            merge(
                not_counted,
                json!({
            "memory_kind": null, "requested_bytes": 50_000_000, "device_free_bytes": 1000}),
            ),
        ),
        row(
            7,
            6,
            "free_requested",
            "free",
            10_000_384,
            json!({"address": B, "alloc_seq": 5, "alloc_stack_id": 51}),
        ),
    ]
}

fn stacks() -> Vec<Value> {
    let stack = |id: i64, folded: &str| {
        let frames: Vec<Value> = folded
            .rsplit(';')
            .map(|function| json!({"kind": "python", "file": "/app/train.py", "line": 7, "function": function}))
            .collect();
        json!({"stack_id": id, "frames": frames, "folded": folded, "agent_id": "agent-delta", "batch_seq": 2})
    };
    vec![
        stack(41, "main;forward;matmul"),
        stack(42, "main;forward;attention"),
        stack(43, "main;optimizer"),
        stack(51, "<module>;train;loss"),
        stack(52, "<module>;train;load"),
    ]
}

fn processes() -> Vec<Value> {
    let process = |host: &str, id: i64, over: Value| {
        let row = json!({
            "ts": at(1), "ts_ns": nanoseconds(1), "host": host, "boot_id": "boot", "process_id": id,
            "pid": 3600 + id, "coverage": [], "agent_id": "agent-delta", "batch_seq": 3,
        });
        merge(row, over)
    };
    let pytorch = json!({"framework": "pytorch"});
    vec![
        process(
            HOST,
            401,
            json!({
            "framework": "pytorch", "framework_version": "2.15.0", "exe": "/usr/bin/python3.12",
            "pod": "trainer-1", "namespace": "ml"}),
        ),
        process(HOST, 402, pytorch.clone()),
        process(HOST, 403, json!({})),
        process(HOST, 404, json!({})),
        process(HOST, 405, pytorch),
        process(
            IMPORT,
            501,
            json!({"framework": "pytorch", "boot_id": "", "pid": 0, "agent_id": "import"}),
        ),
    ]
}

fn devices() -> Vec<Value> {
    let sample = |card: &str, index: i64, s: i64, total: i64, free: i64, used: &[(i64, i64)]| {
        let listed: Vec<Value> = used
            .iter()
            .map(|(process, bytes)| {
                let known = (*process > 0).then_some(process);
                json!({"pid": 3600 + process, "process_id": known, "used_bytes": bytes * MIB})
            })
            .collect();
        json!({
            "ts": at(s), "ts_ns": nanoseconds(s), "host": HOST, "gpu_uuid": card, "device": index,
            "total_bytes": total * MIB, "used_bytes": (total - free) * MIB, "free_bytes": free * MIB,
            "processes": listed, "agent_id": "agent-delta", "batch_seq": 5,
        })
    };
    vec![
        sample("GPU-F", 0, 5, 64, 10, &[(401, 24), (0, 30)]),
        sample("GPU-F", 0, 45, 64, 4, &[(401, 40), (403, 2), (0, 18)]),
        sample("GPU-H", 1, 45, 16, 6, &[(404, 10)]),
    ]
}

/// The engine of process 405 counts its pages; from its eleventh sample on ten are missing, and
/// one was for a moment. A second pool is sound; a third sample does not name its pages.
fn traffic() -> Vec<Value> {
    let sample = |s: i64, over: Value| {
        let row = json!({
            "ts": at(s), "ts_ns": nanoseconds(s), "host": HOST, "boot_id": "boot", "engine": "vllm",
            "agent_id": "agent-delta", "batch_seq": 10,
        });
        merge(row, over)
    };
    let mut rows: Vec<Value> = (0..12)
        .map(|index| {
            let free = match index {
                8 => 99,
                10 | 11 => 90,
                _ => 100,
            };
            sample(99 + 5 * index, json!({
                "process_id": 405, "pid": 4005, "completed_total": 10 * index, "kv_page_tokens": 16,
                "kv_total_pages": 1000, "kv_used_pages": 600, "kv_cached_pages": 300, "kv_free_pages": free}))
        })
        .collect();
    rows.push(sample(100, json!({
        "endpoint": "http://127.0.0.1:8001", "engine": "sglang", "kv_total_pages": 50, "kv_used_pages": 20,
        "kv_cached_pages": 20, "kv_free_pages": 10})));
    rows.push(sample(101, json!({
        "endpoint": "http://127.0.0.1:8001", "engine": "sglang", "running": 3, "kv_total_pages": 50})));
    rows
}
