//! The table `batches`: one line for every batch that was acknowledged.
//!
//! A line is written after the batch's rows are committed and before the log lets go of it. The
//! transaction `log:LOG_ID:TABLE` in the same commit says up to which record of a log the lines of
//! one table's batches are there: a restart between the two commits writes exactly those that are
//! missing. `fsck` compares the lines with the rows.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{
    ArrayRef, AsArray, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow::error::ArrowError;
use deltalake::{DeltaTable, DeltaTableError};
use serde::{Deserialize, Serialize};
use vramscope_wire::Table;

use super::super::{Lake, LakeError};
use super::commit::Marks;
use super::files::Files;
use super::load::Unsorted;
use super::{checkpoint_if_due, commit, ledger_transaction, recover};
use crate::ingest::placing::{HOUR_US, Placing};
use crate::ingest::wal::{NewBatch, Wal};
use crate::metrics::METRICS;

/// A line before it is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    /// By which the transaction of the line's table knows it.
    pub number: u64,
    agent: String,
    seq: u64,
    host: Option<String>,
    table: String,
    rows: u64,
    bytes: u64,
    crc32: u32,
    arrived_us: i64,
    times: Option<(i64, i64)>,
    misdated: u64,
}

impl Line {
    pub(super) fn of(batch: &NewBatch, number: u64, bytes: u64) -> Line {
        Line {
            number,
            agent: batch.agent.to_string(),
            seq: batch.seq,
            host: batch.host.as_deref().map(str::to_string),
            table: batch.table.name().to_string(),
            rows: batch.rows,
            bytes,
            crc32: batch.crc32,
            arrived_us: batch.placing.arrived_us,
            times: batch.times,
            misdated: batch.misdated,
        }
    }

    /// Whether it is a batch's.
    pub(super) fn is_of(&self, batch: &NewBatch) -> bool {
        self.agent == *batch.agent && self.seq == batch.seq
    }

    pub(super) fn table(&self) -> &str {
        &self.table
    }
}

/// How acknowledgements were kept, and by whom.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keeper<'a> {
    pub promise: &'static str,
    pub collector: &'a str,
    /// The transaction that tells up to which number the lines of a table are there.
    pub transaction: fn(&str, &str) -> String,
}

/// Writes the lines of all batches of the log whose rows are committed, and lets the log go of them.
pub(super) async fn write(wal: &Wal, lake: &Lake) -> Result<(), LakeError> {
    let entries = wal.unledgered();
    if entries.is_empty() {
        return Ok(());
    }
    let lines: Vec<Line> = entries
        .iter()
        .map(|entry| Line::of(&entry.batch, entry.number, entry.bytes))
        .collect();
    let keeper = Keeper {
        promise: "fsync",
        collector: wal.id(),
        transaction: ledger_transaction,
    };
    match commit_lines(lake, &lines, keeper).await {
        Ok(()) => {
            wal.finish(&entries);
            Ok(())
        }
        Err(error) => {
            recover::reload(lake, Table::Batches).await?;
            recover::sort_out_all(wal, lake).await?;
            Err(error)
        }
    }
}

/// Writes lines, with the transactions that tell so.
pub(super) async fn commit_lines(
    lake: &Lake,
    lines: &[Line],
    keeper: Keeper<'_>,
) -> Result<(), LakeError> {
    let failed = |source| LakeError::Arrow {
        table: Table::Batches.name(),
        source,
    };
    let rows = sorted(lines, keeper).map_err(failed)?;
    let name = |line: &Line| (keeper.transaction)(keeper.collector, &line.table);
    let names: Vec<Arc<str>> = lines.iter().map(|line| name(line).into()).collect();
    let mut marks = Marks::of(lake, Table::Batches, &names).await?;
    for (line, name) in lines.iter().zip(&names) {
        marks.raise(name, line.number);
    }
    let began = Instant::now();
    let version = commit::commit(lake, Table::Batches, rows.chunks(), &marks, None).await?;
    METRICS.committed(Table::Batches, lines.len() as u64, began.elapsed());
    checkpoint_if_due(lake, Table::Batches, version).await;
    Ok(())
}

fn sorted(lines: &[Line], keeper: Keeper<'_>) -> Result<super::load::Sorted, ArrowError> {
    // The collector's own clock is believed.
    let placing = Placing {
        arrived_us: 0,
        earliest_us: i64::MIN,
        latest_us: i64::MAX,
    };
    let mut rows = Unsorted::new(Table::Batches)?;
    rows.push(columns(lines, keeper)?, &placing)?;
    Ok(rows.sort())
}

fn columns(lines: &[Line], keeper: Keeper<'_>) -> Result<RecordBatch, ArrowError> {
    // Counts come from files of at most 1 GiB, numbers are checked at the door: they fit.
    let numbers = |of: fn(&Line) -> u64| -> ArrayRef {
        let values = lines.iter().map(|line| of(line) as i64);
        Arc::new(Int64Array::from_iter_values(values))
    };
    let texts = |of: fn(&Line) -> Option<&str>| -> ArrayRef {
        Arc::new(StringArray::from_iter(lines.iter().map(of)))
    };
    let times = |of: fn(&Line) -> Option<i64>| -> ArrayRef {
        let values = TimestampMicrosecondArray::from_iter(lines.iter().map(of));
        Arc::new(values.with_timezone("UTC"))
    };
    let all = |text: &str| -> ArrayRef { Arc::new(StringArray::from(vec![text; lines.len()])) };
    let columns = vec![
        times(|line| Some(line.arrived_us)),
        texts(|line| Some(&line.agent)),
        numbers(|line| line.seq),
        texts(|line| line.host.as_deref()),
        texts(|line| Some(&line.table)),
        numbers(|line| line.rows),
        numbers(|line| line.bytes),
        numbers(|line| u64::from(line.crc32)),
        times(|line| line.times.map(|(earliest, _)| earliest)),
        times(|line| line.times.map(|(_, latest)| latest)),
        numbers(|line| line.misdated),
        all(keeper.promise),
        all(keeper.collector),
    ];
    RecordBatch::try_new(Table::Batches.schema(), columns)
}

/// What the ledger tells of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acknowledged<'a> {
    /// Agent that sent it.
    pub agent: &'a str,
    /// Its number in the agent's line.
    pub seq: u64,
    /// CRC-32 of its bytes.
    pub crc32: u32,
}

/// Tells of every batch that the ledger has, in no order, of those acknowledged since the hour of
/// `since_us` (microseconds since 1970) if that is given.
pub async fn acknowledged(
    ledger: &DeltaTable,
    since_us: Option<i64>,
    mut tell: impl FnMut(Acknowledged<'_>),
) -> Result<(), DeltaTableError> {
    let mut files = Files::of(ledger)?;
    if let Some(since) = since_us {
        files = files.since_hour(since.div_euclid(HOUR_US));
    }
    for file in files.iter() {
        let columns = ["agent_id", "batch_seq", "crc32"];
        let mut pieces = files.read(file, &columns, None).await?;
        while let Some(piece) = pieces.next().await? {
            tell_all(&piece, &mut tell)?;
        }
    }
    Ok(())
}

fn tell_all(
    piece: &RecordBatch,
    tell: &mut impl FnMut(Acknowledged<'_>),
) -> Result<(), DeltaTableError> {
    let column = |name: &str, data_type| {
        let column = piece.column_by_name(name).ok_or_else(|| {
            ArrowError::SchemaError(format!("column {name:?} of the ledger is missing"))
        })?;
        cast(column, data_type)
    };
    let agents = column("agent_id", &DataType::Utf8)?;
    let seqs = column("batch_seq", &DataType::Int64)?;
    let crcs = column("crc32", &DataType::Int64)?;
    let (agents, seqs, crcs) = (
        agents.as_string::<i32>(),
        seqs.as_primitive::<Int64Type>(),
        crcs.as_primitive::<Int64Type>(),
    );
    for row in 0..piece.num_rows() {
        tell(Acknowledged {
            agent: agents.value(row),
            seq: u64::try_from(seqs.value(row)).unwrap_or(0),
            // It was written from a u32.
            crc32: crcs.value(row) as u32,
        });
    }
    Ok(())
}
