//! A trace: plain Parquet files in one folder per table, as the agent writes them.
//!
//! Every file is checked before it is believed, once: its footer is read and its columns are
//! compared with the data model's. Optional columns that a file lacks (it is older than the
//! column) read as NULL; columns we do not know (it is newer) are left out.
//! Names that start with `.` or `_`, and names that do not end in `.parquet`, are files in the
//! making and are passed over.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::catalog::TableProvider;
use datafusion::datasource::MemTable;
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::{
    ListingOptions, ListingTable, ListingTableConfig, ListingTableUrl,
};
use datafusion::prelude::SessionContext;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use url::Url;
use vramscope_wire::Table;

use crate::error::DamagedFile;
use crate::{Error, texts};

/// One file as it was when the folder was listed. A file that changed is another file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TraceFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was last written, if the file system says.
    pub modified: Option<SystemTime>,
}

/// The Parquet files of a table's folder, by name. A folder that is not there has none.
pub fn list(dir: &Path) -> Result<Vec<TraceFile>, Error> {
    let failed = |cause| Error::Io {
        path: dir.to_path_buf(),
        cause,
    };
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        if !is_finished_parquet(&path) {
            continue;
        }
        let metadata = match std::fs::metadata(&path) {
            Ok(metadata) => metadata,
            // An agent deletes a file once a collector has it.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(cause) => return Err(Error::Io { path, cause }),
        };
        files.push(TraceFile {
            path,
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
        });
    }
    files.sort();
    Ok(files)
}

fn is_finished_parquet(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(".parquet") && !name.starts_with(['.', '_'])
}

/// Reads a file's footer and compares its columns with the table's.
pub fn check_footer(table: Table, path: &Path) -> Result<(), DamagedFile> {
    open_checked(table, path).map(|_| ())
}

/// As [`check_footer`], and decodes all rows: finds damage behind a sound footer. Costs as much
/// as reading the file.
pub fn check_rows(table: Table, path: &Path) -> Result<(), DamagedFile> {
    decode(path, open_checked(table, path)?)
}

/// Decodes all rows of a file, whatever its columns.
pub fn check_decodes(path: &Path) -> Result<(), DamagedFile> {
    decode(path, open(path)?)
}

fn decode(path: &Path, file: ParquetRecordBatchReaderBuilder<File>) -> Result<(), DamagedFile> {
    let rows = file.build().map_err(|e| damaged(path, e))?;
    for batch in rows {
        batch.map_err(|e| damaged(path, e))?;
    }
    Ok(())
}

fn damaged(path: &Path, reason: impl std::fmt::Display) -> DamagedFile {
    DamagedFile {
        path: path.to_path_buf(),
        reason: reason.to_string(),
    }
}

fn open(path: &Path) -> Result<ParquetRecordBatchReaderBuilder<File>, DamagedFile> {
    let file = File::open(path).map_err(|e| damaged(path, e))?;
    ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| damaged(path, e))
}

fn open_checked(
    table: Table,
    path: &Path,
) -> Result<ParquetRecordBatchReaderBuilder<File>, DamagedFile> {
    let builder = open(path)?;
    match column_difference(table, builder.schema()) {
        Some(difference) => Err(damaged(
            path,
            format!("not a file of table {}: {difference}", table.name()),
        )),
        None => Ok(builder),
    }
}

fn column_difference(table: Table, found: &Schema) -> Option<String> {
    for wanted in table.schema().fields() {
        match found.field_with_name(wanted.name()) {
            Err(_) if wanted.is_nullable() => {}
            Err(_) => return Some(format!("column {:?} is missing", wanted.name())),
            Ok(field) if !field.data_type().equals_datatype(wanted.data_type()) => {
                return Some(format!(
                    "column {:?} is {}, expected {}",
                    wanted.name(),
                    field.data_type(),
                    wanted.data_type()
                ));
            }
            Ok(_) => {}
        }
    }
    None
}

/// A provider over exactly these files, which the caller has checked.
pub fn provider(
    session: &SessionContext,
    table: Table,
    files: &[TraceFile],
) -> Result<Arc<dyn TableProvider>, Error> {
    if files.is_empty() {
        return empty(table);
    }
    let mut urls = Vec::with_capacity(files.len());
    for file in files {
        let absolute = std::path::absolute(&file.path).map_err(|cause| Error::Io {
            path: file.path.clone(),
            cause,
        })?;
        // An absolute path always makes a file URL. A URL instead of a path, because DataFusion
        // would take `[`, `*` and `?` in a path for a pattern.
        let url = Url::from_file_path(&absolute).expect("an absolute path");
        urls.push(ListingTableUrl::try_new(url, None)?);
    }
    let format = ParquetFormat::new().with_options(session.state().default_table_options().parquet);
    let options = ListingOptions::new(Arc::new(format)).with_file_extension(".parquet");
    let config = ListingTableConfig::new_with_multi_paths(urls)
        .with_listing_options(options)
        .with_schema(columns(table));
    let statistics = session
        .runtime_env()
        .cache_manager
        .get_file_statistic_cache();
    Ok(Arc::new(
        ListingTable::try_new(config)?.with_cache(statistics),
    ))
}

/// A provider without rows.
pub fn empty(table: Table) -> Result<Arc<dyn TableProvider>, Error> {
    Ok(Arc::new(MemTable::try_new(columns(table), vec![vec![]])?))
}

/// A table's columns as queries read them.
fn columns(table: Table) -> SchemaRef {
    Arc::new(texts::viewed(&table.schema()))
}
