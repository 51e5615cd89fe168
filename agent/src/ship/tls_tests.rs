//! The sender against a collector that wants certificates. The server is tonic's own; CAs and
//! certificates are made here.

use std::pin::Pin;
use std::sync::{Arc, Mutex};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Streaming};
use vramscope_wire::proto::ingest_server::{Ingest, IngestServer};
use vramscope_wire::proto::{Ack, Outcome};
use vramscope_wire::{Table, parquet_file};

use super::*;
use crate::spool::folder;

/// Takes everything.
#[derive(Clone, Default)]
struct Stub(Arc<Mutex<Vec<u64>>>);

#[tonic::async_trait]
impl Ingest for Stub {
    type PushStream = Pin<Box<dyn Stream<Item = Result<Ack, Status>> + Send>>;

    async fn push(
        &self,
        request: Request<Streaming<Batch>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let stub = self.clone();
        let acks = request.into_inner().map(move |batch| {
            let batch_seq = batch?.batch_seq;
            stub.0.lock().unwrap().push(batch_seq);
            Ok(Ack {
                batch_seq,
                outcome: Outcome::Stored.into(),
                message: String::new(),
            })
        });
        Ok(Response::new(Box::pin(acks)))
    }
}

struct Ca {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    fn new(name: &str) -> Ca {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Ca {
            pem: params.self_signed(&key).unwrap().pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// Certificate and key.
    fn sign(&self, name: &str, purpose: ExtendedKeyUsagePurpose) -> (String, String) {
        let mut params = CertificateParams::new([name.to_string()]).unwrap();
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        (pem, key.serialize_pem())
    }

    /// Writes what an agent needs.
    fn write(&self, folder: &Path) -> Certificates {
        let (cert, key) = self.sign("gpu-1", ExtendedKeyUsagePurpose::ClientAuth);
        let write = |name: &str, text: &str| {
            std::fs::write(folder.join(name), text).unwrap();
            folder.join(name)
        };
        Certificates {
            ca: write("ca.pem", &self.pem),
            cert: write("cert.pem", &cert),
            key: write("key.pem", &key),
        }
    }

    fn serve(&self, listener: TcpListener, stub: &Stub) -> tokio::task::JoinHandle<()> {
        // tonic's server, unlike its client, names no provider where two are linked. An error
        // means that it is installed.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let (cert, key) = self.sign("localhost", ExtendedKeyUsagePurpose::ServerAuth);
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(cert, key))
            .client_ca_root(Certificate::from_pem(&self.pem));
        let service = IngestServer::new(stub.clone());
        tokio::spawn(async move {
            Server::builder()
                .tls_config(tls)
                .unwrap()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        })
    }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, format!("https://localhost:{port}"))
}

fn put(spool: &Path, seq: u64) {
    let empty = arrow::array::RecordBatch::new_empty(Table::Stacks.schema());
    let bytes = parquet_file::encode(Table::Stacks, &[empty]).unwrap();
    std::fs::write(folder::spool_path(spool, seq, Table::Stacks), bytes).unwrap();
}

/// Sends what is committed, once, as an agent does that stops.
async fn send(shipment: &Shipment, next: u64) {
    let (committed, receiver) = watch::channel(next);
    drop(committed);
    run(shipment.clone(), receiver).await;
}

/// A collector with another CA, and new files in the place of the old ones: the next connection
/// takes them.
#[tokio::test]
async fn certificates_are_read_at_each_connection() {
    let (spool, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let stub = Stub::default();
    let first = Ca::new("first");
    let certificates = first.write(files.path());
    let (listener, url) = listen().await;
    let server = first.serve(listener, &stub);
    let mut shipment = Shipment::new(spool.path(), &url, "a", "gpu-1")
        .with_certificates(Some(certificates.clone()));
    put(spool.path(), 1);
    send(&shipment, 2).await;
    assert_eq!(*stub.0.lock().unwrap(), [1]);
    server.abort();

    let second = Ca::new("second");
    let (listener, url) = listen().await;
    let server = second.serve(listener, &stub);
    shipment.collector = url;
    put(spool.path(), 2);
    send(&shipment, 3).await;
    assert_eq!(*stub.0.lock().unwrap(), [1], "the old CA was believed");
    assert_eq!(second.write(files.path()), certificates);
    send(&shipment, 3).await;
    assert_eq!(*stub.0.lock().unwrap(), [1, 2]);
    server.abort();
}

#[tokio::test]
async fn what_is_wrong_is_said() {
    let (spool, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ca = Ca::new("ours");
    let (listener, url) = listen().await;
    let server = ca.serve(listener, &Stub::default());
    let fails = async |certificates: &Certificates| {
        let shipment = Shipment::new(spool.path(), &url, "a", "gpu-1")
            .with_certificates(Some(certificates.clone()));
        let (committed, mut receiver) = watch::channel(1);
        drop(committed);
        let mut complaints = Complaints::default();
        let ended = session(&shipment, &mut receiver, &mut complaints, &mut false).await;
        format!("{:#}", ended.unwrap_err())
    };
    let mut certificates = ca.write(files.path());
    certificates.key = "/nonexistent.pem".into();
    let error = fails(&certificates).await;
    assert!(error.contains("failed to read /nonexistent.pem"), "{error}");
    let certificates = ca.write(files.path());
    std::fs::write(&certificates.cert, "nothing").unwrap();
    let error = fails(&certificates).await;
    assert!(error.contains("holds nothing usable"), "{error}");
    // The collector is of another CA.
    let other = tempfile::tempdir().unwrap();
    let error = fails(&Ca::new("other").write(other.path())).await;
    assert!(error.contains("UnknownIssuer"), "{error}");
    // The agent is: it trusts the collector, and the collector does not trust it.
    let certificates = Ca::new("other").write(other.path());
    std::fs::write(&certificates.ca, &ca.pem).unwrap();
    let error = fails(&certificates).await;
    assert!(
        error.to_lowercase().contains("certificate") || error.contains("UnknownCA"),
        "{error}"
    );
    server.abort();
}
