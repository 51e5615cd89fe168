//! Totals, exit codes, signals and refusals of `vramscope-agent trace`.

use std::collections::BTreeMap;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use arrow::array::AsArray;
use arrow::datatypes::{Int32Type, Int64Type};
use serde_json::Value;
use vramscope_fakes::ledger::{Kind, ProcessLedger};

use crate::standins::Bench;

/// Process, device if there is one, kind.
type Place = (u64, Option<u64>, String);
/// allocations, failed allocations, frees, bytes at exit, blocks at exit, peak.
type Figures = [u64; 6];

fn from_ledgers(ledgers: &[ProcessLedger]) -> BTreeMap<Place, Figures> {
    let mut all = BTreeMap::new();
    for ledger in ledgers {
        for device in [Some(0), Some(1), None] {
            for kind in Kind::ALL {
                let t = match device {
                    Some(device) => ledger.totals(device, kind),
                    None => ledger.without_device[kind.name()],
                };
                let figures = [
                    t.allocations,
                    t.failed_allocations,
                    t.frees,
                    t.live_bytes,
                    t.live_count,
                    t.peak_bytes,
                ];
                if figures != [0; 6] {
                    all.insert(
                        (
                            u64::from(ledger.pid),
                            device.map(u64::from),
                            kind.name().to_string(),
                        ),
                        figures,
                    );
                }
            }
        }
    }
    all
}

fn from_summary(summary: &Value) -> BTreeMap<Place, Figures> {
    let figure = |line: &Value, name: &str| {
        line[name]
            .as_u64()
            .unwrap_or_else(|| panic!("no {name} in {line}"))
    };
    let lines = summary["totals"].as_array().unwrap();
    lines
        .iter()
        .map(|line| {
            assert_eq!(
                figure(line, "live_bytes"),
                0,
                "the process has ended: {line}"
            );
            let place = (
                figure(line, "pid"),
                line["device"].as_u64(),
                line["memory_kind"].as_str().unwrap().to_string(),
            );
            let names = [
                "allocations",
                "failed_allocations",
                "frees",
                "live_at_exit_bytes",
                "live_at_exit_blocks",
                "peak_bytes",
            ];
            (place, names.map(|name| figure(line, name)))
        })
        // A failed free of an address that nobody knows has a line of its own. Other processes'
        // memory is in no driver's books.
        .filter(|((_, _, kind), figures)| *figures != [0; 6] && kind != "ipc")
        .collect()
}

/// The summary is the last line on standard error.
fn summary(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|error| panic!("no summary ({error}) in: {text}"))
}

fn traced(bench: &Bench, arguments: &[&str]) -> Output {
    bench
        .tracer(&["--json"])
        .arg(Bench::workload())
        .args(arguments)
        .output()
        .unwrap()
}

fn assert_equal_to_ledgers(bench: &Bench, output: &Output) -> Value {
    let summary = summary(output);
    assert_eq!(summary["lost"], serde_json::json!({}));
    let ledgers = from_ledgers(&bench.ledgers());
    assert!(!ledgers.is_empty(), "the workload left no books");
    assert_eq!(from_summary(&summary), ledgers);
    summary
}

#[test]
fn totals_equal_the_ledger_in_every_scenario() {
    let scenarios: &[(&[&str], i32)] = &[
        (&["demo", "--requests", "20"], 0),
        (&["threads", "--threads", "8", "--iterations", "200"], 0),
        (&["threads", "--threads", "16", "--iterations", "50"], 0),
        (&["race", "--threads", "4", "--iterations", "300"], 0),
        (&["failures"], 0),
        (&["managed"], 0),
        (&["pitched"], 0),
        (&["pools"], 0),
        (&["vmm"], 0),
        (&["vmm-segments"], 0),
        (&["ipc"], 0),
        (&["devices"], 0),
        (&["contexts"], 0),
        (&["late-dlopen"], 0),
        (&["exec"], 0),
        (&["fork"], 0),
        (&["fork", "--after-use"], 0),
        (&["vfork"], 0),
        (&["thread-exit"], 0),
        (&["driver"], 0),
        (&["exit-code", "7"], 7),
        (&["crash"], 128 + libc::SIGABRT),
    ];
    for (arguments, code) in scenarios {
        let Some(bench) = Bench::new() else { return };
        let output = traced(&bench, arguments);
        assert_eq!(
            output.status.code(),
            Some(*code),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert_equal_to_ledgers(&bench, &output);
    }
}

/// Kernels before 6.6 have no links for a whole library.
#[test]
fn perf_events_see_the_same() {
    let Some(bench) = Bench::new() else { return };
    let output = bench
        .tracer(&["--json", "--uprobe-multi", "false"])
        .arg(Bench::workload())
        .args(["demo", "--requests", "20"])
        .output()
        .unwrap();
    assert_equal_to_ledgers(&bench, &output);
}

/// The comparison above can fail: the driver's books count one allocation too many.
#[test]
fn a_planted_miscount_is_noticed() {
    let Some(bench) = Bench::new() else { return };
    let mut tracer = bench.tracer(&["--json"]);
    let output = tracer
        .arg(Bench::workload())
        .args(["demo", "--requests", "3"])
        .env("VRAMSCOPE_FAKE_MISCOUNT", "1")
        .output()
        .unwrap();
    assert_ne!(
        from_summary(&summary(&output)),
        from_ledgers(&bench.ledgers())
    );
}

/// The workload's functions are named for this; the runtime's call is the innermost frame.
#[test]
fn the_leaking_function_is_named() {
    let Some(bench) = Bench::new() else { return };
    // Enough requests for the process to live when its mappings are read.
    let summary = assert_equal_to_ledgers(&bench, &traced(&bench, &["demo", "--requests", "500"]));
    let stacks = summary["top_stacks"].as_array().unwrap();
    let folded: Vec<&str> = stacks
        .iter()
        .filter_map(|stack| stack["folded"].as_str())
        .collect();
    let leak = folded
        .iter()
        .find(|folded| folded.contains("leak_per_request"));
    assert!(
        leak.is_some_and(|folded| folded.ends_with(";cudaMalloc")),
        "{folded:?}"
    );
}

#[test]
fn frees_that_fail_keep_their_blocks() {
    let Some(bench) = Bench::new() else { return };
    let mut tracer = bench.tracer(&["--json"]);
    let output = tracer
        .arg(Bench::workload())
        .args(["demo", "--requests", "10"])
        .env("VRAMSCOPE_FAKE_FAIL_FREE", "4")
        .output()
        .unwrap();
    let summary = assert_equal_to_ledgers(&bench, &output);
    let failed: u64 = summary["totals"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|l| l["failed_frees"].as_u64())
        .sum();
    let by_driver: u64 = bench
        .ledgers()
        .iter()
        .flat_map(|ledger| {
            Kind::ALL
                .iter()
                .flat_map(|kind| (0..2).map(|d| ledger.totals(d, *kind).failed_frees))
        })
        .sum();
    assert!(by_driver > 0);
    assert_eq!(failed, by_driver);
}

/// Card 0 is on node 0 and card 1 on node 1, as the PCI devices say. All memory of this host is
/// on one node, so what is pinned for the other card is misplaced to the last byte.
#[test]
fn pinned_buffers_are_placed_against_their_cards() {
    if std::path::Path::new("/sys/devices/system/node/node1").exists() {
        eprintln!("SKIPPED: this host has several NUMA nodes, the expectation is for one");
        return;
    }
    let Some(bench) = Bench::new() else { return };
    let sysfs = tempfile::tempdir().unwrap();
    for (bus, node) in [("01", "0"), ("02", "1")] {
        let device = sysfs
            .path()
            .join(format!("bus/pci/devices/0000:{bus}:00.0"));
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), node).unwrap();
    }
    let options = ["--sysfs", sysfs.path().to_str().unwrap()];
    let mut tracer = bench.tracer(&options);
    let output = tracer
        .arg(Bench::workload())
        // Enough requests for the process to live when its buffers are looked at.
        .args(["demo", "--requests", "2000"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", message(&output));
    // Device, node of its card, bytes, misplaced bytes: 16 MiB pinned for each card, and on card
    // 0 one more of 2 MiB and a registered range of 4 MiB.
    let mut placed = Vec::new();
    for batch in bench.rows(vramscope_wire::Table::HostBuffers) {
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let ints = |name: &str| column(name).as_primitive::<Int32Type>();
        let longs = |name: &str| column(name).as_primitive::<Int64Type>();
        for row in 0..batch.num_rows() {
            placed.push((
                ints("device").value(row),
                ints("gpu_node").value(row),
                longs("bytes").value(row) >> 20,
                longs("misplaced_bytes").value(row) >> 20,
            ));
        }
    }
    let lasting = [(0, 0, 16, 0), (1, 1, 16, 16)];
    // These two may be freed before anybody could look: then they have no row.
    let passing = [(0, 0, 2, 0), (0, 0, 4, 0)];
    assert!(
        lasting.iter().all(|buffer| placed.contains(buffer)),
        "{placed:?}"
    );
    placed.retain(|buffer| !lasting.contains(buffer) && !passing.contains(buffer));
    assert_eq!(placed, []);
}

/// A package upgrade replaces the library while a program uses the old one.
#[test]
fn a_library_replaced_while_in_use() {
    let Some(bench) = Bench::new() else { return };
    let workload = Bench::workload();
    let folder = bench.libraries();
    // Copies under new inodes take the place of the old files.
    let script = format!(
        "{workload} sleep 2 & sleep 1; cd {folder}; for l in *.so.*; do cp $l $l.new; mv $l.new $l; done; sleep 1; {workload} demo --requests 5; wait",
        workload = workload.display(),
        folder = folder.display(),
    );
    let output = bench
        .tracer(&["--json"])
        .args(["sh", "-c", &script])
        .output()
        .unwrap();
    assert_eq!(bench.ledgers().len(), 2);
    assert_equal_to_ledgers(&bench, &output);
}

#[test]
fn signals_reach_the_command() {
    let Some(bench) = Bench::new() else { return };
    let mut tracer = bench
        .tracer(&["--json"])
        .arg(Bench::workload())
        .args(["sleep", "60"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while bench
        .ledgers()
        .iter()
        .all(|ledger| ledger.totals(0, Kind::Device).allocations == 0)
    {
        assert!(Instant::now() < deadline, "the workload never allocated");
        std::thread::sleep(Duration::from_millis(20));
    }
    // SAFETY: our own child, not waited for yet.
    unsafe { libc::kill(tracer.id() as i32, libc::SIGTERM) };
    let status = tracer.wait().unwrap();
    assert_eq!(status.code(), Some(128 + libc::SIGTERM));
    assert!(bench.trace().join("alloc_events").exists());
}

fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_command_that_does_not_exist() {
    let Some(bench) = Bench::new() else { return };
    let output = bench
        .tracer(&[])
        .arg("/nonexistent/program")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(
        message(&output).contains("failed to start /nonexistent/program"),
        "{}",
        message(&output)
    );
    assert!(!bench.trace().exists(), "an empty trace is no use");
}

#[test]
fn a_command_without_cuda_says_so() {
    let Some(bench) = Bench::new() else { return };
    let output = bench
        .tracer(&[])
        .arg("true")
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(
        message(&output).contains("0 calls seen, 0 lost"),
        "{}",
        message(&output)
    );
}

#[test]
fn a_folder_with_something_in_it_is_refused() {
    let Some(bench) = Bench::new() else { return };
    std::fs::create_dir(bench.trace()).unwrap();
    std::fs::write(bench.trace().join("thesis.txt"), "mine").unwrap();
    let output = bench.tracer(&[]).arg("true").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        message(&output).contains("is not empty"),
        "{}",
        message(&output)
    );
}

#[test]
fn without_root_it_says_what_to_do() {
    let Some(bench) = Bench::new() else { return };
    // The program has to be readable for nobody, wherever the checkout lies.
    let copy = tempfile::Builder::new()
        .prefix("agent")
        .tempdir_in("/tmp")
        .unwrap();
    let program = copy.path().join("vramscope-agent");
    std::fs::copy(env!("CARGO_BIN_EXE_vramscope-agent"), &program).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(copy.path(), open).unwrap();
    let output = std::process::Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(&program)
        .args(["trace", "-o"])
        .arg(bench.trace())
        .args(["--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        message(&output).contains("needs root") && message(&output).contains("CAP_BPF"),
        "{}",
        message(&output)
    );
}
