//! How the lake's files are laid out: what a question has to read depends on it. Here and not in the
//! collector, since what measures questions writes the same files.
//!
//! Rows of a file are sorted for the questions people ask, `alloc_events` by host, process and seq: one
//! process lies together. Three things let a reader skip the rest, from coarse to fine:
//! - the table's log tells each file's partition and the range of its columns;
//! - a row group is small ([`ROW_GROUP_ROWS`]), and its range of host and process with it;
//! - pages ([`PAGE_ROWS`]) have ranges of their own in the page index.
//!
//! A Bloom filter says of a row group that a stack is not in it: stacks are asked for by their id,
//! and lie all over a file. It takes some 5 KB a row group.
//!
//! Both kinds of file differ only in how hard they are compressed: a fresh one is merged within
//! minutes, a settled one is read for months.

use crate::{Table, parquet_file};
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

/// Rows of a row group. Smaller ones let readers skip more and cost bytes and time in every full
/// scan: of 131,072 events with 20 bytes each a reader takes 2.6 MB at least.
pub const ROW_GROUP_ROWS: usize = 131_072;

/// Encoded bytes of a row group, for tables with large rows: who merges files holds one row group
/// of each.
pub const ROW_GROUP_BYTES: usize = 32 << 20;

/// Rows of a page.
const PAGE_ROWS: usize = 20_000;

/// A file of a partition is closed and another begun at this size.
pub const TARGET_FILE_BYTES: u64 = 256 << 20;

/// Different stacks in a row group, at most a few thousand; the filter is sized for them.
const STACKS_OF_A_GROUP: u64 = 4096;

/// Texts that say nothing about a whole page or row group: keeping their ranges costs more time
/// than it saves.
const WITHOUT_RANGE: [&str; 5] = ["boot_id", "agent_id", "source", "api", "stack_quality"];

/// How long a file is to live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As it is committed, until it is merged.
    Fresh,
    /// As it comes out of a merge.
    Settled,
}

/// How a file of a table is written.
pub fn properties(table: Table, kind: Kind) -> Result<WriterProperties, ParquetError> {
    // Level 3 is some per cent smaller and takes twice the time.
    let level = match kind {
        Kind::Fresh => 1,
        Kind::Settled => 3,
    };
    let mut properties = parquet_file::encodings(WriterProperties::builder())
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(level)?))
        .set_statistics_enabled(EnabledStatistics::Page)
        .set_data_page_row_count_limit(PAGE_ROWS)
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
        .set_max_row_group_bytes(Some(ROW_GROUP_BYTES));
    for column in WITHOUT_RANGE {
        let path = ColumnPath::from(column);
        properties = properties.set_column_statistics_enabled(path, EnabledStatistics::None);
    }
    if matches!(table, Table::AllocEvents | Table::StackWindows) {
        let stack = ColumnPath::from("stack_id");
        properties = properties
            .set_column_bloom_filter_enabled(stack.clone(), true)
            .set_column_bloom_filter_max_ndv(stack, STACKS_OF_A_GROUP);
    }
    Ok(properties.build())
}
