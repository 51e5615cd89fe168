//! Rows against the acknowledgements, the agents' marks and the partitions.
//!
//! The ledger is the table `batches`: what was acknowledged, a row per batch. A batch that has more
//! rows than that was doubled, one that has fewer lost some; unless retention took them (the table
//! knows up to which moment it did), or they were stacks that were there already (the table counts
//! them), or they still wait in the write-ahead log.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use datafusion::prelude::SessionContext;
use futures::TryStreamExt;
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{Limits, query};
use vramscope_wire::Table;

use super::{Findings, TableReport};
use crate::ingest::wal;
use crate::lake::upkeep::swap::Count;
use crate::lake::{self, Lake, delta_error};

const LEDGER: &str = "batches";

/// A batch that was acknowledged while its table was being read is there a moment later.
const LOOKS: usize = 4;

/// Time between two looks: a commit and a little.
const BETWEEN: Duration = Duration::from_secs(3);

/// One batch whose rows are not as many as were acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Batch {
    agent: String,
    seq: i64,
    acknowledged: i64,
    found: i64,
    /// Earliest of the rows' times and of the arrival, microseconds since 1970.
    from: Option<i64>,
    /// Whether the ledger begins after this batch.
    is_before_ledger: bool,
}

/// Looks at all tables.
#[expect(
    clippy::too_many_arguments,
    reason = "one call, of what the check holds"
)]
pub(super) async fn check(
    data: &Path,
    folder: &Folder,
    session: SessionContext,
    lake: &Lake,
    running: bool,
    tables: &mut [TableReport],
    findings: &mut Findings,
    step: &(dyn Fn(&str, u64, u64) + Sync),
) -> anyhow::Result<()> {
    let total = tables.len() as u64;
    let has_ledger = lake.tables().any(|table| table.name() == LEDGER);
    for (number, report) in tables.iter_mut().enumerate() {
        step("rows", number as u64, total);
        let Some(table) = Table::by_name(report.table) else {
            continue;
        };
        // Rows that the collector writes itself come from no agent.
        let is_of_agents =
            table.schema().field_with_name("batch_seq").is_ok() && table.name() != LEDGER;
        if is_of_agents {
            marks(&session, lake, table, findings).await?;
        }
        if table.partitioned_by_time() {
            partitions(&session, table, is_of_agents && has_ledger, findings).await?;
        }
        if is_of_agents && has_ledger {
            report.acknowledged_rows = Some(acknowledged(&session, table).await?);
            let mut wrong = differences(&session, table).await?;
            let mut looks = 1;
            while running && !wrong.is_empty() && looks < LOOKS {
                tokio::time::sleep(BETWEEN).await;
                let again = differences(&folder.session().await?, table).await?;
                let still: HashSet<_> = again
                    .iter()
                    .map(|batch| (&batch.agent, batch.seq))
                    .collect();
                wrong.retain(|batch| still.contains(&(&batch.agent, batch.seq)));
                looks += 1;
            }
            judge(data, lake, table, wrong, report, findings).await?;
        }
    }
    if !has_ledger {
        findings.note(
            "",
            "no_ledger",
            "there is no table of acknowledgements: rows were checked against the agents' marks alone"
                .to_string(),
        );
    }
    Ok(())
}

async fn ask(session: &SessionContext, sql: &str) -> anyhow::Result<Vec<RecordBatch>> {
    let without = Limits {
        time: None,
        rows: None,
    };
    let rows = query(session, sql, without).await;
    let rows = rows.with_context(|| format!("failed to plan {sql}"))?;
    let batches: Result<Vec<RecordBatch>, _> = rows.try_collect().await;
    batches.with_context(|| format!("failed to ask {sql}"))
}

/// The columns of an answer, row by row.
struct Row<'a> {
    batch: &'a RecordBatch,
    row: usize,
}

impl Row<'_> {
    fn text(&self, column: usize) -> String {
        let column = self.batch.column(column);
        let values = column.as_string_opt::<i32>();
        values.map_or(String::new(), |values| values.value(self.row).to_string())
    }

    fn number(&self, column: usize) -> Option<i64> {
        let column = self.batch.column(column);
        let values = column.as_primitive_opt::<Int64Type>()?;
        values.is_valid(self.row).then(|| values.value(self.row))
    }

    fn time(&self, column: usize) -> Option<i64> {
        let column = self.batch.column(column);
        let values = column.as_primitive_opt::<TimestampMicrosecondType>()?;
        values.is_valid(self.row).then(|| values.value(self.row))
    }
}

fn each(batches: &[RecordBatch]) -> impl Iterator<Item = Row<'_>> {
    batches
        .iter()
        .flat_map(|batch| (0..batch.num_rows()).map(move |row| Row { batch, row }))
}

/// A row of a batch that the agent's mark does not reach was committed without its transaction.
async fn marks(
    session: &SessionContext,
    lake: &Lake,
    table: Table,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    let sql = format!(
        "SELECT agent_id, max(batch_seq) FROM {} GROUP BY agent_id",
        table.name()
    );
    let delta = lake.table(table);
    for row in each(&ask(session, &sql).await?) {
        let agent = row.text(0);
        let highest = row.number(1).unwrap_or(0);
        let mark = lake::transaction(&delta, &agent)
            .await
            .map_err(delta_error(table))?;
        if u64::try_from(highest).unwrap_or(0) > mark {
            findings.problem(
                table.name(),
                "above_mark",
                format!("agent {agent} has rows of batch {highest}, its mark is {mark}"),
            );
        }
    }
    Ok(())
}

/// Rows lie in the hour of their `ts`. Those whose `ts` was not believed lie in the hour in which
/// they came; the ledger counts them.
async fn partitions(
    session: &SessionContext,
    table: Table,
    has_ledger: bool,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    let sql = format!(
        "SELECT count(*) FROM {} WHERE date <> CAST(ts AS DATE) OR hour <> date_part('hour', ts)",
        table.name()
    );
    let elsewhere = first_number(&ask(session, &sql).await?);
    if elsewhere == 0 {
        return Ok(());
    }
    let misdated = match has_ledger {
        true => first_number(&ask(session, &ledger_sum("misdated_rows", table)).await?),
        false => 0,
    };
    if elsewhere > misdated {
        findings.problem(
            table.name(),
            "wrong_partition",
            format!(
                "{elsewhere} rows lie in another hour than that of their ts, {misdated} of them since \
                 their ts was not believed"
            ),
        );
    } else {
        findings.note(
            table.name(),
            "wrong_clock",
            format!(
                "{elsewhere} rows lie in the hour in which they came: their ts was not believed"
            ),
        );
    }
    Ok(())
}

fn first_number(answer: &[RecordBatch]) -> i64 {
    each(answer)
        .next()
        .and_then(|row| row.number(0))
        .unwrap_or(0)
}

fn ledger_sum(column: &str, table: Table) -> String {
    format!(
        "SELECT CAST(coalesce(sum({column}), 0) AS BIGINT) FROM {LEDGER} WHERE table_name = '{}'",
        table.name()
    )
}

async fn acknowledged(session: &SessionContext, table: Table) -> anyhow::Result<u64> {
    let rows = first_number(&ask(session, &ledger_sum("rows", table)).await?);
    Ok(u64::try_from(rows).unwrap_or(0))
}

/// Batches whose rows are not as many as were acknowledged. A union and a sum, not a join: a sum
/// spills when the lake is larger than memory.
async fn differences(session: &SessionContext, table: Table) -> anyhow::Result<Vec<Batch>> {
    let name = table.name();
    let sql = format!(
        "WITH first AS (SELECT agent_id, min(batch_seq) AS seq FROM {LEDGER} GROUP BY agent_id),
         both AS (
            SELECT agent_id, batch_seq, CAST(0 AS BIGINT) AS acknowledged, count(*) AS found,
                CAST(NULL AS TIMESTAMP) AS since
            FROM {name} GROUP BY agent_id, batch_seq
            UNION ALL
            SELECT agent_id, batch_seq, rows, CAST(0 AS BIGINT),
                CAST(least(ts_min, ts) AS TIMESTAMP)
            FROM {LEDGER} WHERE table_name = '{name}'
         ),
         sums AS (
            SELECT agent_id, batch_seq, CAST(sum(acknowledged) AS BIGINT) AS acknowledged,
                CAST(sum(found) AS BIGINT) AS found, min(since) AS since
            FROM both GROUP BY agent_id, batch_seq
            HAVING sum(acknowledged) <> sum(found)
         )
         SELECT s.agent_id, s.batch_seq, s.acknowledged, s.found, arrow_cast(s.since, 'Timestamp(Microsecond, None)') AS since,
            CAST(CASE WHEN f.seq IS NULL OR s.batch_seq < f.seq THEN 1 ELSE 0 END AS BIGINT)
         FROM sums AS s LEFT JOIN first AS f ON f.agent_id = s.agent_id
         ORDER BY 1, 2"
    );
    let answer = ask(session, &sql).await?;
    let batch = |row: Row<'_>| Batch {
        agent: row.text(0),
        seq: row.number(1).unwrap_or(0),
        acknowledged: row.number(2).unwrap_or(0),
        found: row.number(3).unwrap_or(0),
        from: row.time(4),
        is_before_ledger: row.number(5) == Some(1),
    };
    Ok(each(&answer).map(batch).collect())
}

async fn judge(
    data: &Path,
    lake: &Lake,
    table: Table,
    wrong: Vec<Batch>,
    report: &TableReport,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    let kept_from = Count::KeptFrom
        .of(&lake.table(table))
        .await
        .map_err(delta_error(table))?;
    let waiting = waiting(data, table)?;
    let mut notes: HashMap<&'static str, (u64, i64)> = HashMap::new();
    let mut missing_stacks = 0;
    for batch in wrong {
        let missing = batch.acknowledged - batch.found;
        let is_expired = batch.from.is_some_and(|from| from < kept_from);
        let is_waiting = waiting.contains(&(batch.agent.clone(), batch.seq));
        let kind = match missing {
            1.. if is_waiting => "waiting",
            1.. if is_expired => "expired",
            1.. if table == Table::Stacks => {
                missing_stacks += missing;
                continue;
            }
            ..=-1 if batch.is_before_ledger => "before_ledger",
            1.. => {
                findings.problem(
                    table.name(),
                    "rows_missing",
                    format!(
                        "batch {} of agent {}: {} rows were acknowledged, {} are there",
                        batch.seq, batch.agent, batch.acknowledged, batch.found
                    ),
                );
                continue;
            }
            _ => {
                findings.problem(
                    table.name(),
                    "rows_doubled",
                    format!(
                        "batch {} of agent {}: {} rows were acknowledged, {} are there",
                        batch.seq, batch.agent, batch.acknowledged, batch.found
                    ),
                );
                continue;
            }
        };
        let sums = notes.entry(kind).or_default();
        sums.0 += 1;
        sums.1 += missing.abs();
    }
    // While the ledger is younger than the table, it does not know all stacks that were left out.
    let left_out = i64::try_from(report.same_stacks).unwrap_or(i64::MAX);
    if missing_stacks > left_out {
        findings.problem(
            table.name(),
            "rows_missing",
            format!("{missing_stacks} stacks are missing, merges left out {left_out}"),
        );
    }
    for (kind, (batches, rows)) in notes {
        let what = match kind {
            "waiting" => "wait in the write-ahead log",
            "expired" => "are past their time, at least in part, and were taken out",
            _ => "came before the ledger began",
        };
        findings.note(
            table.name(),
            kind,
            format!("{rows} rows of {batches} batches {what}"),
        );
    }
    Ok(())
}

/// Batches in the write-ahead log. Those whose rows are committed may still be in it.
fn waiting(data: &Path, table: Table) -> anyhow::Result<HashSet<(String, i64)>> {
    let root = data.join("_wal");
    let listing = wal::list(&root)
        .with_context(|| format!("failed to read the log in {}", root.display()))?;
    let batches = listing.entries.into_iter().map(|entry| entry.batch);
    let name =
        |batch: wal::NewBatch| Some((batch.agent.to_string(), i64::try_from(batch.seq).ok()?));
    Ok(batches
        .filter(|batch| batch.table == table)
        .filter_map(name)
        .collect())
}
