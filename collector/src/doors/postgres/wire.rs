//! A connection's two directions: what came and is not read yet, what is written and not sent yet.
//! Both are bounded; a client that does not read for [`WRITE_TIMEOUT`] is given up.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use pgwire::messages::PgWireBackendMessage;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::frame::{self, MAX_MESSAGE, MAX_OPENING, Malformed, Message, Opening};

/// Output that is gathered before it is sent.
const FULL: usize = 64 << 10;
/// How long a client may leave what it is sent unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// A TCP connection, with TLS or without.
pub enum Socket {
    /// As it came.
    Plain(TcpStream),
    /// After a handshake.
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(socket) => Pin::new(socket).poll_read(cx, buffer),
            Socket::Tls(socket) => Pin::new(socket).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Socket::Tls(socket) => Pin::new(socket).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Socket::Tls(socket) => Pin::new(socket).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Socket::Tls(socket) => Pin::new(socket).poll_shutdown(cx),
        }
    }
}

/// Why no message came.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The connection is gone.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The client sent something that is no message.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// A connection.
pub struct Wire {
    socket: Socket,
    input: BytesMut,
    output: BytesMut,
}

impl Wire {
    /// A connection from which nothing was read yet.
    pub fn new(socket: Socket) -> Wire {
        Wire {
            socket,
            input: BytesMut::new(),
            output: BytesMut::new(),
        }
    }

    /// The socket back, to be wrapped. `None` if the client already sent something that would be
    /// lost, or read as if it had come protected.
    pub fn into_socket(self) -> Option<Socket> {
        self.input.is_empty().then_some(self.socket)
    }

    /// The next packet of a client that did not say who it is; `None` at the end.
    pub async fn opening(&mut self) -> Result<Option<Opening>, Broken> {
        loop {
            if let Some(opening) = frame::take_opening(&mut self.input)? {
                return Ok(Some(opening));
            }
            if self.socket.read_buf(&mut self.input).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// The next message while a client is let in; `None` at the end.
    pub async fn message_before_entry(&mut self) -> Result<Option<Message>, Broken> {
        self.message_up_to(MAX_OPENING).await
    }

    /// The next message; `None` at the end.
    pub async fn message(&mut self) -> Result<Option<Message>, Broken> {
        self.message_up_to(MAX_MESSAGE).await
    }

    async fn message_up_to(&mut self, limit: usize) -> Result<Option<Message>, Broken> {
        loop {
            if let Some(message) = frame::take_message(&mut self.input, limit)? {
                return Ok(Some(message));
            }
            if self.socket.read_buf(&mut self.input).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// Ends when the client is gone. What it sends meanwhile is kept, as far as there is room.
    pub async fn gone(&mut self) {
        loop {
            if self.input.len() > MAX_MESSAGE {
                // Nothing more is read, so nothing more is known.
                return std::future::pending().await;
            }
            if !matches!(self.socket.read_buf(&mut self.input).await, Ok(read) if read > 0) {
                return;
            }
        }
    }

    /// Adds a message to what is to be sent.
    pub fn put(&mut self, message: PgWireBackendMessage) -> io::Result<()> {
        message.encode(&mut self.output).map_err(io::Error::other)
    }

    /// Adds bytes that are no message.
    pub fn put_byte(&mut self, byte: u8) {
        self.output.extend_from_slice(&[byte]);
    }

    /// Whether it is time to send what was added.
    pub fn is_full(&self) -> bool {
        self.output.len() >= FULL
    }

    /// Sends everything that was added.
    pub async fn flush(&mut self) -> io::Result<()> {
        let sent = async {
            self.socket.write_all(&self.output).await?;
            self.output.clear();
            self.socket.flush().await
        };
        match tokio::time::timeout(WRITE_TIMEOUT, sent).await {
            Ok(sent) => sent,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client does not read",
            )),
        }
    }

    /// Ends the connection in order.
    pub async fn close(mut self) {
        let _ = self.flush().await;
        let _ = tokio::time::timeout(Duration::from_secs(1), self.socket.shutdown()).await;
    }
}
