//! The folder of `cargo xtask gpu-check`, run in a plain environment over the stand-ins: the
//! report's shape, and the checks that can pass without a card. What is compared inside is the
//! program's own account (ctypes, move_pages) with the agent's rows.

use std::io::Write;
use std::process::Command;

use serde_json::Value;
use xtask::commands::gpu_check;
use xtask::project::Project;
use xtask::torch;

use crate::bench::{cannot_run, say, take_turn};

/// Must pass on the stand-ins.
const PASS: [&str; 6] = [
    "system",
    "bpf",
    "one_malloc",
    "proc_address",
    "pinned_numa",
    "pair_cost",
];
/// Need PyTorch, which is hidden from the run.
const SKIP: [&str; 5] = [
    "accounting",
    "expandable_segments",
    "framework",
    "framework_expandable",
    "training_cost",
];

#[test]
fn the_report_has_its_shape_and_passes_what_it_can() {
    let project = Project::find().unwrap();
    let python = Command::new("python3").arg("--version").output();
    let reason = match cannot_run(&project) {
        None if python.is_err() => Some("there is no python3".to_string()),
        other => other,
    };
    if let Some(reason) = reason {
        // Not by eprintln!, which the test harness keeps to itself when a test passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED gpu-check: {reason}");
        return;
    }
    let _turn = take_turn();
    let folder = tempfile::tempdir().unwrap();
    let check = folder.path().join("gpu-check");
    gpu_check::prepare(&project.binary("vramscope-agent"), &check).unwrap();

    let output = Command::new(check.join("run.sh"))
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("LD_LIBRARY_PATH", project.standins())
        .env("VRAMSCOPE_FAKE_DIR", folder.path().join("ledgers"))
        // Whatever this machine has installed, the test sees no PyTorch.
        .env("VRAMSCOPE_GPU_CHECK_NO_TORCH", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("the report is no JSON ({error}): {said}"));
    assert_eq!(report["tool"], "vramscope gpu-check");
    assert_eq!(report["card"], "Stand-in GPU");
    let checks = report["checks"].as_object().unwrap();
    assert_eq!(checks.len(), PASS.len() + SKIP.len());
    for (name, check) in checks {
        let wanted = if SKIP.contains(&name.as_str()) {
            "skipped"
        } else {
            "ok"
        };
        assert_eq!(check["status"], wanted, "{name}: {check}");
        assert!(check["detail"].is_string() && check["numbers"].is_object());
    }
    assert!(PASS.iter().all(|name| checks.contains_key(*name)));
    assert_eq!(checks["one_malloc"]["numbers"]["counted_rows"], 1);
    assert_eq!(output.status.code(), Some(0), "{said}");
}

/// The checks that need PyTorch, where all of it is in the cache. What is left out multiplies
/// matrices, which the stand-ins cannot.
#[test]
fn pytorchs_own_account_equals_the_rows() {
    const CHECKS: [&str; 4] = [
        "accounting",
        "expandable_segments",
        "framework",
        "framework_expandable",
    ];
    let project = Project::find().unwrap();
    let full = torch::cache_folder().ok();
    let full = full.and_then(|cache| torch::find_full(&cache));
    let Some(full) = full.filter(|_| cannot_run(&project).is_none()) else {
        say("SKIPPED gpu-check on PyTorch: it needs root, and `cargo xtask torch --full`");
        return;
    };
    let _turn = take_turn();
    let folder = tempfile::tempdir().unwrap();
    let check = folder.path().join("gpu-check");
    gpu_check::prepare(&project.binary("vramscope-agent"), &check).unwrap();
    let mut command = Command::new(check.join("run.sh"));
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("PYTHON", &full.python)
        .env("VRAMSCOPE_FAKE_DIR", folder.path().join("ledgers"));
    torch::on_standins(&project, &full.libraries, &mut command);
    for check in CHECKS {
        command.args(["--only", check]);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("the report is no JSON ({error}): {said}"));
    for name in CHECKS {
        let check = &report["checks"][name];
        assert_eq!(check["status"], "ok", "{name}: {check}");
    }
    let numbers = &report["checks"]["framework"]["numbers"];
    assert_eq!(numbers["checkpoints"], 7);
    assert!(numbers["blocks"].as_u64() > Some(40), "{numbers}");
}

/// Without anything to check, it still says so in one report and does not fail.
#[test]
fn a_machine_without_cuda_gets_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let python = Command::new("python3").arg("--version").output();
    if python.is_err() {
        let _ = writeln!(std::io::stderr(), "SKIPPED gpu-check: there is no python3");
        return;
    }
    let check = folder.path().join("gpu-check");
    // Any program serves: it fails as an agent does where it may not trace.
    gpu_check::prepare("/bin/false".as_ref(), &check).unwrap();
    let output = Command::new(check.join("run.sh"))
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("VRAMSCOPE_GPU_CHECK_NO_TORCH", "1")
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let status = |name: &str| report["checks"][name]["status"].clone();
    assert_eq!(status("bpf"), "failed");
    assert_eq!(status("one_malloc"), "skipped");
    assert_eq!(status("training_cost"), "skipped");
    assert_eq!(output.status.code(), Some(1), "a failed check is told");
}
