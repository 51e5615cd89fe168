//! A recording of an hour for `leaks` and `diff`: two pods of one program, three stacks, and what
//! they held, minute by minute. Every expectation is added up by hand from the rows here.

use std::path::Path;

use serde_json::{Value, json};
use vramscope_wire::Table;

use crate::seed;

pub const INSERT: i64 = 1;
pub const WEIGHTS: i64 = 2;
pub const FORWARD: i64 = 3;

/// What one stack did in the minute from `minute` on and held at its end: bytes and allocations.
pub struct Minute {
    pub process: i64,
    pub stack: Option<i64>,
    pub kind: &'static str,
    pub minute: i64,
    pub given: (i64, i64),
    pub freed: (i64, i64),
    pub live: (i64, i64),
}

pub fn window(row: &Minute) -> Value {
    let from = row.minute * 60;
    let layer = if row.kind == "framework_block" {
        "framework"
    } else {
        "driver"
    };
    json!({
        "ts": seed::at(from), "ts_ns": seed::nanoseconds(from), "window_end": seed::at(from + 60),
        "host": "h", "boot_id": "boot", "process_id": row.process, "pid": 10 + row.process,
        "gpu_uuid": "GPU-A", "device": 0, "memory_kind": row.kind, "layer": layer,
        "stack_id": row.stack, "alloc_bytes": row.given.0, "alloc_count": row.given.1,
        "free_bytes": row.freed.0, "free_count": row.freed.1, "live_bytes": row.live.0,
        "live_count": row.live.1, "oldest_live_age_ns": 1, "peak_live_bytes": row.live.0,
        "lossy": false, "agent_id": "agent-h", "batch_seq": 1,
    })
}

fn windows() -> Vec<Value> {
    let row = |process, stack, kind, minute, given, freed, live| {
        window(&Minute {
            process,
            stack,
            kind,
            minute,
            given,
            freed,
            live,
        })
    };
    vec![
        row(1, Some(INSERT), "device", 0, (1000, 1), (0, 0), (1000, 1)),
        row(1, Some(INSERT), "device", 20, (500, 1), (0, 0), (1500, 2)),
        row(1, Some(INSERT), "device", 59, (2500, 1), (0, 0), (4000, 3)),
        row(
            1,
            Some(WEIGHTS),
            "device",
            0,
            (10_000, 1),
            (0, 0),
            (10_000, 1),
        ),
        row(
            1,
            Some(FORWARD),
            "framework_block",
            10,
            (700, 7),
            (0, 0),
            (700, 7),
        ),
        row(
            1,
            Some(FORWARD),
            "framework_block",
            59,
            (0, 0),
            (200, 2),
            (500, 5),
        ),
        row(2, Some(INSERT), "device", 0, (1000, 1), (0, 0), (1000, 1)),
        row(2, Some(INSERT), "device", 59, (1000, 1), (0, 0), (2000, 2)),
        row(2, None, "pinned_host", 0, (64, 1), (0, 0), (64, 1)),
    ]
}

fn native(
    module: &str,
    offset: i64,
    function: &str,
    file: Option<&str>,
    line: Option<i64>,
) -> Value {
    let build = match module {
        "/opt/libcache.so" => "aa11",
        _ => "bb22",
    };
    json!({"kind": "native", "module": module, "build_id": build, "offset": offset,
        "function": function, "file": file, "line": line})
}

/// A stack as the agent writes it: `frames` innermost first.
pub fn stack(id: i64, folded: &str, frames: &[Value]) -> Value {
    json!({"stack_id": id, "frames": frames, "folded": folded, "agent_id": "agent-h", "batch_seq": 1})
}

pub fn stacks() -> Vec<Value> {
    let call = json!({"kind": "native", "function": "cudaMalloc"});
    let main = native("/opt/server", 0x300, "main", None, None);
    let insert = native(
        "/opt/libcache.so",
        0x100,
        "insert",
        Some("cache.cc"),
        Some(10),
    );
    let serve = native("/opt/server", 0x200, "serve", None, None);
    // Inlined: both at one place in the code.
    let reserve = native("/opt/server", 0x50, "reserve", Some("w.h"), Some(3));
    let load = native("/opt/server", 0x50, "load", Some("w.cc"), Some(77));
    let malloc = native("/lib/libc10.so", 0x10, "c10::malloc", None, None);
    let forward = json!({"kind": "python", "module": "/app/model.py", "function": "forward",
        "file": "/app/model.py", "line": 42});
    vec![
        stack(
            INSERT,
            "main;serve;insert;cudaMalloc",
            &[call.clone(), insert, serve, main.clone()],
        ),
        stack(
            WEIGHTS,
            "main;load;reserve;cudaMalloc",
            &[call, reserve, load, main.clone()],
        ),
        stack(
            FORWARD,
            "main;forward;c10::malloc",
            &[malloc, forward, main],
        ),
    ]
}

pub fn process(id: i64, over: Value) -> Value {
    let row = json!({
        "ts": seed::at(0), "ts_ns": seed::nanoseconds(0), "host": "h", "boot_id": "boot",
        "process_id": id, "pid": 10 + id, "exe": format!("/opt/server-1.{id}"),
        "pod": format!("server-{id}"), "namespace": "prod", "coverage": [],
        "agent_id": "agent-h", "batch_seq": 1,
    });
    seed::merge(row, over)
}

/// Writes the recording; `traffic` and more windows can be added to it.
pub fn write(dir: &Path) {
    seed::write_file(dir, Table::StackWindows, "1.parquet", &windows());
    seed::write_file(dir, Table::Stacks, "1.parquet", &stacks());
    let processes = [process(1, json!({})), process(2, json!({}))];
    seed::write_file(dir, Table::Processes, "1.parquet", &processes);
}

/// The recording in a folder of its own.
pub fn folder() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let path = dir.path().to_str().unwrap().to_string();
    (dir, path)
}
