//! Builds and installs the libraries, and runs programs on them.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    time::{Duration, Instant, SystemTime},
};

use tempfile::TempDir;
use vramscope_fakes::{
    install::{LIBRARIES, install},
    ledger::{Kind, Layer, ProcessLedger, Totals, read_ledgers},
};

pub const MIB: u64 = 1 << 20;

/// The programs of this package that cargo has built for the test.
const WORKLOAD: &str = env!("CARGO_BIN_EXE_vramscope-workload");

/// The folder that holds the libraries under the vendor's names.
pub fn standins() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let built = Path::new(WORKLOAD).parent().unwrap();
        build_if_stale(built);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("standins");
        install(built, &folder).unwrap();
        folder
    })
}

/// Cargo does not build a test's shared libraries: they are built here if one is missing or older
/// than a source file.
fn build_if_stale(built: &Path) {
    let newest_source = newest(Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap()));
    let is_stale = LIBRARIES.iter().any(|(name, _)| {
        let modified = built.join(name).metadata().and_then(|m| m.modified());
        modified.map_or(true, |modified| modified < newest_source)
    });
    if !is_stale {
        return;
    }
    let build = "cargo build -p vramscope-fake-cuda -p vramscope-fake-cudart -p vramscope-fake-cupti -p vramscope-fake-nvml";
    let mut words = build.split(' ').skip(1);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(&mut words);
    command.current_dir(std::env::var("CARGO_MANIFEST_DIR").unwrap());
    let status = command.status().unwrap();
    assert!(status.success(), "failed to build the libraries: {build}");
}

/// The youngest library source below a folder; the programs and tests do not go into the libraries.
fn newest(folder: &Path) -> SystemTime {
    let mut youngest = SystemTime::UNIX_EPOCH;
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let modified = if path.is_dir() {
            if name == "bin" || name == "tests" {
                continue;
            }
            newest(&path)
        } else if name.ends_with(".rs") || name == "Cargo.toml" {
            path.metadata().unwrap().modified().unwrap()
        } else {
            continue;
        };
        youngest = youngest.max(modified);
    }
    youngest
}

/// A folder of ledgers, and programs that write into it.
pub struct Bench {
    folder: TempDir,
}

impl Bench {
    pub fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A program that runs on the stand-ins.
    pub fn program(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", standins())
            .env("VRAMSCOPE_FAKE_DIR", self.folder())
            .env_remove("VRAMSCOPE_FAKE_MISCOUNT")
            .env_remove("VRAMSCOPE_FAKE_DEVICE_BYTES")
            .env_remove("VRAMSCOPE_FAKE_FAIL_FREE");
        command
    }

    pub fn workload(&self, arguments: &str) -> Command {
        let mut command = self.program(WORKLOAD);
        command.args(arguments.split_ascii_whitespace());
        command
    }

    pub fn ledgers(&self) -> Vec<ProcessLedger> {
        read_ledgers(self.folder()).unwrap()
    }

    /// The only ledger of a layer.
    pub fn ledger(&self, layer: Layer) -> ProcessLedger {
        let mut found = self.ledgers();
        found.retain(|ledger| ledger.layer == layer);
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    /// The only ledger of a layer whose process allocated so many bytes of device memory on device 0.
    pub fn ledger_with(&self, layer: Layer, allocated: u64) -> ProcessLedger {
        let mut found = self.ledgers();
        found.retain(|ledger| {
            let totals = ledger.totals(0, Kind::Device);
            ledger.layer == layer && totals.allocated_bytes == allocated
        });
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    /// Waits until the driver's ledger says what `reached` wants of device memory on device 0.
    pub fn wait_for(&self, reached: impl Fn(Totals) -> bool) {
        let started = Instant::now();
        loop {
            let ledgers = self.ledgers();
            let mut drivers = ledgers
                .iter()
                .filter(|ledger| ledger.layer == Layer::Driver);
            if drivers.any(|ledger| reached(ledger.totals(0, Kind::Device))) {
                return;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "{ledgers:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Runs a program to its end, which must be exit code 0.
pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    output
}

/// Totals from the numbers that decide them: the rest follows.
#[derive(Clone, Copy)]
pub struct Expected {
    pub allocations: u64,
    pub failed_allocations: u64,
    pub frees: u64,
    pub failed_frees: u64,
    pub allocated: u64,
    pub freed: u64,
    pub peak: u64,
}

impl Expected {
    pub const NONE: Self = Self {
        allocations: 0,
        failed_allocations: 0,
        frees: 0,
        failed_frees: 0,
        allocated: 0,
        freed: 0,
        peak: 0,
    };

    /// One block that stays.
    pub const fn held(bytes: u64) -> Self {
        Self {
            allocations: 1,
            allocated: bytes,
            peak: bytes,
            ..Self::NONE
        }
    }

    /// So many blocks of so many bytes together, all ended, of which at most `peak` lived at once.
    pub const fn ended(blocks: u64, bytes: u64, peak: u64) -> Self {
        Self {
            allocations: blocks,
            frees: blocks,
            allocated: bytes,
            freed: bytes,
            peak,
            ..Self::NONE
        }
    }

    /// With failures besides.
    pub const fn failing(self, allocations: u64, frees: u64) -> Self {
        Self {
            failed_allocations: allocations,
            failed_frees: frees,
            ..self
        }
    }

    pub fn totals(&self) -> Totals {
        Totals {
            allocations: self.allocations,
            failed_allocations: self.failed_allocations,
            frees: self.frees,
            failed_frees: self.failed_frees,
            live_count: self.allocations - self.frees,
            live_bytes: self.allocated - self.freed,
            peak_bytes: self.peak,
            allocated_bytes: self.allocated,
            freed_bytes: self.freed,
        }
    }
}

/// Compares a ledger with what is expected of (device, kind); all else must be zero.
#[track_caller]
pub fn assert_ledger(ledger: &ProcessLedger, expected: &[(u32, Kind, Expected)]) {
    let expected: Vec<_> = expected
        .iter()
        .map(|(device, kind, expected)| (Some(*device), *kind, *expected))
        .collect();
    assert_books(ledger, &expected);
}

/// As [`assert_ledger`], where some things belong to no device.
#[track_caller]
pub fn assert_books(ledger: &ProcessLedger, expected: &[(Option<u32>, Kind, Expected)]) {
    for device in [Some(0), Some(1), None] {
        for kind in Kind::ALL {
            let wanted = expected
                .iter()
                .find(|(d, k, _)| (*d, *k) == (device, kind))
                .map_or(Totals::default(), |(_, _, totals)| totals.totals());
            let found = match device {
                Some(device) => ledger.totals(device, kind),
                None => ledger.without_device[kind.name()],
            };
            let layer = ledger.layer;
            assert_eq!(
                found, wanted,
                "{layer:?} ledger, device {device:?}, {kind:?}"
            );
        }
    }
}

/// Runs one `#[ignore]`d test of this program in a process of its own, on the stand-ins.
pub fn run_alone(bench: &Bench, test: &str, configure: impl FnOnce(&mut Command)) {
    let mut command = bench.program(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command.env(ALONE, "1");
    configure(&mut command);
    let output = succeed(&mut command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("1 passed"), "{test} did not run: {text}");
}

const ALONE: &str = "VRAMSCOPE_TEST_ALONE";

/// Whether [`run_alone`] started this process. A test that only makes sense there passes otherwise,
/// and says so.
pub fn is_alone() -> bool {
    let alone = std::env::var_os(ALONE).is_some();
    if !alone {
        eprintln!("skipped: another test of this program runs it in a process of its own");
    }
    alone
}
