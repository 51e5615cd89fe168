//! Identity and secrecy: certificates, tokens, roles, and what a tenant sees. Everything is made
//! by the commands that users have, and what an attacker would show is made here.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_flight::sql::client::FlightSqlServiceClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::{Channel, ClientTlsConfig, Identity};
use vramscope_wire::Table;
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Batch, Outcome};

use crate::support::*;

mod site;
mod tenants;

pub use site::{Site, push_as};
use site::{connect, expired};

/// Rows with some columns replaced.
fn with(rows: RecordBatch, columns: &[(&str, ArrayRef)]) -> RecordBatch {
    let schema = rows.schema();
    let replaced = schema
        .fields()
        .iter()
        .zip(rows.columns())
        .map(|(field, column)| {
            let new = columns.iter().find(|(name, _)| name == field.name());
            new.map_or_else(|| Arc::clone(column), |(_, new)| Arc::clone(new))
        });
    RecordBatch::try_new(Arc::clone(&schema), replaced.collect()).unwrap()
}

fn texts(values: &[Option<&str>]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

fn numbers(values: &[i64]) -> ArrayRef {
    Arc::new(Int64Array::from(values.to_vec()))
}

/// A batch of one host whose rows say so.
fn of_host(table: Table, agent: &str, host: &str, seq: u64, rows: RecordBatch) -> Batch {
    let hosts = texts(&vec![Some(host); rows.num_rows()]);
    let rows = with(rows, &[("host", hosts)]);
    Batch {
        host: host.to_string(),
        ..batch(table, agent, seq, &rows)
    }
}

fn events(agent: &str, host: &str, seq: u64) -> Batch {
    let rows = rows(Table::AllocEvents, agent, seq, 3);
    of_host(Table::AllocEvents, agent, host, seq, rows)
}

/// Tries until it gives something.
async fn eventually<T>(what: &str, mut attempt: impl AsyncFnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + Duration::from_secs(90);
    loop {
        if let Some(done) = attempt().await {
            return done;
        }
        assert!(Instant::now() < give_up, "never: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn init_makes_what_people_and_agents_come_in_by() {
    use std::os::unix::fs::PermissionsExt;
    let site = Site::new();
    for name in [
        "ca.pem",
        "ca.key",
        "server.pem",
        "server.key",
        "credentials.toml",
        "collector.toml",
    ] {
        let mode = site.file(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let kept = std::fs::read_to_string(site.file("credentials.toml")).unwrap();
    assert!(
        !kept.contains(&site.admin),
        "the token lies there in the clear"
    );
    let before = std::fs::read(site.file("ca.key")).unwrap();
    let said = site.refused(&["init"]);
    assert!(said.contains("is there already"), "{said}");
    assert_eq!(std::fs::read(site.file("ca.key")).unwrap(), before);
    site.command(&["agent-certificate", "--name", "gpu-1"]);
    let said = site.refused(&["agent-certificate", "--name", "gpu-1"]);
    assert!(said.contains("--replace"), "{said}");
    let said = site.refused(&["agent-certificate", "--name", "../x"]);
    assert!(said.contains("\"../x\""), "{said}");

    let collector = site.start();
    let acks = push_as(
        &collector,
        site.agent("gpu-1"),
        vec![events("a", "gpu-1", 1)],
    )
    .await;
    assert_eq!(outcomes(&acks.unwrap()), [Outcome::Stored]);
    eventually("three rows", async || {
        let rows = site
            .query(&collector, &site.admin, "SELECT count(*) FROM alloc_events")
            .await;
        (rows.unwrap() == ["3"]).then_some(())
    })
    .await;
    assert!(collector.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_comes_in_without_or_in_the_clear() {
    let site = Site::new();
    let collector = site.start_logging(Stdio::piped());
    let admin = &site.admin;
    for token in ["", "x", &admin[..admin.len() - 1], &format!("{admin}x")] {
        let error = site.query(&collector, token, "SELECT 1").await.unwrap_err();
        assert!(
            error.contains("wrong user name, password or token"),
            "{error}"
        );
    }
    let channel = connect(&collector, site.tls()).await.unwrap();
    let mut client = FlightSqlServiceClient::new(channel);
    let error = client
        .execute("SELECT 1".into(), None)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("credentials are needed"), "{error}");

    // In the clear nothing is answered, and not even a token is looked at.
    let clear = Channel::from_shared(collector.address.clone()).unwrap();
    let answered = match clear.connect().await {
        Ok(channel) => {
            let mut client = FlightSqlServiceClient::new(channel);
            client.set_token(admin.clone());
            client.execute("SELECT 1".into(), None).await.is_ok()
        }
        Err(_) => false,
    };
    assert!(!answered);
    // A client that trusts another CA turns away.
    let other = Site::new();
    let error = connect(&collector, other.tls()).await.unwrap_err();
    assert!(error.contains("UnknownIssuer"), "{error}");

    let log = collector.stop_and_read_log();
    assert!(log.contains("wrong credentials"), "{log}");
    assert!(log.contains("no TLS connection"), "{log}");
    assert!(!log.contains(admin.as_str()), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_writes_only_as_itself() {
    let site = Site::new();
    let collector = site.start_logging(Stdio::piped());
    let denied = async |tls: ClientTlsConfig| {
        push_as(&collector, tls, vec![events("a", "gpu-1", 1)])
            .await
            .unwrap_err()
    };
    let error = denied(site.tls()).await;
    assert!(
        error.contains("agents have to show a certificate"),
        "{error}"
    );
    let error = denied(expired(&site, "gpu-1")).await;
    // The reason can come too late for a client that has seen the connection close.
    let told = [
        "CertificateExpired",
        "connection closed",
        "canceled",
        "broken pipe",
        "reset",
    ];
    assert!(told.iter().any(|text| error.contains(text)), "{error}");
    // Another CA's, of the same name.
    let other = Site::new();
    other.agent("gpu-1");
    let read = |end: &str| std::fs::read(other.file(&format!("agents/gpu-1.{end}"))).unwrap();
    let foreign = Identity::from_pem(read("pem"), read("key"));
    denied(site.tls().identity(foreign)).await;
    // The collector's own is no agent's.
    let read = |end: &str| std::fs::read(site.file(&format!("server.{end}"))).unwrap();
    denied(
        site.tls()
            .identity(Identity::from_pem(read("pem"), read("key"))),
    )
    .await;

    let one = site.agent("gpu-1");
    let two = site.agent("gpu-2");
    let mut foreign_row = events("b", "gpu-2", 3);
    // Its rows are gpu-1's.
    foreign_row.parquet = events("b", "gpu-1", 3).parquet;
    foreign_row.crc32 = crc32fast::hash(&foreign_row.parquet);
    let mut foreign_agent = events("b", "gpu-2", 4);
    foreign_agent.parquet = events("a", "gpu-2", 4).parquet;
    foreign_agent.crc32 = crc32fast::hash(&foreign_agent.parquet);
    let acks = push_as(&collector, one, vec![events("a", "gpu-1", 1)])
        .await
        .unwrap();
    assert_eq!(outcomes(&acks), [Outcome::Stored]);
    let batches = vec![
        events("b", "gpu-2", 1),
        events("b", "gpu-1", 2),
        foreign_row,
        foreign_agent,
        // Belongs to gpu-1 since its first batch.
        events("a", "gpu-2", 5),
        events("b", "gpu-2", 6),
    ];
    let acks = push_as(&collector, two, batches).await.unwrap();
    use Outcome::{Rejected, Stored};
    assert_eq!(
        outcomes(&acks),
        [Stored, Rejected, Rejected, Rejected, Rejected, Stored]
    );
    for (ack, part) in acks[1..5].iter().zip([
        "the certificate is of host \"gpu-2\", and the batch says host \"gpu-1\"",
        "a row has host \"gpu-1\"",
        "a row has agent_id \"a\"",
        "agent_id \"a\" belongs to host \"gpu-1\"",
    ]) {
        assert!(ack.message.contains(part), "{}", ack.message);
    }

    // An agent may not ask, and who may ask may not write.
    let channel = connect(&collector, site.agent("gpu-3")).await.unwrap();
    let mut client = FlightSqlServiceClient::new(channel);
    let error = client
        .execute("SELECT 1".into(), None)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("credentials are needed"), "{error}");
    let channel = connect(&collector, site.tls()).await.unwrap();
    let mut request = tonic::Request::new(futures::stream::iter(vec![events("c", "gpu-1", 1)]));
    let bearer = format!("Bearer {}", site.admin).parse().unwrap();
    request.metadata_mut().insert("authorization", bearer);
    let status = IngestClient::new(channel).push(request).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);

    let log = collector.stop_and_read_log();
    assert!(
        log.contains("ERROR") && log.contains("an agent writes as another"),
        "{log}"
    );
    // Bound for ever.
    let collector = site.start();
    let acks = push_as(
        &collector,
        site.agent("gpu-2"),
        vec![events("a", "gpu-2", 9)],
    )
    .await;
    assert_eq!(outcomes(&acks.unwrap()), [Rejected]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_taken_back_is_gone_without_a_restart() {
    let site = Site::new();
    let token = site.token(&["dashboard"]);
    let collector = site.start();
    site.query(&collector, &token, "SELECT 1").await.unwrap();
    site.command(&["token", "revoke", "dashboard"]);
    let error = eventually("revoked", async || {
        site.query(&collector, &token, "SELECT 1").await.err()
    })
    .await;
    assert!(
        error.contains("wrong user name, password or token"),
        "{error}"
    );
    site.query(&collector, &site.admin, "SELECT 1")
        .await
        .unwrap();
    // A new one, of the same name, is another one.
    let again = site.token(&["dashboard"]);
    eventually("the new token", async || {
        site.query(&collector, &again, "SELECT 1").await.ok()
    })
    .await;
    assert!(site.query(&collector, &token, "SELECT 1").await.is_err());

    // A file that is broken changes nothing.
    let good = std::fs::read(site.file("credentials.toml")).unwrap();
    std::fs::write(site.file("credentials.toml"), "users = 3").unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    site.query(&collector, &again, "SELECT 1").await.unwrap();
    std::fs::write(site.file("credentials.toml"), good).unwrap();

    // An agent's stream that is open ends with its certificate.
    let channel = connect(&collector, site.agent("gpu-1")).await.unwrap();
    let (batches, stream) = mpsc::channel(1);
    let mut acks = IngestClient::new(channel)
        .push(ReceiverStream::new(stream))
        .await
        .unwrap()
        .into_inner();
    let mut seq = 1;
    batches.send(events("a", "gpu-1", seq)).await.unwrap();
    assert_eq!(
        acks.message().await.unwrap().unwrap().outcome(),
        Outcome::Stored
    );
    let pem = site.file("agents/gpu-1.pem");
    site.command(&["revoke-certificate", pem.to_str().unwrap()]);
    let status = eventually("the stream ends", async || {
        seq += 1;
        // It may be closed by now.
        let _ = batches.send(events("a", "gpu-1", seq)).await;
        acks.message().await.err()
    })
    .await;
    assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
    assert!(collector.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn new_certificates_are_taken_and_open_streams_kept() {
    let site = Site::new();
    let collector = site.start_logging(Stdio::piped());
    let channel = connect(&collector, site.agent("gpu-1")).await.unwrap();
    let (batches, stream) = mpsc::channel(1);
    let mut acks = IngestClient::new(channel)
        .push(ReceiverStream::new(stream))
        .await
        .unwrap()
        .into_inner();
    batches.send(events("a", "gpu-1", 1)).await.unwrap();
    assert_eq!(
        acks.message().await.unwrap().unwrap().outcome(),
        Outcome::Stored
    );

    // The first one is not for this name, the new one is.
    let named = site.tls().domain_name("other.example");
    assert!(connect(&collector, named.clone()).await.is_err());
    // Broken first: what is in force stays.
    let good = std::fs::read(site.file("server.pem")).unwrap();
    std::fs::write(site.file("server.pem"), "no certificate").unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    connect(&collector, site.tls()).await.unwrap();
    std::fs::write(site.file("server.pem"), good).unwrap();
    site.command(&["server-certificate", "--host", "other.example"]);
    eventually("the new certificate", async || {
        connect(&collector, named.clone()).await.ok()
    })
    .await;
    batches.send(events("a", "gpu-1", 2)).await.unwrap();
    assert_eq!(
        acks.message().await.unwrap().unwrap().outcome(),
        Outcome::Stored
    );
    drop(batches);
    let log = collector.stop_and_read_log();
    assert!(log.contains("what was in force before still is"), "{log}");
    assert!(log.contains("read anew"), "{log}");
}

#[test]
fn it_does_not_start_with_half_of_it() {
    let site = Site::new();
    let serve = |more: &[&str]| {
        let output = binary()
            .args(["serve", "--data"])
            .arg(site.data.path())
            .args(more)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = serve(&["--listen", "0.0.0.0:0"]);
    assert!(said.contains("no credentials are configured"), "{said}");
    let cert = site.file("server.pem").display().to_string();
    let said = serve(&["--listen", "127.0.0.1:0", "--tls-cert", &cert]);
    assert!(
        said.contains("tls_key and tls_client_ca and credentials are not set"),
        "{said}"
    );
    let config = site.file("collector.toml").display().to_string();
    let with = ["--listen", "127.0.0.1:0", "--config", &config];
    let said = serve(&[&with[..], &["--tls-cert", "/nonexistent.pem"]].concat());
    assert!(said.contains("failed to read /nonexistent.pem"), "{said}");
    let key = site.file("ca.key").display().to_string();
    let said = serve(&[&with[..], &["--tls-key", &key]].concat());
    assert!(said.contains("do not go together"), "{said}");
}
