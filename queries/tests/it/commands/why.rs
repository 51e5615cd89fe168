//! `vramscope why` on the seeded data.

use serde_json::{Value, json};
use vramscope_wire::Table;

use super::{json, run};
use crate::cli::{stderr, stdout, vramscope};
use crate::seed;

#[test]
fn the_class_of_every_failure_is_that_of_its_numbers() {
    for (process, seq, class) in [
        ("401", "24", "fragmentation"),
        ("401", "30", "fragmentation"),
        ("403", "50", "external process"),
        ("404", "60", "driver refused"),
        ("404", "61", "capacity"),
        ("405", "70", "leak"),
        ("501", "6", "capacity"),
        ("101", "40", "unknown"),
    ] {
        let answer = json(&["why", "--process", process, "--oom", seq]);
        assert_eq!(answer["class"], class, "{process} {seq}");
        assert!(!answer["evidence"].as_array().unwrap().is_empty());
    }
}

/// T 20 MiB, F 8 MiB, S 16,776,192: the sum is 25,164,800.
#[test]
fn evidence_has_the_numbers_and_who_holds_the_memory() {
    let (code, out, err) = run(&["why", "--process", "401", "--oom", "24"]);
    assert_eq!(code, 0, "{err}");
    for text in [
        "pid 4001 on delta, device 0: 20.0 MiB could not be had at 2026-11-29T10:00:10Z",
        "2 failed calls of driver or runtime before it",
        "asked by: main > forward > attention",
        "class: fragmentation",
        "other processes hold 30.0 MiB of the card's 64.0 MiB",
        "the driver had 8.00 MiB free, 20.0 MiB were tried",
        "free in some way: 24.0 MiB = 8.00 MiB of the driver, 0 B that could be given back, 16.0 MiB stranded",
        "14.0 MiB held by 1 block of 6.00 MiB, up to 9.0 s old: main > forward > attention",
    ] {
        assert!(out.contains(text), "{text:?} in {out}");
    }
}

/// By hand: a segment of 20 MiB holds 6 MiB, one of 2 MiB holds 1024 bytes, and the card has 8 MiB more.
/// No setting makes room for 20 MiB: an expandable segment would have 10.2 MiB free at its end, and could
/// grow by 20 only.
#[test]
fn what_no_setting_avoids_gets_no_proposal() {
    let answer = json(&["why", "--process", "401", "--oom", "24"]);
    let replay = &answer["replay"];
    assert_eq!(replay["possible"], true, "{replay}");
    assert_eq!(replay["as_recorded"]["avoided"], false);
    assert_eq!(replay["as_recorded"]["peak_reserved_bytes"], 22 << 20);
    assert!(replay["proposed"].is_null(), "{replay}");
    let (_, out, _) = run(&["why", "--process", "401", "--oom", "24"]);
    assert!(
        out.contains("no setting that was tried avoids it: nothing is proposed"),
        "{out}"
    );
}

const MIB: i64 = 1 << 20;

/// Two segments of 16 MiB, each held by a block of 2 MiB; 8 MiB are free on the card; 22 MiB are tried.
///
/// As recorded 32 + 22 MiB do not fit into 40. An expandable segment would have mapped 40 MiB, with the two
/// blocks at 0 and at 16: from 18 to 40 there are just 22 MiB.
fn stranded_twice() -> Vec<Value> {
    const P: i64 = 0x7f00_0000_0000;
    const Q: i64 = 0x7f10_0000_0000;
    let row = |seq: i64, op: &str, address: i64, mib: i64, total: i64| {
        let api = format!("pytorch:{op}");
        seed::event(
            "delta",
            601,
            seq,
            seq,
            json!({
                "op": op, "api": api, "layer": "framework", "source": "usdt", "memory_kind": "framework_block",
                "address": address, "bytes": mib * MIB, "requested_bytes": mib * MIB, "device": 0, "stream": 0,
                "gpu_uuid": "GPU-Z", "allocator_allocated_bytes": total * MIB,
            }),
        )
    };
    let failure = json!({
        "op": "oom", "api": "c10::reportOutOfMemoryToProfiler", "layer": "framework", "source": "usdt",
        "bytes": 0, "requested_bytes": 22 * MIB, "device": 0, "stream": 0, "gpu_uuid": "GPU-Z", "result": null,
        "counted": false, "device_free_bytes": 8 * MIB, "allocator_allocated_bytes": 4 * MIB,
        "allocator_reserved_bytes": 32 * MIB,
    });
    vec![
        row(1, "alloc", P, 16, 16),
        row(2, "alloc", Q, 16, 32),
        row(3, "free", P, 16, 16),
        row(4, "alloc", P, 2, 18),
        row(5, "alloc", P + 2 * MIB, 14, 32),
        row(6, "free", Q, 16, 16),
        row(7, "alloc", Q, 2, 18),
        row(8, "free", P + 2 * MIB, 14, 4),
        seed::event("delta", 601, 9, 9, failure),
    ]
}

fn why(rows: &[Value]) -> (Value, String) {
    let dir = tempfile::tempdir().unwrap();
    seed::write_file(dir.path(), Table::AllocEvents, "1.parquet", rows);
    let data = dir.path().to_str().unwrap();
    let json = vramscope(&["why", "--data", data, "--json"]);
    assert_eq!(json.status.code(), Some(0), "{}", stderr(&json));
    let text = vramscope(&["why", "--data", data]);
    (serde_json::from_str(&stdout(&json)).unwrap(), stdout(&text))
}

#[test]
fn a_setting_that_helps_is_proposed_with_its_rerun() {
    let (answer, text) = why(&stranded_twice());
    assert_eq!(answer["class"], "fragmentation");
    let replay = &answer["replay"];
    assert_eq!(replay["as_recorded"]["avoided"], false, "{replay}");
    assert_eq!(replay["as_recorded"]["peak_reserved_bytes"], 32 * MIB);
    assert_eq!(replay["proposed"], "expandable_segments:True", "{replay}");
    let tried = replay["tried"].as_array().unwrap();
    let expandable = tried
        .iter()
        .find(|outcome| outcome["settings"] == "expandable_segments:True")
        .unwrap();
    assert_eq!(expandable["peak_reserved_bytes"], 40 * MIB);
    assert!(text.contains("proposed: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (peak 40.0 MiB instead of 32.0 MiB)"), "{text}");
}

#[test]
fn a_trace_with_a_hole_is_not_rerun() {
    let mut rows = stranded_twice();
    rows.remove(4);
    let (answer, text) = why(&rows);
    assert_eq!(answer["replay"]["possible"], false);
    assert!(
        text.contains("since the trace has holes: the allocator's own totals do not follow"),
        "{text}"
    );
    // The begin is missing, and no map tells what lived then.
    let (answer, text) = why(&stranded_twice()[3..]);
    assert_eq!(answer["replay"]["possible"], false);
    assert!(text.contains("since the trace begins late"), "{text}");
}

#[test]
fn nothing_is_proposed_without_a_rerun() {
    for (process, seq, why) in [
        ("403", "50", "the failure is the driver's"),
        ("405", "70", "no requests are recorded before it"),
    ] {
        let (code, out, err) = run(&["why", "--process", process, "--oom", seq]);
        assert_eq!(code, 0, "{err}");
        assert!(
            out.contains("nothing is proposed: no rerun is possible, since"),
            "{out}"
        );
        assert!(out.contains(why), "{out}");
        let answer = json(&["why", "--process", process, "--oom", seq]);
        assert_eq!(answer["replay"]["possible"], false);
        assert!(answer["replay"]["proposed"].is_null());
    }
}

#[test]
fn failures_are_listed_and_chosen() {
    let (code, out, _) = run(&["why", "--list"]);
    assert_eq!(code, 0);
    assert_eq!(out.lines().count(), 9, "{out}");
    assert!(out.contains(
        "2026-11-29T10:00:10Z  seq 24  pid 4001 on delta  framework raised: 20.0 MiB, fragmentation"
    ));
    let list = json(&["why", "--list"]);
    assert_eq!(list.as_array().unwrap().len(), 9);
    // The newest of one process.
    assert_eq!(json(&["why", "--pid", "4004"])["seq"], 61);
    let (code, out, err) = run(&["why", "--pid", "1"]);
    assert_eq!((code, out.as_str()), (3, ""));
    assert!(
        err.starts_with("nothing found: no failure to get memory of pid 1"),
        "{err}"
    );
    let (code, _, _) = run(&["why", "--oom", "sometime"]);
    assert_eq!(code, 2);
}

/// Failures as they were reported in public: tried, free, reserved but unallocated, class; and a card of
/// 39.6 GiB of which the process held 0.68.
#[test]
fn failures_reported_in_public_have_their_class() {
    const KIB: f64 = 1024.0;
    const MIB: f64 = 1024.0 * KIB;
    const GIB: f64 = 1024.0 * MIB;
    let cases = [
        (1.96 * GIB, 1.08 * GIB, 1.83 * GIB, "fragmentation"),
        (138.0 * MIB, 2.2 * MIB, 612.0 * MIB, "fragmentation"),
        (222.0 * MIB, 218.0 * MIB, 1608.0 * MIB, "fragmentation"),
        (60.0 * MIB, 8.4 * MIB, 1055.0 * MIB, "fragmentation"),
        (524.0 * MIB, 137.0 * MIB, 121.0 * MIB, "capacity"),
        (1.16 * GIB, 1.17 * GIB, 0.0, "driver refused"),
        (960.0 * MIB, 15.5 * GIB, 0.0, "driver refused"),
        (0.5 * GIB, 0.1 * GIB, 0.0, "external process"),
    ];
    let events: Vec<Value> = cases
        .iter()
        .enumerate()
        .map(|(index, (tried, free, cached, _))| {
            let index = index as i64;
            let allocated = (0.6 * GIB) as i64;
            seed::event("public", 700 + index, index, index, json!({
                "op": "oom", "api": "c10::reportOutOfMemoryToProfiler", "layer": "framework", "source": "usdt",
                "bytes": 0, "requested_bytes": *tried as i64, "device": 0, "gpu_uuid": format!("GPU-{index}"),
                "result": null, "counted": false, "device_free_bytes": *free as i64,
                "allocator_allocated_bytes": allocated,
                "allocator_reserved_bytes": allocated + *cached as i64,
            }))
        })
        .collect();
    let card = json!({
        "ts": seed::at(0), "ts_ns": seed::nanoseconds(0), "host": "public", "gpu_uuid": "GPU-7", "device": 0,
        "total_bytes": (39.6 * GIB) as i64, "used_bytes": (39.5 * GIB) as i64, "free_bytes": (0.1 * GIB) as i64,
        "processes": [
            {"pid": 1002, "process_id": 707, "used_bytes": (0.68 * GIB) as i64},
            {"pid": 9, "process_id": null, "used_bytes": (38.8 * GIB) as i64},
        ],
        "agent_id": "agent-public", "batch_seq": 1,
    });
    let dir = tempfile::tempdir().unwrap();
    seed::write_file(dir.path(), Table::AllocEvents, "1.parquet", &events);
    seed::write_file(dir.path(), Table::Devices, "1.parquet", &[card]);
    let data = dir.path().to_str().unwrap();
    let output = vramscope(&["why", "--data", data, "--list", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let list: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let found: Vec<&str> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["class"].as_str().unwrap())
        .collect();
    let expected: Vec<&str> = cases.iter().map(|case| case.3).collect();
    assert_eq!(found, expected);
    let output = vramscope(&["why", "--data", data]);
    assert!(
        stdout(&output).contains("pid 9: 38.8 GiB\n  - pid 1002: 696.3 MiB (this process)"),
        "{}",
        stdout(&output)
    );
}
