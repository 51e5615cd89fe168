//! Identity and secrecy: certificates, tokens, roles, and what a tenant sees. Everything is made
//! by the commands that users have, and what an attacker would show is made here.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_flight::error::FlightError;
use arrow_flight::sql::client::FlightSqlServiceClient;
use futures::TryStreamExt;
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Identity};
use vramscope_wire::Table;
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Ack, Batch, Outcome};

use crate::support::*;

/// A folder made by `init`, and its administrator's token.
pub struct Site {
    dir: tempfile::TempDir,
    data: tempfile::TempDir,
    admin: String,
}

impl Site {
    pub fn new() -> Site {
        let site = Site {
            dir: tempfile::tempdir().unwrap(),
            data: tempfile::tempdir().unwrap(),
            admin: String::new(),
        };
        let said = site.command(&["init", "--host", "collector.example"]);
        let token = said
            .lines()
            .find(|line| line.starts_with("vramscope-token."));
        Site {
            admin: token.unwrap().to_string(),
            ..site
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What a command of the collector prints; `--dir` is put behind.
    pub fn command(&self, arguments: &[&str]) -> String {
        let output = binary()
            .args(arguments)
            .arg("--dir")
            .arg(self.dir.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a command says that has to fail.
    fn refused(&self, arguments: &[&str]) -> String {
        let output = binary()
            .args(arguments)
            .arg("--dir")
            .arg(self.dir.path())
            .output()
            .unwrap();
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    pub fn token(&self, arguments: &[&str]) -> String {
        let said = self.command(&[&["token", "add"], arguments].concat());
        said.trim().to_string()
    }

    pub fn start(&self) -> Collector {
        self.start_logging(Stdio::inherit())
    }

    fn start_logging(&self, stderr: Stdio) -> Collector {
        let config = self.file("collector.toml");
        let flags = [
            "--config",
            config.to_str().unwrap(),
            "--commit-interval",
            "50ms",
            "--query-log-interval",
            "100ms",
        ];
        Collector::start_logging(self.data.path(), &flags, stderr)
    }

    fn tls(&self) -> ClientTlsConfig {
        let ca = std::fs::read(self.file("ca.pem")).unwrap();
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca))
    }

    /// Makes an agent's certificate and shows it.
    pub fn agent(&self, host: &str) -> ClientTlsConfig {
        self.command(&["agent-certificate", "--replace", "--name", host]);
        let read = |end: &str| std::fs::read(self.file(&format!("agents/{host}.{end}"))).unwrap();
        self.tls()
            .identity(Identity::from_pem(read("pem"), read("key")))
    }

    pub async fn query(
        &self,
        collector: &Collector,
        token: &str,
        sql: &str,
    ) -> Result<Vec<String>, String> {
        let channel = connect(collector, self.tls()).await?;
        let mut client = FlightSqlServiceClient::new(channel);
        client.set_token(token.to_string());
        let failed = |error: FlightError| error.to_string();
        let info = client
            .execute(sql.to_string(), None)
            .await
            .map_err(failed)?;
        let mut batches = Vec::new();
        for endpoint in info.endpoint {
            let rows = client
                .do_get(endpoint.ticket.unwrap())
                .await
                .map_err(failed)?;
            let rows: Vec<RecordBatch> = rows
                .try_collect()
                .await
                .map_err(|error| error.to_string())?;
            batches.extend(rows);
        }
        Ok(lines(&batches))
    }
}

fn https(collector: &Collector) -> String {
    collector.address.replace("http://", "https://")
}

async fn connect(collector: &Collector, tls: ClientTlsConfig) -> Result<Channel, String> {
    let endpoint = Channel::from_shared(https(collector)).unwrap();
    let endpoint = endpoint
        .tls_config(tls)
        .map_err(|error| error.to_string())?;
    endpoint
        .connect()
        .await
        .map_err(|error| format!("{error:?}"))
}

pub async fn push_as(
    collector: &Collector,
    tls: ClientTlsConfig,
    batches: Vec<Batch>,
) -> Result<Vec<Ack>, String> {
    let channel = connect(collector, tls).await?;
    let acks = IngestClient::new(channel)
        .push(futures::stream::iter(batches))
        .await
        .map_err(|status| format!("{status:?}"))?;
    let acks = acks.into_inner().try_collect().await;
    acks.map_err(|status| format!("{status:?}"))
}

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

/// A certificate of that CA that was good until 2001.
fn expired(site: &Site, host: &str) -> ClientTlsConfig {
    let read = |name: &str| std::fs::read_to_string(site.file(name)).unwrap();
    let key = KeyPair::from_pem(&read("ca.key")).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&read("ca.pem"), key).unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::DnsName(host.try_into().unwrap())];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.not_before = rcgen::date_time_ymd(2000, 1, 1);
    params.not_after = rcgen::date_time_ymd(2001, 1, 1);
    let key = KeyPair::generate().unwrap();
    let pem = params.signed_by(&key, &issuer).unwrap().pem();
    site.tls()
        .identity(Identity::from_pem(pem, key.serialize_pem()))
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
    assert!(error.contains("CertificateExpired"), "{error}");
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

/// One host, two tenants. Of process 1 team-a's rows, of 2 team-b's, of 3 nobody's, of 4 both's.
async fn two_tenants(site: &Site, collector: &Collector) {
    let (agent, host) = ("a", "gpu-1");
    let ids = numbers(&[1, 2, 3, 4, 4]);
    let processes = with(
        rows(Table::Processes, agent, 1, 5),
        &[
            ("process_id", Arc::clone(&ids)),
            (
                "namespace",
                texts(&[
                    Some("team-a"),
                    Some("team-b"),
                    None,
                    Some("team-a"),
                    Some("team-b"),
                ]),
            ),
            (
                "command",
                texts(&[
                    Some("mine"),
                    Some("theirs-secret"),
                    Some("nobodys"),
                    Some("both"),
                    Some("both"),
                ]),
            ),
        ],
    );
    let processes = with(
        processes,
        &[("ended", no_times(5)), ("started", no_times(5))],
    );
    let four = numbers(&[1, 2, 3, 4]);
    let mut batches = vec![of_host(Table::Processes, agent, host, 1, processes)];
    let stack_ids = numbers(&[11, 22, 33, 44]);
    let mut seq = 1;
    for table in [
        Table::AllocEvents,
        Table::HostBuffers,
        Table::StackWindows,
        Table::DeviceWindows,
        Table::AllocatorSamples,
        Table::Segments,
        Table::Traffic,
        Table::Devices,
        Table::AgentWindows,
        Table::Stacks,
    ] {
        seq += 1;
        let mut rows = with(
            rows(table, agent, seq, 4),
            &[
                ("process_id", Arc::clone(&four)),
                ("stack_id", Arc::clone(&stack_ids)),
            ],
        );
        if table == Table::AllocEvents {
            rows = with(rows, &[("alloc_stack_id", Arc::clone(&stack_ids))]);
        }
        if table == Table::Segments {
            let none = no_blocks(&rows);
            rows = with(rows, &[("blocks", none)]);
        }
        if table == Table::Devices {
            rows = with(rows, &[("processes", device_processes())]);
        }
        if table == Table::Stacks {
            let folded = texts(&[Some("mine"), Some("theirs-secret"), Some("c"), Some("d")]);
            rows = with(rows, &[("folded", folded)]);
        }
        batches.push(of_host(table, agent, host, seq, rows));
    }
    let acks = push_as(collector, site.agent(host), batches).await.unwrap();
    assert!(
        outcomes(&acks)
            .iter()
            .all(|outcome| *outcome == Outcome::Stored),
        "{acks:?}"
    );
    eventually("all rows", async || {
        let sql = "SELECT count(*) FROM stacks";
        let rows = site.query(collector, &site.admin, sql).await.unwrap();
        (rows == ["4"]).then_some(())
    })
    .await;
}

fn no_times(rows: usize) -> ArrayRef {
    let none: Vec<Option<i64>> = vec![None; rows];
    Arc::new(arrow::array::TimestampMicrosecondArray::from(none).with_timezone("UTC"))
}

/// The same number of empty lists.
fn no_blocks(rows: &RecordBatch) -> ArrayRef {
    let column = rows.column_by_name("blocks").unwrap();
    let arrow::datatypes::DataType::List(element) = column.data_type() else {
        panic!("blocks is a list")
    };
    Arc::new(arrow::array::ListArray::new(
        Arc::clone(element),
        arrow::buffer::OffsetBuffer::from_lengths(vec![0; rows.num_rows()]),
        arrow::array::new_empty_array(element.data_type()),
        None,
    ))
}

/// On each of four samples the same three: processes 1, 2, and one that is not known.
fn device_processes() -> ArrayRef {
    use arrow::array::{Int32Array, ListArray, StructArray};
    use vramscope_wire::schema::device_process_fields;
    let pids: Vec<i32> = (0..4).flat_map(|_| [101, 102, 103]).collect();
    let ids: Vec<Option<i64>> = (0..4).flat_map(|_| [Some(1), Some(2), None]).collect();
    let used: Vec<i64> = (0..4).flat_map(|_| [7, 8, 9]).collect();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int32Array::from(pids)),
        Arc::new(Int64Array::from(ids)),
        Arc::new(Int64Array::from(used)),
    ];
    let values = StructArray::new(device_process_fields(), columns, None);
    let schema = Table::Devices.schema();
    let field = schema.field_with_name("processes").unwrap();
    let arrow::datatypes::DataType::List(element) = field.data_type() else {
        panic!("processes is a list")
    };
    Arc::new(ListArray::new(
        Arc::clone(element),
        arrow::buffer::OffsetBuffer::from_lengths(vec![3; 4]),
        Arc::new(values),
        None,
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_sees_its_own_pods_and_no_way_around() {
    let site = Site::new();
    let a = site.token(&["a", "--namespace", "team-a"]);
    let both = site.token(&["both", "--namespace", "team-a", "--namespace", "team-b"]);
    let none = site.token(&["none", "--namespace", "team-z"]);
    let all = site.token(&["all"]);
    let collector = site.start();
    two_tenants(&site, &collector).await;
    let ask = async |token: &str, sql: &str| site.query(&collector, token, sql).await;
    let ids = "SELECT DISTINCT process_id FROM processes";
    assert_eq!(ask(&a, ids).await.unwrap(), ["1"]);
    assert_eq!(ask(&both, ids).await.unwrap(), ["1", "2", "4"]);
    assert_eq!(ask(&all, ids).await.unwrap(), ["1", "2", "3", "4"]);
    assert!(ask(&none, ids).await.unwrap().is_empty());

    for table in [
        "alloc_events",
        "host_buffers",
        "stack_windows",
        "device_windows",
        "allocator_samples",
        "segments",
        "traffic",
    ] {
        for (token, wanted) in [
            (&a, vec!["1"]),
            (&both, vec!["1", "2", "4"]),
            (&none, vec![]),
        ] {
            let rows = ask(token, &format!("SELECT process_id FROM {table}")).await;
            assert_eq!(rows.unwrap(), wanted, "{table}");
        }
        // Statistics of files know of all rows.
        for sql in [
            format!("SELECT count(*) FROM {table}"),
            format!("SELECT max(process_id) FROM {table}"),
            format!("SELECT count(*) FROM datafusion.public.{table} WHERE process_id > 0"),
        ] {
            assert_eq!(ask(&a, &sql).await.unwrap(), ["1"], "{sql}");
        }
        assert!(
            ask(&a, &format!("SELECT 1 FROM {table} WHERE process_id = 2"))
                .await
                .unwrap()
                .is_empty()
        );
    }
    assert_eq!(
        ask(&a, "SELECT stack_id, folded FROM stacks")
            .await
            .unwrap(),
        ["11|mine"]
    );
    assert_eq!(ask(&a, "SELECT count(*) FROM stacks").await.unwrap(), ["1"]);
    assert_eq!(
        ask(&all, "SELECT count(*) FROM stacks").await.unwrap(),
        ["4"]
    );

    // Of its host a tenant sees what its pods could see; of others nothing.
    let own = "SELECT DISTINCT p['process_id'], p['used_bytes'] FROM (SELECT unnest(processes) AS p FROM devices)";
    assert_eq!(ask(&a, own).await.unwrap(), ["1|7"]);
    assert_eq!(ask(&all, own).await.unwrap().len(), 3);
    assert_eq!(
        ask(&none, "SELECT count(*) FROM devices").await.unwrap(),
        ["0"]
    );
    assert_eq!(
        ask(&none, "SELECT count(*) FROM agent_windows")
            .await
            .unwrap(),
        ["0"]
    );

    // The collector's own tables.
    assert_eq!(
        ask(&a, "SELECT count(*) FROM batches").await.unwrap(),
        ["0"]
    );
    let batches = ask(&all, "SELECT count(*) > 0 FROM batches").await;
    assert_eq!(batches.unwrap(), ["true"]);
    let who = "SELECT DISTINCT who FROM query_log";
    for (token, name) in [(&a, "a"), (&all, "all")] {
        let seen = eventually("rows of query_log", async || {
            let seen = ask(token, who).await.unwrap();
            (!seen.is_empty()).then_some(seen)
        })
        .await;
        assert_eq!(seen, [name]);
    }
    let seen = ask(&site.admin, who).await.unwrap();
    assert!(seen.len() >= 4, "{seen:?}");

    // Views, and functions that read tables.
    assert_eq!(
        ask(&a, "SELECT process_id FROM current_processes")
            .await
            .unwrap(),
        ["1"]
    );
    let views = ask(&a, "SELECT table_name FROM information_schema.views")
        .await
        .unwrap();
    let admin = ask(
        &site.admin,
        "SELECT table_name FROM information_schema.views",
    )
    .await;
    assert_eq!(views, admin.unwrap());
    for function in ["leak_verdicts()", "leak_evaluations()"] {
        let sql = format!("SELECT DISTINCT process_id FROM {function}");
        let seen = ask(&a, &sql).await.unwrap();
        assert!(seen.iter().all(|id| id == "1"), "{function}: {seen:?}");
    }

    // What an error says is computed over rows, which must be visible ones.
    for sql in [
        "SELECT CAST(command AS BIGINT) FROM processes",
        "SELECT 1 FROM processes WHERE CAST(command AS BIGINT) = 1",
        "SELECT 1 FROM stacks WHERE CAST(folded AS BIGINT) = 1",
        "SELECT 1 FROM processes WHERE process_id = 2 AND CAST(command AS BIGINT) = 1",
        "SELECT 1 FROM processes ORDER BY CAST(command AS BIGINT) LIMIT 1",
        "SELECT a.process_id FROM processes a JOIN processes b ON CAST(a.command AS BIGINT) = b.process_id",
    ] {
        let text = format!("{:?}", ask(&a, sql).await);
        assert!(!text.contains("theirs"), "{sql}: {text}");
        assert!(!text.contains("nobodys"), "{sql}: {text}");
    }
    let error = ask(&a, "SELECT CAST(command AS BIGINT) FROM processes")
        .await
        .unwrap_err();
    assert!(error.contains("mine"), "{error}");
    // Plans say nothing of files, rows or hidden ids.
    for explain in ["EXPLAIN", "EXPLAIN VERBOSE", "EXPLAIN ANALYZE"] {
        let plan = ask(&a, &format!("{explain} SELECT * FROM alloc_events, stacks")).await;
        let plan = format!("{plan:?}");
        assert!(
            !plan.contains(".parquet") && !plan.contains("_delta_log"),
            "{plan}"
        );
        assert!(plan.contains("Fence"), "{plan}");
    }
    assert!(collector.stop().success());
}
