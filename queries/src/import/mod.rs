//! `vramscope import`: PyTorch memory snapshots as rows of the same tables that an agent fills.
//!
//! A file is read twice. The first pass ([`survey`]) keeps what the rows need to know beforehand: the
//! final address map, which segments came and went, which blocks live on, and a hash of the content.
//! The second writes one row for each trace entry, as it is read. What is held in memory grows with
//! the map, the distinct stacks and the blocks that live at one time, not with the trace.
//!
//! What lands in the folder, for each snapshot: one Parquet file in each table that has rows, named
//! by the content's hash. Invariants:
//! - the same content gives the same files, so that importing it again changes nothing;
//! - files appear whole, after they are on disk, under names that no reader takes for a table's
//!   before; those that others refer to come first;
//! - the trace's bytes are what the trace says; where it does not say (a block's rounded size after
//!   the block is gone) the allocator's rounding rule is applied, and where even that says nothing
//!   the column is NULL.

mod columns;
mod events;
mod map;
mod output;
mod source;
mod spans;
mod stacks;
mod summary;
mod survey;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use vramscope_snapshot::Item;
use vramscope_wire::Table;

pub use output::DataFolder;
pub use summary::{MemorySummary, Summary};

use columns::Origin;
use source::Source;
use stacks::Stacks;

/// Why a file was not imported. Nothing of it is in the folder then.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or read.
    #[error("failed to read {path:?}: {cause}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// It is no file that can be read twice.
    #[error("{0:?} is not a regular file; save it to one first")]
    NotAFile(PathBuf),
    /// The reader refused it.
    #[error("{path:?}: {cause}")]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        cause: vramscope_snapshot::Error,
    },
    /// The map contradicts itself.
    #[error("{path:?}: {problem}")]
    Map {
        /// The file.
        path: PathBuf,
        /// Which segments or blocks.
        problem: vramscope_model::map::MapProblem,
    },
    /// Somebody wrote to it meanwhile.
    #[error("{0:?} changed while it was read; import it again when it is complete")]
    Changed(PathBuf),
    /// The folder cannot take rows.
    #[error("{path:?} {problem}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why not, and the way out.
        problem: &'static str,
    },
    /// Rows could not be written.
    #[error("failed to write {path:?}: {cause}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system or the Parquet writer said.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    fn write(path: &Path, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Write {
            path: path.to_path_buf(),
            cause: cause.into(),
        }
    }
}

/// Whoever watches an import, and may stop it.
pub trait Watch {
    /// So many bytes will be read in all.
    fn start(&self, _bytes: u64) {}
    /// So many were read since the last call.
    fn advance(&self, _bytes: u64) {}
    /// True ends the import before its next step.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Watches nothing.
pub struct Nobody;

impl Watch for Nobody {}

/// Imports one snapshot.
pub fn import(file: &Path, folder: &DataFolder, watch: &dyn Watch) -> Result<Summary, Error> {
    let source = Source::open(file)?;
    watch.start(source.bytes() * 2);
    let (survey, content) = survey::take(&source, watch)?;
    let origin = Origin::new(file, content, source.modified_ns());
    let mut staged = folder.stage(content);
    let mut stacks = Stacks::default();

    let mut events = events::Rows::new(&survey, &origin, staged.writer(Table::AllocEvents)?);
    let again = source.read(watch, |item, tables| match item {
        Item::Segment(_) => Ok(()),
        Item::Event(event) => events.add(&event, stacks.id(event.stack, tables)),
    })?;
    if again.content != content {
        return Err(Error::Changed(file.to_path_buf()));
    }
    let tables = again.tables;
    let traced = events.finish(&mut staged)?;

    let maps = map::rows(&survey, &traced, &origin, |stack| stacks.id(stack, &tables));
    staged.write(Table::Segments, maps.segments(&origin))?;
    staged.write(Table::AllocatorSamples, maps.samples(&origin, &survey))?;
    staged.write(Table::Processes, columns::process(&origin, file))?;
    staged.write(Table::Stacks, stacks.rows(&origin, &tables))?;
    if watch.is_cancelled() {
        return Err(Error::Cancelled);
    }
    let written = staged.commit()?;
    Ok(Summary::new(file, &survey, &maps, &origin, written))
}

/// Nanoseconds since 1970.
fn nanoseconds(time: SystemTime) -> i64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_nanos()).ok())
        .unwrap_or(0)
}

/// As BIGINT columns hold it. Device addresses stay below 2^57; what lies beyond keeps its bits.
fn big(number: u64) -> i64 {
    number as i64
}
