//! The highest durable `batch_seq` of each agent: what decides between STORED and DUPLICATE.
//!
//! Invariant: a mark is the highest of what waits in the log and of the agent's transaction in
//! every table (all tables share one line of numbers). It is looked up when an agent is first
//! seen, log before tables: a batch moves from the log to a table and never back, so in this
//! order it cannot be missed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use vramscope_wire::Table;

use crate::ingest::wal::Wal;
use crate::lake::{Lake, LakeError};

pub(super) struct Marks {
    wal: Arc<Wal>,
    lake: Arc<Lake>,
    agents: Mutex<HashMap<String, Arc<Mark>>>,
}

impl Marks {
    pub(super) fn new(wal: Arc<Wal>, lake: Arc<Lake>) -> Marks {
        Marks {
            wal,
            lake,
            agents: Mutex::new(HashMap::new()),
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
            highest: tokio::sync::Mutex::new(None),
        });
        agents.insert(agent.to_string(), Arc::clone(&mark));
        mark
    }
}

pub(super) struct Mark {
    agent: String,
    wal: Arc<Wal>,
    lake: Arc<Lake>,
    /// `None` until it was looked up.
    highest: tokio::sync::Mutex<Option<u64>>,
}

impl Mark {
    pub(super) async fn lock(&self) -> Held<'_> {
        Held {
            mark: self,
            highest: self.highest.lock().await,
        }
    }
}

/// A mark, held: no other batch of the agent is handled meanwhile.
pub(super) struct Held<'a> {
    mark: &'a Mark,
    highest: tokio::sync::MutexGuard<'a, Option<u64>>,
}

impl Held<'_> {
    /// Whether a batch is durable, as far as is known. Where collectors share a lake, others may have
    /// it: what is taken once more is found when it is committed.
    pub(super) async fn has(&mut self, table: Table, seq: u64) -> Result<bool, LakeError> {
        let Some(shared) = self.mark.lake.shared() else {
            return Ok(seq <= self.highest().await?);
        };
        let agent = &self.mark.agent;
        if shared.has_taken(agent, seq) {
            return Ok(true);
        }
        if !shared.goes_on(agent, seq) {
            self.mark.lake.glance(table).await;
        }
        Ok(shared.holds(table, agent, seq))
    }

    /// The highest durable number, 0 if there is none.
    pub(super) async fn highest(&mut self) -> Result<u64, LakeError> {
        if let Some(known) = *self.highest {
            return Ok(known);
        }
        let logged = self.mark.wal.highest(&self.mark.agent).unwrap_or(0);
        let committed = self.mark.lake.highest_committed(&self.mark.agent).await?;
        let highest = logged.max(committed);
        *self.highest = Some(highest);
        Ok(highest)
    }

    /// Says that `seq` is durable now.
    pub(super) fn raise(&mut self, seq: u64) {
        if let Some(shared) = self.mark.lake.shared() {
            shared.took(&self.mark.agent, seq);
        }
        *self.highest = Some(seq);
    }
}
