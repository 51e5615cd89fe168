//! What is taken, what is not, and that what is taken is all there, once.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use deltalake::kernel::engine::arrow_conversion::TryIntoArrow;
use vramscope_wire::proto::{Batch, Outcome};
use vramscope_wire::{SCHEMA_VERSION, Table};

use crate::support::*;

/// Every column of every table comes back as it was sent, over SQL and from the Delta files.
#[tokio::test(flavor = "multi_thread")]
async fn every_table_round_trips() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let mut sent = std::collections::BTreeMap::new();
    for agent in ["agent-a", "agent-b"] {
        let mut batches = Vec::new();
        for round in 0..2u64 {
            for (index, table) in Table::FROM_AGENTS.into_iter().enumerate() {
                let seq = round * Table::FROM_AGENTS.len() as u64 + index as u64 + 1;
                let (batch, rows) = made(table, agent, seq, 40);
                batches.push(batch);
                sent.entry(table).or_insert_with(Vec::new).push(rows);
            }
        }
        let acks = push(&collector.address, batches).await;
        assert!(
            acks.iter().all(|ack| ack.outcome() == Outcome::Stored),
            "{acks:?}"
        );
    }
    for table in Table::FROM_AGENTS {
        wait_for_rows(&collector.address, table, 160).await;
        assert_eq!(
            stored(&collector.address, table).await,
            lines(&sent[&table]),
            "{}",
            table.name()
        );
    }
    // Rows 0 to 3 of a batch lie in the hours 13 to 16 of 2026-11-29.
    let partitions = sql(
        &collector.address,
        "SELECT date, hour, count(*) FROM devices GROUP BY 1, 2",
    )
    .await
    .unwrap();
    let expected = [13, 14, 15, 16].map(|hour| format!("2026-11-29|{hour}|40"));
    assert_eq!(lines(&partitions), expected);
    assert!(collector.stop().success());
    assert!(log_files(data.path()).is_empty());

    for table in Table::FROM_AGENTS {
        let url =
            url::Url::from_directory_path(data.path().canonicalize().unwrap().join(table.name()))
                .unwrap();
        let delta = deltalake::open_table(url).await.unwrap();
        let schema = delta.snapshot().unwrap().schema();
        let found: arrow::datatypes::Schema = schema.as_ref().try_into_arrow().unwrap();
        for (index, field) in table.schema().fields().iter().enumerate() {
            assert_eq!(found.field(index).name(), field.name());
            // With the names and nullability of what is nested.
            assert_eq!(
                found.field(index).data_type(),
                field.data_type(),
                "{}.{}",
                table.name(),
                field.name()
            );
        }
    }
}

/// A resend is a DUPLICATE while the batch waits in the log, after it was committed, and after
/// a restart; also if the agent's highest batch is in another table than the one resent.
#[tokio::test(flavor = "multi_thread")]
async fn a_resend_counts_once() {
    let data = tempfile::tempdir().unwrap();
    let batches = || -> Vec<Batch> {
        vec![
            made(Table::AllocEvents, "agent-a", 5, 10).0,
            made(Table::Stacks, "agent-a", 7, 10).0,
            made(Table::AllocEvents, "agent-a", 9, 10).0,
        ]
    };
    let collector = Collector::start(data.path(), NEVER);
    assert_eq!(
        outcomes(&push(&collector.address, batches()).await),
        [Outcome::Stored; 3]
    );
    assert_eq!(
        outcomes(&push(&collector.address, batches()).await),
        [Outcome::Duplicate; 3]
    );
    assert!(collector.stop().success());

    let collector = Collector::start(data.path(), FAST);
    assert_eq!(
        outcomes(&push(&collector.address, batches()).await),
        [Outcome::Duplicate; 3]
    );
    // Below the highest of another table, never sent: going back is a resend.
    let low = made(Table::Stacks, "agent-a", 8, 10).0;
    assert_eq!(
        outcomes(&push(&collector.address, vec![low]).await),
        [Outcome::Duplicate]
    );
    // Another agent's line is its own.
    let other = made(Table::Stacks, "agent-b", 1, 10).0;
    assert_eq!(
        outcomes(&push(&collector.address, vec![other]).await),
        [Outcome::Stored]
    );
    wait_for_rows(&collector.address, Table::Stacks, 20).await;
    assert_eq!(count(&collector.address, Table::AllocEvents).await, 20);
}

/// Each of these can never be taken: it is named and refused, and the stream goes on.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_taken_is_rejected_and_the_rest_goes_on() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let good = |seq| made(Table::AllocEvents, "agent-a", seq, 10).0;
    let with_bytes = |seq, parquet: Vec<u8>| Batch {
        crc32: crc32fast::hash(&parquet),
        parquet,
        ..good(seq)
    };
    let whole = good(1).parquet;
    let mut flipped = whole.clone();
    let middle = flipped.len() / 3;
    flipped[middle] ^= 0x40;
    let early = {
        let rows = rows(Table::Devices, "agent-a", 1, 1);
        let mut columns = rows.columns().to_vec();
        let before_1970 =
            arrow::array::TimestampMicrosecondArray::from(vec![-1]).with_timezone("UTC");
        columns[0] = std::sync::Arc::new(before_1970);
        let rows = arrow::array::RecordBatch::try_new(rows.schema(), columns).unwrap();
        batch(Table::Devices, "agent-a", 1, &rows)
    };
    let hostile = [
        (
            "CRC-32",
            Batch {
                crc32: good(1).crc32 ^ 1,
                ..good(1)
            },
        ),
        (
            "CRC-32",
            Batch {
                parquet: flipped.clone(),
                ..good(1)
            },
        ),
        (
            "not a readable Parquet file",
            with_bytes(1, b"garbage".to_vec()),
        ),
        ("not a readable Parquet file", with_bytes(1, Vec::new())),
        (
            "not a readable Parquet file",
            with_bytes(1, whole[..whole.len() / 2].to_vec()),
        ),
        (
            "do not fit table alloc_events",
            with_bytes(1, made(Table::Stacks, "agent-a", 1, 10).0.parquet),
        ),
        (
            "unknown table \"nonesuch\"",
            Batch {
                table: "nonesuch".into(),
                ..good(1)
            },
        ),
        (
            "unknown table \"../stacks\"",
            Batch {
                table: "../stacks".into(),
                ..good(1)
            },
        ),
        (
            "schema version",
            Batch {
                schema_version: SCHEMA_VERSION + 1,
                ..good(1)
            },
        ),
        (
            "agent_id",
            Batch {
                agent_id: "../x".into(),
                ..good(1)
            },
        ),
        (
            "agent_id",
            Batch {
                agent_id: "/etc".into(),
                ..good(1)
            },
        ),
        (
            "agent_id",
            Batch {
                agent_id: String::new(),
                ..good(1)
            },
        ),
        (
            "agent_id",
            Batch {
                agent_id: "damaged".into(),
                ..good(1)
            },
        ),
        (
            "batch_seq",
            Batch {
                batch_seq: 0,
                ..good(1)
            },
        ),
        (
            "batch_seq",
            Batch {
                batch_seq: u64::MAX,
                ..good(1)
            },
        ),
        (
            "11",
            Batch {
                rows: 11,
                ..good(1)
            },
        ),
        ("1970", early),
    ];
    let mut batches = vec![good(1)];
    // A number above the good ones: what is rejected must not move the agent's mark.
    batches.extend(hostile.iter().map(|(_, batch)| {
        let is_about_seq = batch.batch_seq != 1;
        Batch {
            batch_seq: if is_about_seq { batch.batch_seq } else { 1000 },
            ..batch.clone()
        }
    }));
    batches.push(good(2));
    let acks = push(&collector.address, batches).await;
    assert_eq!(acks.len(), hostile.len() + 2);
    assert_eq!(acks[0].outcome(), Outcome::Stored);
    for ((reason, _), ack) in hostile.iter().zip(&acks[1..]) {
        assert_eq!(ack.outcome(), Outcome::Rejected, "{reason}: {ack:?}");
        assert!(ack.message.contains(reason), "{reason}: {}", ack.message);
    }
    assert_eq!(acks[acks.len() - 1].outcome(), Outcome::Stored);
    wait_for_rows(&collector.address, Table::AllocEvents, 20).await;
    assert!(!data.path().join("x").exists());
    // Damage that the checksum covers up must be found by the decoder or be harmless: the
    // server stays up either way.
    let acks = push(&collector.address, vec![with_bytes(3, flipped), good(4)]).await;
    assert!(
        matches!(acks[0].outcome(), Outcome::Rejected | Outcome::Stored),
        "{acks:?}"
    );
    assert_eq!(acks[1].outcome(), Outcome::Stored);
    assert!(collector.stop().success());
}

/// The same name for other bytes: refused and told as an alarm, whether the first one waits, is
/// committed, or was before the restart. What was stored stays as it was.
#[tokio::test(flavor = "multi_thread")]
async fn a_conflicting_resend_is_refused_and_told() {
    let data = tempfile::tempdir().unwrap();
    let (first, rows) = made(Table::Stacks, "agent-a", 7, 10);
    let other = Batch {
        batch_seq: 7,
        ..made(Table::Stacks, "agent-a", 8, 10).0
    };
    let collector = Collector::start(data.path(), NEVER);
    let acks = push(
        &collector.address,
        vec![first.clone(), other.clone(), first.clone()],
    )
    .await;
    let expected = [Outcome::Stored, Outcome::Rejected, Outcome::Duplicate];
    assert_eq!(outcomes(&acks), expected, "{acks:?}");
    assert!(
        acks[1].message.contains(&format!("{:08x}", first.crc32))
            && acks[1].message.contains(&format!("{:08x}", other.crc32)),
        "{}",
        acks[1].message
    );
    assert!(collector.stop().success());

    let collector = Collector::start_logging(data.path(), FAST, std::process::Stdio::piped());
    let acks = push(&collector.address, vec![other.clone(), first.clone()]).await;
    assert_eq!(outcomes(&acks), [Outcome::Rejected, Outcome::Duplicate]);
    assert_eq!(
        stored(&collector.address, Table::Stacks).await,
        lines(&[rows])
    );
    let told = collector.stop_and_read_log();
    assert!(
        told.lines().any(|line| line.contains("ERROR")
            && line.contains("agent-a")
            && line.contains("another batch with CRC-32")),
        "{told}"
    );
    assert!(told.contains("conflicting=1"), "{told}");
}

/// Agents that all send at once, with one table for all of them: every batch is acknowledged,
/// there once, and in the ledger.
#[tokio::test(flavor = "multi_thread")]
async fn many_agents_at_once_are_all_stored_once() {
    const AGENTS: usize = 60;
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let sent: Vec<Vec<Batch>> = (0..AGENTS)
        .map(|agent| {
            let agent = format!("agent-{agent:03}");
            (1..=5)
                .map(|seq| made(Table::AllocEvents, &agent, seq, 4).0)
                .collect()
        })
        .collect();
    let streams = sent
        .iter()
        .map(|batches| push(&collector.address, batches.clone()));
    for acks in futures::future::join_all(streams).await {
        assert_eq!(outcomes(&acks), [Outcome::Stored; 5]);
    }
    wait_for_rows(
        &collector.address,
        Table::AllocEvents,
        (AGENTS * 5 * 4) as i64,
    )
    .await;
    wait_for_ledger(&collector.address, (AGENTS * 5) as i64).await;
    assert_eq!(
        ledger(&collector.address).await,
        as_in_ledger(sent.iter().flatten())
    );
    let per_batch = "SELECT count(*) FROM (SELECT agent_id, batch_seq FROM alloc_events \
                     GROUP BY 1, 2 HAVING count(*) = 4)";
    let found = sql(&collector.address, per_batch).await.unwrap();
    assert_eq!(lines(&found), [(AGENTS * 5).to_string()]);
}

/// A host whose clock is wrong: its rows keep the time they were sent with and lie in the partition
/// of this hour, and the ledger counts them. Rows that are hours late lie in their own hour.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_wrong_clock_are_kept_and_make_no_partition() {
    const HOUR: i64 = 3_600_000_000;
    let data = tempfile::tempdir().unwrap();
    let flags = &["--commit-interval", "50ms"];
    let collector = Collector::start(data.path(), flags);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = now.as_micros() as i64;
    // Now; 30 days late; a month and a half late; in the year 2106 (seconds of 32 bits); in 1970.
    let times = [
        now,
        now - 30 * 24 * HOUR,
        now - 45 * 24 * HOUR,
        4_294_967_295_000_000,
        1_000_000,
    ];
    let rows = rows(Table::Devices, "agent-a", 1, times.len());
    let mut columns = rows.columns().to_vec();
    let ts = arrow::array::TimestampMicrosecondArray::from(times.to_vec()).with_timezone("UTC");
    columns[0] = Arc::new(ts);
    let rows = arrow::array::RecordBatch::try_new(rows.schema(), columns).unwrap();
    let acks = push(
        &collector.address,
        vec![batch(Table::Devices, "agent-a", 1, &rows)],
    )
    .await;
    assert_eq!(outcomes(&acks), [Outcome::Stored]);
    wait_for_rows(&collector.address, Table::Devices, times.len() as i64).await;
    wait_for_ledger(&collector.address, 1).await;
    assert_eq!(
        stored(&collector.address, Table::Devices).await,
        lines(&[rows])
    );
    let misplaced = "SELECT count(*) FROM devices \
                     WHERE date <> CAST(ts AS DATE) OR hour <> extract(hour FROM ts)";
    let found = sql(&collector.address, misplaced).await.unwrap();
    assert_eq!(lines(&found), ["3"]);
    // The hour may have changed between their arrival and now, or between two of them not.
    let partitions = "SELECT count(DISTINCT (date, hour)) FROM devices \
                      WHERE date <> CAST(ts AS DATE) OR hour <> extract(hour FROM ts)";
    let found = sql(&collector.address, partitions).await.unwrap();
    assert_eq!(lines(&found), ["1"]);
    let ledger = "SELECT misdated_rows, date_part('year', ts_max), date_part('year', ts_min) \
                  FROM batches";
    let found = sql(&collector.address, ledger).await.unwrap();
    assert_eq!(lines(&found), ["3|2106|1970"]);
}

/// Nobody configured anything: what is acknowledged is visible all the same, soon.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_acknowledged_becomes_visible_by_itself() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), &[]);
    let (batch, _) = made(Table::Stacks, "agent-a", 1, 5);
    assert_eq!(
        outcomes(&push(&collector.address, vec![batch]).await),
        [Outcome::Stored]
    );
    wait_for_rows(&collector.address, Table::Stacks, 5).await;
}

/// The other promise: what is acknowledged is in the table already, with its line in the ledger,
/// and there is no log to lose.
#[tokio::test(flavor = "multi_thread")]
async fn with_the_promise_store_what_is_acknowledged_is_in_the_table() {
    let data = tempfile::tempdir().unwrap();
    let flags = [NEVER, &["--promise", "store"]].concat();
    let collector = Collector::start(data.path(), &flags);
    let agents = ["agent-a", "agent-b", "agent-c"];
    let sent: Vec<Vec<_>> = agents
        .iter()
        .map(|agent| {
            vec![
                made(Table::AllocEvents, agent, 1, 8),
                made(Table::Stacks, agent, 2, 3),
                made(Table::AllocEvents, agent, 3, 8),
            ]
        })
        .collect();
    let batches = |index: usize| -> Vec<Batch> {
        let of_agent: &Vec<_> = &sent[index];
        of_agent.iter().map(|(batch, _)| batch.clone()).collect()
    };
    let streams = (0..3).map(|index| push(&collector.address, batches(index)));
    for acks in futures::future::join_all(streams).await {
        assert_eq!(outcomes(&acks), [Outcome::Stored; 3]);
    }
    // Nobody waits for a commit.
    let of_table = |table: &str| -> Vec<arrow::array::RecordBatch> {
        let all = sent.iter().flatten();
        let of = all.filter(|(batch, _)| batch.table == table);
        of.map(|(_, rows)| rows.clone()).collect()
    };
    assert_eq!(
        stored(&collector.address, Table::AllocEvents).await,
        lines(&of_table("alloc_events"))
    );
    assert_eq!(
        stored(&collector.address, Table::Stacks).await,
        lines(&of_table("stacks"))
    );
    let all: Vec<Batch> = (0..3).flat_map(batches).collect();
    assert_eq!(ledger(&collector.address).await, as_in_ledger(&all));
    assert!(log_files(data.path()).is_empty());
    let again = push(&collector.address, batches(1)).await;
    assert_eq!(outcomes(&again), [Outcome::Duplicate; 3]);
    collector.kill();

    // A stop between the rows and their lines: the entry of the ledger is taken away.
    let entries = data.path().join("batches/_delta_log");
    let mut lines_written: Vec<_> = std::fs::read_dir(&entries)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect();
    lines_written.sort();
    std::fs::remove_file(lines_written.last().unwrap()).unwrap();
    let collector = Collector::start(data.path(), &flags);
    assert_eq!(ledger(&collector.address).await, as_in_ledger(&all));
    let again = push(&collector.address, batches(2)).await;
    assert_eq!(outcomes(&again), [Outcome::Duplicate; 3]);
    assert_eq!(count(&collector.address, Table::AllocEvents).await, 48);
    // The other way of keeping goes on with the same lake.
    collector.kill();
    let collector = Collector::start(data.path(), FAST);
    let next = made(Table::AllocEvents, "agent-a", 4, 8).0;
    let acks = push(&collector.address, vec![batches(0)[2].clone(), next]).await;
    assert_eq!(outcomes(&acks), [Outcome::Duplicate, Outcome::Stored]);
    wait_for_rows(&collector.address, Table::AllocEvents, 56).await;
}
