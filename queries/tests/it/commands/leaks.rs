//! `vramscope leaks` from outside: 16 hours of two pods that serve the same load, one of which keeps
//! 50 KiB of every request. What is expected is what was planted.

use std::path::Path;

use serde_json::{Value, json};
use vramscope_wire::Table;

use super::recording::{self, FORWARD, INSERT, Minute, WEIGHTS};
use crate::cli::{stderr, stdout, vramscope};
use crate::seed;

const HOURS: i64 = 16;
const LEAK: i64 = 50 * 1024;

/// Requests served in a minute: 8, more and less in turns of four hours.
fn running(minute: i64) -> i64 {
    let turn = (minute % 240) as f64 / 240.0 * std::f64::consts::TAU;
    (8.0 + 6.0 * turn.sin()).round() as i64
}

/// At whole seconds also past midnight.
fn at(seconds: i64) -> String {
    let hours = 10 + seconds / 3600;
    let (day, hour) = (29 + hours / 24, hours % 24);
    format!(
        "2026-11-{day}T{hour:02}:{:02}:{:02}Z",
        seconds / 60 % 60,
        seconds % 60
    )
}

fn write(dir: &Path) {
    let mut windows = Vec::new();
    let mut traffic = Vec::new();
    for process in [1, 2] {
        let mut completed = 0;
        let mut kept = 0;
        for minute in 0..HOURS * 60 {
            let served = running(minute);
            completed += served;
            let keeps = if process == 1 { served * LEAK } else { 0 };
            kept += keeps;
            let held = served * (4 << 20);
            let mut row = |stack, live: i64, given: i64| {
                let row = Minute {
                    process,
                    stack: Some(stack),
                    kind: "device",
                    minute,
                    given: (given, served),
                    freed: (0, 0),
                    live: (live, 1 + live / LEAK),
                };
                // What a request works with lives for a minute at most, all else since the start.
                let minutes = if stack == FORWARD { 1 } else { minute + 1 };
                let over = json!({
                    "ts": at(minute * 60), "window_end": at(minute * 60 + 60),
                    "oldest_live_age_ns": minutes * 60_000_000_000,
                });
                windows.push(seed::merge(recording::window(&row), over));
            };
            row(INSERT, (1 << 20) + kept, keeps);
            row(FORWARD, held, held);
            if minute == 0 {
                row(WEIGHTS, 10 << 30, 10 << 30);
            }
            traffic.push(json!({
                "ts": at(minute * 60 + 30), "ts_ns": seed::nanoseconds(minute * 60 + 30), "host": "h",
                "boot_id": "boot", "process_id": process, "pid": 10 + process, "engine": "vllm",
                "endpoint": format!("http://127.0.0.1:800{process}/metrics"), "running": served,
                "waiting": 0, "completed_total": completed, "agent_id": "agent-h", "batch_seq": 1,
            }));
        }
    }
    seed::write_file(dir, Table::StackWindows, "1.parquet", &windows);
    seed::write_file(dir, Table::Traffic, "1.parquet", &traffic);
    seed::write_file(dir, Table::Stacks, "1.parquet", &recording::stacks());
    let processes = [1, 2].map(|id| recording::process(id, json!({})));
    seed::write_file(dir, Table::Processes, "1.parquet", &processes);
}

#[test]
fn a_planted_leak_is_first_and_its_twin_is_clean() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let data = dir.path().to_str().unwrap();
    let run = |options: &[&str]| {
        let output = vramscope(&[&["leaks", "--data", data], options].concat());
        (
            output.status.code().unwrap(),
            stdout(&output),
            stderr(&output),
        )
    };
    let (code, out, err) = run(&["--json", "--fail-on", "confirmed"]);
    assert_eq!(code, 4, "{out}\n{err}");
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(answer["found"], 1, "{out}");
    let leak = &answer["leaks"][0];
    assert_eq!(leak["rank"], 1);
    assert_eq!(leak["tier"], "confirmed");
    assert_eq!(
        (&leak["stack_id"], &leak["pod"]),
        (&json!(INSERT), &json!("server-1"))
    );
    assert_eq!(leak["function"], "insert");
    let number = |name: &str| {
        leak[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name} in {leak}"))
    };
    let planted = LEAK as f64;
    assert!(
        (number("bytes_per_request") / planted - 1.0).abs() < 0.05,
        "{leak}"
    );
    assert!(number("bytes_per_request_low") < planted * 1.001, "{leak}");
    assert!(number("bytes_per_request_high") > planted * 0.999, "{leak}");
    // 480 requests an hour over whole turns of the load; the window that tells most need not be one.
    let per_hour = number("bytes_per_hour") / (480.0 * planted);
    assert!((0.8..1.2).contains(&per_hour), "{leak}");
    assert!(number("growth_share") > 0.5, "{leak}");
    assert_eq!(answer["looked_at"]["processes"], 2);
    assert_eq!(answer["looked_at"]["hours"], (2 * HOURS) as f64);

    let (code, out, err) = run(&["--pod", "server-1"]);
    assert_eq!(code, 0, "{err}");
    let mut lines = out.lines();
    assert!(lines.next().unwrap().starts_with("rank  tier"), "{out}");
    assert!(
        lines
            .next()
            .unwrap()
            .starts_with("1     confirmed  50.0 KiB ("),
        "{out}"
    );
    let place = lines.next().unwrap().trim();
    assert_eq!(
        place,
        "insert (libcache.so): pid 11 on h, pod prod/server-1, device 0, device memory"
    );
    assert_eq!(
        lines.next().unwrap().trim(),
        "main > serve > insert > cudaMalloc"
    );

    let (code, out, err) = run(&["--pod", "server-2", "--fail-on", "suspect"]);
    assert_eq!(code, 0, "{err}");
    assert!(
        out.starts_with(
            "no leak found of pod server-2: looked at 16.0 h of 1 process lifetime, 3 stacks, "
        ),
        "{out}"
    );
    assert!(out.contains("a leak of "), "{out}");

    // A leak that was seen before is not new.
    let (code, out, _) = run(&["--since", "1m", "--fail-on", "suspect"]);
    assert_eq!(code, 0, "{out}");
}

#[test]
fn too_little_data_is_no_all_clear() {
    let (_guard, hour) = recording::folder();
    let output = vramscope(&["leaks", "--data", &hour]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(
        text.starts_with("too little data to tell: looked at 2.0 h of 2 process lifetimes"),
        "{text}"
    );
    let none = tempfile::tempdir().unwrap();
    seed::write_file(
        none.path(),
        Table::Stacks,
        "1.parquet",
        &recording::stacks(),
    );
    let output = vramscope(&["leaks", "--data", none.path().to_str().unwrap(), "--json"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let answer: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        (&answer["found"], &answer["looked_at"]["hours"]),
        (&json!(0), &json!(0.0))
    );
}

#[test]
fn settings_and_tiers_are_checked() {
    let (_guard, hour) = recording::folder();
    for (options, code, part) in [
        (vec!["--settings", "block_minutes:soon"], 1, "soon"),
        (vec!["--tier", "sure"], 2, "sure"),
        (vec!["--fail-on", "ambiguous"], 2, "ambiguous"),
        (vec!["--tier", "suspect", "--all"], 2, "--all"),
    ] {
        let output = vramscope(&[&["leaks", "--data", hour.as_str()], &options[..]].concat());
        let err = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{options:?}: {err}");
        assert!(err.contains(part), "{options:?}: {err}");
    }
}
