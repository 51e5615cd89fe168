//! A running system for a test, and the comparison that every test ends with.

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vramscope_fakes::ledger::ProcessLedger;
use xtask::compare::{Row, Source};
use xtask::project::Project;
use xtask::system::{Driver, System};

/// How long a workload may take.
pub const WORKLOAD: Duration = Duration::from_secs(180);

/// How long the tables may take to know of every end.
const SETTLE: Duration = Duration::from_secs(90);

/// Agents of two tests would not see each other's workloads as theirs, but two cores are too few
/// for that many debug builds at once.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// See the module's text.
pub struct Bench {
    pub system: System,
    // Dropped after the system, which lies in it.
    _folder: Folder,
    _turn: MutexGuard<'static, ()>,
}

/// What lies in it stays if the test fails.
struct Folder(Option<tempfile::TempDir>);

impl Drop for Folder {
    fn drop(&mut self) {
        if let (true, Some(folder)) = (std::thread::panicking(), self.0.take()) {
            say(&format!(
                "data and logs are kept in {}",
                folder.keep().display()
            ));
        }
    }
}

/// Says something that the test harness does not keep to itself.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Waits until no other test runs.
pub fn take_turn() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why the tests cannot run here.
pub fn cannot_run(project: &Project) -> Option<String> {
    // SAFETY: plain system call.
    if unsafe { libc::geteuid() } != 0 {
        return Some("it loads BPF programs, which needs root".to_string());
    }
    let needed = [
        project.bpf_object(),
        project.binary("vramscope-agent"),
        project.binary("vramscope-collector"),
        project.binary("vramscope"),
        project.binary("vramscope-workload"),
        project.binary("vramscope-workload-static"),
        project.standins().join("libcuda.so.1"),
    ];
    let missing: Option<&Path> = needed.iter().map(|p| p.as_path()).find(|p| !p.exists());
    missing.map(|path| {
        format!(
            "{} is not built: run `cargo xtask build` first",
            path.display()
        )
    })
}

impl Bench {
    /// A collector and an agent, running; None, said aloud, where they cannot run.
    pub fn start(test: &str) -> Option<Self> {
        let project = Project::find().unwrap();
        if let Some(reason) = cannot_run(&project) {
            say(&format!("SKIPPED {test}: {reason}"));
            return None;
        }
        let turn = take_turn();
        let folder = tempfile::tempdir().unwrap();
        let mut system = System::new(
            &project,
            &folder.path().join("system"),
            Driver::stand_ins(&project),
        )
        .unwrap();
        system.start_collector().unwrap();
        system.start_agent().unwrap();
        Some(Self {
            system,
            _folder: Folder(Some(folder)),
            _turn: turn,
        })
    }

    /// Waits for the workloads' last rows and stops everything in order: nothing can come after
    /// that. Gives the books.
    pub fn come_to_rest(&mut self) -> Vec<ProcessLedger> {
        let system = &mut self.system;
        let pids = system.ledger_pids().unwrap();
        system.wait_until_ended(&pids, SETTLE).unwrap();
        system.stop_agent().unwrap();
        system.stop_collector().unwrap();
        system.read_ledgers().unwrap()
    }

    /// Totals and both roll-ups equal the books.
    pub fn assert_equal_to_ledgers(&self) {
        for source in Source::ALL {
            let differences = self.system.differences_in(source).unwrap();
            assert_eq!(differences, Vec::<String>::new(), "{source:?}");
        }
    }

    pub fn query(&self, sql: &str) -> Vec<Row> {
        self.system.query(sql).unwrap()
    }

    /// No window lost anything.
    pub fn assert_nothing_lost(&self) {
        for view in ["losses", "answer_quality"] {
            let rows = self.query(&format!("SELECT * FROM {view}"));
            assert_eq!(rows, Vec::<Row>::new(), "{view}");
        }
    }
}
