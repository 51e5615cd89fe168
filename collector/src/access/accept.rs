//! Connections of a door, TLS and all.
//!
//! Invariants:
//! - with TLS configured nothing is spoken in the clear: what does not shake hands is closed;
//! - a connection keeps the certificates it shook hands with; the next one gets what is then in
//!   force;
//! - a door with a limit holds so many connections; one more is closed at once, and counted;
//! - who connects to a door with a limit says something within [`HANDSHAKE`], or is closed;
//! - a handshake has [`HANDSHAKE`] time, and [`MAX_HANDSHAKES`] run at once: who connects and
//!   says nothing holds up nobody else for long.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::extract::connect_info::Connected as AxumConnected;
use axum::serve::{IncomingStream, Listener};
use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::Access;
use super::tls::Protocol;
use crate::metrics::{DoorLabels, METRICS};

/// Longest time that a handshake may take.
pub const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at once, for each door.
pub const MAX_HANDSHAKES: usize = 1024;

/// Time between two complaints about too many connections.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// The other end of a connection.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// The certificate it showed (DER), believed by the clients' CA.
    pub certificate: Option<Arc<[u8]>>,
}

impl AxumConnected<IncomingStream<'_, Doorway>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Doorway>) -> Peer {
        stream.remote_addr().clone()
    }
}

/// A connection, in the clear or not.
#[derive(Debug)]
pub struct Io {
    stream: Inner,
    peer: Peer,
    /// Until the first byte: when it has to be there.
    silence: Option<Pin<Box<Sleep>>>,
    _place: Option<Place>,
}

/// One of the connections that a door may have; free again when it is dropped.
#[derive(Debug)]
struct Place {
    labels: DoorLabels,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    fn new(door: &'static str, permit: OwnedSemaphorePermit) -> Place {
        let labels = DoorLabels { door };
        METRICS.connections.get_or_create(&labels).inc();
        Place {
            labels,
            _permit: permit,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        METRICS.connections.get_or_create(&self.labels).dec();
    }
}

#[derive(Debug)]
enum Inner {
    Clear(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connected for Io {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

/// Does the same with whatever is inside.
macro_rules! inside {
    ($self:expr, $stream:ident => $do:expr) => {
        match &mut $self.stream {
            Inner::Clear($stream) => {
                let $stream = Pin::new($stream);
                $do
            }
            Inner::Tls($stream) => {
                let $stream = Pin::new($stream.as_mut());
                $do
            }
        }
    };
}

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let io = self.get_mut();
        let read = inside!(io, stream => stream.poll_read(cx, buf));
        let Some(silence) = &mut io.silence else {
            return read;
        };
        if read.is_ready() {
            io.silence = None;
        } else if silence.as_mut().poll(cx).is_ready() {
            let silent = "the other side said nothing";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, silent)));
        }
        read
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        inside!(self.get_mut(), stream => stream.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        inside!(self.get_mut(), stream => stream.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Inner::Clear(stream) => stream.is_write_vectored(),
            Inner::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self.get_mut(), stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self.get_mut(), stream => stream.poll_shutdown(cx))
    }
}

/// A door's connections: a stream for tonic, a listener for axum. Accepts until it is dropped.
#[derive(Debug)]
pub struct Doorway {
    address: SocketAddr,
    connections: mpsc::Receiver<Io>,
    task: tokio::task::JoinHandle<()>,
}

impl Doorway {
    /// Begins to accept: `most` connections at a time, or as many as come.
    pub fn open(
        listener: TcpListener,
        access: Access,
        protocol: Protocol,
        most: Option<usize>,
    ) -> io::Result<Doorway> {
        let address = listener.local_addr()?;
        let (send, connections) = mpsc::channel(16);
        let places = most.map(|most| Arc::new(Semaphore::new(most)));
        let task = tokio::spawn(accept(listener, access, protocol, places, send));
        Ok(Doorway {
            address,
            connections,
            task,
        })
    }
}

impl Drop for Doorway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Stream for Doorway {
    type Item = io::Result<Io>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.connections.poll_recv(cx).map(|io| io.map(Ok))
    }
}

impl Listener for Doorway {
    type Io = Io;
    type Addr = Peer;

    async fn accept(&mut self) -> (Io, Peer) {
        match self.connections.recv().await {
            Some(io) => {
                let peer = io.peer.clone();
                (io, peer)
            }
            // The task ends only with the door.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Peer> {
        Ok(Peer {
            address: self.address,
            certificate: None,
        })
    }
}

async fn accept(
    listener: TcpListener,
    access: Access,
    protocol: Protocol,
    places: Option<Arc<Semaphore>>,
    connections: mpsc::Sender<Io>,
) {
    let mut told: Option<Instant> = None;
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        // The semaphore is never closed.
        let Ok(handshake) = Arc::clone(&handshakes).acquire_owned().await else {
            return;
        };
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of files, or a connection that is gone already.
                tracing::warn!(door = protocol.name(), "failed to accept: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let place = match &places {
            None => None,
            Some(places) => match Arc::clone(places).try_acquire_owned() {
                Ok(permit) => Some(Place::new(protocol.name(), permit)),
                Err(_) => {
                    refuse(protocol, address, &mut told);
                    continue;
                }
            },
        };
        let (access, connections) = (access.clone(), connections.clone());
        tokio::spawn(async move {
            let _handshake = handshake;
            // An option of the socket; without it answers only come later.
            let _ = stream.set_nodelay(true);
            if let Some(io) = shake_hands(&access, protocol, stream, address, place).await {
                // An error means that the door is closed.
                let _ = connections.send(io).await;
            }
        });
    }
}

/// Counts a connection that is closed because of the limit, and says so now and then.
fn refuse(protocol: Protocol, address: SocketAddr, told: &mut Option<Instant>) {
    let door = protocol.name();
    let labels = DoorLabels { door };
    METRICS.connections_refused.get_or_create(&labels).inc();
    if told.is_none_or(|told| told.elapsed() >= TELL_AGAIN) {
        tracing::warn!(door, %address, "too many connections, closing new ones; raise max_connections, or find who holds them");
        *told = Some(Instant::now());
    }
}

async fn shake_hands(
    access: &Access,
    protocol: Protocol,
    stream: TcpStream,
    address: SocketAddr,
    place: Option<Place>,
) -> Option<Io> {
    let silence = || {
        let limited = place.is_some();
        limited.then(|| Box::pin(tokio::time::sleep(HANDSHAKE)))
    };
    let Some(config) = access.tls(protocol) else {
        return Some(Io {
            silence: silence(),
            stream: Inner::Clear(stream),
            peer: Peer {
                address,
                certificate: None,
            },
            _place: place,
        });
    };
    let shaken = TlsAcceptor::from(config).accept(stream);
    let stream = match tokio::time::timeout(HANDSHAKE, shaken).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            access.handshake_failed(address, protocol, &error.to_string());
            return None;
        }
        Err(_) => {
            access.handshake_failed(address, protocol, "no handshake in time");
            return None;
        }
    };
    let shown = stream.get_ref().1.peer_certificates();
    let certificate = shown
        .and_then(|chain| chain.first())
        .map(|certificate| Arc::from(certificate.as_ref()));
    Some(Io {
        silence: silence(),
        stream: Inner::Tls(Box::new(stream)),
        peer: Peer {
            address,
            certificate,
        },
        _place: place,
    })
}
