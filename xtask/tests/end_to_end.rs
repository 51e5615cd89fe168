//! The whole path on the stand-ins: workload → probes → agent → collector → SQL, compared with
//! the ledger that the stand-in driver kept by itself.
//!
//! Needs root (BPF) and what `cargo xtask build` builds; without either it is skipped aloud.
//! Run it with `cargo xtask test -p xtask --test end_to_end`.

mod gpu_check;

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use xtask::children::Child;
use xtask::project::Project;
use xtask::system::{Driver, System};

const WORKLOAD: Duration = Duration::from_secs(180);
const SETTLE: Duration = Duration::from_secs(90);

/// Agents of two tests would both see both tests' workloads; they would still be right, but two
/// cores are too few for that many debug builds at once.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

struct Bench {
    system: System,
    // Dropped after the system, which lies in it.
    _folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// A collector and an agent, running; None, said aloud, where they cannot run.
fn start(test: &str) -> Option<Bench> {
    let project = Project::find().unwrap();
    if let Some(reason) = cannot_run(&project) {
        // Not by eprintln!, which the test harness keeps to itself when a test passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
        return None;
    }
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let mut system = System::new(
        &project,
        &folder.path().join("system"),
        Driver::stand_ins(&project),
    )
    .unwrap();
    system.start_collector().unwrap();
    system.start_agent().unwrap();
    Some(Bench {
        system,
        _folder: folder,
        _turn: turn,
    })
}

fn cannot_run(project: &Project) -> Option<String> {
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

/// Waits for the workloads' last rows, stops everything in order, and compares what then lies in
/// the data folder: nothing can come after that.
fn compare_at_rest(bench: &mut Bench) -> Vec<String> {
    let system = &mut bench.system;
    let pids = system.ledger_pids().unwrap();
    system.wait_until_ended(&pids, SETTLE).unwrap();
    system.stop_agent().unwrap();
    system.stop_collector().unwrap();
    system.differences().unwrap()
}

fn no_differences() -> Vec<String> {
    Vec::new()
}

/// Every kind of scenario, one after the other under one agent, equals its ledger exactly.
#[test]
fn totals_equal_the_ledger() {
    let Some(mut bench) = start("totals_equal_the_ledger") else {
        return;
    };
    let scenarios: [(&[&str], i32); 6] = [
        (&["demo", "--requests", "50"], 0),
        (&["threads", "--threads", "8", "--iterations", "500"], 0),
        (&["fork"], 0),
        (&["fork", "--after-use"], 0),
        (&["exit-code", "7"], 7),
        (&["driver"], 0),
    ];
    for (arguments, code) in scenarios {
        let mut workload = bench.system.start_workload(arguments).unwrap();
        let status = workload.wait(WORKLOAD).unwrap();
        assert_eq!(
            status.code(),
            Some(code),
            "{arguments:?} ended with {status}"
        );
    }
    // A crash is a signal, not a code.
    let mut crash = bench.system.start_workload(&["crash"]).unwrap();
    assert_eq!(crash.wait(WORKLOAD).unwrap().code(), None);
    assert_eq!(compare_at_rest(&mut bench), no_differences());
    every_view_answers_in_full(&bench.system);
}

/// Plans differ between a lake's files and the small tables of the views' own tests, and between
/// some columns and all of them.
fn every_view_answers_in_full(system: &System) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../queries/sql");
    let mut views = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "sql") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            system.query(&format!("SELECT * FROM {name}")).unwrap();
            views += 1;
        }
    }
    assert!(views >= 10, "only {views} views were found");
}

/// A free that the driver refuses leaves the block alive, in the SQL as in the ledger.
#[test]
fn refused_frees_equal_the_ledger() {
    let Some(mut bench) = start("refused_frees_equal_the_ledger") else {
        return;
    };
    let mut workload = bench
        .system
        .start_workload_with(
            &["threads", "--threads", "4", "--iterations", "300"],
            &[("VRAMSCOPE_FAKE_FAIL_FREE", "7")],
        )
        .unwrap();
    workload.wait_success(WORKLOAD).unwrap();
    assert_eq!(compare_at_rest(&mut bench), no_differences());
}

/// A ledger with one allocation too many does not match: the comparison can fail.
#[test]
fn a_planted_miscount_is_found() {
    let Some(mut bench) = start("a_planted_miscount_is_found") else {
        return;
    };
    let mut workload = bench
        .system
        .start_workload_with(
            &["demo", "--requests", "10"],
            &[("VRAMSCOPE_FAKE_MISCOUNT", "1")],
        )
        .unwrap();
    workload.wait_success(WORKLOAD).unwrap();
    let pid = workload.id();
    let differences = compare_at_rest(&mut bench);
    let names_the_count = differences
        .iter()
        .any(|line| line.contains(&format!("process {pid}")) && line.contains("allocations"));
    assert!(names_the_count, "{differences:#?}");
}

/// Starts a steady workload of some seconds, and lets it run into the middle.
fn paced(bench: &Bench) -> Child {
    let workload = bench
        .system
        .start_workload(&["paced", "--seconds", "12", "--rate", "400"])
        .unwrap();
    xtask::children::sleep(Duration::from_secs(4)).unwrap();
    workload
}

/// The agent is killed while the workload allocates, and started again: nothing is lost and
/// nothing counts twice.
#[test]
fn a_killed_agent_loses_nothing() {
    let Some(mut bench) = start("a_killed_agent_loses_nothing") else {
        return;
    };
    let mut workload = paced(&bench);
    bench.system.kill_agent().unwrap();
    xtask::children::sleep(Duration::from_secs(1)).unwrap();
    bench.system.start_agent().unwrap();
    workload.wait_success(WORKLOAD).unwrap();
    assert_eq!(compare_at_rest(&mut bench), no_differences());
}

/// The collector is killed while the agent sends, and started again: nothing is lost and nothing
/// counts twice.
#[test]
fn a_killed_collector_loses_nothing() {
    let Some(mut bench) = start("a_killed_collector_loses_nothing") else {
        return;
    };
    let mut workload = paced(&bench);
    bench.system.kill_collector().unwrap();
    xtask::children::sleep(Duration::from_secs(1)).unwrap();
    bench.system.start_collector().unwrap();
    workload.wait_success(WORKLOAD).unwrap();
    assert_eq!(compare_at_rest(&mut bench), no_differences());
}
