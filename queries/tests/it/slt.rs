//! Runs every `sql/*.slt` over the seeded data, once as a trace and once as a lake.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::DataType;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use async_trait::async_trait;
use futures::TryStreamExt;
use sqllogictest::{AsyncDB, DBOutput, DefaultColumnType, Runner};
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};
use vramscope_queries::{Error, views};

use crate::seed;

#[derive(Clone)]
struct Database {
    folder: Arc<Folder>,
}

#[async_trait]
impl AsyncDB for Database {
    type Error = Error;
    type ColumnType = DefaultColumnType;

    async fn run(&mut self, sql: &str) -> Result<DBOutput<DefaultColumnType>, Error> {
        let session = self.folder.session().await?;
        let stream = session::query(&session, sql, Limits::default()).await?;
        let types = stream
            .schema()
            .fields()
            .iter()
            .map(|f| column_type(f.data_type()))
            .collect();
        let batches: Vec<RecordBatch> = stream.try_collect().await?;
        Ok(DBOutput::Rows {
            types,
            rows: batches.iter().flat_map(text_rows).collect(),
        })
    }

    async fn shutdown(&mut self) {}

    fn engine_name(&self) -> &str {
        "vramscope"
    }
}

fn column_type(data_type: &DataType) -> DefaultColumnType {
    match data_type {
        data_type if data_type.is_integer() => DefaultColumnType::Integer,
        data_type if data_type.is_floating() => DefaultColumnType::FloatingPoint,
        _ => DefaultColumnType::Text,
    }
}

fn text_rows(batch: &RecordBatch) -> Vec<Vec<String>> {
    let options = FormatOptions::default().with_null("NULL");
    let columns: Vec<ArrayFormatter> = batch
        .columns()
        .iter()
        .map(|column| ArrayFormatter::try_new(column, &options).unwrap())
        .collect();
    let cell = |column: &ArrayFormatter, row: usize| match column.value(row).to_string() {
        text if text.is_empty() => "(empty)".to_string(),
        text => text.replace(' ', "_"),
    };
    (0..batch.num_rows())
        .map(|row| columns.iter().map(|column| cell(column, row)).collect())
        .collect()
}

fn scripts() -> Vec<PathBuf> {
    let dir = Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("sql");
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "slt"))
        .collect();
    found.sort();
    found
}

async fn run_all(dir: &Path) {
    let folder = Arc::new(Folder::open(dir, Options::default()).await.unwrap());
    let mut failures = Vec::new();
    for script in scripts() {
        let database = Database {
            folder: Arc::clone(&folder),
        };
        let mut runner = Runner::new(|| {
            let database = database.clone();
            async move { Ok(database) }
        });
        if let Err(error) = runner.run_file_async(&script).await {
            failures.push(error.to_string());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn views_answer_as_calculated_over_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_trace(dir.path());
    run_all(dir.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn views_answer_as_calculated_over_a_lake() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_lake(dir.path()).await;
    run_all(dir.path()).await;
}

/// The scripts above name columns; people start with `SELECT *`, which is planned otherwise.
#[tokio::test(flavor = "multi_thread")]
async fn every_view_can_be_asked_for_all_its_columns() {
    let trace = tempfile::tempdir().unwrap();
    seed::write_trace(trace.path());
    let lake = tempfile::tempdir().unwrap();
    seed::write_lake(lake.path()).await;
    for dir in [trace.path(), lake.path()] {
        let folder = Folder::open(dir, Options::default()).await.unwrap();
        let session = folder.session().await.unwrap();
        for view in views::ALL {
            let sql = format!("SELECT * FROM {}", view.name);
            let outcome = match session::query(&session, &sql, Limits::default()).await {
                Ok(rows) => rows.try_collect::<Vec<_>>().await.map_err(Error::from),
                Err(error) => Err(error),
            };
            let batches = outcome.unwrap_or_else(|error| panic!("{sql}: {error}"));
            assert!(batches.iter().any(|batch| batch.num_rows() > 0), "{sql}");
        }
    }
}

#[test]
fn every_view_has_a_script() {
    let names: Vec<String> = scripts()
        .iter()
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    for view in views::ALL {
        assert!(
            names.iter().any(|name| name == view.name),
            "sql/{}.slt is missing",
            view.name
        );
    }
}

/// Writes the seeded data to the folder that VRAMSCOPE_SEED names, to try questions on by hand.
#[test]
#[ignore = "writes files for people"]
fn write_the_seed() {
    let dir = std::env::var_os("VRAMSCOPE_SEED").expect("VRAMSCOPE_SEED names a folder");
    seed::write_trace(Path::new(&dir));
}
