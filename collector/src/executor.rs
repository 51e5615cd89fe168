//! The role `executor`: a worker of the distributed engine (`vramscope_queries::engine`).
//!
//! It computes parts of plans over the tables of one lake and keeps nothing. Whoever reaches it can
//! read every row of that lake, so off loopback it talks only to those who show a certificate of
//! the same authority.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Certificate, Server, ServerTlsConfig};
use vramscope_queries::engine::{self, Identity};
use vramscope_queries::session::Options;
use vramscope_queries::store::Place;

use crate::config::ByteSize;

/// Flags of the role.
#[derive(Debug, Args)]
pub struct Executor {
    /// The lake: a folder, s3://BUCKET/PREFIX, or a collector's data folder
    #[arg(long, value_name = "PLACE", env = "VRAMSCOPE_COLLECTOR_DATA")]
    data: PathBuf,
    /// Address for whoever asks, and for the other workers
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:7720",
        env = "VRAMSCOPE_EXECUTOR_LISTEN"
    )]
    listen: SocketAddr,
    /// Memory that all tasks share; beyond it they spill
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "2GiB",
        env = "VRAMSCOPE_EXECUTOR_MEMORY_BYTES"
    )]
    memory_bytes: ByteSize,
    /// Folder to spill to (default: the system's temporary folder)
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
    /// The worker's certificate (PEM); needed off loopback
    #[arg(long, value_name = "FILE", requires_all = ["worker_key", "worker_ca"], env = "VRAMSCOPE_WORKER_CERT")]
    worker_cert: Option<PathBuf>,
    /// Key of that certificate (PEM)
    #[arg(
        long,
        value_name = "FILE",
        requires = "worker_cert",
        env = "VRAMSCOPE_WORKER_KEY"
    )]
    worker_key: Option<PathBuf>,
    /// Authority whose certificates are let in and believed (PEM)
    #[arg(
        long,
        value_name = "FILE",
        requires = "worker_cert",
        env = "VRAMSCOPE_WORKER_CA"
    )]
    worker_ca: Option<PathBuf>,
    /// What is logged to standard error, as of `serve`
    #[arg(
        long,
        value_name = "FILTER",
        default_value = "warn,vramscope_collector=info",
        env = "VRAMSCOPE_COLLECTOR_LOG"
    )]
    pub log: String,
}

/// Reads the three files of an identity; `None` without them.
pub fn identity(
    ca: Option<&Path>,
    cert: Option<&Path>,
    key: Option<&Path>,
) -> anyhow::Result<Option<Identity>> {
    let read = |path: &Path| {
        std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))
    };
    match (ca, cert, key) {
        (None, None, None) => Ok(None),
        (Some(ca), Some(cert), Some(key)) => Ok(Some(Identity {
            authority: read(ca)?,
            certificate: read(cert)?,
            key: read(key)?,
        })),
        _ => bail!("worker_cert, worker_key and worker_ca are needed together"),
    }
}

/// Computes until SIGINT or SIGTERM.
pub async fn run(executor: &Executor) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to watch for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("failed to watch for SIGTERM")?;
    let identity = identity(
        executor.worker_ca.as_deref(),
        executor.worker_cert.as_deref(),
        executor.worker_key.as_deref(),
    )?;
    if identity.is_none() && !executor.listen.ip().is_loopback() {
        bail!(
            "refusing to listen on {} without certificates: whoever reaches a worker reads the lake; give --worker-cert, --worker-key and --worker-ca, or a loopback address",
            executor.listen
        );
    }
    let place = Place::of_data(&executor.data)?;
    if let Place::Folder(dir) = &place
        && !dir.is_dir()
    {
        bail!("{} is not a folder; give the lake's", dir.display());
    }
    let options = Options {
        memory_bytes: usize::try_from(executor.memory_bytes.0).unwrap_or(usize::MAX),
        temp_dir: executor.temp_dir.clone(),
        ..Options::default()
    };
    let worker = engine::worker(&place, &options, identity.clone())?;
    let mut server = Server::builder().tcp_nodelay(true);
    if let Some(identity) = &identity {
        let own = tonic::transport::Identity::from_pem(&identity.certificate, &identity.key);
        let tls = ServerTlsConfig::new()
            .identity(own)
            .client_ca_root(Certificate::from_pem(&identity.authority));
        server = server
            .tls_config(tls)
            .context("the worker's certificate or key is wrong")?;
    }
    let listener = TcpListener::bind(executor.listen)
        .await
        .with_context(|| format!("failed to listen on {}", executor.listen))?;
    let address = listener
        .local_addr()
        .context("failed to read the port listened on")?;
    tracing::info!(lake = %place.spelled(), %address, "starting as executor");
    let server = server
        .add_service(worker.into_worker_server())
        .serve_with_incoming(TcpListenerStream::new(listener));
    crate::serve::announce("listening", address)?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        ended = server => ended.context("the server failed")?,
    }
    tracing::info!("stopping");
    Ok(())
}
