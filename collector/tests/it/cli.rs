//! Flags, configuration, and what the command says when it refuses.

use std::path::Path;
use std::process::Output;

use vramscope_wire::Table;

use crate::support::*;

fn serve(args: &[&str]) -> Output {
    binary().arg("serve").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn refusal(args: &[&str]) -> String {
    let output = serve(args);
    assert!(!output.status.success(), "{args:?}");
    text(&output.stderr)
}

#[test]
fn a_second_collector_on_a_folder_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let folder = data.path().to_str().unwrap();
    let error = refusal(&["--data", folder, "--listen", "127.0.0.1:0"]);
    assert!(
        error.contains("another collector holds") && error.contains(folder),
        "{error}"
    );
    // The kernel lets go of the lock however the first one ends.
    collector.kill();
    assert!(Collector::start(data.path(), FAST).stop().success());
}

#[test]
fn an_address_that_is_not_loopback_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().to_str().unwrap();
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:7717"] {
        let error = refusal(&["--data", folder, "--listen", address]);
        assert!(
            error.contains("no credentials are configured"),
            "{address}: {error}"
        );
    }
    assert_eq!(std::fs::read_dir(data.path()).unwrap().count(), 0);
}

#[test]
fn the_printed_configuration_round_trips() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("collector.toml");
    let printed = binary()
        .args([
            "serve",
            "--print-config",
            "--data",
            "/srv/lake",
            "--wal-limit-bytes",
            "123456",
        ])
        .env("VRAMSCOPE_COLLECTOR_COMMIT_INTERVAL", "1500ms")
        .output()
        .unwrap();
    assert!(printed.status.success());
    let toml = text(&printed.stdout);
    for line in [
        "data = \"/srv/lake\"",
        "commit_interval = \"1500ms\"",
        "wal_limit_bytes = \"123456\"",
    ] {
        assert!(toml.contains(line), "{line}: {toml}");
    }
    std::fs::write(&file, &toml).unwrap();
    let config = file.to_str().unwrap();
    assert_eq!(
        text(&serve(&["--config", config, "--print-config"]).stdout),
        toml
    );
    // A flag wins over the file, and the environment over the file too.
    let flagged = serve(&[
        "--config",
        config,
        "--print-config",
        "--commit-interval",
        "7s",
    ]);
    assert!(text(&flagged.stdout).contains("commit_interval = \"7s\""));
    let from_environment = binary()
        .args(["serve", "--config", config, "--print-config"])
        .env("VRAMSCOPE_COLLECTOR_QUERY_MAX_ROWS", "5")
        .output()
        .unwrap();
    assert!(text(&from_environment.stdout).contains("query_max_rows = 5"));
}

#[test]
fn an_unknown_key_is_named_with_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("collector.toml");
    std::fs::write(&file, "data = \"/srv/lake\"\ncommit_intervall = \"2s\"\n").unwrap();
    let config = file.to_str().unwrap();
    let error = refusal(&["--config", config]);
    assert!(
        error.contains("commit_intervall") && error.contains(config),
        "{error}"
    );
    std::fs::write(&file, "commit_interval = \"2 parsecs\"\n").unwrap();
    let error = refusal(&["--config", config]);
    assert!(
        error.contains("2 parsecs") && error.contains(config),
        "{error}"
    );
    let error = refusal(&["--config", "/nonexistent/collector.toml"]);
    assert!(error.contains("/nonexistent/collector.toml"), "{error}");
    let error = refusal(&[]);
    assert!(error.contains("no data folder"), "{error}");
}

fn status(data: &Path) -> serde_json::Value {
    let output = binary()
        .args(["status", "--json", "--data"])
        .arg(data)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_agents_log_and_tables() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), NEVER);
    let batches = vec![
        made(Table::Stacks, "agent-a", 4, 10).0,
        made(Table::Devices, "agent-a", 6, 7).0,
    ];
    push(&collector.address, batches).await;
    let waiting = status(data.path());
    assert_eq!(waiting["running"], true);
    assert_eq!(waiting["log"]["batches"], 2);
    assert_eq!(waiting["agents"][0]["agent_id"], "agent-a");
    assert_eq!(waiting["agents"][0]["highest_batch_seq"], 6);
    assert_eq!(waiting["agents"][0]["waiting_batches"], 2);
    // Number 5 never came.
    assert_eq!(waiting["agents"][0]["missing_batches"], 1);
    assert!(collector.stop().success());

    let stopped = status(data.path());
    assert_eq!(stopped["running"], false);
    assert_eq!(stopped["log"]["batches"], 0);
    assert_eq!(stopped["agents"][0]["highest_batch_seq"], 6);
    assert_eq!(stopped["agents"][0]["waiting_batches"], 0);
    assert_eq!(stopped["agents"][0]["missing_batches"], 1);
    let rows = |name: &str| {
        let tables = stopped["tables"].as_array().unwrap();
        tables.iter().find(|table| table["table"] == name).unwrap()["rows"].clone()
    };
    assert_eq!(
        (rows("stacks"), rows("devices"), rows("processes")),
        (10.into(), 7.into(), 0.into())
    );
    let text = text(
        &binary()
            .args(["status", "--data"])
            .arg(data.path())
            .output()
            .unwrap()
            .stdout,
    );
    assert!(
        text.contains("agent-a") && text.contains("no collector is running"),
        "{text}"
    );
}
