//! `vramscope map` and `vramscope why` from outside, on the seeded data ([`crate::seed`]) and on
//! snapshots of real programs.

mod burst;
mod diff;
mod leaks;
mod map;
mod profiles;
mod real;
mod recording;
mod why;

use serde_json::Value;

use crate::cli::{stderr, stdout, vramscope};
use crate::seed;

pub fn trace() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    seed::write_trace(dir.path());
    let path = dir.path().to_str().unwrap().to_string();
    (dir, path)
}

/// Runs a command over the seeded data: exit code, stdout, stderr.
pub fn run(arguments: &[&str]) -> (i32, String, String) {
    let (_guard, data) = trace();
    let mut all = vec![arguments[0], "--data", &data];
    all.extend(&arguments[1..]);
    let output = vramscope(&all);
    (
        output.status.code().unwrap(),
        stdout(&output),
        stderr(&output),
    )
}

pub fn json(arguments: &[&str]) -> Value {
    let (code, out, err) = run(&[arguments, &["--json"]].concat());
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}
