//! The `query_log`: a row for each question, written to the lake a few seconds later, many in one
//! commit.
//!
//! Invariants:
//! - a question that came makes one row, however it ends; [`Record`] writes it when it is dropped;
//! - a question never waits for its row: rows wait in a bounded line in memory, and what does not
//!   fit is counted (`vramscope_query_log_dropped_total`) and logged;
//! - rows that wait are lost when the process is killed: the last seconds before a crash are not
//!   in the log. A collector that is stopped writes them;
//! - a write that failed is tried again with the same transaction number, so that no row doubles.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arrow::array::{BooleanArray, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray};
use arrow::error::ArrowError;
use datafusion::physical_plan::ExecutionPlan;
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, watch};
use vramscope_queries::{Error, quality};
use vramscope_wire::Table;

use super::failure::Class;
use super::memory::QueryMemory;
use super::{Gate, Question};
use crate::access::fence::Fence;
use crate::lake::{Lake, append};
use crate::metrics::{METRICS, QueryLabels};

/// Rows that wait at most.
const WAITING: usize = 10_000;
/// Bytes kept of a statement, and of an error.
const SQL_BYTES: usize = 4096;
const ERROR_BYTES: usize = 1024;

/// Where rows go. Clones share it.
#[derive(Debug, Clone)]
pub struct QueryLog(mpsc::Sender<Row>);

/// What writes them.
pub struct Writer {
    rows: mpsc::Receiver<Row>,
    /// Taken from the line, not yet in the lake.
    batch: Vec<Row>,
    /// Names this run's transactions; the numbers count up from 1.
    run: String,
    number: u64,
}

#[derive(Debug)]
struct Row {
    ts_us: i64,
    query_id: String,
    who: Arc<str>,
    door: &'static str,
    sql_hash: String,
    sql: String,
    rows: i64,
    bytes_scanned: Option<i64>,
    peak_memory_bytes: Option<i64>,
    duration_ms: i64,
    outcome: &'static str,
    error: Option<String>,
    /// Whether it reads what lost calls make incomplete.
    reads_recorded: bool,
}

/// A log and its writer.
pub fn new() -> (QueryLog, Writer) {
    let (send, rows) = mpsc::channel(WAITING);
    let writer = Writer {
        rows,
        batch: Vec::new(),
        run: format!("query_log.{:032x}", rand::random::<u128>()),
        number: 1,
    };
    (QueryLog(send), writer)
}

impl QueryLog {
    /// A question begins.
    pub(super) fn begin(&self, question: &Question) -> Record {
        Record {
            log: self.clone(),
            began: (SystemTime::now(), Instant::now()),
            question: question.clone(),
            memory: OnceLock::new(),
            plan: Arc::default(),
            rows: 0,
            end: None,
        }
    }

    fn write(&self, row: Row) {
        if self.0.try_send(row).is_err() {
            METRICS.query_log_dropped.inc();
            tracing::warn!("a row of query_log was dropped: {WAITING} wait to be written");
        }
    }
}

/// One question on its way to its row.
#[derive(Debug)]
pub(super) struct Record {
    log: QueryLog,
    began: (SystemTime, Instant),
    question: Question,
    memory: OnceLock<Arc<QueryMemory>>,
    /// What runs, once it runs.
    pub plan: Arc<OnceLock<Arc<dyn ExecutionPlan>>>,
    rows: u64,
    /// `None` until it ended: whoever lets go of it before is gone.
    end: Option<Result<(), (Class, String)>>,
}

impl Record {
    pub fn id(&self) -> super::QueryId {
        self.question.id
    }

    pub fn has_memory(&self, memory: &Arc<QueryMemory>) {
        let _ = self.memory.set(Arc::clone(memory));
    }

    pub fn handed_out(&mut self, rows: usize) {
        self.rows += rows as u64;
    }

    pub fn answered(&mut self) {
        self.end.get_or_insert(Ok(()));
    }

    pub fn failed(&mut self, error: &Error) {
        self.end
            .get_or_insert_with(|| Err((Class::of(error), error.to_string())));
    }

    fn row(&self) -> Row {
        let (outcome, error) = match &self.end {
            Some(Ok(())) => ("ok", None),
            None => ("cancelled", Some("the client went away")),
            Some(Err((Class::Cancelled, text))) => ("cancelled", Some(text.as_str())),
            Some(Err((class, text))) if class.is_refusal() => ("refused", Some(text.as_str())),
            Some(Err((_, text))) => ("error", Some(text.as_str())),
        };
        let sql = self.question.sql.as_str();
        let since_1970 = self.began.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        Row {
            ts_us: i64::try_from(since_1970.as_micros()).unwrap_or(i64::MAX),
            query_id: self.question.id.to_string(),
            who: Arc::clone(&self.question.caller.name),
            door: self.question.door.name(),
            sql_hash: hash(sql),
            sql: cut(sql, SQL_BYTES),
            rows: number(self.rows),
            bytes_scanned: self.plan.get().map(|plan| number(bytes_scanned(plan))),
            peak_memory_bytes: self.memory.get().map(|memory| number(memory.peak() as u64)),
            duration_ms: number(self.began.1.elapsed().as_millis() as u64),
            outcome,
            error: error.map(|text| cut(text, ERROR_BYTES)),
            reads_recorded: quality::reads_recorded_data(sql),
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let row = self.row();
        let labels = QueryLabels {
            door: row.door,
            outcome: row.outcome,
        };
        METRICS.queries.get_or_create(&labels).inc();
        let seconds = METRICS.query_seconds.get_or_create(&labels);
        seconds.observe(self.began.1.elapsed().as_secs_f64());
        METRICS.query_rows.inc_by(self.rows);
        if let Some(bytes) = row.bytes_scanned {
            METRICS.query_bytes_scanned.inc_by(bytes.unsigned_abs());
        }
        self.log.write(row);
    }
}

/// What the scans of a plan say that they read.
fn bytes_scanned(plan: &Arc<dyn ExecutionPlan>) -> u64 {
    let own = plan
        .metrics()
        .and_then(|metrics| metrics.sum_by_name("bytes_scanned"))
        .map_or(0, |sum| sum.as_usize() as u64);
    // What lies behind a fence is hidden from the caller, and counted all the same.
    let hidden = plan.downcast_ref::<Fence>().map(Fence::hidden);
    let below = plan.children().into_iter().chain(hidden);
    own + below.map(bytes_scanned).sum::<u64>()
}

fn hash(sql: &str) -> String {
    let digest = Sha256::digest(sql.as_bytes());
    digest[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn cut(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_string();
    }
    format!("{}…", &text[..text.floor_char_boundary(bytes)])
}

fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Writer {
    /// Writes at every tick until `stopping` turns true, and once more then.
    pub async fn run(
        mut self,
        gate: Gate,
        lake: Arc<Lake>,
        interval: Duration,
        mut stopping: watch::Receiver<bool>,
    ) {
        let mut tick = tokio::time::interval(interval);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                // An error means that the sender is gone, which is a stop too.
                _ = stopping.wait_for(|stopping| *stopping) => break,
            }
            self.write(&gate, &lake).await;
        }
        self.write(&gate, &lake).await;
        if !self.batch.is_empty() {
            tracing::error!(
                rows = self.batch.len(),
                "lost rows of query_log: stopped before they could be written"
            );
        }
    }

    async fn write(&mut self, gate: &Gate, lake: &Lake) {
        // What failed goes first, alone: its number stands for these rows.
        if self.batch.is_empty() {
            while let Ok(row) = self.rows.try_recv() {
                self.batch.push(row);
            }
        }
        if self.batch.is_empty() {
            return;
        }
        let lossy = match self.batch.iter().any(|row| row.reads_recorded) {
            true => gate.loss(None).await.map(|loss| loss.windows > 0),
            false => None,
        };
        let rows = match batch(&self.batch, lossy) {
            Ok(rows) => rows,
            Err(error) => {
                tracing::error!(%error, rows = self.batch.len(), "lost rows of query_log");
                METRICS.query_log_dropped.inc_by(self.batch.len() as u64);
                self.batch.clear();
                return;
            }
        };
        match append::once(lake, Table::QueryLog, rows, &self.run, self.number).await {
            Ok(()) => {
                self.batch.clear();
                self.number += 1;
            }
            Err(error) => {
                tracing::warn!(%error, "failed to write query_log; it is tried again");
            }
        }
    }
}

/// `lossy`: whether what was recorded has lossy windows.
fn batch(rows: &[Row], lossy: Option<bool>) -> Result<RecordBatch, ArrowError> {
    let texts =
        |text: fn(&Row) -> &str| Arc::new(StringArray::from_iter_values(rows.iter().map(text)));
    let numbers =
        |value: fn(&Row) -> Option<i64>| Arc::new(Int64Array::from_iter(rows.iter().map(value)));
    let ts = TimestampMicrosecondArray::from_iter_values(rows.iter().map(|row| row.ts_us));
    let errors = StringArray::from_iter(rows.iter().map(|row| row.error.as_deref()));
    let lossy_of = |row: &Row| match row.reads_recorded {
        true => lossy,
        false => Some(false),
    };
    // In the order of the table's columns.
    RecordBatch::try_new(
        Table::QueryLog.schema(),
        vec![
            Arc::new(ts.with_timezone("UTC")),
            texts(|row| &row.query_id),
            texts(|row| &row.who),
            texts(|row| row.door),
            texts(|row| &row.sql_hash),
            texts(|row| &row.sql),
            numbers(|row| Some(row.rows)),
            numbers(|row| row.bytes_scanned),
            numbers(|row| row.peak_memory_bytes),
            numbers(|row| Some(row.duration_ms)),
            texts(|row| row.outcome),
            Arc::new(errors),
            Arc::new(BooleanArray::from_iter(rows.iter().map(lossy_of))),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_beginning_of_sha_256() {
        // printf 'SELECT 1' | sha256sum
        assert_eq!(hash("SELECT 1"), "e004ebd5b5532a4b");
    }

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(cut("äöü", 6), "äöü");
        assert_eq!(cut("äöü", 3), "ä…");
    }
}
