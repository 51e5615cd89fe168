//! The running collector: opens the folder, recovers, serves, and stops in order.
//!
//! Start: lock, log, tables, removal of what was committed before the restart, then the port.
//! Stop: agents' streams end after the batch in hand, queries get a moment, then what is in
//! the log is committed.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail};
use arrow_flight::flight_service_server::FlightServiceServer;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::Server;
use vramscope_queries::folder::Folder;
use vramscope_queries::session::Options;
use vramscope_wire::proto::ingest_server::IngestServer;
use vramscope_wire::proto::recorder_server::RecorderServer;
use vramscope_wire::{MAX_BATCH_BYTES, MESSAGE_OVERHEAD};

use crate::access::Access;
use crate::access::accept::Doorway;
use crate::access::guard::Guarded;
use crate::access::tls::Protocol;
use crate::config::Config;
use crate::doors::flight::FlightDoor;
use crate::doors::http::{self, HttpDoor};
use crate::doors::postgres;
use crate::folder::Lock;
use crate::ingest::marks::Marks;
use crate::ingest::promise::Promise;
use crate::ingest::wal::Wal;
use crate::ingest::{Counts, Keeper, Limits, Service};
use crate::lake::committer::direct::{self, Direct};
use crate::lake::committer::recover;
use crate::lake::{Lake, committer, place, upkeep};
use crate::metrics::health::Health;
use crate::query::pool::Pool;
use crate::query::{self, Bounds, Gate};
use crate::requests::service::Desk;

/// How long running queries and streams may take to end after a signal to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Takes as many open files as the system lets this process have: each connection is one, and the
/// usual soft limit of 1,024 is there for programs that use `select`, which this one does not.
fn raise_open_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure lives through both calls, which only read or fill it.
    let done = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 && {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0
        }
    };
    if !done {
        let error = std::io::Error::last_os_error();
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// Serves until SIGINT or SIGTERM.
pub async fn run(config: &Config) -> anyhow::Result<()> {
    raise_open_files();
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
    let postgres = match config.postgres_listen.address() {
        Some(wanted) => Some(listen_for_postgres(wanted).await?),
        None => None,
    };

    let http_listener = match config.http_listen.address() {
        None => None,
        Some(address) => {
            let listener = TcpListener::bind(address).await.with_context(|| {
                format!("failed to serve HTTP on {address}; http_listen can be another address, or \"off\"")
            })?;
            Some(listener)
        }
    };

    let access = match &config.access {
        Some(files) => Access::open(files.clone(), &data)?,
        None => Access::none(),
    };
    let wal = Wal::open(&data, config.wal_limit_bytes)
        .with_context(|| format!("failed to open the write-ahead log in {}", data.display()))?;
    let wal = Arc::new(wal);
    let lake = Arc::new(Lake::open(&data).await?);
    recover::recover(&wal, &lake, &config.clock).await?;
    if config.promise == Promise::Store {
        direct::redo(&lake).await?;
    }
    let marks = Marks::new(Arc::clone(&wal), Arc::clone(&lake));
    recover::remember(&wal, &lake, &marks).await?;
    let backlog = wal.backlog();
    tracing::info!(data = %data.display(), %address, batches = backlog.files, bytes = backlog.bytes, "starting");

    let (stop_intake, intake_stopping) = watch::channel(false);
    let (stop_commits, commits_stopping) = watch::channel(false);
    let commits = committer::start(
        Arc::clone(&wal),
        Arc::clone(&lake),
        config.commit_interval,
        commits_stopping,
    )
    .context("failed to start the committer's thread")?;
    // Some seconds of a fleet's rows wait at any time; more says that commits fall behind.
    let (log, most) = (Arc::clone(&wal), config.wal_limit_bytes / 64);
    let pressure: upkeep::Pressure = Arc::new(move || log.backlog().bytes > most);
    let upkeep = upkeep::run(
        Arc::clone(&lake),
        config.upkeep.clone(),
        upkeep::Pace::new(intake_stopping.clone(), pressure),
    )
    .context("failed to start the upkeep's thread")?;
    let queries = Pool::new().context("failed to start the query threads")?;
    let (query_log, log_writer) = query::log::new();
    let folder = open_for_queries(&data, config).await?;
    let gate = Gate::new(Arc::new(folder), queries.lane(), bounds(config), query_log);
    let query_log = tokio::spawn(log_writer.run(
        gate.clone(),
        Arc::clone(&lake),
        config.query_log_interval,
        stop_commits.subscribe(),
    ));
    let postgres_address = postgres.as_ref().map(|(_, address)| *address);
    let postgres = postgres.map(|(listener, _)| {
        let bounds = postgres::Bounds {
            connections: config.postgres_max_connections,
            idle: config.postgres_idle_timeout,
        };
        let stopping = intake_stopping.clone();
        tokio::spawn(postgres::serve(
            listener,
            gate.clone(),
            access.clone(),
            bounds,
            stopping,
        ))
    });
    let counts = Arc::new(Counts::default());
    let health = Arc::new(Health::new(
        data.clone(),
        Arc::clone(&wal),
        config.wal_limit_bytes,
        config.min_disk_free_bytes,
        config.commit_interval,
        gate.clone(),
    ));
    let keeper = match config.promise {
        Promise::Fsync => Keeper::Log(Arc::clone(&wal)),
        Promise::Store => Keeper::Table(Direct::start(Arc::clone(&lake), wal.id()).await?),
    };
    let limits = Limits {
        max_batch_bytes: config.max_batch_bytes,
        clock: config.clock,
    };
    let ingest = Service::new(
        keeper,
        marks,
        Arc::clone(&counts),
        limits,
        intake_stopping.clone(),
    );
    let ingest =
        IngestServer::new(ingest).max_decoding_message_size(MAX_BATCH_BYTES + MESSAGE_OVERHEAD);

    let desk = Desk::open(&data, intake_stopping.clone())?;
    tokio::spawn(desk.clone().run());

    let follow = access.clone().follow(intake_stopping.clone());
    tokio::spawn(async move {
        if let Err(error) = follow.await {
            tracing::error!("certificates and credentials are not read anew: {error:#}");
        }
    });
    let most = Some(config.max_connections);
    let connections = Doorway::open(listener, access.clone(), Protocol::Grpc, most)
        .context("failed to accept connections")?;
    let http = match http_listener {
        None => None,
        Some(listener) => {
            let address = listener
                .local_addr()
                .context("failed to read the port of the HTTP door")?;
            let doorway = Doorway::open(listener, access.clone(), Protocol::Http, None)
                .context("failed to accept HTTP connections")?;
            let door = HttpDoor::new(gate.clone(), access.clone(), Arc::clone(&health));
            let bounds = http::Bounds {
                connections: config.http_max_connections,
                patience: config.http_client_timeout,
            };
            let task = tokio::spawn(http::serve(doorway, door, bounds, intake_stopping.clone()));
            Some((address, task))
        }
    };
    let mut server_stopping = intake_stopping;
    let server = Server::builder()
        // An agent's host that vanished must not hold its stream for ever.
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .add_service(Guarded::for_agents(&access, ingest))
        .add_service(Guarded::for_agents(&access, RecorderServer::new(desk)))
        .add_service(Guarded::for_readers(
            &access,
            FlightServiceServer::new(FlightDoor::new(gate, access.clone())),
        ))
        .serve_with_incoming_shutdown(connections, async move {
            // An error means that the sender is gone, which is a stop too.
            let _ = server_stopping.wait_for(|stopping| *stopping).await;
        });
    let mut server = tokio::spawn(server);
    announce("listening", address)?;
    if let Some((address, _)) = &http {
        announce("http", *address)?;
    }
    if let Some(address) = postgres_address {
        announce("postgresql", address)?;
    }

    let served = tokio::select! {
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
        ended = &mut server => Some(ended),
    };
    tracing::info!("stopping");
    health.stops();
    stop_intake.send_replace(true);
    let give_up = tokio::time::Instant::now() + GRACE;
    let served = match served {
        Some(ended) => Some(ended),
        None => tokio::time::timeout_at(give_up, &mut server).await.ok(),
    };
    server.abort();
    for mut door in http.map(|(_, task)| task).into_iter().chain(postgres) {
        let _ = tokio::time::timeout_at(give_up, &mut door).await;
        door.abort();
    }
    stop_commits.send_replace(true);
    query_log.await.context("the writer of query_log failed")?;
    commits.await.context("the committer failed")?;
    // It pauses every few milliseconds; a commit in hand is waited for.
    if tokio::task::spawn_blocking(move || upkeep.join())
        .await
        .is_err()
    {
        tracing::warn!("the upkeep's thread died");
    }
    log_counts(&counts);
    match served {
        Some(ended) => ended
            .context("the server failed")?
            .context("the server failed"),
        None => Ok(()),
    }
}

fn bounds(config: &Config) -> Bounds {
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    Bounds {
        time: config.query_timeout,
        rows: config.query_max_rows,
        memory_bytes: size(config.query_memory_bytes),
        share_bytes: size(config.query_share_bytes),
    }
}

/// The folder as queries see it, with where they spill to.
async fn open_for_queries(data: &Path, config: &Config) -> anyhow::Result<Folder> {
    let spill = config
        .spill_dir
        .clone()
        .unwrap_or_else(|| data.join("_spill"));
    query::spill_folder(&spill)
        .with_context(|| format!("failed to prepare spill folder {}", spill.display()))?;
    let options = Options {
        memory_bytes: bounds(config).memory_bytes,
        temp_dir: Some(spill),
        spill_bytes: Some(config.spill_limit_bytes),
        engine: config.engine.engine()?,
        ..Options::default()
    };
    Ok(Folder::open(data, options).await?)
}

/// The PostgreSQL door's port.
async fn listen_for_postgres(wanted: SocketAddr) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(wanted).await.with_context(|| {
        format!(
            "failed to listen on {wanted} for PostgreSQL clients; set postgres_listen to another \
             address, or to \"off\""
        )
    })?;
    let address = listener
        .local_addr()
        .context("failed to read the port listened on")?;
    Ok((listener, address))
}

/// The lines that whoever started the process waits for: first where agents come in.
pub(crate) fn announce(what: &str, address: SocketAddr) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout();
    writeln!(out, "{what} on {address}")
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
        conflicting = counts.conflicting.load(Ordering::Relaxed),
        put_off = counts.retry.load(Ordering::Relaxed),
        missing = counts.missing.load(Ordering::Relaxed),
        rows = counts.rows.load(Ordering::Relaxed),
        misdated_rows = counts.misdated_rows.load(Ordering::Relaxed),
        "stopped; batches since the start"
    );
}
