//! The leak views beyond what the scripts of `sql/` ask: where other tables have more to say.

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Float64Type, Int64Type, TimestampMicrosecondType};
use futures::TryStreamExt;
use serde_json::json;
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};
use vramscope_wire::Table;

use crate::seed::{self, leaks};

async fn ask(folder: &Folder, sql: &str) -> RecordBatch {
    let session = folder.session().await.unwrap();
    let rows = session::query(&session, sql, Limits::default())
        .await
        .unwrap();
    let batches: Vec<RecordBatch> = rows.try_collect().await.unwrap();
    let schema = batches[0].schema();
    arrow::compute::concat_batches(&schema, &batches).unwrap()
}

async fn folder(
    dir: &std::path::Path,
    change: impl Fn(Table, &mut Vec<serde_json::Value>),
) -> Folder {
    for table in Table::ALL {
        let mut rows = leaks::rows(table);
        change(table, &mut rows);
        seed::write_file(dir, table, "1.parquet", &rows);
    }
    Folder::open(dir, Options::default()).await.unwrap()
}

/// 10,000,000,000 bytes are free at the end, 2026-11-28 08:30. Over whole days of the load 11,000,000 bytes
/// an hour come: 909 hours. Windows that hold no whole number of them may be up to 5 % off.
#[tokio::test]
async fn the_time_to_a_full_card_is_projected() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path(), |table, rows| {
        if table == Table::Devices {
            rows.push(leaks::card());
        }
    })
    .await;
    let found = ask(
        &folder,
        "SELECT CAST(projected_oom_at AS BIGINT) - CAST(recorded_until AS BIGINT) FROM leak_by_stack",
    )
    .await;
    let hours = found.column(0).as_primitive::<Int64Type>().value(0) as f64 / 3.6e9;
    assert!((hours / 909.0 - 1.0).abs() < 0.06, "{hours}");
}

/// Half of the framework's blocks leak, within segments that the framework takes from the driver: the
/// framework's row comes first, and both say that they are one.
#[tokio::test]
async fn a_leak_that_two_layers_see_is_said_to_be_one() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path(), |table, rows| {
        if table == Table::StackWindows {
            let mut blocks: Vec<_> = rows
                .iter()
                .filter(|row| row["stack_id"] == 61)
                .cloned()
                .collect();
            for row in &mut blocks {
                *row = seed::merge(
                    row.clone(),
                    json!({"layer": "framework", "memory_kind": "framework_block", "stack_id": 64}),
                );
            }
            rows.extend(blocks);
        }
    })
    .await;
    let found = ask(
        &folder,
        "SELECT layer, overlaps FROM leak_by_stack ORDER BY rank",
    )
    .await;
    let text = |column: usize, row: usize| {
        found
            .column(column)
            .as_string::<i32>()
            .value(row)
            .to_string()
    };
    assert_eq!(
        (text(0, 0), text(0, 1)),
        ("framework".to_string(), "driver".to_string())
    );
    assert!(
        text(1, 0).contains("lies within physical memory"),
        "{}",
        text(1, 0)
    );
    assert!(
        text(1, 1).contains("holds framework blocks"),
        "{}",
        text(1, 1)
    );
}

/// Without traffic nothing is confirmed, and nothing is said per request.
#[tokio::test]
async fn without_traffic_a_leak_is_a_suspect_by_time() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path(), |table, rows| {
        if table == Table::Traffic {
            rows.clear();
        }
    })
    .await;
    let found = ask(
        &folder,
        "SELECT tier, bytes_per_request IS NULL, traffic_scope IS NULL, bytes_per_hour BETWEEN 10e6 AND 12e6,
                ambiguous_reason
         FROM leak_by_stack",
    )
    .await;
    assert_eq!(found.num_rows(), 1);
    assert_eq!(found.column(0).as_string::<i32>().value(0), "suspect");
    for column in 1..4 {
        assert!(found.column(column).as_boolean().value(0), "{column}");
    }
    assert!(
        found
            .column(4)
            .as_string::<i32>()
            .value(0)
            .contains("no traffic")
    );
}

/// Workers of a pod hold the memory, another process of it has the figures.
#[tokio::test]
async fn a_worker_is_judged_by_its_pods_traffic() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path(), |table, rows| match table {
        Table::Traffic => {
            for row in rows {
                row["process_id"] = json!(602);
            }
        }
        Table::Processes => {
            let front = seed::merge(rows[0].clone(), json!({"process_id": 602, "pid": 6002}));
            rows.push(front);
        }
        _ => {}
    })
    .await;
    let found = ask(
        &folder,
        "SELECT tier, traffic_scope, confirmed_at FROM leak_by_stack WHERE process_id = 601",
    )
    .await;
    assert_eq!(found.column(0).as_string::<i32>().value(0), "confirmed");
    assert_eq!(found.column(1).as_string::<i32>().value(0), "pod");
    // 2026-11-27 14:30, as by its own: 20,784 days and 14.5 hours.
    let micros = found
        .column(2)
        .as_primitive::<TimestampMicrosecondType>()
        .value(0);
    assert_eq!(micros / 1_000_000, 20_784 * 86_400 + 52_200);
}

/// Stack 64 holds 900,000,000 bytes in the first half of the last slot, and 100,000,000 in the second: in
/// the mean of the last block's three slots it has grown by 166,666,667, of which 100,000,000 are left.
/// Stack 61 has grown by 347,333,333, and no other has.
#[tokio::test]
async fn growth_that_is_gone_at_the_end_has_no_share() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path(), |table, rows| {
        if table == Table::StackWindows {
            rows.extend(leaks::late_burst(64, 900_000_000, 100_000_000));
        }
    })
    .await;
    let found = ask(
        &folder,
        "SELECT growth_bytes, growth_share FROM leak_by_stack WHERE stack_id = 61",
    )
    .await;
    let growth = found.column(0).as_primitive::<Int64Type>().value(0);
    let share = found.column(1).as_primitive::<Float64Type>().value(0);
    assert_eq!(growth, 347_333_333);
    assert!(
        (share - 347_333_333.0 / 447_333_333.0).abs() < 1e-6,
        "{share}"
    );
    let verdicts = "SELECT growth_bytes, live_bytes FROM leak_verdicts() WHERE stack_id = 64";
    let other = ask(&folder, verdicts).await;
    let number = |column: usize| other.column(column).as_primitive::<Int64Type>().value(0);
    assert_eq!((number(0), number(1)), (166_666_667, 100_000_000));
}

/// Stacks 61 and 64 leak side by side in one function, as where one place's stack is cut short in some
/// calls.
#[tokio::test]
async fn rows_of_one_function_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path(), |table, rows| {
        let found: Vec<_> = rows
            .iter()
            .filter(|row| row["stack_id"] == 61)
            .cloned()
            .collect();
        if matches!(table, Table::StackWindows | Table::Stacks) {
            rows.extend(
                found
                    .into_iter()
                    .map(|row| seed::merge(row, json!({"stack_id": 64}))),
            );
        }
    })
    .await;
    let found = ask(
        &folder,
        "SELECT count(*), min(same_function_rows), max(same_function_rows) FROM leak_by_stack WHERE stack_id IN (61, 64)",
    )
    .await;
    let number = |column: usize| found.column(column).as_primitive::<Int64Type>().value(0);
    assert_eq!((number(0), number(1), number(2)), (2, 1, 1));
}

/// What was held at a moment, by comparing it with every window: plain, and slow over months.
const BY_EVERY_WINDOW: &str = "
    WITH pairs AS (
        SELECT q.process_id, q.ts, w.device, w.memory_kind, w.layer, w.gpu_uuid, w.live_bytes, w.lossy,
            row_number() OVER (
                PARTITION BY q.process_id, q.ts, w.device, w.memory_kind, w.layer ORDER BY w.ts_ns DESC
            ) AS place
        FROM (SELECT DISTINCT process_id, ts FROM quiesce_points) AS q
        JOIN device_windows AS w ON w.process_id = q.process_id AND w.window_end <= q.ts
    )
    SELECT process_id, ts, device, memory_kind, layer, gpu_uuid, live_bytes, lossy FROM pairs
    WHERE place = 1 ORDER BY 1, 2, 3, 4, 5";

/// Windows of two kinds and of an unknown card that come at odd times, and end at a moment itself.
#[tokio::test]
async fn moments_have_the_newest_window_before_them() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path(), |table, rows| {
        if table == Table::DeviceWindows {
            rows.extend(leaks::scattered_windows());
        }
    })
    .await;
    let columns = "process_id, ts, device, memory_kind, layer, gpu_uuid, live_bytes, lossy";
    let view = format!("SELECT {columns} FROM quiesce_points ORDER BY 1, 2, 3, 4, 5");
    let found = ask(&folder, &view).await;
    let plain = ask(&folder, BY_EVERY_WINDOW).await;
    assert!(found.num_rows() > 20, "{} rows", found.num_rows());
    let text = |rows: RecordBatch| {
        arrow::util::pretty::pretty_format_batches(&[rows])
            .unwrap()
            .to_string()
    };
    assert_eq!(text(found), text(plain));
}
