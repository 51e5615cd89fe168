//! Clients of the HTTP and Flight doors that mean no good, or do not know what they do. Each is
//! refused with an error it can read, and the collector goes on, within its memory.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use crate::http::{ask, start};
use crate::support::*;

mod questions;

/// The most memory that the process ever had in RAM, in bytes.
fn peak_bytes(collector: &Collector) -> u64 {
    let path = format!("/proc/{}/status", collector.pid());
    let text = std::fs::read_to_string(path).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    line.split_whitespace()
        .next()
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}

fn dial(http: &str) -> TcpStream {
    let address = http.strip_prefix("http://").unwrap();
    let socket = TcpStream::connect(address).unwrap();
    // Longer than the door's own patience.
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    socket
}

/// Everything that comes until the other side closes.
fn read_to_end(mut socket: &TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset after the last byte is an end as well.
    let _ = socket.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn is_well(http: &str, collector: &Collector) {
    let answer = ask(http, json!({"sql": "SELECT count(*) FROM traffic"})).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(count(&collector.address, Table::Traffic).await, 0);
    let ready = reqwest::get(format!("{http}/readyz")).await.unwrap();
    assert_eq!(ready.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_that_reach_beyond_the_tables_are_refused_by_every_door() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), FAST);
    let secret = data.path().join("secret.csv");
    std::fs::write(&secret, "word\nswordfish\n").unwrap();
    let secret = secret.display();
    let out = data.path().join("out.csv");
    let not_queries = [
        format!("COPY (SELECT 1) TO '{}'", out.display()),
        format!("CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '{secret}'"),
        "DROP TABLE traffic".to_string(),
        "DROP VIEW tetrahedron".to_string(),
        "SET datafusion.runtime.memory_limit = '100G'".to_string(),
        "SET datafusion.catalog.information_schema = false".to_string(),
        "CREATE FUNCTION f() RETURNS INT RETURN 1".to_string(),
        "CREATE TABLE t AS SELECT 1".to_string(),
        "INSERT INTO traffic SELECT * FROM traffic".to_string(),
        "DELETE FROM traffic".to_string(),
        "UPDATE traffic SET host = 'x'".to_string(),
        "EXPLAIN ANALYZE INSERT INTO traffic SELECT * FROM traffic".to_string(),
        "PREPARE p AS SELECT 1".to_string(),
        "BEGIN".to_string(),
    ];
    let of_files = [
        "SELECT * FROM '/etc/passwd'".to_string(),
        format!("SELECT * FROM '{secret}'"),
        format!("SELECT * FROM read_csv('{secret}')"),
        format!("SELECT * FROM read_parquet('{secret}')"),
        format!("SELECT * FROM parquet_metadata('{secret}')"),
        format!("SELECT * FROM \"{secret}\""),
        "SELECT pg_read_file('/etc/passwd')".to_string(),
    ];
    for sql in not_queries.iter().chain(&of_files) {
        let answer = ask(&http, json!({ "sql": sql })).await;
        let status = answer.status().as_u16();
        let expected = if of_files.contains(sql) { 400 } else { 403 };
        let error: Value = answer.json().await.unwrap();
        assert_eq!(status, expected, "{sql}: {error}");
        let text = error.to_string();
        assert!(
            !text.contains("swordfish") && !text.contains("root:"),
            "{text}"
        );
        let error = crate::support::sql(&collector.address, sql)
            .await
            .unwrap_err();
        assert!(
            !error.contains("swordfish") && !error.contains("root:"),
            "{error}"
        );
    }
    assert!(!out.exists());
    is_well(&http, &collector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_and_silent_connections_are_closed() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), &["--http-client-timeout", "700ms"]);
    let silent = dial(&http);
    // A head that comes a byte at a time, and one that breaks off after it is known to be HTTP/1.
    let mut loris = dial(&http);
    let drip = std::thread::spawn(move || {
        for byte in b"POST /api/v1/sql HTTP/1.1\r\nhost: localhost\r\nx-a: bcdefghijklmnopqrstuvwxyz0123456789" {
            if loris.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        // It came to its end: then the connection has to be gone.
        assert_eq!(loris.read(&mut [0; 1]).unwrap_or(0), 0);
    });
    let mut half = dial(&http);
    half.write_all(b"POST /api/v1/sql HTTP/1.1\r\nhost: localhost\r\n")
        .unwrap();
    // A body that was announced and does not come.
    let mut body = dial(&http);
    body.write_all(b"POST /api/v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 100\r\n\r\nSELECT")
        .unwrap();
    let answer = tokio::task::spawn_blocking(move || {
        assert_eq!(read_to_end(&silent), "");
        read_to_end(&half);
        drip.join().unwrap();
        read_to_end(&body)
    });
    let answer = answer.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    is_well(&http, &collector).await;
}

/// The agents' port has a limit of its own: one more is closed, and the others go on.
#[tokio::test(flavor = "multi_thread")]
async fn one_agent_too_many_is_closed_and_counted() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), &["--max-connections", "5"]);
    // What every HTTP/2 client says first, and then no more.
    let hold = |_| {
        let mut held = dial(&collector.address);
        held.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        held
    };
    let mut held: Vec<_> = (0..5).map(hold).collect();
    let closed = {
        let mut one_more = dial(&collector.address);
        one_more
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        tokio::task::spawn_blocking(move || std::io::Read::read(&mut one_more, &mut [0; 64]))
            .await
            .unwrap()
    };
    let is_reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
    assert!(
        matches!(&closed, Ok(0)) || closed.as_ref().is_err_and(is_reset),
        "{closed:?}"
    );
    let told = async |line: &str| {
        let metrics = reqwest::get(format!("{http}/metrics")).await.unwrap();
        metrics.text().await.unwrap().contains(line)
    };
    assert!(told("vramscope_connections{door=\"grpc\"} 5\n").await);
    assert!(told("vramscope_connections_refused_total{door=\"grpc\"} 1\n").await);
    held.clear();
    let reached = async |line: &str| {
        let give_up = Instant::now() + Duration::from_secs(30);
        while !told(line).await {
            assert!(Instant::now() < give_up, "never {line}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    reached("vramscope_connections{door=\"grpc\"} 0\n").await;
    // Who says nothing at all does not keep its place.
    let _silent: Vec<_> = (0..5).map(|_| dial(&collector.address)).collect();
    reached("vramscope_connections{door=\"grpc\"} 5\n").await;
    reached("vramscope_connections{door=\"grpc\"} 0\n").await;
    is_well(&http, &collector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_idle_connections_are_borne_and_more_are_told() {
    let data = tempfile::tempdir().unwrap();
    let flags = [
        "--http-max-connections",
        "1010",
        "--http-client-timeout",
        "60s",
    ];
    let (collector, http) = start(data.path(), &flags);
    let mut idle = Vec::new();
    for _ in 0..1000 {
        let to_http = TcpStream::connect(http.strip_prefix("http://").unwrap());
        let to_grpc = TcpStream::connect(collector.address.strip_prefix("http://").unwrap());
        match (to_http, to_grpc) {
            (Ok(one), Ok(two)) => idle.push((one, two)),
            _ => {
                eprintln!(
                    "skipped in part: this process may have {} connections",
                    2 * idle.len()
                );
                break;
            }
        }
    }
    if idle.len() == 1000 {
        is_well(&http, &collector).await;
        // The next ones are one too many at some point; they are told.
        let more: Vec<_> = (0..100).map(|_| dial(&http)).collect();
        let refused = tokio::task::spawn_blocking(move || read_to_end(more.last().unwrap()));
        let refused = refused.await.unwrap();
        assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
        assert!(refused.contains("too many connections"), "{refused}");
    }
    drop(idle);
    let give_up = Instant::now() + Duration::from_secs(30);
    while reqwest::get(format!("{http}/healthz"))
        .await
        .map(|a| a.status().as_u16())
        .ok()
        != Some(200)
    {
        assert!(Instant::now() < give_up);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    is_well(&http, &collector).await;
    assert!(
        peak_bytes(&collector) < 1 << 30,
        "{}",
        peak_bytes(&collector)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn giant_requests_are_refused_before_they_are_read() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), &["--http-client-timeout", "5s"]);
    // Announced: a gigabyte.
    let mut announced = dial(&http);
    announced
        .write_all(b"POST /api/v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 1073741824\r\n\r\nSELECT 1")
        .unwrap();
    let answer = tokio::task::spawn_blocking(move || {
        let mut first = [0; 12];
        announced.read_exact(&mut first).unwrap();
        String::from_utf8_lossy(&first).into_owned()
    });
    assert_eq!(answer.await.unwrap(), "HTTP/1.1 413");
    // Not announced: it comes in pieces, until nobody listens any more.
    let mut pieces = dial(&http);
    let answer = tokio::task::spawn_blocking(move || {
        pieces
            .write_all(b"POST /api/v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
            .unwrap();
        let piece = [b"10000\r\n".as_slice(), &[b' '; 0x10000], b"\r\n"].concat();
        let mut sent = 0_usize;
        while sent < 256 << 20 && pieces.write_all(&piece).is_ok() {
            sent += piece.len();
        }
        sent
    });
    assert!(answer.await.unwrap() < 256 << 20, "all of it was taken");
    // A head without end.
    let mut head = dial(&http);
    let answer = tokio::task::spawn_blocking(move || {
        head.write_all(b"GET /healthz HTTP/1.1\r\n").unwrap();
        for index in 0..20_000 {
            if head
                .write_all(format!("x-{index}: {index}\r\n").as_bytes())
                .is_err()
            {
                break;
            }
        }
        read_to_end(&head)
    });
    let answer = answer.await.unwrap();
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
        "{answer}"
    );
    // A statement longer than is looked at.
    let long = format!("SELECT '{}'", "x".repeat(1_100_000));
    let answer = ask(&http, json!({ "sql": long })).await;
    assert_eq!(answer.status(), 400);
    // Nested so deeply that a parser without a bound would not come back.
    let deep = format!("SELECT {}1{}", "(".repeat(100_000), ")".repeat(100_000));
    let answer = ask(&http, json!({ "sql": deep })).await;
    assert_eq!(answer.status(), 400);
    is_well(&http, &collector).await;
    assert!(
        peak_bytes(&collector) < 1 << 30,
        "{}",
        peak_bytes(&collector)
    );
}

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A header that is written out (HPACK: literal, not indexed, no Huffman).
fn header(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![0, name.len() as u8];
    bytes.extend(name.as_bytes());
    bytes.push(value.len() as u8);
    bytes.extend(value.as_bytes());
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_two_gigabytes_is_refused_when_it_is_announced() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), &[]);
    let address = collector
        .address
        .strip_prefix("http://")
        .unwrap()
        .to_string();
    let told = tokio::task::spawn_blocking(move || {
        let mut socket = TcpStream::connect(address).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let headers = [
            header(":method", "POST"),
            header(":scheme", "http"),
            header(":path", "/vramscope.v1.Ingest/Push"),
            header(":authority", "localhost"),
            header("te", "trailers"),
            header("content-type", "application/grpc"),
        ]
        .concat();
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(frame(4, 0, 0, &[]));
        bytes.extend(frame(1, 4, 1, &headers));
        // A message that is not compressed, of 0x80000000 bytes; the first of them.
        bytes.extend(frame(0, 0, 1, b"\0\x80\0\0\0and so on"));
        socket.write_all(&bytes).unwrap();
        // Frames until the stream ends: HEADERS or DATA with END_STREAM, RST_STREAM, GOAWAY.
        loop {
            let mut head = [0; 9];
            socket.read_exact(&mut head).unwrap();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut payload = vec![0; length];
            socket.read_exact(&mut payload).unwrap();
            let (kind, flags) = (head[3], head[4]);
            if kind == 3 || kind == 7 || (kind <= 1 && flags & 1 == 1) {
                return kind;
            }
        }
    });
    told.await.unwrap();
    assert_eq!(
        outcomes(
            &push(
                &collector.address,
                vec![made(Table::Stacks, "agent-a", 1, 3).0]
            )
            .await
        ),
        [Outcome::Stored]
    );
    is_well(&http, &collector).await;
    assert!(
        peak_bytes(&collector) < 1 << 30,
        "{}",
        peak_bytes(&collector)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parquet_bomb_is_refused_within_bounds() {
    use arrow::array::{ArrayRef, StringArray};
    use std::sync::Arc;
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), &[]);
    // 40,000 rows of one text of 100 kB: 4 GB as rows, a small file.
    let rows = rows(Table::Stacks, "agent-a", 1, 400);
    let text = "x".repeat(100_000);
    let schema = rows.schema();
    let columns = schema
        .fields()
        .iter()
        .zip(rows.columns())
        .map(|(field, column)| match field.name().as_str() {
            "folded" => Arc::new(StringArray::from(vec![text.as_str(); 400])) as ArrayRef,
            _ => Arc::clone(column),
        });
    let piece = arrow::array::RecordBatch::try_new(Arc::clone(&schema), columns.collect()).unwrap();
    let mut pieces = Vec::new();
    for _ in 0..100 {
        pieces.push(piece.clone());
    }
    let parquet = vramscope_wire::parquet_file::encode(Table::Stacks, &pieces).unwrap();
    assert!(parquet.len() < 8 << 20, "{}", parquet.len());
    let mut bomb = batch(Table::Stacks, "agent-a", 1, &rows);
    bomb.crc32 = crc32fast::hash(&parquet);
    bomb.rows = 40_000;
    bomb.parquet = parquet;
    let acks = push(&collector.address, vec![bomb]).await;
    assert_eq!(outcomes(&acks), [Outcome::Rejected]);
    assert!(acks[0].message.contains("memory"), "{}", acks[0].message);
    is_well(&http, &collector).await;
    assert!(
        peak_bytes(&collector) < 2 << 30,
        "{}",
        peak_bytes(&collector)
    );
}
