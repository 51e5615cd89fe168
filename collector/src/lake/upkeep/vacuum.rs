//! Deletes files that no state of a table refers to any more: what merges and retention took out,
//! and what a killed process left behind, half-written or whole.
//!
//! Invariants:
//! - a file goes only when it has been of no use for `after`: taken out so long ago by the log, or
//!   written so long ago and named by nothing. A query that began before keeps what it reads, if it
//!   ends within that time; so does a writer that has not committed yet;
//! - `after` is at least [`LEAST`] while others may use the folder.

use std::path::Path;
use std::time::{Duration, SystemTime};

use deltalake::kernel::transaction::CommitProperties;
use deltalake::operations::vacuum::VacuumMode;
use serde::Serialize;
use vramscope_wire::Table;

use super::{UpkeepError, delta_error};
use crate::lake::{Lake, io_error, store};

/// Less than the longest query or merge would be no safety. Queries end after a minute by default.
pub const LEAST: Duration = Duration::from_secs(600);

/// The log forgets after seven days which files it took out (`delta.deletedFileRetentionDuration`):
/// beyond that, a file's age would say nothing about when it went out of use.
pub const MOST: Duration = Duration::from_secs(7 * 86_400);

/// What was deleted, or would be.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Deleted {
    /// Paths below the table's folder.
    pub files: Vec<String>,
    /// Their bytes.
    pub bytes: u64,
}

/// Deletes what a table does not need any more.
pub async fn table(
    lake: &Lake,
    table: Table,
    after: Duration,
    dry_run: bool,
) -> Result<Deleted, UpkeepError> {
    lake.refresh(table).await?;
    let delta = lake.table(table);
    let dir = delta.table_url().to_file_path().ok();
    let period = chrono::Duration::from_std(after).unwrap_or(chrono::Duration::MAX);
    let vacuum = |dry_run| {
        delta
            .clone()
            .vacuum()
            .with_mode(VacuumMode::Full)
            .with_retention_period(period)
            .with_enforce_retention_duration(false)
            .with_dry_run(dry_run)
            .with_commit_properties(
                CommitProperties::default()
                    .with_create_checkpoint(false)
                    .with_cleanup_expired_logs(Some(false)),
            )
    };
    // A vacuum writes to the log also if it finds nothing: so it is asked first.
    let (_, found) = vacuum(true).await.map_err(delta_error(table))?;
    let mut deleted = Deleted {
        bytes: dir
            .as_ref()
            .map_or(0, |dir| bytes(dir, &found.files_deleted)),
        files: found.files_deleted,
    };
    if !dry_run && !deleted.files.is_empty() {
        let _turn = lake.turn(table).await;
        let (state, _) = vacuum(false).await.map_err(delta_error(table))?;
        lake.set(table, state);
    }
    if let Some(dir) = dir {
        let before = SystemTime::now()
            .checked_sub(after)
            .unwrap_or(SystemTime::UNIX_EPOCH);
        let halves = store::old_temporaries(&dir, before).map_err(io_error(&dir))?;
        for (path, bytes) in halves {
            if !dry_run {
                std::fs::remove_file(&path).map_err(io_error(&path))?;
            }
            let name = path.strip_prefix(&dir).unwrap_or(&path);
            deleted.files.push(name.display().to_string());
            deleted.bytes += bytes;
        }
    }
    Ok(deleted)
}

fn bytes(dir: &Path, files: &[String]) -> u64 {
    let sizes = files
        .iter()
        .filter_map(|file| std::fs::metadata(dir.join(file)).ok());
    sizes.map(|metadata| metadata.len()).sum()
}
