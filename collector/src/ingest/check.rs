//! What a batch must be before it is believed. Everything here comes over the network, so
//! nothing is trusted: sizes are bounded before they are used, and names are checked before
//! they touch a path.
//!
//! A batch that fails is one that can never be taken; what is only refused for now (disk full)
//! is decided elsewhere.

use std::collections::HashSet;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::TimestampMicrosecondType;
use bytes::Bytes;
use parquet::file::metadata::ParquetMetaDataReader;
use vramscope_wire::parquet_file::{self, Opened, ReadError};
use vramscope_wire::proto::Batch;
use vramscope_wire::{SCHEMA_VERSION, Table};

use super::placing::Placing;
use super::wal;
use crate::access::agents::{Claim, Impostor};

/// Most rows of one batch.
const MAX_ROWS: u64 = 16 << 20;

/// Most memory that a batch's rows may take. Real events take about twenty times their file;
/// a crafted file could take a million times.
const MAX_DECODED_BYTES: u64 = 1 << 30;

/// Longest name of a host, in bytes: Linux allows 64, DNS 255.
const MAX_HOST: usize = 255;

/// Most hours that the rows of one batch may touch: each becomes a file of its own in the lake.
const MAX_HOURS: usize = 1000;

/// Earliest and latest `ts`, microseconds since 1970: from 1970 to the end of 9999. Beyond it
/// date arithmetic fails in some readers of the lake.
const TS_RANGE: std::ops::Range<i64> = 0..253_402_300_800_000_000;

/// Why a batch can never be taken.
#[derive(Debug, thiserror::Error)]
pub enum Reject {
    /// The agent's name cannot be a folder.
    #[error("agent_id {0:?} is not 1 to 128 letters, digits, '-', '_' or '.'")]
    AgentId(String),
    /// Numbers start at 1, and the lake keeps them as signed 64-bit integers.
    #[error("batch_seq {0} is not between 1 and {max}", max = i64::MAX)]
    Seq(u64),
    /// No host has such a name.
    #[error("host has {0} bytes, more than the {MAX_HOST} that a name may have")]
    Host(usize),
    /// The name was used before, for other bytes. Counted and told as an alarm.
    #[error(
        "another batch with CRC-32 {stored:08x} was stored under this name, this one has {sent:08x}; \
         two agents with one agent_id, or a spool that went back in time"
    )]
    Conflict {
        /// CRC-32 of what was stored.
        stored: u32,
        /// CRC-32 of what came now.
        sent: u32,
    },
    /// No such table.
    #[error("unknown table {0:?}; this collector may be older than the agent")]
    Table(String),
    /// A table about the collector itself.
    #[error("table {0} is written by collectors alone")]
    Own(&'static str),
    /// The agent is newer than this collector.
    #[error(
        "schema version {0} is newer than this collector's {SCHEMA_VERSION}; upgrade the collector first"
    )]
    Version(u32),
    /// The file is larger than this collector takes.
    #[error("the file has {bytes} bytes, more than max_batch_bytes {limit}")]
    Large {
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Damaged on the way or in the spool.
    #[error("CRC-32 is {found:08x}, expected {sent:08x}")]
    Crc {
        /// What the bytes say.
        found: u32,
        /// What the batch says.
        sent: u32,
    },
    /// Not this table's rows.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Another number of rows than announced.
    #[error("the file has {found} rows, the batch says {sent}")]
    Rows {
        /// In the file.
        found: u64,
        /// In the batch.
        sent: u64,
    },
    /// More rows than one batch may have.
    #[error("{0} rows are more than the {MAX_ROWS} of one batch")]
    ManyRows(u64),
    /// A small file that would become a large memory.
    #[error("the rows take more than {0} bytes of memory")]
    Bomb(u64),
    /// A time outside of what the lake's readers can hold.
    #[error("ts {0} (microseconds since 1970) lies outside of the years 1970 to 9999")]
    Time(i64),
    /// Rows of too many hours.
    #[error("the rows touch more than {MAX_HOURS} different hours")]
    ManyHours,
    /// The agent writes as another one.
    #[error(transparent)]
    Impostor(#[from] Impostor),
    /// The decoder did not survive the file.
    #[error("the decoder failed on the file")]
    Panicked,
}

impl Reject {
    /// In a word, for the metrics.
    pub fn cause(&self) -> &'static str {
        match self {
            Reject::AgentId(_) => "agent_id",
            Reject::Seq(_) => "batch_seq",
            Reject::Host(_) => "host",
            Reject::Conflict { .. } => "conflict",
            Reject::Table(_) | Reject::Own(_) => "table",
            Reject::Version(_) => "schema_version",
            Reject::Large { .. } => "large",
            Reject::Crc { .. } => "crc32",
            Reject::Read(_) => "columns",
            Reject::Rows { .. } | Reject::ManyRows(_) => "rows",
            Reject::Bomb(_) => "bomb",
            Reject::Time(_) | Reject::ManyHours => "time",
            Reject::Impostor(_) => "impostor",
            Reject::Panicked => "decoder",
        }
    }
}

/// Checks everything but the rows, and tells the table. Cheap.
pub fn envelope(batch: &Batch, max_batch_bytes: u64) -> Result<Table, Reject> {
    if !wal::is_agent_id(&batch.agent_id) {
        // Cut: the message goes into logs.
        return Err(Reject::AgentId(batch.agent_id.chars().take(64).collect()));
    }
    if batch.batch_seq == 0 || i64::try_from(batch.batch_seq).is_err() {
        return Err(Reject::Seq(batch.batch_seq));
    }
    if batch.host.len() > MAX_HOST {
        return Err(Reject::Host(batch.host.len()));
    }
    let table = Table::by_name(&batch.table)
        .ok_or_else(|| Reject::Table(batch.table.chars().take(64).collect()))?;
    if !table.is_from_agents() {
        return Err(Reject::Own(table.name()));
    }
    if batch.schema_version > SCHEMA_VERSION {
        return Err(Reject::Version(batch.schema_version));
    }
    let bytes = batch.parquet.len() as u64;
    if bytes > max_batch_bytes {
        return Err(Reject::Large {
            bytes,
            limit: max_batch_bytes,
        });
    }
    Ok(table)
}

/// What the rows of a good batch amount to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// Rows in the file.
    pub rows: u64,
    /// Memory they take when decoded.
    pub decoded_bytes: u64,
    /// Earliest and latest `ts`; `None` without rows or without times.
    pub times: Option<(i64, i64)>,
    /// Rows whose time is not believed.
    pub misdated: u64,
}

/// Checks the file itself: checksum, then the footer's sizes, then every row, a piece at a
/// time. Takes processor time in proportion to the rows.
pub fn rows(
    table: Table,
    parquet: Bytes,
    crc32: u32,
    announced_rows: u64,
    claim: Option<&Claim>,
    placing: &Placing,
) -> Result<Checked, Reject> {
    let found = crc32fast::hash(&parquet);
    if found != crc32 {
        return Err(Reject::Crc { found, sent: crc32 });
    }
    rows_within(
        table,
        parquet,
        announced_rows,
        claim,
        placing,
        MAX_DECODED_BYTES,
    )
}

fn rows_within(
    table: Table,
    parquet: Bytes,
    announced_rows: u64,
    claim: Option<&Claim>,
    placing: &Placing,
    max_decoded_bytes: u64,
) -> Result<Checked, Reject> {
    let file = Opened::new(parquet)?;
    footer(file.announced(), announced_rows, max_decoded_bytes)?;
    let mut checked = Checked {
        rows: 0,
        decoded_bytes: 0,
        times: None,
        misdated: 0,
    };
    let mut hours = HashSet::new();
    for piece in file.rows(table)? {
        let piece = piece?;
        checked.rows += piece.num_rows() as u64;
        checked.decoded_bytes += piece.get_array_memory_size() as u64;
        if checked.decoded_bytes > max_decoded_bytes {
            return Err(Reject::Bomb(max_decoded_bytes));
        }
        if let Some(claim) = claim {
            claim.check(&piece)?;
        }
        if table.partitioned_by_time() {
            times(&piece, placing, &mut checked, &mut hours)?;
        }
    }
    if checked.rows != announced_rows {
        return Err(Reject::Rows {
            found: checked.rows,
            sent: announced_rows,
        });
    }
    Ok(checked)
}

/// The rows that a file's footer tells, 0 if it cannot be read.
pub fn announced_rows(parquet: &Bytes) -> u64 {
    let footer =
        parquet_file::survive(|| Ok(ParquetMetaDataReader::new().parse_and_finish(parquet)?));
    let rows = footer.map_or(0, |footer| footer.file_metadata().num_rows());
    u64::try_from(rows).unwrap_or(0)
}

/// The footer may lie, which is why the rows are counted again; an honest one saves the work.
fn footer(
    (rows, bytes): (u64, u64),
    announced_rows: u64,
    max_decoded_bytes: u64,
) -> Result<(), Reject> {
    if rows > MAX_ROWS {
        return Err(Reject::ManyRows(rows));
    }
    if rows != announced_rows {
        return Err(Reject::Rows {
            found: rows,
            sent: announced_rows,
        });
    }
    if bytes > max_decoded_bytes {
        return Err(Reject::Bomb(max_decoded_bytes));
    }
    Ok(())
}

fn times(
    piece: &RecordBatch,
    placing: &Placing,
    checked: &mut Checked,
    hours: &mut HashSet<i64>,
) -> Result<(), Reject> {
    // `rows` conformed the piece to the table's schema, where `ts` is a required timestamp.
    let Some(ts) = piece
        .column_by_name("ts")
        .and_then(|ts| ts.as_primitive_opt::<TimestampMicrosecondType>())
    else {
        return Ok(());
    };
    // Rows come by and large in order of time: most of the time the hour is the last one's.
    let mut last = None;
    for &ts in ts.values() {
        if !TS_RANGE.contains(&ts) {
            return Err(Reject::Time(ts));
        }
        let (earliest, latest) = checked.times.unwrap_or((ts, ts));
        checked.times = Some((earliest.min(ts), latest.max(ts)));
        checked.misdated += u64::from(!placing.believes(ts));
        let hour = placing.hour(ts);
        if last.replace(hour) != Some(hour) {
            hours.insert(hour);
        }
    }
    if hours.len() > MAX_HOURS {
        Err(Reject::ManyHours)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        ArrayRef, Int64Array, ListArray, StringArray, StructArray, TimestampMicrosecondArray,
    };
    use vramscope_wire::schema::frame_fields;

    use super::*;
    use crate::ingest::placing::HOUR_US;

    /// Believes every time.
    const ANY: Placing = Placing {
        arrived_us: 0,
        earliest_us: i64::MIN,
        latest_us: i64::MAX,
    };

    fn stacks(folded: Vec<&str>) -> Bytes {
        let rows = folded.len();
        let frames = StructArray::new_null(frame_fields(), 0);
        let element = match Table::Stacks.schema().field(1).data_type() {
            arrow::datatypes::DataType::List(element) => Arc::clone(element),
            other => panic!("{other}"),
        };
        let offsets = arrow::buffer::OffsetBuffer::from_lengths(vec![0; rows]);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from(vec![1; rows])),
            Arc::new(ListArray::new(element, offsets, Arc::new(frames), None)),
            Arc::new(StringArray::from(folded)),
            Arc::new(StringArray::from(vec!["a"; rows])),
            Arc::new(Int64Array::from(vec![1; rows])),
        ];
        let batch = RecordBatch::try_new(Table::Stacks.schema(), columns).unwrap();
        parquet_file::encode(Table::Stacks, &[batch])
            .unwrap()
            .into()
    }

    /// Ten thousand rows share one text of 10 kB: the dictionary holds it once, memory ten
    /// thousand times.
    #[test]
    fn a_small_file_with_large_rows_is_refused_before_it_is_in_memory() {
        let text = "x".repeat(10_000);
        let file = stacks(vec![&text; 10_000]);
        assert!(file.len() < 100_000, "{}", file.len());
        let refused =
            rows_within(Table::Stacks, file.clone(), 10_000, None, &ANY, 50_000_000).unwrap_err();
        assert!(matches!(refused, Reject::Bomb(50_000_000)), "{refused}");
        let taken = rows_within(Table::Stacks, file, 10_000, None, &ANY, 1 << 30).unwrap();
        assert!(
            taken.rows == 10_000 && taken.decoded_bytes > 100_000_000,
            "{taken:?}"
        );
    }

    /// A row each in 1001 hours would become 1001 files.
    #[test]
    fn rows_of_too_many_hours_are_refused() {
        let with_hours = |count: i64| {
            let ts =
                TimestampMicrosecondArray::from_iter_values((0..count).map(|hour| hour * HOUR_US));
            let schema = arrow::datatypes::Schema::new(vec![arrow::datatypes::Field::new(
                "ts",
                vramscope_wire::schema::timestamp(),
                false,
            )]);
            RecordBatch::try_new(Arc::new(schema), vec![Arc::new(ts.with_timezone("UTC"))]).unwrap()
        };
        let judge = |count, placing: &Placing| {
            let mut checked = Checked {
                rows: 0,
                decoded_bytes: 0,
                times: None,
                misdated: 0,
            };
            times(
                &with_hours(count),
                placing,
                &mut checked,
                &mut HashSet::new(),
            )?;
            Ok((checked.times, checked.misdated))
        };
        assert_eq!(judge(1000, &ANY).unwrap(), (Some((0, 999 * HOUR_US)), 0));
        assert!(matches!(judge(1001, &ANY), Err(Reject::ManyHours)));
        // Times that are not believed do not make partitions.
        let soon = Placing {
            arrived_us: 0,
            earliest_us: 0,
            latest_us: 23 * HOUR_US,
        };
        assert_eq!(
            judge(1001, &soon).unwrap(),
            (Some((0, 1000 * HOUR_US)), 1001 - 24)
        );
    }
}
