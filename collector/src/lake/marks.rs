//! The application transactions of a table, all of them in memory: how far each agent's line, and
//! each log, goes in it.
//!
//! Asking the table for one transaction reads its log from the last checkpoint on, and for an agent
//! that it does not know, the checkpoint too; ten thousand agents that come at once would each ask
//! eleven tables. So the checkpoint's transactions are read once, and then every commit's, whoever
//! made it: these marks are those of the table's state in memory, exactly. A commit on that state
//! either meets no other commit, or Delta finds out if one had the same agent.
//!
//! Memory: some hundred bytes per agent and table.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use deltalake::logstore::LogStore;
use deltalake::logstore::object_store::path::Path;
use deltalake::logstore::object_store::{self, ObjectStoreExt};
use deltalake::{DeltaTable, DeltaTableError};
use serde::Deserialize;

use super::committer::files::Reader;

#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Version of the table up to which they are known.
    version: Option<u64>,
    marks: HashMap<Arc<str>, u64>,
}

impl Marks {
    /// The version of a name's transaction, 0 if there is none.
    pub(super) fn get(&self, name: &str) -> u64 {
        self.marks.get(name).copied().unwrap_or(0)
    }

    /// Whether everything up to a version is known.
    pub(super) fn knows(&self, version: Option<u64>) -> bool {
        self.version >= version
    }

    /// Reads what is new in the table.
    pub(super) async fn catch_up(&mut self, table: &DeltaTable) -> Result<(), DeltaTableError> {
        let Some(newest) = table.version() else {
            return Ok(());
        };
        let log = table.log_store();
        if self.version.is_none() {
            self.read_checkpoint(log.as_ref(), newest).await?;
        }
        let mut next = self.version.map_or(0, |version| version + 1);
        while next <= newest {
            match log.read_commit_entry(next).await? {
                Some(entry) => {
                    self.read_commit(&entry);
                    self.version = Some(next);
                    next += 1;
                }
                // Removed, as happens to what a checkpoint has.
                None => {
                    self.read_checkpoint(log.as_ref(), newest).await?;
                    if self.version < Some(next) {
                        let missing = format!("entry {next} of the table's log is missing");
                        return Err(DeltaTableError::Generic(missing));
                    }
                    next = self.version.map_or(0, |version| version + 1);
                }
            }
        }
        Ok(())
    }

    fn raise(&mut self, name: &str, version: i64) {
        // Ours are never negative.
        let version = u64::try_from(version).unwrap_or(0);
        match self.marks.get_mut(name) {
            // The last one counts, and ours never go down.
            Some(known) => *known = version.max(*known),
            None => {
                self.marks.insert(Arc::from(name), version);
            }
        }
    }

    fn read_commit(&mut self, entry: &[u8]) {
        for action in entry.split(|byte| *byte == b'\n') {
            // Most actions are others, and some are long.
            let may_be = action.len() < 1024 && contains(action, b"\"txn\"");
            if !may_be {
                continue;
            }
            if let Ok(Action { txn: Some(txn) }) = serde_json::from_slice::<Action>(action) {
                self.raise(&txn.app_id, txn.version);
            }
        }
    }

    /// Reads the last checkpoint, if there is one that tells more than is known and not more than
    /// a version.
    async fn read_checkpoint(
        &mut self,
        log: &dyn LogStore,
        newest: u64,
    ) -> Result<(), DeltaTableError> {
        let store = log.object_store(None);
        let pointer = match store.get(&Path::from("_delta_log/_last_checkpoint")).await {
            Ok(found) => found.bytes().await?,
            Err(object_store::Error::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let Pointer { version } = serde_json::from_slice(&pointer)?;
        if version > newest || self.version >= Some(version) {
            return Ok(());
        }
        let path = Path::from(format!("_delta_log/{version:020}.checkpoint.parquet"));
        let bytes = store.head(&path).await?.size;
        let columns = ["txn.appId", "txn.version"];
        let mut pieces = Reader::new(store, path, bytes).rows(&columns, None).await?;
        while let Some(piece) = pieces.next().await? {
            let Some(txn) = piece
                .column_by_name("txn")
                .and_then(|txn| txn.as_struct_opt())
            else {
                continue;
            };
            let (Some(names), Some(versions)) =
                (txn.column_by_name("appId"), txn.column_by_name("version"))
            else {
                continue;
            };
            let names = cast(names, &DataType::Utf8)?;
            let versions = cast(versions, &DataType::Int64)?;
            let (names, versions) = (
                names.as_string::<i32>(),
                versions.as_primitive::<Int64Type>(),
            );
            for row in 0..piece.num_rows() {
                if txn.is_valid(row) && names.is_valid(row) && versions.is_valid(row) {
                    self.raise(names.value(row), versions.value(row));
                }
            }
        }
        self.version = Some(version);
        Ok(())
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// What `_last_checkpoint` says.
#[derive(Deserialize)]
struct Pointer {
    version: u64,
}

/// One line of a commit.
#[derive(Deserialize)]
struct Action {
    txn: Option<Txn>,
}

#[derive(Deserialize)]
struct Txn {
    #[serde(rename = "appId")]
    app_id: String,
    version: i64,
}
