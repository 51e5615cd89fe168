//! Functions that make much of little: the engine's answers, in the books of the query's memory.

use std::sync::Arc;

use arrow::util::pretty::pretty_format_batches;
use datafusion::error::Result;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::TryStreamExt;
use vramscope_queries::session::{Limits, Options, query, session};

/// Every function, with constants and columns, NULLs and empty values; of the last ones the
/// result is made in pieces.
const CALLS: &[&str] = &[
    "a || b, b || a || n, a || NULL, 'x' || n, n || 'x', [n] || [2, n], [a] || b",
    "concat(a, b, n), concat('x', a), concat_ws('-', a, b), concat_ws(a, b, 'x', b)",
    "repeat(a, n), repeat('ab', n), repeat(a, 3), repeat(NULL, n)",
    "lpad(a, n), lpad(a, n, b), rpad(a, n), rpad('é', n, 'ü')",
    "replace(a, 'a', b), replace(a, '', 'x'), replace('aaa', b, a)",
    "regexp_replace(a, '(a+)', '<\\1\\1>', 'g'), regexp_replace(a, 'b', b)",
    "translate(a, 'ab', 'üé'), overlay(a placing b from 2), encode(a, 'hex')",
    "string_to_array(a, 'a'), string_to_array(a, NULL), array_to_string([a, b, NULL], '-', '?')",
    "array_to_string([n, NULL], b), array_repeat(a, n), array_repeat([n], 2)",
    "make_array(a, b, 'n'), array_append([a], b), array_prepend(a, [b]), array_concat([a], [b, a])",
    "array_resize([n, 2], 4, n), array_resize([n], n), flatten([[n], [1, 2]])",
    "array_replace([1, n], n, 7), array_replace_all([n, n], n, NULL), array_union([n], [1, 2])",
    "arrays_zip([n], [a, b]), map(['k'], [a]), map([coalesce(n, 0)], [b])",
    "range(n), range(1, n), range(n, 1, -2), generate_series(1, n), generate_series(n, 20, 3)",
    "generate_series(DATE '2026-01-31', DATE '2026-06-01', INTERVAL '1 month')",
    "range(TIMESTAMP '2026-01-01', TIMESTAMP '2026-01-02', INTERVAL '7 hours')",
    "right(repeat('ab', 4000 + n), 3), length(lpad(a, 9000 + n, b)), cardinality(range(4000))",
    "length(repeat(a, 90 * n) || b), right(replace(repeat('ab', 999 * n), 'b', a), 9)",
];

async fn answer(session: &SessionContext, sql: &str) -> Result<String> {
    let rows = query(session, sql, Limits::default()).await;
    let batches: Vec<_> = rows?.try_collect().await?;
    Ok(pretty_format_batches(&batches)?.to_string())
}

#[tokio::test]
async fn answers_are_the_engines_own() {
    let mut config = SessionConfig::new();
    config.options_mut().sql_parser.map_string_types_to_utf8view = false;
    let engine = SessionContext::new_with_config(config);
    let ours = session(&Options::default()).unwrap();
    for calls in CALLS {
        let sql = format!(
            "SELECT {calls} FROM (
               SELECT nullif(value % 23, 11) AS n,
                 CASE value % 5 WHEN 0 THEN '' WHEN 1 THEN NULL
                   ELSE repeat('ab', (value % 7)::BIGINT) || 'ü' END AS a,
                 CASE value % 3 WHEN 1 THEN 'b' WHEN 2 THEN '' END AS b
               FROM range(0, 4000))"
        );
        let expected = answer(&engine, &sql).await.unwrap();
        let got = answer(&ours, &sql).await.unwrap();
        assert!(got == expected, "{calls}");
    }
}

#[tokio::test]
async fn what_is_made_is_booked_as_long_as_it_is_there() {
    let options = Options {
        memory_bytes: 96 << 20,
        ..Options::default()
    };
    let session = session(&options).unwrap();
    let pool = Arc::clone(&session.runtime_env().memory_pool);
    let sql = "SELECT repeat('x', 4000000 + value) AS s FROM range(0, 9)";
    let rows = query(&session, sql, Limits::default()).await.unwrap();
    let batches: Vec<_> = rows.try_collect().await.unwrap();
    let bytes = pool.reserved();
    assert!((36_000_000..40_000_000).contains(&bytes), "{bytes}");
    let last = batches[0].slice(8, 1);
    drop(batches);
    assert_eq!(pool.reserved(), bytes, "a slice keeps all");
    drop(last);
    assert_eq!(pool.reserved(), 0);

    let constants =
        "SELECT length(repeat('x', 30000000)), cardinality(range(3000000)) FROM range(1)";
    for _ in 0..4 {
        answer(&session, constants).await.unwrap();
        assert_eq!(pool.reserved(), 0);
    }

    // A constant, rows together, one row; a doubling that starts small.
    for call in [
        "range(0, 1000000000)",
        "repeat('x', 1900000000)",
        "repeat('x', 8000000 + value)",
        "lpad('x', 1900000000 + value)",
        "range(value, 1000000000)",
        "replace(repeat('x', 1000000 + value), 'x', repeat('y', 2000))",
        "array_repeat('x', 1000000000 + value)",
        "array_resize([1], 1000000000 + value, 7)",
    ] {
        let sql = format!("SELECT {call} FROM range(0, 16)");
        let error = answer(&session, &sql).await.unwrap_err().to_string();
        assert!(error.contains("Resources exhausted"), "{call}: {error}");
    }
    // Small texts that double: by the operator, and by what the planner makes something else of.
    for (doubled, name) in [
        ("s || s", "text_concat"),
        ("concat(s, 'a', 'b', s)", "concat"),
        ("concat_ws('', s, s)", "concat"),
        ("array_to_string([s, s], '')", "array_to_string"),
    ] {
        let sql = (0..9).fold(
            "SELECT repeat('x', 100000 + value) AS s FROM range(0, 9)".to_string(),
            |sql, _| format!("SELECT {doubled} AS s FROM ({sql})"),
        );
        let error = answer(&session, &sql).await.unwrap_err().to_string();
        assert!(error.contains(&format!("failed for {name} ")), "{error}");
    }
}

#[tokio::test]
async fn constants_are_not_repeated_for_thousands_of_rows() {
    let session = session(&Options::default()).unwrap();
    let sql = "SELECT repeat('x', 1000000) AS s, value FROM range(0, 100)";
    let rows = query(&session, sql, Limits::default()).await.unwrap();
    let batches: Vec<_> = rows.try_collect().await.unwrap();
    let rows = batches.iter().map(|batch| batch.num_rows());
    assert_eq!(rows.clone().sum::<usize>(), 100);
    assert!(rows.max() <= Some(16));
}

#[tokio::test]
async fn rows_that_a_window_keeps_are_booked() {
    let options = Options {
        memory_bytes: 64 << 20,
        ..Options::default()
    };
    let session = session(&options).unwrap();
    let window =
        |rows| format!("SELECT max(s) FROM (SELECT sum(value) OVER () AS s FROM range(0, {rows}))");
    let got = answer(&session, &window(1_000_000)).await.unwrap();
    assert!(got.contains("499999500000"), "{got}");
    let error = answer(&session, &window(100_000_000)).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("Window[0]"), "{error}");
}
