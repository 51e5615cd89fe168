//! Another try for files that a collector refused, such as one older than the agent, after it was
//! upgraded.
//!
//! A collector takes a number it has passed for a resend of what it has, so such a file needs a
//! new number, in its name and in its rows.
//!
//! Invariant: at any moment of a kill, a row is in one file that will be sent, never in two:
//! 1. the copy with the new number N is written; the journal does not know N, so the next start
//!    would remove it;
//! 2. the old file is renamed to `….sent-as-N`;
//! 3. the journal's next frame makes N count;
//! 4. the old file is removed. A start finds it either way: if the journal knows N it removes it,
//!    else it takes the old name back.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow::error::ArrowError;
use vramscope_wire::parquet_file;

use super::folder::{self, REJECTED, SpoolFile};

const MARK: &str = ".sent-as-";

/// Finishes or undoes what an earlier call began: `next_batch_seq` is the journal's.
pub fn settle(spool: &Path, next_batch_seq: u64) -> anyhow::Result<()> {
    let rejected = spool.join(REJECTED);
    if !rejected.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(&rejected)? {
        let path = entry?.path();
        let marked = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.split_once(MARK))
            .and_then(|(name, seq)| Some((rejected.join(name), seq.parse::<u64>().ok()?)));
        let Some((original, seq)) = marked else {
            continue;
        };
        if seq < next_batch_seq {
            fs::remove_file(&path)
        } else {
            fs::rename(&path, original)
        }
        .with_context(|| format!("failed to settle {}", path.display()))?;
    }
    Ok(())
}

/// Copies refused files back into the spool, with numbers from `next` on; gives the next free
/// number. Damaged files stay, and so does what finds no room.
pub fn requeue(spool: &Path, mut next: u64, fits: impl Fn(u64) -> bool) -> anyhow::Result<u64> {
    let rejected = spool.join(REJECTED);
    if !rejected.is_dir() {
        return Ok(next);
    }
    let files = folder::list(&rejected)?;
    let first = next;
    for file in &files {
        let bytes = match renumbered(file, next) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::debug!(file = %file.path.display(), "stays refused: {error:#}");
                continue;
            }
        };
        if !fits(bytes.len() as u64) {
            break;
        }
        folder::write_durably(&folder::spool_path(spool, next, file.table), &bytes)?;
        let mut marked = file.path.clone().into_os_string();
        marked.push(format!("{MARK}{next}"));
        fs::rename(&file.path, &marked)
            .with_context(|| format!("failed to rename {}", file.path.display()))?;
        next += 1;
    }
    if next > first {
        folder::sync_folder(&rejected)?;
        folder::sync_folder(spool)?;
        tracing::info!(
            files = next - first,
            "files that a collector refused are sent once more"
        );
    }
    Ok(next)
}

/// The file's bytes with another number in its rows.
fn renumbered(file: &SpoolFile, batch_seq: u64) -> anyhow::Result<Vec<u8>> {
    let opened = fs::File::open(&file.path)?;
    let mut batches = Vec::new();
    for batch in parquet_file::rows(file.table, opened)? {
        batches.push(renumber(&batch?, batch_seq)?);
    }
    Ok(parquet_file::encode(file.table, &batches)?)
}

/// The same rows under another batch's number.
pub fn renumber(batch: &RecordBatch, batch_seq: u64) -> Result<RecordBatch, ArrowError> {
    let schema = batch.schema();
    let columns = schema
        .fields()
        .iter()
        .zip(batch.columns())
        .map(|(field, column)| {
            if field.name() == "batch_seq" {
                Arc::new(Int64Array::from(vec![batch_seq as i64; batch.num_rows()])) as ArrayRef
            } else {
                Arc::clone(column)
            }
        })
        .collect();
    RecordBatch::try_new(Arc::clone(&schema), columns)
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::Int64Type;
    use vramscope_wire::Table;

    use super::super::tables::Origin;
    use super::*;
    use crate::host::identity::Host;

    fn refused(spool: &Path, seq: u64) {
        let rejected = spool.join(REJECTED);
        fs::create_dir_all(&rejected).unwrap();
        let host = Host {
            name: "h".into(),
            boot_id: "b".into(),
        };
        let origin = Origin {
            host: &host,
            agent_id: "a",
            batch_seq: seq as i64,
        };
        let rows = super::super::samples::one_of_each();
        let bytes = folder::encode(Table::AllocEvents, &rows, origin).unwrap();
        fs::write(
            folder::spool_path(&rejected, seq, Table::AllocEvents),
            bytes,
        )
        .unwrap();
    }

    fn seqs(folder: &Path) -> Vec<u64> {
        folder::list(folder)
            .unwrap()
            .iter()
            .map(|file| file.batch_seq)
            .collect()
    }

    #[test]
    fn a_refused_file_gets_a_new_number_in_name_and_rows() {
        let spool = tempfile::tempdir().unwrap();
        let rejected = spool.path().join(REJECTED);
        refused(spool.path(), 3);
        fs::write(
            folder::spool_path(&rejected, 4, Table::AllocEvents),
            "damaged",
        )
        .unwrap();
        assert_eq!(requeue(spool.path(), 50, |_| true).unwrap(), 51);
        assert_eq!(seqs(spool.path()), [50]);
        let path = folder::spool_path(spool.path(), 50, Table::AllocEvents);
        let batches =
            parquet_file::decode(Table::AllocEvents, fs::File::open(path).unwrap()).unwrap();
        let column = batches[0].column_by_name("batch_seq").unwrap();
        assert_eq!(column.as_primitive::<Int64Type>().values(), &[50]);
        // The journal has it: the old copy goes, the damaged file stays.
        settle(spool.path(), 51).unwrap();
        assert_eq!(seqs(&rejected), [4]);
        assert_eq!(fs::read_dir(&rejected).unwrap().count(), 1);
    }

    /// Killed before the journal knew: the copy does not count, the old file does.
    #[test]
    fn a_kill_before_the_journal_takes_it_back() {
        let spool = tempfile::tempdir().unwrap();
        refused(spool.path(), 3);
        requeue(spool.path(), 50, |_| true).unwrap();
        settle(spool.path(), 50).unwrap();
        assert_eq!(seqs(&spool.path().join(REJECTED)), [3]);
    }

    #[test]
    fn without_room_it_stays() {
        let spool = tempfile::tempdir().unwrap();
        refused(spool.path(), 3);
        assert_eq!(requeue(spool.path(), 50, |_| false).unwrap(), 50);
        assert_eq!(seqs(&spool.path().join(REJECTED)), [3]);
    }
}
