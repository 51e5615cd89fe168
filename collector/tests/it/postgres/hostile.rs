//! Clients that mean no good, or do not know what they do. Each is refused with an error it can
//! read, and whoever was let in before goes on being answered.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use super::{connect, connect_with, psql, refusal, start};

fn dial(port: u16) -> TcpStream {
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    // Longer than the door's own patience.
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    socket
}

/// Everything that is sent until the end of the connection.
fn read_to_end(mut socket: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset after the last byte is an end as well.
    let _ = socket.read_to_end(&mut bytes);
    bytes
}

fn packet(body: &[u8]) -> Vec<u8> {
    let mut packet = (body.len() as u32 + 4).to_be_bytes().to_vec();
    packet.extend(body);
    packet
}

fn startup(version: u32, parameters: &str) -> Vec<u8> {
    let mut body = version.to_be_bytes().to_vec();
    body.extend(parameters.as_bytes());
    packet(&body)
}

const VERSION_3: u32 = 3 << 16;

async fn is_well(client: &Client) {
    let row = client
        .query_one("SELECT count(*) FROM alloc_events", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_instead_of_a_start_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    let tls = b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03";
    let packets: Vec<(Vec<u8>, &str)> = vec![
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), "08P01"),
        (tls.to_vec(), "08P01"),
        (vec![0xff; 64], "08P01"),
        (vec![0; 64], "08P01"),
        (0x7fff_ffffu32.to_be_bytes().to_vec(), "08P01"),
        (10_005u32.to_be_bytes().to_vec(), "08P01"),
        (startup(VERSION_3, "user"), "08P01"),
        (startup(VERSION_3, "user\0me\0\0left over"), "08P01"),
        (startup(VERSION_3, "\0"), "28000"),
        (startup(VERSION_3, "user\0\0\0"), "28000"),
        (startup(2 << 16, "user\0me\0\0"), "0A000"),
        (
            startup(VERSION_3, "user\0me\0replication\0true\0\0"),
            "0A000",
        ),
        (
            startup(VERSION_3, "user\0me\0options\0-c nonesuch=1\0\0"),
            "42704",
        ),
        // Asks for encryption for ever.
        (packet(&80_877_103u32.to_be_bytes()).repeat(5), "08P01"),
    ];
    for (packet, code) in packets {
        let mut socket = dial(port);
        socket.write_all(&packet).unwrap();
        let answer = String::from_utf8_lossy(&read_to_end(&socket)).into_owned();
        assert!(
            answer.contains("FATAL") && answer.contains(code),
            "{packet:?}: {answer:?}"
        );
    }
    is_well(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_cannot_be_end_the_connection() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    for wrong in [
        // 2 GiB of SQL, announced.
        b"Q\x7f\xff\xff\xff".to_vec(),
        // A length below its own.
        b"Q\x00\x00\x00\x01".to_vec(),
        // More parameters than there are bytes.
        b"B\x00\x00\x00\x0a\0\0\xff\xff\xff\xff".to_vec(),
        b"P\x00\x00\x00\x08\0\0\xff\xff".to_vec(),
        // Not UTF-8.
        b"Q\x00\x00\x00\x07\xff\xfe\0".to_vec(),
    ] {
        let mut socket = dial(port);
        let mut bytes = startup(VERSION_3, "user\0me\0\0");
        bytes.extend(&wrong);
        socket.write_all(&bytes).unwrap();
        let answer = String::from_utf8_lossy(&read_to_end(&socket)).into_owned();
        assert!(answer.contains("08P01"), "{wrong:?}: {answer:?}");
    }
    // A kind of message that is not known is an error, and the connection goes on.
    let mut socket = dial(port);
    let mut bytes = startup(VERSION_3, "user\0me\0\0");
    bytes.extend(b"F\x00\x00\x00\x04S\x00\x00\x00\x04Q\x00\x00\x00\x0dSELECT 7\0X\x00\x00\x00\x04");
    socket.write_all(&bytes).unwrap();
    let answer = String::from_utf8_lossy(&read_to_end(&socket)).into_owned();
    assert!(
        answer.contains("08P01") && answer.contains("SELECT 1"),
        "{answer:?}"
    );
    is_well(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_says_nothing_is_sent_away() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &["--postgres-idle-timeout", "1s"]);
    // Nothing, half a length, half a packet, and one that was let in and went quiet.
    let silent = dial(port);
    let mut half_length = dial(port);
    half_length.write_all(&[0, 0]).unwrap();
    let mut half_packet = dial(port);
    let whole = startup(VERSION_3, "user\0me\0\0");
    half_packet.write_all(&whole[..12]).unwrap();
    let mut quiet = dial(port);
    quiet.write_all(&whole).unwrap();
    // Half a message is no message.
    quiet.write_all(b"Q\0\0\0\x0dSELECT").unwrap();
    let answer = String::from_utf8_lossy(&read_to_end(&quiet)).into_owned();
    assert!(answer.contains("57P05"), "{answer:?}");
    for socket in [silent, half_length, half_packet] {
        assert_eq!(read_to_end(&socket), b"");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_connections_leave_those_who_are_in_alone() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &["--postgres-max-connections", "5"]);
    let mut clients = Vec::new();
    for _ in 0..5 {
        clients.push(connect(port).await);
    }
    let (code, text) = refusal(connect_with(port, "").await);
    assert_eq!(code, "53300", "{text}");
    for _ in 0..5 {
        // Two hundred at a time: how many files a test may open is not ours to say.
        let idle: Vec<TcpStream> = (0..200).map(|_| dial(port)).collect();
        for client in &clients {
            is_well(client).await;
        }
        drop(idle);
    }
    // A place that is given up is there for the next.
    clients.pop();
    let give_up = Instant::now() + Duration::from_secs(60);
    while connect_with(port, "").await.is_err() {
        assert!(Instant::now() < give_up, "no place was given up");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_and_no_file_is_read() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    let secret = data.path().join("secret.csv");
    std::fs::write(&secret, "a\n1\n").unwrap();
    let secret = secret.display();
    let outside = data.path().join("out.csv");
    let copies = [
        format!("COPY (SELECT 1) TO '{}'", outside.display()),
        format!("COPY (SELECT 1) TO PROGRAM 'touch {}'", outside.display()),
        format!("COPY stacks FROM '{secret}'"),
        format!("CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '{secret}'"),
        format!("EXPLAIN ANALYZE COPY (SELECT 1) TO '{}'", outside.display()),
    ];
    let mut refused: Vec<&str> = copies.iter().map(String::as_str).collect();
    refused.extend([
        "DROP TABLE stacks",
        "DROP VIEW tetrahedron",
        "DROP SCHEMA public CASCADE",
        "CREATE TABLE t AS SELECT 1",
        "CREATE EXTENSION dblink",
        "INSERT INTO stacks SELECT * FROM stacks",
        "UPDATE stacks SET folded = ''",
        "DELETE FROM stacks",
        "TRUNCATE stacks",
        "GRANT ALL ON stacks TO PUBLIC",
        "VACUUM",
        "DO 'x'",
        "COPY stacks TO STDOUT",
        "COPY stacks FROM STDIN",
    ]);
    for sql in refused {
        let (code, text) = refusal(client.simple_query(sql).await);
        assert_eq!(code, "25006", "{sql}: {text}");
    }
    for sql in [
        format!("SELECT * FROM '{secret}'"),
        format!("SELECT * FROM \"{secret}\""),
        format!("SELECT * FROM read_csv('{secret}')"),
        format!("SELECT pg_read_file('{secret}')"),
        format!("SELECT * FROM pg_read_file('{secret}')"),
        "SELECT lo_import('/etc/passwd')".to_string(),
        "SELECT pg_terminate_backend(1)".to_string(),
        "SELECT set_config('search_path', 'x', false)".to_string(),
        "SELECT rolpassword FROM pg_catalog.pg_authid WHERE rolpassword <> ''".to_string(),
        "SELECT passwd FROM pg_shadow WHERE passwd <> ''".to_string(),
    ] {
        match client.simple_query(&sql).await {
            Err(error) => assert!(error.as_db_error().is_some(), "{sql}: {error}"),
            Ok(rows) => {
                let has_rows = rows
                    .iter()
                    .any(|row| matches!(row, tokio_postgres::SimpleQueryMessage::Row(_)));
                assert!(!has_rows, "{sql}");
            }
        }
    }
    assert!(!outside.exists());
    is_well(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_connection_keeps_is_bounded() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let client = connect(port).await;
    // Just below the longest message: the fifth one does not fit any more.
    let long = format!("SELECT '{}'", "x".repeat(1_000_000));
    let mut kept = Vec::new();
    let code = loop {
        match client.prepare(&long).await {
            Ok(statement) => kept.push(statement),
            Err(error) => break error.code().unwrap().code().to_string(),
        }
        assert!(kept.len() < 10, "10 MB are kept");
    };
    assert_eq!(code, "53400");
    assert_eq!(kept.len(), 4);
    drop(kept);
    is_well(&client).await;
    // One message more than is taken ends the connection.
    let longer = format!("SELECT '{}'", "x".repeat(1 << 20));
    assert!(client.simple_query(&longer).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_beyond_memory_fails_alone() {
    let data = tempfile::tempdir().unwrap();
    let flags = ["--query-memory-bytes", "64MiB"];
    let (_collector, port) = start(data.path(), &flags);
    let client = connect(port).await;
    // A window over everything cannot spill: about 100 GB of text.
    let huge = "SELECT max(array_length(a)) FROM (SELECT array_agg(repeat('x', 1000)) AS a FROM range(0, 100000000))";
    let (code, text) = refusal(client.query(huge, &[]).await);
    assert_eq!(code, "53200", "{text}");
    is_well(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_that_is_not_there_is_not_pretended() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, port) = start(data.path(), &[]);
    let Some(mut command) = psql(port) else {
        return;
    };
    let output = command
        .env("PGSSLMODE", "require")
        .args(["-c", "SELECT 1"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("does not support SSL"), "{errors}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_collector_says_goodbye() {
    let data = tempfile::tempdir().unwrap();
    let (collector, port) = start(data.path(), &[]);
    let mut socket = dial(port);
    socket
        .write_all(&startup(VERSION_3, "user\0me\0\0"))
        .unwrap();
    let client = connect(port).await;
    is_well(&client).await;
    assert!(collector.stop().success());
    let answer = String::from_utf8_lossy(&read_to_end(&socket)).into_owned();
    assert!(answer.contains("57P01"), "{answer:?}");
}
