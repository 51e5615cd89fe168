//! The PostgreSQL door as its clients meet it: psql, a driver, what Grafana, DBeaver and JDBC
//! ask, and those who mean no good.

mod clients;
mod driver;
mod hostile;
mod psql;
mod secure;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int64Array, RecordBatch, StringArray};
use tokio_postgres::{Client, NoTls};
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use crate::support::*;

/// A collector with an open door, and the door's port.
fn start(data: &Path, flags: &[&str]) -> (Collector, u16) {
    let mut all = vec!["--postgres-listen", "127.0.0.1:0"];
    all.extend(FAST);
    all.extend(flags);
    let mut collector = Collector::start(data, &all);
    let address = collector.announced("postgresql on ");
    let port = address.rsplit(':').next().unwrap().parse().unwrap();
    (collector, port)
}

/// psql on that port, or nothing if there is none on this machine.
fn psql(port: u16) -> Option<Command> {
    let found = Command::new("psql")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if !found.is_ok_and(|status| status.success()) {
        eprintln!("skipped: there is no psql on this machine");
        return None;
    }
    let mut command = Command::new("psql");
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("PG")) {
        command.env_remove(key);
    }
    command
        .args(["-X", "-A", "-t", "-v", "VERBOSITY=verbose"])
        .args(["-h", "127.0.0.1", "-U", "me", "-d", "vramscope"])
        .args(["-p", &port.to_string()])
        .env("PAGER", "cat")
        .stdin(Stdio::null());
    Some(command)
}

async fn connect(port: u16) -> Client {
    connect_with(port, "").await.unwrap()
}

async fn connect_with(port: u16, more: &str) -> Result<Client, tokio_postgres::Error> {
    let how = format!("host=127.0.0.1 port={port} user=me dbname=vramscope {more}");
    let (client, connection) = tokio_postgres::connect(&how, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Four events of one process: allocations of 1 MiB and 3 MiB, a free of the first, and one of
/// which the size is not known. Their times are a second apart from [`BASE_TS`].
fn events() -> RecordBatch {
    let rows = rows(Table::AllocEvents, "agent-a", 1, 4);
    let schema = rows.schema();
    let columns = schema
        .fields()
        .iter()
        .zip(rows.columns())
        .map(|(field, column)| match field.name().as_str() {
            "op" => {
                Arc::new(StringArray::from(vec!["alloc", "alloc", "free", "alloc"])) as ArrayRef
            }
            "bytes" => Arc::new(Int64Array::from(vec![
                Some(1 << 20),
                Some(3 << 20),
                Some(1 << 20),
                None,
            ])),
            "counted" => Arc::new(BooleanArray::from(vec![true, true, true, false])),
            "process_id" => Arc::new(Int64Array::from(vec![77; 4])),
            "seq" => Arc::new(Int64Array::from(vec![1, 2, 3, 4])),
            "host" => Arc::new(StringArray::from(vec!["ho'st"; 4])),
            "ts" => Arc::new(
                arrow::array::TimestampMicrosecondArray::from_iter_values(
                    (0..4).map(|second| BASE_TS + second * 1_000_000),
                )
                .with_timezone("UTC"),
            ),
            _ => Arc::clone(column),
        });
    RecordBatch::try_new(Arc::clone(&schema), columns.collect()).unwrap()
}

/// Sends those events and waits until they are seen.
async fn seed(collector: &Collector) {
    let batch = batch(Table::AllocEvents, "agent-a", 1, &events());
    let acks = push(&collector.address, vec![batch]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored], "{acks:?}");
    wait_for_rows(&collector.address, Table::AllocEvents, 4).await;
}

/// SQLSTATE and text of what must have failed.
fn refusal<T>(result: Result<T, tokio_postgres::Error>) -> (String, String) {
    let Err(error) = result else {
        panic!("it did not fail");
    };
    let error = error
        .as_db_error()
        .unwrap_or_else(|| panic!("no answer of the server: {error}"));
    (error.code().code().to_string(), error.message().to_string())
}

/// Parsed by the connection's own thread, before it is a question.
#[tokio::test(flavor = "multi_thread")]
async fn statements_deeper_than_a_stack_are_refused() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    let deep = [
        format!("SELECT 1{}", "+1".repeat(400_000)),
        format!(
            "SELECT relname FROM pg_catalog.pg_class WHERE 1=1{}",
            " OR 1=1".repeat(100_000)
        ),
        format!(
            "SELECT count(*) FROM traffic WHERE NOT{} true",
            " NOT".repeat(100_000)
        ),
    ];
    for sql in &deep {
        let (_, text) = refusal(client.simple_query(sql).await);
        assert!(text.contains("chain of"), "{text}");
        let (_, text) = refusal(client.prepare(sql).await);
        assert!(text.contains("chain of"), "{text}");
    }
    assert!(client.simple_query("SELECT 1").await.is_ok());
}
