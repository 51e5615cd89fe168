//! A data folder that grows while it is open.

use std::path::Path;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use vramscope_queries::engine::{Cluster, Engine};
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};
use vramscope_wire::Table;

use crate::seed;

pub async fn number(folder: &Folder, sql: &str) -> i64 {
    let session = folder.session().await.unwrap();
    let stream = session::query(&session, sql, Limits::default())
        .await
        .unwrap();
    let batches: Vec<RecordBatch> = stream.try_collect().await.unwrap();
    batches[0].column(0).as_primitive::<Int64Type>().value(0)
}

const COUNT: &str = "SELECT count(*) FROM stacks";

async fn open(dir: &Path) -> Folder {
    Folder::open(dir, Options::default()).await.unwrap()
}

/// DataFusion's list of a folder's files never expires; ours must.
#[tokio::test]
async fn a_trace_shows_files_added_after_the_first_query() {
    let dir = tempfile::tempdir().unwrap();
    let stacks = seed::stacks();
    seed::write_file(dir.path(), Table::Stacks, "1.parquet", &stacks[..2]);
    let folder = open(dir.path()).await;
    assert_eq!(number(&folder, COUNT).await, 2);
    seed::write_file(dir.path(), Table::Stacks, "2.parquet", &stacks[2..]);
    assert_eq!(number(&folder, COUNT).await, 5);
    assert_eq!(number(&folder, "SELECT count(*) FROM top_stacks").await, 0);
    // Through a view as well: five allocations and reservations of this boot and one of an
    // unknown card are live, and without rows in processes nobody knows that the seventh is
    // from before a boot.
    seed::write_file(
        dir.path(),
        Table::AllocEvents,
        "1.parquet",
        &seed::alloc_events(),
    );
    assert_eq!(
        number(&folder, "SELECT count(*) FROM live_allocations").await,
        7
    );
    std::fs::remove_file(dir.path().join("stacks/1.parquet")).unwrap();
    assert_eq!(number(&folder, COUNT).await, 3);
}

/// A session that is in use keeps its state; the next one sees the commit.
#[tokio::test]
async fn a_lake_shows_new_commits_to_the_next_session() {
    let dir = tempfile::tempdir().unwrap();
    let stacks = seed::stacks();
    seed::append_to_lake(dir.path(), Table::Stacks, &stacks[..2]).await;
    let folder = open(dir.path()).await;
    let old = folder.session().await.unwrap();
    seed::append_to_lake(dir.path(), Table::Stacks, &stacks[2..]).await;
    assert_eq!(number(&folder, COUNT).await, 5);
    let rows = session::query(&old, "SELECT * FROM stacks", Limits::default())
        .await
        .unwrap();
    let rows: Vec<RecordBatch> = rows.try_collect().await.unwrap();
    assert_eq!(rows.iter().map(RecordBatch::num_rows).sum::<usize>(), 2);
    // A table that comes into being later is seen as well.
    assert_eq!(
        number(&folder, "SELECT count(*) FROM agent_windows").await,
        0
    );
    seed::append_to_lake(dir.path(), Table::AgentWindows, &seed::agent_windows()).await;
    assert_eq!(
        number(&folder, "SELECT sum(lost) FROM answer_quality").await,
        3
    );
}

/// Files in the making are not read.
#[tokio::test]
async fn unfinished_files_of_a_trace_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    seed::write_file(dir.path(), Table::Stacks, "1.parquet", &seed::stacks());
    let stacks = dir.path().join("stacks");
    for name in [".2.parquet", "_3.parquet", "4.parquet.part", "5.tmp"] {
        std::fs::write(stacks.join(name), "not parquet").unwrap();
    }
    assert_eq!(number(&open(dir.path()).await, COUNT).await, 5);
}

/// A path may hold characters that a pattern or a URL would read otherwise.
#[tokio::test]
async fn odd_paths_are_only_paths() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("a [b]*? c%20#ü");
    seed::write_file(&trace, Table::Stacks, "1 [x]%41.parquet", &seed::stacks());
    assert_eq!(number(&open(&trace).await, COUNT).await, 5);
    let lake = dir.path().join("a b*? c#ü");
    seed::append_to_lake(&lake, Table::AgentWindows, &seed::agent_windows()).await;
    let windows = "SELECT count(*) FROM agent_windows";
    assert_eq!(number(&open(&lake).await, windows).await, 3);
    // The Delta library panics on these: we say so instead, and the way out works.
    let brackets = dir.path().join("a[b]");
    std::fs::rename(&lake, &brackets).unwrap();
    let text = Folder::open(&brackets, Options::default())
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(text.contains("its path has a '['"), "{text}");
    std::os::unix::fs::symlink(&brackets, dir.path().join("link")).unwrap();
    assert_eq!(
        number(&open(&dir.path().join("link")).await, windows).await,
        3
    );
}

/// A lake that no collector of this version has opened yet: the columns that came later are NULL,
/// the tables that came later have no rows, and every view can be asked.
#[tokio::test]
async fn a_lake_of_an_older_version_is_read_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let rows = seed::batch(Table::Processes, &seed::processes());
    let older: Vec<usize> = (0..rows.schema().index_of("pod_uid").unwrap()).collect();
    let rows = rows.project(&older).unwrap();
    seed::append_batch_to_lake(dir.path(), Table::Processes, rows).await;
    let folder = open(dir.path()).await;
    assert_eq!(
        number(
            &folder,
            "SELECT count(*) FROM processes WHERE pod_uid IS NULL AND hour = 10"
        )
        .await,
        5
    );
    assert_eq!(
        number(
            &folder,
            "SELECT count(*) FROM current_processes WHERE pod = 'trainer-0' AND pod_uid IS NULL"
        )
        .await,
        1
    );
    assert_eq!(
        number(&folder, "SELECT count(*) FROM device_history").await,
        0
    );
}

/// As another program leaves a table that it gave features of newer readers: here the Delta library
/// reads it, workers do not.
#[tokio::test]
async fn a_table_for_newer_readers_has_the_same_answers() {
    let dir = tempfile::tempdir().unwrap();
    seed::append_to_lake(dir.path(), Table::AllocEvents, &seed::alloc_events()).await;
    let log = dir
        .path()
        .join("alloc_events/_delta_log/00000000000000000000.json");
    let plain = std::fs::read_to_string(&log).unwrap();
    let newer = plain.replace(
        r#""minReaderVersion":1,"minWriterVersion":2"#,
        r#""minReaderVersion":2,"minWriterVersion":5"#,
    );
    assert_ne!(plain, newer);
    let rows = seed::alloc_events().len() as i64;
    // The library passes over a filter that is NULL, and has to be kept from it.
    let questions = [
        ("SELECT count(*) FROM alloc_events", rows),
        ("SELECT count(seq) FROM alloc_events WHERE ts_ns > 0", rows),
        (
            "SELECT count(*) FROM alloc_events WHERE seq > 0 AND host = NULL",
            0,
        ),
    ];
    for log_text in [plain, newer] {
        std::fs::write(&log, log_text).unwrap();
        let folder = open(dir.path()).await;
        for (sql, expected) in questions {
            assert_eq!(number(&folder, sql).await, expected, "{sql}");
        }
    }
    let options = Options {
        engine: Engine::Distributed(
            Cluster::new(&["http://127.0.0.1:1".to_string()], None).unwrap(),
        ),
        ..Options::default()
    };
    let error = Folder::open(dir.path(), options).await.err().unwrap();
    let error = error.to_string();
    assert!(
        error.contains("alloc_events") && error.contains("--engine local"),
        "{error}"
    );
}
