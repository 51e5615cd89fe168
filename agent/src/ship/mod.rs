//! Sends spool files to the collector, and deletes a file once it is acknowledged.
//!
//! Invariants:
//! - files go in order of `batch_seq`, so that a collector knows a resend by its number;
//! - a file is deleted only after the collector said STORED or DUPLICATE;
//! - a file the collector refuses for good is kept in `rejected/`, and the next one goes on;
//! - nothing here ever holds up the engine: without a collector the spool grows.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tracing::{error, info, warn};
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Ack, Batch, Outcome};
use vramscope_wire::{MAX_BATCH_BYTES, MESSAGE_OVERHEAD, SCHEMA_VERSION, parquet_file};

use crate::spool::folder::{self, SpoolFile};

/// Batches under way without an acknowledgement.
const IN_FLIGHT: usize = 8;
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(10);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Where from and where to.
#[derive(Debug, Clone)]
pub struct Shipment {
    pub spool: PathBuf,
    pub collector: String,
    pub agent_id: String,
    pub host: String,
}

/// Sends until `committed` closes, and then what is left, if the collector takes it.
pub async fn run(shipment: Shipment, mut committed: watch::Receiver<u64>) {
    let mut retry = FIRST_RETRY;
    loop {
        let mut progressed = false;
        match session(&shipment, &mut committed, &mut progressed).await {
            Ok(()) => return,
            Err(error) => {
                let closing = committed.has_changed().is_err();
                if closing {
                    warn!("events stay in the spool until the next start: {error:#}");
                    return;
                }
                if progressed {
                    retry = FIRST_RETRY;
                }
                if retry == FIRST_RETRY {
                    warn!(
                        "cannot send to {}: {error:#}; events wait in the spool, trying again",
                        shipment.collector
                    );
                }
                tokio::time::sleep(retry).await;
                retry = (retry * 2).min(LAST_RETRY);
            }
        }
    }
}

/// One connection. Ends well only when `committed` has closed and everything is acknowledged.
/// Sets `progressed` once a batch was acknowledged.
async fn session(
    shipment: &Shipment,
    committed: &mut watch::Receiver<u64>,
    progressed: &mut bool,
) -> anyhow::Result<()> {
    let limit = MAX_BATCH_BYTES + MESSAGE_OVERHEAD;
    let channel = Endpoint::from_shared(shipment.collector.clone())
        .with_context(|| format!("collector {:?} is not a URL", shipment.collector))?
        .connect_timeout(Duration::from_secs(5))
        .connect()
        .await
        .context("failed to connect")?;
    let mut client = IngestClient::new(channel).max_encoding_message_size(limit);
    let (batches, stream) = mpsc::channel::<Batch>(IN_FLIGHT);
    let mut acks = client.push(ReceiverStream::new(stream)).await?.into_inner();
    info!(collector = shipment.collector, "connected");

    let mut under_way: VecDeque<SpoolFile> = VecDeque::new();
    loop {
        let last_sent = under_way.back().map(|file| file.batch_seq);
        let next_committed = *committed.borrow_and_update();
        let closed = committed.has_changed().is_err();
        for file in pending(&shipment.spool, next_committed, last_sent)? {
            if under_way.len() >= IN_FLIGHT {
                break;
            }
            let Some(batch) = load(shipment, &file)? else {
                continue;
            };
            if batches.send(batch).await.is_err() {
                bail!("the collector closed the stream");
            }
            under_way.push_back(file);
        }
        if under_way.is_empty() {
            if closed {
                return Ok(());
            }
            // An error means that it closed: the loop goes round once more for the last files.
            let _ = committed.changed().await;
            continue;
        }
        let answer = tokio::time::timeout(ANSWER_LIMIT, acks.message()).await;
        let message = match answer {
            Ok(message) => message,
            Err(_) => bail!("no acknowledgement within {} s", ANSWER_LIMIT.as_secs()),
        };
        let ack = message
            .map_err(|status| anyhow!("the stream broke: {}", status.message()))?
            .context("the collector closed the stream")?;
        // Acknowledgements come in order, one for each batch.
        let file = under_way
            .pop_front()
            .context("an acknowledgement for nothing")?;
        settle(&shipment.spool, &file, &ack)?;
        *progressed = true;
    }
}

/// Committed files after `last_sent`, oldest first.
fn pending(
    spool: &Path,
    next_committed: u64,
    last_sent: Option<u64>,
) -> anyhow::Result<Vec<SpoolFile>> {
    let mut files = folder::list(spool)?;
    files.retain(|file| {
        file.batch_seq < next_committed && last_sent.is_none_or(|sent| file.batch_seq > sent)
    });
    Ok(files)
}

/// Reads a file into a batch. One that is damaged is set aside, which is an error row's worth of
/// loss and is said aloud.
fn load(shipment: &Shipment, file: &SpoolFile) -> anyhow::Result<Option<Batch>> {
    let bytes = match std::fs::read(&file.path) {
        Ok(bytes) => bytes,
        Err(error) => {
            return Err(error).with_context(|| format!("failed to read {}", file.path.display()));
        }
    };
    if bytes.len() > MAX_BATCH_BYTES {
        set_aside(
            &shipment.spool,
            file,
            &format!("{} bytes are more than a batch may have", bytes.len()),
        )?;
        return Ok(None);
    }
    let bytes = bytes::Bytes::from(bytes);
    let rows = match parquet_file::decode(file.table, bytes.clone()) {
        Ok(batches) => batches.iter().map(|batch| batch.num_rows() as u64).sum(),
        Err(error) => {
            set_aside(&shipment.spool, file, &error.to_string())?;
            return Ok(None);
        }
    };
    Ok(Some(Batch {
        agent_id: shipment.agent_id.clone(),
        host: shipment.host.clone(),
        batch_seq: file.batch_seq,
        table: file.table.name().to_string(),
        schema_version: SCHEMA_VERSION,
        crc32: crc32fast::hash(&bytes),
        rows,
        parquet: bytes.to_vec(),
    }))
}

fn settle(spool: &Path, file: &SpoolFile, ack: &Ack) -> anyhow::Result<()> {
    if ack.batch_seq != file.batch_seq {
        bail!(
            "the collector acknowledged batch {} where {} was due",
            ack.batch_seq,
            file.batch_seq
        );
    }
    match ack.outcome() {
        Outcome::Stored | Outcome::Duplicate => std::fs::remove_file(&file.path)
            .with_context(|| format!("failed to remove {}", file.path.display())),
        Outcome::Rejected => set_aside(spool, file, &ack.message),
        Outcome::Retry | Outcome::Unspecified => {
            bail!(
                "the collector cannot take batch {} now: {}",
                ack.batch_seq,
                ack.message
            )
        }
    }
}

/// Keeps a file that cannot be sent, out of the way of the others.
fn set_aside(spool: &Path, file: &SpoolFile, reason: &str) -> anyhow::Result<()> {
    let folder = spool.join("rejected");
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    let to = folder.join(file.path.file_name().unwrap_or_default());
    error!(file = %file.path.display(), kept = %to.display(), "a spool file cannot be sent and is set aside: {reason}");
    std::fs::rename(&file.path, &to)
        .with_context(|| format!("failed to move {}", file.path.display()))
}

#[cfg(test)]
mod tests {
    use vramscope_wire::Table;

    use super::*;

    fn shipment(spool: &Path) -> Shipment {
        Shipment {
            spool: spool.into(),
            collector: "http://127.0.0.1:1".into(),
            agent_id: "a".into(),
            host: "h".into(),
        }
    }

    #[test]
    fn only_committed_files_after_the_last_sent_are_pending() {
        let spool = tempfile::tempdir().unwrap();
        for seq in [3, 1, 2, 9] {
            std::fs::write(spool.path().join(format!("{seq:020}-devices.parquet")), "").unwrap();
        }
        std::fs::write(spool.path().join("journal"), "").unwrap();
        let seqs = |next, sent| -> Vec<u64> {
            pending(spool.path(), next, sent)
                .unwrap()
                .iter()
                .map(|file| file.batch_seq)
                .collect()
        };
        assert_eq!(seqs(9, None), [1, 2, 3]);
        assert_eq!(seqs(10, Some(2)), [3, 9]);
    }

    /// A file that bit rot or a full disk damaged is kept apart, and the others still go.
    #[test]
    fn a_damaged_file_is_set_aside() {
        let spool = tempfile::tempdir().unwrap();
        let path = spool.path().join("00000000000000000001-devices.parquet");
        std::fs::write(&path, "PAR1 and then nothing").unwrap();
        let file = SpoolFile {
            batch_seq: 1,
            table: Table::Devices,
            path: path.clone(),
        };
        assert!(load(&shipment(spool.path()), &file).unwrap().is_none());
        assert!(!path.exists());
        assert!(
            spool
                .path()
                .join("rejected/00000000000000000001-devices.parquet")
                .exists()
        );
    }
}
