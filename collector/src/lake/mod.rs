//! The lake: one Delta table per folder `DIR/TABLE/`, and the committer that fills them.
//!
//! Invariants:
//! - the columns are the wire schema's, with `date` and `hour` of `ts` (UTC) appended as
//!   partition columns where the table has a time;
//! - a commit carries, for each agent whose batches are in it, one application transaction:
//!   `appId` is the agent's id, `version` the highest of its `batch_seq` in the table so far. One
//!   more tells how far the log went that the batches came from ([`committer`]).
//!   `delta.setTransactionRetentionDuration` must never be set: these marks are what keeps a
//!   resent batch from counting twice;
//! - everything in a folder is written through [`store::DurableStore`]: when a commit returns, it
//!   and all it names are on disk. What a bucket acknowledges is durable ([`place`]).

pub mod append;
pub mod committer;
pub mod layout;
mod marks;
pub mod place;
pub mod rows;
pub mod store;
pub mod turn;
pub mod upkeep;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use arrow::datatypes::{Schema, SchemaRef};
use deltalake::kernel::engine::arrow_conversion::{TryIntoArrow, TryIntoKernel};
use deltalake::kernel::transaction::{CommitProperties, TransactionError};
use deltalake::kernel::{StructField, StructType};
use deltalake::operations::create::CreateBuilder;
use deltalake::{DeltaTable, DeltaTableBuilder, DeltaTableError};
use futures::FutureExt;
use vramscope_queries::store::Place;
use vramscope_wire::Table;

use marks::Marks;
use place::Home;
use store::DurableStore;

/// What can go wrong with a table.
#[derive(Debug, thiserror::Error)]
pub enum LakeError {
    /// The Delta library failed.
    #[error("table {table}: {source}")]
    Delta {
        /// Which table.
        table: &'static str,
        /// What it said.
        source: Box<DeltaTableError>,
    },
    /// The table on disk is not one that this collector can write.
    #[error(
        "table {table} in {dir} does not fit: {detail}; it was written by another version or another program"
    )]
    Columns {
        /// Which table.
        table: &'static str,
        /// Its folder.
        dir: PathBuf,
        /// The first difference.
        detail: String,
    },
    /// Rows could not be merged.
    #[error("table {table}: {source}")]
    Arrow {
        /// Which table.
        table: &'static str,
        /// What went wrong.
        source: arrow::error::ArrowError,
    },
    /// The lake's place cannot be used, or not like that.
    #[error("{detail}")]
    Place {
        /// What is wrong, and the way out.
        detail: String,
    },
    /// While a commit was made, another collector committed batches of the same agent.
    #[error("table {table}: another collector has moved {name} from {before} to {now}")]
    Moved {
        /// Which table.
        table: &'static str,
        /// Agent or log.
        name: String,
        /// How far it was.
        before: u64,
        /// How far it is.
        now: u64,
    },
    /// The file system said no.
    #[error("failed to use {path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
}

impl LakeError {
    /// Whether a commit failed because another process was first. Nothing is wrong then: the table
    /// has to be looked at anew.
    pub fn is_conflict(&self) -> bool {
        match self {
            LakeError::Moved { .. } => true,
            LakeError::Delta { source, .. } => matches!(
                **source,
                DeltaTableError::Transaction {
                    source: TransactionError::CommitConflict(_)
                        | TransactionError::MaxCommitAttempts(_)
                }
            ),
            _ => false,
        }
    }
}

fn delta_error(table: Table) -> impl FnOnce(DeltaTableError) -> LakeError {
    move |source| LakeError::Delta {
        table: table.name(),
        source: Box::new(source),
    }
}

fn io_error(path: &Path) -> impl FnOnce(std::io::Error) -> LakeError {
    let path = path.to_path_buf();
    move |source| LakeError::Io { path, source }
}

/// Runs work of the Delta library that writes files. Its writer panics when an upload fails at its
/// very end (it aborts what is shut down already), and a bucket that is away for a moment must not
/// end the thread of the committer or of the upkeep.
async fn survive<T>(
    work: impl Future<Output = Result<T, DeltaTableError>>,
) -> Result<T, DeltaTableError> {
    let done = std::panic::AssertUnwindSafe(work).catch_unwind().await;
    done.unwrap_or_else(|panic| {
        let text = match panic.downcast_ref::<String>() {
            Some(text) => text.as_str(),
            None => panic.downcast_ref::<&str>().copied().unwrap_or("panic"),
        };
        let failed = format!("failed to write files: {text}");
        Err(DeltaTableError::Generic(failed))
    })
}

/// The open tables. The committer adds to them, [`upkeep`] rearranges them.
#[derive(Debug)]
pub struct Lake {
    tables: BTreeMap<Table, RwLock<DeltaTable>>,
    /// Who commits to a table holds its turn, so that commits of one process do not run into each
    /// other. Commits of other processes are met as Delta does: by trying again.
    turns: BTreeMap<Table, tokio::sync::Mutex<()>>,
    /// Of each table, how far agents and logs go in it.
    marks: BTreeMap<Table, tokio::sync::Mutex<Marks>>,
    home: Home,
}

impl Lake {
    /// Opens every table of the lake of `data`, creates those that are missing, appends columns
    /// that the wire schema gained, removes half-written files. For the holder of the folder's
    /// lock.
    pub async fn open(data: &Path) -> Result<Lake, LakeError> {
        let home = Home::of(data)?;
        let opened = Table::ALL.map(|table| open_table(&home, table));
        // At a time: each is a few requests, if the lake is in a bucket.
        let opened = futures::future::try_join_all(opened).await?;
        let opened = opened.into_iter().map(RwLock::new);
        let tables = Table::ALL.into_iter().zip(opened).collect();
        Ok(Lake::of(home, tables))
    }

    /// Opens the tables that are there, and changes nothing: for who works on a folder that a
    /// collector may hold.
    pub async fn attach(data: &Path) -> Result<Lake, LakeError> {
        let home = Home::of(data)?;
        let mut tables = BTreeMap::new();
        for table in Table::ALL {
            let mut delta = unopened(&home.place, table)?;
            let exists = delta.verify_deltatable_existence().await;
            if !exists.map_err(delta_error(table))? {
                continue;
            }
            delta.load().await.map_err(delta_error(table))?;
            tables.insert(table, RwLock::new(delta));
        }
        Ok(Lake::of(home, tables))
    }

    fn of(home: Home, tables: BTreeMap<Table, RwLock<DeltaTable>>) -> Lake {
        let of_each = || tables.keys().copied();
        Lake {
            turns: of_each()
                .map(|table| (table, tokio::sync::Mutex::default()))
                .collect(),
            marks: of_each()
                .map(|table| (table, tokio::sync::Mutex::default()))
                .collect(),
            tables,
            home,
        }
    }

    /// Where it lies, and whether others write it too.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// The tables that are open, all of them but after [`Lake::attach`].
    pub fn tables(&self) -> impl Iterator<Item = Table> + '_ {
        self.tables.keys().copied()
    }

    /// Waits for the turn to commit to a table.
    pub async fn turn(&self, table: Table) -> tokio::sync::MutexGuard<'_, ()> {
        // Every open table has one.
        self.turns[&table].lock().await
    }

    /// The table as of its last commit.
    pub fn table(&self, table: Table) -> DeltaTable {
        // Every table is inserted in `open`.
        self.tables[&table]
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Sees what others committed to a table.
    pub async fn refresh(&self, table: Table) -> Result<(), LakeError> {
        let mut delta = self.table(table);
        delta.update_state().await.map_err(delta_error(table))?;
        self.set(table, delta);
        Ok(())
    }

    /// Takes over a newer state; an older one is let go.
    fn set(&self, table: Table, state: DeltaTable) {
        // Every table is inserted in `open`.
        let mut held = self.tables[&table]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if state.version() >= held.version() {
            *held = state;
        }
    }

    /// How far a name goes in one table, 0 if it does not: of an agent its highest `batch_seq`
    /// there. Of the table's state that [`Lake::table`] gives.
    pub async fn committed(&self, table: Table, name: &str) -> Result<u64, LakeError> {
        // Every open table has them.
        let mut marks = self.marks[&table].lock().await;
        let version = self.tables[&table]
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .version();
        if !marks.knows(version) {
            let state = self.table(table);
            marks.catch_up(&state).await.map_err(delta_error(table))?;
        }
        Ok(marks.get(name))
    }

    /// The highest `batch_seq` of an agent in any table, 0 if there is none.
    pub async fn highest_committed(&self, agent: &str) -> Result<u64, LakeError> {
        let mut highest = 0;
        for table in Table::FROM_AGENTS {
            highest = self.committed(table, agent).await?.max(highest);
        }
        Ok(highest)
    }
}

/// The highest `batch_seq` of an agent that a table holds, 0 if there is none.
pub async fn transaction(table: &DeltaTable, agent: &str) -> Result<u64, DeltaTableError> {
    let version = table
        .snapshot()?
        .transaction_version(&table.log_store(), agent)
        .await?;
    Ok(version
        .and_then(|version| u64::try_from(version).ok())
        .unwrap_or(0))
}

async fn open_table(home: &Home, table: Table) -> Result<DeltaTable, LakeError> {
    if let Some(root) = home.folder() {
        let dir = root.join(table.name());
        crate::folder::create_dir_durably(&dir).map_err(io_error(&dir))?;
        // Where others write too, `vacuum` removes what nobody can be writing any more.
        if home.shared_as.is_none() {
            store::remove_temporaries(&dir).map_err(io_error(&dir))?;
        }
    }
    // Of several collectors that start at a time one creates the table or appends the columns, and
    // the others find it done.
    let mut tries = if home.shared_as.is_some() { 5 } else { 1 };
    loop {
        tries -= 1;
        match open_or_create(&home.place, table).await {
            Err(LakeError::Delta { source, .. }) if tries > 0 => {
                tracing::debug!(table = table.name(), error = %source, "opening the table again");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            done => return done,
        }
    }
}

async fn open_or_create(place: &Place, table: Table) -> Result<DeltaTable, LakeError> {
    let failed = || delta_error(table);
    let mut delta = unopened(place, table)?;
    if !delta
        .verify_deltatable_existence()
        .await
        .map_err(failed())?
    {
        return create_table(delta, table).await.map_err(failed());
    }
    delta.load().await.map_err(failed())?;
    append_columns(delta, table, &place.table_path(table)).await
}

/// A table of which nothing is read yet.
fn unopened(place: &Place, table: Table) -> Result<DeltaTable, LakeError> {
    let url = place.table(table).map_err(|error| LakeError::Place {
        detail: error.to_string(),
    })?;
    vramscope_queries::store::register();
    let failed = || delta_error(table);
    let builder = DeltaTableBuilder::from_url(url.clone()).map_err(failed())?;
    let builder = match place {
        Place::Folder(dir) => builder.with_storage_backend(DurableStore::new(dir), url),
        Place::Bucket(_) => builder,
    };
    builder.build().map_err(failed())
}

async fn create_table(delta: DeltaTable, table: Table) -> Result<DeltaTable, DeltaTableError> {
    let columns = kernel_schema(&rows::lake_schema(table))?;
    tracing::info!(table = table.name(), "creating table");
    CreateBuilder::new()
        .with_log_store(delta.log_store())
        .with_table_name(table.name())
        .with_comment(table.doc())
        .with_columns(columns.fields().cloned())
        .with_partition_columns(rows::partition_columns(table).iter().copied())
        // A commit every two seconds makes 43,000 log entries a day; with checkpoints, one day
        // of them is enough to look back on.
        .with_configuration([("delta.logRetentionDuration", Some("interval 1 days"))])
        // Whoever finds the table created by another in the meantime must not create it again.
        .with_commit_properties(CommitProperties::default().with_max_retries(0))
        .await
}

fn kernel_schema(schema: &SchemaRef) -> Result<StructType, DeltaTableError> {
    schema
        .as_ref()
        .try_into_kernel()
        .map_err(DeltaTableError::from)
}

/// Compares a table on disk with the wire schema; appends what it lacks.
async fn append_columns(
    delta: DeltaTable,
    table: Table,
    dir: &Path,
) -> Result<DeltaTable, LakeError> {
    let failed = || delta_error(table);
    let found = arrow_schema(&delta).map_err(failed())?;
    let wanted = rows::lake_schema(table);
    let wrong = |detail: String| LakeError::Columns {
        table: table.name(),
        dir: dir.to_path_buf(),
        detail,
    };
    let mut missing = Vec::new();
    for field in wanted.fields() {
        match found.field_with_name(field.name()) {
            Ok(known) if known.data_type().equals_datatype(field.data_type()) => {}
            Ok(known) => {
                return Err(wrong(format!(
                    "column {:?} is {}, expected {}",
                    field.name(),
                    known.data_type(),
                    field.data_type()
                )));
            }
            Err(_) if field.is_nullable() => missing.push(field.name().clone()),
            Err(_) => return Err(wrong(format!("column {:?} is missing", field.name()))),
        }
    }
    let partitions = delta
        .snapshot()
        .map_err(failed())?
        .metadata()
        .partition_columns()
        .to_vec();
    if partitions != rows::partition_columns(table) {
        return Err(wrong(format!("it is partitioned by {partitions:?}")));
    }
    if missing.is_empty() {
        return Ok(delta);
    }
    tracing::info!(
        table = table.name(),
        columns = missing.join(", "),
        "appending columns"
    );
    let kernel = kernel_schema(&wanted).map_err(failed())?;
    let fields: Vec<StructField> = missing
        .iter()
        .filter_map(|name| kernel.field(name).cloned())
        .collect();
    delta
        .add_columns()
        .with_fields(fields)
        .await
        .map_err(failed())
}

fn arrow_schema(delta: &DeltaTable) -> Result<Schema, DeltaTableError> {
    delta
        .snapshot()?
        .schema()
        .as_ref()
        .try_into_arrow()
        .map_err(DeltaTableError::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_of_the_library_is_an_error() {
        fn dies() -> Result<(), DeltaTableError> {
            panic!("Already {}", "shut down")
        }
        let error = survive(async { dies() }).await.unwrap_err();
        assert!(error.to_string().contains("Already shut down"), "{error}");
        assert_eq!(survive(async { Ok(1) }).await.unwrap(), 1);
    }
}
