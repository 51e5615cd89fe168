//! Queries that want more memory than they may have: some fail, those that can spill do not, and the
//! others do not notice.

use std::time::Duration;

use serde_json::json;

use crate::http::{ask, rows_of, start};

#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_wants_all_memory_leaves_some_to_others() {
    let data = tempfile::tempdir().unwrap();
    let flags = [
        "--query-memory-bytes",
        "256MiB",
        "--query-share-bytes",
        "64MiB",
    ];
    let (_collector, http) = start(data.path(), &flags);
    // A hundred GB in one group: nothing to spill.
    let hungry = json!({"sql": "SELECT length(string_agg(repeat('x', 1000) || value, ',')) FROM range(0, 100000000)"});
    let greedy = tokio::spawn({
        let http = http.clone();
        async move { ask(&http, hungry).await.status().as_u16() }
    });
    for _ in 0..5 {
        let rows = rows_of(
            &http,
            "SELECT count(DISTINCT value % 1000) FROM range(0, 100000)",
        )
        .await;
        assert_eq!(rows, [json!([1000])]);
    }
    assert_eq!(greedy.await.unwrap(), 507);
    // What can spill is answered: 400 MB are sorted, each row keeps its number.
    let sorted = "SELECT count(*) FROM (SELECT row_number() OVER (ORDER BY pad, value DESC) AS r \
        FROM (SELECT value, repeat('x', 1000) || (value % 7) AS pad FROM range(0, 400000))) WHERE r % 2 = 0";
    assert_eq!(rows_of(&http, sorted).await, [json!([200_000])]);
    let spill = data.path().join("_spill");
    assert!(spill.is_dir());
}

/// A sort of several times a query's memory goes by way of the disk, and leaves nothing there.
#[tokio::test(flavor = "multi_thread")]
async fn a_sort_larger_than_its_memory_spills() {
    let data = tempfile::tempdir().unwrap();
    let flags = [
        "--query-memory-bytes",
        "64MiB",
        "--query-share-bytes",
        "32MiB",
    ];
    let (_collector, http) = start(data.path(), &flags);
    // Two columns of 8 bytes and a number in each row: 72 MB, in an order that is not the input's.
    const ROWS: u64 = 3_000_000;
    let sql = format!(
        "SELECT count(*), sum(CASE WHEN r = value % 3 * 1000000 + value / 3 + 1 THEN 0 ELSE 1 END)
         FROM (SELECT value, row_number() OVER (ORDER BY value % 3, value) AS r FROM range(0, {ROWS}))"
    );
    let question = tokio::spawn({
        let http = http.clone();
        async move { rows_of(&http, &sql).await }
    });
    let spilled = async || {
        let metrics = reqwest::get(format!("{http}/metrics")).await.unwrap();
        let metrics = metrics.text().await.unwrap();
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("vramscope_query_spilled_bytes "))
            .unwrap();
        line.parse::<u64>().unwrap()
    };
    let mut most = 0;
    while !question.is_finished() {
        most = spilled().await.max(most);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(question.await.unwrap(), [json!([ROWS, 0])]);
    assert!(most > 0, "nothing was spilled");
    assert_eq!(spilled().await, 0);
}
