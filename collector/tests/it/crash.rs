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
    for agent in ["agent-a", "agent-b"] {
        for seq in 1..=BATCHES {
            sent.entry(table_of(seq))
                .or_default()
                .push(made(table_of(seq), agent, seq, 20).1);
        }
    }
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

/// Killed between the table's commit and the removal from the log: the file that is left must
/// not be committed again. The moment is made by putting a copy of the log file back.
#[tokio::test(flavor = "multi_thread")]
async fn a_leftover_of_the_log_is_not_committed_again() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), NEVER);
    let (batch, _) = made(Table::AllocEvents, "agent-a", 3, 30);
    assert_eq!(
        outcomes(&push(&collector.address, vec![batch]).await),
        [Outcome::Stored]
    );
    let files = log_files(data.path());
    assert_eq!(files.len(), 1);
    let copy = std::fs::read(&files[0]).unwrap();
    assert!(collector.stop().success());
    assert!(!files[0].exists());
    std::fs::write(&files[0], copy).unwrap();
    std::fs::write(data.path().join("_wal/agent-a/.tmp-4"), "half a batch").unwrap();
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
        outcomes(&push(&collector.address, vec![next]).await),
        [Outcome::Stored]
    );
    wait_for_rows(&collector.address, Table::AllocEvents, 35).await;
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
    let rotten = &log_files(data.path())[1];
    let mut bytes = std::fs::read(rotten).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(rotten, bytes).unwrap();

    let collector = Collector::start_logging(data.path(), FAST, Stdio::piped());
    wait_for_rows(&collector.address, Table::AllocEvents, 20).await;
    let kept = [sent[0].1.clone(), sent[2].1.clone()];
    assert_eq!(
        stored(&collector.address, Table::AllocEvents).await,
        lines(&kept)
    );
    let log = collector.stop_and_read_log();
    let name = rotten.file_name().unwrap().to_str().unwrap();
    assert!(
        log.lines().any(|line| line.contains("ERROR")
            && line.contains("lost 10 rows")
            && line.contains(name)),
        "{log}"
    );
    assert!(
        data.path()
            .join(format!("_wal/damaged/agent-a-{name}"))
            .exists()
    );
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
