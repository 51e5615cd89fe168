//! Bounds on time, rows and memory.

use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use futures::{StreamExt, TryStreamExt};
use vramscope_queries::Error;
use vramscope_queries::session::{self, Limits, Options};

/// 10^10 rows by a cross join: far longer than any limit here.
const ENDLESS: &str = "SELECT count(*) FROM generate_series(1, 100000) AS a, generate_series(1, 100000) AS b \
     WHERE a.value % 7 = b.value % 11";

#[tokio::test(flavor = "multi_thread")]
async fn a_query_is_stopped_when_its_time_is_up() {
    let session = session::session(&Options::default()).unwrap();
    let limits = Limits {
        time: Some(Duration::from_millis(300)),
        rows: None,
    };
    let started = Instant::now();
    let outcome = match session::query(&session, ENDLESS, limits).await {
        Ok(rows) => rows
            .try_collect::<Vec<_>>()
            .await
            .map_err(Error::from)
            .map(|_| ()),
        Err(error) => Err(error),
    };
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("stopped after 0.3 s"), "{text}");
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn an_answer_is_cut_at_exactly_the_row_limit() {
    let session = session::session(&Options::default()).unwrap();
    let limits = Limits {
        time: None,
        rows: Some(10_000),
    };
    let sql = "SELECT * FROM generate_series(1, 10001)";
    let mut rows = session::query(&session, sql, limits).await.unwrap();
    let mut count = 0;
    let error = loop {
        match rows.next().await.unwrap() {
            Ok(batch) => count += batch.num_rows(),
            Err(error) => break Error::from(error),
        }
    };
    assert_eq!(count, 10_000);
    assert!(error.is_too_many_rows(), "{error}");
    assert!(
        error.to_string().contains("more than 10000 rows"),
        "{error}"
    );
    assert!(rows.next().await.is_none());
    // As many rows as allowed are no error.
    let sql = "SELECT * FROM generate_series(1, 10000)";
    let rows = session::query(&session, sql, limits).await.unwrap();
    let batches: Vec<RecordBatch> = rows.try_collect().await.unwrap();
    assert_eq!(
        batches.iter().map(RecordBatch::num_rows).sum::<usize>(),
        10_000
    );
}

const SORT: &str = "SELECT value, repeat('x', 200) AS wide FROM generate_series(1, 200000) ORDER BY value % 1000, value";

/// A sort of some 40 MB in 16 MB spills and is right.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_sort_spills_to_the_chosen_folder() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        memory_bytes: 16 << 20,
        temp_dir: Some(dir.path().to_path_buf()),
        skip_damaged: false,
        ..Options::default()
    };
    let session = session::session(&options).unwrap();
    let rows = session::query(&session, SORT, Limits::default())
        .await
        .unwrap();
    let batches: Vec<RecordBatch> = rows.try_collect().await.unwrap();
    assert_eq!(
        batches.iter().map(RecordBatch::num_rows).sum::<usize>(),
        200_000
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn running_out_of_memory_says_so() {
    let options = Options {
        memory_bytes: 64 << 10,
        ..Options::default()
    };
    let session = session::session(&options).unwrap();
    let outcome = match session::query(&session, SORT, Limits::default()).await {
        Ok(rows) => rows
            .try_collect::<Vec<_>>()
            .await
            .map_err(Error::from)
            .map(|_| ()),
        Err(error) => Err(error),
    };
    let text = outcome.unwrap_err().to_string();
    assert!(
        text.contains("out of memory") && text.contains("raise the memory limit"),
        "{text}"
    );
}
