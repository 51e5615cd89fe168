//! The stacks that recorded rows refer to.
//!
//! A stack is named once in the life of an agent, and its row is sent to the collector. Whoever
//! reads a span on the host itself needs it as well, so the recorder keeps each as long as a
//! recorded row refers to it.
//!
//! ```text
//! recorder/stacks-0000000007.parquet     new stacks of one flush, or what is left of older files
//! ```
//!
//! Invariants:
//! - a stack that a file of events refers to is in a file of stacks, or is counted as missing and
//!   asked for anew;
//! - a row that is here twice does no harm, so these files need no journal: they appear by rename
//!   before the events that refer to them;
//! - no rows are kept in memory, only where each is and which file of events needed it last.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use arrow::array::{AsArray, BooleanArray, RecordBatch};
use arrow::compute::filter_record_batch;
use arrow::datatypes::Int64Type;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use vramscope_wire::{Table, parquet_file};

use crate::Map;
use crate::spool::folder;

const PREFIX: &str = "stacks-";
const SUFFIX: &str = ".parquet";
/// Above so many files the older half becomes one.
const MAX_FILES: usize = 64;
/// Stacks that are known at most, as the agent itself remembers no more.
const MAX_STACKS: usize = 1 << 20;

/// Where a stack is, and which file of events referred to it last.
#[derive(Debug, Clone, Copy)]
struct Place {
    file: u64,
    used: u64,
}

#[derive(Debug, Clone, Copy)]
struct ShelfFile {
    number: u64,
    bytes: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Shelf {
    folder: PathBuf,
    places: Map<i64, Place>,
    files: Vec<ShelfFile>,
    max_bytes: u64,
}

fn path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number:010}{SUFFIX}"))
}

fn list(folder: &Path) -> anyhow::Result<Vec<ShelfFile>> {
    let reading = || format!("failed to read {}", folder.display());
    let mut files = Vec::new();
    for found in std::fs::read_dir(folder).with_context(reading)? {
        let found = found.with_context(reading)?;
        let name = found.file_name();
        let number = name.to_str().and_then(|name| {
            name.strip_prefix(PREFIX)?
                .strip_suffix(SUFFIX)?
                .parse()
                .ok()
        });
        if let (Some(number), Ok(metadata)) = (number, found.metadata()) {
            let bytes = metadata.len();
            files.push(ShelfFile { number, bytes });
        }
    }
    files.sort_by_key(|file| file.number);
    Ok(files)
}

fn ids(path: &Path) -> anyhow::Result<Vec<i64>> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path)?)?;
    let mask = ProjectionMask::columns(builder.parquet_schema(), ["stack_id"]);
    let mut ids = Vec::new();
    for batch in builder.with_projection(mask).build()? {
        ids.extend(batch?.column(0).as_primitive::<Int64Type>().values());
    }
    Ok(ids)
}

/// Rows of files of stacks for which `wanted` says so.
fn pick(
    paths: &[PathBuf],
    mut wanted: impl FnMut(i64) -> bool,
) -> anyhow::Result<Vec<RecordBatch>> {
    let mut picked = Vec::new();
    for path in paths {
        let reading = || format!("failed to read {}", path.display());
        let file = match File::open(path) {
            Ok(file) => file,
            // Swept away, or put together with others, meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(reading),
        };
        for batch in parquet_file::rows(Table::Stacks, file).with_context(reading)? {
            let batch = batch.with_context(reading)?;
            let ids = batch
                .column_by_name("stack_id")
                .and_then(|column| column.as_primitive_opt::<Int64Type>())
                .with_context(reading)?;
            let mask: BooleanArray = ids.values().iter().map(|id| Some(wanted(*id))).collect();
            if mask.true_count() > 0 {
                picked.push(filter_record_batch(&batch, &mask)?);
            }
        }
    }
    Ok(picked)
}

/// The rows of stacks that are asked for, each once, wherever they are; for a reader that does
/// not own the recorder. Newest files first: what is put together gets a new number.
pub fn rows_of(folder: &Path, mut wanted: Map<i64, ()>) -> anyhow::Result<Vec<RecordBatch>> {
    let mut paths: Vec<_> = list(folder)?
        .iter()
        .map(|file| path(folder, file.number))
        .collect();
    paths.reverse();
    pick(&paths, |id| wanted.remove(&id).is_some())
}

impl Shelf {
    /// `newest`: the newest file of events. Until one tells better, all that is there is needed.
    pub fn open(folder: &Path, newest: u64, max_bytes: u64) -> anyhow::Result<Self> {
        let mut shelf = Self {
            folder: folder.to_path_buf(),
            places: Map::default(),
            files: Vec::new(),
            max_bytes,
        };
        for file in list(folder)? {
            let path = path(folder, file.number);
            match ids(&path) {
                Ok(ids) => {
                    let place = Place {
                        file: file.number,
                        used: newest,
                    };
                    shelf.places.extend(ids.into_iter().map(|id| (id, place)));
                    shelf.files.push(file);
                }
                // Its stacks are asked for again.
                Err(error) => {
                    tracing::warn!(
                        "stacks of the recorder are lost: {}: {error:#}",
                        path.display()
                    );
                    let _ = std::fs::remove_file(&path);
                }
            }
        }
        Ok(shelf)
    }

    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub fn count(&self) -> usize {
        self.places.len()
    }

    pub fn has(&self, stack_id: i64) -> bool {
        self.places.contains_key(&stack_id)
    }

    /// A file of events refers to a stack. False if it is not here.
    pub fn use_it(&mut self, stack_id: i64, by: u64) -> bool {
        match self.places.get_mut(&stack_id) {
            Some(place) => {
                place.used = place.used.max(by);
                true
            }
            None => false,
        }
    }

    /// Puts rows of stacks there, durably. `used`: the file of events that is about to refer.
    pub fn put(
        &mut self,
        stack_ids: &[i64],
        batches: &[RecordBatch],
        used: u64,
    ) -> anyhow::Result<()> {
        if self.places.len() + stack_ids.len() > MAX_STACKS || self.bytes() > self.max_bytes {
            anyhow::bail!(
                "{} stacks take {} bytes, and the recorder keeps no more than {MAX_STACKS} in a quarter of recorder_bytes",
                self.places.len(),
                self.bytes()
            );
        }
        let number = self.write(batches)?;
        for id in stack_ids {
            let place = self
                .places
                .entry(*id)
                .or_insert(Place { file: number, used });
            place.file = number;
            place.used = place.used.max(used);
        }
        self.limit_files();
        Ok(())
    }

    fn write(&mut self, batches: &[RecordBatch]) -> anyhow::Result<u64> {
        let number = self.files.last().map_or(1, |last| last.number + 1);
        let bytes = parquet_file::encode(Table::Stacks, batches)?;
        folder::write_durably(&path(&self.folder, number), &bytes)?;
        folder::sync_folder(&self.folder)?;
        self.files.push(ShelfFile {
            number,
            bytes: bytes.len() as u64,
        });
        Ok(number)
    }

    /// Lets go of what no file of events from `oldest` on refers to.
    pub fn sweep(&mut self, oldest: Option<u64>) {
        let oldest = oldest.unwrap_or(u64::MAX);
        self.places.retain(|_, place| place.used >= oldest);
        let mut needed: Vec<u64> = self.places.values().map(|place| place.file).collect();
        needed.sort_unstable();
        needed.dedup();
        let folder = &self.folder;
        self.files.retain(|file| {
            let is_needed = needed.binary_search(&file.number).is_ok();
            if !is_needed {
                let _ = std::fs::remove_file(path(folder, file.number));
            }
            is_needed
        });
        self.limit_files();
    }

    fn limit_files(&mut self) {
        if self.files.len() > MAX_FILES
            && let Err(error) = self.put_together()
        {
            tracing::warn!("stacks of the recorder stay in many files: {error:#}");
        }
    }

    /// Makes one file of what is needed of the older half. The old ones go once it is there.
    fn put_together(&mut self) -> anyhow::Result<()> {
        let old: Vec<ShelfFile> = self.files[..self.files.len() / 2].to_vec();
        let paths: Vec<_> = old.iter().map(|f| path(&self.folder, f.number)).collect();
        let last = old.last().map_or(0, |file| file.number);
        let mut kept = Map::<i64, ()>::default();
        let places = &self.places;
        let batches = pick(&paths, |id| {
            let is_here = places.get(&id).is_some_and(|place| place.file <= last);
            is_here && kept.insert(id, ()).is_none()
        })?;
        let number = self.write(&batches)?;
        for id in kept.keys() {
            if let Some(place) = self.places.get_mut(id) {
                place.file = number;
            }
        }
        // What was not found in any file is not here.
        self.places.retain(|_, place| place.file > last);
        self.files.retain(|file| file.number > last);
        for path in paths {
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }
}
