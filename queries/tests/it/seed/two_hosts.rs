//! The first two hosts of the seeded data, alpha and beta. Both agents number their events from the
//! same numbers, and their processes share a pid.
//!
//! | host | seq | s | process | what |
//! |---|---|---|---|---|
//! | alpha | 10 | 0 | 101 | cuMemAlloc 1000 on GPU-A, under cudaMalloc (seq 20), stack 11 |
//! | alpha | 30 | 10 | 101 | cudaMallocManaged 500 on GPU-A, no driver row, stack 12 |
//! | alpha | 35 | 12 | 102 | cuMemAlloc 4000 on GPU-A, stack 21 |
//! | alpha | 40 | 20 | 101 | cuMemAlloc 9999 fails, under cudaMalloc (seq 50) that fails |
//! | alpha | 60 | 30 | 101 | cuMemFree of seq 10, under cudaFree (seq 70) |
//! | alpha | 65 | 32 | 102 | cuMemAlloc 600 on GPU-A, stack 21 |
//! | alpha | 66 | 33 | 102 | cuMemAlloc 7000 on GPU-B, stack 21 |
//! | alpha | 80 | 40 | 101 | cuMemAlloc 3000 on GPU-A, stack 11 |
//! | alpha | 85 | 45 | 102 | cuMemFree of seq 65 |
//! | alpha | 90 | 50 | 101 | cuMemHostAlloc 800 pinned, stack 13 |
//! | alpha | 95, 96 | 59 | 102 | process exit frees seq 35 and seq 66 |
//! | alpha | 100 | 60 | 101 | cudaFree of an unknown address fails, no driver row |
//! | alpha | 110 | 70 | 101 | cudaMalloc fails, no driver row |
//! | alpha | 120 | 80 | 101 | cuMemAddressReserve 1 MiB: virtual |
//! | alpha | 130 | 90 | 101 | cuMemCreate 2048 on GPU-A, stack 11 |
//! | alpha | 140 | 95 | 101 | cuMemFree of an address from before the agent: succeeds, bytes unknown |
//! | alpha | 145 | 96 | 101 | cuMemFree of seq 80 fails: the block stays |
//! | alpha | 150 | 110 | 101 | cuMemRelease of seq 130 |
//! | beta | 10 | 0 | 201 | cuMemAlloc 5000 on GPU-C, stack 11 |
//! | beta | 20 | 10 | 201 | cuMemAlloc 100 on GPU-C, stack 11 |
//! | beta | 30 | 20 | 201 | cuMemFree of seq 20 |
//! | beta | 15 | -3600 | 200 | cuMemAlloc 900 on GPU-C, stack 11, in an earlier boot; then the host crashed |
//! | beta | 40 | 30 | 202 | cuMemAlloc 64 on a card that is not certain, no stack |

use serde_json::{Value, json};

use super::{alloc, at, event, free, merge, nanoseconds};

pub fn alloc_events() -> Vec<Value> {
    let a = json!({"gpu_uuid": "GPU-A", "device": 0});
    let on_a = |more: Value| merge(a.clone(), more);
    let on_b = |more: Value| merge(json!({"gpu_uuid": "GPU-B", "device": 1}), more);
    let on_c = |more: Value| merge(json!({"gpu_uuid": "GPU-C", "device": 0}), more);
    let runtime = |api: &str| json!({"layer": "runtime", "api": api, "counted": false});
    let exit = json!({
        "implicit": true, "api": "process_exit", "source": "agent", "result": null, "tid": null,
    });
    vec![
        alloc(
            "alpha",
            101,
            10,
            0,
            1000,
            11,
            on_a(json!({"parent_seq": 20})),
        ),
        alloc("alpha", 101, 20, 0, 1000, 11, on_a(runtime("cudaMalloc"))),
        alloc(
            "alpha",
            101,
            30,
            10,
            500,
            12,
            on_a(json!({
            "layer": "runtime", "api": "cudaMallocManaged", "memory_kind": "managed"})),
        ),
        alloc("alpha", 102, 35, 12, 4000, 21, on_a(json!({}))),
        alloc(
            "alpha",
            101,
            40,
            20,
            0,
            11,
            on_a(json!({
            "requested_bytes": 9999, "result": 2, "counted": false, "parent_seq": 50, "address": null})),
        ),
        alloc(
            "alpha",
            101,
            50,
            20,
            0,
            11,
            on_a(json!({
            "requested_bytes": 9999, "result": 2, "counted": false, "address": null,
            "layer": "runtime", "api": "cudaMalloc"})),
        ),
        free(
            "alpha",
            101,
            60,
            30,
            10,
            1000,
            on_a(json!({"parent_seq": 70, "alloc_stack_id": 11})),
        ),
        free(
            "alpha",
            101,
            70,
            30,
            10,
            1000,
            on_a(merge(runtime("cudaFree"), json!({"alloc_stack_id": 11}))),
        ),
        alloc("alpha", 102, 65, 32, 600, 21, on_a(json!({}))),
        alloc("alpha", 102, 66, 33, 7000, 21, on_b(json!({}))),
        alloc("alpha", 101, 80, 40, 3000, 11, on_a(json!({}))),
        free(
            "alpha",
            102,
            85,
            45,
            65,
            600,
            on_a(json!({"alloc_stack_id": 21})),
        ),
        alloc(
            "alpha",
            101,
            90,
            50,
            800,
            13,
            on_a(json!({
            "api": "cuMemHostAlloc", "memory_kind": "pinned_host"})),
        ),
        free(
            "alpha",
            102,
            95,
            59,
            35,
            4000,
            on_a(merge(exit.clone(), json!({"alloc_stack_id": 21}))),
        ),
        free(
            "alpha",
            102,
            96,
            59,
            66,
            7000,
            on_b(merge(exit.clone(), json!({"alloc_stack_id": 21}))),
        ),
        event(
            "alpha",
            101,
            100,
            60,
            json!({
            "op": "free", "api": "cudaFree", "layer": "runtime", "result": 1, "bytes": 0,
            "counted": false, "address": 0x1234}),
        ),
        alloc(
            "alpha",
            101,
            110,
            70,
            0,
            11,
            on_a(json!({
            "requested_bytes": 5, "result": 2, "counted": false, "address": null,
            "layer": "runtime", "api": "cudaMalloc"})),
        ),
        alloc(
            "alpha",
            101,
            120,
            80,
            1 << 20,
            11,
            on_a(json!({
            "op": "reserve", "api": "cuMemAddressReserve", "memory_kind": "vmm_virtual"})),
        ),
        alloc(
            "alpha",
            101,
            130,
            90,
            2048,
            11,
            on_a(json!({
            "api": "cuMemCreate", "memory_kind": "vmm_physical"})),
        ),
        event(
            "alpha",
            101,
            140,
            95,
            json!({
            "op": "free", "api": "cuMemFree_v2", "counted": false, "address": 0x9999}),
        ),
        free(
            "alpha",
            101,
            145,
            96,
            80,
            0,
            on_a(json!({"result": 700, "counted": false, "alloc_stack_id": 11})),
        ),
        free(
            "alpha",
            101,
            150,
            110,
            130,
            2048,
            on_a(json!({
            "api": "cuMemRelease", "memory_kind": "vmm_physical", "alloc_stack_id": 11})),
        ),
        alloc("beta", 201, 10, 0, 5000, 11, on_c(json!({}))),
        alloc("beta", 201, 20, 10, 100, 11, on_c(json!({}))),
        free(
            "beta",
            201,
            30,
            20,
            20,
            100,
            on_c(json!({"alloc_stack_id": 11})),
        ),
        alloc(
            "beta",
            200,
            15,
            -3600,
            900,
            11,
            on_c(json!({"boot_id": "old-boot", "pid": 1003})),
        ),
        alloc(
            "beta",
            202,
            40,
            30,
            64,
            0,
            json!({"stack_id": null, "stack_quality": "none", "device": 3}),
        ),
    ]
}

pub fn stacks() -> Vec<Value> {
    let stack = |host: &str, id: i64, folded: &str| {
        let frames: Vec<Value> = folded
            .rsplit(';')
            .map(|function| json!({"kind": "native", "module": "/bin/x", "function": function, "offset": 16}))
            .collect();
        json!({
            "stack_id": id, "frames": frames, "folded": folded,
            "agent_id": format!("agent-{host}"), "batch_seq": 2,
        })
    };
    vec![
        stack("alpha", 11, "main;train;cudaMalloc"),
        stack("alpha", 12, "main;embed;cudaMallocManaged"),
        stack("alpha", 13, "main;load;cudaHostAlloc"),
        stack("alpha", 21, "main;serve;cudaMalloc"),
        // The same code on the other host.
        stack("beta", 11, "main;train;cudaMalloc"),
    ]
}

pub fn processes() -> Vec<Value> {
    let process = |host: &str, id: i64, pid: i64, seconds: i64, batch: i64, over: Value| {
        let row = json!({
            "ts": at(seconds), "ts_ns": nanoseconds(seconds), "host": host, "boot_id": "boot",
            "process_id": id, "pid": pid, "coverage": [],
            "agent_id": format!("agent-{host}"), "batch_seq": batch,
        });
        merge(row, over)
    };
    let hooked = json!({"library": "/lib/libcuda.so.1", "symbol": "cuMemAlloc_v2", "attached": true, "reason": null});
    let missing = json!({
        "library": "/lib/libcuda.so.1", "symbol": "cuMemCreate", "attached": false, "reason": "no such symbol"});
    vec![
        // An older state of 101, before its pod was known.
        process("alpha", 101, 1001, 1, 3, json!({"coverage": [missing]})),
        process(
            "alpha",
            101,
            1001,
            5,
            4,
            json!({
            "exe": "/usr/bin/trainer", "pod": "trainer-0", "namespace": "ml",
            "started": "2026-11-29T09:59:50Z", "coverage": [hooked, missing]}),
        ),
        process(
            "alpha",
            102,
            1002,
            59,
            4,
            json!({
            "exe": "/usr/bin/server", "pod": "server-0", "namespace": "ml",
            "started": at(5), "ended": at(59)}),
        ),
        process("beta", 200, 1003, -3600, 1, json!({"boot_id": "old-boot"})),
        process("beta", 201, 1001, 1, 3, json!({"exe": "/usr/bin/trainer"})),
        process("beta", 202, 1002, 1, 3, json!({"exe": "/usr/bin/other"})),
    ]
}

pub fn devices() -> Vec<Value> {
    let sample = |host: &str, uuid: &str, index: i64, seconds: i64, over: Value| {
        let row = json!({
            "ts": at(seconds), "ts_ns": nanoseconds(seconds), "host": host, "gpu_uuid": uuid,
            "device": index, "processes": [], "agent_id": format!("agent-{host}"), "batch_seq": 5,
        });
        merge(row, over)
    };
    vec![
        sample(
            "alpha",
            "GPU-A",
            0,
            50,
            json!({"total_bytes": 10000, "used_bytes": 1, "free_bytes": 9999}),
        ),
        // At second 100 the 2048 bytes of seq 130 are still live.
        sample(
            "alpha",
            "GPU-A",
            0,
            100,
            json!({
            "total_bytes": 10000, "used_bytes": 9000, "free_bytes": 1000, "numa_node": 0,
            "processes": [
                {"pid": 1001, "process_id": 101, "used_bytes": 6000},
                {"pid": 555, "process_id": null, "used_bytes": 3000},
            ]}),
        ),
        sample(
            "alpha",
            "GPU-B",
            1,
            100,
            json!({"total_bytes": 20000, "used_bytes": 100, "free_bytes": 19900}),
        ),
        sample(
            "beta",
            "GPU-C",
            0,
            100,
            json!({
            "processes": [{"pid": 1001, "process_id": 201, "used_bytes": null}]}),
        ),
        sample(
            "beta",
            "GPU-D",
            1,
            100,
            json!({"total_bytes": 8000, "used_bytes": 10, "free_bytes": 7990}),
        ),
    ]
}

pub fn host_buffers() -> Vec<Value> {
    let buffer = |host: &str,
                  process: i64,
                  seq: i64,
                  seconds: i64,
                  bytes: i64,
                  pages: Value,
                  over: Value| {
        let row = json!({
            "ts": at(seconds), "ts_ns": nanoseconds(seconds), "host": host, "process_id": process,
            "pid": 1001, "seq": seq, "address": seq * 4096, "bytes": bytes, "memory_kind": "pinned_host",
            "page_bytes": 100, "sampled": false, "pages": pages, "gpu_uuid": "GPU-A", "device": 0,
            "agent_id": format!("agent-{host}"), "batch_seq": 6,
        });
        merge(row, over)
    };
    let node_0 = json!({"gpu_node": 0});
    vec![
        // Measured twice: the newer one counts, 600 bytes on node 0 and 200 on node 1.
        buffer(
            "alpha",
            101,
            90,
            51,
            800,
            json!([{"node": 1, "pages": 8}]),
            node_0.clone(),
        ),
        buffer(
            "alpha",
            101,
            90,
            52,
            800,
            json!([{"node": 0, "pages": 6}, {"node": 1, "pages": 2}]),
            node_0.clone(),
        ),
        // Half of it is not resident.
        buffer(
            "alpha",
            101,
            91,
            53,
            1000,
            json!([{"node": null, "pages": 5}, {"node": 0, "pages": 5}]),
            node_0.clone(),
        ),
        // Nothing could be asked for.
        buffer("alpha", 101, 92, 54, 300, json!([]), node_0),
        // The platform does not say where the card is.
        buffer(
            "beta",
            201,
            90,
            55,
            400,
            json!([{"node": 0, "pages": 4}]),
            json!({"gpu_uuid": "GPU-C"}),
        ),
    ]
}

pub fn agent_windows() -> Vec<Value> {
    let window = |from: i64, to: i64, events: i64, lost: i64, causes: Value| {
        json!({
            "ts": at(to), "ts_ns": nanoseconds(to), "host": "alpha", "window_start": at(from),
            "window_end": at(to), "events": events, "events_by_source": [{"source": "uprobe", "count": events}],
            "lost": lost, "lost_by_cause": causes, "lossy": lost > 0, "agent_id": "agent-alpha", "batch_seq": 7,
        })
    };
    vec![
        window(0, 60, 15, 0, json!([])),
        window(
            60,
            120,
            9,
            3,
            json!([{"cause": "ring_full", "count": 2}, {"cause": "map_full", "count": 1},
            {"cause": "read_fault", "count": 0}]),
        ),
        window(300, 360, 0, 0, json!([])),
    ]
}
