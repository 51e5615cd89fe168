//! The gate: every question of every door passes here.
//!
//! Invariants:
//! - read-only: what is not a query is refused before it runs (`vramscope_queries::session`);
//! - each query sees one state of all tables, with everything committed before it came;
//! - memory (shared by all queries), time and rows are bounded; a query that meets a limit ends
//!   with an error, never with a shorter answer ([`pool`]).

pub mod pool;

use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::SessionContext;
use vramscope_queries::Error;
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits};

use crate::access::Caller;
use pool::{Lane, Rows};

/// The protocol that a question came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// Arrow Flight SQL.
    Flight,
    /// The PostgreSQL wire protocol.
    Postgres,
    /// `POST /api/v1/sql`.
    Http,
}

/// One question.
#[derive(Debug, Clone)]
pub struct Question {
    /// Who asks.
    pub caller: Caller,
    /// By which door.
    pub door: Door,
    /// One SQL statement.
    pub sql: String,
    /// Time that the client allows, if it is less than the collector's own limit.
    pub time: Option<Duration>,
    /// How the text becomes a plan; `None` is the engine's own SQL without parameters.
    pub planner: Option<Arc<dyn Planner>>,
}

/// A way from a question's text to its plan: another dialect, a catalog of its own, parameters
/// that are bound. What it returns is checked like every plan: it may only read.
#[async_trait]
pub trait Planner: std::fmt::Debug + Send + Sync {
    /// Plans the text over the session's tables. The session is shared: it must stay as it is.
    async fn plan(&self, session: &SessionContext, sql: &str) -> Result<LogicalPlan, Error>;
}

impl Question {
    async fn plan(&self, session: &SessionContext) -> Result<LogicalPlan, Error> {
        match &self.planner {
            None => session::plan(session, &self.sql).await,
            Some(planner) => {
                let plan = planner.plan(session, &self.sql).await?;
                session::check_read_only(&plan)?;
                Ok(plan)
            }
        }
    }
}

/// Answers questions. Clones share everything.
#[derive(Clone)]
pub struct Gate {
    folder: Arc<Folder>,
    lane: Lane,
    time: Duration,
    max_rows: usize,
}

impl Gate {
    /// A gate to an open data folder. `time` and `max_rows` are the most that one query may take.
    pub fn new(folder: Arc<Folder>, lane: Lane, time: Duration, max_rows: u64) -> Gate {
        Gate {
            folder,
            lane,
            time,
            max_rows: usize::try_from(max_rows).unwrap_or(usize::MAX),
        }
    }

    /// What the caller sees: tables, views, functions. For catalogs; queries go through
    /// [`Gate::answer`].
    pub async fn session(&self, _caller: &Caller) -> Result<SessionContext, Error> {
        let folder = Arc::clone(&self.folder);
        self.lane
            .run(self.time, async move { folder.session().await })
            .await
    }

    /// The columns of a question's answer.
    pub async fn schema(&self, question: &Question) -> Result<SchemaRef, Error> {
        let time = self.time_of(question);
        let (folder, question) = (Arc::clone(&self.folder), question.clone());
        let plan = async move {
            let session = folder.session().await?;
            let plan = question.plan(&session).await?;
            Ok(Arc::clone(plan.schema().inner()))
        };
        self.lane.run(time, plan).await
    }

    /// A question's answer.
    pub async fn answer(&self, question: Question) -> Result<Rows, Error> {
        let folder = Arc::clone(&self.folder);
        let time = self.time_of(&question);
        // The pool ends what takes too long, also what never pauses.
        let limits = Limits {
            time: None,
            rows: Some(self.max_rows),
        };
        let work = async move {
            let session = folder.session().await?;
            let plan = question.plan(&session).await?;
            session::execute(&session, plan, limits).await
        };
        self.lane.stream(time, work).await
    }

    fn time_of(&self, question: &Question) -> Duration {
        question
            .time
            .map_or(self.time, |wanted| wanted.min(self.time))
    }
}
