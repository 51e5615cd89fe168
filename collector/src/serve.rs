//! The running collector: opens the folder, recovers, serves, and stops in order.
//!
//! Start: lock, log, tables, removal of what was committed before the restart, then the port.
//! Stop: agents' streams end after the batch in hand, queries get a moment, then what is in
//! the log is committed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail};
use arrow_flight::flight_service_server::FlightServiceServer;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use vramscope_queries::folder::Folder;
use vramscope_queries::session::Options;
use vramscope_wire::proto::ingest_server::IngestServer;
use vramscope_wire::proto::recorder_server::RecorderServer;
use vramscope_wire::{MAX_BATCH_BYTES, MESSAGE_OVERHEAD};

use crate::config::Config;
use crate::doors::flight::FlightDoor;
use crate::folder::Lock;
use crate::ingest::wal::Wal;
use crate::ingest::{Counts, Service};
use crate::lake::{Lake, committer, place};
use crate::query::Gate;
use crate::query::pool::Pool;
use crate::requests::service::Desk;

/// How long running queries and streams may take to end after a signal to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Serves until SIGINT or SIGTERM.
pub async fn run(config: &Config) -> anyhow::Result<()> {
    let Some(data) = &config.data else {
        bail!(
            "no data folder; give --data DIR, VRAMSCOPE_COLLECTOR_DATA, or `data` in the configuration"
        );
    };
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to watch for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("failed to watch for SIGTERM")?;
    let data = open_folder(data)?;
    let _lock = Lock::take(&data)?;
    place::settle(&data, config.lake.as_deref()).await?;
    let listener = TcpListener::bind(config.listen)
        .await
        .with_context(|| format!("failed to listen on {}", config.listen))?;
    let address = listener
        .local_addr()
        .context("failed to read the port listened on")?;

    let wal = Wal::open(&data, config.wal_limit_bytes)
        .with_context(|| format!("failed to open the write-ahead log in {}", data.display()))?;
    let wal = Arc::new(wal);
    let lake = Arc::new(Lake::open(&data).await?);
    if let Some(shared) = lake.shared() {
        let waiting = wal.waiting();
        shared.recover(waiting.iter().map(|entry| (&entry.agent, entry.seq)));
    }
    committer::forget_committed(&wal, &lake).await?;
    let backlog = wal.backlog();
    tracing::info!(data = %data.display(), %address, batches = backlog.files, bytes = backlog.bytes, "starting");

    let (stop_intake, intake_stopping) = watch::channel(false);
    let (stop_commits, commits_stopping) = watch::channel(false);
    let commits = tokio::spawn(committer::run(
        Arc::clone(&wal),
        Arc::clone(&lake),
        config.commit_interval,
        commits_stopping,
    ));
    let memory_bytes = usize::try_from(config.query_memory_bytes).unwrap_or(usize::MAX);
    let folder = Folder::open(
        &data,
        Options {
            memory_bytes,
            engine: config.engine.engine()?,
            ..Options::default()
        },
    )
    .await?;
    let queries = Pool::new().context("failed to start the query threads")?;
    let gate = Gate::new(
        Arc::new(folder),
        queries.lane(),
        config.query_timeout,
        config.query_max_rows,
    );
    let counts = Arc::new(Counts::default());
    let ingest = Service::new(
        wal,
        lake,
        Arc::clone(&counts),
        config.max_batch_bytes,
        intake_stopping.clone(),
    );
    let ingest =
        IngestServer::new(ingest).max_decoding_message_size(MAX_BATCH_BYTES + MESSAGE_OVERHEAD);

    let desk = Desk::open(&data, intake_stopping.clone())?;
    tokio::spawn(desk.clone().run());

    let mut server_stopping = intake_stopping;
    let server = Server::builder()
        .tcp_nodelay(true)
        // An agent's host that vanished must not hold its stream for ever.
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .add_service(ingest)
        .add_service(RecorderServer::new(desk))
        .add_service(FlightServiceServer::new(FlightDoor::new(gate)))
        .serve_with_incoming_shutdown(TcpListenerStream::new(listener), async move {
            // An error means that the sender is gone, which is a stop too.
            let _ = server_stopping.wait_for(|stopping| *stopping).await;
        });
    let mut server = tokio::spawn(server);
    announce(address)?;

    let served = tokio::select! {
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
        ended = &mut server => Some(ended),
    };
    tracing::info!("stopping");
    stop_intake.send_replace(true);
    let served = match served {
        Some(ended) => Some(ended),
        None => tokio::time::timeout(GRACE, &mut server).await.ok(),
    };
    server.abort();
    stop_commits.send_replace(true);
    commits.await.context("the committer failed")?;
    log_counts(&counts);
    match served {
        Some(ended) => ended
            .context("the server failed")?
            .context("the server failed"),
        None => Ok(()),
    }
}

/// The line that whoever started the process waits for.
pub(crate) fn announce(address: std::net::SocketAddr) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout();
    writeln!(out, "listening on {address}")
        .and_then(|()| out.flush())
        .context("failed to write to standard output")
}

fn open_folder(data: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(data)
        .with_context(|| format!("failed to create data folder {}", data.display()))?;
    data.canonicalize()
        .with_context(|| format!("failed to open data folder {}", data.display()))
}

fn log_counts(counts: &Counts) {
    tracing::info!(
        stored = counts.stored.load(Ordering::Relaxed),
        duplicate = counts.duplicate.load(Ordering::Relaxed),
        rejected = counts.rejected.load(Ordering::Relaxed),
        put_off = counts.retry.load(Ordering::Relaxed),
        "stopped; batches since the start"
    );
}
