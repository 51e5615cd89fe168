//! The allocators' address maps: samples and their segments.

use serde_json::{Value, json};

use super::super::{at, merge, nanoseconds};
use super::{A, B, HOST, IMPORT, MIB, S1, S2, S3};

fn key(host: &str, process: i64, s: i64, snapshot: i64, over: Value) -> Value {
    let row = json!({
        "ts": at(s), "ts_ns": nanoseconds(s), "host": host, "boot_id": "boot", "process_id": process,
        "pid": 3600 + process, "device": 0, "framework": "pytorch", "source": "usdt", "reason": "window",
        "snapshot_id": snapshot, "agent_id": "agent-delta", "batch_seq": 9,
    });
    merge(row, over)
}

/// Who and when of snapshot 9001, 9002 and 9501.
fn when(snapshot: i64) -> Value {
    match snapshot {
        9001 => key(
            HOST,
            401,
            10,
            9001,
            json!({"gpu_uuid": "GPU-F", "reason": "oom"}),
        ),
        9002 => key(HOST, 401, 30, 9002, json!({"gpu_uuid": "GPU-F"})),
        _ => key(
            IMPORT,
            501,
            10,
            9501,
            json!({
            "source": "import", "reason": "import", "boot_id": "", "pid": 0, "agent_id": "import"}),
        ),
    }
}

pub fn samples() -> Vec<Value> {
    let mut rows = vec![
        merge(
            when(9001),
            json!({
            "allocated_bytes": 6_292_480, "reserved_bytes": 22 * MIB, "requested_bytes": 6_292_456,
            "peak_allocated_bytes": 10_291_712, "peak_reserved_bytes": 22 * MIB, "retries": 1, "ooms": 1,
            "largest_free_block_bytes": 10_679_808, "releasable_bytes": 0, "stranded_bytes": 16_776_192,
            "segment_count": 2, "block_count": 2, "device_free_bytes": 8 * MIB, "tried_bytes": 20 * MIB,
            "lossy": false}),
        ),
        merge(
            when(9002),
            json!({
            "allocated_bytes": 6_292_480, "reserved_bytes": 38 * MIB, "requested_bytes": 6_292_456,
            "peak_allocated_bytes": 22_021_120, "peak_reserved_bytes": 38 * MIB, "retries": 2, "ooms": 1,
            "largest_free_block_bytes": 16 * MIB, "releasable_bytes": 16 * MIB,
            "stranded_bytes": 16_776_192, "segment_count": 3, "block_count": 2,
            "device_free_bytes": 4 * MIB, "lossy": false}),
        ),
        key(
            HOST,
            402,
            40,
            9003,
            json!({
            "gpu_uuid": "GPU-F", "allocated_bytes": 512, "reserved_bytes": 2 * MIB, "requested_bytes": 100,
            "largest_free_block_bytes": 2_096_640, "releasable_bytes": 0, "stranded_bytes": 2_096_640,
            "segment_count": 1, "block_count": 1, "lossy": true}),
        ),
        merge(
            when(9501),
            json!({
            "allocated_bytes": 512, "reserved_bytes": 22 * MIB, "active_bytes": 10_000_896,
            "requested_bytes": 400, "largest_free_block_bytes": 10_971_136, "releasable_bytes": 0,
            "stranded_bytes": 13_067_776, "segment_count": 2, "block_count": 1, "lossy": false}),
        ),
    ];
    // Twelve samples of a process that keeps 5000 bytes of each request, from second 100 on.
    rows.extend((0..12).map(|index| {
        let allocated = 1_000_000 + 5000 * 10 * index;
        key(
            HOST,
            405,
            100 + 5 * index,
            9100 + index,
            json!({
            "gpu_uuid": "GPU-I", "allocated_bytes": allocated, "reserved_bytes": 2 * MIB,
            "releasable_bytes": 0, "stranded_bytes": 2 * MIB - allocated,
            "largest_free_block_bytes": 2 * MIB - allocated, "segment_count": 1, "lossy": false}),
        )
    }));
    rows
}

fn segment(snapshot: i64, bounds: [i64; 2], blocks: &[Value], over: Value) -> Value {
    let [address, bytes] = bounds;
    let sum = |states: &[&str], column: &str| -> i64 {
        let chosen = blocks
            .iter()
            .filter(|block| states.contains(&block["state"].as_str().unwrap()));
        chosen
            .map(|block| block[column].as_i64().unwrap_or(0))
            .sum()
    };
    let row = json!({
        "memory_kind": "device", "pool": "default", "segment_type": "large", "stream": 0,
        "expandable": false, "address": address, "bytes": bytes,
        "allocated_bytes": sum(&["active_allocated"], "bytes"),
        "requested_bytes": sum(&["active_allocated"], "requested_bytes"), "blocks": blocks,
    });
    merge(merge(when(snapshot), row), over)
}

fn gap(address: i64, bytes: i64) -> Value {
    json!({"address": address, "bytes": bytes, "requested_bytes": null, "state": "inactive",
        "stack_id": null, "allocated_ts_ns": null, "alloc_seq": null})
}

/// `made`: stack, second, seq.
fn live(address: i64, bytes: i64, requested: i64, made: [i64; 3]) -> Value {
    json!({"address": address, "bytes": bytes, "requested_bytes": requested, "state": "active_allocated",
        "stack_id": made[0], "allocated_ts_ns": nanoseconds(made[1]), "alloc_seq": made[2]})
}

pub fn segments() -> Vec<Value> {
    let first = [
        gap(S1, 4_000_256),
        live(S1 + 4_000_256, 6 * MIB, 6 * MIB, [42, 1, 13]),
        gap(S1 + 10_291_712, 10_679_808),
    ];
    let second = [live(S2, 1024, 1000, [43, 3, 17]), gap(S2 + 1024, 2_096_128)];
    let held = |largest: i64, stranded: i64, more: Value| {
        merge(
            json!({"largest_free_block_bytes": largest, "releasable_bytes": 0, "stranded_bytes": stranded}),
            more,
        )
    };
    let s1 = |snapshot| {
        segment(
            snapshot,
            [S1, 20 * MIB],
            &first,
            held(10_679_808, 14_680_064, json!({"stack_id": 41})),
        )
    };
    let s2 = |snapshot| {
        segment(
            snapshot,
            [S2, 2 * MIB],
            &second,
            held(2_096_128, 2_096_128, json!({"segment_type": "small"})),
        )
    };
    let idle = json!({"largest_free_block_bytes": 16 * MIB, "releasable_bytes": 16 * MIB, "stranded_bytes": 0});
    let pinned = json!({
        "memory_kind": "pinned_host", "device": null, "gpu_uuid": null, "stream": null, "segment_type": null,
        "largest_free_block_bytes": 4096, "releasable_bytes": 4096, "stranded_bytes": 0});
    let pending = merge(
        live(B, 10_000_384, 10_000_000, [51, 4, 5]),
        json!({"state": "active_pending_free"}),
    );
    vec![
        s1(9001),
        s2(9001),
        s1(9002),
        s2(9002),
        segment(9002, [S3, 16 * MIB], &[gap(S3, 16 * MIB)], idle),
        segment(9002, [0x5000_0000, 4096], &[gap(0x5000_0000, 4096)], pinned),
        segment(
            9501,
            [A, 2 * MIB],
            &[live(A, 512, 400, [52, -90, 0]), gap(A + 512, 2_096_640)],
            held(
                2_096_640,
                2_096_640,
                json!({"segment_type": "small", "active_bytes": 512}),
            ),
        ),
        segment(
            9501,
            [B, 20 * MIB],
            &[pending, gap(B + 10_000_384, 10_971_136)],
            held(
                10_971_136,
                10_971_136,
                json!({
                "memory_kind": "vmm_physical", "expandable": true, "active_bytes": 10_000_384,
                "pool": "(0, 1)"}),
            ),
        ),
    ]
}
