//! The SQL door.

use arrow_flight::sql::CommandGetTables;
use futures::TryStreamExt;
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use crate::support::*;

/// The rows of `alloc_events` that a hand calculation is made over: two allocations of 1 MiB
/// and 3 MiB, a free of the first.
fn events() -> arrow::array::RecordBatch {
    use arrow::array::{ArrayRef, BooleanArray, Int64Array, StringArray};
    use std::sync::Arc;
    let rows = rows(Table::AllocEvents, "agent-a", 1, 3);
    let schema = rows.schema();
    let columns = schema
        .fields()
        .iter()
        .zip(rows.columns())
        .map(|(field, column)| match field.name().as_str() {
            "op" => Arc::new(StringArray::from(vec!["alloc", "alloc", "free"])) as ArrayRef,
            "bytes" => Arc::new(Int64Array::from(vec![1 << 20, 3 << 20, 1 << 20])),
            "counted" => Arc::new(BooleanArray::from(vec![true; 3])),
            "process_id" => Arc::new(Int64Array::from(vec![77; 3])),
            "seq" => Arc::new(Int64Array::from(vec![1, 2, 3])),
            _ => Arc::clone(column),
        });
    arrow::array::RecordBatch::try_new(Arc::clone(&schema), columns.collect()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_are_answered_and_see_the_next_commit() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    assert_eq!(count(&collector.address, Table::AllocEvents).await, 0);
    let batch = batch(Table::AllocEvents, "agent-a", 1, &events());
    assert_eq!(
        outcomes(&push(&collector.address, vec![batch]).await),
        [Outcome::Stored]
    );
    wait_for_rows(&collector.address, Table::AllocEvents, 3).await;
    let live = "SELECT sum(CASE op WHEN 'alloc' THEN bytes ELSE -bytes END) FROM alloc_events WHERE counted";
    assert_eq!(
        lines(&sql(&collector.address, live).await.unwrap()),
        ["3145728"]
    );
    // The views are there; what they say is tested where they are made.
    sql(&collector.address, "SELECT * FROM tetrahedron")
        .await
        .unwrap();

    let mut client = sql_client(&collector.address).await;
    let request = CommandGetTables {
        table_name_filter_pattern: Some("alloc_events".into()),
        ..Default::default()
    };
    let info = client.get_tables(request).await.unwrap();
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    let tables: Vec<_> = client
        .do_get(ticket)
        .await
        .unwrap()
        .try_collect()
        .await
        .unwrap();
    assert_eq!(lines(&tables), ["datafusion|public|alloc_events|TABLE"]);

    let mut prepared = client
        .prepare("SELECT count(*) FROM alloc_events".to_string(), None)
        .await
        .unwrap();
    let info = prepared.execute().await.unwrap();
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    let rows: Vec<_> = client
        .do_get(ticket)
        .await
        .unwrap()
        .try_collect()
        .await
        .unwrap();
    assert_eq!(lines(&rows), ["3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_can_be_changed_through_sql() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let outside = data.path().join("out.csv");
    let copy = format!("COPY (SELECT 1) TO '{}'", outside.display());
    let external = format!(
        "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '{}'",
        data.path().display()
    );
    for statement in [
        "CREATE TABLE t AS SELECT 1",
        "CREATE VIEW v AS SELECT 1",
        "DROP TABLE stacks",
        "DROP VIEW tetrahedron",
        "INSERT INTO stacks SELECT * FROM stacks",
        "DELETE FROM stacks",
        "UPDATE stacks SET folded = ''",
        "SET datafusion.execution.batch_size = 1",
        "EXPLAIN ANALYZE INSERT INTO stacks SELECT * FROM stacks",
        &external,
        &copy,
    ] {
        let error = sql(&collector.address, statement).await.unwrap_err();
        assert!(error.contains("not allowed"), "{statement}: {error}");
    }
    assert!(!outside.exists());
    sql(&collector.address, "SELECT * FROM stacks")
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_carry_the_text_and_limits_hold() {
    let data = tempfile::tempdir().unwrap();
    let flags = ["--query-max-rows", "100", "--query-timeout", "2s"];
    let collector = Collector::start(data.path(), &flags);
    let error = sql(&collector.address, "SELECT nonesuch FROM stacks")
        .await
        .unwrap_err();
    assert!(error.contains("nonesuch"), "{error}");
    let error = sql(&collector.address, "SELEC 1").await.unwrap_err();
    assert!(error.contains("SELEC"), "{error}");
    let error = sql(&collector.address, "SELECT 1; SELECT 2")
        .await
        .unwrap_err();
    assert!(error.contains("one statement"), "{error}");
    assert_eq!(
        lines(
            &sql(&collector.address, "SELECT * FROM range(0, 100)")
                .await
                .unwrap()
        )
        .len(),
        100
    );
    let error = sql(&collector.address, "SELECT * FROM range(0, 101)")
        .await
        .unwrap_err();
    assert!(error.contains("more than 100 rows"), "{error}");
    let forever = "SELECT count(*) FROM range(0, 10000000) a, range(0, 10000000) b WHERE a.value * b.value % 7 = 3";
    let error = sql(&collector.address, forever).await.unwrap_err();
    assert!(error.contains("stopped after 2 s"), "{error}");
}
