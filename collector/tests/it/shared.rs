//! Two collector processes on one lake: agents roam between them, both are killed, and in the end
//! the lake holds what was sent, by the senders' record.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arrow::array::RecordBatch;
use tonic::transport::Channel;
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;
use vramscope_wire::proto::ingest_client::IngestClient;

use crate::s3::{BUCKET, S3};
use crate::support::*;

/// A number generator, so that a failed run can be told by its seed.
struct Random(u64);

impl Random {
    fn new() -> Random {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let seed = now.as_nanos() as u64 | 1;
        println!("seed {seed}");
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

type Addresses = Arc<Mutex<[String; 2]>>;

struct Trial<'a> {
    lake: &'a str,
    environment: Vec<(&'static str, String)>,
    batches: u64,
    kills: u64,
    /// Longest time between two kills, in milliseconds.
    pause: u64,
    flags: &'a [&'a str],
}

const ROWS: usize = 10;
const AGENTS: [&str; 3] = ["agent-a", "agent-b", "agent-c"];

impl Trial<'_> {
    fn start(&self, data: &Path) -> Collector {
        let flags = [&["--lake", self.lake], self.flags].concat();
        Collector::start_with(data, &flags, &self.environment)
    }

    async fn run(&self) {
        let mut random = Random::new();
        let data = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mut collectors: Vec<_> = data
            .iter()
            .map(|data| Some(self.start(data.path())))
            .collect();
        let address = |collectors: &[Option<Collector>], at: usize| {
            collectors[at].as_ref().unwrap().address.clone()
        };
        let addresses: Addresses = Arc::new(Mutex::new([
            address(&collectors, 0),
            address(&collectors, 1),
        ]));
        let agents: Vec<_> = AGENTS
            .map(|agent| {
                let random = Random(random.next() | 1);
                tokio::spawn(roam(agent, self.batches, Arc::clone(&addresses), random))
            })
            .into();
        for _ in 0..self.kills {
            tokio::time::sleep(Duration::from_millis(20 + random.below(self.pause))).await;
            let which = random.below(2) as usize;
            collectors[which].take().unwrap().kill();
            // For a while there is only the other.
            tokio::time::sleep(Duration::from_millis(random.below(300))).await;
            collectors[which] = Some(self.start(data[which].path()));
            addresses.lock().unwrap()[which] = address(&collectors, which);
        }
        for agent in agents {
            agent.await.unwrap();
        }
        // The stop commits what is left in the logs.
        for collector in collectors.drain(..) {
            assert!(collector.unwrap().stop().success());
        }
        let reader = self.start(data[0].path());
        self.compare(&reader.address).await;
    }

    async fn compare(&self, address: &str) {
        let mut sent: BTreeMap<Table, Vec<RecordBatch>> = BTreeMap::new();
        for agent in AGENTS {
            for seq in 1..=self.batches {
                let table = table_of(seq);
                let rows = made(table, agent, seq, ROWS).1;
                sent.entry(table).or_default().push(rows);
            }
        }
        for (table, rows) in sent {
            let (found, expected) = (stored(address, table).await, lines(&rows));
            assert_eq!(found.len(), expected.len(), "{}", table.name());
            assert!(found == expected, "{} has other rows", table.name());
        }
    }
}

/// A few tables, so that batches of one commit and those of the other meet. Not stacks: the upkeep
/// keeps each of them once, whoever sent it.
fn table_of(seq: u64) -> Table {
    [
        Table::AllocEvents,
        Table::Processes,
        Table::AllocEvents,
        Table::Devices,
    ][seq as usize % 4]
}

/// What an agent does with two collectors: sends in order, keeps what was not acknowledged, and
/// now and then goes to the other. Some visits end before their acknowledgements were read.
async fn roam(agent: &'static str, last: u64, addresses: Addresses, mut random: Random) {
    let (mut done, mut at) = (0, random.below(2) as usize);
    while done < last {
        let target = addresses.lock().unwrap()[at].clone();
        let visit = 1 + random.below(25);
        let unread = if random.below(2) == 0 {
            random.below(4)
        } else {
            0
        };
        if let Ok(client) = IngestClient::connect(target).await {
            let end = (done + visit).min(last);
            done = visit_until(client, agent, done, end, unread).await;
        }
        at = 1 - at;
        tokio::time::sleep(Duration::from_millis(random.below(20))).await;
    }
}

/// Sends up to `end`; the last number that was acknowledged and read.
async fn visit_until(
    mut client: IngestClient<Channel>,
    agent: &'static str,
    done: u64,
    end: u64,
    unread: u64,
) -> u64 {
    // A channel of its own: a stream of closures cannot be shown to go from thread to thread.
    let (send, batches) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        for seq in (done + 1)..=end {
            tokio::time::sleep(Duration::from_millis(3)).await;
            if send
                .send(made(table_of(seq), agent, seq, ROWS).0)
                .await
                .is_err()
            {
                return;
            }
        }
    });
    let batches = tokio_stream::wrappers::ReceiverStream::new(batches);
    let Ok(acks) = client.push(batches).await else {
        return done;
    };
    let (mut acks, mut done) = (acks.into_inner(), done);
    while let Ok(Some(ack)) = acks.message().await {
        match ack.outcome() {
            // Durable, but the agent does not hear of it.
            Outcome::Stored | Outcome::Duplicate if ack.batch_seq + unread > end => {}
            Outcome::Stored | Outcome::Duplicate => {
                assert_eq!(ack.batch_seq, done + 1);
                done += 1;
            }
            Outcome::Retry => return done,
            other => panic!("{other:?}: {}", ack.message),
        }
    }
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn two_collectors_share_a_folder_exactly_once() {
    let lake = tempfile::tempdir().unwrap();
    let trial = Trial {
        lake: lake.path().to_str().unwrap(),
        environment: Vec::new(),
        batches: 300,
        kills: 8,
        pause: 700,
        flags: &["--commit-interval", "40ms"],
    };
    trial.run().await;
    // Both are known there.
    let known = std::fs::read_dir(lake.path().join("_collectors")).unwrap();
    assert_eq!(known.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_collectors_share_a_bucket_exactly_once() {
    let Some(s3) = S3::start() else { return };
    let lake = format!("s3://{BUCKET}/fleet/lake");
    let trial = Trial {
        lake: &lake,
        environment: s3.environment(),
        batches: 120,
        kills: 4,
        pause: 2500,
        flags: &["--commit-interval", "200ms"],
    };
    trial.run().await;
}

/// The same batches in the logs of both when neither has committed: one of them commits each.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_in_two_logs_is_committed_once() {
    let lake = tempfile::tempdir().unwrap();
    let data = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let flags = [&["--lake", lake.path().to_str().unwrap()], NEVER].concat();
    let start = |at: usize| Collector::start(data[at].path(), &flags);
    let batches = |seqs: std::ops::RangeInclusive<u64>| {
        let batches = seqs.map(|seq| made(Table::AllocEvents, "roamer", seq, ROWS).0);
        batches.collect::<Vec<_>>()
    };
    let (x, y) = (start(0), start(1));
    let all_stored = |acks: Vec<vramscope_wire::proto::Ack>| {
        assert!(
            outcomes(&acks)
                .iter()
                .all(|outcome| *outcome == Outcome::Stored)
        );
    };
    // X takes 1 to 5. The agent heard of 1 to 3, goes to Y with 4 to 7, and comes back with 8.
    all_stored(push(&x.address, batches(1..=5)).await);
    all_stored(push(&y.address, batches(4..=7)).await);
    all_stored(push(&x.address, batches(8..=8)).await);
    // Y commits 4 to 7 first: its highest number is above those that only X has.
    assert!(y.stop().success());
    assert!(x.stop().success());
    let x = start(0);
    let expected: Vec<_> = (1..=8)
        .map(|seq| made(Table::AllocEvents, "roamer", seq, ROWS).1)
        .collect();
    assert_eq!(
        stored(&x.address, Table::AllocEvents).await,
        lines(&expected)
    );
    // What the other took is known as well as what was taken here, after a restart too.
    let again = push(&x.address, batches(1..=8)).await;
    assert!(
        outcomes(&again)
            .iter()
            .all(|outcome| *outcome == Outcome::Duplicate)
    );
    let y = start(1);
    let again = push(&y.address, batches(1..=9)).await;
    assert_eq!(outcomes(&again)[..8], [Outcome::Duplicate; 8]);
    assert_eq!(again[8].outcome(), Outcome::Stored);
    assert!(y.stop().success());
    assert_eq!(count(&x.address, Table::AllocEvents).await, 9 * ROWS as i64);
}

/// Keys are in the environment, and nowhere else.
#[tokio::test(flavor = "multi_thread")]
async fn keys_are_not_written_down() {
    let Some(s3) = S3::start() else { return };
    let data = tempfile::tempdir().unwrap();
    let lake = format!("s3://{BUCKET}/quiet");
    let mut environment = s3.environment();
    environment.push((
        "VRAMSCOPE_COLLECTOR_LOG",
        "debug,hyper=warn,h2=warn".to_string(),
    ));
    let collector = Collector::start_with_log(data.path(), &["--lake", &lake], &environment);
    let batch = made(Table::Stacks, "agent", 1, ROWS).0;
    assert_eq!(
        outcomes(&push(&collector.address, vec![batch]).await),
        [Outcome::Stored]
    );
    let log = collector.stop_and_read_log();
    assert!(log.contains("stopping"), "{log}");
    assert!(!log.contains("hush-hush"), "the secret key is in the log");
    // The choice is kept: `status` and a second start need no flag.
    let status = binary()
        .args(["status", "--json", "--data"])
        .arg(data.path())
        .envs(s3.environment())
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let stacks = report["tables"].as_array().unwrap();
    let stacks = stacks
        .iter()
        .find(|table| table["table"] == "stacks")
        .unwrap();
    assert_eq!(stacks["rows"], ROWS);
    assert_eq!(report["agents"][0]["highest_batch_seq"], 1);
    let again = Collector::start_with(data.path(), &[], &s3.environment());
    assert_eq!(count(&again.address, Table::Stacks).await, ROWS as i64);
}

/// A store that cannot be reached, or a lake that is somebody's own, is said at the start.
#[test]
fn a_lake_that_cannot_be_used_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let refused = |lake: &str, says: &str| {
        let mut command: Command = binary();
        let output = command
            .args(["serve", "--listen", "127.0.0.1:0", "--lake", lake, "--data"])
            .arg(data.path())
            .env("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            .env("AWS_ACCESS_KEY_ID", "AKIATESTTESTTEST")
            .env("AWS_SECRET_ACCESS_KEY", "hush-hush-hush")
            .env_remove("AWS_ALLOW_HTTP")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success());
        assert!(text.contains(says) && !text.contains("hush-hush"), "{text}");
    };
    refused("s3://bucket/lake", "AWS_ALLOW_HTTP");
    refused("gs://bucket/lake", "gs://bucket/lake");
    refused("s3://key:hush-hush@bucket/lake", "AWS_SECRET_ACCESS_KEY");
}
