//! The leak detectors on simulated hosts, small: what `cargo xtask bench leaks` does on hundreds of
//! hosts, on two and their clean twins. The truth comes from the simulator, which knows nothing of
//! the detectors.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use xtask::project::Project;

use crate::bench::say;

/// Bytes that every request leaves behind.
const LEAK: f64 = 100_000.0;

/// Of those that detectors are tuned on.
const SEEDS: [u64; 2] = [3, 5];

fn json_of(command: &mut Command) -> Value {
    let output = command.env_remove("LD_LIBRARY_PATH").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Writes the hosts and asks for their leaks: the truth of each host, and what was said.
fn judge(project: &Project, folder: &Path, leak: Option<Value>) -> (Vec<Value>, Vec<Value>) {
    let plan: Vec<Value> = SEEDS
        .iter()
        .map(|seed| {
            let condition = json!({
                "leak": leak, "ambiguous": null, "deploy": false, "hours": 48, "window_seconds": 300,
            });
            json!({"host": format!("sim-{seed}"), "seed": seed, "condition": condition})
        })
        .collect();
    std::fs::create_dir_all(folder).unwrap();
    let (file, data) = (folder.join("plan.json"), folder.join("data"));
    std::fs::write(&file, Value::from(plan).to_string()).unwrap();
    let mut write = Command::new(project.binary("vramscope-bench"));
    // Always the made-up traces: the test is the same on every machine.
    write.env("VRAMSCOPE_SHARED", "/nonexistent");
    let written = json_of(write.arg("leak-hosts").arg(&file).arg("--into").arg(&data));
    let mut ask = Command::new(project.binary("vramscope"));
    ask.args(["sql", "--format", "json", "-c"]);
    ask.arg("SELECT host, stack_id, tier, rank FROM leak_by_stack");
    let said = json_of(ask.arg("--data").arg(&data));
    let list = |value: &Value| value.as_array().unwrap().clone();
    (list(&written["hosts"]), list(&said))
}

/// Every planted stack is confirmed and stands first on its host; without the leak nobody is
/// accused.
#[test]
fn a_planted_leak_is_confirmed_and_first_and_its_clean_twin_is_silent() {
    let project = Project::find().unwrap();
    for program in ["vramscope-bench", "vramscope"] {
        let path = project.binary(program);
        if !path.exists() {
            let path = path.display();
            say(&format!(
                "SKIPPED: {path} is not built: run `cargo xtask build` first"
            ));
            return;
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let leak = json!({"kind": "request", "bytes_per_request": LEAK});
    let (hosts, said) = judge(&project, &folder.path().join("leaky"), Some(leak));
    for host in &hosts {
        let planted = &host["truth"]["planted_stack_ids"];
        let is_planted = |row: &Value| planted.as_array().unwrap().contains(&row["stack_id"]);
        let of_host: Vec<&Value> = said
            .iter()
            .filter(|row| row["host"] == host["host"])
            .collect();
        let confirmed = of_host
            .iter()
            .any(|row| is_planted(row) && row["tier"] == "confirmed");
        assert!(confirmed, "{planted} is not confirmed: {of_host:#?}");
        let first = of_host
            .iter()
            .min_by_key(|row| row["rank"].as_i64())
            .unwrap();
        assert!(is_planted(first), "{planted} is not first: {of_host:#?}");
    }
    let (_, said) = judge(&project, &folder.path().join("clean"), None);
    let accused: Vec<&Value> = said
        .iter()
        .filter(|row| row["tier"] == "confirmed")
        .collect();
    assert_eq!(accused, Vec::<&Value>::new());
}
