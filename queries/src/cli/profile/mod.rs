//! What each call stack holds, was given and grew by: the numbers behind flame graphs, profiles and
//! differences.
//!
//! Invariants:
//! - bytes of one class only: no byte is counted twice;
//! - added up by the SQL engine: what comes here is a row a stack (or a row a stack and process),
//!   never events;
//! - processes that have roll-ups (`stack_windows`) are counted by them, all others (imports, a trace
//!   that ended before its first window) by their events, so that none is left out and none counts
//!   twice;
//! - what is not drawn or written for want of room is still part of every total.

pub mod flame;
pub mod owner;
pub mod pprof;

use std::collections::{BTreeMap, HashMap};

use anyhow::Context;
use clap::{Args, ValueEnum};
use vramscope_queries::session::Limits;

use crate::door::Door;
use crate::rows::Row;
use crate::scope::{Scope, Span, moment};

/// Rows that are looked at one by one: those with the most bytes. The rest is one row.
pub const ROWS: usize = 10_000;
/// What a process held when this long had passed since it was first seen is its warm-up, not growth:
/// 30 minutes, as for the leak detectors, and of a short recording its first quarter.
const WARM_UP_MICROSECONDS: i64 = 30 * 60 * 1_000_000;

/// Which bytes, and which number of them.
#[derive(Args, Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Which bytes a flame graph shows
    #[arg(long, value_enum, default_value = "live")]
    pub value: Value,
    /// Class of bytes; classes are never added up
    #[arg(long, value_enum, default_value = "physical")]
    pub class: Class,
    /// One kind of memory instead of a class
    #[arg(long, value_enum, value_name = "KIND", conflicts_with = "class")]
    pub kind: Option<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Value {
    /// Bytes that live at the end
    Live,
    /// Bytes that live at the end, less those that lived at --since (default: after the warm-up, which is
    /// 30 minutes, of a short recording its first quarter)
    Growth,
    /// Bytes that were given, freed or not
    Allocated,
}

impl Value {
    pub fn name(self) -> &'static str {
        match self {
            Value::Live => "live",
            Value::Growth => "growth",
            Value::Allocated => "allocated",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Class {
    /// Memory of the card
    Physical,
    /// Pinned and registered host memory
    Host,
    /// Blocks that a framework's allocator or a pool gives out of physical memory
    SubAllocated,
    /// Memory of other processes, opened here
    Ipc,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Kind {
    Device,
    Managed,
    Array,
    VmmPhysical,
    VmmVirtual,
    VmmMapped,
    PinnedHost,
    RegisteredHost,
    Pool,
    FrameworkBlock,
    Ipc,
}

impl Choice {
    /// As SQL and JSON spell it.
    pub fn name(&self) -> String {
        let name = match self.kind {
            Some(kind) => kind.to_possible_value(),
            None => self.class.to_possible_value(),
        };
        name.map_or(String::new(), |name| name.get_name().to_string())
    }

    /// Kinds of memory as a list in SQL: those of a class as the views have them (byte_class).
    fn kinds(&self) -> String {
        if self.kind.is_some() {
            return format!("'{}'", self.name());
        }
        let kinds = match self.class {
            Class::Physical => "'device', 'managed', 'array', 'vmm_physical'",
            Class::Host => "'pinned_host', 'registered_host'",
            Class::SubAllocated => "'pool', 'framework_block'",
            Class::Ipc => "'ipc'",
        };
        kinds.to_string()
    }
}

/// What one stack (of one process, if that was asked) did and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub live_bytes: i64,
    pub live_count: i64,
    /// What lived when growth began to count.
    pub start_bytes: i64,
    pub start_count: i64,
    /// Given since then; without a beginning, ever.
    pub allocated_bytes: i64,
    pub allocations: i64,
}

impl Held {
    pub fn value(&self, value: Value) -> i64 {
        match value {
            Value::Live => self.live_bytes,
            Value::Growth => self.live_bytes - self.start_bytes,
            Value::Allocated => self.allocated_bytes,
        }
    }

    pub fn add(&mut self, other: &Held) {
        self.live_bytes += other.live_bytes;
        self.live_count += other.live_count;
        self.start_bytes += other.start_bytes;
        self.start_count += other.start_count;
        self.allocated_bytes += other.allocated_bytes;
        self.allocations += other.allocations;
    }
}

/// A stack of a process. Without a process: of all that were asked for; without a stack: what has
/// none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub stack: Option<i64>,
    pub process: Option<i64>,
}

/// A stack's numbers.
pub type Line = (Key, Held);
/// How many stacks have no line of their own, and their numbers.
pub type Rest = (usize, Held);

#[derive(Debug, Default)]
pub struct Profile {
    pub held: BTreeMap<Key, Held>,
    pub span: Span,
    /// First and last moment of the data, microseconds since 1970.
    pub first: Option<i64>,
    pub last: Option<i64>,
    /// Process lifetimes in it.
    pub processes: i64,
}

impl Profile {
    pub fn total(&self) -> Held {
        let mut total = Held::default();
        for held in self.held.values() {
            total.add(held);
        }
        total
    }

    /// Hours that the numbers stand for.
    pub fn hours(&self) -> Option<f64> {
        let from = self.span.since.max(self.first)?;
        let to = self.last?;
        (to > from).then(|| (to - from) as f64 / 3.6e9)
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The time that the numbers stand for.
    pub fn words(&self) -> String {
        match (self.span.since.max(self.first), self.last) {
            (Some(from), Some(to)) => format!("{} to {}", moment(from), moment(to)),
            _ => "no time".to_string(),
        }
    }

    /// The rows with the most bytes by any of the values, and all others added up.
    pub fn most(&self, rows: usize) -> (Vec<Line>, Option<Rest>) {
        let weight = |held: &Held| {
            let growth = held.value(Value::Growth).unsigned_abs();
            growth
                .max(held.live_bytes.unsigned_abs())
                .max(held.allocated_bytes.unsigned_abs())
        };
        let mut all: Vec<Line> = self.held.iter().map(|(key, held)| (*key, *held)).collect();
        all.sort_by_key(|(key, held)| (std::cmp::Reverse(weight(held)), *key));
        if all.len() <= rows {
            return (all, None);
        }
        let mut rest = Held::default();
        let others = all.split_off(rows);
        others.iter().for_each(|(_, held)| rest.add(held));
        (all, Some((others.len(), rest)))
    }
}

/// Asks for the numbers. With `by_process` there is a row a stack and process.
pub async fn ask(
    door: &mut Door,
    limits: Limits,
    scope: &Scope,
    choice: &Choice,
    by_process: bool,
) -> anyhow::Result<Profile> {
    let span = scope.span(door, limits).await?;
    let question = Question {
        scope,
        kinds: choice.kinds(),
        span,
        by_process,
    };
    let mut profile = Profile {
        span,
        ..Profile::default()
    };
    question
        .add(door, limits, &question.rolled_up(), &mut profile)
        .await?;
    let others = question.without_roll_ups(door, limits).await?;
    if !others.is_empty() {
        let sql = question.of_events(&others);
        question.add(door, limits, &sql, &mut profile).await?;
    }
    Ok(profile)
}

struct Question<'a> {
    scope: &'a Scope,
    kinds: String,
    span: Span,
    by_process: bool,
}

impl Question<'_> {
    /// A process's numbers come from its first row on; growth counts from `base_us`.
    fn base(&self) -> String {
        match self.span.since {
            Some(since) => since.to_string(),
            None => format!(
                "min(begin_us) + least({WARM_UP_MICROSECONDS}, (max(end_us) - min(begin_us)) / 4)"
            ),
        }
    }

    fn up_to(&self, column: &str) -> String {
        match self.span.until {
            Some(until) => format!(" AND CAST({column} AS BIGINT) <= {until}"),
            None => String::new(),
        }
    }

    fn from(&self, column: &str) -> String {
        match self.span.since {
            Some(since) => format!("{column} > {since}"),
            None => "true".to_string(),
        }
    }

    /// What was allocated before the host last booted is gone now, though its end was never seen.
    fn gone(&self) -> &'static str {
        match self.span.until {
            Some(_) => "false",
            None => "coalesce(p.rebooted, false)",
        }
    }

    /// Columns of the answer, over rows of a stack of a process. Every row carries the times and the
    /// number of processes of all.
    fn columns(&self) -> String {
        let (process, group) = if self.by_process {
            ("process_id", ", process_id")
        } else {
            ("CAST(NULL AS BIGINT)", "")
        };
        let sums = [
            "live_bytes",
            "live_count",
            "start_bytes",
            "start_count",
            "allocated_bytes",
            "allocations",
        ]
        .map(|column| format!("CAST(sum({column}) AS BIGINT) AS {column}"))
        .join(", ");
        format!(
            "SELECT s.*, b.* FROM (
                SELECT stack_id, {process} AS process_id, {sums} FROM keyed GROUP BY stack_id{group}
             ) AS s CROSS JOIN (
                SELECT min(first_us) AS first_us, max(last_us) AS last_us, count(*) AS processes FROM bases
             ) AS b"
        )
    }

    /// What holds at a time is the newest roll-up of each key up to then (view `stack_history`).
    fn rolled_up(&self) -> String {
        format!(
            "WITH calls AS (
                SELECT w.process_id, w.gpu_uuid, w.device, w.memory_kind, w.layer, w.stack_id,
                    CAST(w.ts AS BIGINT) AS begin_us, CAST(w.window_end AS BIGINT) AS end_us,
                    w.alloc_bytes, w.alloc_count, w.live_bytes, w.live_count, {gone} AS gone
                FROM stack_windows AS w
                LEFT JOIN current_processes AS p ON p.process_id = w.process_id
                WHERE w.memory_kind IN ({kinds}){conditions}{until}
             ),
             bases AS (
                SELECT process_id, {base} AS base_us, min(begin_us) AS first_us, max(end_us) AS last_us
                FROM calls GROUP BY process_id
             ),
             keyed AS (
                SELECT c.stack_id, c.process_id,
                    CASE WHEN bool_or(c.gone) THEN 0 ELSE last_value(c.live_bytes ORDER BY c.end_us) END AS live_bytes,
                    CASE WHEN bool_or(c.gone) THEN 0 ELSE last_value(c.live_count ORDER BY c.end_us) END AS live_count,
                    coalesce(last_value(c.live_bytes ORDER BY c.end_us) FILTER (WHERE c.end_us <= b.base_us), 0) AS start_bytes,
                    coalesce(last_value(c.live_count ORDER BY c.end_us) FILTER (WHERE c.end_us <= b.base_us), 0) AS start_count,
                    coalesce(sum(c.alloc_bytes) FILTER (WHERE {from}), 0) AS allocated_bytes,
                    coalesce(sum(c.alloc_count) FILTER (WHERE {from}), 0) AS allocations
                FROM calls AS c JOIN bases AS b ON b.process_id = c.process_id
                GROUP BY c.process_id, c.gpu_uuid, c.device, c.memory_kind, c.layer, c.stack_id
             )
             {columns}",
            gone = self.gone(),
            kinds = self.kinds,
            conditions = self.scope.conditions("w", "p"),
            until = self.up_to("w.window_end"),
            base = self.base(),
            from = self.from("c.end_us"),
            columns = self.columns(),
        )
    }

    /// Processes that only events tell of.
    async fn without_roll_ups(&self, door: &mut Door, limits: Limits) -> anyhow::Result<Vec<i64>> {
        // Their device is a matter of each event.
        let scope = Scope {
            device: None,
            ..self.scope.clone()
        };
        let sql = format!(
            "SELECT p.process_id FROM current_processes AS p
             WHERE p.process_id NOT IN (SELECT process_id FROM stack_windows){}",
            scope.conditions("p", "p")
        );
        let rows = door.collect(&sql, limits).await?;
        let ids: Result<Vec<Option<i64>>, _> =
            rows.iter().map(|row| row.number("process_id")).collect();
        Ok(ids?.into_iter().flatten().collect())
    }

    /// Calls as the view `top_stacks` counts them. Raw events of a framework that no roll-up tells of
    /// are whole only in an import.
    fn of_events(&self, processes: &[i64]) -> String {
        let list: Vec<String> = processes.iter().map(i64::to_string).collect();
        format!(
            "WITH calls AS (
                SELECT e.process_id, e.bytes, e.op IN ('alloc', 'reserve', 'map', 'register') AS gives,
                    CASE WHEN e.op IN ('alloc', 'reserve', 'map', 'register') THEN e.stack_id ELSE e.alloc_stack_id END AS stack_id,
                    CAST(e.ts AS BIGINT) AS begin_us, CAST(e.ts AS BIGINT) AS end_us, {gone} AS gone
                FROM alloc_events AS e
                LEFT JOIN current_processes AS p ON p.process_id = e.process_id
                WHERE e.process_id IN ({list}) AND e.memory_kind IN ({kinds}){conditions}{until}
                  AND e.counted AND coalesce(e.result, 0) = 0
                  AND e.op IN ('alloc', 'reserve', 'map', 'register', 'free', 'release', 'unmap', 'unregister')
                  AND (e.layer <> 'framework' OR e.source = 'import')
                  AND NOT (e.source = 'import' AND e.op = 'free' AND e.memory_kind = 'framework_block' AND e.alloc_seq IS NULL)
             ),
             bases AS (
                SELECT process_id, {base} AS base_us, min(begin_us) AS first_us, max(end_us) AS last_us
                FROM calls GROUP BY process_id
             ),
             keyed AS (
                SELECT c.stack_id, c.process_id,
                    coalesce(sum(CASE WHEN gives THEN bytes ELSE -bytes END) FILTER (WHERE NOT gone), 0) AS live_bytes,
                    coalesce(sum(CASE WHEN gives THEN 1 ELSE -1 END) FILTER (WHERE NOT gone), 0) AS live_count,
                    coalesce(sum(CASE WHEN gives THEN bytes ELSE -bytes END) FILTER (WHERE end_us <= base_us), 0) AS start_bytes,
                    coalesce(sum(CASE WHEN gives THEN 1 ELSE -1 END) FILTER (WHERE end_us <= base_us), 0) AS start_count,
                    coalesce(sum(bytes) FILTER (WHERE gives AND {from}), 0) AS allocated_bytes,
                    count(*) FILTER (WHERE gives AND {from}) AS allocations
                FROM calls AS c JOIN bases AS b ON b.process_id = c.process_id
                GROUP BY c.stack_id, c.process_id
             )
             {columns}",
            gone = self.gone(),
            list = list.join(", "),
            kinds = self.kinds,
            conditions = self.scope.conditions("e", "p"),
            until = self.up_to("e.ts"),
            base = self.base(),
            from = self.from("end_us"),
            columns = self.columns(),
        )
    }

    async fn add(
        &self,
        door: &mut Door,
        limits: Limits,
        sql: &str,
        profile: &mut Profile,
    ) -> anyhow::Result<()> {
        let rows = door.collect(sql, limits).await?;
        for (index, row) in rows.iter().enumerate() {
            let key = Key {
                stack: row.number("stack_id")?,
                process: row.number("process_id")?,
            };
            let held = held(row)?;
            if held != Held::default() {
                profile.held.entry(key).or_default().add(&held);
            }
            if index == 0 {
                let first = row.number("first_us")?;
                profile.first = [profile.first, first].into_iter().flatten().min();
                profile.last = profile.last.max(row.number("last_us")?);
                profile.processes += row.number("processes")?.unwrap_or_default();
            }
        }
        Ok(())
    }
}

fn held(row: Row<'_>) -> anyhow::Result<Held> {
    let number = |name: &str| {
        row.number(name)?
            .with_context(|| format!("column {name:?} is NULL"))
    };
    Ok(Held {
        live_bytes: number("live_bytes")?,
        live_count: number("live_count")?,
        start_bytes: number("start_bytes")?,
        start_count: number("start_count")?,
        allocated_bytes: number("allocated_bytes")?,
        allocations: number("allocations")?,
    })
}

/// What labels say about a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    pub host: String,
    pub pid: i64,
    pub pod: Option<String>,
    pub namespace: Option<String>,
    pub exe: Option<String>,
}

/// The processes of these ids, as far as they are known.
pub async fn processes(
    door: &mut Door,
    limits: Limits,
    ids: &[i64],
) -> anyhow::Result<HashMap<i64, Process>> {
    let mut found = HashMap::new();
    for some in ids.chunks(2000) {
        let list: Vec<String> = some.iter().map(i64::to_string).collect();
        let sql = format!(
            "SELECT process_id, host, pid, pod, namespace, exe FROM current_processes
             WHERE process_id IN ({})",
            list.join(", ")
        );
        let rows = door.collect(&sql, limits).await?;
        for row in rows.iter() {
            let Some(id) = row.number("process_id")? else {
                continue;
            };
            let process = Process {
                host: row.text("host")?.unwrap_or_default(),
                pid: row.number("pid")?.unwrap_or_default(),
                pod: row.text("pod")?,
                namespace: row.text("namespace")?,
                exe: row.text("exe")?,
            };
            found.insert(id, process);
        }
    }
    Ok(found)
}
