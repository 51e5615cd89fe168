//! The PostgreSQL door: psql, Grafana, DBeaver, drivers.
//!
//! It speaks protocol 3 (3.0 and 3.2): [`frame`] reads what clients send, [`startup`] lets them in,
//! [`session`] answers. The formats of what is sent are `pgwire`'s, values in PostgreSQL's types are
//! `arrow-pg`'s ([`rows`], [`spelling`]). Questions go through the gate like those of every door, planned by
//! [`planner`] because this protocol has its own [`dialect`], parameters and [`catalog`].
//!
//! Invariants:
//! - a client is let in within [`STARTUP`] or not at all;
//! - connections are bounded: so many that were let in, and as many more at the door;
//! - nothing is written for anybody: what is not a query is answered by [`statement`] or refused.

mod catalog;
mod dialect;
mod failure;
mod frame;
mod planner;
mod rows;
mod session;
mod settings;
mod spelling;
mod startup;
mod statement;
mod values;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use pgwire::api::ConnectionManager;
use pgwire::messages::PgWireBackendMessage as Out;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::access::{Access, Caller};
use crate::query::Gate;
use failure::Failure;
use planner::Catalogs;
use session::Session;
use startup::Turned;

/// Time in which a client has to say who it is.
pub const STARTUP: Duration = Duration::from_secs(10);

/// How many connections, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Clients that are in at a time.
    pub connections: usize,
    /// Time after which a client that says nothing is sent away.
    pub idle: Duration,
}

/// What all connections share.
struct Shared {
    gate: Gate,
    access: Access,
    catalogs: Arc<Catalogs>,
    connections: Arc<ConnectionManager>,
    places: Arc<Semaphore>,
    most: usize,
    idle: Duration,
    pids: AtomicI32,
    stopping: watch::Receiver<bool>,
}

impl Shared {
    fn next_pid(&self) -> i32 {
        // Above 0 however often it goes round.
        self.pids.fetch_add(1, Ordering::Relaxed) & i32::MAX
    }

    /// What an answer over data with losses has to say; empty without any.
    async fn note(&self, caller: &Caller) -> String {
        match self.gate.loss(Some(caller)).await {
            Some(loss) => loss.note().unwrap_or_default(),
            // Unknown is not "nothing was lost".
            None => "note: whether events were lost is not known".to_string(),
        }
    }
}

/// Answers clients until it is told to stop, and then until the last of them is gone.
pub async fn serve(
    listener: TcpListener,
    gate: Gate,
    access: Access,
    bounds: Bounds,
    mut stopping: watch::Receiver<bool>,
) {
    let shared = Arc::new(Shared {
        gate,
        access,
        catalogs: Arc::default(),
        connections: Arc::new(ConnectionManager::new()),
        places: Arc::new(Semaphore::new(bounds.connections)),
        most: bounds.connections,
        idle: bounds.idle,
        pids: AtomicI32::new(1),
        stopping: stopping.clone(),
    });
    let at_the_door = Arc::new(Semaphore::new(bounds.connections));
    let mut clients = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopping.wait_for(|stopping| *stopping) => break,
            // So that those who are gone take no memory.
            Some(_) = clients.join_next() => continue,
        };
        match accepted {
            Ok((socket, from)) => {
                // Whoever comes beyond that is not even listened to.
                if let Ok(place) = Arc::clone(&at_the_door).try_acquire_owned() {
                    let shared = Arc::clone(&shared);
                    clients.spawn(async move {
                        serve_one(socket, from, shared, place).await;
                    });
                }
            }
            Err(error) => {
                tracing::warn!("failed to accept a PostgreSQL client: {error}");
                // Out of file descriptors, most likely: others have to go first.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    while clients.join_next().await.is_some() {}
}

async fn serve_one(
    socket: TcpStream,
    from: SocketAddr,
    shared: Arc<Shared>,
    at_the_door: tokio::sync::OwnedSemaphorePermit,
) {
    let _ = socket.set_nodelay(true);
    let mut stopping = shared.stopping.clone();
    let received = tokio::select! {
        received = tokio::time::timeout(STARTUP, startup::receive(socket, from, &shared)) => received,
        _ = stopping.wait_for(|stopping| *stopping) => return,
    };
    let mut guest = match received {
        Ok(Ok(guest)) => guest,
        Ok(Err(Turned::Away(mut wire, failure))) => {
            tracing::debug!(%from, "turned away: {}", failure.message);
            let _ = wire.put(Out::ErrorResponse(failure.into()));
            wire.close().await;
            return;
        }
        Ok(Err(Turned::Gone)) | Err(_) => return,
    };
    let Ok(_place) = Arc::clone(&shared.places).try_acquire_owned() else {
        let failure = Failure::fatal(
            "53300",
            format!("sorry, too many clients already: {}", shared.most),
        )
        .hint("raise postgres_max_connections, or use a pool");
        let _ = guest.wire.put(Out::ErrorResponse(failure.into()));
        guest.wire.close().await;
        return;
    };
    drop(at_the_door);
    let Ok((wire, entered, _registered)) = guest.enter(&shared).await else {
        return;
    };
    Session::new(shared, wire, entered).run().await;
}
