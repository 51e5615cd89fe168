//! The files on their way: which come next, how a file becomes a batch, and what an answer does
//! to it.

use std::collections::VecDeque;
use std::path::Path;

use anyhow::{Context, bail};
use tracing::{debug, error};
use vramscope_wire::proto::{Ack, Batch, Outcome};
use vramscope_wire::{MAX_BATCH_BYTES, SCHEMA_VERSION, parquet_file};

use super::Shipment;
use crate::spool::folder::{self, REJECTED, SpoolFile};

/// Files that one look at the folder gives: with a hundred thousand waiting, neither is all of
/// them kept in memory nor the folder read for each.
const LISTED: usize = 4096;

/// Committed files that were not sent in this session, oldest first.
#[derive(Debug, Default)]
pub(super) struct Queue {
    files: VecDeque<SpoolFile>,
    /// Files below this number were listed.
    listed: u64,
}

impl Queue {
    /// The next file below `next_committed`.
    pub(super) fn next(
        &mut self,
        spool: &Path,
        next_committed: u64,
    ) -> anyhow::Result<Option<SpoolFile>> {
        if self.files.is_empty() && self.listed < next_committed {
            self.files = folder::oldest(spool, self.listed..next_committed, LISTED)?.into();
            self.listed = if self.files.len() < LISTED {
                next_committed
            } else {
                self.files.back().map_or(0, |last| last.batch_seq + 1)
            };
        }
        Ok(self.files.pop_front())
    }
}

/// Reads a file into a batch. One that is damaged or cannot be read is set aside, which is said
/// aloud; one that somebody took away is no matter.
pub(super) fn load(shipment: &Shipment, file: &SpoolFile) -> anyhow::Result<Option<Batch>> {
    let bytes = match std::fs::read(&file.path) {
        Ok(bytes) => bytes::Bytes::from(bytes),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            debug!(file = %file.path.display(), "a spool file is gone");
            return Ok(None);
        }
        // A bad sector must not stop the files behind it.
        Err(error) => {
            set_aside(shipment, file, &format!("it cannot be read: {error}"))?;
            return Ok(None);
        }
    };
    if bytes.len() > MAX_BATCH_BYTES {
        set_aside(
            shipment,
            file,
            &format!("{} bytes are more than a batch may have", bytes.len()),
        )?;
        return Ok(None);
    }
    let rows = match count_rows(file, bytes.clone()) {
        Ok(rows) => rows,
        Err(error) => {
            set_aside(shipment, file, &error.to_string())?;
            return Ok(None);
        }
    };
    Ok(Some(Batch {
        agent_id: shipment.agent_id.clone(),
        host: shipment.host.clone(),
        batch_seq: file.batch_seq,
        table: file.table.name().to_string(),
        schema_version: SCHEMA_VERSION,
        crc32: crc32fast::hash(&bytes),
        rows,
        parquet: bytes.into(),
    }))
}

/// A piece at a time: a damaged file must not grow into a large memory.
fn count_rows(file: &SpoolFile, bytes: bytes::Bytes) -> Result<u64, parquet_file::ReadError> {
    let mut rows = 0;
    for batch in parquet_file::rows(file.table, bytes)? {
        rows += batch?.num_rows() as u64;
    }
    Ok(rows)
}

/// Does what the answer to a file asks for.
pub(super) fn settle(shipment: &Shipment, file: &SpoolFile, ack: &Ack) -> anyhow::Result<()> {
    if ack.batch_seq != file.batch_seq {
        bail!(
            "the collector acknowledged batch {} where {} was due",
            ack.batch_seq,
            file.batch_seq
        );
    }
    match ack.outcome() {
        Outcome::Stored | Outcome::Duplicate => {
            let size = file.path.metadata().map_or(0, |metadata| metadata.len());
            match std::fs::remove_file(&file.path) {
                Ok(()) => shipment.usage.remove(size),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("failed to remove {}", file.path.display()));
                }
            }
            Ok(())
        }
        Outcome::Rejected => set_aside(shipment, file, &ack.message),
        Outcome::Retry | Outcome::Unspecified => {
            bail!(
                "the collector cannot take batch {} now: {}",
                ack.batch_seq,
                ack.message
            )
        }
    }
}

/// Keeps a file that cannot be sent, out of the way of the others.
fn set_aside(shipment: &Shipment, file: &SpoolFile, reason: &str) -> anyhow::Result<()> {
    let folder = shipment.spool.join(REJECTED);
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    let to = folder.join(file.path.file_name().unwrap_or_default());
    match std::fs::rename(&file.path, &to) {
        Ok(()) => shipment.usage.set_aside(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(error).with_context(|| format!("failed to move {}", file.path.display()));
        }
    }
    // One a second for days says no more than every power of two.
    let refused = shipment.count_refused();
    if refused.is_power_of_two() {
        error!(
            kept = %to.display(), refused,
            "a spool file cannot be sent and is set aside; the next start of the agent sends it again: {reason}"
        );
    } else {
        debug!(kept = %to.display(), "set aside: {reason}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vramscope_wire::Table;

    use super::*;

    fn seqs(queue: &mut Queue, spool: &Path, next_committed: u64) -> Vec<u64> {
        let mut seqs = Vec::new();
        while let Some(file) = queue.next(spool, next_committed).unwrap() {
            seqs.push(file.batch_seq);
        }
        seqs
    }

    #[test]
    fn committed_files_come_once_and_in_order() {
        let spool = tempfile::tempdir().unwrap();
        for seq in [3, 1, 2, 9] {
            std::fs::write(folder::spool_path(spool.path(), seq, Table::Devices), "").unwrap();
        }
        std::fs::write(spool.path().join("journal"), "").unwrap();
        let mut queue = Queue::default();
        assert_eq!(seqs(&mut queue, spool.path(), 9), [1, 2, 3]);
        assert_eq!(seqs(&mut queue, spool.path(), 9), [0; 0]);
        assert_eq!(seqs(&mut queue, spool.path(), 10), [9]);
    }

    /// A file that bit rot or a full disk damaged is kept apart, and the others still go.
    #[test]
    fn a_damaged_file_is_set_aside() {
        let spool = tempfile::tempdir().unwrap();
        let path = folder::spool_path(spool.path(), 1, Table::Devices);
        std::fs::write(&path, "PAR1 and then nothing").unwrap();
        let file = SpoolFile {
            batch_seq: 1,
            table: Table::Devices,
            path: path.clone(),
        };
        let shipment = Shipment::new(spool.path(), "http://127.0.0.1:1", "a", "h");
        shipment.usage.add(21);
        assert!(load(&shipment, &file).unwrap().is_none());
        assert!(!path.exists());
        assert_eq!((shipment.usage.files(), shipment.usage.bytes()), (0, 4096));
        let kept = folder::list(&spool.path().join(REJECTED)).unwrap();
        assert_eq!(kept[0].batch_seq, 1);
        // Gone altogether: nothing to say.
        assert!(load(&shipment, &file).unwrap().is_none());
    }
}
