//! The file: read from begin to end as often as needed, hashed on the way.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use vramscope_snapshot::{Item, Outline, Tables};
use xxhash_rust::xxh3::Xxh3;

use super::{Error, Watch, nanoseconds};

/// A snapshot's file.
pub(super) struct Source {
    path: PathBuf,
    bytes: u64,
    modified_ns: i64,
}

/// What one reading found.
pub(super) struct Reading {
    /// 63-bit hash of the content.
    pub content: i64,
    pub outline: Outline,
    pub tables: Tables,
}

/// The reader's own error, or the sink's.
enum Stop {
    Reader(vramscope_snapshot::Error),
    Sink(Error),
}

impl From<vramscope_snapshot::Error> for Stop {
    fn from(error: vramscope_snapshot::Error) -> Self {
        Stop::Reader(error)
    }
}

impl Source {
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |cause| Error::Open {
            path: path.to_path_buf(),
            cause,
        };
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if !metadata.is_file() {
            return Err(Error::NotAFile(path.to_path_buf()));
        }
        Ok(Self {
            path: path.to_path_buf(),
            bytes: metadata.len(),
            modified_ns: metadata.modified().map_or(0, nanoseconds),
        })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// When the file was last written: the snapshot's time if its entries have none.
    pub fn modified_ns(&self) -> i64 {
        self.modified_ns
    }

    pub fn error(&self, cause: vramscope_snapshot::Error) -> Error {
        Error::Snapshot {
            path: self.path.clone(),
            cause,
        }
    }

    pub fn map_error(&self, problem: vramscope_model::map::MapProblem) -> Error {
        Error::Map {
            path: self.path.clone(),
            problem,
        }
    }

    /// Reads the file once.
    pub fn read(
        &self,
        watch: &dyn Watch,
        mut sink: impl FnMut(Item, &Tables) -> Result<(), Error>,
    ) -> Result<Reading, Error> {
        let file = File::open(&self.path).map_err(|cause| Error::Open {
            path: self.path.clone(),
            cause,
        })?;
        let mut bytes = Watched {
            file,
            hash: Xxh3::new(),
            watch,
            cancelled: false,
        };
        let read = vramscope_snapshot::read(&mut bytes, self.bytes, |item, tables| {
            sink(item, tables).map_err(Stop::Sink)
        });
        match read {
            Ok((outline, tables)) => Ok(Reading {
                content: positive(bytes.hash.digest()),
                outline,
                tables,
            }),
            Err(_) if bytes.cancelled => Err(Error::Cancelled),
            Err(Stop::Sink(error)) => Err(error),
            Err(Stop::Reader(error)) => Err(self.error(error)),
        }
    }
}

/// A hash as BIGINT columns hold it.
pub(super) fn positive(hash: u64) -> i64 {
    (hash & (u64::MAX >> 1)) as i64
}

struct Watched<'a> {
    file: File,
    hash: Xxh3,
    watch: &'a dyn Watch,
    cancelled: bool,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.watch.is_cancelled() {
            self.cancelled = true;
            return Err(std::io::Error::other("cancelled"));
        }
        let count = self.file.read(buffer)?;
        self.hash.update(&buffer[..count]);
        self.watch.advance(count as u64);
        Ok(count)
    }
}
