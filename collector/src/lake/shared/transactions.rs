//! The application transactions of a Delta table, all of them or those since a version. (The Delta
//! library looks one up by its name, but the names are what has to be found.)
//!
//! They are read as the Delta protocol lays them down: a checkpoint holds the newest of each name
//! in its column `txn`, and a log entry has those of its commit.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use bytes::Bytes;
use deltalake::logstore::object_store::path::Path;
use deltalake::logstore::object_store::{Error as StoreError, ObjectStore, ObjectStoreExt};
use deltalake::{DeltaTable, DeltaTableError};
use futures::{StreamExt, TryStreamExt};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::Deserialize;

const LOG: &str = "_delta_log";

/// Log entries that are asked for at a time.
const AT_A_TIME: usize = 16;

/// A line of a log entry, as far as it matters here.
#[derive(Deserialize)]
struct Line {
    txn: Option<Txn>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Txn {
    app_id: String,
    version: i64,
}

/// Names and versions of the transactions that versions after `known` up to `target` brought; all
/// up to `target` if nothing is known, or if the log no longer reaches back so far.
pub async fn since(
    delta: &DeltaTable,
    known: Option<u64>,
    target: u64,
) -> Result<HashMap<String, u64>, DeltaTableError> {
    if let Some(known) = known {
        let mut found = HashMap::new();
        if entries(delta, known + 1, target, &mut found).await? {
            return Ok(found);
        }
    }
    // A log entry can be cleaned away between the listing and the reading: then there is a newer
    // checkpoint.
    let mut tries = 3;
    loop {
        let mut found = HashMap::new();
        let first = match newest_checkpoint(delta, target).await? {
            Some((version, files)) => {
                for file in files {
                    checkpoint(read(delta, &file).await?, &mut found)?;
                }
                version + 1
            }
            None => 0,
        };
        if entries(delta, first, target, &mut found).await? {
            return Ok(found);
        }
        tries -= 1;
        if tries == 0 {
            let gap = format!("log entries between {first} and {target} are missing");
            return Err(DeltaTableError::Generic(gap));
        }
    }
}

/// Adds what the log entries of a range of versions hold. False if one is not there.
async fn entries(
    delta: &DeltaTable,
    first: u64,
    last: u64,
    found: &mut HashMap<String, u64>,
) -> Result<bool, DeltaTableError> {
    let mut entries = futures::stream::iter(first..=last)
        .map(|version| entry(store(delta), version))
        .buffered(AT_A_TIME);
    while let Some(lines) = entries.try_next().await? {
        let Some(lines) = lines else {
            return Ok(false);
        };
        for txn in lines {
            add(found, &txn.app_id, txn.version);
        }
    }
    Ok(true)
}

/// The transactions of one log entry; `None` if it is not there.
async fn entry(
    store: Arc<dyn ObjectStore>,
    version: u64,
) -> Result<Option<Vec<Txn>>, DeltaTableError> {
    let path = Path::from(format!("{LOG}/{version:020}.json"));
    let bytes = match store.get(&path).await {
        Ok(object) => object.bytes().await?,
        Err(StoreError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut found = Vec::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        if line.is_empty() {
            continue;
        }
        let line: Line = serde_json::from_slice(line).map_err(|error| {
            DeltaTableError::Generic(format!("log entry {path} is damaged: {error}"))
        })?;
        found.extend(line.txn);
    }
    Ok(Some(found))
}

fn add(found: &mut HashMap<String, u64>, name: &str, version: i64) {
    let version = u64::try_from(version).unwrap_or(0);
    match found.get_mut(name) {
        // The newest counts, and ours only grow.
        Some(held) => *held = version.max(*held),
        None => {
            found.insert(name.to_string(), version);
        }
    }
}

/// The files of the newest checkpoint up to a version.
async fn newest_checkpoint(
    delta: &DeltaTable,
    target: u64,
) -> Result<Option<(u64, Vec<Path>)>, DeltaTableError> {
    let listed = store(delta);
    let listed: Vec<_> = listed.list(Some(&Path::from(LOG))).try_collect().await?;
    let mut newest: Option<(u64, Vec<Path>)> = None;
    for object in listed {
        let name = object.location.filename().unwrap_or_default();
        let Some((version, rest)) = name.split_once(".checkpoint.") else {
            continue;
        };
        let Ok(version) = version.parse::<u64>() else {
            continue;
        };
        if version > target || !rest.ends_with("parquet") {
            continue;
        }
        match &mut newest {
            Some((held, files)) if *held == version => files.push(object.location),
            Some((held, _)) if *held > version => {}
            _ => newest = Some((version, vec![object.location])),
        }
    }
    Ok(newest)
}

/// Adds what a checkpoint's file holds.
fn checkpoint(bytes: Bytes, found: &mut HashMap<String, u64>) -> Result<(), DeltaTableError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(bytes)?;
    let fields = builder.parquet_schema().root_schema().get_fields();
    let Some(column) = fields.iter().position(|field| field.name() == "txn") else {
        return Ok(());
    };
    let mask = ProjectionMask::roots(builder.parquet_schema(), [column]);
    for batch in builder.with_projection(mask).build()? {
        let batch = batch?;
        let Some(txn) = batch.column(0).as_struct_opt() else {
            return Err(DeltaTableError::Generic("txn is not a struct".to_string()));
        };
        let column = |name: &str, wanted: &DataType| {
            let column = txn.column_by_name(name).ok_or_else(|| {
                DeltaTableError::Generic(format!("a checkpoint's txn has no {name}"))
            })?;
            cast(column, wanted).map_err(DeltaTableError::from)
        };
        let (names, versions) = (
            column("appId", &DataType::Utf8)?,
            column("version", &DataType::Int64)?,
        );
        let (names, versions) = (
            names.as_string::<i32>(),
            versions.as_primitive::<Int64Type>(),
        );
        for row in 0..txn.len() {
            if txn.is_valid(row) && names.is_valid(row) && versions.is_valid(row) {
                add(found, names.value(row), versions.value(row));
            }
        }
    }
    Ok(())
}

async fn read(delta: &DeltaTable, path: &Path) -> Result<Bytes, DeltaTableError> {
    Ok(store(delta).get(path).await?.bytes().await?)
}

/// The store below the table's folder.
fn store(delta: &DeltaTable) -> Arc<dyn ObjectStore> {
    delta.log_store().object_store(None)
}
