//! The `Ingest` service: takes agents' batches and answers each with exactly one [`Ack`].
//!
//! Invariants:
//! - STORED and DUPLICATE are only said of batches that are durable, in the log or in a table;
//! - a batch is stored at most once: of one agent one batch is handled at a time, and only a
//!   `batch_seq` above the agent's highest durable one is stored;
//! - that rule would turn a batch that was put off into a DUPLICATE once a later one is stored,
//!   and its rows would be lost. So after RETRY for batch n, a stream answers RETRY to every
//!   batch above n until n itself gets another answer. A new stream starts afresh: an agent
//!   begins it with its oldest batch;
//! - a batch that can never be taken is REJECTED and counted, and the stream goes on.

pub mod check;
mod marks;
pub mod wal;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::Stream;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use vramscope_wire::Table;
use vramscope_wire::proto::ingest_server::Ingest;
use vramscope_wire::proto::{Ack, Batch, Outcome};

use crate::lake::Lake;
use check::{Checked, Reject};
use marks::Marks;
use wal::{Entry, Wal};

/// What was answered since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Batches stored.
    pub stored: AtomicU64,
    /// Batches that were stored before.
    pub duplicate: AtomicU64,
    /// Batches that can never be taken.
    pub rejected: AtomicU64,
    /// Batches put off.
    pub retry: AtomicU64,
}

impl Counts {
    fn count(&self, outcome: Outcome) {
        let counter = match outcome {
            Outcome::Stored => &self.stored,
            Outcome::Duplicate => &self.duplicate,
            Outcome::Rejected => &self.rejected,
            Outcome::Retry | Outcome::Unspecified => &self.retry,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// The service. Clones share everything.
#[derive(Clone)]
pub struct Service {
    shared: Arc<Shared>,
}

struct Shared {
    wal: Arc<Wal>,
    marks: Marks,
    counts: Arc<Counts>,
    max_batch_bytes: u64,
    /// Checking a batch holds its rows in memory and a processor busy.
    checks: Semaphore,
    stopping: watch::Receiver<bool>,
}

impl Service {
    /// A service that stores in `wal`. When `stopping` turns true, streams end after the batch
    /// in hand.
    pub fn new(
        wal: Arc<Wal>,
        lake: Arc<Lake>,
        counts: Arc<Counts>,
        max_batch_bytes: u64,
        stopping: watch::Receiver<bool>,
    ) -> Service {
        let processors = std::thread::available_parallelism().map_or(2, |n| n.get());
        let marks = Marks::new(Arc::clone(&wal), lake);
        let checks = Semaphore::new(processors);
        Service {
            shared: Arc::new(Shared {
                wal,
                marks,
                counts,
                max_batch_bytes,
                checks,
                stopping,
            }),
        }
    }
}

#[tonic::async_trait]
impl Ingest for Service {
    type PushStream = Pin<Box<dyn Stream<Item = Result<Ack, Status>> + Send>>;

    async fn push(
        &self,
        request: Request<Streaming<Batch>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let mut batches = request.into_inner();
        let (acks, answers) = mpsc::channel(16);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            let mut stopping = shared.stopping.clone();
            // Lowest batch answered RETRY, by agent; normally a stream has one agent.
            let mut put_off: HashMap<String, u64> = HashMap::new();
            loop {
                let next = tokio::select! {
                    biased;
                    () = stop(&mut stopping) => None,
                    next = batches.message() => Some(next),
                };
                let batch = match next {
                    None => {
                        let _ = acks
                            .send(Err(Status::unavailable("the collector is shutting down")))
                            .await;
                        return;
                    }
                    Some(Ok(Some(batch))) => batch,
                    Some(Ok(None)) => return,
                    Some(Err(status)) => {
                        tracing::debug!(%status, "an agent's stream broke");
                        return;
                    }
                };
                let ack = shared.answer(batch, &mut put_off).await;
                if acks.send(Ok(ack)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }
}

/// Returns when the collector stops.
async fn stop(stopping: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop too.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

/// An answer before it is told.
enum Answer {
    Stored,
    Duplicate,
    Rejected(Reject),
    Retry(String),
}

impl Shared {
    async fn answer(&self, batch: Batch, put_off: &mut HashMap<String, u64>) -> Ack {
        let (agent, seq, table) = (batch.agent_id.clone(), batch.batch_seq, batch.table.clone());
        let answer = match put_off.get(&agent) {
            Some(&first) if seq > first => {
                Answer::Retry(format!("batch {first} was put off and has to come first"))
            }
            _ => self.handle(batch).await,
        };
        let is_rejected = matches!(answer, Answer::Rejected(_));
        let (outcome, message) = match answer {
            Answer::Stored => (Outcome::Stored, String::new()),
            Answer::Duplicate => (Outcome::Duplicate, String::new()),
            Answer::Rejected(reason) => (
                Outcome::Rejected,
                format!("batch {seq} of agent {agent:?} for table {table:?}: {reason}"),
            ),
            Answer::Retry(reason) => (Outcome::Retry, reason),
        };
        self.counts.count(outcome);
        if is_rejected {
            let total = self.counts.rejected.load(Ordering::Relaxed);
            tracing::error!(total, "rejected {message}");
        }
        if outcome == Outcome::Retry {
            let already_known = put_off.contains_key(&agent);
            if !already_known {
                tracing::warn!(agent, seq, "batch put off: {message}");
            }
            let first = put_off.entry(agent).or_insert(seq);
            *first = seq.min(*first);
        } else if put_off.get(&agent) == Some(&seq) {
            put_off.remove(&agent);
        }
        Ack {
            batch_seq: seq,
            outcome: outcome.into(),
            message,
        }
    }

    async fn handle(&self, batch: Batch) -> Answer {
        let table = match check::envelope(&batch, self.max_batch_bytes) {
            Ok(table) => table,
            Err(reason) => return Answer::Rejected(reason),
        };
        let seq = batch.batch_seq;
        let mark = self.marks.of(&batch.agent_id);
        // Held until the batch is durable: one batch of an agent at a time.
        let mut mark = mark.lock().await;
        match mark.has(table, seq).await {
            Ok(true) => return Answer::Duplicate,
            Ok(false) => {}
            Err(error) => {
                return Answer::Retry(format!("failed to look up what is stored: {error}"));
            }
        }
        let parquet = Bytes::from(batch.parquet);
        let checked = match self
            .check_rows(table, parquet.clone(), batch.crc32, batch.rows)
            .await
        {
            Ok(checked) => checked,
            Err(reason) => return Answer::Rejected(reason),
        };
        let entry = Entry {
            agent: batch.agent_id.into(),
            seq,
            table,
            crc32: batch.crc32,
            bytes: parquet.len() as u64,
            rows: Some(checked.rows),
            decoded_bytes: checked.decoded_bytes,
        };
        let wal = Arc::clone(&self.wal);
        match tokio::task::spawn_blocking(move || wal.store(entry, &parquet)).await {
            Ok(Ok(())) => {
                mark.raise(seq);
                Answer::Stored
            }
            Ok(Err(error)) => Answer::Retry(error.to_string()),
            Err(error) => Answer::Retry(format!("failed to store the batch: {error}")),
        }
    }

    async fn check_rows(
        &self,
        table: Table,
        parquet: Bytes,
        crc32: u32,
        rows: u64,
    ) -> Result<Checked, Reject> {
        // The semaphore is never closed.
        let _permit = self.checks.acquire().await.ok();
        let task = tokio::task::spawn_blocking(move || check::rows(table, parquet, crc32, rows));
        // A decoder that panics on a crafted file must not take the stream with it.
        task.await.unwrap_or(Err(Reject::Panicked))
    }
}
