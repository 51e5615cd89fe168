//! Many agents that send prepared batches: each one gRPC stream, numbers from 1, what is not
//! acknowledged sent again from the oldest on.
//!
//! An agent needs no spool: a batch's content follows from its number. A latency counts from the
//! moment that a batch was due to the moment that its acknowledgement was read, so that a
//! collector that holds agents up does not look faster for it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use vramscope_wire::Table;
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Ack, Outcome};

use super::latency::Latencies;
use super::prepared::{Identity, Prepared};
use super::sql::{self, Sql};
use super::{Random, content};

/// What all agents do now.
#[derive(Debug, Clone, Copy)]
pub enum Phase {
    /// Nothing new; what is on the way comes to its end.
    Rest,
    /// As fast as acknowledgements allow.
    Burst,
    /// A batch every so often, from this moment on, the agents one after the other.
    Paced(Duration, Instant),
    /// Nothing new, and the agents end.
    End,
}

/// The agents and what became of their batches.
pub struct Load {
    batches: Vec<Prepared>,
    agents: usize,
    window: usize,
    endpoint: Endpoint,
    /// Agents that share a connection.
    sharing: usize,
    channels: Mutex<Vec<Channel>>,
    phase: watch::Sender<Phase>,
    storms: watch::Sender<u64>,
    /// How long acknowledgements took.
    pub latencies: Latencies,
    /// Rows acknowledged, by table.
    rows: HashMap<Table, AtomicU64>,
    /// Batches acknowledged.
    pub acknowledged: AtomicU64,
    /// Answers RETRY.
    pub put_off: AtomicU64,
    /// Answers REJECTED.
    pub rejected: AtomicU64,
    /// Answers DUPLICATE.
    pub duplicates: AtomicU64,
    /// Streams that broke otherwise.
    pub broken: AtomicU64,
    /// The last of what was rejected or broke, in words.
    pub trouble: Mutex<String>,
    /// The highest number acknowledged, by agent. All below are too.
    highest: Vec<AtomicU64>,
}

/// What a comparison of the tables with the acknowledgements found.
#[derive(Debug, Default)]
pub struct Compared {
    /// Rows acknowledged that are not there.
    pub lost: u64,
    /// Rows there more often than once.
    pub doubled: u64,
    /// Agents whose rows are as many as acknowledged, but of other batches.
    pub changed: u64,
}

impl Load {
    /// Agents that wait for their first phase. `batches` are sent in turn.
    pub fn new(
        address: &str,
        batches: Vec<Prepared>,
        agents: usize,
        window: usize,
        sharing: usize,
    ) -> Result<Arc<Load>> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .context("the collector's address is wrong")?
            .connect_timeout(Duration::from_secs(10))
            .tcp_nodelay(true);
        let rows = content::TABLES.map(|table| (table, AtomicU64::new(0)));
        let load = Load {
            batches,
            agents,
            window,
            endpoint,
            sharing,
            channels: Mutex::default(),
            phase: watch::Sender::new(Phase::Rest),
            storms: watch::Sender::new(0),
            latencies: Latencies::default(),
            rows: rows.into(),
            acknowledged: AtomicU64::new(0),
            put_off: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
            broken: AtomicU64::new(0),
            trouble: Mutex::default(),
            highest: (0..agents).map(|_| AtomicU64::new(0)).collect(),
        };
        load.connect_anew();
        Ok(Arc::new(load))
    }

    /// Starts the agents.
    pub fn start(self: &Arc<Self>) -> tokio::task::JoinSet<()> {
        let mut random = Random::new(0x5EED);
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..self.agents {
            tasks.spawn(agent(Arc::clone(self), number, random.split()));
        }
        tasks
    }

    /// Changes what agents do.
    pub fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Drops every connection, and all agents come back at once.
    pub fn storm(&self) {
        self.connect_anew();
        self.storms.send_modify(|storms| *storms += 1);
    }

    fn connect_anew(&self) {
        let channels =
            (0..self.agents.div_ceil(self.sharing)).map(|_| self.endpoint.connect_lazy());
        *self.channels.lock().unwrap_or_else(PoisonError::into_inner) = channels.collect();
    }

    fn channel(&self, number: usize) -> Channel {
        let channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        channels[number / self.sharing].clone()
    }

    fn prepared(&self, seq: u64) -> &Prepared {
        &self.batches[seq as usize % self.batches.len()]
    }

    /// Rows acknowledged that are counted in the tables one by one: all but those of `stacks`,
    /// of which a lake may keep one for all agents.
    pub fn rows(&self) -> u64 {
        let countable = self
            .rows
            .iter()
            .filter(|(table, _)| **table != Table::Stacks);
        countable
            .map(|(_, rows)| rows.load(Ordering::Relaxed))
            .sum()
    }

    /// The same rows, as SQL sees them.
    pub async fn visible_rows(&self, sql: &mut Sql) -> Result<u64> {
        let mut rows = 0;
        for table in content::TABLES
            .into_iter()
            .filter(|table| *table != Table::Stacks)
        {
            rows += sql.count(table).await?;
        }
        Ok(rows)
    }

    /// Waits until nothing is on the way and SQL sees all that is acknowledged. How long it took,
    /// or `None` after `limit`.
    pub async fn drain(&self, sql: &mut Sql, limit: Duration) -> Result<Option<Duration>> {
        let began = Instant::now();
        while began.elapsed() < limit {
            let acknowledged = self.rows();
            let visible = self.visible_rows(sql).await?;
            if acknowledged == self.rows() && visible >= acknowledged {
                return Ok(Some(began.elapsed()));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(None)
    }

    /// Compares, agent by agent, rows, distinct batches and the sum of the rows' batch numbers.
    /// Everything must be acknowledged and visible.
    pub async fn compare(&self, sql: &mut Sql) -> Result<Compared> {
        let mut compared = Compared::default();
        for table in content::TABLES
            .into_iter()
            .filter(|table| *table != Table::Stacks)
        {
            let mut expected = BTreeMap::new();
            for (number, highest) in self.highest.iter().enumerate() {
                let mut sums = (0, 0, 0);
                for seq in 1..=highest.load(Ordering::Relaxed) {
                    let batch = self.prepared(seq);
                    if batch.table == table {
                        sums.0 += batch.rows as i64;
                        sums.1 += 1;
                        sums.2 += (seq * batch.rows) as i64;
                    }
                }
                if sums.0 > 0 {
                    expected.insert(Identity::new(number).agent_id, sums);
                }
            }
            let answer = sql
                .ask(&format!(
                    "SELECT agent_id, count(*), count(DISTINCT batch_seq), sum(batch_seq) \
                     FROM {} GROUP BY agent_id",
                    table.name()
                ))
                .await?;
            let agents = sql::texts(&answer, 0)?;
            let rows = sql::numbers(&answer, 1)?.zip(sql::numbers(&answer, 2)?);
            let sums = rows.zip(sql::numbers(&answer, 3)?);
            let mut found: BTreeMap<String, _> = agents
                .into_iter()
                .zip(sums.map(|((rows, batches), sum)| (rows, batches, sum)))
                .collect();
            for (agent, expected) in expected {
                let found = found.remove(&agent).unwrap_or((0, 0, 0));
                compared.lost += (expected.0 - found.0).max(0) as u64;
                compared.doubled += (found.0 - expected.0).max(0) as u64;
                compared.changed += u64::from(found.0 == expected.0 && found != expected);
            }
            compared.doubled += found.values().map(|found| found.0 as u64).sum::<u64>();
        }
        Ok(compared)
    }
}

/// One batch on the way.
struct Flying {
    seq: u64,
    since: Instant,
}

struct State {
    number: usize,
    identity: Identity,
    next: u64,
    flying: VecDeque<Flying>,
    /// When the next batch is due, and the start of the phase that says so. It outlives a stream:
    /// what was due while there was none is late.
    due: Option<(Instant, Instant)>,
}

async fn agent(load: Arc<Load>, number: usize, mut random: Random) {
    let mut state = State {
        number,
        identity: Identity::new(number),
        next: 1,
        flying: VecDeque::new(),
        due: None,
    };
    let mut storms = load.storms.subscribe();
    loop {
        storms.borrow_and_update();
        let ended = tokio::select! {
            ended = stream(&load, &mut state) => ended,
            _ = storms.changed() => continue,
        };
        match ended {
            Ok(()) => return,
            Err(error) => {
                *load.trouble.lock().unwrap_or_else(PoisonError::into_inner) = format!("{error:#}");
                load.broken.fetch_add(1, Ordering::Relaxed);
            }
        }
        tokio::time::sleep(Duration::from_millis(100 + random.below(400))).await;
    }
}

/// One stream until it breaks, or all is said.
async fn stream(load: &Load, state: &mut State) -> Result<()> {
    let mut phases = load.phase.subscribe();
    let (sender, batches) = mpsc::channel(load.window);
    let mut client = IngestClient::new(load.channel(state.number));
    let answers = client.push(ReceiverStream::new(batches)).await;
    let mut answers = answers.context("failed to open a stream")?.into_inner();
    let mut sent = 0;
    loop {
        let phase = *phases.borrow_and_update();
        if matches!(phase, Phase::End) && state.flying.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let due = match phase {
            Phase::Burst => Some(now),
            Phase::Paced(interval, start) => {
                let known = state.due.filter(|(of, _)| *of == start);
                let due = match known {
                    Some((_, due)) => due,
                    None => first_due(load, state, interval, start),
                };
                // The first one too: asked again later, it would be another.
                state.due = Some((start, due));
                Some(due)
            }
            Phase::Rest | Phase::End => None,
        };
        let has_room = state.flying.len() < load.window;
        if let (true, Some(since)) = (has_room, due.filter(|due| *due <= now)) {
            let seq = state.next;
            state.next += 1;
            state.flying.push_back(Flying { seq, since });
            if let Phase::Paced(interval, start) = phase {
                state.due = Some((start, since + interval));
            }
        }
        if let Some(flying) = state.flying.get(sent) {
            let batch = load.prepared(flying.seq).of(&state.identity, flying.seq);
            sender.send(batch).await.context("the stream is closed")?;
            sent += 1;
            // More may be due; answers are read when nothing is.
            if sent < load.window {
                continue;
            }
        }
        let waits = due.is_some() && state.flying.len() < load.window;
        tokio::select! {
            answer = answers.message() => {
                let answer = answer.context("the stream broke")?.context("the stream ended")?;
                take(load, state, &answer)?;
                sent -= 1;
            }
            () = tokio::time::sleep_until(due.unwrap_or(now)), if waits => {}
            _ = phases.changed() => {}
        }
    }
}

/// The first moment that an agent's turn comes and that has not passed.
fn first_due(load: &Load, state: &State, interval: Duration, start: Instant) -> Instant {
    let turn = start + interval.mul_f64(state.number as f64 / load.agents as f64);
    let passed = Instant::now().saturating_duration_since(turn).as_secs_f64();
    let rounds = (passed / interval.as_secs_f64().max(1e-6)).ceil();
    turn + interval.mul_f64(rounds)
}

/// Takes the answer to the oldest batch on the way.
fn take(load: &Load, state: &mut State, answer: &Ack) -> Result<()> {
    let Some(oldest) = state.flying.front() else {
        bail!("an answer to nothing");
    };
    if answer.batch_seq != oldest.seq {
        bail!(
            "batch {} is due, {} was answered",
            oldest.seq,
            answer.batch_seq
        );
    }
    match answer.outcome() {
        Outcome::Stored => {}
        Outcome::Duplicate => {
            load.duplicates.fetch_add(1, Ordering::Relaxed);
        }
        Outcome::Retry => {
            load.put_off.fetch_add(1, Ordering::Relaxed);
            bail!("put off: {}", answer.message);
        }
        Outcome::Rejected | Outcome::Unspecified => {
            load.rejected.fetch_add(1, Ordering::Relaxed);
            bail!("rejected: {}", answer.message);
        }
    }
    load.latencies.add(oldest.since.elapsed());
    let prepared = load.prepared(oldest.seq);
    load.rows[&prepared.table].fetch_add(prepared.rows, Ordering::Relaxed);
    load.acknowledged.fetch_add(1, Ordering::Relaxed);
    load.highest[state.number].store(oldest.seq, Ordering::Relaxed);
    state.flying.pop_front();
    Ok(())
}
