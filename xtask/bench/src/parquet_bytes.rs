//! Bytes of Parquet files by column, from their footers, with what the files' own parts (page
//! headers are in the columns; footer and magic are not) add.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::{Value, json};

/// Weighs files and folders of files: rows, files, bytes, and compressed bytes by column.
pub fn weigh(paths: &[PathBuf]) -> Result<Value> {
    let mut files = Vec::new();
    for path in paths {
        find(path, &mut files)?;
    }
    let (mut rows, mut bytes) = (0, 0);
    let mut columns: BTreeMap<String, i64> = BTreeMap::new();
    for path in &files {
        let file =
            File::open(path).with_context(|| format!("failed to open {}", path.display()))?;
        bytes += file
            .metadata()
            .with_context(|| format!("failed to weigh {}", path.display()))?
            .len();
        let reader = SerializedFileReader::new(file)
            .with_context(|| format!("{} is no Parquet file", path.display()))?;
        for group in reader.metadata().row_groups() {
            rows += group.num_rows();
            for column in group.columns() {
                let name = column.column_path().string();
                *columns.entry(name).or_default() += column.compressed_size();
            }
        }
    }
    let in_columns: i64 = columns.values().sum();
    Ok(json!({
        "files": files.len(),
        "rows": rows,
        "bytes": bytes,
        "footer_bytes": bytes as i64 - in_columns,
        "column_bytes": columns,
    }))
}

fn find(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if path.is_dir() {
        let entries = std::fs::read_dir(path)
            .with_context(|| format!("failed to read {}", path.display()))?;
        for entry in entries {
            find(&entry.context("failed to read a folder")?.path(), files)?;
        }
    } else if path.extension().is_some_and(|ending| ending == "parquet") {
        files.push(path.to_path_buf());
    }
    Ok(())
}
