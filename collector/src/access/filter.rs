//! What a caller may see of each table, put in front of the tables themselves.
//!
//! A caller with namespaces sees rows of processes that ran in those namespaces, and what such a
//! process could learn of its host anyway. Everything that reads tables, views, table functions
//! and catalogs, is planned over the tables made here, so nothing goes around them.
//!
//! | table | what is seen |
//! |---|---|
//! | those with a process_id | rows of visible processes |
//! | `stacks` | stacks that those rows name |
//! | `devices`, `agent_windows` | rows of hosts and times where a visible process ran; in `devices.processes` visible ones only |
//! | `query_log` | the caller's own rows; so for everybody but administrators |
//! | all others | nothing |
//!
//! A process is visible if each of its rows that says a namespace says one of the caller's, and at
//! least one does. (A process may begin to say another namespace when it executes another program;
//! what it did before then becomes nobody's but those who see both.)
//!
//! Invariants:
//! - a table that nobody has thought about is hidden, not shown;
//! - what a caller's own SQL computes is computed over visible rows only, so that the text of an
//!   error cannot tell of others: only plain comparisons of a column with a constant, which cannot
//!   fail, go below the filter ([`fence`](super::fence));
//! - EXPLAIN shows nothing that lies below.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use datafusion::catalog::TableProvider;
use datafusion::datasource::provider_as_source;
use datafusion::logical_expr::{LogicalPlan, LogicalPlanBuilder};
use datafusion::prelude::{SessionContext, col};
use futures::TryStreamExt;
use vramscope_queries::{Error, session, texts, views};
use vramscope_wire::Table;

use super::fence::{Fenced, Rule};
use super::{Caller, Role};

/// Sessions that are kept, one per way to see the tables.
const MAX_KEPT: usize = 64;

/// Makes sessions that show what a caller may see, and keeps them while the tables stay as they
/// are.
#[derive(Default)]
pub struct Filters {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// The session with all tables that the others were made of.
    of: String,
    sessions: HashMap<View, SessionContext>,
}

/// What makes two callers see the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct View {
    name: Arc<str>,
    namespaces: Option<Arc<[String]>>,
}

impl Filters {
    /// The session that `caller` gets, of one that shows all tables.
    pub async fn apply(
        &self,
        all: SessionContext,
        caller: &Caller,
    ) -> Result<SessionContext, Error> {
        if caller.role == Role::Admin {
            return Ok(all);
        }
        let view = View {
            name: Arc::clone(&caller.name),
            namespaces: caller.namespaces.clone(),
        };
        let of = all.session_id();
        {
            let mut kept = self.kept();
            if kept.of != of {
                kept.sessions.clear();
                kept.of.clone_from(&of);
            }
            if let Some(session) = kept.sessions.get(&view) {
                return Ok(session.clone());
            }
        }
        let session = filtered(&all, &view).await?;
        let mut kept = self.kept();
        if kept.of == of {
            if kept.sessions.len() >= MAX_KEPT {
                kept.sessions.clear();
            }
            kept.sessions.insert(view, session.clone());
        }
        Ok(session)
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a table is filtered for a caller with namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// By its process_id.
    ByProcess,
    /// By host and time.
    ByHost,
    /// By what the visible rows of other tables name.
    Stacks,
    /// By who asked.
    QueryLog,
    /// Not shown.
    Hidden,
}

fn kind(table: &str) -> Kind {
    match table {
        "processes" | "alloc_events" | "host_buffers" | "stack_windows" | "device_windows"
        | "allocator_samples" | "segments" | "traffic" => Kind::ByProcess,
        "devices" | "agent_windows" => Kind::ByHost,
        "stacks" => Kind::Stacks,
        "query_log" => Kind::QueryLog,
        _ => Kind::Hidden,
    }
}

async fn filtered(all: &SessionContext, view: &View) -> Result<SessionContext, Error> {
    let session = session::session_on(&all.runtime_env());
    let visible = match &view.namespaces {
        Some(namespaces) => Some(Visible::find(all, namespaces).await?),
        None => None,
    };
    let mut stacks = None;
    for table in Table::ALL {
        let provider = all.table_provider(table.name()).await?;
        let kind = kind(table.name());
        let rule = match (&visible, kind) {
            (_, Kind::QueryLog) => Rule::Text {
                column: "who",
                is: Arc::clone(&view.name),
            },
            (None, _) => {
                session.register_table(table.name(), provider)?;
                continue;
            }
            (Some(visible), Kind::ByProcess) => Rule::Processes(Arc::clone(visible)),
            (Some(visible), Kind::ByHost) => Rule::Hosts(Arc::clone(visible)),
            (Some(_), Kind::Stacks) => {
                stacks = Some(provider);
                continue;
            }
            (Some(_), Kind::Hidden) => Rule::Nothing,
        };
        session.register_table(table.name(), Arc::new(Fenced::new(provider, rule)))?;
    }
    if let Some(provider) = stacks {
        let named = named_stacks(&session).await?;
        let fenced = Fenced::new(provider, Rule::Among("stack_id", Arc::new(named)));
        session.register_table(Table::Stacks.name(), Arc::new(fenced))?;
    }
    views::register(&session).await?;
    Ok(session)
}

/// A plan for the stacks that visible rows name.
async fn named_stacks(session: &SessionContext) -> Result<LogicalPlan, Error> {
    const SQL: &str = "
        SELECT stack_id FROM stack_windows WHERE stack_id IS NOT NULL
        UNION ALL SELECT stack_id FROM alloc_events WHERE stack_id IS NOT NULL
        UNION ALL SELECT alloc_stack_id FROM alloc_events WHERE alloc_stack_id IS NOT NULL
        UNION ALL SELECT stack_id FROM host_buffers WHERE stack_id IS NOT NULL
        UNION ALL SELECT block['stack_id'] FROM (SELECT unnest(blocks) AS block FROM segments)
                  WHERE block['stack_id'] IS NOT NULL";
    let plan = session.state().create_logical_plan(SQL).await?;
    Ok(LogicalPlanBuilder::from(plan).distinct()?.build()?)
}

/// Processes that a caller sees, and the hosts that they ran on.
#[derive(Debug, Default)]
pub(super) struct Visible {
    processes: HashSet<i64>,
    /// From when to when a visible process ran there, microseconds since 1970.
    hosts: HashMap<String, (i64, i64)>,
}

impl Visible {
    async fn find(all: &SessionContext, namespaces: &[String]) -> Result<Arc<Visible>, Error> {
        const COLUMNS: [&str; 6] = ["process_id", "namespace", "host", "ts", "started", "ended"];
        let provider = all.table_provider(Table::Processes.name()).await?;
        let plan = LogicalPlanBuilder::scan("processes", provider_as_source(provider), None)?
            .project(COLUMNS.map(col))?
            .build()?;
        let frame = all.execute_logical_plan(plan).await?;
        let mut batches = frame.execute_stream().await?;
        let mut lives = HashMap::new();
        while let Some(batch) = batches.try_next().await? {
            Life::add(&mut lives, &batch, namespaces)?;
        }
        Ok(Arc::new(Visible::of(lives)))
    }

    fn of(lives: HashMap<i64, Life>) -> Visible {
        let mut visible = Visible::default();
        for (process_id, life) in lives {
            if !life.says_ours || life.says_other {
                continue;
            }
            visible.processes.insert(process_id);
            // Without an end it may still live.
            let last = if life.has_ended { life.last } else { i64::MAX };
            let span = visible.hosts.entry(life.host).or_insert((life.first, last));
            *span = (span.0.min(life.first), span.1.max(last));
        }
        visible
    }

    /// Whether rows of that process are seen.
    pub(super) fn sees_process(&self, process_id: i64) -> bool {
        self.processes.contains(&process_id)
    }

    /// Whether what that host said of itself then is seen.
    pub(super) fn sees_host(&self, host: &str, ts: i64) -> bool {
        let span = self.hosts.get(host);
        span.is_some_and(|(first, last)| (*first..=*last).contains(&ts))
    }
}

/// What all rows of one process say.
#[derive(Debug, Default)]
struct Life {
    host: String,
    says_ours: bool,
    says_other: bool,
    first: i64,
    last: i64,
    has_ended: bool,
}

impl Life {
    fn add(
        lives: &mut HashMap<i64, Life>,
        batch: &RecordBatch,
        namespaces: &[String],
    ) -> Result<(), Error> {
        // The columns are those of the data model, which whoever opened the table has checked.
        let processes = batch.column(0).as_primitive::<Int64Type>();
        let said = texts::plain_column(batch.column(1))?;
        let hosts = texts::plain_column(batch.column(2))?;
        let (said, hosts) = (said.as_string::<i32>(), hosts.as_string::<i32>());
        let times = [3, 4, 5].map(|n| batch.column(n).as_primitive::<TimestampMicrosecondType>());
        for row in 0..batch.num_rows() {
            let time = |n: usize| times[n].is_valid(row).then(|| times[n].value(row));
            let ts = time(0).unwrap_or_default();
            let life = lives.entry(processes.value(row)).or_insert_with(|| Life {
                host: hosts.value(row).to_string(),
                first: ts,
                last: ts,
                ..Life::default()
            });
            if said.is_valid(row) {
                let is_ours = namespaces.iter().any(|ours| ours == said.value(row));
                life.says_ours |= is_ours;
                life.says_other |= !is_ours;
            }
            life.first = life.first.min(time(1).unwrap_or(ts)).min(ts);
            life.last = life.last.max(ts).max(time(2).unwrap_or(ts));
            life.has_ended |= time(2).is_some();
        }
        Ok(())
    }
}

/// A table provider, as plans read it.
pub(super) fn scan(
    provider: &Arc<dyn TableProvider>,
    columns: Vec<usize>,
) -> datafusion::error::Result<LogicalPlanBuilder> {
    LogicalPlanBuilder::scan(
        "fenced",
        provider_as_source(Arc::clone(provider)),
        Some(columns),
    )
}
