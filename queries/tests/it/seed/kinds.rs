//! The third host of the seeded data: every kind of memory, operation, implicit end and loss
//! that alpha and beta do not have.
//!
//! One card, GPU-E. Seconds as in [`super`].
//!
//! | seq | s | process | what |
//! |---|---|---|---|
//! | 10 | 0 | 301 | cuMemAddressReserve 8192, stack 31 |
//! | 20, 30 | 1, 2 | 301 | cuMemCreate 4096 and 2048, stack 31 |
//! | 40, 50 | 3, 4 | 301 | cuMemMap of seq 20, twice: 4096 each |
//! | 60 | 5 | 301 | cuMemMap 2048 fails |
//! | 70 | 6 | 301 | cuMemRetainAllocationHandle of seq 20: one more reference |
//! | 80, 90 | 7, 8 | 301 | cuMemRelease of both references: the mappings keep the memory |
//! | 100 | 9 | 301 | cuMemUnmap of seq 40 and, with it, of seq 50 (101, implicit), which ends seq 20 (102, implicit) |
//! | 110 | 10 | 301 | cuMemMap of seq 30: 2048 |
//! | 115 | 11 | 301 | cuMemImportFromShareableHandle: another process's bytes |
//! | 118, 119 | 11, 12 | 301 | cuMemAddressReserve 1024 and cuMemAddressFree of it |
//! | 200 | 20 | 301 | cuMemAllocFromPoolAsync 600 from pool 77, under its runtime call (210), stack 32 |
//! | 220 | 21 | 301 | cuMemAllocFromPoolAsync 400 from pool 77, stack 32 |
//! | 230 | 22 | 301 | cuMemAllocAsync 250, the call names no pool, stack 32 |
//! | 240 | 23 | 301 | cuMemFreeAsync of seq 200 |
//! | 250 | 24 | 301 | cuMemAllocFromPoolAsync of 99999 from pool 77 fails |
//! | 260 | 25 | 301 | cuMemPoolDestroy of pool 77 ends seq 220 |
//! | 300 | 30 | 302 | cuMemAllocAsync 1500, stack 32; the program reads a reserved size of 4000 |
//! | 400 | 31 | 301 | cuArrayCreate_v2 512, stack 33 |
//! | 410 | 32 | 301 | cuMemAllocPitch_v2 2048 (1500 asked for), stack 33 |
//! | 420 | 33 | 301 | cuCtxDestroy_v2 ends seq 400 |
//! | 430, 440 | 34 | 301 | seq 410's address is given out again, by cuMemAlloc 1024, stack 33 |
//! | 450, 460 | 35, 36 | 301 | cuMemHostRegister 640, stack 33, and cuMemHostUnregister |
//! | 500 | 40 | 302 | cuIpcOpenMemHandle_v2 under cudaIpcOpenMemHandle (510) |
//! | 520, 530 | 41, 42 | 302 | cuIpcOpenMemHandle_v2 and cuIpcCloseMemHandle of it |
//! | 540 | 43 | 302 | cuIpcOpenMemHandle_v2 fails |
//! | 600 | 50 | 303 | baseline: 3000 when the agent met it |
//! | 610 | 51 | 303 | cuMemAlloc 700, stack 33 |
//! | 620 | 52 | 303 | cuMemFree of an address from before the agent |
//! | 700, 710 | 53, 54 | 304 | cuMemAlloc 100, stack 34; exec ends it |
//! | 720, 730 | 55, 56 | 304 | cuMemAlloc 50, stack 34; cuDevicePrimaryCtxReset_v2 ends it |

use serde_json::{Value, json};

use super::{alloc, at, event, free, merge, nanoseconds};

const HOST: &str = "gamma";

fn on_card(process: i64, more: Value) -> Value {
    let base = json!({"gpu_uuid": "GPU-E", "device": 0, "pid": 2700 + process});
    merge(base, more)
}

/// What begins, of a kind.
fn gives(
    process: i64,
    seq: i64,
    s: i64,
    bytes: i64,
    stack: i64,
    kind: &str,
    call: [&str; 2],
) -> Value {
    let [op, api] = call;
    let over = on_card(process, json!({"memory_kind": kind, "op": op, "api": api}));
    alloc(HOST, process, seq, s, bytes, stack, over)
}

/// What ends, of a kind; `of` tells the allocation and its stack.
fn takes(
    process: i64,
    seq: i64,
    s: i64,
    of: [i64; 2],
    bytes: i64,
    kind: &str,
    call: [&str; 2],
) -> Value {
    let ([alloc_seq, stack], [op, api]) = (of, call);
    let over = on_card(
        process,
        json!({"memory_kind": kind, "op": op, "api": api, "alloc_stack_id": stack}),
    );
    free(HOST, process, seq, s, alloc_seq, bytes, over)
}

/// The same, without a call of its own.
fn ends(
    process: i64,
    seq: i64,
    s: i64,
    of: [i64; 2],
    bytes: i64,
    kind: &str,
    call: [&str; 2],
) -> Value {
    let over = json!({"implicit": true, "source": "agent", "result": null, "tid": null});
    merge(takes(process, seq, s, of, bytes, kind, call), over)
}

fn uncounted(row: Value, bytes: Value) -> Value {
    merge(row, json!({"counted": false, "bytes": bytes}))
}

fn failed(row: Value) -> Value {
    merge(
        row,
        json!({"result": 1, "counted": false, "bytes": 0, "address": null}),
    )
}

pub fn alloc_events() -> Vec<Value> {
    let mut rows = virtual_memory();
    rows.extend(pools());
    rows.extend(implicit_ends());
    rows.extend(others_memory());
    rows
}

fn virtual_memory() -> Vec<Value> {
    let reserve = ["reserve", "cuMemAddressReserve"];
    let create = ["alloc", "cuMemCreate"];
    let map = ["map", "cuMemMap"];
    let release = ["free", "cuMemRelease"];
    let unmap = ["unmap", "cuMemUnmap"];
    let retain = ["alloc", "cuMemRetainAllocationHandle"];
    let import = ["alloc", "cuMemImportFromShareableHandle"];
    vec![
        gives(301, 10, 0, 8192, 31, "vmm_virtual", reserve),
        gives(301, 20, 1, 4096, 31, "vmm_physical", create),
        gives(301, 30, 2, 2048, 31, "vmm_physical", create),
        gives(301, 40, 3, 4096, 31, "vmm_mapped", map),
        gives(301, 50, 4, 4096, 31, "vmm_mapped", map),
        failed(gives(301, 60, 5, 2048, 31, "vmm_mapped", map)),
        uncounted(gives(301, 70, 6, 0, 31, "vmm_physical", retain), json!(0)),
        uncounted(
            takes(301, 80, 7, [20, 31], 0, "vmm_physical", release),
            json!(0),
        ),
        uncounted(
            takes(301, 90, 8, [20, 31], 0, "vmm_physical", release),
            json!(0),
        ),
        takes(301, 100, 9, [40, 31], 4096, "vmm_mapped", unmap),
        ends(301, 101, 9, [50, 31], 4096, "vmm_mapped", unmap),
        ends(
            301,
            102,
            9,
            [20, 31],
            4096,
            "vmm_physical",
            ["free", "cuMemUnmap"],
        ),
        gives(301, 110, 10, 2048, 31, "vmm_mapped", map),
        uncounted(
            gives(301, 115, 11, 0, 31, "vmm_physical", import),
            Value::Null,
        ),
        gives(301, 118, 11, 1024, 31, "vmm_virtual", reserve),
        takes(
            301,
            119,
            12,
            [118, 31],
            1024,
            "vmm_virtual",
            ["release", "cuMemAddressFree"],
        ),
    ]
}

fn pools() -> Vec<Value> {
    let from_pool = ["alloc", "cuMemAllocFromPoolAsync"];
    let of_pool = |row: Value| merge(row, json!({"pool": 77, "stream": 5}));
    let under_runtime = json!({"parent_seq": 210});
    let runtime = json!({"layer": "runtime", "counted": false});
    let runtime_call = ["alloc", "cudaMallocFromPoolAsync"];
    vec![
        merge(
            of_pool(gives(301, 200, 20, 600, 32, "pool", from_pool)),
            under_runtime,
        ),
        merge(
            of_pool(gives(301, 210, 20, 600, 32, "pool", runtime_call)),
            runtime,
        ),
        of_pool(gives(301, 220, 21, 400, 32, "pool", from_pool)),
        gives(301, 230, 22, 250, 32, "pool", ["alloc", "cuMemAllocAsync"]),
        takes(
            301,
            240,
            23,
            [200, 32],
            600,
            "pool",
            ["free", "cuMemFreeAsync"],
        ),
        of_pool(failed(gives(301, 250, 24, 99_999, 32, "pool", from_pool))),
        of_pool(ends(
            301,
            260,
            25,
            [220, 32],
            400,
            "pool",
            ["free", "cuMemPoolDestroy"],
        )),
        gives(302, 300, 30, 1500, 32, "pool", ["alloc", "cuMemAllocAsync"]),
    ]
}

fn implicit_ends() -> Vec<Value> {
    let pitch = ["alloc", "cuMemAllocPitch_v2"];
    let plain = ["alloc", "cuMemAlloc_v2"];
    let host = "registered_host";
    let reset = "cuDevicePrimaryCtxReset_v2";
    vec![
        gives(
            301,
            400,
            31,
            512,
            33,
            "array",
            ["alloc", "cuArrayCreate_v2"],
        ),
        merge(
            gives(301, 410, 32, 2048, 33, "device", pitch),
            json!({"requested_bytes": 1500}),
        ),
        ends(
            301,
            420,
            33,
            [400, 33],
            512,
            "array",
            ["free", "cuCtxDestroy_v2"],
        ),
        ends(
            301,
            430,
            34,
            [410, 33],
            2048,
            "device",
            ["free", "address_reuse"],
        ),
        merge(
            gives(301, 440, 34, 1024, 33, "device", plain),
            json!({"address": 0x7000_0000 + 410 * 0x1000}),
        ),
        gives(
            301,
            450,
            35,
            640,
            33,
            host,
            ["register", "cuMemHostRegister_v2"],
        ),
        takes(
            301,
            460,
            36,
            [450, 33],
            640,
            host,
            ["unregister", "cuMemHostUnregister"],
        ),
        gives(304, 700, 53, 100, 34, "device", plain),
        ends(
            304,
            710,
            54,
            [700, 34],
            100,
            "device",
            ["free", "process_exec"],
        ),
        gives(304, 720, 55, 50, 34, "device", plain),
        ends(304, 730, 56, [720, 34], 50, "device", ["free", reset]),
    ]
}

fn others_memory() -> Vec<Value> {
    let open = ["map", "cuIpcOpenMemHandle_v2"];
    let close = ["unmap", "cuIpcCloseMemHandle"];
    let ipc = |row: Value| uncounted(row, Value::Null);
    let baseline = json!({
        "op": "alloc", "api": "baseline", "source": "nvml", "bytes": 3000, "counted": false,
        "implicit": true, "result": null, "tid": null,
    });
    let unknown = json!({
        "op": "free", "api": "cuMemFree_v2", "counted": false, "address": 0x8888, "pid": 3003,
    });
    vec![
        merge(
            ipc(gives(302, 500, 40, 0, 33, "ipc", open)),
            json!({"parent_seq": 510}),
        ),
        merge(
            ipc(gives(
                302,
                510,
                40,
                0,
                33,
                "ipc",
                ["map", "cudaIpcOpenMemHandle"],
            )),
            json!({"layer": "runtime"}),
        ),
        ipc(gives(302, 520, 41, 0, 33, "ipc", open)),
        ipc(takes(302, 530, 42, [520, 33], 0, "ipc", close)),
        failed(gives(302, 540, 43, 0, 33, "ipc", open)),
        event(HOST, 303, 600, 50, on_card(303, baseline)),
        gives(303, 610, 51, 700, 33, "device", ["alloc", "cuMemAlloc_v2"]),
        event(HOST, 303, 620, 52, unknown),
    ]
}

pub fn stacks() -> Vec<Value> {
    let stack = |id: i64, folded: &str| json!({"stack_id": id, "frames": [], "folded": folded, "agent_id": "agent-gamma", "batch_seq": 2});
    vec![
        stack(31, "main;segment;cuMemCreate"),
        stack(32, "main;async;cuMemAllocAsync"),
        stack(33, "main;other"),
        stack(34, "main;short"),
    ]
}

pub fn processes() -> Vec<Value> {
    let process = |id: i64, over: Value| {
        let row = json!({
            "ts": at(58), "ts_ns": nanoseconds(58), "host": HOST, "boot_id": "boot", "process_id": id,
            "pid": 2700 + id, "coverage": [], "agent_id": "agent-gamma", "batch_seq": 3,
        });
        merge(row, over)
    };
    vec![
        process(301, json!({"exe": "/usr/bin/segments"})),
        process(302, json!({})),
        process(
            303,
            json!({"pod": "old-0", "namespace": "ml", "pod_uid": "6f0a", "container_id": "c1"}),
        ),
        process(304, json!({"started": at(52), "ended": at(57)})),
    ]
}

pub fn devices() -> Vec<Value> {
    vec![json!({
        "ts": at(100), "ts_ns": nanoseconds(100), "host": HOST, "gpu_uuid": "GPU-E", "device": 0,
        "total_bytes": 20000, "used_bytes": 14000, "free_bytes": 6000,
        "processes": [
            {"pid": 3001, "process_id": 301, "used_bytes": 5000},
            {"pid": 3002, "process_id": 302, "used_bytes": 4500},
            {"pid": 3003, "process_id": 303, "used_bytes": 3800},
        ],
        "agent_id": "agent-gamma", "batch_seq": 5,
    })]
}

/// A window of a minute for each cause of loss; the last one has two and the first none.
pub fn agent_windows() -> Vec<Value> {
    let causes = [
        json!([]),
        json!([{"cause": "ring_full", "count": 5}]),
        json!([{"cause": "threads_full", "count": 1}]),
        json!([{"cause": "too_deep", "count": 1}]),
        json!([{"cause": "missed_return", "count": 2}]),
        json!([{"cause": "missed_entry", "count": 1}]),
        json!([{"cause": "read_fault", "count": 1}]),
        json!([{"cause": "undecodable", "count": 1}]),
        json!([{"cause": "restart_gap", "count": 0}]),
        json!([{"cause": "spool_full", "count": 4}]),
        json!([{"cause": "live_full", "count": 2}]),
        json!([{"cause": "stacks_full", "count": 3}, {"cause": "ring_full", "count": 6}]),
    ];
    let lost = [0, 5, 1, 1, 2, 1, 1, 1, 0, 4, 2, 9];
    let window = |index: usize| {
        let (from, to) = (index as i64 * 60, index as i64 * 60 + 60);
        json!({
            "ts": at(to), "ts_ns": nanoseconds(to), "host": HOST, "window_start": at(from),
            "window_end": at(to), "events": 10, "events_by_source": [{"source": "uprobe", "count": 10}],
            "lost": lost[index], "lost_by_cause": causes[index], "lossy": index > 0,
            "agent_id": "agent-gamma", "batch_seq": 7,
        })
    };
    (0..causes.len()).map(window).collect()
}

fn window(process: i64, from: i64, kind: &str, over: Value) -> Value {
    let row = json!({
        "ts": at(from), "ts_ns": nanoseconds(from), "window_end": at(from + 60), "host": HOST,
        "boot_id": "boot", "process_id": process, "pid": 2700 + process, "gpu_uuid": "GPU-E",
        "device": 0, "memory_kind": kind, "layer": "driver", "alloc_bytes": 0, "alloc_count": 0,
        "free_bytes": 0, "free_count": 0, "live_bytes": 0, "live_count": 0, "lossy": false,
        "agent_id": "agent-gamma", "batch_seq": 8,
    });
    merge(row, over)
}

pub fn stack_windows() -> Vec<Value> {
    vec![
        window(
            301,
            0,
            "vmm_physical",
            json!({
                "stack_id": 31, "alloc_bytes": 6144, "alloc_count": 2, "free_bytes": 4096, "free_count": 1,
                "live_bytes": 2048, "live_count": 1, "oldest_live_age_ns": 58_000_000_000_i64,
                "peak_live_bytes": 6144}),
        ),
        window(
            304,
            0,
            "device",
            json!({
                "stack_id": null, "alloc_bytes": 150, "alloc_count": 2, "free_bytes": 150, "free_count": 2,
                "peak_live_bytes": 100}),
        ),
        window(
            301,
            3600,
            "vmm_physical",
            json!({
                "stack_id": 31, "live_bytes": 2048, "live_count": 1, "lossy": true,
                "oldest_live_age_ns": 3_658_000_000_000_i64, "peak_live_bytes": 2048}),
        ),
    ]
}

pub fn device_windows() -> Vec<Value> {
    let nothing = json!({"failed_allocations": 0, "failed_frees": 0});
    let window =
        |process, from, kind, over| window(process, from, kind, merge(nothing.clone(), over));
    vec![
        window(
            301,
            0,
            "vmm_physical",
            json!({
                "alloc_bytes": 6144, "alloc_count": 2, "free_bytes": 4096, "free_count": 1,
                "live_bytes": 2048, "live_count": 1, "peak_live_bytes": 6144, "process_peak_bytes": 6144}),
        ),
        window(
            302,
            0,
            "pool",
            json!({
                "alloc_bytes": 1500, "alloc_count": 1, "live_bytes": 1500, "live_count": 1,
                "peak_live_bytes": 1500, "process_peak_bytes": 1500, "pool_reserved_bytes": 4000}),
        ),
        // The agent lost its state in between and counts its peak anew.
        window(
            301,
            3600,
            "vmm_physical",
            json!({
                "live_bytes": 2048, "live_count": 1, "peak_live_bytes": 2048, "process_peak_bytes": 2048,
                "lossy": true}),
        ),
        // After the NVML sample: no part of its reconciliation.
        window(
            302,
            120,
            "pool",
            json!({
                "failed_allocations": 1, "live_bytes": 1500, "live_count": 1, "peak_live_bytes": 1500,
                "process_peak_bytes": 1500, "pool_reserved_bytes": 6000}),
        ),
    ]
}
