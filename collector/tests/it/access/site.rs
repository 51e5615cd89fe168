//! A collector with identities: its folder, and the ways in.

use std::path::PathBuf;
use std::process::Stdio;

use arrow::array::RecordBatch;
use arrow_flight::error::FlightError;
use arrow_flight::sql::client::FlightSqlServiceClient;
use futures::TryStreamExt;
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Identity};
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Ack, Batch};

use crate::support::*;

/// A folder made by `init`, and its administrator's token.
pub struct Site {
    pub dir: tempfile::TempDir,
    pub data: tempfile::TempDir,
    pub admin: String,
}

impl Site {
    pub fn new() -> Site {
        let site = Site {
            dir: tempfile::tempdir().unwrap(),
            data: tempfile::tempdir().unwrap(),
            admin: String::new(),
        };
        let said = site.command(&["init", "--host", "collector.example"]);
        // Alone, so that it can go into a file.
        let token = said.strip_suffix('\n').unwrap();
        assert!(token.starts_with("vramscope-token.admin.") && !token.contains('\n'));
        Site {
            admin: token.to_string(),
            ..site
        }
    }

    pub fn file(&self, name: &str) -> PathBuf {
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
    pub fn refused(&self, arguments: &[&str]) -> String {
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

    pub fn start_logging(&self, stderr: Stdio) -> Collector {
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

    pub fn tls(&self) -> ClientTlsConfig {
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

pub async fn connect(collector: &Collector, tls: ClientTlsConfig) -> Result<Channel, String> {
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
/// A certificate of that CA that was good until 2001.
pub fn expired(site: &Site, host: &str) -> ClientTlsConfig {
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
