//! The vendor's real libraries: the runtime and CUPTI from their wheels, the driver from Debian.
//! Stand-ins are what we believe; these say whether it is so. No GPU is needed: what a library
//! exports is told by binutils, and without a driver every call fails, which is a path of its own.
//!
//! Libraries that are not there and cannot be fetched are skipped aloud.

mod apt;
mod binutils;
mod cache;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Int32Type, Int64Type};
use serde_json::{Value, json};
use vramscope_agent::probes::hooks::{HOOKS, Layer};
use vramscope_agent::probes::site;
use vramscope_wire::Table;

use crate::daemon::Daemon;
use crate::program::Program;
use crate::standins::Bench;
use cache::{VendorLibrary, aloud, libraries};

/// The libraries that are hooked, as far as they can be had.
fn hooked_libraries() -> Vec<VendorLibrary> {
    [libraries("libcuda.so."), libraries("libcudart.so.")].concat()
}

fn layer(library: &VendorLibrary) -> Layer {
    if library.name().starts_with("libcuda.so.") {
        Layer::Driver
    } else {
        Layer::Runtime
    }
}

/// Names in the hook table.
fn hooks_of(layer: Layer) -> BTreeSet<String> {
    let hooks = HOOKS.iter().filter(|hook| hook.layer == layer);
    hooks.map(|hook| hook.symbol.to_string()).collect()
}

/// Library, symbol and the reason if it is not hooked.
type Row = (String, String, Option<String>);

fn own_folder(bench: &Bench) -> PathBuf {
    let folder = bench.root().join("vendor");
    fs::create_dir(&folder).unwrap();
    folder
}

/// A process that maps them has one row of coverage for each name of the table and library.
#[test]
fn every_name_is_accounted_for() {
    let found = hooked_libraries();
    if found.is_empty() || !binutils::present() {
        return;
    }
    let Some(bench) = Bench::new() else { return };
    let folder = own_folder(&bench);
    let copies: Vec<PathBuf> = found.iter().map(|l| l.copy_into(&folder)).collect();
    let names: Vec<String> = copies.iter().map(|c| c.display().to_string()).collect();
    let mut daemon = Daemon::new(&bench, "vendor", &["--libraries", &names.join(",")]);
    daemon.start();
    daemon.wait_for("hooked all", |status| {
        let hooked = status["libraries"].as_array();
        let hooked = hooked.into_iter().flatten().filter_map(Value::as_str);
        let hooked: BTreeSet<&str> = hooked.collect();
        names.iter().all(|name| hooked.contains(name.as_str()))
    });

    let mut program = Program::start("", &Program::exe(), &folder, &bench.books());
    for cupti in libraries("libcupti.so.") {
        let copy = cupti.copy_into(&folder);
        program.tell(&format!("open {}", copy.display()));
    }
    for name in &names {
        program.tell(&format!("open {name}"));
    }
    let end = Instant::now() + Duration::from_secs(60);
    let rows = loop {
        let rows = daemon.coverage_rows(program.pid());
        if names
            .iter()
            .all(|name| rows.iter().any(|row| row.0 == *name))
        {
            break rows;
        }
        assert!(Instant::now() < end, "no coverage of all: {rows:?}");
        std::thread::sleep(Duration::from_millis(50));
    };
    program.end();
    daemon.stop();

    let is_cupti = |row: &&Row| row.0.contains("/libcupti.so.");
    assert_eq!(rows.iter().find(is_cupti), None);
    for (library, name) in found.iter().zip(&names) {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.0 == *name).collect();
        let exported = binutils::exports(&library.path);
        let mut missing = hooks_of(layer(library));
        let mut attached = BTreeSet::new();
        for (_, symbol, reason) in &rows {
            assert!(missing.remove(symbol), "{symbol} of {name} is there twice");
            if reason.is_none() {
                attached.insert(symbol.as_str());
            }
        }
        assert_eq!(missing, BTreeSet::new(), "no row for these of {name}");
        for (_, symbol, reason) in &rows {
            let Some(address) = exported.get(symbol) else {
                let reason = reason.as_deref();
                assert_eq!(reason, Some("not exported by this library"), "{symbol}");
                continue;
            };
            // Two names of one function: one is hooked, which sees both.
            let twin = reason.as_ref().map(|reason| {
                let twin = reason.strip_prefix("the same code as ");
                let twin = twin.and_then(|rest| rest.strip_suffix(", which is hooked"));
                twin.unwrap_or_else(|| panic!("{symbol} of {name}: {reason}"))
            });
            if let Some(twin) = twin {
                assert_eq!(exported.get(twin), Some(address), "{symbol} is not {twin}");
                assert!(attached.contains(twin), "{twin} is not hooked");
            }
        }
        println!(
            "{} {}: {} of {} names of the table attached, {} functions exported",
            library.package,
            library.version,
            attached.len(),
            hooks_of(layer(library)).len(),
            exported.keys().filter(|e| e.starts_with("cu")).count(),
        );
    }
}

/// The words of a name in the vendor's spelling, without digits and version: cuGLCtxCreate_v2 is
/// GL, Ctx, Create.
fn words(name: &str) -> Option<Vec<String>> {
    let rest = name.strip_prefix("cuda").filter(|r| !r.is_empty());
    let rest = rest.or_else(|| name.strip_prefix("cu"))?;
    let letters: Vec<char> = rest.split('_').next()?.chars().collect();
    if !letters.first()?.is_ascii_uppercase() {
        return None;
    }
    let mut words: Vec<String> = Vec::new();
    let mut before = '0';
    for (index, &letter) in letters.iter().enumerate() {
        let after = letters.get(index + 1);
        let begins = letter.is_ascii_uppercase()
            && (!before.is_ascii_uppercase() || after.is_some_and(char::is_ascii_lowercase));
        before = letter;
        match words.last_mut() {
            _ if letter.is_ascii_digit() => {}
            Some(word) if !begins => word.push(letter),
            _ => words.push(letter.to_string()),
        }
    }
    Some(words)
}

/// Whether a name speaks of taking or giving memory, of handles to it, or of the context or device
/// that calls are for. Rather too often than too seldom.
fn concerns_memory(name: &str) -> bool {
    const VERBS: [&str; 26] = [
        "Alloc",
        "Malloc",
        "Free",
        "Reserve",
        "Map",
        "Mapped",
        "Unmap",
        "Register",
        "Unregister",
        "Create",
        "Destroy",
        "Release",
        "Retain",
        "Import",
        "Open",
        "Close",
        "Trim",
        "Reset",
        "Attach",
        "Detach",
        "Bind",
        "Unbind",
        "Exit",
        "Push",
        "Pop",
        "Pool",
    ];
    let Some(words) = words(name) else {
        return false;
    };
    let has = |word: &str| words.iter().any(|w| w == word);
    let is_told = !has("Get") || has("Mapped") || has("Pool");
    let verb = VERBS
        .iter()
        .chain(&["Load", "Unload"])
        .any(|verb| has(verb));
    (has("Set") && (has("Ctx") || has("Device"))) || (verb && is_told)
}

/// Names that are not hooked, and why.
fn not_hooked() -> BTreeMap<&'static str, &'static str> {
    let mut reason = None;
    let mut names = BTreeMap::new();
    for line in include_str!("vendor/not_hooked.txt").lines() {
        if let Some(text) = line.strip_suffix(':') {
            reason = Some(text);
        } else if !line.starts_with('#') {
            for name in line.split_whitespace() {
                let before = names.insert(name, reason.expect("a reason comes first"));
                assert_eq!(before, None, "{name} is there twice");
            }
        }
    }
    names
}

/// A new version's new function makes this fail: it wants a row in the table, or a reason.
#[test]
fn every_function_that_concerns_memory_is_hooked_or_explained() {
    let not_hooked = not_hooked();
    for hook in HOOKS {
        let symbol = hook.symbol;
        assert!(concerns_memory(symbol), "{symbol} escapes the pattern");
        assert!(!not_hooked.contains_key(symbol), "{symbol} is hooked");
    }
    if !binutils::present() {
        return;
    }
    let mut unexplained = Vec::new();
    for library in hooked_libraries() {
        let hooks = hooks_of(layer(&library));
        for name in binutils::exports(&library.path).into_keys() {
            let is_known = hooks.contains(&name) || not_hooked.contains_key(name.as_str());
            if concerns_memory(&name) && !is_known {
                unexplained.push(format!("{name} of {} {}", library.name(), library.version));
            }
        }
    }
    assert!(unexplained.is_empty(), "{unexplained:#?}");
}

fn inspected(file: &Path, options: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vramscope-agent"))
        .arg("inspect")
        .args(options)
        .arg(file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// CUPTI calls the driver and is not called in its place.
#[test]
fn cupti_has_nothing_to_hook() {
    for library in libraries("libcupti.so.") {
        let text = inspected(&library.path, &[]);
        assert!(text.contains("not a library that the agent looks for by name"));
        assert!(text.contains("functions to hook  0\n"), "{text}");
        if binutils::present() {
            let exported = binutils::exports(&library.path);
            assert!(exported.contains_key("cuptiGetVersion"));
            let hooked = HOOKS.iter().find(|hook| exported.contains_key(hook.symbol));
            assert!(hooked.is_none(), "{hooked:?}");
        }
    }
}

/// The driver's functions begin with a comparison that the kernel would have to single-step. The
/// runtime's do not, and are probed where they begin.
#[test]
fn probes_of_the_driver_sit_behind_its_guard() {
    if !binutils::present() {
        return;
    }
    for library in hooked_libraries() {
        let text = inspected(&library.path, &["--json"]);
        let found: Value = serde_json::from_str(&text).unwrap();
        let exported = binutils::exports(&library.path);
        let functions = found["functions"].as_array().unwrap();
        assert!(functions.len() > 20, "{text}");
        let file = fs::File::open(&library.path).unwrap();
        for function in functions {
            let symbol = function["symbol"].as_str().unwrap();
            let address = exported[symbol];
            let offset = function["offset"].as_u64().unwrap();
            assert_eq!(
                offset,
                binutils::file_offset(&library.path, address),
                "{symbol}"
            );

            let mut code = [0; site::PREFIX];
            file.read_exact_at(&mut code, offset).unwrap();
            let displacement = site::displacement(&code);
            let instructions = binutils::instructions(&library.path, address);
            let names: Vec<_> = instructions.iter().map(|(at, n)| (*at, &n[..])).collect();
            if layer(&library) == Layer::Driver {
                assert_eq!(displacement, 10, "{symbol}");
                assert_eq!(names[..2], [(0, "cmpl"), (10, "je")], "{symbol}");
            } else {
                assert_eq!(displacement, 0, "{symbol}");
            }
        }
    }
}

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
    let results = calls.iter().map(|call| {
        let name = call.call.split(' ').next().unwrap();
        let (_, rest) = said.split_once(&format!("result {name} ")).unwrap();
        rest.lines().next().unwrap().parse().unwrap()
    });
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
