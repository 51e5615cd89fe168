//! What is taken, what is not, and that what is taken is all there, once.

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

/// Over its limit the log takes no more, and says so in a way that loses nothing: a small batch
/// behind the one put off must wait, or that one would be taken for a resend later.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_log_puts_off_in_order() {
    let data = tempfile::tempdir().unwrap();
    let small = |seq| made(Table::Stacks, "agent-a", seq, 5).0;
    let large = made(Table::Stacks, "agent-a", 2, 5000).0;
    let limit = 10 * small(1).parquet.len();
    assert!(large.parquet.len() > limit);
    let limit = limit.to_string();
    let flags = [NEVER, &["--wal-limit-bytes", &limit]].concat();
    let collector = Collector::start(data.path(), &flags);
    let acks = push(
        &collector.address,
        vec![small(1), large.clone(), small(3), large.clone(), small(3)],
    )
    .await;
    let expected = [
        Outcome::Stored,
        Outcome::Retry,
        Outcome::Retry,
        Outcome::Retry,
        Outcome::Retry,
    ];
    assert_eq!(outcomes(&acks), expected, "{acks:?}");
    assert!(
        acks[1].message.contains("wal_limit_bytes"),
        "{}",
        acks[1].message
    );
    assert!(collector.stop().success());

    // The stop has committed the log: now there is room, and on one stream the line moves on.
    let collector = Collector::start(
        data.path(),
        &[FAST, &["--wal-limit-bytes", &limit]].concat(),
    );
    let acks = push(&collector.address, vec![small(1), large, small(3)]).await;
    assert_eq!(
        outcomes(&acks)[..2],
        [Outcome::Duplicate, Outcome::Stored],
        "{acks:?}"
    );
    if acks[2].outcome() == Outcome::Retry {
        wait_for_rows(&collector.address, Table::Stacks, 5005).await;
        assert_eq!(
            outcomes(&push(&collector.address, vec![small(3)]).await),
            [Outcome::Stored]
        );
    }
    wait_for_rows(&collector.address, Table::Stacks, 5010).await;
}

/// A file system that refuses is a reason to come back, not to give up.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_cannot_be_written_puts_off() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let in_the_way = data.path().join("_wal/agent-a");
    std::fs::write(&in_the_way, "a file where the agent's folder should be").unwrap();
    let (batch, _) = made(Table::Stacks, "agent-a", 1, 5);
    let acks = push(&collector.address, vec![batch.clone()]).await;
    assert_eq!(outcomes(&acks), [Outcome::Retry]);
    assert!(
        acks[0].message.contains("_wal/agent-a"),
        "{}",
        acks[0].message
    );
    std::fs::remove_file(&in_the_way).unwrap();
    assert_eq!(
        outcomes(&push(&collector.address, vec![batch]).await),
        [Outcome::Stored]
    );
    wait_for_rows(&collector.address, Table::Stacks, 5).await;
}
