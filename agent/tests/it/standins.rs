//! The stand-in libraries and the workload, as built beside this test.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use arrow::array::RecordBatch;
use vramscope_fakes::ledger::{Layer, ProcessLedger, read_ledgers};
use vramscope_wire::{Table, parquet_file};

/// A folder with the stand-in libraries, one for their ledgers, and one for traces.
pub struct Bench {
    root: tempfile::TempDir,
}

fn profile_folder() -> PathBuf {
    let agent = Path::new(env!("CARGO_BIN_EXE_vramscope-agent"));
    agent
        .parent()
        .expect("a program lies in a folder")
        .to_path_buf()
}

impl Bench {
    /// `None`, said aloud, where probes cannot be loaded.
    pub fn new() -> Option<Self> {
        // SAFETY: a query without side effects.
        if unsafe { libc::geteuid() } != 0 {
            // Not by eprintln!, which the test harness keeps to itself when a test passes.
            let _ = writeln!(std::io::stderr(), "SKIPPED: probes need root");
            return None;
        }
        let bench = Self {
            root: tempfile::tempdir().unwrap(),
        };
        std::fs::create_dir(bench.books()).unwrap();
        bench.install(&bench.libraries());
        Some(bench)
    }

    /// Puts the libraries into a folder, replacing those that are there.
    pub fn install(&self, into: &Path) {
        vramscope_fakes::install::install(&profile_folder(), into)
            .unwrap_or_else(|error| panic!("{error}; build them with `cargo xtask build`"));
    }

    /// Puts the stand-in for a framework's allocator there, under the name it is looked for by.
    pub fn install_c10(&self, into: &Path) -> PathBuf {
        let built = profile_folder().join("libvramscope_fake_c10.so");
        let library = into.join("libc10_cuda.so");
        std::fs::copy(&built, &library).unwrap_or_else(|error| {
            panic!(
                "{}: {error}; build it with `cargo xtask build`",
                built.display()
            )
        });
        library
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn libraries(&self) -> PathBuf {
        self.root.path().join("lib")
    }

    pub fn books(&self) -> PathBuf {
        self.root.path().join("books")
    }

    pub fn trace(&self) -> PathBuf {
        self.root.path().join("trace")
    }

    pub fn workload() -> PathBuf {
        let path = profile_folder().join("vramscope-workload");
        assert!(
            path.exists(),
            "{} is missing; build it with `cargo xtask build`",
            path.display()
        );
        path
    }

    /// `vramscope-agent trace` with the stand-ins, ready for `-- CMD`.
    pub fn tracer(&self, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope-agent"));
        command
            .args(["trace", "-o"])
            .arg(self.trace())
            .args(options)
            .arg("--off-file")
            .arg(self.root.path().join("off"))
            .arg("--nvml-library")
            .arg(self.libraries().join("libnvidia-ml.so.1"))
            .env("LD_LIBRARY_PATH", self.libraries())
            .env("VRAMSCOPE_FAKE_DIR", self.books())
            .arg("--");
        command
    }

    /// The rows of one table of the trace.
    pub fn rows(&self, table: Table) -> Vec<RecordBatch> {
        let folder = self.trace().join(table.name());
        let files = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        files
            .flat_map(|path| {
                parquet_file::decode(table, std::fs::File::open(path).unwrap()).unwrap()
            })
            .collect()
    }

    /// The drivers' books, one a process.
    pub fn ledgers(&self) -> Vec<ProcessLedger> {
        let mut ledgers = read_ledgers(&self.books()).unwrap();
        ledgers.retain(|ledger| ledger.layer == Layer::Driver);
        ledgers
    }
}
