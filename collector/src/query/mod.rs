//! The gate: every question of every door passes here.
//!
//! Invariants:
//! - read-only: what is not a query is refused before it runs (`vramscope_queries::session`);
//! - each query sees one state of all tables, with everything committed before it came;
//! - memory, spilled bytes, time and rows are bounded, for one query and for all together; a query
//!   that meets a limit ends with an error, never with a shorter answer ([`memory`], [`pool`]);
//! - places are shared out fairly between callers ([`line`]);
//! - a query can be cancelled by whoever asked, by an administrator, and by going away;
//! - each question makes one row of `query_log`, however it ends ([`log`]).

pub mod bind;
pub mod failure;
pub mod line;
pub mod log;
mod loss;
pub mod memory;
pub mod pool;
mod rows;
mod running;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::{DataType, SchemaRef};
use async_trait::async_trait;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::SessionContext;
use vramscope_queries::Error;
use vramscope_queries::folder::Folder;
use vramscope_queries::quality::Loss;
use vramscope_queries::session::{self, Limits};
use vramscope_queries::texts;

use crate::access::Caller;
use crate::access::filter::Filters;
use log::QueryLog;
use loss::Losses;
use memory::{AllMemory, QueryMemory};
use pool::{Lane, Wait};
use running::Queries;

pub use rows::Rows;

/// The longest statement that is looked at: 1 MiB.
pub const MAX_SQL_BYTES: usize = 1 << 20;

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

impl Door {
    /// As `query_log.door` and the metrics say it.
    pub fn name(self) -> &'static str {
        match self {
            Door::Flight => "flight",
            Door::Postgres => "postgres",
            Door::Http => "http",
        }
    }
}

/// Names one question, and cannot be guessed. 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueryId(u128);

impl QueryId {
    /// A new one.
    pub fn new() -> QueryId {
        QueryId(rand::random())
    }
}

impl Default for QueryId {
    fn default() -> QueryId {
        QueryId::new()
    }
}

impl fmt::Display for QueryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for QueryId {
    type Err = String;

    fn from_str(text: &str) -> Result<QueryId, String> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits
            .then(|| u128::from_str_radix(text, 16).ok())
            .flatten()
            .map(QueryId)
            .ok_or_else(|| format!("{text:?} is no query id: 32 hexadecimal digits"))
    }
}

/// One question.
#[derive(Debug, Clone)]
pub struct Question {
    /// Its name, to cancel it by.
    pub id: QueryId,
    /// Who asks.
    pub caller: Caller,
    /// By which door.
    pub door: Door,
    /// One SQL statement.
    pub sql: String,
    /// Time that the client allows, if it is less than the collector's own limit.
    pub time: Option<Duration>,
    /// Rows that the client allows, if they are less than the collector's own limit.
    pub rows: Option<u64>,
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
    /// A question with a new id, and no limits but the collector's.
    pub fn new(caller: Caller, door: Door, sql: impl Into<String>) -> Question {
        Question {
            id: QueryId::new(),
            caller,
            door,
            sql: sql.into(),
            time: None,
            rows: None,
            planner: None,
        }
    }

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

    /// Refuses what needs no plan to be refused.
    fn check(&self) -> Result<(), Error> {
        if !self.caller.may_read() {
            let name = &self.caller.name;
            return Err(Error::Forbidden(format!("{name} may not ask questions")));
        }
        if self.sql.len() > MAX_SQL_BYTES {
            return Err(Error::TooLong {
                bytes: self.sql.len(),
                limit: MAX_SQL_BYTES,
            });
        }
        Ok(())
    }
}

/// What a question's answer will look like.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Its columns.
    pub columns: SchemaRef,
    /// Types of the parameters `$1`, `$2`, … that the text leaves open; `None` if nothing says.
    pub parameters: Vec<Option<DataType>>,
}

/// The most that queries may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Time of one query.
    pub time: Duration,
    /// Rows of one answer.
    pub rows: u64,
    /// Memory of all queries together, in bytes.
    pub memory_bytes: usize,
    /// Memory of one query, in bytes.
    pub share_bytes: usize,
}

/// Answers questions. Clones share everything.
#[derive(Clone)]
pub struct Gate(Arc<Shared>);

struct Shared {
    folder: Arc<Folder>,
    lane: Lane,
    bounds: Bounds,
    memory: Arc<AllMemory>,
    queries: Queries,
    log: QueryLog,
    losses: Losses,
    filters: Filters,
}

impl Gate {
    /// A gate to an open data folder.
    pub fn new(folder: Arc<Folder>, lane: Lane, bounds: Bounds, log: QueryLog) -> Gate {
        Gate(Arc::new(Shared {
            folder,
            lane,
            bounds,
            memory: AllMemory::new(bounds.memory_bytes),
            queries: Queries::default(),
            log,
            losses: Losses::default(),
            filters: Filters::default(),
        }))
    }

    /// What the caller sees: tables, views, functions. For catalogs; queries go through
    /// [`Gate::answer`].
    pub async fn session(&self, caller: &Caller) -> Result<SessionContext, Error> {
        let (gate, of) = (self.clone(), caller.clone());
        let work = async move {
            let memory = gate.share();
            gate.session_with(&of, &memory).await
        };
        self.0.lane.run(self.wait(caller), work).await
    }

    /// The columns of a question's answer.
    pub async fn schema(&self, question: &Question) -> Result<SchemaRef, Error> {
        Ok(self.shape(question).await?.columns)
    }

    /// The columns of a question's answer, and its parameters. A question that fails here makes a
    /// row of `query_log`; one that does not makes it when it is answered.
    pub async fn shape(&self, question: &Question) -> Result<Shape, Error> {
        let shape = self.try_shape(question).await;
        if let Err(error) = &shape {
            self.0.log.begin(question).failed(error);
        }
        shape
    }

    async fn try_shape(&self, question: &Question) -> Result<Shape, Error> {
        question.check()?;
        let (gate, of) = (self.clone(), question.clone());
        let work = async move {
            let memory = gate.share();
            let session = gate.session_with(&of.caller, &memory).await?;
            shape_of(&of.plan(&session).await?)
        };
        let time = self.time_of(question);
        let registered = self.0.queries.register(question);
        let wait = Wait::new(&question.caller.name, time, registered.cancelled());
        self.0.lane.run(wait, work).await
    }

    /// A question's answer.
    pub async fn answer(&self, question: Question) -> Result<Rows, Error> {
        let mut record = self.0.log.begin(&question);
        match self.try_answer(question, &record).await {
            Ok((running, registered)) => Ok(Rows::new(running, record, registered)),
            Err(error) => {
                record.failed(&error);
                Err(error)
            }
        }
    }

    async fn try_answer(
        &self,
        question: Question,
        record: &log::Record,
    ) -> Result<(pool::Running, running::Registered), Error> {
        question.check()?;
        let registered = self.0.queries.register(&question);
        let memory = self.share();
        record.has_memory(&memory);
        let started_plan = Arc::clone(&record.plan);
        // The pool ends what takes too long, also what never pauses.
        let limits = Limits {
            time: None,
            rows: Some(self.rows_of(&question)),
        };
        let time = self.time_of(&question);
        let wait = Wait::new(&question.caller.name, time, registered.cancelled());
        let gate = self.clone();
        let work = async move {
            let session = gate.session_with(&question.caller, &memory).await?;
            let plan = question.plan(&session).await?;
            let started = session::start(&session, plan, limits).await?;
            let _ = started_plan.set(started.plan);
            Ok(started.rows)
        };
        let running = self.0.lane.stream(wait, work).await?;
        Ok((running, registered))
    }

    /// Cancels a question, if it runs or waits and the caller may: it is theirs, or they are an
    /// administrator. Whether it did.
    pub fn cancel(&self, caller: &Caller, id: QueryId) -> bool {
        self.0.queries.cancel(caller, id)
    }

    /// What was lost in everything recorded that a caller sees (`None`: everything), at most ten
    /// seconds old. `None` if it is not known.
    pub async fn loss(&self, caller: Option<&Caller>) -> Option<Loss> {
        self.0.losses.get(self, caller).await
    }

    /// Numbers for the metrics.
    pub fn load(&self) -> Load {
        let (running, waiting) = self.0.lane.counts();
        Load {
            running,
            waiting,
            memory_bytes: self.0.memory.held(),
            spilled_bytes: self.0.folder.spilled_bytes(),
        }
    }

    /// A session over the folder's tables as they are now, with a query's own memory.
    async fn session_with(
        &self,
        caller: &Caller,
        memory: &Arc<QueryMemory>,
    ) -> Result<SessionContext, Error> {
        let all = self.0.folder.session().await?;
        let shared = self.0.filters.apply(all, caller).await?;
        let share = self.0.bounds.share_bytes;
        session::with_memory(&shared, Arc::clone(memory) as _, share)
    }

    fn share(&self) -> Arc<QueryMemory> {
        QueryMemory::new(self.0.bounds.share_bytes, &self.0.memory)
    }

    /// The longest that something without a question may take.
    fn wait(&self, caller: &Caller) -> Wait {
        let (_, never) = tokio::sync::watch::channel(false);
        Wait::new(&caller.name, self.0.bounds.time, never)
    }

    fn time_of(&self, question: &Question) -> Duration {
        let most = self.0.bounds.time;
        question.time.map_or(most, |wanted| wanted.min(most))
    }

    fn rows_of(&self, question: &Question) -> usize {
        let most = self.0.bounds.rows;
        let rows = question.rows.map_or(most, |wanted| wanted.min(most));
        usize::try_from(rows).unwrap_or(usize::MAX)
    }
}

/// What queries take now.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Queries that run.
    pub running: usize,
    /// Questions that wait for a place.
    pub waiting: usize,
    /// Memory they have reserved, in bytes.
    pub memory_bytes: usize,
    /// What they have spilled, in bytes.
    pub spilled_bytes: u64,
}

/// Parameters are `$1`, `$2`, …: what lies between two that are named counts too.
fn shape_of(plan: &LogicalPlan) -> Result<Shape, Error> {
    let mut parameters = Vec::new();
    for (name, data_type) in plan.get_parameter_types()? {
        let number = name.strip_prefix('$').and_then(|n| n.parse::<u16>().ok());
        let Some(number) = number.filter(|number| *number > 0).map(usize::from) else {
            let text = format!("parameter {name} is not $1, $2 and so on");
            return Err(datafusion::error::DataFusionError::Plan(text).into());
        };
        if parameters.len() < number {
            parameters.resize(number, None);
        }
        parameters[number - 1] = data_type.as_ref().map(texts::plain_type);
    }
    Ok(Shape {
        columns: texts::plain_schema(plan.schema().inner()),
        parameters,
    })
}

/// Makes the folder that queries spill to, and empties it: what is in it is of a run that ended
/// without cleaning up.
pub fn spill_folder(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        // The engine's own names; nothing else is touched.
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with("datafusion-")
        {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
