//! A burst told from lacking capacity, by the load of the engine.

use serde_json::{Value, json};
use vramscope_wire::Table;

use crate::cli::{stderr, stdout, vramscope};
use crate::seed;

const MIB: i64 = 1 << 20;

/// A failure at second 100: 8 MiB tried, 1 MiB free on the card, nothing reserved without use, so
/// that 7 MiB are missing. Four requests are served at any time and two end in five seconds, which
/// makes 10 seconds a request by Little's law. `held` is what the allocator held and when (second,
/// MiB); at the failure it holds 40 MiB. `waiting` requests wait from second 95 on, none before.
fn fails(held: &[[i64; 2]], waiting: i64) -> Value {
    let who = |s: i64| {
        json!({
            "ts": seed::at(s), "ts_ns": seed::nanoseconds(s), "host": "delta", "boot_id": "boot",
            "process_id": 701, "pid": 7001, "agent_id": "agent-delta", "batch_seq": 1,
        })
    };
    let failure = json!({
        "op": "oom", "api": "c10::reportOutOfMemoryToProfiler", "layer": "framework", "source": "usdt",
        "bytes": 0, "requested_bytes": 8 * MIB, "device": 0, "stream": 0, "gpu_uuid": "GPU-Z", "result": null,
        "counted": false, "device_free_bytes": MIB, "allocator_allocated_bytes": 40 * MIB,
        "allocator_reserved_bytes": 40 * MIB,
    });
    let samples: Vec<Value> = held
        .iter()
        .map(|&[s, mib]| {
            let sample = json!({
                "device": 0, "gpu_uuid": "GPU-Z", "framework": "pytorch", "source": "usdt", "reason": "window",
                "snapshot_id": s, "allocated_bytes": mib * MIB, "reserved_bytes": 40 * MIB, "lossy": false,
            });
            seed::merge(who(s), sample)
        })
        .collect();
    let traffic: Vec<Value> = (60..=100)
        .step_by(5)
        .map(|s| {
            let load = json!({
                "engine": "vllm", "running": 4, "waiting": if s >= 95 { waiting } else { 0 },
                "completed_total": 2 * (s / 5),
            });
            seed::merge(who(s), load)
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let events = [seed::event("delta", 701, 9, 100, failure)];
    seed::write_file(dir.path(), Table::AllocEvents, "1.parquet", &events);
    seed::write_file(dir.path(), Table::AllocatorSamples, "1.parquet", &samples);
    seed::write_file(dir.path(), Table::Traffic, "1.parquet", &traffic);
    let output = vramscope(&["why", "--data", dir.path().to_str().unwrap(), "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

fn has_evidence(answer: &Value, text: &str) -> bool {
    let evidence = answer["evidence"].as_array().unwrap();
    evidence.iter().any(|line| line.as_str() == Some(text))
}

#[test]
fn a_jump_within_one_residence_under_a_longer_queue_is_a_burst() {
    let answer = fails(&[[85, 29], [88, 30], [95, 36]], 9);
    assert_eq!(answer["class"], "burst", "{answer}");
    assert_eq!(answer["residence_seconds"], 10.0);
    assert_eq!(answer["allocated_before_bytes"], 30 * MIB);
    assert!(
        has_evidence(
            &answer,
            "held bytes rose by 10.0 MiB within one request's residence, 7.00 MiB were missing"
        ),
        "{answer}"
    );
    assert!(
        has_evidence(&answer, "the queue went from 0 to 9 requests"),
        "{answer}"
    );
}

#[test]
fn without_a_queue_a_jump_or_a_level_before_it_is_capacity() {
    // Nobody waits.
    let answer = fails(&[[88, 30]], 0);
    assert_eq!(answer["class"], "capacity", "{answer}");
    // 6 MiB of the missing 7.
    let answer = fails(&[[88, 34]], 9);
    assert_eq!(answer["class"], "capacity", "{answer}");
    // Three residences before: what rose since then rose in no single residence.
    let answer = fails(&[[70, 30]], 9);
    assert_eq!(answer["class"], "capacity", "{answer}");
    assert!(answer["allocated_before_bytes"].is_null(), "{answer}");
}
