//! Stacks of programs that know their own call chains: C++ and Rust, optimised and without frame
//! pointers. Each writes for every allocation which of its functions led there; the stacks that were
//! traced have to have exactly those of its functions, in that order.
//!
//! The programs are compiled by the compilers at hand; where there is none, that test says so and
//! passes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use vramscope_wire::Table;

use crate::standins::Bench;

/// Bytes asked for, and the program's own functions, innermost first.
type Chain = (i64, Vec<String>);

fn source(name: &str) -> PathBuf {
    Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap())
        .join("tests/it/chains")
        .join(name)
}

/// Runs a compiler; `false`, said aloud, if there is none.
fn compiled(compiler: &str, arguments: &[&str], from: &str, to: &Path) -> bool {
    let mut command = Command::new(compiler);
    command.args(arguments).arg(source(from)).arg("-o").arg(to);
    match command.output() {
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{compiler} {from}: {errors}");
            true
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: no {compiler} here: {error}");
            false
        }
    }
}

fn cpp(bench: &Bench) -> Option<PathBuf> {
    let program = bench.root().join("chain");
    let options = ["-O2", "-fomit-frame-pointer", "-fno-ipa-icf", "-pthread"];
    compiled("c++", &options, "chain.cpp", &program).then_some(program)
}

/// One row of the trace: its stack's functions, innermost first without arguments, and its quality.
struct Traced {
    bytes: i64,
    api: String,
    functions: Vec<String>,
    quality: String,
}

fn rows(bench: &Bench) -> Vec<Traced> {
    let mut stacks = HashMap::new();
    for batch in bench.rows(Table::Stacks) {
        let ids = batch["stack_id"].as_primitive::<Int64Type>();
        let folded = batch["folded"].as_string::<i32>();
        for row in 0..batch.num_rows() {
            let outermost_first = folded.value(row).split(';');
            let functions: Vec<String> = outermost_first.rev().map(plain).collect();
            stacks.insert(ids.value(row), functions);
        }
    }
    let mut traced = Vec::new();
    for batch in bench.rows(Table::AllocEvents) {
        let numbers = |name: &str| batch[name].as_primitive::<Int64Type>();
        let texts = |name: &str| batch[name].as_string::<i32>();
        for row in 0..batch.num_rows() {
            if texts("op").value(row) != "alloc" {
                continue;
            }
            let stack = stacks.get(&numbers("stack_id").value(row));
            traced.push(Traced {
                bytes: numbers("requested_bytes").value(row),
                api: texts("api").value(row).to_string(),
                functions: stack.cloned().unwrap_or_default(),
                quality: texts("stack_quality").value(row).to_string(),
            });
        }
    }
    traced
}

/// A function's name as the programs write theirs.
fn plain(function: &str) -> String {
    let name = function.split('(').next().unwrap_or_default();
    // Templates differ in their number; the program tells odd from even, as each step is other code.
    let Some(rest) = name.split("Step<").nth(1) else {
        return name.to_string();
    };
    let number: u32 = rest.split('>').next().unwrap().parse().unwrap();
    let kind = if number.is_multiple_of(2) {
        "even"
    } else {
        "odd"
    };
    format!("Step<{kind}>::down")
}

/// Traces the program; what it wrote.
fn run(bench: &Bench, options: &[&str], program: &Path, arguments: &[&str]) -> Vec<Chain> {
    let output = bench
        .tracer(options)
        .arg(program)
        .args(arguments)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let chains: Vec<Chain> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| {
            let (bytes, chain) = line.split_once(' ').unwrap();
            let functions = chain.split(';').map(str::to_string).collect();
            (bytes.parse().unwrap(), functions)
        })
        .collect();
    assert!(!chains.is_empty(), "{errors}");
    chains
}

/// Of a stack, the functions that are the program's own.
fn own<'a>(traced: &'a Traced, chains: &[Chain]) -> Vec<&'a str> {
    let names: HashSet<&str> = chains
        .iter()
        .flat_map(|(_, functions)| functions.iter().map(String::as_str))
        .collect();
    let functions = traced.functions.iter().map(String::as_str);
    functions.filter(|name| names.contains(name)).collect()
}

/// Every allocation that the program wrote of is there, with its whole chain.
fn assert_whole(bench: &Bench, chains: &[Chain], api: &str) {
    let mut expected: BTreeMap<i64, Vec<&Chain>> = BTreeMap::new();
    for chain in chains {
        expected.entry(chain.0).or_default().push(chain);
    }
    let rows = rows(bench);
    let rows: Vec<&Traced> = rows.iter().filter(|row| row.api == api).collect();
    assert_eq!(rows.len(), chains.len());
    for row in rows {
        let (_, functions) = expected[&row.bytes][0];
        assert_eq!(own(row, chains), *functions, "{:?}", row.functions);
        assert_eq!(row.quality, "full", "{:?}", row.functions);
        assert_eq!(row.functions[0], api);
    }
}

#[test]
fn every_frame_of_cpp_without_frame_pointers() {
    let Some(bench) = Bench::new() else { return };
    let Some(program) = cpp(&bench) else { return };
    let chains = run(&bench, &[], &program, &["all", "3"]);
    assert_eq!(chains.len(), 12);
    assert!(chains.iter().all(|(_, functions)| functions.len() > 30));
    assert_whole(&bench, &chains, "cudaMalloc");
}

#[test]
fn every_frame_of_rust_without_frame_pointers() {
    let Some(bench) = Bench::new() else { return };
    let program = bench.root().join("chain");
    let options = [
        "--edition=2024",
        "-Copt-level=2",
        "-Cforce-frame-pointers=no",
        "-Cdebuginfo=0",
    ];
    if !compiled("rustc", &options, "chain.rs", &program) {
        return;
    }
    let chains = run(&bench, &[], &program, &[]);
    assert_eq!(chains.len(), 3);
    assert_whole(&bench, &chains, "cudaMalloc");
}

/// While an outer function's return probe is pending, its return address is not on the stack.
#[test]
fn return_probes_of_outer_functions_hide_nothing() {
    let Some(bench) = Bench::new() else { return };
    let Some(program) = cpp(&bench) else { return };
    let libraries = bench.libraries();
    let shared = ["-O2", "-fPIC", "-shared"];
    let driver = [&shared[..], &["-DDRIVER"]].concat();
    for (options, name) in [(&driver[..], "libcuda.so.1"), (&shared, "libcudart.so.13")] {
        assert!(compiled(
            "c++",
            options,
            "probed.cpp",
            &libraries.join(name)
        ));
    }
    let chains = run(&bench, &[], &program, &["outer"]);
    assert_eq!(chains.len(), 3);
    assert_whole(&bench, &chains, "cuMemAlloc_v2");
    let rows = rows(&bench);
    let passes = |row: &Traced| row.functions.iter().any(|name| name == "cudaSetDevice");
    assert!(rows.iter().all(passes), "{:?}", rows[0].functions);
}

/// What the copied bytes do not reach is missing, and the row says so; more bytes reach it.
#[test]
fn a_deeper_stack_than_was_copied_says_so() {
    for (bytes, is_whole) in [("16KiB", false), ("64KiB", true)] {
        let Some(bench) = Bench::new() else { return };
        let Some(program) = cpp(&bench) else { return };
        let options = ["--stack-bytes", bytes];
        let chains = run(&bench, &options, &program, &["deep", "40"]);
        if is_whole {
            assert_whole(&bench, &chains, "cudaMalloc");
            continue;
        }
        let rows = rows(&bench);
        let row = rows.iter().find(|row| row.api == "cudaMalloc").unwrap();
        let seen = own(row, &chains);
        assert_eq!(row.quality, "truncated");
        assert_eq!(seen, chains[0].1[..seen.len()]);
        // A frame takes 1,024 bytes and little more.
        assert!((12..18).contains(&seen.len()), "{seen:?}");
    }
}

/// Nothing is copied: the frame pointers, which these programs do not keep, say what they can, and
/// no row claims more.
#[test]
fn without_a_copy_no_stack_is_called_whole() {
    let Some(bench) = Bench::new() else { return };
    let Some(program) = cpp(&bench) else { return };
    let options = ["--stack-bytes", "0B"];
    let chains = run(&bench, &options, &program, &["all", "1"]);
    let rows = rows(&bench);
    let rows: Vec<&Traced> = rows.iter().filter(|row| row.api == "cudaMalloc").collect();
    assert_eq!(rows.len(), chains.len());
    for row in rows {
        assert_ne!(row.quality, "full");
        assert_eq!(
            row.functions[..2],
            ["cudaMalloc", "leaf"],
            "{:?}",
            row.functions
        );
    }
}

#[test]
fn a_size_that_no_record_has_is_refused() {
    let Some(bench) = Bench::new() else { return };
    let mut tracer = bench.tracer(&["--stack-bytes", "5KiB"]);
    let output = tracer.arg("true").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        errors.contains("stack_bytes is 5KiB") && errors.contains("64KiB"),
        "{errors}"
    );
}
