//! Connections of the HTTP door.
//!
//! Invariants:
//! - there are at most so many; one more is told so and closed;
//! - a connection that sends no whole head within [`Bounds::patience`], or takes nothing of what
//!   was written for so long, is closed: who is slow or gone holds nothing for long;
//! - a stop lets requests that run finish, and closes what is idle.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use futures::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;

use super::HttpDoor;
use tonic::transport::server::Connected;

use crate::access::accept::{Doorway, Io};
use crate::metrics::{DoorLabels, METRICS};

/// What connections may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Connections at a time.
    pub connections: usize,
    /// Time for a request's head, for its body, and for taking some of an answer; so long a kept
    /// connection may be idle.
    pub patience: Duration,
}

/// Largest head of a request, HTTP/1.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// Requests at a time on one connection, HTTP/2.
const MAX_STREAMS: u32 = 64;
/// What tells HTTP/1 from HTTP/2: the length of HTTP/2's preface.
const PREFACE: usize = 24;

const FULL: &str =
    "{\"error\":{\"code\":\"busy\",\"message\":\"too many connections; come back later\"}}\n";
const LABELS: DoorLabels = DoorLabels { door: "http" };

/// Serves until `stopping` turns true and what runs then is finished.
pub async fn serve(
    mut doorway: Doorway,
    door: HttpDoor,
    bounds: Bounds,
    mut stopping: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(bounds.connections));
    let router = super::router(door.with_patience(bounds.patience));
    let mut connections = JoinSet::new();
    loop {
        let next = tokio::select! {
            // An error means that the sender is gone, which is a stop too.
            _ = stopping.wait_for(|stopping| *stopping) => break,
            Some(_) = connections.join_next() => continue,
            next = doorway.next() => next,
        };
        let Some(Ok(io)) = next else { break };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            METRICS.connections_refused.get_or_create(&LABELS).inc();
            connections.spawn(turn_away(io));
            continue;
        };
        let router = router.clone().layer(Extension(io.connect_info()));
        let stopping = stopping.clone();
        connections.spawn(async move {
            let _place = place;
            METRICS.connections.get_or_create(&LABELS).inc();
            connection(io, router, bounds.patience, stopping).await;
            METRICS.connections.get_or_create(&LABELS).dec();
        });
    }
    while connections.join_next().await.is_some() {}
}

async fn connection(
    io: Io,
    router: axum::Router,
    patience: Duration,
    mut stopping: watch::Receiver<bool>,
) {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES as u32)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(20));
    let io = TokioIo::new(Patient::new(io, patience));
    let mut served = pin!(builder.serve_connection(io, TowerToHyperService::new(router)));
    tokio::select! {
        done = served.as_mut() => return log(done),
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
    served.as_mut().graceful_shutdown();
    log(served.await);
}

/// Clients that go away are nothing to be told of.
fn log(done: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = done {
        tracing::debug!("an HTTP connection broke: {error}");
    }
}

async fn turn_away(mut io: Io) {
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nretry-after: 1\r\nconnection: close\r\n\r\n{FULL}",
        FULL.len()
    );
    let told = async {
        io.write_all(answer.as_bytes()).await?;
        io.shutdown().await
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
}

/// A connection whose patience ends: with a client that does not begin, and with one that does
/// not read.
struct Patient {
    io: Io,
    patience: Duration,
    read: usize,
    begin: Pin<Box<Sleep>>,
    /// Set while the client takes nothing.
    stall: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(io: Io, patience: Duration) -> Patient {
        Patient {
            io,
            patience,
            read: 0,
            begin: Box::pin(tokio::time::sleep(patience)),
            stall: None,
        }
    }

    /// What a write came to; too long without any is an error.
    fn after_write<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stall = None;
            return written;
        }
        let patience = self.patience;
        let stall = self
            .stall
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        match stall.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        self.read += buf.filled().len() - before;
        // Until here nobody else looks at the clock: hyper does not know the protocol yet.
        if read.is_pending() && self.read < PREFACE && self.begin.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.after_write(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.after_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        self.after_write(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.io).poll_shutdown(cx);
        self.after_write(cx, shut)
    }
}
