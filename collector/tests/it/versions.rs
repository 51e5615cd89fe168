//! Agents and lakes of other versions than the collector's.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Date32Array, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use deltalake::DeltaTable;
use deltalake::kernel::engine::arrow_conversion::TryIntoArrow;
use parquet::arrow::ArrowWriter;
use url::Url;
use vramscope_wire::proto::{Batch, Outcome};
use vramscope_wire::{SCHEMA_VERSION, Table};

use crate::support::*;

/// The tables of version 1.
const VERSION_1: [Table; 6] = [
    Table::AllocEvents,
    Table::Stacks,
    Table::Processes,
    Table::Devices,
    Table::HostBuffers,
    Table::AgentWindows,
];

/// Rows without the columns that came after version 1.
fn as_version_1(table: Table, rows: &RecordBatch) -> RecordBatch {
    let later: &[&str] = match table {
        Table::Processes => &["pod_uid"],
        _ => &[],
    };
    let schema = rows.schema();
    let older: Vec<usize> = (0..rows.num_columns())
        .filter(|index| !later.contains(&schema.field(*index).name().as_str()))
        .collect();
    assert_eq!(older.len() + later.len(), rows.num_columns());
    rows.project(&older).unwrap()
}

fn batch_of_version_1(table: Table, seq: u64, rows: &RecordBatch) -> Batch {
    let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), None).unwrap();
    writer.write(rows).unwrap();
    let parquet = writer.into_inner().unwrap();
    Batch {
        schema_version: 1,
        crc32: crc32fast::hash(&parquet),
        parquet,
        ..batch(table, "agent-old", seq, &rows_like(table, rows))
    }
}

/// A batch in this version's columns with as many rows: only its envelope is used.
fn rows_like(table: Table, of: &RecordBatch) -> RecordBatch {
    rows(table, "agent-old", 1, of.num_rows())
}

fn column_names(table: Table) -> Vec<String> {
    let schema = table.schema();
    let fields = schema.fields().iter();
    fields.map(|field| field.name().clone()).collect()
}

/// Agents are upgraded after the collector, one by one: what an older one sends is taken, what it
/// does not know is NULL, and it stands beside what newer ones send.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_agent_is_taken_with_null_for_what_it_does_not_know() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let mut expected = Vec::new();
    for (index, table) in VERSION_1.into_iter().enumerate() {
        let seq = index as u64 + 1;
        let old = as_version_1(table, &rows(table, "agent-old", seq, 20));
        let (new, new_rows) = made(table, "agent-new", seq, 20);
        let acks = push(
            &collector.address,
            vec![batch_of_version_1(table, seq, &old)],
        )
        .await;
        assert_eq!(outcomes(&acks), [Outcome::Stored], "{acks:?}");
        let acks = push(&collector.address, vec![new]).await;
        assert_eq!(outcomes(&acks), [Outcome::Stored], "{acks:?}");
        expected.push((table, old, new_rows));
    }
    for (table, old, new) in expected {
        wait_for_rows(&collector.address, table, 40).await;
        let nulls = column_names(table).into_iter().map(|name| {
            let field = table.schema().field_with_name(&name).unwrap().clone();
            let column = old.column_by_name(&name).cloned();
            column.unwrap_or_else(|| arrow::array::new_null_array(field.data_type(), 20))
        });
        let old = RecordBatch::try_new(table.schema(), nulls.collect()).unwrap();
        assert_eq!(
            stored(&collector.address, table).await,
            lines(&[old, new]),
            "{}",
            table.name()
        );
    }
    let unknown = "SELECT count(*) FROM processes WHERE agent_id = 'agent-old' AND pod_uid IS NULL";
    let found = sql(&collector.address, unknown).await.unwrap();
    assert_eq!(lines(&found), ["20"]);
    assert!(collector.stop().success());
}

/// The other way round the collector would drop what it does not know: it refuses instead, and
/// says what to do.
#[tokio::test(flavor = "multi_thread")]
async fn a_newer_agent_is_refused_with_the_way_out() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let newer = Batch {
        schema_version: SCHEMA_VERSION + 1,
        ..made(Table::Stacks, "agent-a", 1, 5).0
    };
    let unknown = Batch {
        table: "later_table".into(),
        ..made(Table::Stacks, "agent-a", 2, 5).0
    };
    let acks = push(&collector.address, vec![newer, unknown]).await;
    assert_eq!(outcomes(&acks), [Outcome::Rejected; 2]);
    let wanted = format!(
        "schema version {} is newer than this collector's {SCHEMA_VERSION}; upgrade the collector first",
        SCHEMA_VERSION + 1
    );
    assert!(acks[0].message.contains(&wanted), "{}", acks[0].message);
    assert!(
        acks[1]
            .message
            .contains("this collector may be older than the agent"),
        "{}",
        acks[1].message
    );
    assert!(collector.stop().success());
}

/// A lake that a collector of version 1 left: six tables, no `pod_uid`. The start adds what is
/// missing, rows of before and after stand side by side, and a second start changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_lake_of_version_1_gains_tables_and_columns_at_start() {
    let data = tempfile::tempdir().unwrap();
    let mut before = Vec::new();
    for table in VERSION_1 {
        let old = as_version_1(table, &rows(table, "agent-old", 1, 20));
        write_delta(data.path(), table, &old).await;
        before.push((table, old));
    }
    for round in 1..3 {
        let collector = Collector::start(data.path(), FAST);
        for (index, table) in Table::FROM_AGENTS.into_iter().enumerate() {
            let seq = round * 100 + index as u64;
            let acks = push(
                &collector.address,
                vec![made(table, "agent-new", seq, 20).0],
            )
            .await;
            assert_eq!(outcomes(&acks), [Outcome::Stored], "{acks:?}");
        }
        for table in Table::FROM_AGENTS {
            let of_before = if VERSION_1.contains(&table) { 20 } else { 0 };
            wait_for_rows(&collector.address, table, of_before + 20 * round as i64).await;
        }
        for (table, old) in &before {
            let names: Vec<String> = old
                .schema()
                .fields()
                .iter()
                .map(|field| format!("\"{}\"", field.name()))
                .collect();
            let of_old = format!(
                "SELECT {} FROM {} WHERE agent_id = 'agent-old'",
                names.join(", "),
                table.name()
            );
            let found = sql(&collector.address, &of_old).await.unwrap();
            assert_eq!(
                lines(&found),
                lines(std::slice::from_ref(old)),
                "{}",
                table.name()
            );
        }
        let unknown =
            "SELECT count(*) FROM processes WHERE agent_id = 'agent-old' AND pod_uid IS NULL";
        assert_eq!(
            lines(&sql(&collector.address, unknown).await.unwrap()),
            ["20"]
        );
        assert!(collector.stop().success());

        let delta = open(data.path(), Table::Processes).await;
        let schema = delta.snapshot().unwrap().schema();
        let found: Schema = schema.as_ref().try_into_arrow().unwrap();
        let last = found.fields().last().unwrap();
        assert_eq!(
            (last.name().as_str(), last.is_nullable()),
            ("pod_uid", true)
        );
    }
}

fn url(data: &Path, table: Table) -> Url {
    let dir = data.canonicalize().unwrap().join(table.name());
    std::fs::create_dir_all(&dir).unwrap();
    Url::from_directory_path(dir).unwrap()
}

async fn open(data: &Path, table: Table) -> DeltaTable {
    deltalake::open_table(url(data, table)).await.unwrap()
}

/// One commit, partitioned by `date` and `hour` of `ts` as a collector's tables are. All rows are
/// put into one partition: what is tested does not depend on which.
async fn write_delta(data: &Path, table: Table, rows: &RecordBatch) {
    let delta = DeltaTable::try_from_url(url(data, table)).await.unwrap();
    if !table.partitioned_by_time() {
        delta.write([rows.clone()]).await.unwrap();
        return;
    }
    let mut fields = rows.schema().fields().to_vec();
    fields.push(Arc::new(Field::new("date", DataType::Date32, false)));
    fields.push(Arc::new(Field::new("hour", DataType::Int32, false)));
    let mut columns: Vec<ArrayRef> = rows.columns().to_vec();
    // 2026-11-29, in days since 1970.
    columns.push(Arc::new(Date32Array::from(vec![20_786; rows.num_rows()])));
    columns.push(Arc::new(Int32Array::from(vec![13; rows.num_rows()])));
    let rows = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap();
    delta
        .write([rows])
        .with_partition_columns(["date", "hour"])
        .await
        .unwrap();
}
