//! One agent of the crash harness: makes batches, keeps them until they are acknowledged, sends
//! them again after every failure, and misbehaves in the ways that real ones do.
//!
//! Invariants:
//! - batches of one stream ascend, and a stream begins with the oldest that is not acknowledged,
//!   as the protocol says;
//! - everything sent and every answer goes into the model.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Ack, Batch, Outcome};
use vramscope_wire::{SCHEMA_VERSION, Table, parquet_file};

use super::Random;
use super::content::{self, Name, TABLES};
use super::model::Model;

/// Batches on the way at once.
const WINDOW: usize = 8;
/// Acknowledged batches that an agent may not know of any more when it was killed.
const FORGETFUL: usize = 12;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
const HOUR_US: i64 = 3_600_000_000;

/// What all agents share.
#[derive(Debug)]
pub struct Shared {
    model: Mutex<Model>,
    /// Every answer and fault with its time, for whoever looks into a finding.
    events: Mutex<BufWriter<File>>,
    began: Instant,
    /// Rings at every acknowledgement.
    pub acknowledged: Notify,
    /// Batches sent once more than needed.
    pub resent: AtomicU64,
    /// Other bytes under an old name, sent.
    pub forged: AtomicU64,
    /// Answers to them that were REJECTED; the others were DUPLICATE or RETRY.
    pub forged_rejected: AtomicU64,
}

impl Shared {
    /// Nothing sent yet; events go to a file.
    pub fn new(events: &Path) -> Result<Shared> {
        let file = File::create(events)
            .with_context(|| format!("failed to create {}", events.display()))?;
        Ok(Shared {
            model: Mutex::default(),
            events: Mutex::new(BufWriter::new(file)),
            began: Instant::now(),
            acknowledged: Notify::new(),
            resent: AtomicU64::new(0),
            forged: AtomicU64::new(0),
            forged_rejected: AtomicU64::new(0),
        })
    }

    /// Writes down what happened.
    pub fn event(&self, what: std::fmt::Arguments) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.began.elapsed().as_secs_f64();
        // A log that cannot be written is no reason to stop.
        let _ = writeln!(events, "{at:9.3} {what}").and_then(|()| events.flush());
    }

    /// An answer was read on a stream of this kind.
    fn answer(&self, asked: Asked, id: &str, seq: u64, answer: &Ack) {
        let (outcome, message) = (answer.outcome(), &answer.message);
        let (word, stream) = (outcome.as_str_name(), asked.stream);
        self.event(format_args!("{id} {seq} {word} on {stream} {message}"));
        self.model()
            .answer(id, seq, outcome, asked.at.into_std(), message);
    }

    /// The truth.
    pub fn model(&self) -> MutexGuard<'_, Model> {
        // Nothing inside can panic half-way through a change.
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which stream a batch was sent on, and when.
#[derive(Debug, Clone, Copy)]
struct Asked {
    stream: &'static str,
    at: Instant,
}

/// What an agent is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Be killed and started again: the latest acknowledgements are forgotten.
    Die,
    /// Send what is on the way and what is old on a second stream at the same time.
    Echo,
    /// Send other bytes under the name of an old batch.
    Forge,
    /// Make nothing more; end when all is acknowledged.
    Finish,
}

#[derive(Debug, Clone)]
struct Spooled {
    name: Name,
    batch: Batch,
}

/// See the module's text.
pub struct Agent {
    number: u64,
    next: u64,
    address: String,
    random: Random,
    shared: Arc<Shared>,
    orders: mpsc::UnboundedReceiver<Order>,
    spool: VecDeque<Spooled>,
    recent: VecDeque<Spooled>,
    pace: Duration,
    finishing: bool,
}

impl Agent {
    /// Agent `number` (below 1024) that sends to `address` a batch every `pace`.
    pub fn new(
        number: u64,
        address: &str,
        pace: Duration,
        random: Random,
        shared: Arc<Shared>,
    ) -> (Agent, mpsc::UnboundedSender<Order>) {
        let (sender, orders) = mpsc::unbounded_channel();
        let agent = Agent {
            number,
            next: 1,
            address: address.to_string(),
            random,
            shared,
            orders,
            spool: VecDeque::new(),
            recent: VecDeque::new(),
            pace,
            finishing: false,
        };
        (agent, sender)
    }

    /// Runs until all is acknowledged after [`Order::Finish`].
    pub async fn run(mut self) -> Result<()> {
        while !self.finishing || !self.spool.is_empty() {
            // A stream that broke is what this is about.
            let _ = self.stream().await;
            let pause = Duration::from_millis(20 + self.random.below(100));
            let _ = tokio::time::timeout(pause, self.take_orders()).await;
        }
        Ok(())
    }

    async fn take_orders(&mut self) {
        while let Some(order) = self.orders.recv().await {
            self.obey(order, 0);
        }
    }

    /// One stream until it breaks, somebody gives the order to, or nothing is left.
    async fn stream(&mut self) -> Result<()> {
        let mut client = connect(&self.address).await?;
        let (sender, batches) = mpsc::channel(WINDOW);
        let opening = client.push(ReceiverStream::new(batches));
        let mut answers = tokio::time::timeout(PATIENCE, opening)
            .await
            .context("no answer to a stream")??
            .into_inner();
        // The first so many of the spool are on the way, each since then.
        let mut sent: VecDeque<Instant> = VecDeque::new();
        let mut answered = Instant::now();
        let mut tick = tokio::time::interval(self.pace);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            if self.finishing && self.spool.is_empty() {
                return Ok(());
            }
            while sent.len() < WINDOW.min(self.spool.len()) {
                let batch = self.spool[sent.len()].batch.clone();
                sent.push_back(Instant::now());
                sender.send(batch).await.context("the stream is closed")?;
            }
            tokio::select! {
                answer = answers.message() => {
                    let answer = answer?.context("the stream ended")?;
                    let since = sent.pop_front().context("an answer to nothing")?;
                    self.take(&answer, since)?;
                    answered = Instant::now();
                }
                () = tokio::time::sleep_until(answered + PATIENCE), if !sent.is_empty() => {
                    bail!("no answer for {} s", PATIENCE.as_secs());
                }
                _ = tick.tick(), if !self.finishing && self.spool.len() < 2 * WINDOW => {
                    self.make()?;
                    if sent.is_empty() {
                        answered = Instant::now();
                    }
                }
                Some(order) = self.orders.recv() => {
                    if self.obey(order, sent.len()) {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Takes the answer to the oldest batch, which was sent then.
    fn take(&mut self, answer: &Ack, sent: Instant) -> Result<()> {
        let Some(oldest) = self.spool.front() else {
            bail!("an answer to nothing");
        };
        let (id, seq) = (oldest.name.agent_id.clone(), oldest.name.seq);
        if answer.batch_seq != seq {
            let found = answer.batch_seq;
            let text = format!("agent {id}: batch {seq} is due, {found} was answered");
            self.shared.model().broken.push(text.clone());
            bail!(text);
        }
        let asked = Asked {
            stream: "its stream",
            at: sent,
        };
        self.shared.answer(asked, &id, seq, answer);
        if answer.outcome() == Outcome::Retry {
            bail!("put off: {}", answer.message);
        }
        self.shared.acknowledged.notify_one();
        self.recent.extend(self.spool.pop_front());
        if self.recent.len() > FORGETFUL {
            self.recent.pop_front();
        }
        Ok(())
    }

    /// Whether the stream is to be left.
    fn obey(&mut self, order: Order, sent: usize) -> bool {
        self.shared
            .event(format_args!("agent-{:03} {order:?}", self.number));
        match order {
            Order::Finish => {
                self.finishing = true;
                false
            }
            Order::Die => {
                for _ in 0..self.random.below(self.recent.len() as u64 + 1) {
                    if let Some(batch) = self.recent.pop_back() {
                        self.spool.push_front(batch);
                        self.shared.resent.fetch_add(1, Ordering::Relaxed);
                    }
                }
                true
            }
            Order::Echo => {
                let on_the_way = self.spool.iter().take(sent);
                let batches: Vec<Spooled> = self.recent.iter().chain(on_the_way).cloned().collect();
                let shared = Arc::clone(&self.shared);
                shared
                    .resent
                    .fetch_add(batches.len() as u64, Ordering::Relaxed);
                tokio::spawn(echo(self.address.clone(), batches, shared));
                false
            }
            Order::Forge => {
                if let Some(old) = self.recent.back().cloned() {
                    let shared = Arc::clone(&self.shared);
                    tokio::spawn(forge(self.address.clone(), old, shared));
                }
                false
            }
        }
    }

    /// Makes the next batch.
    fn make(&mut self) -> Result<()> {
        let table = if self.random.below(10) < 6 {
            Table::AllocEvents
        } else {
            TABLES[self.random.below(TABLES.len() as u64) as usize]
        };
        let rows = match self.random.below(10) {
            0 => 1,
            1 => 600,
            _ => 1 + self.random.below(120) as usize,
        };
        let name = Name {
            agent_id: format!("agent-{:03}", self.number),
            host: format!("host-{:03}", self.number),
            agent: self.number,
            seq: self.next,
            ts: self.time(),
            forgery: 0,
        };
        let batch = encode(table, &name, rows)?;
        let digest = content::digest(&name, rows);
        self.shared
            .model()
            .send(&name.agent_id, name.seq, table, digest);
        self.next += 1;
        // Gaps are allowed: an agent that found no room for a batch counts on.
        if self.random.once_in(40) {
            self.next += 1;
        }
        self.spool.push_back(Spooled { name, batch });
        Ok(())
    }

    /// Mostly the last hour; some hours or days late, some of a clock that is wrong. Each time of
    /// day means files of its own, so that there are few.
    fn time(&mut self) -> i64 {
        let now = now_us();
        match self.random.below(80) {
            0 => now - 7 * HOUR_US,
            1 => now - 19 * 24 * HOUR_US,
            2 => 365 * 24 * HOUR_US,
            3 => now + 80 * 365 * 24 * HOUR_US,
            _ => now - (self.random.below(3600) as i64) * 1_000_000,
        }
    }
}

fn now_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    since.as_micros() as i64
}

async fn connect(address: &str) -> Result<IngestClient<Channel>> {
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .context("the address is wrong")?
        .connect_timeout(Duration::from_secs(2))
        .tcp_nodelay(true)
        .connect()
        .await
        .context("failed to connect")?;
    Ok(IngestClient::new(channel))
}

fn encode(table: Table, name: &Name, rows: usize) -> Result<Batch> {
    let rows = content::rows(table, name, rows)?;
    let parquet = parquet_file::encode(table, std::slice::from_ref(&rows))
        .context("failed to encode a batch")?;
    Ok(Batch {
        agent_id: name.agent_id.clone(),
        host: name.host.clone(),
        batch_seq: name.seq,
        table: table.name().to_string(),
        schema_version: SCHEMA_VERSION,
        crc32: crc32fast::hash(&parquet),
        rows: rows.num_rows() as u64,
        parquet,
    })
}

/// Sends batches on a stream of its own, and takes the answers for what they promise.
async fn echo(address: String, batches: Vec<Spooled>, shared: Arc<Shared>) -> Result<()> {
    let began = Instant::now();
    let names: Vec<Name> = batches.iter().map(|batch| batch.name.clone()).collect();
    let stream = tokio_stream::iter(batches.into_iter().map(|batch| batch.batch));
    let mut answers = connect(&address).await?.push(stream).await?.into_inner();
    for name in names {
        let answer = answers.message().await?.context("the stream ended")?;
        let stream = Asked {
            stream: "a second stream",
            at: began,
        };
        shared.answer(stream, &name.agent_id, name.seq, &answer);
    }
    Ok(())
}

/// Sends other rows under the name of a batch that was acknowledged: they must not be taken.
async fn forge(address: String, old: Spooled, shared: Arc<Shared>) -> Result<()> {
    let name = Name {
        forgery: 1,
        ..old.name
    };
    let Some(table) = Table::by_name(&old.batch.table) else {
        bail!("no table {}", old.batch.table);
    };
    let batch = encode(table, &name, usize::try_from(old.batch.rows)?)?;
    shared.forged.fetch_add(1, Ordering::Relaxed);
    let stream = tokio_stream::iter([batch]);
    let mut answers = connect(&address).await?.push(stream).await?.into_inner();
    let answer = answers.message().await?.context("the stream ended")?;
    match answer.outcome() {
        Outcome::Stored => {
            let (id, seq) = (&name.agent_id, name.seq);
            let text = format!("agent {id}: other bytes were stored under the name of batch {seq}");
            shared.model().broken.push(text);
        }
        Outcome::Rejected => {
            shared.forged_rejected.fetch_add(1, Ordering::Relaxed);
        }
        _ => {}
    }
    Ok(())
}
