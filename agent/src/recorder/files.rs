//! The recorder's files of events: what a name tells, what a footer tells, and how rows are picked.
//!
//! ```text
//! recorder/00000000000000000042-1795957500000000000-1795957501000000000-50000.parquet
//!          number               first ts_ns         last ts_ns          rows
//! ```
//!
//! A file is an ordinary file of `alloc_events`. Its number is of the same line as the spool's
//! batches, so the journal tells which files count. Its footer tells which processes it is about.
//! It appears by rename after an fsync: a name stands for a whole file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use arrow::array::{AsArray, BooleanArray, Int64Array, RecordBatch};
use arrow::compute::filter_record_batch;
use arrow::datatypes::Int64Type;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::{Deserialize, Serialize};
use vramscope_wire::{Table, parquet_file};

use super::ranges::Ranges;
use super::state::Stretch;
use crate::Map;
use crate::spool::requeue::renumber;
use crate::spool::rows::AllocRow;

const SUFFIX: &str = ".parquet";
/// The operation of rows that travel at once, whatever the recorder does.
pub const OOM: &str = "oom";

/// What one file has of one process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    pub process_id: i64,
    pub pid: u32,
    /// Rows without those of OOMs, which have travelled by themselves.
    pub rows: u64,
    pub ooms: u64,
    pub first_ns: i64,
    pub last_ns: i64,
}

/// One file of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub number: u64,
    pub first_ns: i64,
    pub last_ns: i64,
    pub rows: u64,
    pub bytes: u64,
    /// By process, if it was looked up.
    pub contents: Option<Arc<Vec<Content>>>,
}

impl Entry {
    pub fn path(&self, folder: &Path) -> PathBuf {
        let Self {
            number,
            first_ns,
            last_ns,
            rows,
            ..
        } = self;
        folder.join(format!("{number:020}-{first_ns}-{last_ns}-{rows}{SUFFIX}"))
    }

    /// All of it.
    pub fn stretch(&self) -> Stretch {
        Stretch {
            first_ns: self.first_ns,
            last_ns: self.last_ns,
            rows: self.rows,
        }
    }

    /// Which processes it is about. Read once.
    pub fn contents(&mut self, folder: &Path) -> anyhow::Result<Arc<Vec<Content>>> {
        if let Some(known) = &self.contents {
            return Ok(Arc::clone(known));
        }
        let contents = Arc::new(read_contents(&self.path(folder))?);
        self.contents = Some(Arc::clone(&contents));
        Ok(contents)
    }
}

fn parse(name: &str) -> Option<Entry> {
    let mut fields = name.strip_suffix(SUFFIX)?.splitn(2, '-');
    let number = fields.next().filter(|field| field.len() == 20)?;
    // Times before 1970 have a sign of their own.
    let rest = fields.next()?;
    let (rest, rows) = rest.rsplit_once('-')?;
    let split = rest.char_indices().skip(1).find(|(_, c)| *c == '-')?.0;
    Some(Entry {
        number: number.parse().ok()?,
        first_ns: rest[..split].parse().ok()?,
        last_ns: rest[split + 1..].parse().ok()?,
        rows: rows.parse().ok()?,
        bytes: 0,
        contents: None,
    })
}

/// The files of events, oldest first. Other files are left alone.
pub fn list(folder: &Path) -> anyhow::Result<Vec<Entry>> {
    let reading = || format!("failed to read {}", folder.display());
    let mut entries = Vec::new();
    for found in std::fs::read_dir(folder).with_context(reading)? {
        let found = found.with_context(reading)?;
        let parsed = found.file_name().to_str().and_then(parse);
        // One that is gone by now was overwritten.
        if let (Some(mut entry), Ok(metadata)) = (parsed, found.metadata()) {
            entry.bytes = metadata.len();
            entries.push(entry);
        }
    }
    entries.sort_by_key(|entry| entry.number);
    Ok(entries)
}

/// Sums up rows by process.
pub fn contents<'a>(rows: impl Iterator<Item = &'a AllocRow>) -> Vec<Content> {
    let mut order = Vec::new();
    let mut found: Map<i64, Content> = Map::default();
    for row in rows {
        let content = found.entry(row.process_id).or_insert_with(|| {
            order.push(row.process_id);
            Content {
                process_id: row.process_id,
                pid: row.pid,
                rows: 0,
                ooms: 0,
                first_ns: row.ts_ns,
                last_ns: row.ts_ns,
            }
        });
        if row.op == OOM {
            content.ooms += 1;
        } else {
            content.rows += 1;
        }
        content.first_ns = content.first_ns.min(row.ts_ns);
        content.last_ns = content.last_ns.max(row.ts_ns);
    }
    order
        .iter()
        .filter_map(|process_id| found.remove(process_id))
        .collect()
}

fn read_contents(path: &Path) -> anyhow::Result<Vec<Content>> {
    let reading = || format!("failed to read {}", path.display());
    let file = File::open(path).with_context(reading)?;
    let note = parquet_file::note(&file).with_context(reading)?;
    let note = note.with_context(|| format!("{} does not say what it holds", path.display()))?;
    serde_json::from_str(&note).with_context(reading)
}

/// Picks rows of one process (or of all) in one range of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pick {
    pub process_id: Option<i64>,
    pub from_ns: i64,
    pub to_ns: i64,
}

impl Pick {
    fn takes(&self, process_id: i64, ts_ns: i64) -> bool {
        self.process_id.is_none_or(|wanted| wanted == process_id)
            && (self.from_ns..self.to_ns).contains(&ts_ns)
    }

    /// Whether something of it can be among these rows.
    pub fn meets(&self, content: &Content) -> bool {
        self.process_id.is_none_or(|id| id == content.process_id)
            && content.first_ns < self.to_ns
            && content.last_ns >= self.from_ns
    }
}

fn longs<'a>(batch: &'a RecordBatch, name: &str) -> anyhow::Result<&'a Int64Array> {
    batch
        .column_by_name(name)
        .and_then(|column| column.as_primitive_opt::<Int64Type>())
        .with_context(|| format!("no column {name:?} of whole numbers"))
}

fn ops(batch: &RecordBatch) -> anyhow::Result<&arrow::array::StringArray> {
    batch
        .column_by_name("op")
        .and_then(|column| column.as_string_opt::<i32>())
        .context("no column \"op\"")
}

/// Counts rows that would travel and have not: of one process, in one range.
pub fn count(path: &Path, pick: Pick, travelled: &Ranges) -> anyhow::Result<(u64, u64)> {
    let reading = || format!("failed to read {}", path.display());
    let file = File::open(path).with_context(reading)?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).with_context(reading)?;
    let mask = ProjectionMask::columns(builder.parquet_schema(), ["process_id", "ts_ns", "op"]);
    let (mut left, mut gone) = (0, 0);
    for batch in builder
        .with_projection(mask)
        .build()
        .with_context(reading)?
    {
        let batch = batch.with_context(reading)?;
        let (processes, times) = (longs(&batch, "process_id")?, longs(&batch, "ts_ns")?);
        let ops = ops(&batch)?;
        for row in 0..batch.num_rows() {
            let ts_ns = times.value(row);
            if pick.takes(processes.value(row), ts_ns) && ops.value(row) != OOM {
                if travelled.contains(ts_ns) {
                    gone += 1;
                } else {
                    left += 1;
                }
            }
        }
    }
    Ok((left, gone))
}

/// What a file had.
#[derive(Debug, Default)]
pub struct Picked {
    pub batches: Vec<RecordBatch>,
    pub rows: u64,
    /// Rows that the pick meets and that had travelled before.
    pub rows_before: u64,
}

/// The rows of a file that are to travel, with another number for the batch that carries them.
/// Rows of OOMs are not among them.
pub fn pick_untravelled(
    path: &Path,
    pick: Pick,
    travelled: &Ranges,
    batch_seq: u64,
) -> anyhow::Result<Picked> {
    let reading = || format!("failed to read {}", path.display());
    let file = File::open(path).with_context(reading)?;
    let mut picked = Picked::default();
    for batch in parquet_file::rows(Table::AllocEvents, file).with_context(reading)? {
        let batch = batch.with_context(reading)?;
        let (processes, times) = (longs(&batch, "process_id")?, longs(&batch, "ts_ns")?);
        let ops = ops(&batch)?;
        let mut before = 0;
        let wanted: BooleanArray = (0..batch.num_rows())
            .map(|row| {
                let ts_ns = times.value(row);
                if !pick.takes(processes.value(row), ts_ns) || ops.value(row) == OOM {
                    return Some(false);
                }
                let is_new = !travelled.contains(ts_ns);
                before += u64::from(!is_new);
                Some(is_new)
            })
            .collect();
        picked.rows_before += before;
        if wanted.true_count() == 0 {
            continue;
        }
        let rows = renumber(&filter_record_batch(&batch, &wanted)?, batch_seq)?;
        picked.rows += rows.num_rows() as u64;
        picked.batches.push(rows);
    }
    Ok(picked)
}

/// The rows of a file that a person asked for, all of them, as they are.
pub fn pick_all(path: &Path, pick: Pick) -> anyhow::Result<Vec<RecordBatch>> {
    let reading = || format!("failed to read {}", path.display());
    let file = File::open(path).with_context(reading)?;
    let mut picked = Vec::new();
    for batch in parquet_file::rows(Table::AllocEvents, file).with_context(reading)? {
        let batch = batch.with_context(reading)?;
        let (processes, times) = (longs(&batch, "process_id")?, longs(&batch, "ts_ns")?);
        let wanted: BooleanArray = (0..batch.num_rows())
            .map(|row| Some(pick.takes(processes.value(row), times.value(row))))
            .collect();
        if wanted.true_count() > 0 {
            picked.push(filter_record_batch(&batch, &wanted)?);
        }
    }
    Ok(picked)
}

/// The stacks that rows refer to.
pub fn stack_ids(batch: &RecordBatch, mut see: impl FnMut(i64)) {
    for name in ["stack_id", "alloc_stack_id"] {
        if let Ok(ids) = longs(batch, name) {
            ids.iter().flatten().for_each(&mut see);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_number_times_and_rows() {
        let entry = Entry {
            number: 42,
            first_ns: -5,
            last_ns: 1_795_957_501_000_000_000,
            rows: 50_000,
            bytes: 0,
            contents: None,
        };
        let path = entry.path(Path::new(""));
        let name = path.to_str().unwrap();
        assert_eq!(
            name,
            "00000000000000000042--5-1795957501000000000-50000.parquet"
        );
        assert_eq!(parse(name), Some(entry.clone()));
        let both = Entry {
            last_ns: -1,
            ..entry
        };
        assert_eq!(
            parse(both.path(Path::new("")).to_str().unwrap()),
            Some(both)
        );
        for other in [
            "state",
            "stacks-0000000001.parquet",
            "00000000000000000042-alloc_events.parquet",
            "00000000000000000042-1-2-3.tmp",
            "42-1-2-3.parquet",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
