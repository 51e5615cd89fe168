//! Questions that want more than there is: memory, disk, stack.

use std::io::Write;

use serde_json::{Value, json};

use super::{dial, is_well, peak_bytes};
use crate::http::{ask, start, until_it_breaks};
use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_query_of_a_hundred_gigabytes_fails_and_the_rest_goes_on() {
    let data = tempfile::tempdir().unwrap();
    let flags = [
        "--query-memory-bytes",
        "256MiB",
        "--spill-limit-bytes",
        "64MiB",
    ];
    let (collector, http) = start(data.path(), &flags);
    // Each holds a hundred GB: in one value, in groups, in a sort that spills more than it may.
    for sql in [
        "SELECT length(string_agg(repeat('x', 1000) || value, '')) FROM range(0, 100000000)",
        // (By a key in no order: groups in the order of their rows are handed out one by one.)
        "SELECT value * 7919 % 100000007 AS k, array_agg(repeat('x', 1000)) FROM range(0, 100000000) GROUP BY k",
        "SELECT value, repeat('x', 1000) AS pad FROM range(0, 100000000) ORDER BY pad, value DESC LIMIT 1 OFFSET 99999998",
    ] {
        let answer = ask(&http, json!({ "sql": sql })).await;
        let status = answer.status().as_u16();
        // What has groups or runs may hand out some before it fails: then it breaks off.
        let (bytes, whole) = until_it_breaks(answer).await;
        let end = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(2000)..]).into_owned();
        assert!(
            status == 507 || (status == 200 && !whole),
            "{sql}: {status} {end}"
        );
        assert!(end.contains("memory_limit"), "{sql}: {end}");
    }
    // A client that asks for everything and reads nothing holds no place for ever.
    let mut deaf = dial(&http);
    let question = r#"{"sql":"SELECT repeat('x', 1000) FROM range(0, 9000000)","timeout_ms":1000}"#;
    let request = format!(
        "POST /api/v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{question}",
        question.len()
    );
    deaf.write_all(request.as_bytes()).unwrap();
    is_well(&http, &collector).await;
    assert!(
        peak_bytes(&collector) < 1 << 30,
        "{}",
        peak_bytes(&collector)
    );
    // Nothing is left of what was spilled.
    let spill = data.path().join("_spill");
    let left: u64 = walk(&spill);
    assert!(left < 1 << 20, "{left} bytes are left in {spill:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_single_call_makes_counts_as_well() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), &["--query-memory-bytes", "256MiB"]);
    let doubled = (0..12).fold(
        "SELECT repeat('x', 20000000 + value) AS s FROM range(0, 1)".to_string(),
        |sql, _| format!("SELECT s || s AS s FROM ({sql})"),
    );
    for sql in [
        "SELECT cardinality(range(0, 1000000000))",
        "SELECT length(repeat('x', 1900000000))",
        "SELECT max(length(lpad('x', 1000000 + value))) FROM range(0, 8192)",
        "SELECT max(length(replace(s, 'x', repeat('y', 1000)))) FROM (SELECT repeat('x', 1000000 + value) AS s FROM range(0, 8192))",
        "SELECT max(s) FROM (SELECT sum(value) OVER () AS s FROM range(0, 1000000000))",
        &format!("SELECT length(s) FROM ({doubled})"),
    ] {
        let answer = ask(&http, json!({ "sql": sql })).await;
        assert_eq!(answer.status(), 507, "{sql}");
        let body: Value = answer.json().await.unwrap();
        assert_eq!(body["error"]["code"], "memory_limit", "{sql}: {body}");
    }
    // What can be had a piece at a time is answered: 2,000 lists of 100,001 numbers; 2,000 texts of a
    // million characters and one to four digits.
    for (sql, expected) in [
        (
            "SELECT sum(cardinality(array_append(range(0, 100000), value))) AS n FROM range(0, 2000)",
            200_002_000_i64,
        ),
        (
            "SELECT sum(length(repeat('x', 1000000) || value)) AS n FROM range(0, 2000)",
            2_000_006_890,
        ),
    ] {
        let answer = ask(&http, json!({ "sql": sql })).await;
        assert_eq!(answer.status(), 200, "{sql}");
        let body: Value = answer.json().await.unwrap();
        assert_eq!(body["rows"][0][0], json!(expected), "{sql}: {body}");
    }
    is_well(&http, &collector).await;
    let peak = peak_bytes(&collector);
    assert!(peak < 1 << 30, "{peak}");
}

/// Of each level a thread's stack has a part, and a stack that overflows ends the process.
#[tokio::test(flavor = "multi_thread")]
async fn statements_deeper_than_a_stack_are_refused() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), FAST);
    let chain = |link: &str, times: usize| format!("SELECT 1{}", link.repeat(times));
    let steps = |times: usize| {
        let first = "WITH a0 AS (SELECT value AS x FROM range(0, 3))".to_string();
        let all = (1..times).fold(first, |sql, n| {
            format!("{sql}, a{n} AS (SELECT x + 1 AS x FROM a{})", n - 1)
        });
        format!("{all} SELECT max(x) FROM a{}", times - 1)
    };
    for sql in [
        chain("+1", 500_000),
        chain(" UNION ALL SELECT 1", 50_000),
        chain("::INT", 150_000),
        chain("=1 OR 1", 100_000),
        chain(" FROM range(1), range(1)", 1) + &", range(1)".repeat(50_000),
        steps(5_000),
    ] {
        let answer = ask(&http, json!({ "sql": sql })).await;
        assert_eq!(answer.status(), 400, "{}", &sql[..60]);
        let error: Value = answer.json().await.unwrap();
        let text = error.to_string();
        assert!(text.contains("chain of"), "{}: {text}", &sql[..60]);
        let error = crate::support::sql(&collector.address, &sql).await;
        let error = error.unwrap_err();
        assert!(error.contains("chain of"), "{}: {error}", &sql[..60]);
    }
    // What is deep and within the limit is answered: 2 MiB, a usual stack, were not enough for it.
    for (sql, expected) in [(steps(100), 101), (chain("+1", 900), 901)] {
        let answer = ask(&http, json!({ "sql": sql })).await;
        assert_eq!(answer.status(), 200, "{}", &sql[..60]);
        let body: Value = answer.json().await.unwrap();
        assert_eq!(body["rows"][0][0], json!(expected), "{}", &sql[..60]);
    }
    is_well(&http, &collector).await;
}

/// A few lines that become gigabytes when they are written out.
#[tokio::test(flavor = "multi_thread")]
async fn statements_that_grow_when_they_are_planned_are_refused() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), FAST);
    let grown = |times: usize, step: &str, end: &str| {
        let first = "WITH a0 AS (SELECT value AS x FROM range(0, 3))".to_string();
        let all = (1..=times).fold(first, |sql, n| {
            let step = step.replace("BELOW", &format!("a{}", n - 1));
            format!("{sql}, a{n} AS ({step})")
        });
        format!("{all} {}", end.replace("LAST", &format!("a{times}")))
    };
    let sum = "SELECT x + x AS x FROM BELOW";
    let choice = "SELECT CASE WHEN x > 1 THEN x ELSE -x END AS x FROM BELOW";
    let union = "SELECT x FROM BELOW UNION ALL SELECT x FROM BELOW";
    let within = "SELECT x FROM BELOW WHERE x IN (SELECT x FROM BELOW)";
    for sql in [
        grown(30, sum, "SELECT max(x) FROM LAST"),
        grown(90, sum, "SELECT x FROM LAST WHERE x > 7"),
        grown(25, choice, "SELECT x FROM LAST WHERE x > 7"),
        grown(70, union, "SELECT count(*) FROM LAST"),
        grown(70, within, "SELECT count(*) FROM LAST"),
    ] {
        for sql in [sql.clone(), format!("EXPLAIN {sql}")] {
            let answer = ask(&http, json!({ "sql": sql })).await;
            assert_eq!(answer.status(), 400, "{}", &sql[..90]);
            let error = answer.text().await.unwrap();
            assert!(error.contains("written out"), "{}: {error}", &sql[..90]);
        }
    }
    // What stays small is answered.
    let small = grown(10, sum, "SELECT max(x) FROM LAST");
    let answer = ask(&http, json!({ "sql": small })).await;
    let body: Value = answer.json().await.unwrap();
    assert_eq!(body["rows"][0][0], json!(2 << 10), "{body}");
    is_well(&http, &collector).await;
    assert!(
        peak_bytes(&collector) < 1 << 30,
        "{}",
        peak_bytes(&collector)
    );
}

/// Bytes of all files below a folder.
fn walk(dir: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&entry.path()),
            _ => entry.metadata().map_or(0, |metadata| metadata.len()),
        })
        .sum()
}
