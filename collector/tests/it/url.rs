//! `vramscope sql` against a running collector, by each protocol of its URLs.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use vramscope_wire::Table;

use crate::support::*;

/// The command, which another package builds into the same folder.
fn vramscope() -> Option<Command> {
    let collector = PathBuf::from(env!("CARGO_BIN_EXE_vramscope-collector"));
    let path = collector.with_file_name("vramscope");
    if !path.is_file() {
        eprintln!("skipped: {} is not built", path.display());
        return None;
    }
    let mut command = Command::new(path);
    for variable in ["VRAMSCOPE_TOKEN", "VRAMSCOPE_CA_FILE", "PGPASSWORD"] {
        command.env_remove(variable);
    }
    Some(command)
}

fn ask(place: [&str; 2], sql: &str) -> Option<Output> {
    let mut command = vramscope()?;
    command
        .arg("sql")
        .args(place)
        .args(["--format", "json", "-c", sql]);
    Some(command.output().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_protocol_gives_the_same_answer() {
    let data = tempfile::tempdir().unwrap();
    let doors = [
        "--http-listen",
        "127.0.0.1:0",
        "--postgres-listen",
        "127.0.0.1:0",
    ];
    let flags = [&doors, FAST].concat();
    let mut collector = Collector::start(data.path(), &flags);
    let http = format!("http://{}", collector.announced("http on "));
    let postgres = format!("postgresql://{}", collector.announced("postgresql on "));
    let (batch, _) = made(Table::Traffic, "agent-a", 1, 40);
    push(&collector.address, vec![batch]).await;
    wait_for_rows(&collector.address, Table::Traffic, 40).await;
    let grpc = collector.address.replace("http://", "grpc://");
    let asked = tokio::task::spawn_blocking(move || {
        let sql = "SELECT count(*) AS rows, min(ts) AS first, NULL AS nothing FROM traffic";
        let mut answers = Vec::new();
        for place in [
            ["--collector", &collector.address],
            ["--url", &grpc],
            ["--url", &http],
            ["--url", &postgres],
        ] {
            let Some(output) = ask(place, sql) else {
                return;
            };
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{place:?}: {errors}");
            answers.push(serde_json::from_slice::<Value>(&output.stdout).unwrap());
        }
        assert_eq!(answers[0][0]["rows"], json!(40));
        assert!(
            answers.iter().all(|answer| *answer == answers[0]),
            "{answers:?}"
        );
        // The collector's own words, and what is no collector.
        for place in [["--url", &grpc], ["--url", &http], ["--url", &postgres]] {
            let Some(output) = ask(place, "SELECT nonesuch FROM traffic") else {
                return;
            };
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1));
            assert!(errors.contains("nonesuch"), "{errors}");
        }
        let wrong = ask(["--url", "http://127.0.0.1:9/"], "SELECT 1");
        let errors = String::from_utf8_lossy(&wrong.unwrap().stderr).into_owned();
        assert!(errors.contains("127.0.0.1:9"), "{errors}");
    });
    asked.await.unwrap();
}
