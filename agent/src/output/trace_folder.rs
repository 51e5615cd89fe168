//! What `trace` writes to: no spool, no collector, a folder that any tool reads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::{Checkpoint, Output};
use crate::host::identity::Host;
use crate::spool::folder;
use crate::spool::rows::Rows;
use crate::spool::tables::{Origin, tables_with_rows};

/// Folders of plain Parquet files, one per table.
pub struct TraceFolder {
    folder: PathBuf,
    host: Host,
    agent_id: String,
    next_batch_seq: u64,
}

impl TraceFolder {
    /// Refuses a folder that holds something already.
    pub fn create(folder: &Path, host: Host, agent_id: String) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("failed to create {}", folder.display()))?;
        let mut entries =
            fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))?;
        if entries.next().is_some() {
            anyhow::bail!(
                "{} is not empty; name a new folder for the trace",
                folder.display()
            );
        }
        Ok(Self {
            folder: folder.to_path_buf(),
            host,
            agent_id,
            next_batch_seq: 1,
        })
    }
}

impl Output for TraceFolder {
    fn commit(&mut self, rows: &Rows, checkpoint: Checkpoint<'_>) -> anyhow::Result<()> {
        checkpoint.ledger.take_changes();
        let mut written = Vec::new();
        for table in tables_with_rows(rows) {
            let batch_seq = self.next_batch_seq + written.len() as u64;
            let origin = Origin {
                host: &self.host,
                agent_id: &self.agent_id,
                batch_seq: batch_seq as i64,
            };
            match folder::write_trace_file(&self.folder, table, rows, origin) {
                Ok(path) => written.push(path),
                Err(error) => {
                    // All or nothing: the caller keeps all rows and writes them again.
                    for path in written {
                        let _ = fs::remove_file(path);
                    }
                    return Err(error);
                }
            }
        }
        self.next_batch_seq += written.len() as u64;
        Ok(())
    }
}
