//! Letting clients in: TLS, who they are, and what both sides agree on.
//!
//! Invariants:
//! - nothing but the protocol's own first packets is read from somebody who is not known, and no
//!   more than [`frame::MAX_OPENING`](super::frame::MAX_OPENING) bytes of each;
//! - where the collector has credentials, nobody comes in without a password, and where it has
//!   TLS, no password is asked for without it;
//! - what somebody sent in the clear before a TLS handshake is never read as if it had come
//!   protected.

use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use pgwire::messages::PgWireBackendMessage as Out;
use pgwire::messages::ProtocolVersion;
use pgwire::messages::response::{ReadyForQuery, TransactionStatus};
use pgwire::messages::startup::{
    Authentication, BackendKeyData, NegotiateProtocolVersion, ParameterStatus, SecretKey,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use super::Shared;
use super::failure::Failure;
use super::frame::{Malformed, Message, Opening};
use super::session::Entered;
use super::settings::Settings;
use super::wire::{Broken, Socket, Wire};
use crate::access::tls::Protocol;
use crate::access::{Caller, Denied, scram};

/// As failed attempts are logged.
const DOOR: &str = "postgresql";

/// Why somebody did not come in.
pub enum Turned {
    /// They are told.
    Away(Box<Wire>, Failure),
    /// There is nobody to tell, or nothing.
    Gone,
}

impl From<io::Error> for Turned {
    fn from(_: io::Error) -> Turned {
        Turned::Gone
    }
}

/// Somebody who said who they are, and is not let in yet.
pub struct Guest {
    /// Their connection.
    pub wire: Wire,
    /// Who they are.
    pub caller: Caller,
    user: String,
    settings: Settings,
    version: ProtocolVersion,
}

/// Reads first packets until somebody says who they are, and sees whether that is so.
pub async fn receive(
    socket: TcpStream,
    from: SocketAddr,
    shared: &Shared,
) -> Result<Guest, Turned> {
    let (mut wire, secure, version, parameters) = open(socket, from, shared).await?;
    let user = parameters
        .iter()
        .find(|(name, _)| name == "user")
        .map(|(_, value)| value.clone())
        .filter(|user| !user.is_empty());
    let Some(user) = user else {
        let failure = Failure::fatal(
            "28000",
            "no PostgreSQL user name specified in startup packet",
        );
        return Err(Turned::Away(Box::new(wire), failure));
    };
    let version = match agree(&mut wire, version, &parameters) {
        Ok(version) => version,
        Err(failure) => return Err(Turned::Away(Box::new(wire), failure)),
    };
    let settings = match settings(&user, &parameters) {
        Ok(settings) => settings,
        Err(failure) => return Err(Turned::Away(Box::new(wire), failure)),
    };
    match identify(&mut wire, from, secure, &user, shared).await {
        Ok(caller) => Ok(Guest {
            wire,
            caller,
            user,
            settings,
            version,
        }),
        Err(Some(failure)) => Err(Turned::Away(Box::new(wire), failure)),
        Err(None) => Err(Turned::Gone),
    }
}

type Opened = (Wire, bool, u32, Vec<(String, String)>);

async fn open(socket: TcpStream, from: SocketAddr, shared: &Shared) -> Result<Opened, Turned> {
    let mut wire = Wire::new(Socket::Plain(socket));
    let mut secure = false;
    // One request for TLS and one for GSSAPI are all that a client has to ask.
    for _ in 0..3 {
        let opening = match wire.opening().await {
            Ok(Some(opening)) => opening,
            Ok(None) | Err(Broken::Io(_)) => return Err(Turned::Gone),
            Err(Broken::Malformed(malformed)) => return Err(garbage(wire, &malformed)),
        };
        match opening {
            Opening::Tls if !secure => match shared.access.tls(Protocol::Postgres) {
                Some(config) => {
                    wire.put_byte(b'S');
                    wire.flush().await?;
                    let Some(Socket::Plain(socket)) = wire.into_socket() else {
                        return Err(Turned::Gone);
                    };
                    let accepted = TlsAcceptor::from(config).accept(socket).await;
                    let socket = accepted.map_err(|error| {
                        let why = error.to_string();
                        shared
                            .access
                            .handshake_failed(from, Protocol::Postgres, &why);
                        Turned::Gone
                    })?;
                    wire = Wire::new(Socket::Tls(Box::new(socket)));
                    secure = true;
                }
                None => {
                    wire.put_byte(b'N');
                    wire.flush().await?;
                }
            },
            Opening::Gss => {
                wire.put_byte(b'N');
                wire.flush().await?;
            }
            Opening::Tls => return Err(garbage(wire, &Malformed::Body)),
            Opening::Cancel { pid, secret } => {
                let secret = SecretKey::Bytes(secret);
                shared.connections.cancel(pid, &secret).await;
                return Err(Turned::Gone);
            }
            Opening::Start {
                version,
                parameters,
            } => return Ok((wire, secure, version, parameters)),
        }
    }
    Err(garbage(wire, &Malformed::Body))
}

fn garbage(wire: Wire, malformed: &Malformed) -> Turned {
    let failure = Failure::fatal("08P01", format!("invalid startup packet: {malformed}"));
    Turned::Away(Box::new(wire), failure)
}

/// The version to speak. Newer minor versions are answered with ours, older majors not at all.
fn agree(
    wire: &mut Wire,
    version: u32,
    parameters: &[(String, String)],
) -> Result<ProtocolVersion, Failure> {
    let (major, minor) = (version >> 16, version & 0xffff);
    if major != 3 {
        return Err(Failure::fatal(
            "0A000",
            format!("unsupported frontend protocol {major}.{minor}: server supports 3.0 to 3.2"),
        ));
    }
    let agreed = match minor {
        0 | 1 => ProtocolVersion::PROTOCOL3_0,
        _ => ProtocolVersion::PROTOCOL3_2,
    };
    let unknown: Vec<String> = parameters
        .iter()
        .map(|(name, _)| name.clone())
        .filter(|name| name.starts_with("_pq_."))
        .collect();
    if (minor != 0 && minor != 2) || !unknown.is_empty() {
        let offer = NegotiateProtocolVersion::new(agreed.into(), unknown);
        wire.put(Out::NegotiateProtocolVersion(offer))
            .map_err(|error| Failure::fatal("08P01", error.to_string()))?;
    }
    Ok(agreed)
}

/// Settings from the first packet: by name, and in `options` as `-c name=value`.
fn settings(user: &str, parameters: &[(String, String)]) -> Result<Settings, Failure> {
    let value_of = |wanted: &str| {
        let found = parameters.iter().find(|(name, _)| name == wanted);
        found.map(|(_, value)| value.as_str())
    };
    if value_of("replication").is_some_and(|value| !matches!(value, "false" | "off" | "no" | "0")) {
        return Err(Failure::fatal("0A000", "replication is not supported"));
    }
    let mut settings = Settings::start(user, parameters);
    let mut words = value_of("options").unwrap_or_default().split_whitespace();
    while let Some(word) = words.next() {
        let assignment = match word {
            "-c" => words.next(),
            other => other
                .strip_prefix("--")
                .or_else(|| other.strip_prefix("-c")),
        };
        let Some((name, value)) = assignment.and_then(|text| text.split_once('=')) else {
            return Err(Failure::fatal(
                "42601",
                format!("invalid command-line argument for server process: {word}"),
            ));
        };
        // In options a hyphen may stand for an underscore.
        let name = name.replace('-', "_");
        settings
            .set(&name, Some(value), false)
            .map_err(|failure| Failure::fatal(failure.code, failure.message))?;
    }
    Ok(settings.into_started())
}

/// Who somebody is. `None` as an error: they are gone.
async fn identify(
    wire: &mut Wire,
    from: SocketAddr,
    secure: bool,
    user: &str,
    shared: &Shared,
) -> Result<Caller, Option<Failure>> {
    let access = &shared.access;
    if !secure && access.tls(Protocol::Postgres).is_some() {
        return Err(Some(
            Failure::fatal("28000", "this connection is not encrypted")
                .hint("connect with sslmode=require, or better verify-full"),
        ));
    }
    if !access.required() {
        return Ok(Caller::on_loopback());
    }
    let throttle = access.throttle();
    throttle
        .admit(from.ip())
        .map_err(|denied| Some(refused(user, denied)))?;
    let failed = match exchange(wire, user, shared).await {
        Ok(caller) => {
            throttle.succeeded(from.ip());
            return may_read(caller);
        }
        Err(failed) => failed,
    };
    if let Some(Denied::Wrong) = failed {
        let wait = throttle.failed(from.ip(), DOOR, user);
        tokio::time::sleep(wait).await;
    }
    Err(failed.map(|denied| refused(user, denied)))
}

fn may_read(caller: Caller) -> Result<Caller, Option<Failure>> {
    if caller.may_read() {
        return Ok(caller);
    }
    Err(Some(Failure::fatal(
        "28000",
        format!("user \"{}\" may not ask questions", caller.name),
    )))
}

fn refused(user: &str, denied: Denied) -> Failure {
    match denied {
        Denied::TooOften(_) => Failure::fatal("28000", denied.to_string()),
        _ => Failure::fatal(
            "28P01",
            format!("password authentication failed for user \"{user}\""),
        ),
    }
}

/// SCRAM-SHA-256 in SASL's messages.
async fn exchange(wire: &mut Wire, user: &str, shared: &Shared) -> Result<Caller, Option<Denied>> {
    let mechanisms = vec![scram::MECHANISM.to_string()];
    let mut exchange = shared.access.scram(user);
    send(wire, Authentication::SASL(mechanisms)).await?;
    let first = password(wire).await?;
    let first = initial_response(&first).ok_or(Some(Denied::Wrong))?;
    let answer = exchange.first(first).map_err(Some)?;
    send(wire, Authentication::SASLContinue(answer.into())).await?;
    let last = password(wire).await?;
    let (caller, answer) = exchange.last(&last).map_err(Some)?;
    wire.put(Out::Authentication(Authentication::SASLFinal(
        answer.into(),
    )))
    .map_err(|_| None)?;
    Ok(caller)
}

async fn send(wire: &mut Wire, message: Authentication) -> Result<(), Option<Denied>> {
    wire.put(Out::Authentication(message)).map_err(|_| None)?;
    wire.flush().await.map_err(|_| None)
}

async fn password(wire: &mut Wire) -> Result<Bytes, Option<Denied>> {
    match wire.message_before_entry().await {
        Ok(Some(Message::Password(bytes))) => Ok(bytes),
        // `psql` without a password hangs up, to come back with one.
        Ok(None | Some(Message::Terminate)) | Err(Broken::Io(_)) => Err(None),
        Ok(Some(_)) | Err(Broken::Malformed(_)) => Err(Some(Denied::Wrong)),
    }
}

/// The data of SASLInitialResponse: a mechanism's name, then a length and as many bytes.
fn initial_response(message: &[u8]) -> Option<&[u8]> {
    let end = message.iter().position(|byte| *byte == 0)?;
    let (name, rest) = message.split_at(end);
    if name != scram::MECHANISM.as_bytes() {
        return None;
    }
    let (length, data) = rest.get(1..)?.split_first_chunk::<4>()?;
    let length = usize::try_from(i32::from_be_bytes(*length)).ok()?;
    (length == data.len()).then_some(data)
}

impl Guest {
    /// Tells a guest that they are in.
    pub async fn enter(mut self, shared: &Shared) -> io::Result<(Wire, Entered, Registered)> {
        let wire = &mut self.wire;
        wire.put(Out::Authentication(Authentication::Ok))?;
        for (name, value) in self.settings.reported() {
            let status = ParameterStatus::new(name.to_string(), value.to_string());
            wire.put(Out::ParameterStatus(status))?;
        }
        let pid = shared.next_pid();
        let secret = match self.version {
            ProtocolVersion::PROTOCOL3_0 => SecretKey::I32(rand::random()),
            _ => SecretKey::Bytes(Bytes::from(rand::random::<[u8; 32]>().to_vec())),
        };
        let (cancel, registered) = shared.connections.register(pid, secret.clone());
        wire.put(Out::BackendKeyData(BackendKeyData::new(pid, secret)))?;
        wire.put(Out::ReadyForQuery(ReadyForQuery::new(
            TransactionStatus::Idle,
        )))?;
        wire.flush().await?;
        let entered = Entered {
            caller: self.caller,
            user: self.user,
            settings: self.settings,
            pid,
            cancel,
        };
        Ok((self.wire, entered, registered))
    }
}

/// Keeps a connection known to cancels until it is dropped.
pub type Registered = pgwire::api::ConnectionGuard;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_answer_of_sasl_is_taken_apart() {
        let message = b"SCRAM-SHA-256\0\0\0\0\x08n,,n=,r=";
        assert_eq!(initial_response(message), Some(b"n,,n=,r=".as_slice()));
        for wrong in [
            b"SCRAM-SHA-256-PLUS\0\0\0\0\x01n".as_slice(),
            b"SCRAM-SHA-256\0\0\0\0\x09n,,n=,r=",
            b"SCRAM-SHA-256\0\xff\xff\xff\xff",
            b"SCRAM-SHA-256",
            b"",
        ] {
            assert_eq!(initial_response(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn options_are_settings() {
        let with = |options: &str| {
            let parameters = [("options".to_string(), options.to_string())];
            settings("me", &parameters)
        };
        let set = with("-c statement_timeout=5s --extra-float-digits=2").unwrap();
        assert_eq!(set.show("statement_timeout").unwrap().1, "5s");
        assert_eq!(set.show("extra_float_digits").unwrap().1, "2");
        assert_eq!(with("-c nonesuch=1").unwrap_err().code, "42704");
        assert_eq!(with("-X").unwrap_err().code, "42601");
    }
}
