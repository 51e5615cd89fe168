//! The questions that Grafana, DBeaver, the JDBC driver and psql's completion ask before a person
//! asks any.
//!
//! `clients/*.sql` holds them as those programs send them, each after a line `-- ` that says what
//! it is for. What they must be answered is here, from the tables and views that there are.

use std::collections::BTreeSet;

use tokio_postgres::{Client, SimpleQueryMessage, SimpleQueryRow};
use vramscope_queries::views;
use vramscope_wire::Table;

use super::{connect, seed, start};

const GRAFANA: &str = include_str!("clients/grafana.sql");
const DBEAVER: &str = include_str!("clients/dbeaver.sql");
const PSQL: &str = include_str!("clients/psql.sql");
const JDBC: &str = include_str!("clients/jdbc.sql");

/// The question of a file that is for something.
fn question<'a>(file: &'a str, purpose: &str) -> &'a str {
    let start = format!("-- {purpose}\n");
    let at = file
        .find(&start)
        .unwrap_or_else(|| panic!("no question {purpose:?}"));
    let text = &file[at + start.len()..];
    text.split("\n-- ")
        .next()
        .unwrap()
        .trim()
        .trim_end_matches(';')
}

fn purposes(file: &str) -> impl Iterator<Item = &str> {
    file.lines().filter_map(|line| line.strip_prefix("-- "))
}

async fn rows(client: &Client, sql: &str) -> Vec<SimpleQueryRow> {
    let answer = client
        .simple_query(sql)
        .await
        .unwrap_or_else(|error| panic!("{sql}\n{error:?}"));
    answer
        .into_iter()
        .filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        })
        .collect()
}

fn column(rows: &[SimpleQueryRow], name: &str) -> BTreeSet<String> {
    rows.iter()
        .map(|row| row.get(name).unwrap_or("NULL").to_string())
        .collect()
}

fn tables() -> BTreeSet<String> {
    Table::ALL
        .iter()
        .map(|table| table.name().to_string())
        .collect()
}

fn tables_and_views() -> BTreeSet<String> {
    let views = views::ALL.iter().map(|view| view.name.to_string());
    tables().into_iter().chain(views).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn grafana_finds_tables_columns_and_time_series() {
    let data = tempfile::tempdir().unwrap();
    let (collector, port) = start(data.path(), &[]);
    seed(&collector).await;
    let client = connect(port).await;
    let of = async |purpose: &str| rows(&client, question(GRAFANA, purpose)).await;

    assert_eq!(of("version").await[0].get(0), Some("1600"));
    assert_eq!(of("timescaledb").await.len(), 0);
    assert_eq!(column(&of("tables").await, "table"), tables_and_views());
    let columns = of("columns").await;
    let found: Vec<(&str, &str)> = columns
        .iter()
        .map(|row| (row.get("column").unwrap(), row.get("type").unwrap()))
        .collect();
    for expected in [
        ("ts", "timestamp with time zone"),
        ("bytes", "bigint"),
        ("op", "text"),
        ("counted", "boolean"),
    ] {
        assert!(found.contains(&expected), "{expected:?} in {found:?}");
    }
    // Two allocations and a free within the minute; the one without a size counts as nothing.
    let series = of("time series").await;
    assert_eq!(series.len(), 1);
    assert_eq!(series[0].get("time"), Some("1795957500"));
    assert_eq!(series[0].get("value"), Some("5242880"));
    assert_eq!(of("table of rows").await.len(), 4);
    assert_eq!(
        column(&of("variable").await, "host"),
        ["ho'st".to_string()].into()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn dbeaver_finds_its_way() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    // All of them are answered, whatever is in the answer.
    for purpose in purposes(DBEAVER) {
        rows(&client, question(DBEAVER, purpose)).await;
    }
    let of = async |purpose: &str| rows(&client, question(DBEAVER, purpose)).await;
    assert_eq!(
        column(&of("databases").await, "datname"),
        ["vramscope".to_string()].into()
    );
    let schemas = column(&of("schemas").await, "nspname");
    assert!(
        schemas.contains("public") && schemas.contains("pg_catalog"),
        "{schemas:?}"
    );
    let relations = of("relations of public").await;
    assert_eq!(column(&relations, "relname"), tables_and_views());
    assert_eq!(
        column(&of("columns of alloc_events").await, "relname"),
        ["alloc_events".to_string()].into()
    );
    let kinds = column(&of("types").await, "typname");
    assert!(
        kinds.contains("int8") && kinds.contains("timestamptz"),
        "{kinds:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn jdbc_finds_its_way() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    for purpose in purposes(JDBC) {
        rows(&client, question(JDBC, purpose)).await;
    }
    let of = async |purpose: &str| rows(&client, question(JDBC, purpose)).await;
    let found = of("tables and views").await;
    let names: BTreeSet<String> = found
        .iter()
        .filter(|row| row.get("table_type") == Some("TABLE"))
        .map(|row| row.get("table_name").unwrap().to_string())
        .collect();
    assert_eq!(names, tables());
    assert_eq!(column(&found, "table_name"), tables_and_views());
    let columns = of("columns").await;
    let first = columns
        .iter()
        .find(|row| row.get("attname") == Some("ts"))
        .unwrap();
    // 1184 is timestamptz, in every PostgreSQL.
    assert_eq!(first.get("atttypid"), Some("1184"));
    assert_eq!(first.get("attnotnull"), Some("t"));
    assert_eq!(of("isolation").await[0].get(0), Some("read committed"));
    assert_eq!(of("longest name").await.len(), 1);
    // What the wire says of a table is what a person reads beside it.
    let remarks = column(&found, "remarks");
    let doc = format!("a row is {}", Table::AllocEvents.doc());
    assert!(remarks.contains(&doc), "{remarks:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn psql_completes_names() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    let of = async |purpose: &str| rows(&client, question(PSQL, purpose)).await;
    let expected: BTreeSet<String> = tables_and_views()
        .into_iter()
        .filter(|name| name.starts_with("alloc"))
        .collect();
    assert_eq!(
        column(&of("completion of a table").await, "relname"),
        expected
    );
    let bytes = column(&of("completion of a column").await, "attname");
    assert!(bytes.contains("bytes"), "{bytes:?}");
    let schemas = column(&of("completion of a schema").await, "nspname");
    assert_eq!(schemas, ["public".to_string()].into());
}
