//! A driver that speaks the extended protocol in binary: tokio-postgres.

use std::time::{Duration, SystemTime};

use futures::TryStreamExt;
use tokio_postgres::types::Type;

use super::{connect, connect_with, refusal, seed, start};
use crate::support::*;

fn base() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(BASE_TS as u64)
}

#[tokio::test(flavor = "multi_thread")]
async fn values_travel_in_binary_both_ways() {
    let data = tempfile::tempdir().unwrap();
    let (collector, port) = start(data.path(), &[]);
    seed(&collector).await;
    let client = connect(port).await;
    let sql = "SELECT ts, op, bytes, counted, bytes / 2.0 AS half, date FROM alloc_events \
               WHERE ts >= $1 AND host = $2 AND (bytes > $3 OR bytes IS NULL) AND counted = $4 \
               ORDER BY seq LIMIT $5";
    let statement = client.prepare(sql).await.unwrap();
    assert_eq!(
        statement.params(),
        [
            Type::TIMESTAMPTZ,
            Type::TEXT,
            Type::INT8,
            Type::BOOL,
            Type::INT8
        ]
    );
    let types: Vec<&Type> = statement.columns().iter().map(|c| c.type_()).collect();
    assert_eq!(
        types,
        [
            &Type::TIMESTAMPTZ,
            &Type::TEXT,
            &Type::INT8,
            &Type::BOOL,
            &Type::FLOAT8,
            &Type::DATE
        ]
    );
    let later = base() + Duration::from_secs(1);
    let rows = client
        .query(&statement, &[&later, &"ho'st", &0i64, &true, &10i64])
        .await
        .unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0].get::<_, SystemTime>(0), later);
    assert_eq!(rows[0].get::<_, &str>(1), "alloc");
    assert_eq!(rows[0].get::<_, Option<i64>>(2), Some(3 << 20));
    assert!(rows[0].get::<_, bool>(3));
    assert_eq!(rows[0].get::<_, f64>(4), 1_572_864.0);
    assert_eq!(rows[1].get::<_, &str>(1), "free");
    // The same statement again, with NULL and with what would be SQL if it were text.
    let rows = client
        .query(
            &statement,
            &[&base(), &"x' OR '1'='1", &0i64, &true, &10i64],
        )
        .await
        .unwrap();
    assert!(rows.is_empty());
    let rows = client
        .query(&statement, &[&base(), &None::<&str>, &0i64, &true, &10i64])
        .await
        .unwrap();
    assert!(rows.is_empty());
    let row = client
        .query_one("SELECT bytes FROM alloc_events WHERE seq = $1", &[&4i64])
        .await
        .unwrap();
    assert_eq!(row.get::<_, Option<i64>>(0), None);

    let any = "SELECT make_array(1, NULL, 3), count(*) FROM alloc_events WHERE seq = ANY($1)";
    let any = client
        .prepare_typed(any, &[Type::INT8_ARRAY])
        .await
        .unwrap();
    let row = client.query_one(&any, &[&vec![1i64, 3]]).await.unwrap();
    assert_eq!(row.get::<_, Vec<Option<i64>>>(0), [Some(1), None, Some(3)]);
    assert_eq!(row.get::<_, i64>(1), 2);

    let typed = client
        .prepare_typed("SELECT $1 AS a, $2 AS b", &[Type::FLOAT8, Type::INT4])
        .await
        .unwrap();
    let row = client.query_one(&typed, &[&0.5f64, &-7i32]).await.unwrap();
    assert_eq!(row.get::<_, f64>(0), 0.5);
    assert_eq!(row.get::<_, i32>(1), -7);
}

#[tokio::test(flavor = "multi_thread")]
async fn portals_hand_out_rows_a_few_at_a_time() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let mut client = connect(port).await;
    let transaction = client.transaction().await.unwrap();
    let portal = transaction
        .bind("SELECT value FROM range(0, 5) ORDER BY value", &[])
        .await
        .unwrap();
    let mut got = Vec::new();
    for expected in [2, 2, 1, 0] {
        let rows = transaction.query_portal(&portal, 2).await.unwrap();
        assert_eq!(rows.len(), expected);
        got.extend(rows.iter().map(|row| row.get::<_, i64>(0)));
    }
    assert_eq!(got, [0, 1, 2, 3, 4]);
    transaction.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_streamed() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    let rows = client
        .query_raw("SELECT value FROM range(0, 300000)", Vec::<i64>::new())
        .await
        .unwrap();
    let sum = rows
        .try_fold(
            0i64,
            |sum, row| async move { Ok(sum + row.get::<_, i64>(0)) },
        )
        .await
        .unwrap();
    assert_eq!(sum, 299_999 * 300_000 / 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_said_when_it_is_prepared() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    for (sql, code) in [
        ("SELECT nonesuch FROM stacks", "42703"),
        ("SELECT * FROM nonesuch", "42P01"),
        ("SELECT (", "42601"),
        ("SELECT 1; SELECT 2", "42601"),
        ("INSERT INTO stacks VALUES ($1)", "25006"),
        ("COPY stacks TO STDOUT", "25006"),
    ] {
        let (found, text) = refusal(client.prepare(sql).await);
        assert_eq!(found, code, "{sql}: {text}");
    }
    // The connection goes on.
    let row = client.query_one("SELECT 1::int8", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_and_transactions_behave() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect_with(
        port,
        "application_name=tests options='-c statement_timeout=30s'",
    )
    .await
    .unwrap();
    let show = async |name: &str| -> String {
        let row = client
            .query_one(&format!("SHOW {name}"), &[])
            .await
            .unwrap();
        row.get(0)
    };
    assert_eq!(show("application_name").await, "tests");
    assert_eq!(show("statement_timeout").await, "30s");
    assert_eq!(show("TimeZone").await, "UTC");
    assert_eq!(show("transaction_isolation").await, "read committed");
    client
        .batch_execute("BEGIN; SET statement_timeout = '5s'; ROLLBACK")
        .await
        .unwrap();
    assert_eq!(show("statement_timeout").await, "30s");

    client.batch_execute("BEGIN").await.unwrap();
    assert_eq!(
        refusal(client.batch_execute("SELECT nonesuch()").await).0,
        "42883"
    );
    assert_eq!(refusal(client.query("SELECT 1", &[]).await).0, "25P02");
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(client.query("SELECT 1", &[]).await.unwrap().len(), 1);

    for refused in ["SET ROLE postgres", "SET SESSION AUTHORIZATION postgres"] {
        assert_eq!(refusal(client.batch_execute(refused).await).0, "42501");
    }
    let (code, _) = refusal(
        client
            .batch_execute("SET datafusion.execution.batch_size = 1")
            .await,
    );
    assert_eq!(code, "42704");
    client.batch_execute("DISCARD ALL").await.unwrap();
    assert_eq!(show("application_name").await, "tests");
}

const FOREVER: &str = "SELECT count(*) FROM range(0, 100000) a, range(0, 1000000000) b WHERE a.value * b.value % 7 = 3";

#[tokio::test(flavor = "multi_thread")]
async fn time_is_up_when_the_client_or_the_collector_says() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &["--query-timeout", "2s"]);
    let client = connect(port).await;
    client
        .batch_execute("SET statement_timeout = 200")
        .await
        .unwrap();
    assert_eq!(refusal(client.query(FOREVER, &[]).await).0, "57014");
    // No client can have more than the collector allows.
    client
        .batch_execute("SET statement_timeout = '1h'")
        .await
        .unwrap();
    let (code, text) = refusal(client.query(FOREVER, &[]).await);
    assert_eq!(code, "57014");
    assert!(text.contains("statement timeout"), "{text}");
    assert_eq!(client.query("SELECT 1", &[]).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_is_cancelled_by_who_knows_its_secret() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    let token = client.cancel_token();
    let canceller = async {
        // Until it hits: a cancel before the question runs does nothing.
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            token.cancel_query(tokio_postgres::NoTls).await.unwrap();
        }
    };
    let result = tokio::select! {
        result = client.query(FOREVER, &[]) => result,
        () = canceller => unreachable!(),
    };
    let (code, text) = refusal(result);
    assert_eq!(code, "57014");
    assert!(text.contains("user request"), "{text}");
    // A late cancel may still be on its way, and hits nothing or this.
    let again = client.query("SELECT 1", &[]).await;
    assert!(again.is_ok() || refusal(again).0 == "57014");
}
