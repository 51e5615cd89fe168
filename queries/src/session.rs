//! DataFusion sessions, bounded and read-only.
//!
//! Invariants:
//! - only queries run; what would write, create, drop, copy or change a setting is refused
//!   before planning goes on to execution;
//! - all sessions of one [`Runtime`] share one memory pool, so many queries together stay
//!   within the limit; sorts, joins and aggregations spill to the temporary folder before they
//!   fail;
//! - texts of an answer are `Utf8`, whatever they were inside ([`texts`]): a lake, a trace and the
//!   wire's schemas agree on types.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result as DataFusionResult};
use datafusion::execution::context::SessionState;
use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::memory_pool::{
    FairSpillPool, MemoryLimit, MemoryPool, TrackConsumersPool,
};
use datafusion::execution::object_store::ObjectStoreRegistry;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::execution::{SendableRecordBatchStream, SessionStateBuilder};
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::physical_plan::{ExecutionPlan, RecordBatchStream, execute_stream};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion::sql::parser::{DFParser, Statement};
use futures::{Stream, StreamExt};

use crate::engine::Engine;
use crate::rules::rule;
use crate::windows::book_windows;
use crate::yielding::yield_after_joins;
use crate::{Error, cancel, complexity, functions, growth, leaks, projections, texts};

/// Memory for all queries together, if nothing else is said: 2 GiB.
pub const DEFAULT_MEMORY_BYTES: usize = 2 << 30;
/// Time one query may take, if nothing else is said: 5 minutes.
pub const DEFAULT_TIME: Duration = Duration::from_secs(300);

/// Bounds that all sessions of a runtime share.
#[derive(Debug, Clone)]
pub struct Options {
    /// Memory for all queries together, in bytes.
    pub memory_bytes: usize,
    /// Where queries spill to; `None` is the system's temporary folder.
    pub temp_dir: Option<PathBuf>,
    /// What all queries together may spill, in bytes; `None` is the engine's own limit, 100 GB.
    pub spill_bytes: Option<u64>,
    /// Go on without damaged files of a trace instead of refusing it.
    pub skip_damaged: bool,
    /// What computes.
    pub engine: Engine,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            memory_bytes: DEFAULT_MEMORY_BYTES,
            temp_dir: None,
            spill_bytes: None,
            skip_damaged: false,
            engine: Engine::Local,
        }
    }
}

/// Bounds of one query.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time for planning, and again for the answer from its start to its last row; `None` is
    /// without end.
    pub time: Option<Duration>,
    /// Rows of the answer; one more is [`Error::TooManyRows`], after the rows before it were
    /// handed out.
    pub rows: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            time: Some(DEFAULT_TIME),
            rows: None,
        }
    }
}

/// Makes what sessions share: memory pool, spill folder, caches.
pub fn runtime(options: &Options) -> Result<Arc<RuntimeEnv>, Error> {
    Ok(bounded(options).build_arc()?)
}

/// As [`runtime`], with no other object stores than these.
pub fn runtime_over(
    options: &Options,
    stores: Arc<dyn ObjectStoreRegistry>,
) -> Result<Arc<RuntimeEnv>, Error> {
    let builder = bounded(options).with_object_store_registry(stores);
    Ok(builder.build_arc()?)
}

fn bounded(options: &Options) -> RuntimeEnvBuilder {
    let consumers_named_in_errors = NonZeroUsize::MIN.saturating_add(2);
    let pool = TrackConsumersPool::new(
        FairSpillPool::new(options.memory_bytes),
        consumers_named_in_errors,
    );
    let mut disk = DiskManagerBuilder::default();
    if let Some(dir) = &options.temp_dir {
        disk = disk.with_mode(DiskManagerMode::Directories(vec![dir.clone()]));
    }
    if let Some(bytes) = options.spill_bytes {
        disk = disk.with_max_temp_directory_size(bytes);
    }
    RuntimeEnvBuilder::new()
        .with_memory_pool(Arc::new(pool))
        .with_disk_manager_builder(disk)
        // DataFusion's list of a folder's files never expires: a file added after the first
        // query would stay invisible.
        .with_object_list_cache_limit(0)
}

/// Sets the rows that operators work on at a time, for a query that has so much memory. A sort that
/// spilled holds a batch of every run while it merges them, and of rows with long texts 8,192 (the
/// engine's own number) are megabytes: with little memory they are fewer.
fn with_batch_rows(config: SessionConfig, memory_bytes: usize) -> SessionConfig {
    const BYTES_PER_ROW: usize = 128 << 10;
    config.with_batch_size((memory_bytes / BYTES_PER_ROW).clamp(512, 8192))
}

/// A session without tables on a shared runtime.
pub fn session_on(runtime: &Arc<RuntimeEnv>) -> SessionContext {
    let mut config = SessionConfig::new().with_information_schema(true);
    let options = config.options_mut();
    options.execution.parquet.schema_force_view_types = false;
    options.sql_parser.map_string_types_to_utf8view = false;
    if let MemoryLimit::Finite(bytes) = runtime.memory_pool.memory_limit() {
        config = with_batch_rows(config, bytes);
    }
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_runtime_env(Arc::clone(runtime))
        .with_default_features()
        .with_physical_optimizer_rule(rule("yield_after_joins", yield_after_joins))
        .with_physical_optimizer_rule(rule("book_windows", book_windows));
    let state = projections::keep_apart(functions::plan_with(state));
    let state = cancel::look_in_rules(state);
    let state = functions::book(state, &runtime.memory_pool);
    let session = SessionContext::new_with_state(state.build());
    functions::register(&session);
    leaks::register(&session);
    session
}

/// The same session with memory of its own, so many bytes of it.
pub fn with_memory(
    session: &SessionContext,
    pool: Arc<dyn MemoryPool>,
    bytes: usize,
) -> Result<SessionContext, Error> {
    let runtime = RuntimeEnvBuilder::from_runtime_env(&session.runtime_env())
        .with_memory_pool(Arc::clone(&pool))
        .build_arc()?;
    let mut state = session.state();
    let config = state.config_mut();
    *config = with_batch_rows(config.clone(), bytes);
    let state = SessionStateBuilder::new_from_existing(state).with_runtime_env(runtime);
    let state = functions::book(state, &pool).build();
    Ok(SessionContext::new_with_state(state))
}

/// A session without tables on a runtime of its own.
pub fn session(options: &Options) -> Result<SessionContext, Error> {
    Ok(session_on(&runtime(options)?))
}

/// Splits a text into its statements, unless they are too deep to be planned. Empty ones (`;;`) are
/// dropped.
pub fn parse(sql: &str) -> Result<Vec<Statement>, Error> {
    complexity::check(sql)?;
    Ok(DFParser::parse_sql(sql)?.into_iter().collect())
}

/// Plans one statement and refuses it unless it only reads.
pub async fn plan(session: &SessionContext, sql: &str) -> Result<LogicalPlan, Error> {
    let mut statements = parse(sql)?;
    if statements.len() != 1 {
        return Err(Error::StatementCount(statements.len()));
    }
    plan_statement(session, statements.remove(0)).await
}

/// As [`plan`], for a statement that is parsed already.
pub async fn plan_statement(
    session: &SessionContext,
    statement: Statement,
) -> Result<LogicalPlan, Error> {
    plan_in(&session.state(), statement).await
}

/// As [`plan_statement`], over the tables of a state.
pub(crate) async fn plan_in(
    state: &SessionState,
    statement: Statement,
) -> Result<LogicalPlan, Error> {
    refuse_by_syntax(&statement)?;
    growth::check_statement(state, &statement).await?;
    let plan = state.statement_to_plan(statement).await?;
    // Before anything walks through it.
    growth::check(&plan)?;
    check_read_only(&plan)?;
    Ok(plan)
}

/// Refuses a plan that holds anything but queries, at any depth (also under EXPLAIN).
pub fn check_read_only(plan: &LogicalPlan) -> Result<(), Error> {
    let mut refused = None;
    plan.apply_with_subqueries(|node| {
        let name = match node {
            LogicalPlan::Ddl(ddl) => ddl.name().to_string(),
            LogicalPlan::Dml(dml) => dml.op.to_string(),
            LogicalPlan::Copy(_) => "COPY".to_string(),
            LogicalPlan::Statement(statement) => statement.name().to_string(),
            _ => return Ok(TreeNodeRecursion::Continue),
        };
        refused = Some(name);
        Ok(TreeNodeRecursion::Stop)
    })?;
    match refused {
        Some(name) => Err(Error::NotAQuery(name)),
        None => Ok(()),
    }
}

/// Statements that need not be planned to be refused. Planning some of them already touches
/// files (CREATE EXTERNAL TABLE, COPY), and planning others fails with a text about something
/// else (INSERT into a view).
fn refuse_by_syntax(statement: &Statement) -> Result<(), Error> {
    use datafusion::sql::sqlparser::ast::Statement as Sql;
    let refused = match statement {
        Statement::CreateExternalTable(_) => Some("CREATE EXTERNAL TABLE".to_string()),
        Statement::CopyTo(_) => Some("COPY".to_string()),
        Statement::Reset(_) => Some("RESET".to_string()),
        Statement::Explain(explain) => return refuse_by_syntax(&explain.statement),
        Statement::Statement(sql) => match sql.as_ref() {
            Sql::Query(_)
            | Sql::ShowVariable { .. }
            | Sql::ShowTables { .. }
            | Sql::ShowColumns { .. }
            | Sql::ShowFunctions { .. }
            | Sql::ShowCreate { .. }
            | Sql::ExplainTable { .. }
            | Sql::Explain { .. } => None,
            other => Some(leading_words(&other.to_string())),
        },
    };
    match refused {
        Some(name) => Err(Error::NotAQuery(name)),
        None => Ok(()),
    }
}

/// The keywords a statement starts with: `CREATE TABLE`, `SET`, `DROP VIEW`.
fn leading_words(sql: &str) -> String {
    let keywords: Vec<&str> = sql
        .split_whitespace()
        .take(2)
        .take_while(|word| word.chars().all(|c| c.is_ascii_uppercase()))
        .collect();
    if keywords.is_empty() {
        "this statement".to_string()
    } else {
        keywords.join(" ")
    }
}

/// Answers one query within its limits. A query that computes for long without a pause notices
/// its time limit only then, and keeps its thread: whoever must stay responsive runs queries on
/// threads of their own, and keeps the limits on the other side with [`limited`].
pub async fn query(
    session: &SessionContext,
    sql: &str,
    limits: Limits,
) -> Result<SendableRecordBatchStream, Error> {
    // What its constants take is booked as long as its functions live.
    let state = SessionStateBuilder::new_from_existing(session.state());
    let state = functions::book(state, &session.runtime_env().memory_pool);
    let session = SessionContext::new_with_state(state.build());
    let plan = within(limits.time, plan(&session, sql)).await?;
    execute(&session, plan, limits).await
}

/// Runs a plan, if it only reads. The time limit starts here.
pub async fn execute(
    session: &SessionContext,
    plan: LogicalPlan,
    limits: Limits,
) -> Result<SendableRecordBatchStream, Error> {
    Ok(start(session, plan, limits).await?.rows)
}

/// A query that runs.
pub struct Started {
    /// Its rows.
    pub rows: SendableRecordBatchStream,
    /// What produces them; its metrics grow while it runs.
    pub plan: Arc<dyn ExecutionPlan>,
}

/// As [`execute`], for who wants to look at the plan's metrics.
pub async fn start(
    session: &SessionContext,
    plan: LogicalPlan,
    limits: Limits,
) -> Result<Started, Error> {
    check_read_only(&plan)?;
    let started = async {
        let mut state = session.state();
        let plan = state.optimize(&plan)?;
        let rows = rows_of_constants(&plan)?.min(state.config().batch_size());
        *state.config_mut() = state.config().clone().with_batch_size(rows);
        let planner = Arc::clone(state.query_planner());
        let plan = planner.create_physical_plan(&plan, &state).await?;
        let rows = execute_stream(Arc::clone(&plan), state.task_ctx())?;
        let rows = texts::plain_rows(rows);
        Ok(Started { rows, plan })
    };
    let Started { rows, plan } = within(limits.time, started).await?;
    let rows = limited(rows, limits);
    Ok(Started { rows, plan })
}

/// Rows that may be worked on at a time in a plan with such constants: the engine repeats a constant
/// for every row of a batch.
fn rows_of_constants(plan: &LogicalPlan) -> DataFusionResult<usize> {
    const BYTES_AT_A_TIME: usize = 16 << 20;
    let mut largest = 1;
    plan.apply_with_subqueries(|node| {
        node.apply_expressions(|expression| {
            expression.apply(|part| {
                if let Expr::Literal(value, _) = part {
                    largest = largest.max(value.size());
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    Ok((BYTES_AT_A_TIME / largest).max(1))
}

/// Puts limits on rows that come from elsewhere. The time starts here.
pub fn limited(rows: SendableRecordBatchStream, limits: Limits) -> SendableRecordBatchStream {
    let deadline = limits
        .time
        .map(|time| (tokio::time::Instant::now() + time, time));
    Box::pin(Limited::new(rows, deadline, limits.rows))
}

/// Gives up on some work after a time.
pub async fn within<T>(
    time: Option<Duration>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match time {
        None => work.await,
        Some(time) => match tokio::time::timeout(time, work).await {
            Ok(result) => result,
            Err(_) => Err(Error::TimedOut(time)),
        },
    }
}

/// Hands out an answer's batches until a limit is met.
struct Limited {
    inner: SendableRecordBatchStream,
    schema: SchemaRef,
    deadline: Option<(Pin<Box<tokio::time::Sleep>>, Duration)>,
    row_limit: Option<usize>,
    rows_left: usize,
    done: bool,
    pending_error: Option<Error>,
}

impl Limited {
    fn new(
        inner: SendableRecordBatchStream,
        deadline: Option<(tokio::time::Instant, Duration)>,
        row_limit: Option<usize>,
    ) -> Self {
        Limited {
            schema: inner.schema(),
            inner,
            deadline: deadline.map(|(at, time)| (Box::pin(tokio::time::sleep_until(at)), time)),
            row_limit,
            rows_left: row_limit.unwrap_or(usize::MAX),
            done: false,
            pending_error: None,
        }
    }

    fn fail(&mut self, error: Error) -> Poll<Option<DataFusionResult<RecordBatch>>> {
        self.done = true;
        Poll::Ready(Some(Err(DataFusionError::from(error))))
    }
}

impl Stream for Limited {
    type Item = DataFusionResult<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.done {
            return Poll::Ready(None);
        }
        if let Some(error) = self.pending_error.take() {
            return self.fail(error);
        }
        if let Some((sleep, time)) = &mut self.deadline
            && sleep.as_mut().poll(cx).is_ready()
        {
            let error = Error::TimedOut(*time);
            return self.fail(error);
        }
        match self.inner.poll_next_unpin(cx) {
            Poll::Ready(Some(Ok(batch))) => {
                if batch.num_rows() <= self.rows_left {
                    self.rows_left -= batch.num_rows();
                    return Poll::Ready(Some(Ok(batch)));
                }
                let error = Error::TooManyRows(self.row_limit.unwrap_or(usize::MAX));
                if self.rows_left == 0 {
                    return self.fail(error);
                }
                self.pending_error = Some(error);
                Poll::Ready(Some(Ok(batch.slice(0, self.rows_left))))
            }
            other => other,
        }
    }
}

impl RecordBatchStream for Limited {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
}
