//! The table `batches`: one line for every batch that was acknowledged.
//!
//! A line is written after the batch's rows are committed and before the log lets go of it. The
//! transaction `log:LOG_ID:TABLE` in the same commit says up to which record of a log the lines of
//! one table's batches are there: a restart between the two commits writes exactly those that are
//! missing. `fsck` compares the lines with the rows.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow::error::ArrowError;
use deltalake::{DeltaTable, DeltaTableError};
use vramscope_wire::Table;

use super::super::{Lake, LakeError};
use super::exact::Files;
use super::load::Unsorted;
use super::{checkpoint_if_due, commit, ledger_transaction, recover};
use crate::ingest::placing::{HOUR_US, Placing};
use crate::ingest::wal::{Entry, Wal};

/// How an acknowledgement was kept.
pub(super) const FSYNC: &str = "fsync";

/// Writes the lines of all batches whose rows are committed, and lets the log go of them.
pub(super) async fn write(wal: &Wal, lake: &Lake) -> Result<(), LakeError> {
    let entries = wal.unledgered();
    if entries.is_empty() {
        return Ok(());
    }
    let failed = |source| LakeError::Arrow {
        table: Table::Batches.name(),
        source,
    };
    let rows = sorted_lines(&entries, FSYNC, wal.id()).map_err(failed)?;
    let mut marks: HashMap<Arc<str>, u64> = HashMap::new();
    for entry in &entries {
        let name = Arc::from(ledger_transaction(wal.id(), entry.batch.table));
        let mark = marks.entry(name).or_default();
        *mark = entry.number.max(*mark);
    }
    match commit::commit(lake, Table::Batches, rows.chunks(), marks).await {
        Ok(version) => {
            wal.finish(&entries);
            checkpoint_if_due(lake, Table::Batches, version).await;
            Ok(())
        }
        Err(error) => {
            recover::reload(wal, lake, Table::Batches).await?;
            Err(error)
        }
    }
}

fn sorted_lines(
    entries: &[Entry],
    promise: &str,
    collector: &str,
) -> Result<super::load::Sorted, ArrowError> {
    // The collector's own clock is believed.
    let placing = Placing {
        arrived_us: 0,
        earliest_us: i64::MIN,
        latest_us: i64::MAX,
    };
    let mut rows = Unsorted::new(Table::Batches)?;
    rows.push(lines(entries, promise, collector)?, &placing)?;
    Ok(rows.sort())
}

fn lines(entries: &[Entry], promise: &str, collector: &str) -> Result<RecordBatch, ArrowError> {
    // Counts come from files of at most 1 GiB, numbers are checked at the door: they fit.
    let numbers = |of: fn(&Entry) -> u64| -> ArrayRef {
        let values = entries.iter().map(|entry| of(entry) as i64);
        Arc::new(Int64Array::from_iter_values(values))
    };
    let texts = |of: fn(&Entry) -> Option<&str>| -> ArrayRef {
        Arc::new(StringArray::from_iter(entries.iter().map(of)))
    };
    let times = |of: fn(&Entry) -> Option<i64>| -> ArrayRef {
        let values = TimestampMicrosecondArray::from_iter(entries.iter().map(of));
        Arc::new(values.with_timezone("UTC"))
    };
    let all = |text: &str| -> ArrayRef { Arc::new(StringArray::from(vec![text; entries.len()])) };
    let columns = vec![
        times(|entry| Some(entry.batch.placing.arrived_us)),
        texts(|entry| Some(&entry.batch.agent)),
        numbers(|entry| entry.batch.seq),
        texts(|entry| entry.batch.host.as_deref()),
        texts(|entry| Some(entry.batch.table.name())),
        numbers(|entry| entry.batch.rows),
        numbers(|entry| entry.bytes),
        numbers(|entry| u64::from(entry.batch.crc32)),
        times(|entry| entry.batch.times.map(|(earliest, _)| earliest)),
        times(|entry| entry.batch.times.map(|(_, latest)| latest)),
        numbers(|entry| entry.batch.misdated),
        all(promise),
        all(collector),
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
