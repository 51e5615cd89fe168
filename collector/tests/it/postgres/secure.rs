//! The door with credentials and TLS, made by the commands that users have; the real psql shows
//! passwords.

use std::path::Path;
use std::process::Output;

use super::psql;
use crate::support::*;

fn command(dir: &Path, arguments: &[&str]) -> String {
    let output = binary()
        .args(arguments)
        .arg("--dir")
        .arg(dir)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The last word of what a command prints: the new password.
fn password_of(said: &str) -> String {
    said.split_whitespace().last().unwrap().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_open_the_door_and_only_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    let data = tempfile::tempdir().unwrap();
    command(dir.path(), &["init", "--host", "collector.example"]);
    let alice = password_of(&command(dir.path(), &["user", "add", "alice"]));
    let config = dir.path().join("collector.toml");
    let flags = [
        "--config",
        config.to_str().unwrap(),
        "--postgres-listen",
        "127.0.0.1:0",
    ];
    let mut collector = Collector::start(data.path(), &flags);
    let address = collector.announced("postgresql on ");
    let port = address.rsplit(':').next().unwrap().parse().unwrap();
    let ask = |user: &str, password: &str, mode: &str| -> Option<Output> {
        let output = psql(port)?
            .args(["-h", "collector.example", "-U", user, "-w"])
            .env("PGHOSTADDR", "127.0.0.1")
            .env("PGSSLMODE", mode)
            .env("PGSSLROOTCERT", dir.path().join("ca.pem"))
            .env("PGPASSWORD", password)
            .args(["-c", "SELECT current_user, count(*) FROM alloc_events"])
            .output();
        Some(output.unwrap())
    };
    let Some(output) = ask("alice", &alice, "verify-full") else {
        return;
    };
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "alice|0\n",
        "{output:?}"
    );
    for (user, password, mode, expected) in [
        (
            "alice",
            "not her password",
            "verify-full",
            "password authentication failed",
        ),
        (
            "nobody",
            alice.as_str(),
            "verify-full",
            "password authentication failed",
        ),
        ("alice", alice.as_str(), "disable", "not encrypted"),
        ("alice", "", "verify-full", "no password supplied"),
    ] {
        let output = ask(user, password, mode).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{user} {mode}");
        assert!(errors.contains(expected), "{user} {mode}: {errors}");
    }
    // Whoever was let in before is let in still: the failures were few.
    let output = ask("alice", &alice, "require").unwrap();
    assert!(output.status.success(), "{output:?}");
}
