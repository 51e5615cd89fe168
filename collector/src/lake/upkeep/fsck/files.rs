//! The files of a table against its log.

use std::collections::HashSet;
use std::sync::Arc;

use deltalake::DeltaTableError;
use deltalake::kernel::LogicalFileView;
use deltalake::logstore::object_store::path::Path;
use deltalake::logstore::object_store::{ObjectStore, ObjectStoreExt};
use futures::TryStreamExt;
use parquet::arrow::ParquetRecordBatchStreamBuilder;
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::AsyncFileReader;
use vramscope_wire::Table;

use super::{Findings, TableReport};
use crate::lake::upkeep::merge::StoredFile;
use crate::lake::upkeep::swap::Count;
use crate::lake::{Lake, LakeError, delta_error};

/// Looks at every live file of a table, and for files that are not live.
pub(super) async fn check(
    lake: &Lake,
    table: Table,
    deep: bool,
    findings: &mut Findings,
    step: &(dyn Fn(&str, u64, u64) + Sync),
) -> Result<TableReport, LakeError> {
    let delta = lake.table(table);
    let store = delta.object_store();
    let views: Vec<_> = delta
        .snapshot()
        .map_err(delta_error(table))?
        .log_data()
        .iter()
        .collect();
    let total = views.len() as u64;
    let count = async |count: Count| -> Result<u64, LakeError> {
        let found = count.of(&delta).await.map_err(delta_error(table))?;
        Ok(u64::try_from(found).unwrap_or(0))
    };
    let mut report = TableReport {
        table: table.name(),
        version: delta.version().unwrap_or(0),
        files: total,
        expired_rows: count(Count::Expired).await?,
        same_stacks: count(Count::SameStacks).await?,
        ..TableReport::default()
    };
    let mut live = HashSet::new();
    for (number, view) in views.iter().enumerate() {
        step(table.name(), number as u64, total);
        report.bytes += u64::try_from(view.size()).unwrap_or(0);
        match file(&store, view, deep).await {
            Ok(rows) => report.rows += rows,
            Err(what) => {
                findings.problem(table.name(), what.0, format!("{}: {}", view.path(), what.1));
            }
        }
        live.insert(view.object_store_path());
    }
    unreferenced(&store, &live, &mut report)
        .await
        .map_err(delta_error(table))?;
    if report.unreferenced_files > 0 {
        findings.note(
            table.name(),
            "unreferenced_files",
            format!(
                "{} files, {} bytes, are not part of the table: vacuum deletes those that are of no \
                 more use to anybody",
                report.unreferenced_files, report.unreferenced_bytes
            ),
        );
    }
    Ok(report)
}

type Wrong = (&'static str, String);

/// Rows of a file, or what is wrong with it.
async fn file(
    store: &Arc<dyn ObjectStore>,
    view: &LogicalFileView,
    deep: bool,
) -> Result<u64, Wrong> {
    let path = view.object_store_path();
    let expected = u64::try_from(view.size()).unwrap_or(0);
    let found = store
        .head(&path)
        .await
        .map_err(|error| ("missing_file", error.to_string()))?;
    if found.size != expected {
        return Err((
            "file_size",
            format!("has {} bytes, the log says {expected}", found.size),
        ));
    }
    let damaged = |error: parquet::errors::ParquetError| ("damaged_file", error.to_string());
    let mut file = StoredFile::new(Arc::clone(store), path, expected);
    let footer = file.get_metadata(None).await.map_err(damaged)?;
    let rows = u64::try_from(footer.file_metadata().num_rows()).unwrap_or(0);
    if let Some(told) = view.num_records()
        && told as u64 != rows
    {
        return Err(("row_count", format!("has {rows} rows, the log says {told}")));
    }
    if deep {
        let decoded = decode(file).await.map_err(damaged)?;
        if decoded != rows {
            return Err((
                "row_count",
                format!("has {decoded} rows, its footer says {rows}"),
            ));
        }
    }
    Ok(rows)
}

async fn decode(file: StoredFile) -> Result<u64, parquet::errors::ParquetError> {
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder = ParquetRecordBatchStreamBuilder::new_with_options(file, options).await?;
    let mut batches = builder.with_batch_size(1024).build()?;
    let mut rows = 0;
    while let Some(batch) = batches.try_next().await? {
        rows += batch.num_rows() as u64;
    }
    Ok(rows)
}

async fn unreferenced(
    store: &Arc<dyn ObjectStore>,
    live: &HashSet<Path>,
    report: &mut TableReport,
) -> Result<(), DeltaTableError> {
    let mut listed = store.list(None);
    while let Some(file) = listed.try_next().await? {
        let is_of_log = file.location.as_ref().starts_with("_delta_log");
        if !is_of_log && !live.contains(&file.location) {
            report.unreferenced_files += 1;
            report.unreferenced_bytes += file.size;
        }
    }
    Ok(())
}
