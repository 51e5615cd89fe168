//! Sends spool files to the collector, and deletes a file once it is acknowledged.
//!
//! Invariants:
//! - files go in order of `batch_seq`, so that a collector knows a resend by its number;
//! - a file is deleted only after the collector said STORED or DUPLICATE: an acknowledgement that
//!   is lost costs a resend and no row;
//! - a file the collector refuses for good is kept in `rejected/`, and the next one goes on;
//! - what is under way is bounded in files and bytes, however slow the collector;
//! - nothing here ever holds up the engine: without a collector the spool grows to its limit.

mod backoff;
mod queue;
mod spans;
#[cfg(test)]
mod tls_tests;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};
use tracing::{info, warn};
use vramscope_wire::proto::Batch;
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::{MAX_BATCH_BYTES, MESSAGE_OVERHEAD};

use crate::recorder::Link;
use crate::spool::folder::SpoolFile;
use crate::spool::room::Usage;
use backoff::{Backoff, Complaints};
use queue::{Queue, load, settle};

/// Batches under way without an acknowledgement: so many, and no more bytes than that unless one
/// alone has more.
const IN_FLIGHT: usize = 8;
const IN_FLIGHT_BYTES: usize = 8 << 20;
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A collector may take its time, yet not for ever.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// A connection whose other end vanished without a word is found out by this.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Where from and where to.
#[derive(Debug, Clone)]
pub struct Shipment {
    pub spool: PathBuf,
    pub collector: String,
    /// With an `https://` collector.
    pub certificates: Option<Certificates>,
    pub agent_id: String,
    pub host: String,
    /// Learns of files that are gone.
    pub usage: Arc<Usage>,
    /// Files that were set aside since the start.
    refused: Arc<AtomicU64>,
    /// Requests for recorded spans go there.
    link: Option<Arc<Link>>,
}

/// Files by which collector and agent know each other, PEM. They are read at each connection, so
/// that new ones take effect without a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificates {
    /// CA of the collector.
    pub ca: PathBuf,
    /// The agent's.
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Certificates {
    fn load(&self) -> anyhow::Result<ClientTlsConfig> {
        let read = |path: &Path| {
            std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))
        };
        Ok(ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(read(&self.ca)?))
            .identity(Identity::from_pem(read(&self.cert)?, read(&self.key)?)))
    }
}

impl Shipment {
    pub fn new(spool: &Path, collector: &str, agent_id: &str, host: &str) -> Self {
        Self {
            spool: spool.to_path_buf(),
            collector: collector.to_string(),
            certificates: None,
            agent_id: agent_id.to_string(),
            host: host.to_string(),
            usage: Arc::default(),
            refused: Arc::default(),
            link: None,
        }
    }

    /// Lets the collector ask for recorded spans.
    pub fn with_link(mut self, link: Arc<Link>) -> Self {
        self.link = Some(link);
        self
    }

    /// Shows a certificate, and asks for the collector's.
    pub fn with_certificates(mut self, certificates: Option<Certificates>) -> Self {
        self.certificates = certificates;
        self
    }

    pub fn with_usage(mut self, usage: Arc<Usage>) -> Self {
        self.usage = usage;
        self
    }

    fn count_refused(&self) -> u64 {
        self.refused.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Sends until `committed` closes, and then what is left, if the collector takes it.
pub async fn run(shipment: Shipment, mut committed: watch::Receiver<u64>) {
    let mut backoff = Backoff::new();
    let mut complaints = Complaints::default();
    loop {
        let closed_before = is_closed(&committed);
        let mut progressed = false;
        let result = session(&shipment, &mut committed, &mut complaints, &mut progressed).await;
        let Err(error) = result else { return };
        // Once more after the last commit, and that was it.
        if closed_before {
            warn!("events stay in the spool until the next start: {error:#}");
            return;
        }
        if progressed {
            backoff.reset();
        }
        if let Some(untold) = complaints.say() {
            warn!(
                untold,
                "cannot send to {}: {error:#}; events wait in the spool, trying again",
                shipment.collector
            );
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next()) => {}
            () = closed(committed.clone()) => {}
        }
    }
}

fn is_closed(committed: &watch::Receiver<u64>) -> bool {
    committed.has_changed().is_err()
}

/// Returns when the engine has committed for the last time.
async fn closed(mut committed: watch::Receiver<u64>) {
    while committed.changed().await.is_ok() {}
}

async fn connect(shipment: &Shipment) -> anyhow::Result<Channel> {
    let mut endpoint = Endpoint::from_shared(shipment.collector.clone())
        .with_context(|| format!("collector {:?} is not a URL", shipment.collector))?;
    if let Some(certificates) = &shipment.certificates {
        endpoint = endpoint.tls_config(certificates.load()?).with_context(|| {
            format!(
                "{}, {} or {} holds nothing usable",
                certificates.ca.display(),
                certificates.cert.display(),
                certificates.key.display()
            )
        })?;
    }
    endpoint
        .connect_timeout(CONNECT_LIMIT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .connect()
        .await
        .context("failed to connect; start the collector there, or correct `collector`")
}

/// What a broken stream means for people.
fn explain(status: &Status) -> anyhow::Error {
    match status.code() {
        Code::Unimplemented => {
            anyhow!("what listens there is no vramscope collector; correct `collector`")
        }
        Code::Unauthenticated | Code::PermissionDenied => anyhow!(
            "the collector does not accept this agent: {}",
            status.message()
        ),
        Code::Unavailable | Code::Unknown | Code::Cancelled => {
            anyhow!("the stream broke: {}", with_causes(status))
        }
        code => anyhow!(
            "the collector ended the stream: {code}: {}",
            status.message()
        ),
    }
}

/// A certificate that the collector refuses is only told in the last of the causes.
fn with_causes(status: &Status) -> String {
    let mut text = status.message().to_string();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}

/// Files that were sent and not answered.
#[derive(Default)]
struct UnderWay {
    files: VecDeque<(SpoolFile, usize)>,
    bytes: usize,
}

impl UnderWay {
    fn has_room(&self) -> bool {
        self.files.is_empty() || (self.files.len() < IN_FLIGHT && self.bytes < IN_FLIGHT_BYTES)
    }

    fn push(&mut self, file: SpoolFile, bytes: usize) {
        self.bytes += bytes;
        self.files.push_back((file, bytes));
    }

    fn pop(&mut self) -> Option<SpoolFile> {
        let (file, bytes) = self.files.pop_front()?;
        self.bytes -= bytes;
        Some(file)
    }
}

/// One connection. Ends well only when `committed` has closed and everything is acknowledged.
/// Sets `progressed` once a batch was acknowledged.
async fn session(
    shipment: &Shipment,
    committed: &mut watch::Receiver<u64>,
    complaints: &mut Complaints,
    progressed: &mut bool,
) -> anyhow::Result<()> {
    let limit = MAX_BATCH_BYTES + MESSAGE_OVERHEAD;
    let channel = connect(shipment).await?;
    let mut client = IngestClient::new(channel.clone()).max_encoding_message_size(limit);
    let (batches, stream) = mpsc::channel::<Batch>(IN_FLIGHT);
    let opened = client.push(ReceiverStream::new(stream));
    let mut acks = match tokio::time::timeout(ANSWER_LIMIT, opened).await {
        Ok(opened) => opened.map_err(|status| explain(&status))?.into_inner(),
        Err(_) => bail!(
            "something accepts connections there and does not answer for {} s",
            ANSWER_LIMIT.as_secs()
        ),
    };
    info!(collector = shipment.collector, "connected");
    // Everything below it is at the collector.
    let (taken, now_taken) = watch::channel(0);
    let mut spans = JoinSet::new();
    spans.spawn(spans::run(shipment.clone(), channel, now_taken));

    let mut queue = Queue::default();
    let mut under_way = UnderWay::default();
    loop {
        // In this order: what was committed before it closed is seen.
        let closed = is_closed(committed);
        let next_committed = *committed.borrow_and_update();
        while under_way.has_room() {
            let Some(file) = queue.next(&shipment.spool, next_committed)? else {
                break;
            };
            let Some(batch) = load(shipment, &file)? else {
                continue;
            };
            let bytes = batch.parquet.len();
            if batches.send(batch).await.is_err() {
                bail!("the collector closed the stream");
            }
            under_way.push(file, bytes);
        }
        if under_way.files.is_empty() {
            taken.send_replace(next_committed);
            if closed {
                return Ok(());
            }
            tokio::select! {
                // An error means that it closed: once more round for the last files.
                _ = committed.changed() => continue,
                message = acks.message() => match message {
                    Ok(Some(_)) => bail!("an acknowledgement for nothing"),
                    Ok(None) => bail!("the collector closed the stream"),
                    Err(status) => return Err(explain(&status)),
                },
            }
        }
        let answer = tokio::time::timeout(ANSWER_LIMIT, acks.message()).await;
        let message = match answer {
            Ok(message) => message,
            Err(_) => bail!("no acknowledgement within {} s", ANSWER_LIMIT.as_secs()),
        };
        let ack = message
            .map_err(|status| explain(&status))?
            .context("the collector closed the stream")?;
        // Acknowledgements come in order, one for each batch.
        let file = under_way.pop().context("an acknowledgement for nothing")?;
        settle(shipment, &file, &ack)?;
        taken.send_replace(file.batch_seq + 1);
        *progressed = true;
        if complaints.settle() {
            info!(
                collector = shipment.collector,
                "the collector takes events again"
            );
        }
    }
}
