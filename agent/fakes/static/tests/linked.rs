//! The program with the runtime linked in: what a tracer finds in it, and that it does the same.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use object::{Object, ObjectSymbol};
use vramscope_fakes::ledger::{Kind, Layer, read_ledgers};

const PROGRAM: &str = env!("CARGO_BIN_EXE_vramscope-workload-static");

#[test]
fn the_runtimes_functions_are_symbols_of_the_program_and_no_library_exports_them() {
    let bytes = fs::read(PROGRAM).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let defines = |name: &str| {
        let is_it =
            |symbol: object::Symbol<'_, '_>| symbol.is_definition() && symbol.name() == Ok(name);
        (file.symbols().any(is_it), file.dynamic_symbols().any(is_it))
    };
    for name in [
        "cudaMalloc",
        "cudaFree",
        "cudaMallocAsync_ptsz",
        "cudaMalloc3D",
    ] {
        assert_eq!(defines(name), (true, false), "{name}");
    }
}

/// Cargo builds no shared library for a test; the driver's is built here if it is missing.
fn driver_library() -> std::path::PathBuf {
    let built = Path::new(PROGRAM).with_file_name("libvramscope_fake_cuda.so");
    if !built.exists() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let build = ["build", "-p", "vramscope-fake-cuda"];
        let status = Command::new(cargo)
            .args(build)
            .current_dir(std::env::var("CARGO_MANIFEST_DIR").unwrap())
            .status();
        assert!(status.unwrap().success(), "failed to build the driver");
    }
    built
}

/// `devices` through the linked runtime, on a system that has only the driver's library.
#[test]
fn it_runs_without_a_runtime_library() {
    let folder = tempfile::tempdir().unwrap();
    let (libraries, books) = (folder.path().join("lib"), folder.path().join("books"));
    fs::create_dir(&libraries).unwrap();
    fs::copy(driver_library(), libraries.join("libcuda.so.1")).unwrap();
    let run = |program: &Path| {
        let status = Command::new(program)
            .arg("devices")
            .env("LD_LIBRARY_PATH", &libraries)
            .env("VRAMSCOPE_FAKE_DIR", &books)
            .env_remove("VRAMSCOPE_FAKE_MISCOUNT")
            .env_remove("VRAMSCOPE_FAKE_FAIL_FREE")
            .stderr(Stdio::inherit())
            .status();
        assert!(status.unwrap().success());
        let ledgers = read_ledgers(&books).unwrap();
        fs::remove_dir_all(&books).unwrap();
        for layer in [Layer::Driver, Layer::Runtime] {
            assert!(ledgers.iter().any(|ledger| ledger.layer == layer));
        }
        // The driver's totals of the scenario, worked out by hand in its own test.
        let driver = ledgers.iter().find(|ledger| ledger.layer == Layer::Driver);
        let totals = driver.unwrap().totals(1, Kind::Device);
        assert_eq!((totals.allocations, totals.live_bytes), (4, 15 << 20));
    };
    run(Path::new(PROGRAM));

    let stripped = folder.path().join("stripped");
    match Command::new("strip")
        .arg("-o")
        .arg(&stripped)
        .arg(PROGRAM)
        .status()
    {
        Ok(status) => assert!(status.success()),
        Err(error) => {
            // Not by eprintln!, which the test harness keeps to itself when a test passes.
            let _ = writeln!(std::io::stderr(), "SKIPPED: strip cannot be run: {error}");
            return;
        }
    }
    let bytes = fs::read(&stripped).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    assert_eq!(file.symbols().count(), 0);
    run(&stripped);
}
