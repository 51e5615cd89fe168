//! The lake's upkeep: merged, expired and deleted files, and what a kill in between leaves.
//!
//! What has to be there is what the test itself sent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arrow::array::{
    ArrayRef, AsArray, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use arrow::datatypes::Int64Type;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use crate::support::*;

/// Commits at once, and leaves the upkeep to the test.
const BY_HAND: &[&str] = &["--commit-interval", "50ms", "--upkeep-interval", "1h"];

fn command(name: &str, data: &Path, flags: &[&str]) -> Output {
    let mut command = binary();
    command.arg(name).arg("--data").arg(data).args(flags);
    command.output().unwrap()
}

/// Runs a command that has to succeed; its JSON.
fn told(name: &str, data: &Path, flags: &[&str]) -> Value {
    let output = command(name, data, &[flags, &["--json"]].concat());
    assert!(
        output.status.success(),
        "{name}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn of_table(report: &Value, table: Table) -> &Value {
    let tables = report.as_array().unwrap();
    tables
        .iter()
        .find(|found| found["table"] == table.name())
        .unwrap()
}

/// Data files on disk, wherever they lie below a table.
fn parquet_files(data: &Path, table: Table) -> Vec<PathBuf> {
    fn walk(dir: &Path, into: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("_delta_log") {
                walk(&path, into);
            } else if path
                .extension()
                .is_some_and(|extension| extension == "parquet")
            {
                into.push(path);
            }
        }
    }
    let mut files = Vec::new();
    walk(&data.join(table.name()), &mut files);
    files.sort();
    files
}

/// Sends batches `from..=to` of some agents, and waits for their commit; what was sent.
async fn send(
    collector: &Collector,
    table: Table,
    agents: &[&str],
    seqs: std::ops::RangeInclusive<u64>,
) -> Vec<RecordBatch> {
    let mut sent = Vec::new();
    for seq in seqs {
        for agent in agents {
            let (batch, rows) = made(table, agent, seq, 40);
            let acks = push(&collector.address, vec![batch]).await;
            assert_eq!(outcomes(&acks), [Outcome::Stored]);
            sent.push(rows);
        }
    }
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn merged_files_hold_the_same_rows_sorted_and_vacuum_leaves_only_them() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), BY_HAND);
    let mut sent = Vec::new();
    // Waits in between make files of their own.
    for seq in 1..=6 {
        sent.extend(
            send(
                &collector,
                Table::AllocEvents,
                &["agent-a", "agent-b"],
                seq..=seq,
            )
            .await,
        );
        wait_for_rows(&collector.address, Table::AllocEvents, 80 * seq as i64).await;
    }
    let before = parquet_files(data.path(), Table::AllocEvents).len();
    assert!(before >= 24, "{before} files in four hours");

    // Beside the running collector, whose next query sees the merged files.
    let report = told("compact", data.path(), &["--table", "alloc_events"]);
    let report = of_table(&report, Table::AllocEvents);
    assert_eq!(
        (&report["files_now"], &report["rows"]),
        (&4.into(), &480.into())
    );
    assert_eq!(
        stored(&collector.address, Table::AllocEvents).await,
        lines(&sent)
    );
    // Old files stay for readers that began before.
    assert_eq!(
        parquet_files(data.path(), Table::AllocEvents).len(),
        before + 4
    );
    let refused = command("vacuum", data.path(), &["--after", "1s"]);
    assert_eq!(refused.status.code(), Some(1));
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(error.contains("another collector holds"), "{error}");
    // It goes on as if nothing had been.
    sent.extend(send(&collector, Table::AllocEvents, &["agent-a"], 7..=7).await);
    wait_for_rows(&collector.address, Table::AllocEvents, 520).await;
    assert!(collector.stop().success());

    let dry = told("vacuum", data.path(), &["--after", "0s", "--dry-run"]);
    let listed = of_table(&dry, Table::AllocEvents)["files"]
        .as_array()
        .unwrap()
        .len();
    assert_eq!(listed, before);
    told("vacuum", data.path(), &["--after", "0s"]);
    told("compact", data.path(), &[]);
    told("vacuum", data.path(), &["--after", "0s"]);
    let left = parquet_files(data.path(), Table::AllocEvents);
    assert_eq!(left.len(), 4, "{left:?}");
    left.iter().for_each(|file| assert_sorted(file));
    let report = told("fsck", data.path(), &["--deep"]);
    assert_eq!(report["sound"], true, "{report}");
    let collector = Collector::start(data.path(), BY_HAND);
    assert_eq!(
        stored(&collector.address, Table::AllocEvents).await,
        lines(&sent)
    );
}

/// By host, process and seq, as the documentation says.
fn assert_sorted(file: &Path) {
    let file = std::fs::File::open(file).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file)
        .unwrap()
        .build()
        .unwrap();
    let mut last: Option<(String, i64, i64)> = None;
    for batch in reader {
        let batch = batch.unwrap();
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let hosts = column("host").as_string::<i32>();
        let processes = column("process_id").as_primitive::<Int64Type>();
        let seqs = column("seq").as_primitive::<Int64Type>();
        for row in 0..batch.num_rows() {
            let key = (
                hosts.value(row).to_string(),
                processes.value(row),
                seqs.value(row),
            );
            assert!(last.as_ref() <= Some(&key), "{last:?} before {key:?}");
            last = Some(key);
        }
    }
    assert!(last.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_stack_is_left_once_and_the_rest_is_accounted_for() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), BY_HAND);
    let mut sent = Vec::new();
    // The rows of a batch depend on its number alone: both agents send the same stacks.
    for seq in 1..=3 {
        sent.extend(
            send(
                &collector,
                Table::Stacks,
                &["agent-a", "agent-b"],
                seq..=seq,
            )
            .await,
        );
        wait_for_rows(&collector.address, Table::Stacks, 80 * seq as i64).await;
    }
    assert!(collector.stop().success());
    let ids = |batches: &[RecordBatch]| -> BTreeSet<i64> {
        let of = |batch: &RecordBatch| {
            let ids = batch.column_by_name("stack_id").unwrap();
            ids.as_primitive::<Int64Type>().values().to_vec()
        };
        batches.iter().flat_map(of).collect()
    };
    let different = ids(&sent);
    let report = told("compact", data.path(), &[]);
    let report = of_table(&report, Table::Stacks);
    assert_eq!(report["same_stacks"], 240 - different.len());
    let report = told("fsck", data.path(), &[]);
    assert_eq!(report["sound"], true, "{report}");
    let stacks = of_table(&report["tables"], Table::Stacks);
    assert_eq!(stacks["rows"], different.len());
    assert_eq!(stacks["same_stacks"], 240 - different.len());
    let collector = Collector::start(data.path(), BY_HAND);
    let found = sql(&collector.address, "SELECT stack_id FROM stacks")
        .await
        .unwrap();
    assert_eq!(ids(&found), different);
}

/// A batch of events at given moments, microseconds since 1970.
fn events_at(agent: &str, seq: u64, at: &[i64]) -> RecordBatch {
    let rows = rows(Table::AllocEvents, agent, seq, at.len());
    let schema = rows.schema();
    let columns = schema
        .fields()
        .iter()
        .zip(rows.columns())
        .map(|(field, column)| {
            let times: ArrayRef = match field.name().as_str() {
                "ts" => Arc::new(TimestampMicrosecondArray::from(at.to_vec()).with_timezone("UTC")),
                "ts_ns" => Arc::new(Int64Array::from_iter_values(at.iter().map(|at| at * 1000))),
                "host" => Arc::new(StringArray::from(vec!["host-1"; at.len()])),
                _ => Arc::clone(column),
            };
            times
        });
    RecordBatch::try_new(Arc::clone(&schema), columns.collect()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn retention_takes_out_whole_hours_and_says_so() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), BY_HAND);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_micros() as i64;
    let hour = 3_600_000_000;
    // Five and six hours ago is past two hours, whatever the minute; ten minutes ago is not.
    let recent = now - hour / 6;
    let rows = events_at(
        "agent-a",
        1,
        &[now - 6 * hour, now - 5 * hour, recent, recent + 1],
    );
    let acks = push(
        &collector.address,
        vec![batch(Table::AllocEvents, "agent-a", 1, &rows)],
    )
    .await;
    assert_eq!(outcomes(&acks), [Outcome::Stored]);
    wait_for_rows(&collector.address, Table::AllocEvents, 4).await;
    let report = told("compact", data.path(), &["--retention", "alloc_events=2h"]);
    let report = of_table(&report, Table::AllocEvents);
    assert_eq!(
        (&report["expired_rows"], &report["expired_files"]),
        (&2.into(), &2.into())
    );
    assert_eq!(
        stored(&collector.address, Table::AllocEvents).await,
        lines(&[rows.slice(2, 2)])
    );
    // The rest of the batch is gone on purpose.
    let report = told("fsck", data.path(), &[]);
    assert_eq!(report["sound"], true, "{report}");
    assert_eq!(
        of_table(&report["tables"], Table::AllocEvents)["expired_rows"],
        2
    );
    let unknown = command("compact", data.path(), &["--retention", "stacks=2h"]);
    assert_eq!(unknown.status.code(), Some(2));
}

/// Kills it at a random moment, if it has not ended before.
fn kill(mut child: Child, random: &mut Random, most_ms: u64) {
    std::thread::sleep(Duration::from_millis(random.below(most_ms)));
    let _ = child.kill();
    child.wait().unwrap();
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// SIGKILL of compactions (by hand, two at a time, and the collector's own) and of vacuum, while an
/// agent sends: no row is lost or there twice.
#[tokio::test(flavor = "multi_thread")]
async fn kills_in_upkeep_lose_nothing_and_double_nothing() {
    const ROUNDS: u64 = 5;
    let seed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64
        | 1;
    println!("seed {seed}");
    let mut random = Random(seed);
    let data = tempfile::tempdir().unwrap();
    let flags = &["--commit-interval", "30ms", "--upkeep-interval", "40ms"];
    let start = |name: &str, flags: &[&str]| {
        let mut command = binary();
        command.arg(name).arg("--data").arg(data.path()).args(flags);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let mut sent: BTreeMap<Table, Vec<RecordBatch>> = BTreeMap::new();
    for round in 0..ROUNDS {
        let collector = Collector::start(data.path(), flags);
        for seq in 1..=12 {
            let seq = round * 12 + seq;
            let table = if seq % 4 == 0 {
                Table::Stacks
            } else {
                Table::AllocEvents
            };
            sent.entry(table)
                .or_default()
                .extend(send(&collector, table, &["agent-a"], seq..=seq).await);
            tokio::time::sleep(Duration::from_millis(35)).await;
        }
        let both = [start("compact", &[]), start("compact", &["--levels"])];
        for child in both {
            kill(child, &mut random, 400);
        }
        collector.kill();
        kill(start("compact", &[]), &mut random, 600);
        kill(start("vacuum", &["--after", "0s"]), &mut random, 300);
    }
    told("compact", data.path(), &[]);
    told("vacuum", data.path(), &["--after", "0s"]);
    let collector = Collector::start(data.path(), BY_HAND);
    let events = &sent[&Table::AllocEvents];
    let count = events.iter().map(|rows| rows.num_rows() as i64).sum();
    wait_for_rows(&collector.address, Table::AllocEvents, count).await;
    let found = stored(&collector.address, Table::AllocEvents).await;
    assert!(
        found == lines(events),
        "as many rows as were sent, but others"
    );
    assert!(collector.stop().success());
    let report = told("fsck", data.path(), &["--deep"]);
    assert_eq!(report["sound"], true, "{report}");
}

/// Problems that `fsck` finds, by kind.
fn problems(data: &Path, flags: &[&str]) -> Vec<String> {
    let output = command("fsck", data, &[flags, &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["sound"], false);
    let problems = report["problems"].as_array().unwrap();
    let kind = |problem: &Value| problem["kind"].as_str().unwrap().to_string();
    problems.iter().map(kind).collect()
}

/// A folder with one batch of 40 events, in four hours, and no collector on it.
async fn folder_of_one_batch() -> tempfile::TempDir {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), BY_HAND);
    send(&collector, Table::AllocEvents, &["agent-a"], 1..=1).await;
    wait_for_rows(&collector.address, Table::AllocEvents, 40).await;
    assert!(collector.stop().success());
    data
}

#[tokio::test(flavor = "multi_thread")]
async fn fsck_finds_files_that_are_missing_or_damaged() {
    let data = folder_of_one_batch().await;
    assert_eq!(
        command("fsck", data.path(), &["--deep"]).status.code(),
        Some(0)
    );
    let files = parquet_files(data.path(), Table::AllocEvents);
    let whole = std::fs::read(&files[0]).unwrap();
    std::fs::remove_file(&files[0]).unwrap();
    assert_eq!(problems(data.path(), &[]), ["missing_file"]);
    std::fs::write(&files[0], &whole[..whole.len() - 1]).unwrap();
    assert_eq!(problems(data.path(), &[]), ["file_size"]);
    // Damage in the middle is behind a sound footer: only a look at every value sees it.
    let mut damaged = whole.clone();
    damaged[8..200].fill(0xff);
    std::fs::write(&files[0], &damaged).unwrap();
    assert_eq!(problems(data.path(), &["--deep"]), ["damaged_file"]);
    std::fs::write(&files[0], &whole).unwrap();
    assert_eq!(
        command("fsck", data.path(), &["--deep"]).status.code(),
        Some(0)
    );
    let nowhere = command("fsck", &data.path().join("nowhere"), &[]);
    assert_eq!(nowhere.status.code(), Some(1));
}

/// Commits actions as another program would.
fn commit_by_hand(data: &Path, table: Table, actions: &[Value]) {
    let log = data.join(table.name()).join("_delta_log");
    let version = |path: PathBuf| {
        path.file_name()?
            .to_str()?
            .strip_suffix(".json")?
            .parse::<u64>()
            .ok()
    };
    let entries = std::fs::read_dir(&log).unwrap();
    let newest = entries
        .filter_map(|entry| version(entry.unwrap().path()))
        .max()
        .unwrap();
    let lines: Vec<String> = actions.iter().map(Value::to_string).collect();
    std::fs::write(
        log.join(format!("{:020}.json", newest + 1)),
        lines.join("\n"),
    )
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn fsck_finds_rows_that_are_doubled_or_lost() {
    let data = folder_of_one_batch().await;
    let table = data.path().join(Table::AllocEvents.name());
    let file = parquet_files(data.path(), Table::AllocEvents).remove(0);
    let copy = file.with_file_name("part-copy.parquet");
    std::fs::copy(&file, &copy).unwrap();
    let partition = |name: &str| {
        let prefix = format!("{name}=");
        let part = file
            .iter()
            .find_map(|part| part.to_str()?.strip_prefix(&prefix).map(str::to_string));
        part.unwrap()
    };
    let values = json!({"date": partition("date"), "hour": partition("hour")});
    let path = |file: &Path| {
        file.strip_prefix(&table)
            .unwrap()
            .to_str()
            .unwrap()
            .to_string()
    };
    let add = json!({"add": {
        "path": path(&copy), "partitionValues": values, "modificationTime": 1, "dataChange": true,
        "size": std::fs::metadata(&copy).unwrap().len(), "stats": "{\"numRecords\": 10}",
    }});
    commit_by_hand(data.path(), Table::AllocEvents, &[add]);
    assert_eq!(problems(data.path(), &[]), ["rows_doubled"]);
    let remove = |file: &Path| {
        json!({"remove": {
            "path": path(file), "partitionValues": values, "deletionTimestamp": 1, "dataChange": true,
        }})
    };
    commit_by_hand(data.path(), Table::AllocEvents, &[remove(&copy)]);
    assert_eq!(command("fsck", data.path(), &[]).status.code(), Some(0));
    commit_by_hand(data.path(), Table::AllocEvents, &[remove(&file)]);
    assert_eq!(problems(data.path(), &[]), ["rows_missing"]);
}
