//! The vendor's real libraries: the runtime and CUPTI from their wheels, the driver from Debian.
//! Stand-ins are what we believe; these say whether it is so. No GPU is needed: what a library
//! exports is told by binutils, and without a driver every call fails, which is a path of its own.
//!
//! Libraries that are not there and cannot be fetched are skipped aloud.

mod apt;
mod binutils;
mod cache;
mod failing;
mod names;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use vramscope_agent::probes::hooks::{HOOKS, Layer};
use vramscope_agent::probes::site;

use crate::daemon::Daemon;
use crate::program::Program;
use crate::standins::Bench;
use cache::{VendorLibrary, libraries};

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
            if layer(&library) == Layer::Driver {
                let instructions = binutils::instructions(&library.path, address);
                let names: Vec<_> = instructions.iter().map(|(at, n)| (*at, &n[..])).collect();
                assert_eq!(displacement, 10, "{symbol}");
                assert_eq!(names[..2], [(0, "cmpl"), (10, "je")], "{symbol}");
            } else {
                assert_eq!(displacement, 0, "{symbol}");
            }
        }
    }
}

/// The results in the program's order, and the first words written.
fn answers(said: &str) -> Vec<(i32, u64)> {
    let lines = said.lines().filter_map(|line| line.split_once("result "));
    let words = lines.map(|(_, rest)| rest.split(' ').collect::<Vec<_>>());
    words
        .map(|words| (words[1].parse().unwrap(), words[2].parse().unwrap()))
        .collect()
}

/// The runtime asks the driver for its functions by name and version, as other programs may. What
/// it is given are the exported functions, and those are hooked: there is no door past the hooks.
#[test]
fn the_driver_hands_out_what_is_hooked() {
    const ASK: &str = "cuGetProcAddress_v2";
    const VERSIONS: [u32; 6] = [3000, 4000, 11020, 12000, 12020, 13000];
    if !binutils::present() {
        return;
    }
    for library in libraries("libcuda.so.") {
        let exported = binutils::exports(&library.path);
        let hooks = hooks_of(Layer::Driver);
        let bases: BTreeSet<&str> = hooks.iter().map(|s| s.split('_').next().unwrap()).collect();
        let mut told = format!("open {}\nwhere {ASK}\n", library.path.display());
        for base in &bases {
            for version in VERSIONS {
                // By default, and with a default stream for each thread.
                for flags in [0, 2] {
                    told += &format!("call {ASK} text:{base} room {version} {flags} 0\n");
                }
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("told");
        fs::write(&script, &told).unwrap();
        let output = Command::new(Program::exe())
            .args([
                "--ignored",
                "--exact",
                "program::run_as_told",
                "--nocapture",
            ])
            .stdin(fs::File::open(&script).unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let mut answers = answers(&String::from_utf8_lossy(&output.stdout)).into_iter();
        let (_, at) = answers.next().unwrap();
        let start = at - exported[ASK];

        let mut given = BTreeSet::new();
        for (call, (result, address)) in told.lines().skip(2).zip(answers) {
            if result != 0 || address == 0 {
                continue;
            }
            let is_here = |(_, exported): &(&String, &u64)| start + **exported == address;
            let mut names = exported.iter().filter(is_here).map(|(name, _)| name);
            let hooked = names.find(|name| hooks.contains(*name));
            given.insert(hooked.unwrap_or_else(|| panic!("{call}: {address:#x} is not hooked")));
        }
        assert!(given.len() > 40, "{given:?}");
        println!(
            "{} {}: {} functions",
            library.package,
            library.version,
            given.len()
        );
    }
}
