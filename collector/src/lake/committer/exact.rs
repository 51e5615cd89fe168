//! Whether a table has a batch, told exactly: by its rows.
//!
//! An agent's transaction says how far its line goes in a table, and everything at or below it is
//! there, as long as one collector takes all of an agent's batches. When an agent goes to another
//! collector on the same lake, the first one may still hold a batch in its log while the second has
//! moved the agent's mark beyond it: then only the rows can tell. This takes time in proportion to
//! the files that may have them, and happens rarely.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow::error::ArrowError;
use deltalake::{DeltaTable, DeltaTableError};
use vramscope_wire::Table;

use super::super::{Lake, LakeError, delta_error, io_error};
use super::commit::Marks;
use super::files::Files;
use crate::ingest::wal::{Entry, Wal};

/// Agent and `batch_seq`.
pub(super) type Name = (Arc<str>, u64);

/// Leaves out of `entries` what the table has already from another collector, and lets the log go
/// of it.
pub(super) async fn without_committed(
    wal: &Wal,
    lake: &Lake,
    table: Table,
    entries: Vec<Entry>,
    marks: &Marks,
) -> Result<Vec<Entry>, LakeError> {
    let in_doubt: HashSet<Name> = entries
        .iter()
        .filter(|entry| entry.batch.seq <= marks.before(&entry.batch.agent))
        .map(|entry| (Arc::clone(&entry.batch.agent), entry.batch.seq))
        .collect();
    if in_doubt.is_empty() {
        return Ok(entries);
    }
    let found = there(lake, table, &in_doubt).await?;
    let is_there =
        |entry: &Entry| found.contains(&(Arc::clone(&entry.batch.agent), entry.batch.seq));
    let (there, rest): (Vec<Entry>, Vec<Entry>) = entries.into_iter().partition(is_there);
    if !there.is_empty() {
        tracing::info!(
            table = table.name(),
            batches = there.len(),
            "another collector has committed batches that wait here"
        );
        wal.void(&there).map_err(io_error(wal.root()))?;
    }
    Ok(rest)
}

/// Which of the batches a table has, by its rows or by the ledger: its lines outlive the rows.
pub(super) async fn there(
    lake: &Lake,
    table: Table,
    in_doubt: &HashSet<Name>,
) -> Result<HashSet<Name>, LakeError> {
    let mut found = HashSet::new();
    if in_doubt.is_empty() {
        return Ok(found);
    }
    for place in [table, Table::Batches] {
        let mut delta = lake.table(place);
        delta.update_state().await.map_err(delta_error(place))?;
        lake.set(place, delta.clone());
        found.extend(find(&delta, in_doubt).await.map_err(delta_error(place))?);
    }
    Ok(found)
}

/// Which of the batches have rows (or lines) in a table.
async fn find(
    delta: &DeltaTable,
    wanted: &HashSet<Name>,
) -> Result<HashSet<Name>, DeltaTableError> {
    let seqs = wanted.iter().map(|(_, seq)| *seq as i64);
    let range = seqs.clone().min().unwrap_or(0)..=seqs.max().unwrap_or(0);
    let files = Files::of(delta)?;
    let mut found = HashSet::new();
    for file in files.iter() {
        let columns = ["agent_id", "batch_seq"];
        let mut pieces = files.read(file, &columns, Some(&range)).await?;
        while let Some(piece) = pieces.next().await? {
            collect(&piece, wanted, &mut found)?;
        }
    }
    Ok(found)
}

fn collect(
    piece: &RecordBatch,
    wanted: &HashSet<Name>,
    found: &mut HashSet<Name>,
) -> Result<(), ArrowError> {
    let column = |name: &str, data_type| {
        let column = piece
            .column_by_name(name)
            .ok_or_else(|| ArrowError::SchemaError(format!("column {name:?} is missing")))?;
        cast(column, data_type)
    };
    let agents = column("agent_id", &DataType::Utf8)?;
    let seqs = column("batch_seq", &DataType::Int64)?;
    let mut by_seq: HashMap<u64, Vec<&Name>> = HashMap::new();
    for name in wanted {
        by_seq.entry(name.1).or_default().push(name);
    }
    let seqs = seqs.as_primitive::<Int64Type>();
    for row in 0..piece.num_rows() {
        let candidates = by_seq.get(&(seqs.value(row) as u64));
        for name in candidates.into_iter().flatten() {
            if *name.0 == *agents.as_string::<i32>().value(row) {
                found.insert((*name).clone());
            }
        }
    }
    Ok(())
}
