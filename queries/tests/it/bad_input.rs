//! Folders and statements that must be refused, and what is said about them.

use std::path::Path;

use futures::TryStreamExt;
use vramscope_queries::Error;
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};
use vramscope_wire::Table;

use crate::folder::number;
use crate::seed;

async fn open_error(dir: &Path) -> String {
    match Folder::open(dir, Options::default()).await {
        Ok(_) => panic!("{dir:?} was opened"),
        Err(error) => error.to_string(),
    }
}

async fn query_error(folder: &Folder, sql: &str) -> Error {
    let session = folder.session().await.unwrap();
    match session::query(&session, sql, Limits::default()).await {
        Err(error) => error,
        Ok(rows) => match rows.try_collect::<Vec<_>>().await {
            Ok(_) => panic!("{sql:?} was answered"),
            Err(error) => Error::from(error),
        },
    }
}

#[tokio::test]
async fn a_folder_without_tables_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("nowhere");
    let text = open_error(&missing).await;
    assert!(
        text.contains("nowhere") && text.contains("does not exist"),
        "{text}"
    );
    let text = open_error(dir.path()).await;
    assert!(
        text.contains("no tables in") && text.contains("alloc_events"),
        "{text}"
    );
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let text = open_error(&file).await;
    assert!(text.contains("is not a folder"), "{text}");
}

#[tokio::test]
async fn damaged_files_are_all_named_and_can_be_left_out() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_file(dir.path(), Table::Stacks, "good.parquet", &seed::stacks());
    let stacks = dir.path().join("stacks");
    let bytes = std::fs::read(stacks.join("good.parquet")).unwrap();
    std::fs::write(stacks.join("cut.parquet"), &bytes[..bytes.len() / 2]).unwrap();
    std::fs::write(stacks.join("empty.parquet"), "").unwrap();
    std::fs::write(stacks.join("text.parquet"), "these are not columns").unwrap();
    let text = open_error(dir.path()).await;
    for name in [
        "cut.parquet",
        "empty.parquet",
        "text.parquet",
        "--skip-damaged",
    ] {
        assert!(text.contains(name), "{name} is missing in {text}");
    }
    assert!(!text.contains("good.parquet"), "{text}");
    let options = Options {
        skip_damaged: true,
        ..Options::default()
    };
    let folder = Folder::open(dir.path(), options).await.unwrap();
    assert_eq!(number(&folder, "SELECT count(*) FROM stacks").await, 5);
    assert_eq!(folder.skipped().await.len(), 3);
}

/// Damage behind a sound footer shows only while rows are read.
#[tokio::test]
async fn damaged_rows_are_traced_to_their_file() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_file(dir.path(), Table::Stacks, "good.parquet", &seed::stacks());
    let path = dir.path().join("stacks/bad.parquet");
    let mut bytes = std::fs::read(dir.path().join("stacks/good.parquet")).unwrap();
    // The first data page starts after the magic number.
    bytes[4..60].fill(0xff);
    std::fs::write(&path, bytes).unwrap();
    let folder = Folder::open(dir.path(), Options::default()).await.unwrap();
    let error = query_error(&folder, "SELECT stack_id, folded FROM stacks").await;
    assert!(error.may_be_damage(), "{error:?}");
    let damaged = folder.find_damage().await;
    assert_eq!(damaged.len(), 1);
    assert_eq!(damaged[0].path, path);
    let options = Options {
        skip_damaged: true,
        ..Options::default()
    };
    let folder = Folder::open(dir.path(), options).await.unwrap();
    assert_eq!(number(&folder, "SELECT count(*) FROM stacks").await, 5);
    assert_eq!(folder.skipped().await.len(), 1);
}

/// The same in a lake, whose files nobody checks beforehand.
#[tokio::test]
async fn damaged_rows_of_a_lake_are_traced_to_their_file() {
    let dir = tempfile::tempdir().unwrap();
    seed::append_to_lake(dir.path(), Table::Stacks, &seed::stacks()).await;
    let written: Vec<_> = std::fs::read_dir(dir.path().join("stacks"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "parquet")
        })
        .collect();
    let mut bytes = std::fs::read(&written[0]).unwrap();
    bytes[4..60].fill(0xff);
    std::fs::write(&written[0], bytes).unwrap();
    let folder = Folder::open(dir.path(), Options::default()).await.unwrap();
    let error = query_error(&folder, "SELECT stack_id, folded FROM stacks").await;
    assert!(error.may_be_damage(), "{error:?}");
    let damaged = folder.find_damage().await;
    assert_eq!(
        damaged.iter().map(|file| &file.path).collect::<Vec<_>>(),
        vec![&written[0]]
    );
}

#[tokio::test]
async fn files_with_other_columns_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    // A file of another table.
    seed::write_file(dir.path(), Table::Stacks, "1.parquet", &seed::stacks());
    let events = dir.path().join("alloc_events");
    std::fs::create_dir_all(&events).unwrap();
    std::fs::copy(
        dir.path().join("stacks/1.parquet"),
        events.join("1.parquet"),
    )
    .unwrap();
    let text = open_error(dir.path()).await;
    assert!(
        text.contains("alloc_events/1.parquet") && text.contains("column \"ts\" is missing"),
        "{text}"
    );
}

/// A file from before an optional column was added reads as NULL there.
#[tokio::test]
async fn files_without_an_optional_column_are_read() {
    use parquet::arrow::ArrowWriter;
    let dir = tempfile::tempdir().unwrap();
    let whole = seed::batch(Table::AllocEvents, &seed::alloc_events());
    let lifetime = whole.schema().index_of("lifetime_ns").unwrap();
    let kept: Vec<usize> = (0..whole.num_columns())
        .filter(|index| *index != lifetime)
        .collect();
    let older = whole.project(&kept).unwrap();
    let events = dir.path().join("alloc_events");
    std::fs::create_dir_all(&events).unwrap();
    let file = std::fs::File::create(events.join("1.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, older.schema(), None).unwrap();
    writer.write(&older).unwrap();
    writer.close().unwrap();
    let folder = Folder::open(dir.path(), Options::default()).await.unwrap();
    let nulls = "SELECT count(*) FROM alloc_events WHERE lifetime_ns IS NULL";
    assert_eq!(number(&folder, nulls).await, older.num_rows() as i64);
}

#[tokio::test]
async fn a_delta_table_that_is_not_ours_is_refused() {
    use deltalake::DeltaTable;
    use url::Url;
    let dir = tempfile::tempdir().unwrap();
    let events = dir.path().join("alloc_events");
    std::fs::create_dir_all(&events).unwrap();
    let delta = DeltaTable::try_from_url(Url::from_directory_path(&events).unwrap())
        .await
        .unwrap();
    delta
        .write([seed::batch(Table::Stacks, &seed::stacks())])
        .await
        .unwrap();
    let text = open_error(dir.path()).await;
    assert!(
        text.contains("alloc_events") && text.contains("column \"ts\" is missing"),
        "{text}"
    );
    std::fs::write(
        events.join("_delta_log/00000000000000000000.json"),
        "{ not json",
    )
    .unwrap();
    let text = open_error(dir.path()).await;
    assert!(
        text.contains("failed to open table") && text.contains("alloc_events"),
        "{text}"
    );
}

#[tokio::test]
async fn only_queries_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_trace(dir.path());
    let folder = Folder::open(dir.path(), Options::default()).await.unwrap();
    let out = dir.path().join("out.csv");
    let refused = [
        "CREATE TABLE x AS SELECT 1".to_string(),
        "CREATE VIEW x AS SELECT 1".to_string(),
        "CREATE EXTERNAL TABLE x STORED AS CSV LOCATION '/etc/passwd'".to_string(),
        "CREATE SCHEMA x".to_string(),
        "CREATE FUNCTION f() RETURNS INT RETURN 1".to_string(),
        "DROP TABLE alloc_events".to_string(),
        "DROP VIEW tetrahedron".to_string(),
        "INSERT INTO stacks SELECT * FROM stacks".to_string(),
        "UPDATE stacks SET folded = ''".to_string(),
        "DELETE FROM stacks".to_string(),
        "TRUNCATE TABLE stacks".to_string(),
        "ALTER TABLE stacks ADD COLUMN x INT".to_string(),
        format!("COPY (SELECT 1) TO '{}'", out.display()),
        format!("COPY stacks TO '{}' STORED AS CSV", out.display()),
        format!("EXPLAIN ANALYZE COPY (SELECT 1) TO '{}'", out.display()),
        "EXPLAIN INSERT INTO stacks SELECT * FROM stacks".to_string(),
        "SET datafusion.execution.batch_size = 1".to_string(),
        "SET datafusion.runtime.memory_limit = '100G'".to_string(),
        "RESET datafusion.execution.batch_size".to_string(),
        "BEGIN".to_string(),
        "PREPARE p AS SELECT 1".to_string(),
        "EXECUTE p".to_string(),
    ];
    for sql in refused {
        let error = query_error(&folder, &sql).await;
        assert!(matches!(error, Error::NotAQuery(_)), "{sql}: {error}");
        assert!(
            error.to_string().contains("only queries are"),
            "{sql}: {error}"
        );
    }
    assert!(!out.exists());
    for sql in ["SELECT 1; SELECT 2", ""] {
        assert!(
            matches!(query_error(&folder, sql).await, Error::StatementCount(_)),
            "{sql:?}"
        );
    }
    // Writing that hides in what looks like a query.
    for sql in [
        "SELECT 1 AS x INTO copied FROM stacks",
        "WITH t AS (SELECT 1) INSERT INTO stacks SELECT * FROM stacks",
    ] {
        query_error(&folder, sql).await;
    }
    // Files of the server are no tables.
    let error = query_error(&folder, "SELECT * FROM '/etc/passwd'")
        .await
        .to_string();
    assert!(error.contains("not found"), "{error}");
    assert_eq!(number(&folder, "SELECT count(*) FROM stacks").await, 17);
}

#[tokio::test]
async fn all_kinds_of_queries_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_trace(dir.path());
    let folder = Folder::open(dir.path(), Options::default()).await.unwrap();
    let session = folder.session().await.unwrap();
    for sql in [
        "SELECT 1;",
        "-- a comment\nWITH t AS (SELECT 1 AS x) SELECT * FROM t",
        "VALUES (1), (2)",
        "SHOW TABLES",
        "SHOW COLUMNS FROM alloc_events",
        "SHOW datafusion.execution.batch_size",
        "DESCRIBE tetrahedron",
        "EXPLAIN SELECT * FROM tetrahedron",
        "EXPLAIN ANALYZE SELECT * FROM live_allocations",
    ] {
        let rows = session::query(&session, sql, Limits::default()).await;
        let rows = rows.unwrap_or_else(|error| panic!("{sql}: {error}"));
        rows.try_collect::<Vec<_>>()
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    }
}

#[tokio::test]
async fn a_mistyped_column_is_answered_with_a_near_one() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_file(dir.path(), Table::Stacks, "1.parquet", &seed::stacks()[..1]);
    let folder = Folder::open(dir.path(), Options::default()).await.unwrap();
    let text = query_error(&folder, "SELECT live_byte FROM tetrahedron")
        .await
        .to_string();
    assert!(
        text.contains("live_byte") && text.contains("live_bytes"),
        "{text}"
    );
}
