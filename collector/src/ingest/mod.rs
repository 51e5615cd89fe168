//! The `Ingest` service: takes agents' batches and answers each with exactly one [`Ack`].
//!
//! Invariants:
//! - STORED and DUPLICATE are only said of batches that are durable, in the log or in a table
//!   ([`Keeper`]);
//! - a name (agent_id, batch_seq) stands for the same bytes for ever: other bytes under it are
//!   REJECTED, counted and told at ERROR. Numbers that an agent leaves out are counted;
//! - a batch is stored at most once: of one agent one batch is handled at a time, and only a
//!   `batch_seq` above the agent's highest durable one is stored;
//! - that rule would turn a batch that was put off into a DUPLICATE once a later one is stored,
//!   and its rows would be lost. So after RETRY for batch n, a stream answers RETRY to every
//!   batch above n until n itself gets another answer. A new stream starts afresh: an agent
//!   begins it with its oldest batch;
//! - a batch that can never be taken is REJECTED and counted, and the stream goes on.

pub mod check;
pub mod marks;
pub mod placing;
pub mod promise;
pub mod wal;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use futures::Stream;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use vramscope_wire::Table;
use vramscope_wire::proto::ingest_server::Ingest;
use vramscope_wire::proto::{Ack, Batch, Outcome};

use crate::access::agents::{Agent, Claim};
use crate::access::guard;
use crate::lake::committer::direct::Direct;
use crate::metrics::METRICS;
use check::{Checked, Reject};
use marks::{Marks, Verdict};
use placing::{Clock, Placing};
use wal::{NewBatch, Wal};

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
    /// Of the rejected those whose name stands for other bytes.
    pub conflicting: AtomicU64,
    /// Numbers that agents left out. What was rejected is not among them.
    pub missing: AtomicU64,
    /// Rows stored.
    pub rows: AtomicU64,
    /// Of them those whose time was not believed.
    pub misdated_rows: AtomicU64,
    /// Bytes of the batches stored.
    pub bytes: AtomicU64,
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

/// What keeps batches, so that they may be acknowledged.
#[derive(Debug)]
pub enum Keeper {
    /// The local log: promise `fsync`.
    Log(Arc<Wal>),
    /// The tables themselves: promise `store`.
    Table(Direct),
}

impl Keeper {
    /// Returns when the batch is durable, or says why it cannot be now.
    async fn store(&self, batch: NewBatch, parquet: Bytes) -> Result<(), String> {
        match self {
            Keeper::Log(wal) => {
                let stored = wal.store(batch, parquet).await;
                stored.map_err(|error| error.to_string())
            }
            Keeper::Table(direct) => {
                let stored = direct.store(batch, parquet).await;
                stored.map_err(|error| error.to_string())
            }
        }
    }
}

struct Shared {
    keeper: Keeper,
    marks: Marks,
    counts: Arc<Counts>,
    max_batch_bytes: u64,
    clock: Clock,
    /// Checking a batch holds its rows in memory and a processor busy.
    checks: Semaphore,
    stopping: watch::Receiver<bool>,
}

impl Service {
    /// A service that stores with `keeper`. When `stopping` turns true, streams end after the batch
    /// in hand.
    pub fn new(
        keeper: Keeper,
        marks: Marks,
        counts: Arc<Counts>,
        limits: Limits,
        stopping: watch::Receiver<bool>,
    ) -> Service {
        let processors = std::thread::available_parallelism().map_or(2, |n| n.get());
        let checks = Semaphore::new(processors);
        Service {
            shared: Arc::new(Shared {
                keeper,
                marks,
                counts,
                max_batch_bytes: limits.max_batch_bytes,
                clock: limits.clock,
                checks,
                stopping,
            }),
        }
    }
}

/// What a batch may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest Parquet file.
    pub max_batch_bytes: u64,
    /// Which times are believed.
    pub clock: Clock,
}

#[tonic::async_trait]
impl Ingest for Service {
    type PushStream = Pin<Box<dyn Stream<Item = Result<Ack, Status>> + Send>>;

    async fn push(
        &self,
        request: Request<Streaming<Batch>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let sender = Agent::of(&request)?;
        let mut batches = request.into_inner();
        let (acks, answers) = mpsc::channel(16);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            let _open = Open::new();
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
                if let Err(denied) = sender.still_welcome() {
                    let _ = acks.send(Err(guard::status(&denied))).await;
                    return;
                }
                let ack = shared.answer(&sender, batch, &mut put_off).await;
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

impl Answer {
    /// Why a batch was not taken, in a word.
    fn cause(&self) -> &'static str {
        match self {
            Answer::Stored | Answer::Duplicate => "",
            Answer::Rejected(reason) => reason.cause(),
            Answer::Retry(_) => "put_off",
        }
    }
}

fn name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Stored => "stored",
        Outcome::Duplicate => "duplicate",
        Outcome::Rejected => "rejected",
        Outcome::Retry | Outcome::Unspecified => "retry",
    }
}

/// An open stream, for the metrics.
struct Open;

impl Open {
    fn new() -> Open {
        METRICS.streams.inc();
        Open
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        METRICS.streams.dec();
    }
}

impl Shared {
    async fn answer(
        &self,
        sender: &Agent,
        batch: Batch,
        put_off: &mut HashMap<String, u64>,
    ) -> Ack {
        let began = Instant::now();
        let (agent, seq, table) = (batch.agent_id.clone(), batch.batch_seq, batch.table.clone());
        let answer = match put_off.get(&agent) {
            Some(&first) if seq > first => {
                Answer::Retry(format!("batch {first} was put off and has to come first"))
            }
            _ => self.handle(sender, batch).await,
        };
        let is_rejected = matches!(answer, Answer::Rejected(_));
        let cause = answer.cause();
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
        METRICS.batch(name(outcome), cause, began.elapsed());
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

    async fn handle(&self, sender: &Agent, batch: Batch) -> Answer {
        let table = match check::envelope(&batch, self.max_batch_bytes) {
            Ok(table) => table,
            Err(reason) => return Answer::Rejected(reason),
        };
        match sender.check(&batch.agent_id, &batch.host).await {
            Ok(Ok(())) => {}
            Ok(Err(impostor)) => return Answer::Rejected(impostor.into()),
            Err(error) => return Answer::Retry(format!("{error:#}")),
        }
        let claim = sender.claim(&batch.agent_id, &batch.host);
        let seq = batch.batch_seq;
        let mark = self.marks.of(&batch.agent_id);
        // Held until the batch is durable: one batch of an agent at a time.
        let mut mark = mark.lock().await;
        let missing = match mark.judge(seq, batch.crc32).await {
            Ok(Verdict::New { missing }) => missing,
            Ok(Verdict::Duplicate) => return Answer::Duplicate,
            Ok(Verdict::Conflict { stored_crc32 }) => {
                self.counts.conflicting.fetch_add(1, Ordering::Relaxed);
                METRICS.conflicts.inc();
                return Answer::Rejected(Reject::Conflict {
                    stored: stored_crc32,
                    sent: batch.crc32,
                });
            }
            Err(error) => {
                return Answer::Retry(format!("failed to look up what is stored: {error}"));
            }
        };
        let parquet = Bytes::from(batch.parquet);
        let placing = self.clock.now();
        let checked = match self
            .check_rows(
                table,
                parquet.clone(),
                (batch.crc32, batch.rows),
                claim,
                placing,
            )
            .await
        {
            Ok(checked) => checked,
            Err(reason) => {
                if let Reject::Impostor(impostor) = &reason {
                    Agent::alarm(impostor);
                }
                mark.reject(seq);
                return Answer::Rejected(reason);
            }
        };
        let bytes = parquet.len() as u64;
        let new = NewBatch {
            agent: batch.agent_id.into(),
            seq,
            host: Some(batch.host.into()),
            table,
            crc32: batch.crc32,
            rows: checked.rows,
            decoded_bytes: checked.decoded_bytes,
            times: checked.times,
            placing,
            misdated: checked.misdated,
        };
        if missing > 0 {
            tracing::debug!(
                agent = &*new.agent,
                seq,
                missing,
                "numbers are missing before a batch"
            );
        }
        match self.keeper.store(new, parquet).await {
            Ok(()) => {
                mark.raise(seq, batch.crc32);
                METRICS.stored(checked.rows, bytes);
                METRICS.missing.inc_by(missing);
                METRICS.misdated_rows.inc_by(checked.misdated);
                let counts = &self.counts;
                counts.missing.fetch_add(missing, Ordering::Relaxed);
                counts.rows.fetch_add(checked.rows, Ordering::Relaxed);
                counts.bytes.fetch_add(bytes, Ordering::Relaxed);
                counts
                    .misdated_rows
                    .fetch_add(checked.misdated, Ordering::Relaxed);
                Answer::Stored
            }
            Err(reason) => Answer::Retry(reason),
        }
    }

    async fn check_rows(
        &self,
        table: Table,
        parquet: Bytes,
        (crc32, rows): (u32, u64),
        claim: Option<Claim>,
        placing: Placing,
    ) -> Result<Checked, Reject> {
        // The semaphore is never closed.
        let _permit = self.checks.acquire().await.ok();
        let task = tokio::task::spawn_blocking(move || {
            check::rows(table, parquet, crc32, rows, claim.as_ref(), &placing)
        });
        // A decoder that panics on a crafted file must not take the stream with it.
        task.await.unwrap_or(Err(Reject::Panicked))
    }
}
