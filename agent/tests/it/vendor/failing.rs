//! Calls that cannot succeed, made in the real libraries: each is one row, and no memory.

use std::io::Write;
use std::process::{Command, Stdio};

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Int32Type, Int64Type};
use serde_json::{Value, json};
use vramscope_wire::Table;

use super::cache::{VendorLibrary, aloud, libraries};
use super::{answers, own_folder};
use crate::program::Program;
use crate::standins::Bench;

/// One call that cannot succeed: what the program is told, and the row's op, kind and size.
struct Failing {
    call: &'static str,
    op: &'static str,
    kind: Option<&'static str>,
    requested: Option<i64>,
}

const fn failing(
    call: &'static str,
    op: &'static str,
    kind: Option<&'static str>,
    requested: Option<i64>,
) -> Failing {
    Failing {
        call,
        op,
        kind,
        requested,
    }
}

const RUNTIME_CALLS: [Failing; 6] = [
    failing("cudaMalloc room 4096", "alloc", Some("device"), Some(4096)),
    failing("cudaFree 65536", "free", None, None),
    failing(
        "cudaMallocHost room 8192",
        "alloc",
        Some("pinned_host"),
        Some(8192),
    ),
    failing(
        "cudaHostRegister room 4096 0",
        "register",
        Some("registered_host"),
        Some(4096),
    ),
    failing(
        "cudaMallocManaged room 12288 1",
        "alloc",
        Some("managed"),
        Some(12288),
    ),
    failing(
        "cudaMallocAsync room 16384 0",
        "alloc",
        Some("pool"),
        Some(16384),
    ),
];

const DRIVER_CALLS: [Failing; 6] = [
    failing(
        "cuMemAlloc_v2 room 4096",
        "alloc",
        Some("device"),
        Some(4096),
    ),
    failing("cuMemFree_v2 65536", "free", None, None),
    failing(
        "cuMemHostAlloc room 8192 0",
        "alloc",
        Some("pinned_host"),
        Some(8192),
    ),
    failing(
        "cuMemHostRegister_v2 room 4096 0",
        "register",
        Some("registered_host"),
        Some(4096),
    ),
    failing(
        "cuMemAllocManaged room 12288 1",
        "alloc",
        Some("managed"),
        Some(12288),
    ),
    failing(
        "cuMemAllocAsync room 16384 0",
        "alloc",
        Some("pool"),
        Some(16384),
    ),
];

/// What the calls gave.
type Results = Vec<i32>;

/// Makes the calls in a program under `trace`; gives their results and the summary.
fn traced(bench: &Bench, library: &VendorLibrary, calls: &[Failing]) -> (Results, Value) {
    let folder = own_folder(bench);
    let copy = library.copy_into(&folder);
    let mut told = format!("open {}\n", copy.display());
    for call in calls {
        told += &format!("call {}\n", call.call);
    }
    let mut tracer = bench
        .tracer(&["--json"])
        .arg(Program::exe())
        .args([
            "--ignored",
            "--exact",
            "program::run_as_told",
            "--nocapture",
        ])
        .env("LD_LIBRARY_PATH", &folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = tracer.stdin.take().unwrap();
    input.write_all(told.as_bytes()).unwrap();
    drop(input);
    let output = tracer.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let said = String::from_utf8_lossy(&output.stdout);
    let results = answers(&said).into_iter().map(|(result, _)| result);
    let summary = errors.lines().last().unwrap_or_default();
    let summary = serde_json::from_str(summary).unwrap_or_else(|_| panic!("{errors}"));
    (results.collect(), summary)
}

fn assert_failure_rows(bench: &Bench, calls: &[Failing], results: &Results, summary: &Value) {
    let mut found = Vec::new();
    for batch in bench.rows(Table::AllocEvents) {
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let text = |name: &str, row: usize| {
            let column = column(name).as_string::<i32>();
            (!column.is_null(row)).then(|| column.value(row).to_string())
        };
        let number = |name: &str, row: usize| {
            let column = column(name).as_primitive::<Int64Type>();
            (!column.is_null(row)).then(|| column.value(row))
        };
        let result = column("result").as_primitive::<Int32Type>();
        let is_counted = column("counted").as_boolean();
        let is_implicit = column("implicit").as_boolean();
        for row in 0..batch.num_rows() {
            assert!(!is_counted.value(row) && !is_implicit.value(row));
            assert_eq!(text("source", row).as_deref(), Some("uprobe"));
            let api = text("api", row).unwrap();
            let (op, kind) = (text("op", row).unwrap(), text("memory_kind", row));
            let (bytes, requested) = (number("bytes", row), number("requested_bytes", row));
            found.push((api, op, kind, bytes, requested, result.value(row)));
        }
    }
    let expected: Vec<_> = calls
        .iter()
        .zip(results)
        .map(|(call, result)| {
            let api = call.call.split(' ').next().unwrap().to_string();
            let kind = call.kind.map(str::to_string);
            (
                api,
                call.op.to_string(),
                kind,
                Some(0),
                call.requested,
                *result,
            )
        })
        .collect();
    // All calls are one thread's, and rows keep their order.
    assert_eq!(found, expected);

    assert_eq!(summary["lost"], json!({}));
    let lines = summary["totals"].as_array().unwrap();
    let sum = |name: &str| -> u64 { lines.iter().map(|l| l[name].as_u64().unwrap()).sum() };
    for nothing in [
        "allocations",
        "frees",
        "live_bytes",
        "live_at_exit_bytes",
        "live_at_exit_blocks",
        "peak_bytes",
    ] {
        assert_eq!(sum(nothing), 0, "{nothing}: {summary:#}");
    }
    let allocations = calls.iter().filter(|call| call.op != "free").count();
    assert_eq!(sum("failed_allocations"), allocations as u64, "{summary:#}");
}

/// cudaErrorInsufficientDriver: what the runtime says where there is no driver.
const NO_DRIVER: i32 = 35;

#[test]
fn without_a_driver_the_runtimes_calls_fail_and_are_rows() {
    for library in libraries("libcudart.so.") {
        let Some(bench) = Bench::new() else { return };
        let (results, summary) = traced(&bench, &library, &RUNTIME_CALLS);
        let cache = Command::new("ldconfig").arg("-p").output();
        let has_driver = cache.is_ok_and(|cache| {
            let text = String::from_utf8_lossy(&cache.stdout).into_owned();
            text.contains("libcuda.so.1")
        });
        if has_driver && results != [NO_DRIVER; 6] {
            aloud("this host has a driver, calls of the runtime do not fail");
            return;
        }
        assert_eq!(results, [NO_DRIVER; 6], "{}", library.name());
        assert_failure_rows(&bench, &RUNTIME_CALLS, &results, &summary);
    }
}

/// Nobody called cuInit: the driver refuses, with and without a card. The probes sit behind its
/// guard here.
#[test]
fn before_cu_init_the_drivers_calls_fail_and_are_rows() {
    for library in libraries("libcuda.so.") {
        let Some(bench) = Bench::new() else { return };
        let (results, summary) = traced(&bench, &library, &DRIVER_CALLS);
        assert!(results.iter().all(|result| *result != 0), "{results:?}");
        assert_failure_rows(&bench, &DRIVER_CALLS, &results, &summary);
    }
}
