//! Writes Parquet files so that a crash leaves whole files or none.

use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Context;
use vramscope_wire::{Table, parquet_file};

use super::rows::Rows;
use super::tables::{Origin, batches};

/// One file of the spool: `00000000000000000042-alloc_events.parquet`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpoolFile {
    pub batch_seq: u64,
    pub table: Table,
    pub path: PathBuf,
}

const SUFFIX: &str = ".parquet";

/// Folder below the spool for files that no collector takes.
pub const REJECTED: &str = "rejected";

/// The files of a spool folder, oldest first. Other files are left alone.
pub fn list(folder: &Path) -> anyhow::Result<Vec<SpoolFile>> {
    let mut files = Vec::new();
    visit(folder, |file| files.push(file))?;
    files.sort();
    Ok(files)
}

/// The oldest `count` files with numbers in a range: of a folder with a hundred thousand files
/// no more is wanted in memory.
pub fn oldest(folder: &Path, range: Range<u64>, count: usize) -> anyhow::Result<Vec<SpoolFile>> {
    let mut files = BinaryHeap::new();
    visit(folder, |file| {
        if range.contains(&file.batch_seq) {
            files.push(file);
            if files.len() > count {
                files.pop();
            }
        }
    })?;
    Ok(files.into_sorted_vec())
}

/// Shows the files of a spool folder, in any order.
pub fn visit(folder: &Path, mut see: impl FnMut(SpoolFile)) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder)
        .with_context(|| format!("failed to read spool folder {}", folder.display()))?
    {
        let path = entry
            .with_context(|| format!("failed to read spool folder {}", folder.display()))?
            .path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let parsed = name
            .strip_suffix(SUFFIX)
            .and_then(|stem| stem.split_once('-'))
            .and_then(|(seq, table)| Some((seq.parse().ok()?, Table::by_name(table)?)));
        if let Some((batch_seq, table)) = parsed {
            see(SpoolFile {
                batch_seq,
                table,
                path,
            });
        }
    }
    Ok(())
}

/// The rows of one table as the bytes of one file.
pub fn encode(table: Table, rows: &Rows, origin: Origin<'_>) -> anyhow::Result<Vec<u8>> {
    Ok(parquet_file::encode_pieces(
        table,
        batches(table, rows, origin),
    )?)
}

/// Path of a file of the spool.
pub fn spool_path(folder: &Path, batch_seq: u64, table: Table) -> PathBuf {
    folder.join(format!("{batch_seq:020}-{}{SUFFIX}", table.name()))
}

/// Writes the rows of one table as one file of a trace: `FOLDER/alloc_events/0000000042.parquet`.
pub fn write_trace_file(
    folder: &Path,
    table: Table,
    rows: &Rows,
    origin: Origin<'_>,
) -> anyhow::Result<PathBuf> {
    let folder = folder.join(table.name());
    fs::create_dir_all(&folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    let path = folder.join(format!("{:010}{SUFFIX}", origin.batch_seq));
    write_durably(&path, &encode(table, rows, origin)?)?;
    sync_folder(&folder)?;
    Ok(path)
}

/// Temporary file, fsync, rename. On an error nothing of it is left.
pub fn write_durably(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let temporary = path.with_extension("tmp");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| {
        // Half a file would take the space that the next attempt needs.
        let _ = fs::remove_file(&temporary);
        anyhow::Error::new(error).context(format!("failed to write {}", path.display()))
    })
}

/// Makes names in a folder durable.
pub fn sync_folder(folder: &Path) -> anyhow::Result<()> {
    File::open(folder)
        .and_then(|file| file.sync_all())
        .with_context(|| format!("failed to sync folder {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_a_range_come_in_order() {
        let spool = tempfile::tempdir().unwrap();
        for seq in [12, 3, 1, 7, 20] {
            fs::write(spool_path(spool.path(), seq, Table::Devices), "").unwrap();
        }
        fs::write(spool.path().join("journal"), "").unwrap();
        let seqs = |range, count| -> Vec<u64> {
            let files = oldest(spool.path(), range, count).unwrap();
            files.iter().map(|file| file.batch_seq).collect()
        };
        assert_eq!(seqs(0..20, 10), [1, 3, 7, 12]);
        assert_eq!(seqs(2..100, 2), [3, 7]);
        assert_eq!(list(spool.path()).unwrap().len(), 5);
    }

    /// A full disk leaves no half file behind, whose space would be missed.
    #[test]
    fn a_failed_write_leaves_nothing() {
        let spool = tempfile::tempdir().unwrap();
        // A folder is in the way of the rename.
        let path = spool.path().join("00000000000000000001-devices.parquet");
        fs::create_dir(&path).unwrap();
        let error = format!("{:#}", write_durably(&path, b"bytes").unwrap_err());
        assert!(error.contains("00000000000000000001-devices.parquet"));
        assert_eq!(fs::read_dir(spool.path()).unwrap().count(), 1);
    }
}
