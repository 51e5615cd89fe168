//! Rows of a trace as JSON lines, for scripts on machines that have no Parquet reader.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{Field, Schema, TimestampMicrosecondType};
use arrow::error::ArrowError;
use arrow::json::LineDelimitedWriter;
use vramscope_wire::{Table, parquet_file};

/// Writes every row of one table of a trace's folder, in the order they were written; columns that
/// are NULL are left out.
pub fn rows(trace: &Path, table: &str, to: impl Write) -> anyhow::Result<()> {
    let Some(table) = Table::by_name(table) else {
        let names: Vec<_> = Table::FROM_AGENTS
            .iter()
            .map(|table| table.name())
            .collect();
        bail!(
            "there is no table {table:?}; there are {}",
            names.join(", ")
        );
    };
    if !trace.is_dir() {
        bail!("{} is no folder of a trace", trace.display());
    }
    let mut writer = LineDelimitedWriter::new(to);
    for path in files(&trace.join(table.name()))? {
        let file =
            File::open(&path).with_context(|| format!("failed to open {}", path.display()))?;
        let batches = parquet_file::rows(table, file)
            .with_context(|| format!("failed to read {}", path.display()))?;
        for batch in batches {
            let batch = batch.with_context(|| format!("failed to read {}", path.display()))?;
            writer.write(&by_offset(&batch)?)?;
        }
    }
    writer.finish()?;
    Ok(())
}

/// The same rows with UTC named by its offset. Arrow prints times in a zone that has a name only
/// if it was built with the table of all zones, which the agent has no other use for.
fn by_offset(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let (schema, columns, _) = batch.clone().into_parts();
    let columns: Vec<ArrayRef> = columns
        .into_iter()
        .map(
            |column| match column.as_primitive_opt::<TimestampMicrosecondType>() {
                Some(times) => Arc::new(times.clone().with_timezone("+00:00")) as ArrayRef,
                None => column,
            },
        )
        .collect();
    let fields: Vec<Field> = schema
        .fields()
        .iter()
        .zip(&columns)
        .map(|(field, column)| {
            field
                .as_ref()
                .clone()
                .with_data_type(column.data_type().clone())
        })
        .collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
}

/// A table without rows has no folder.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries =
        fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "parquet") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::identity::Host;
    use crate::spool::folder::write_trace_file;
    use crate::spool::samples;
    use crate::spool::tables::Origin;

    #[test]
    fn rows_come_back_as_json() {
        let trace = tempfile::tempdir().unwrap();
        let rows_in = samples::one_of_each();
        let host = Host {
            name: "h".into(),
            boot_id: "b".into(),
        };
        for batch_seq in [1, 2] {
            let origin = Origin {
                host: &host,
                agent_id: "a",
                batch_seq,
            };
            write_trace_file(trace.path(), Table::AllocEvents, &rows_in, origin).unwrap();
        }
        let mut text = Vec::new();
        rows(trace.path(), "alloc_events", &mut text).unwrap();
        let lines: Vec<serde_json::Value> = String::from_utf8(text)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1]["batch_seq"], 2);
        assert_eq!(lines[0]["host"], "h");

        let mut nothing = Vec::new();
        rows(trace.path(), "devices", &mut nothing).unwrap();
        assert!(nothing.is_empty());
        let error = rows(trace.path(), "allocs", &mut nothing).unwrap_err();
        assert!(error.to_string().contains("alloc_events"), "{error}");
    }
}
