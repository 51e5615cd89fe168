//! The data folder: files under temporary names until all of an import's rows are on disk.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use parquet::arrow::ArrowWriter;
use vramscope_wire::{Table, parquet_file};

use super::Error;

/// In the order in which files appear: what others refer to comes first.
const ORDER: [Table; 5] = [
    Table::Stacks,
    Table::Processes,
    Table::AllocEvents,
    Table::Segments,
    Table::AllocatorSamples,
];

/// Bytes of encoded rows that are held before they are written.
const HELD: usize = 8 << 20;

const PREFIX: &str = ".import-";
const LOCK: &str = ".import.lock";

/// A folder that takes imports: a trace (of the agent, of earlier imports), or a new one. One
/// import at a time writes to it.
pub struct DataFolder {
    path: PathBuf,
    _lock: File,
}

impl DataFolder {
    /// Makes the folder if it is not there. Waits for another import that writes to it, and removes
    /// what a killed one left behind.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let refuse = |problem| {
            Err(Error::Folder {
                path: path.to_path_buf(),
                problem,
            })
        };
        if path.exists() && !path.is_dir() {
            return refuse("is a file; name a folder with --data");
        }
        fs::create_dir_all(path).map_err(|error| Error::write(path, error))?;
        let has = |what: fn(&Path) -> bool| Table::ALL.iter().any(|t| what(&path.join(t.name())));
        if has(|table| table.join("_delta_log").exists()) {
            return refuse(
                "is a collector's data folder, which only the collector writes to; \
                 name another folder with --data",
            );
        }
        let mut entries = fs::read_dir(path).map_err(|error| Error::write(path, error))?;
        let is_ours = path.join(LOCK).exists() || has(Path::is_dir);
        if !is_ours && entries.next().is_some() {
            return refuse(
                "is not empty and holds no tables; name a new folder or a trace with --data",
            );
        }
        let lock_path = path.join(LOCK);
        let lock = File::create(&lock_path)
            .and_then(|file| file.lock().map(|()| file))
            .map_err(|error| Error::write(&lock_path, error))?;
        let folder = Self {
            path: path.to_path_buf(),
            _lock: lock,
        };
        folder.remove_leftovers()?;
        Ok(folder)
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn remove_leftovers(&self) -> Result<(), Error> {
        for table in ORDER {
            let Ok(entries) = fs::read_dir(self.path.join(table.name())) else {
                continue;
            };
            for path in entries.flatten().map(|entry| entry.path()) {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if name.starts_with(PREFIX) {
                    fs::remove_file(&path).map_err(|error| Error::write(&path, error))?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn stage(&self, content: i64) -> Staged<'_> {
        Staged {
            folder: self,
            content,
            files: Vec::new(),
        }
    }
}

/// Files of one import that do not count yet. Dropped without [`Staged::commit`] they are removed.
pub(super) struct Staged<'a> {
    folder: &'a DataFolder,
    content: i64,
    files: Vec<Written>,
}

struct Written {
    table: Table,
    temporary: PathBuf,
    rows: u64,
}

/// Writes one file.
pub(super) struct Writer {
    path: PathBuf,
    parquet: ArrowWriter<BufWriter<File>>,
    rows: u64,
}

impl Writer {
    pub fn write(&mut self, batch: &RecordBatch) -> Result<(), Error> {
        self.rows += batch.num_rows() as u64;
        self.parquet
            .write(batch)
            .map_err(|error| Error::write(&self.path, error))?;
        if self.parquet.in_progress_size() > HELD {
            self.parquet
                .flush()
                .map_err(|error| Error::write(&self.path, error))?;
        }
        Ok(())
    }
}

impl Staged<'_> {
    fn name(&self) -> String {
        format!("import-{:016x}.parquet", self.content)
    }

    /// Begins the file of a table.
    pub fn writer(&mut self, table: Table) -> Result<Writer, Error> {
        let folder = self.folder.path.join(table.name());
        fs::create_dir_all(&folder).map_err(|error| Error::write(&folder, error))?;
        let temporary = folder.join(format!("{PREFIX}{:016x}.tmp", self.content));
        let file = File::create(&temporary).map_err(|error| Error::write(&temporary, error))?;
        self.files.push(Written {
            table,
            temporary: temporary.clone(),
            rows: 0,
        });
        let parquet = parquet_file::writer(table, BufWriter::new(file))
            .map_err(|error| Error::write(&temporary, error))?;
        Ok(Writer {
            path: temporary,
            parquet,
            rows: 0,
        })
    }

    /// Ends a file: its bytes are on disk then.
    pub fn close(&mut self, writer: Writer) -> Result<(), Error> {
        let path = writer.path;
        let rows = writer.rows;
        let failed = |error| Error::write(&path, error);
        let file = writer
            .parquet
            .into_inner()
            .map_err(|error| Error::write(&path, error))?
            .into_inner()
            .map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)?;
        if let Some(written) = self.files.iter_mut().find(|file| file.temporary == path) {
            written.rows = rows;
        }
        Ok(())
    }

    /// Writes all rows of a table at once.
    pub fn write(
        &mut self,
        table: Table,
        batch: Result<RecordBatch, ArrowError>,
    ) -> Result<(), Error> {
        let path = self.folder.path.join(table.name());
        let batch = batch.map_err(|error| Error::write(&path, error))?;
        let mut writer = self.writer(table)?;
        writer.write(&batch)?;
        self.close(writer)
    }

    /// Gives the files their names. Rows by table.
    pub fn commit(mut self) -> Result<Vec<(Table, u64)>, Error> {
        let name = self.name();
        let mut files = std::mem::take(&mut self.files);
        files.sort_by_key(|file| ORDER.iter().position(|table| *table == file.table));
        let mut rows = Vec::new();
        for file in files {
            let folder = self.folder.path.join(file.table.name());
            let path = folder.join(&name);
            let renamed = if file.rows == 0 {
                // An empty file would say nothing that no file does not say.
                let _ = fs::remove_file(&path);
                fs::remove_file(&file.temporary)
            } else {
                rows.push((file.table, file.rows));
                fs::rename(&file.temporary, &path)
            };
            renamed
                .and_then(|()| File::open(&folder)?.sync_all())
                .map_err(|error| Error::write(&path, error))?;
        }
        File::open(&self.folder.path)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| Error::write(&self.folder.path, error))?;
        Ok(rows)
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        for file in &self.files {
            let _ = fs::remove_file(&file.temporary);
        }
    }
}
