//! Each question leaves a row in `query_log`, by whatever door it came.

use std::time::{Duration, Instant};

use serde_json::json;
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use crate::http::{LOG_FAST, ask, rows_of, start};
use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn every_question_is_in_the_query_log() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), LOG_FAST);
    let (batch, _) = made(Table::Traffic, "agent-a", 1, 500);
    push(&collector.address, vec![batch]).await;
    wait_for_rows(&collector.address, Table::Traffic, 500).await;
    rows_of(
        &http,
        "SELECT host, ts FROM traffic ORDER BY ts /* marked */",
    )
    .await;
    ask(&http, json!({"sql": "DROP TABLE traffic /* marked */"})).await;
    ask(
        &http,
        json!({"sql": "SELECT nonesuch FROM traffic /* marked */"}),
    )
    .await;
    let _ = crate::support::sql(
        &collector.address,
        "SELECT nonesuch FROM traffic /* marked */",
    )
    .await;
    let sql = "SELECT door, outcome, rows, bytes_scanned > 0, peak_memory_bytes > 0, duration_ms >= 0, error IS NULL, length(sql_hash), lossy \
        FROM query_log WHERE sql LIKE '%/* marked */' ORDER BY door, outcome";
    let give_up = Instant::now() + Duration::from_secs(60);
    let rows = loop {
        let rows = rows_of(&http, sql).await;
        if rows.len() == 4 || Instant::now() > give_up {
            break rows;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let expected = [
        json!(["flight", "error", 0, null, null, true, false, 16, false]),
        json!(["http", "error", 0, null, false, true, false, 16, false]),
        json!(["http", "ok", 500, true, true, true, true, 16, false]),
        json!(["http", "refused", 0, null, false, true, false, 16, false]),
    ];
    assert_eq!(rows, expected);
    // Agents cannot write it.
    let (mut batch, _) = made(Table::Traffic, "agent-a", 2, 1);
    batch.table = "query_log".to_string();
    let acks = push(&collector.address, vec![batch]).await;
    assert_eq!(outcomes(&acks), [Outcome::Rejected]);
    assert!(
        acks[0].message.contains("written by collectors alone"),
        "{}",
        acks[0].message
    );
    // A stop writes what waits; many questions are few commits.
    for _ in 0..20 {
        rows_of(&http, "SELECT 'last words'").await;
    }
    assert!(collector.stop().success());
    let (_collector, http) = start(data.path(), LOG_FAST);
    let last = rows_of(
        &http,
        "SELECT count(*) FROM query_log WHERE sql = 'SELECT ''last words'''",
    )
    .await;
    assert_eq!(last, [json!([20])]);
}
