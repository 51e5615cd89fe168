//! The real psql.

use std::process::Stdio;

use vramscope_queries::views;
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use super::{psql, seed, start};
use crate::support::*;

/// What psql prints for commands, one after the other on one connection: standard output, and
/// standard error.
fn run(port: u16, commands: &[&str]) -> Option<(String, String)> {
    let mut command = psql(port)?;
    for text in commands {
        command.args(["-c", text]);
    }
    let output = command.output().unwrap();
    Some((
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    ))
}

/// The same once it is known whether events were lost. On a busy machine the collector may not find
/// out in time, and says so.
fn run_knowing(port: u16, commands: &[&str]) -> Option<(String, String)> {
    for _ in 0..100 {
        let found = run(port, commands)?;
        if !found.1.contains("is not known") {
            return Some(found);
        }
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    panic!("it is never known whether events were lost");
}

fn names(listing: &str, column: usize) -> Vec<&str> {
    let mut names: Vec<&str> = listing
        .lines()
        .filter_map(|line| line.split('|').nth(column))
        .collect();
    names.sort_unstable();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_are_answered() {
    let data = tempfile::tempdir().unwrap();
    let (collector, port) = start(data.path(), &[]);
    seed(&collector).await;
    let live = "SELECT sum(CASE op WHEN 'alloc' THEN bytes ELSE -bytes END) FROM alloc_events WHERE counted";
    let two = "SELECT 'a;b'; SELECT op, bytes, counted, ts FROM alloc_events ORDER BY seq";
    let Some((out, errors)) = run_knowing(port, &[live, two]) else {
        return;
    };
    assert_eq!(
        out,
        "3145728\n\
         a;b\n\
         alloc|1048576|t|2026-11-29 13:05:00+00\n\
         alloc|3145728|t|2026-11-29 13:05:01+00\n\
         free|1048576|t|2026-11-29 13:05:02+00\n\
         alloc||f|2026-11-29 13:05:03+00\n",
        "{errors}"
    );
    assert_eq!(errors, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_catalog_is_listed() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let Some((tables, errors)) = run(port, &["\\dt"]) else {
        return;
    };
    let mut expected: Vec<&str> = Table::ALL.iter().map(|table| table.name()).collect();
    expected.sort_unstable();
    assert_eq!(names(&tables, 1), expected, "{errors}");
    assert!(tables.starts_with("public|"), "{tables}");

    let (listing, errors) = run(port, &["\\dv"]).unwrap();
    let mut expected: Vec<&str> = views::ALL.iter().map(|view| view.name).collect();
    expected.sort_unstable();
    assert_eq!(names(&listing, 1), expected, "{errors}");

    // Types from the wire's documentation of the columns, spelled as PostgreSQL does.
    let (columns, errors) = run(port, &["\\d alloc_events"]).unwrap();
    for expected in [
        "ts|timestamp with time zone||not null|",
        "agent_id|text||not null|",
        "batch_seq|bigint||not null|",
        "bytes|bigint|||",
        "counted|boolean||not null|",
        "date|date||not null|",
    ] {
        assert!(
            columns.contains(expected),
            "no {expected} in\n{columns}{errors}"
        );
    }
    let (view, errors) = run(port, &["\\d+ tetrahedron"]).unwrap();
    // What the view's own header says of a column.
    let told = "process_id|bigint||||plain|one process lifetime";
    assert!(view.contains(told), "{view}{errors}");

    for (command, expected) in [
        ("\\l", "vramscope|vramscope|UTF8|"),
        ("\\dn", "public|vramscope"),
        ("\\df", "public|oom_class|"),
        ("\\dt+ stacks", "a row is"),
        ("\\du", "me|"),
        ("\\d", "public|tetrahedron|view|vramscope"),
        ("\\conninfo", "me"),
        ("\\dT", ""),
        ("\\di", ""),
        ("\\dx", ""),
        ("\\dp stacks", "public|stacks|table"),
        ("\\sv tetrahedron", "SELECT"),
        ("\\dS pg_class", "relname|text||not null|"),
    ] {
        let (listing, errors) = run(port, &[command]).unwrap();
        assert!(listing.contains(expected), "{command}: {listing}{errors}");
        assert!(!errors.contains("ERROR"), "{command}: {errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_the_codes_of_postgresql() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &["--query-max-rows", "100"]);
    for (sql, code) in [
        ("SELEC 1", "42601"),
        ("SELECT * FROM nonesuch", "42P01"),
        ("SELECT nonesuch FROM stacks", "42703"),
        ("SELECT nonesuch(1)", "42883"),
        ("SELECT 1/0", "22012"),
        ("SELECT 'x'::int", "22P02"),
        ("SELECT * FROM range(0, 101)", "54000"),
        ("SET nonesuch = 1", "42704"),
        ("SET client_encoding = 'LATIN1'", "22023"),
        ("DROP TABLE stacks", "25006"),
        ("SELECT 'nonesuch'::regclass", "42P01"),
        ("EXECUTE nonesuch", "0A000"),
    ] {
        let Some((out, errors)) = run(port, &[sql]) else {
            return;
        };
        assert_eq!(out, "", "{sql}");
        let expected = format!("ERROR:  {code}: ");
        assert!(errors.contains(&expected), "{sql}: {errors}");
    }
    // An error ends the message it came in, and nothing after it runs.
    let (out, errors) = run(port, &["SELECT 1; SELECT nonesuch FROM stacks; SELECT 2"]).unwrap();
    assert_eq!(out, "1\n");
    assert!(errors.contains("42703"), "{errors}");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_over_losses_say_so() {
    let data = tempfile::tempdir().unwrap();
    let (collector, port) = start(data.path(), &[]);
    seed(&collector).await;
    let question = "SELECT count(*) FROM alloc_events";
    let Some((out, errors)) = run_knowing(port, &[question]) else {
        return;
    };
    assert_eq!((out.as_str(), errors.as_str()), ("4\n", ""));
    let (batch, rows) = made(Table::AgentWindows, "agent-a", 2, 40);
    let lossy = rows.column_by_name("lossy").unwrap();
    let lossy = arrow::array::AsArray::as_boolean(lossy).true_count();
    assert!(lossy > 0);
    let acks = push(&collector.address, vec![batch]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored], "{acks:?}");
    wait_for_rows(&collector.address, Table::AgentWindows, 40).await;
    drop(collector);
    // What was known before may be used for a while: a new start knows nothing.
    let (_collector, port) = start(data.path(), &[]);
    let (out, errors) = run_knowing(port, &[question, "SELECT 1"]).unwrap();
    assert_eq!(out, "4\n1\n");
    assert_eq!(errors.matches("NOTICE:").count(), 1, "{errors}");
    let windows = if lossy == 1 { "window" } else { "windows" };
    let told = format!("in {lossy} {windows}; see answer_quality");
    assert!(errors.contains(&told), "{errors}");
    let (_, errors) = run(port, &["SET client_min_messages = warning", question]).unwrap();
    assert_eq!(errors, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn control_c_cancels() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let Some(mut command) = psql(port) else {
        return;
    };
    let forever = "SELECT count(*) FROM range(0, 10000000) a, range(0, 10000000) b WHERE a.value * b.value % 7 = 3";
    let child = command
        .args(["-c", "SELECT 1", "-c", forever])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Whenever the signal comes: once the question runs, it ends by it.
    let pid = child.id().to_string();
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(2));
        std::process::Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap();
    });
    let output = child.wait_with_output().unwrap();
    stopper.join().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("57014"), "{errors}");
    assert!(errors.contains("user request"), "{errors}");
}
