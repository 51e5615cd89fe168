//! What each agent has stored so far: what decides between STORED, DUPLICATE and a conflict.
//!
//! Invariants:
//! - the highest number is that of what lies in the log and of the agent's transaction in every
//!   table (all tables share one line of numbers). It is looked up when an agent is first seen,
//!   log before tables: a batch moves from the log to a table and never back, so in this order it
//!   cannot be missed;
//! - of the newest [`REMEMBERED`] batches of an agent the checksums are known, so that other bytes
//!   under a known name are found out. That is more than an agent has under way at a time; a
//!   resend from further back is taken for what it says it is.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use crate::ingest::wal::Wal;
use crate::lake::{Lake, LakeError};

/// Batches per agent whose checksum is remembered. Agents have 8 under way.
pub const REMEMBERED: usize = 32;

/// What is known of the agents.
#[derive(Debug)]
pub struct Marks {
    wal: Arc<Wal>,
    lake: Arc<Lake>,
    agents: Mutex<HashMap<String, Arc<Mark>>>,
}

impl Marks {
    /// Knows nothing yet.
    pub fn new(wal: Arc<Wal>, lake: Arc<Lake>) -> Marks {
        Marks {
            wal,
            lake,
            agents: Mutex::new(HashMap::new()),
        }
    }

    /// Tells the checksum of a batch that was stored before the start.
    pub fn remember(&self, agent: &str, seq: u64, crc32: u32) {
        // Nobody else has the marks before the start is done.
        if let Ok(mut known) = self.of(agent).known.try_lock() {
            known.insert(seq, crc32);
        }
    }

    /// The mark of an agent, whose id was checked.
    pub(super) fn of(&self, agent: &str) -> Arc<Mark> {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mark) = agents.get(agent) {
            return Arc::clone(mark);
        }
        let mark = Arc::new(Mark {
            agent: agent.to_string(),
            wal: Arc::clone(&self.wal),
            lake: Arc::clone(&self.lake),
            known: tokio::sync::Mutex::default(),
        });
        agents.insert(agent.to_string(), Arc::clone(&mark));
        mark
    }
}

#[derive(Debug)]
pub(super) struct Mark {
    agent: String,
    wal: Arc<Wal>,
    lake: Arc<Lake>,
    known: tokio::sync::Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The highest durable number; `None` until it was looked up.
    highest: Option<u64>,
    /// The highest number that was rejected: no gap.
    rejected: u64,
    /// Numbers and checksums, ascending.
    newest: VecDeque<(u64, u32)>,
}

impl Known {
    fn insert(&mut self, seq: u64, crc32: u32) {
        match self.newest.binary_search_by_key(&seq, |(seq, _)| *seq) {
            Ok(at) => self.newest[at].1 = crc32,
            Err(at) => self.newest.insert(at, (seq, crc32)),
        }
        if self.newest.len() > REMEMBERED {
            self.newest.pop_front();
        }
    }
}

/// What a batch is, by its name and checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Never seen. So many numbers before it are missing.
    New { missing: u64 },
    /// Was stored before.
    Duplicate,
    /// Other bytes were stored under its name.
    Conflict { stored_crc32: u32 },
}

impl Mark {
    pub(super) async fn lock(&self) -> Held<'_> {
        Held {
            mark: self,
            known: self.known.lock().await,
        }
    }
}

/// A mark, held: no other batch of the agent is handled meanwhile.
pub(super) struct Held<'a> {
    mark: &'a Mark,
    known: tokio::sync::MutexGuard<'a, Known>,
}

impl Held<'_> {
    /// What a batch is.
    pub(super) async fn judge(&mut self, seq: u64, crc32: u32) -> Result<Verdict, LakeError> {
        let highest = self.highest().await?;
        if seq > highest {
            let seen = highest.max(self.known.rejected);
            // An agent's first batch here tells nothing about those before it: it may have had
            // another collector.
            let missing = if highest == 0 {
                0
            } else {
                (seq - 1).saturating_sub(seen)
            };
            return Ok(Verdict::New { missing });
        }
        let newest = &self.known.newest;
        let stored = newest
            .binary_search_by_key(&seq, |(seq, _)| *seq)
            .map(|at| newest[at].1);
        Ok(match stored {
            Ok(stored_crc32) if stored_crc32 != crc32 => Verdict::Conflict { stored_crc32 },
            _ => Verdict::Duplicate,
        })
    }

    async fn highest(&mut self) -> Result<u64, LakeError> {
        if let Some(known) = self.known.highest {
            return Ok(known);
        }
        let logged = self.mark.wal.highest(&self.mark.agent).unwrap_or(0);
        let committed = self.mark.lake.highest_committed(&self.mark.agent).await?;
        let highest = logged.max(committed);
        self.known.highest = Some(highest);
        Ok(highest)
    }

    /// Says that a batch is durable now.
    pub(super) fn raise(&mut self, seq: u64, crc32: u32) {
        self.known.highest = Some(seq);
        self.known.insert(seq, crc32);
    }

    /// Says that a batch was rejected for good.
    pub(super) fn reject(&mut self, seq: u64) {
        self.known.rejected = seq.max(self.known.rejected);
    }
}
