//! Kills, leftovers and rot: what was acknowledged is there afterwards, once.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arrow::array::RecordBatch;
use tonic::transport::Channel;
use vramscope_wire::Table;
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Batch, Outcome};

use crate::support::*;

/// SIGKILL at random moments while two agents stream and resend what was not acknowledged:
/// in the end the tables hold exactly what was sent.
#[tokio::test(flavor = "multi_thread")]
async fn kills_lose_nothing_and_double_nothing() {
    const ROUNDS: usize = 8;
    const BATCHES: u64 = 400;
    let mut random = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64
        | 1;
    println!("seed {random}");
    let data = tempfile::tempdir().unwrap();
    let flags = &["--commit-interval", "30ms"];
    let mut collector = Collector::start(data.path(), flags);
    let address = Arc::new(Mutex::new(collector.address.clone()));
    let agents: Vec<_> = ["agent-a", "agent-b"]
        .map(|agent| tokio::spawn(stream_until_acknowledged(agent, BATCHES, address.clone())))
        .into();
    for _ in 0..ROUNDS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        tokio::time::sleep(Duration::from_millis(20 + random % 600)).await;
        collector.kill();
        collector = Collector::start(data.path(), flags);
        *address.lock().unwrap() = collector.address.clone();
    }
    for agent in agents {
        agent.await.unwrap();
    }
    // The stop commits what is left in the log; the next start shows it.
    assert!(collector.stop().success());
    assert!(log_files(data.path()).is_empty());
    let collector = Collector::start(data.path(), FAST);
    let mut sent: BTreeMap<Table, Vec<RecordBatch>> = BTreeMap::new();
    let mut acknowledged = Vec::new();
    for agent in ["agent-a", "agent-b"] {
        for seq in 1..=BATCHES {
            let (batch, rows) = made(table_of(seq), agent, seq, 20);
            sent.entry(table_of(seq)).or_default().push(rows);
            acknowledged.push(batch);
        }
    }
    let (found, expected) = (
        ledger(&collector.address).await,
        as_in_ledger(&acknowledged),
    );
    assert_eq!(found.len(), expected.len());
    assert!(
        found == expected,
        "the ledger has as many lines, but others"
    );
    for (table, rows) in sent {
        let (found, expected) = (stored(&collector.address, table).await, lines(&rows));
        assert_eq!(found.len(), expected.len(), "{}", table.name());
        assert!(
            found == expected,
            "{} has as many rows as were sent, but others",
            table.name()
        );
    }
}

fn table_of(seq: u64) -> Table {
    Table::FROM_AGENTS[seq as usize % Table::FROM_AGENTS.len()]
}

/// What an agent does: sends its spool in order, keeps what was not acknowledged, comes back.
async fn stream_until_acknowledged(agent: &'static str, last: u64, address: Arc<Mutex<String>>) {
    let mut done = 0;
    while done < last {
        let target = address.lock().unwrap().clone();
        if let Ok(client) = IngestClient::connect(target).await {
            done = stream_from(client, agent, done, last).await;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn stream_from(
    mut client: IngestClient<Channel>,
    agent: &'static str,
    done: u64,
    last: u64,
) -> u64 {
    let batches = futures::stream::iter((done + 1)..=last)
        .then_paced(move |seq| made(table_of(seq), agent, seq, 20).0);
    let Ok(acks) = client.push(batches).await else {
        return done;
    };
    let mut acks = acks.into_inner();
    let mut done = done;
    while let Ok(Some(ack)) = acks.message().await {
        match ack.outcome() {
            Outcome::Stored | Outcome::Duplicate => {
                assert_eq!(ack.batch_seq, done + 1);
                done += 1;
            }
            other => panic!("{other:?}: {}", ack.message),
        }
    }
    done
}

trait Paced: futures::Stream<Item = u64> + Sized + Send + 'static {
    /// A few milliseconds between batches, so that the kills meet a running stream.
    fn then_paced(
        self,
        make: impl Fn(u64) -> Batch + Send + 'static,
    ) -> impl futures::Stream<Item = Batch> + Send + 'static {
        futures::StreamExt::then(self, move |seq| {
            let batch = make(seq);
            async move {
                tokio::time::sleep(Duration::from_millis(8)).await;
                batch
            }
        })
    }
}

impl<S: futures::Stream<Item = u64> + Sized + Send + 'static> Paced for S {}

/// Killed between the commits and the removal from the log: the batch that is left must not be
/// committed again, nor its line in the ledger written twice. The moment is made by putting a copy
/// of the log back.
#[tokio::test(flavor = "multi_thread")]
async fn a_leftover_of_the_log_is_not_committed_again() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), NEVER);
    let (batch, _) = made(Table::AllocEvents, "agent-a", 3, 30);
    assert_eq!(
        outcomes(&push(&collector.address, vec![batch.clone()]).await),
        [Outcome::Stored]
    );
    let files = log_files(data.path());
    assert_eq!(files.len(), 1);
    let copy = std::fs::read(&files[0]).unwrap();
    assert!(collector.stop().success());
    assert!(!files[0].exists());
    std::fs::write(&files[0], copy).unwrap();
    std::fs::write(
        data.path().join("alloc_events/part-x.parquet#17"),
        "half a file",
    )
    .unwrap();

    let collector = Collector::start(data.path(), FAST);
    assert!(
        log_files(data.path()).is_empty(),
        "{:?}",
        log_files(data.path())
    );
    assert!(!data.path().join("alloc_events/part-x.parquet#17").exists());
    let (next, _) = made(Table::AllocEvents, "agent-a", 4, 5);
    assert_eq!(
        outcomes(&push(&collector.address, vec![next.clone()]).await),
        [Outcome::Stored]
    );
    wait_for_rows(&collector.address, Table::AllocEvents, 35).await;
    wait_for_ledger(&collector.address, 2).await;
    assert_eq!(
        ledger(&collector.address).await,
        as_in_ledger([&batch, &next])
    );
}

/// Killed between the commit of the rows and that of their line in the ledger: the next start
/// writes the line and not the rows. The moment is made by taking the ledger's last entry away.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_missing_in_the_ledger_is_written_at_start() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), NEVER);
    let sent = [
        made(Table::AllocEvents, "agent-a", 3, 30).0,
        made(Table::Stacks, "agent-b", 1, 7).0,
    ];
    let acks = push(&collector.address, sent.to_vec()).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored; 2]);
    let log = &log_files(data.path())[0];
    let copy = std::fs::read(log).unwrap();
    assert!(collector.stop().success());
    std::fs::write(log, copy).unwrap();
    let entries = data.path().join("batches/_delta_log");
    std::fs::remove_file(entries.join("00000000000000000001.json")).unwrap();

    let collector = Collector::start(data.path(), FAST);
    wait_for_ledger(&collector.address, 2).await;
    assert_eq!(ledger(&collector.address).await, as_in_ledger(&sent));
    assert_eq!(count(&collector.address, Table::AllocEvents).await, 30);
    assert_eq!(count(&collector.address, Table::Stacks).await, 7);
    let again = push(&collector.address, sent.to_vec()).await;
    assert_eq!(outcomes(&again), [Outcome::Duplicate; 2]);
}

/// Bit rot in the log: the damaged batch is set aside and named, the others are committed.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_rots_is_set_aside_and_named() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), NEVER);
    let sent: Vec<_> = (1..=3)
        .map(|seq| made(Table::AllocEvents, "agent-a", seq, 10))
        .collect();
    let acks = push(
        &collector.address,
        sent.iter().map(|(batch, _)| batch.clone()).collect(),
    )
    .await;
    assert_eq!(outcomes(&acks), [Outcome::Stored; 3]);
    collector.kill();
    let log = &log_files(data.path())[0];
    let mut bytes = std::fs::read(log).unwrap();
    let rotten = &sent[1].0;
    let start = bytes
        .windows(rotten.parquet.len())
        .position(|bytes| bytes == rotten.parquet)
        .unwrap();
    bytes[start + rotten.parquet.len() / 2] ^= 1;
    std::fs::write(log, bytes).unwrap();

    let collector = Collector::start_logging(data.path(), FAST, Stdio::piped());
    wait_for_rows(&collector.address, Table::AllocEvents, 20).await;
    let kept = [sent[0].1.clone(), sent[2].1.clone()];
    assert_eq!(
        stored(&collector.address, Table::AllocEvents).await,
        lines(&kept)
    );
    // The ledger says nothing of it: its rows are not there.
    wait_for_ledger(&collector.address, 2).await;
    let told = collector.stop_and_read_log();
    let name = format!(
        "agent-a-{:020}-alloc_events-{:08x}.parquet",
        2, rotten.crc32
    );
    assert!(
        told.lines().any(|line| line.contains("ERROR")
            && line.contains("lost 10 rows")
            && line.contains(&name)),
        "{told}"
    );
    let aside = std::fs::read(data.path().join("_wal/damaged").join(name)).unwrap();
    assert_eq!(aside.len(), rotten.parquet.len());
    let collector = Collector::start(data.path(), FAST);
    assert_eq!(count(&collector.address, Table::AllocEvents).await, 20);
}

/// Torn while it was written: half a record at the end of the log was never acknowledged. It goes
/// without a word of loss, and what was acknowledged stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_torn_tail_of_the_log_is_cut_off() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), NEVER);
    let (first, _) = made(Table::Stacks, "agent-a", 1, 5);
    let (second, _) = made(Table::Stacks, "agent-b", 1, 6);
    for batch in [&first, &second] {
        let acks = push(&collector.address, vec![batch.clone()]).await;
        assert_eq!(outcomes(&acks), [Outcome::Stored]);
    }
    collector.kill();
    let log = &log_files(data.path())[0];
    let bytes = std::fs::read(log).unwrap();
    // A record begins with "VSb1": the last one's first half, once more.
    let last = bytes.windows(4).rposition(|four| four == b"VSb1").unwrap();
    let half = &bytes[last..last + (bytes.len() - last) / 2];
    std::fs::write(log, [&bytes, half].concat()).unwrap();

    let collector = Collector::start_logging(data.path(), FAST, Stdio::piped());
    let (third, _) = made(Table::Stacks, "agent-b", 2, 7);
    let acks = push(&collector.address, vec![second.clone(), third.clone()]).await;
    assert_eq!(outcomes(&acks), [Outcome::Duplicate, Outcome::Stored]);
    wait_for_rows(&collector.address, Table::Stacks, 18).await;
    wait_for_ledger(&collector.address, 3).await;
    assert_eq!(
        ledger(&collector.address).await,
        as_in_ledger([&first, &second, &third])
    );
    let told = collector.stop_and_read_log();
    assert!(
        told.contains("cut off") && !told.contains("ERROR"),
        "{told}"
    );
}

/// The log that an earlier version left: a file per batch. One was committed before, one is
/// damaged, one was never acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_of_an_earlier_version_is_taken_in() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let sent: Vec<_> = (1..=4)
        .map(|seq| made(Table::AllocEvents, "agent-a", seq, 10))
        .collect();
    let acks = push(&collector.address, vec![sent[0].0.clone()]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored]);
    assert!(collector.stop().success());
    let folder = data.path().join("_wal/agent-a");
    std::fs::create_dir(&folder).unwrap();
    let name = |batch: &Batch| {
        format!(
            "{:020}-{}-{:08x}.parquet",
            batch.batch_seq, batch.table, batch.crc32
        )
    };
    for (batch, _) in &sent {
        let mut bytes = batch.parquet.clone();
        if batch.batch_seq == 3 {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        std::fs::write(folder.join(name(batch)), bytes).unwrap();
    }
    std::fs::write(folder.join(".tmp-5"), "half a batch").unwrap();

    let collector = Collector::start_logging(data.path(), FAST, Stdio::piped());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    let all = sent.iter().map(|(batch, _)| batch.clone()).collect();
    let acks = push(&collector.address, all).await;
    assert_eq!(outcomes(&acks), [Outcome::Duplicate; 4]);
    wait_for_rows(&collector.address, Table::AllocEvents, 30).await;
    let kept = [0, 1, 3].map(|index| sent[index].1.clone());
    assert_eq!(
        stored(&collector.address, Table::AllocEvents).await,
        lines(&kept)
    );
    wait_for_ledger(&collector.address, 3).await;
    let told = collector.stop_and_read_log();
    assert!(
        told.lines().any(|line| line.contains("ERROR")
            && line.contains("lost 10 rows")
            && line.contains(&name(&sent[2].0))),
        "{told}"
    );
}

/// An agent goes to another collector on the same lake while the first one is down with batches in
/// its log. When it comes back, the agent's mark in the table is beyond them: what was acknowledged
/// is committed all the same, and what both have, once.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_comes_back_late_loses_and_doubles_nothing() {
    let data = tempfile::tempdir().unwrap();
    let log = data.path().join("_wal");
    let saved = data.path().join("saved");
    let sent: Vec<_> = (5..=8)
        .map(|seq| made(Table::AllocEvents, "agent-a", seq, 10))
        .collect();
    let batch = |seq: usize| sent[seq - 5].0.clone();
    let first = Collector::start(data.path(), NEVER);
    let acks = push(&first.address, vec![batch(5), batch(7)]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored; 2]);
    first.kill();
    std::fs::rename(&log, &saved).unwrap();
    // The acknowledgement of 7 got lost.
    let second = Collector::start(data.path(), FAST);
    let acks = push(&second.address, vec![batch(6), batch(7)]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored; 2]);
    assert!(second.stop().success());
    std::fs::remove_dir_all(&log).unwrap();
    std::fs::rename(&saved, &log).unwrap();

    let first = Collector::start(data.path(), FAST);
    let acks = push(&first.address, vec![batch(7), batch(8)]).await;
    assert_eq!(outcomes(&acks), [Outcome::Duplicate, Outcome::Stored]);
    wait_for_rows(&first.address, Table::AllocEvents, 40).await;
    wait_for_ledger(&first.address, 4).await;
    let rows: Vec<RecordBatch> = sent.iter().map(|(_, rows)| rows.clone()).collect();
    assert_eq!(
        stored(&first.address, Table::AllocEvents).await,
        lines(&rows)
    );
    let batches = sent.iter().map(|(batch, _)| batch);
    assert_eq!(ledger(&first.address).await, as_in_ledger(batches));
    // And a restart changes nothing.
    assert!(first.stop().success());
    let first = Collector::start(data.path(), FAST);
    assert_eq!(count(&first.address, Table::AllocEvents).await, 40);
    assert_eq!(count(&first.address, Table::Batches).await, 4);
}

/// More than a hundred commits: the table's log is checkpointed, and opens as before.
#[tokio::test(flavor = "multi_thread")]
async fn many_commits_are_checkpointed() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), &["--commit-interval", "1ms"]);
    let mut seq = 0;
    while !data
        .path()
        .join("stacks/_delta_log/_last_checkpoint")
        .exists()
    {
        seq += 1;
        assert!(seq < 1000, "no checkpoint after 1000 batches");
        let (batch, _) = made(Table::Stacks, "agent-a", seq, 1);
        assert_eq!(
            outcomes(&push(&collector.address, vec![batch]).await),
            [Outcome::Stored]
        );
        wait_for_rows(&collector.address, Table::Stacks, seq as i64).await;
    }
    assert!(collector.stop().success());
    let collector = Collector::start(data.path(), FAST);
    assert_eq!(count(&collector.address, Table::Stacks).await, seq as i64);
    // The agents' marks are in the checkpoint too.
    let (last, _) = made(Table::Stacks, "agent-a", seq, 1);
    assert_eq!(
        outcomes(&push(&collector.address, vec![last]).await),
        [Outcome::Duplicate]
    );
}
