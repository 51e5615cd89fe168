//! The lake: one Delta table per folder `DIR/TABLE/` (or prefix of a bucket, [`place`]), and the
//! committer that fills them.
//!
//! Invariants:
//! - the columns are the wire schema's, with `date` and `hour` of `ts` (UTC) appended as
//!   partition columns where the table has a time;
//! - a commit carries, for each agent whose batches are in it, one application transaction:
//!   `appId` is the agent's id, `version` the highest of its `batch_seq` in the table so far.
//!   `delta.setTransactionRetentionDuration` must never be set: these marks are what keeps a
//!   resent batch from counting twice. On a lake that several collectors write they are others:
//!   [`shared`];
//! - everything in a folder is written through [`store::DurableStore`]: when a commit returns, it
//!   and all it names are on disk. What a bucket acknowledges is durable.

pub mod committer;
pub mod place;
pub mod rows;
pub mod shared;
pub mod store;
pub mod turn;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use arrow::datatypes::{Schema, SchemaRef};
use deltalake::kernel::engine::arrow_conversion::{TryIntoArrow, TryIntoKernel};
use deltalake::kernel::transaction::{CommitProperties, TransactionError};
use deltalake::kernel::{StructField, StructType, Transaction};
use deltalake::operations::create::CreateBuilder;
use deltalake::{DeltaTable, DeltaTableBuilder, DeltaTableError};
use vramscope_queries::store::Place;
use vramscope_wire::Table;

use place::Home;
use shared::Shared;
use store::DurableStore;

/// Age at which a half-written file in a folder that collectors share has nobody left to finish it.
const SHARED_LEFTOVER_AGE: Duration = Duration::from_secs(24 * 3600);

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
        let LakeError::Delta { source, .. } = self else {
            return false;
        };
        matches!(
            **source,
            DeltaTableError::Transaction {
                source: TransactionError::CommitConflict(_)
                    | TransactionError::MaxCommitAttempts(_)
            }
        )
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

/// The open tables. Only the committer changes them.
#[derive(Debug)]
pub struct Lake {
    tables: BTreeMap<Table, RwLock<DeltaTable>>,
    /// Transactions that were looked up or committed: a look-up reads the table's log, and a
    /// commit needs one for each of its agents. Only this process writes them.
    marks: Mutex<HashMap<(Table, Arc<str>), u64>>,
    /// In their place, where other collectors write too.
    shared: Option<Shared>,
}

impl Lake {
    /// Opens every table of the lake of `data`, creates those that are missing, appends columns
    /// that the wire schema gained, removes half-written files. For the holder of the folder's
    /// lock.
    pub async fn open(data: &Path) -> Result<Lake, LakeError> {
        let home = Home::of(data)?;
        let opened = Table::ALL.map(|table| open_table(&home, table));
        let opened = futures::future::try_join_all(opened).await?;
        let shared = home.shared_as.as_deref().map(Shared::new);
        if let Some(shared) = &shared {
            let read = Table::ALL.into_iter().zip(&opened);
            let read = read.map(|(table, delta)| async move {
                let done = shared.catch_up(table, delta).await;
                done.map_err(delta_error(table))
            });
            futures::future::try_join_all(read).await?;
        }
        let opened = opened.into_iter().map(RwLock::new);
        Ok(Lake {
            tables: Table::ALL.into_iter().zip(opened).collect(),
            marks: Mutex::default(),
            shared,
        })
    }

    /// What there is to know if other collectors write too; `None` if none does.
    pub fn shared(&self) -> Option<&Shared> {
        self.shared.as_ref()
    }

    /// Whether a table holds a batch, as far as is known here.
    pub async fn holds(&self, table: Table, agent: &str, seq: u64) -> Result<bool, LakeError> {
        match &self.shared {
            Some(shared) => {
                let delta = self.table(table);
                let read = shared.catch_up(table, &delta).await;
                read.map_err(delta_error(table))?;
                Ok(shared.holds(table, agent, seq))
            }
            None => Ok(seq <= self.committed(table, agent).await?),
        }
    }

    /// Reads what other processes committed to a table since it was read last.
    pub async fn refresh(&self, table: Table) -> Result<(), LakeError> {
        let mut delta = self.table(table);
        delta.update_state().await.map_err(delta_error(table))?;
        // What the update saw must be durable before anything relies on it.
        if let Ok(dir) = delta.table_url().to_file_path() {
            let log = dir.join("_delta_log");
            crate::folder::sync_dir(&log).map_err(io_error(&log))?;
        }
        self.reloaded(table, delta);
        Ok(())
    }

    /// Looks at what other collectors committed, unless that was done a moment ago. Whoever asks
    /// can do without: a look that fails changes nothing.
    pub async fn glance(&self, table: Table) {
        let Some(shared) = &self.shared else { return };
        if !shared.may_look(table) {
            return;
        }
        let looked = async {
            self.refresh(table).await?;
            let read = shared.catch_up(table, &self.table(table)).await;
            read.map_err(delta_error(table))
        };
        if let Err(error) = looked.await {
            tracing::debug!(table = table.name(), %error, "failed to look at the table");
        }
    }

    /// The transactions of a commit of these batches.
    fn transactions<'a>(
        &self,
        batches: impl Iterator<Item = (&'a Arc<str>, u64)>,
    ) -> Vec<Transaction> {
        let marks = match &self.shared {
            Some(shared) => shared.marks(batches),
            None => {
                let mut highest: HashMap<Arc<str>, u64> = HashMap::new();
                for (agent, seq) in batches {
                    let last = highest.entry(Arc::clone(agent)).or_insert(seq);
                    *last = seq.max(*last);
                }
                highest
            }
        };
        let now = chrono::Utc::now().timestamp_millis();
        let transaction = |(name, last): (Arc<str>, u64)| {
            // `ingest` lets in numbers up to i64::MAX only.
            let version = i64::try_from(last).unwrap_or(i64::MAX);
            Transaction::new_with_last_update(name, version, Some(now))
        };
        marks.into_iter().map(transaction).collect()
    }

    /// The table as of its last commit.
    pub fn table(&self, table: Table) -> DeltaTable {
        // Every table is inserted in `open`.
        self.tables[&table]
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set(&self, table: Table, state: DeltaTable) {
        // Every table is inserted in `open`.
        *self.tables[&table]
            .write()
            .unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// The highest `batch_seq` of an agent in one table, 0 if there is none.
    pub async fn committed(&self, table: Table, agent: &str) -> Result<u64, LakeError> {
        if let Some(shared) = &self.shared {
            return Ok(shared.highest(table, agent));
        }
        let key = (table, Arc::from(agent));
        if let Some(known) = self.marks().get(&key) {
            return Ok(*known);
        }
        let found = transaction(&self.table(table), agent)
            .await
            .map_err(delta_error(table))?;
        // A commit may have raised it meanwhile.
        let mut marks = self.marks();
        let mark = marks.entry(key).or_insert(found);
        *mark = found.max(*mark);
        Ok(*mark)
    }

    /// Takes over what a commit left: the table's new state and the agents' new marks.
    fn committed_now(&self, table: Table, state: DeltaTable, highest: HashMap<Arc<str>, u64>) {
        self.set(table, state);
        if self.shared.is_some() {
            return;
        }
        self.marks().extend(
            highest
                .into_iter()
                .map(|(agent, seq)| ((table, agent), seq)),
        );
    }

    /// Takes over a state that was read anew, with whatever marks it holds.
    fn reloaded(&self, table: Table, state: DeltaTable) {
        self.set(table, state);
        self.marks().retain(|(of, _), _| *of != table);
    }

    fn marks(&self) -> MutexGuard<'_, HashMap<(Table, Arc<str>), u64>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The highest `batch_seq` of an agent in any table, 0 if there is none.
    pub async fn highest_committed(&self, agent: &str) -> Result<u64, LakeError> {
        let mut highest = 0;
        for table in Table::ALL {
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
        let age = match home.shared_as {
            Some(_) => SHARED_LEFTOVER_AGE,
            None => Duration::ZERO,
        };
        store::remove_temporaries(&dir, age).map_err(io_error(&dir))?;
    }
    // Of several collectors that start at a time one creates the table or appends the columns, and
    // the others find it done.
    let mut tries = if home.shared_as.is_some() { 5 } else { 1 };
    loop {
        tries -= 1;
        match open_or_create(home, table).await {
            Err(LakeError::Delta { source, .. }) if tries > 0 => {
                tracing::debug!(table = table.name(), error = %source, "opening the table again");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            done => return done,
        }
    }
}

async fn open_or_create(home: &Home, table: Table) -> Result<DeltaTable, LakeError> {
    let failed = || delta_error(table);
    let mut delta = unopened(&home.place, table)?;
    if !delta
        .verify_deltatable_existence()
        .await
        .map_err(failed())?
    {
        return create_table(delta, table).await.map_err(failed());
    }
    delta.load().await.map_err(failed())?;
    append_columns(delta, table, &home.place.table_path(table)).await
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
