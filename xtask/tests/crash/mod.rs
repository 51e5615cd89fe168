//! What a collector promises, in short: five rounds of what `cargo xtask bench crash` does in a
//! hundred. And the proof of the proof: a collector whose syncs do nothing is found.

use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use serde_json::Value;
use xtask::project::Project;

use crate::bench::{say, take_turn};

/// The seed of a run that is to be repeated.
const SEED: &str = "VRAMSCOPE_CRASH_SEED";

/// Runs the harness in a folder; `None`, said aloud, where it is not built.
fn harness(test: &str, folder: &Path, arguments: &[&str]) -> Option<Value> {
    let project = Project::find().unwrap();
    let (bench, collector) = (
        project.binary("vramscope-bench"),
        project.binary("vramscope-collector"),
    );
    for program in [&bench, &collector] {
        if !program.exists() {
            let path = program.display();
            say(&format!(
                "SKIPPED {test}: {path} is not built: run `cargo xtask build` first"
            ));
            return None;
        }
    }
    let seed = std::env::var(SEED).unwrap_or_else(|_| {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        since.unwrap().as_nanos().to_string()
    });
    say(&format!("{test}: repeat with {SEED}={seed}"));
    let output = Command::new(bench)
        .args(["crash", "--seed", &seed])
        .arg("--collector")
        .arg(collector)
        .arg("--folder")
        .arg(folder)
        .args(arguments)
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    if let Some(reason) = found["skipped"].as_str() {
        say(&format!(
            "SKIPPED in {test}, power cuts and full disks: {reason}"
        ));
    }
    Some(found)
}

#[test]
fn five_rounds_of_kills_and_power_cuts_lose_nothing_and_double_nothing() {
    let _turn = take_turn();
    let folder = tempfile::tempdir().unwrap();
    let test = "five_rounds_of_kills_and_power_cuts";
    let Some(found) = harness(test, folder.path(), &["--rounds", "5"]) else {
        return;
    };
    for figure in ["lost", "doubled", "foreign", "changed", "broken"] {
        assert_eq!(found[figure], 0, "{figure}: {found:#}");
    }
    assert_eq!(found["rounds"], 5, "{found:#}");
    assert_ne!(found["acknowledged_batches"], 0, "{found:#}");
}

/// Acknowledged before it was synced, then the power goes: the rows are gone, and the harness says
/// how many.
#[test]
fn a_collector_that_acknowledges_before_it_syncs_is_found() {
    let _turn = take_turn();
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "--planted-bug",
        "--rounds",
        "1",
        "--only",
        "power-cut",
        "--only",
        "kill",
    ];
    let test = "a_collector_that_acknowledges_before_it_syncs";
    let Some(found) = harness(test, folder.path(), &arguments) else {
        return;
    };
    if found["skipped"].is_null() {
        assert_ne!(found["lost"], 0, "{found:#}");
        assert_ne!(found["findings"].as_array().unwrap().len(), 0);
    }
}
