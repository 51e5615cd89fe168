//! Who asks, and what they may do.
//!
//! [`Access`] is the register that every door asks. It knows people by tokens and passwords
//! ([`credentials`], [`scram`]) and agents by certificates, and follows its files while it runs.
//!
//! Invariants:
//! - without credentials everybody is [`Caller::on_loopback`], and nothing but loopback may be
//!   listened on; with credentials nobody comes in without;
//! - what is on disk cannot be used to come in: tokens lie there as SHA-256 of 256 random bits,
//!   passwords as SCRAM verifiers (StoredKey, ServerKey);
//! - secrets are compared in constant time, and an unknown name costs as much as a wrong password;
//! - what is refused is counted, logged and slowed down per address ([`throttle`]);
//! - a file that is broken changes nothing: what was in force stays so, and that is said.

pub mod accept;
pub mod agents;
mod certificates;
pub mod commands;
pub mod credentials;
pub mod fence;
pub mod filter;
pub mod guard;
pub mod scram;
pub mod setup;
pub mod throttle;
pub mod tls;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::metrics::{DoorLabels, METRICS, ReloadLabels};
use agents::Bindings;
use credentials::{Credentials, Digest};
use rustls::ServerConfig;
use scram::Exchange;
use throttle::Throttle;
use tls::{Configs, Protocol, TlsFiles};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// What a caller may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Send batches: agents.
    Ingest,
    /// Ask questions: people, dashboards.
    Read,
    /// Ask questions, and see what others asked.
    Admin,
}

impl Role {
    /// As in files and texts.
    pub fn name(self) -> &'static str {
        match self {
            Role::Ingest => "ingest",
            Role::Read => "read",
            Role::Admin => "admin",
        }
    }
}

/// Somebody who was let in. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// As in the list of users and tokens, or of an agent the host its certificate names. It is
    /// what `query_log.who` says.
    pub name: Arc<str>,
    /// What they may do.
    pub role: Role,
    /// Namespaces whose rows they see; `None` is all of them.
    pub namespaces: Option<Arc<[String]>>,
}

impl Caller {
    /// Whoever comes by loopback while no credentials are configured.
    pub fn on_loopback() -> Caller {
        Caller {
            name: Arc::from("loopback"),
            role: Role::Admin,
            namespaces: None,
        }
    }

    /// Whether they may ask questions.
    pub fn may_read(&self) -> bool {
        matches!(self.role, Role::Read | Role::Admin)
    }

    /// Whether they see what others asked, and may do what changes something.
    pub fn is_admin(&self) -> bool {
        self.role == Role::Admin
    }
}

/// Why somebody is not let in. The text is for them: it says nothing of what is there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// They showed nothing.
    #[error("credentials are needed: a bearer token, or a user name and a password")]
    Missing,
    /// What they showed is not known, or no longer.
    #[error("wrong user name, password or token")]
    Wrong,
    /// An agent showed no certificate.
    #[error("agents have to show a certificate; set `cert` and `key` of the agent")]
    NoCertificate,
    /// The certificate was revoked, or names no host.
    #[error(
        "the certificate was revoked or names no host; make a new one with `vramscope-collector agent-certificate`"
    )]
    Certificate,
    /// They tried too often.
    #[error("too many failed attempts from this address; try again in {0} s")]
    TooOften(u64),
    /// They are known and may not do this.
    #[error("{name} has role {role} and may not {what}")]
    Role {
        /// Their name.
        name: Arc<str>,
        /// Their role.
        role: &'static str,
        /// What they wanted.
        what: &'static str,
    },
}

/// How long what [`Access::open_session`] gives is good for.
const SESSION: Duration = Duration::from_secs(12 * 3600);
/// Sessions at most; the oldest goes.
const MAX_SESSIONS: usize = 10_000;
const SESSION_PREFIX: &str = "vramscope-session.";

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// Where everything lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Users and tokens: see [`credentials`].
    pub credentials: PathBuf,
    /// Certificates.
    pub tls: TlsFiles,
}

/// What a file was when it was read: another one has another inode, length or time.
type Stamp = Vec<Option<(u64, u64, SystemTime)>>;

impl Files {
    fn stamp(paths: &[&Path]) -> Stamp {
        use std::os::unix::fs::MetadataExt;
        let stamp = |path: &&Path| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.ino(), metadata.len(), metadata.modified().ok()?))
        };
        paths.iter().map(stamp).collect()
    }

    fn stamp_of_credentials(&self) -> Stamp {
        Files::stamp(&[&self.credentials])
    }

    fn stamp_of_tls(&self) -> Stamp {
        Files::stamp(&[&self.tls.cert, &self.tls.key, &self.tls.client_ca])
    }
}

/// The register. Clones share everything.
#[derive(Clone)]
pub struct Access {
    shared: Arc<Shared>,
}

struct Shared {
    /// `None`: no credentials are configured.
    configured: Option<Configured>,
    throttle: Throttle,
    sessions: Mutex<HashMap<Digest, Session>>,
    /// For the log's sake; the metric is by door.
    handshakes_failed: AtomicU64,
}

struct Configured {
    files: Files,
    /// Credentials and certificates as they were before they were read first.
    seen: (Stamp, Stamp),
    credentials: RwLock<Arc<Credentials>>,
    tls: RwLock<Configs>,
    bindings: Bindings,
}

struct Session {
    name: Arc<str>,
    /// Of the password it was opened with.
    mark: Digest,
    began: Instant,
}

impl Access {
    /// No credentials: everybody is [`Caller::on_loopback`].
    pub fn none() -> Access {
        Access::of(None)
    }

    /// Reads the files; whatever is wrong with one is an error. `data` is the collector's folder,
    /// where it keeps which agent_id belongs to which host.
    pub fn open(files: Files, data: &Path) -> anyhow::Result<Access> {
        let seen = (files.stamp_of_credentials(), files.stamp_of_tls());
        let tls = Configs::load(&files.tls)?;
        METRICS.access.certificate_expires.set(tls.expires);
        if tls.expires < unix_now() {
            tracing::error!(cert = %files.tls.cert.display(), "the collector's certificate has expired: nobody will believe it");
        }
        let configured = Configured {
            credentials: RwLock::new(Arc::new(Credentials::load(&files.credentials)?)),
            tls: RwLock::new(tls),
            bindings: Bindings::open(data)?,
            seen,
            files,
        };
        Ok(Access::of(Some(configured)))
    }

    fn of(configured: Option<Configured>) -> Access {
        Access {
            shared: Arc::new(Shared {
                configured,
                throttle: Throttle::default(),
                sessions: Mutex::default(),
                handshakes_failed: AtomicU64::new(0),
            }),
        }
    }

    /// Whether callers have to show credentials.
    pub fn required(&self) -> bool {
        self.shared.configured.is_some()
    }

    /// What is in force now.
    fn credentials(&self) -> Option<Arc<Credentials>> {
        let credentials = &self.shared.configured.as_ref()?.credentials;
        let credentials = credentials.read().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(&credentials))
    }

    fn bindings(&self) -> Option<&Bindings> {
        let configured = self.shared.configured.as_ref()?;
        Some(&configured.bindings)
    }

    /// TLS for the next connection of a door; `None` only where no credentials are configured.
    pub fn tls(&self, protocol: Protocol) -> Option<Arc<ServerConfig>> {
        let tls = &self.shared.configured.as_ref()?.tls;
        let tls = tls.read().unwrap_or_else(PoisonError::into_inner);
        Some(tls.of(protocol))
    }

    /// Which agent showed this certificate (DER), which TLS has found to be of the clients' CA.
    pub fn certificate(&self, der: &[u8]) -> Option<Caller> {
        if self.credentials()?.is_revoked(der) {
            return None;
        }
        Some(Caller {
            name: tls::host_of(der)?,
            role: Role::Ingest,
            namespaces: None,
        })
    }

    /// A connection of a TLS door that came to nothing.
    pub fn handshake_failed(&self, from: SocketAddr, protocol: Protocol, why: &str) {
        let door = DoorLabels {
            door: protocol.name(),
        };
        METRICS.access.handshakes_failed.get_or_create(&door).inc();
        let count = 1 + self
            .shared
            .handshakes_failed
            .fetch_add(1, Ordering::Relaxed);
        if count.is_power_of_two() {
            tracing::warn!(%from, door = protocol.name(), count, "no TLS connection: {why}");
        }
    }

    /// Follows the files until the collector stops: every two seconds if they changed, and at
    /// once on SIGHUP. Connections that are open stay as they are.
    pub async fn follow(self, mut stopping: watch::Receiver<bool>) -> anyhow::Result<()> {
        let mut hang_up = signal(SignalKind::hangup()).context("failed to watch for SIGHUP")?;
        let Some(configured) = &self.shared.configured else {
            // A SIGHUP still must not end the process.
            stopped(&mut stopping).await;
            return Ok(());
        };
        let files = &configured.files;
        let mut seen = configured.seen.clone();
        loop {
            let asked = tokio::select! {
                () = stopped(&mut stopping) => return Ok(()),
                _ = hang_up.recv() => true,
                () = tokio::time::sleep(LOOK) => false,
            };
            let now = (files.stamp_of_credentials(), files.stamp_of_tls());
            if asked || now.0 != seen.0 {
                Self::reloaded(configured.reload_credentials());
            }
            if asked || now.1 != seen.1 {
                Self::reloaded(configured.reload_tls());
            }
            seen = now;
        }
    }

    fn reloaded(result: anyhow::Result<&Path>) {
        let outcome = if result.is_ok() { "ok" } else { "failed" };
        let reloads = &METRICS.access.reloads;
        reloads.get_or_create(&ReloadLabels { outcome }).inc();
        match result {
            Ok(path) => {
                tracing::info!(file = %path.display(), "read anew");
            }
            Err(error) => {
                tracing::error!("{error:#}; what was in force before still is");
            }
        }
    }

    /// The failed attempts.
    pub fn throttle(&self) -> &Throttle {
        &self.shared.throttle
    }

    /// Who shows this token. Whoever calls this does the counting: see [`Access::authenticate`].
    pub fn token(&self, bearer: &str) -> Option<Caller> {
        let credentials = self.credentials()?;
        if bearer.starts_with(SESSION_PREFIX) {
            let digest = Digest::of(bearer);
            let sessions = self.sessions();
            let session = sessions.get(&digest)?;
            if session.began.elapsed() > SESSION {
                return None;
            }
            // They may have been removed, or have another role or password, since.
            let (caller, mark) = credentials.user(&session.name)?;
            return mark.is(&session.mark).then_some(caller);
        }
        credentials.token(bearer)
    }

    /// Who has this name and password. Takes some milliseconds of a processor. Whoever calls this
    /// does the counting: see [`Access::authenticate`].
    pub fn password(&self, user: &str, password: &str) -> Option<Caller> {
        self.credentials()?.password(user, password)
    }

    /// The server's side of a SCRAM-SHA-256 exchange for a user, known or not. Tell
    /// [`Access::throttle`] how it ended.
    pub fn scram(&self, user: &str) -> Exchange {
        match self.credentials() {
            Some(credentials) => credentials.scram(user),
            // Without credentials nobody has a password.
            None => Credentials::default().scram(user),
        }
    }

    /// A bearer token for somebody who was let in by a password, good for twelve hours and as long
    /// as they are in the list with that password. For protocols that trade one for the other
    /// (Flight's handshake). `None` for whoever has no password.
    pub fn open_session(&self, caller: &Caller) -> Option<String> {
        let (_, mark) = self.credentials()?.user(&caller.name)?;
        let token = format!("{SESSION_PREFIX}{}", credentials::random_text());
        let mut sessions = self.sessions();
        if sessions.len() >= MAX_SESSIONS {
            sessions.retain(|_, session| session.began.elapsed() <= SESSION);
        }
        if sessions.len() >= MAX_SESSIONS {
            let oldest = sessions.iter().min_by_key(|(_, session)| session.began);
            if let Some(oldest) = oldest.map(|(digest, _)| *digest) {
                sessions.remove(&oldest);
            }
        }
        let session = Session {
            name: Arc::clone(&caller.name),
            mark,
            began: Instant::now(),
        };
        sessions.insert(Digest::of(&token), session);
        Some(token)
    }

    fn sessions(&self) -> std::sync::MutexGuard<'_, HashMap<Digest, Session>> {
        let sessions = self.shared.sessions.lock();
        sessions.unwrap_or_else(PoisonError::into_inner)
    }

    /// Who sends this `authorization` header (`Bearer TOKEN` or `Basic USER:PASSWORD`) from an
    /// address, with all the counting, logging and slowing down. `door` is for the log.
    pub async fn authenticate(
        &self,
        from: IpAddr,
        door: &'static str,
        authorization: Option<&str>,
    ) -> Result<Caller, Denied> {
        if !self.required() {
            return Ok(Caller::on_loopback());
        }
        let Some(header) = authorization else {
            return Err(Denied::Missing);
        };
        let (scheme, shown) = header.split_once(' ').unwrap_or((header, ""));
        let shown = shown.trim();
        if scheme.eq_ignore_ascii_case("bearer") {
            return match self.token(shown) {
                Some(caller) => Ok(caller),
                None => self.deny(from, door, "a token").await,
            };
        }
        let basic = scheme
            .eq_ignore_ascii_case("basic")
            .then(|| STANDARD.decode(shown).ok())
            .flatten()
            .and_then(|bytes| String::from_utf8(bytes).ok());
        let Some((user, password)) = basic.as_deref().and_then(|basic| basic.split_once(':'))
        else {
            return self.deny(from, door, "an unreadable header").await;
        };
        self.throttle().admit(from)?;
        match self.password(user, password) {
            Some(caller) => {
                self.throttle().succeeded(from);
                Ok(caller)
            }
            None => self.deny(from, door, user).await,
        }
    }

    /// Writes a failed attempt down, and answers it late.
    async fn deny(&self, from: IpAddr, door: &'static str, who: &str) -> Result<Caller, Denied> {
        let wait = self.throttle().failed(from, door, who);
        tokio::time::sleep(wait).await;
        Err(Denied::Wrong)
    }
}

/// Returns when the collector stops.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop too.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

impl Configured {
    fn reload_credentials(&self) -> anyhow::Result<&Path> {
        let path = &self.files.credentials;
        let new = Credentials::load(path)?;
        let now = self.credentials.write();
        let mut now = now.unwrap_or_else(PoisonError::into_inner);
        *now = Arc::new(new.with_secret_of(&now));
        Ok(path)
    }

    fn reload_tls(&self) -> anyhow::Result<&Path> {
        let new = Configs::load(&self.files.tls)?;
        METRICS.access.certificate_expires.set(new.expires);
        *self.tls.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(&self.files.tls.cert)
    }
}

/// A new password: 120 random bits, in letters that are hard to mistake.
fn random_password() -> String {
    // 32 of them: five bits each.
    const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
    let letter = |byte: u8| char::from(LETTERS[usize::from(byte % 32)]);
    scram::random::<24>().into_iter().map(letter).collect()
}

fn unix_now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    })
}
