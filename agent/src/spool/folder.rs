//! Writes Parquet files so that a crash leaves whole files or none.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use vramscope_wire::{Table, parquet_file};

use super::rows::Rows;
use super::tables::{Origin, batch};

/// One file of the spool: `00000000000000000042-alloc_events.parquet`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpoolFile {
    pub batch_seq: u64,
    pub table: Table,
    pub path: PathBuf,
}

const SUFFIX: &str = ".parquet";

/// The files of a spool folder, oldest first. Other files are left alone.
pub fn list(folder: &Path) -> anyhow::Result<Vec<SpoolFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)
        .with_context(|| format!("failed to read spool folder {}", folder.display()))?
    {
        let path = entry?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let parsed = name
            .strip_suffix(SUFFIX)
            .and_then(|stem| stem.split_once('-'))
            .and_then(|(seq, table)| Some((seq.parse().ok()?, Table::by_name(table)?)));
        if let Some((batch_seq, table)) = parsed {
            files.push(SpoolFile {
                batch_seq,
                table,
                path,
            });
        }
    }
    files.sort();
    Ok(files)
}

/// Writes the rows of one table as one file of the spool and fsyncs it; the folder has to be
/// synced by the caller, once for all files.
pub fn write_spool_file(
    folder: &Path,
    table: Table,
    rows: &Rows,
    origin: Origin<'_>,
) -> anyhow::Result<SpoolFile> {
    let path = folder.join(format!("{:020}-{}{SUFFIX}", origin.batch_seq, table.name()));
    write(&path, table, rows, origin)?;
    Ok(SpoolFile {
        batch_seq: origin.batch_seq as u64,
        table,
        path,
    })
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
    write(&path, table, rows, origin)?;
    sync_folder(&folder)?;
    Ok(path)
}

fn write(path: &Path, table: Table, rows: &Rows, origin: Origin<'_>) -> anyhow::Result<()> {
    let batch = batch(table, rows, origin)?;
    let bytes = parquet_file::encode(table, &[batch])?;
    write_durably(path, &bytes)
}

/// Temporary file, fsync, rename.
pub fn write_durably(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let temporary = path.with_extension("tmp");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().with_context(|| format!("failed to write {}", path.display()))
}

/// Makes names in a folder durable.
pub fn sync_folder(folder: &Path) -> anyhow::Result<()> {
    File::open(folder)
        .and_then(|file| file.sync_all())
        .with_context(|| format!("failed to sync folder {}", folder.display()))
}
