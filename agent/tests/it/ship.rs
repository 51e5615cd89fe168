//! The sender against collectors that are slow, absent, full, wrong, or gone in the middle. The
//! server is a stub of the wire's service that keeps the contract in `ingest.proto` by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};
use vramscope_agent::ship::{self, Shipment};
use vramscope_agent::spool::folder;
use vramscope_wire::proto::ingest_server::{Ingest, IngestServer};
use vramscope_wire::proto::{Ack, Batch, Outcome};
use vramscope_wire::{Table, parquet_file};

/// What the stub does with a batch, in turn; the last one for ever.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mood {
    Store,
    /// Stores, and the answer is lost with the connection.
    StoreAndBreak,
    /// The connection breaks first.
    Break,
    Retry,
    Reject,
    /// Answers for another batch.
    Nonsense,
    /// Takes its time.
    Slow,
}

#[derive(Debug, Default)]
pub struct Books {
    moods: Vec<Mood>,
    stored: BTreeMap<u64, Vec<u8>>,
    order: Vec<u64>,
    duplicates: u64,
    rejected: BTreeSet<u64>,
    streams: u64,
}

#[derive(Clone, Default)]
pub struct Stub(Arc<Mutex<Books>>);

impl Stub {
    /// Numbers of batches that it has.
    pub fn stored(&self) -> Vec<u64> {
        self.0.lock().unwrap().stored.keys().copied().collect()
    }

    pub fn with(moods: &[Mood]) -> Self {
        let stub = Self::default();
        stub.0.lock().unwrap().moods = moods.to_vec();
        stub
    }

    /// `None`: the stream breaks.
    fn answer(&self, batch: &Batch) -> (Option<Ack>, Duration) {
        let mut books = self.0.lock().unwrap();
        let mood = if books.moods.len() > 1 {
            books.moods.remove(0)
        } else {
            books.moods.first().copied().unwrap_or(Mood::Store)
        };
        let ack = |outcome: Outcome, batch_seq| {
            Some(Ack {
                batch_seq,
                outcome: outcome.into(),
                message: "the disk is full".into(),
            })
        };
        let seq = batch.batch_seq;
        let mut wait = Duration::ZERO;
        let answer = match mood {
            Mood::Break => None,
            Mood::Retry => ack(Outcome::Retry, seq),
            Mood::Reject => {
                books.rejected.insert(seq);
                ack(Outcome::Rejected, seq)
            }
            Mood::Nonsense => ack(Outcome::Stored, seq + 1),
            Mood::Store | Mood::StoreAndBreak | Mood::Slow => {
                let new = books.stored.keys().last().is_none_or(|last| seq > *last);
                if new {
                    books.stored.insert(seq, batch.parquet.clone());
                    books.order.push(seq);
                } else {
                    books.duplicates += 1;
                }
                if mood == Mood::Slow {
                    wait = Duration::from_millis(20);
                }
                if mood == Mood::StoreAndBreak {
                    None
                } else if new {
                    ack(Outcome::Stored, seq)
                } else {
                    ack(Outcome::Duplicate, seq)
                }
            }
        };
        (answer, wait)
    }
}

#[tonic::async_trait]
impl Ingest for Stub {
    type PushStream = Pin<Box<dyn Stream<Item = Result<Ack, Status>> + Send>>;

    async fn push(
        &self,
        request: Request<Streaming<Batch>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let mut batches = request.into_inner();
        let (acks, answers) = mpsc::channel(1);
        let stub = self.clone();
        stub.0.lock().unwrap().streams += 1;
        tokio::spawn(async move {
            // As the real one: after RETRY nothing later is taken on this stream.
            let mut put_off = false;
            while let Ok(Some(batch)) = batches.message().await {
                assert_eq!(batch.crc32, crc32fast::hash(&batch.parquet));
                let (answer, wait) = if put_off {
                    let ack = Ack {
                        batch_seq: batch.batch_seq,
                        outcome: Outcome::Retry.into(),
                        message: "put off".into(),
                    };
                    (Some(ack), Duration::ZERO)
                } else {
                    stub.answer(&batch)
                };
                tokio::time::sleep(wait).await;
                let Some(ack) = answer else {
                    let _ = acks.send(Err(Status::unavailable("gone"))).await;
                    return;
                };
                put_off |= ack.outcome() == Outcome::Retry || ack.batch_seq != batch.batch_seq;
                if acks.send(Ok(ack)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

fn serve(listener: TcpListener, stub: &Stub) -> tokio::task::JoinHandle<()> {
    let service = IngestServer::new(stub.clone()).max_decoding_message_size(64 << 20);
    tokio::spawn(async move {
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener))
            .await
            .unwrap();
    })
}

/// Files that a reader takes, each with its own number.
pub fn fill(spool: &Path, seqs: std::ops::RangeInclusive<u64>) -> BTreeMap<u64, Vec<u8>> {
    let mut files = BTreeMap::new();
    for seq in seqs {
        let schema = Table::Stacks.schema();
        let empty = arrow::array::RecordBatch::new_empty(schema);
        let bytes = parquet_file::encode(Table::Stacks, &[empty]).unwrap();
        std::fs::write(folder::spool_path(spool, seq, Table::Stacks), &bytes).unwrap();
        files.insert(seq, bytes);
    }
    files
}

pub fn left(spool: &Path) -> Vec<u64> {
    let files = folder::list(spool).unwrap();
    files.iter().map(|file| file.batch_seq).collect()
}

/// Sends 1 to 20 to a stub in such moods, to the end, whatever is in between.
fn sends_all(moods: &[Mood]) -> (tempfile::TempDir, Stub) {
    let spool = tempfile::tempdir().unwrap();
    let files = fill(spool.path(), 1..=20);
    let stub = Stub::with(moods);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (listener, url) = listen().await;
        let server = serve(listener, &stub);
        let (committed, receiver) = watch::channel(21);
        // To this stub, as to a collector of an earlier version, requests for spans are unknown.
        let shipment = Shipment::new(spool.path(), &url, "agent", "host").with_link(Arc::default());
        let sender = tokio::spawn(ship::run(shipment, receiver));
        let done = async {
            while !left(spool.path()).is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), done)
            .await
            .expect("files stay in the spool");
        // The last commit, and the sender ends by itself.
        drop(committed);
        tokio::time::timeout(Duration::from_secs(60), sender)
            .await
            .expect("the sender does not end")
            .unwrap();
        server.abort();
    });
    let books = stub.0.lock().unwrap();
    let expected: BTreeMap<_, _> = files
        .into_iter()
        .filter(|(seq, _)| !books.rejected.contains(seq))
        .collect();
    assert_eq!(books.stored, expected, "every file once, as it was");
    assert!(books.order.is_sorted(), "in order: {:?}", books.order);
    drop(books);
    (spool, stub)
}

#[test]
fn a_slow_collector_gets_all() {
    let (_spool, stub) = sends_all(&[Mood::Slow]);
    assert_eq!(stub.0.lock().unwrap().streams, 1, "one connection does");
}

#[test]
fn a_stream_that_breaks_costs_a_resend_and_no_file() {
    use Mood::{Break, Store};
    let (_spool, stub) = sends_all(&[Store, Store, Break, Store, Break, Break, Store]);
    assert!(stub.0.lock().unwrap().streams >= 4);
}

/// Stored, but the sender never heard of it: it sends again and is told so.
#[test]
fn a_lost_acknowledgement_stores_nothing_twice() {
    use Mood::{Store, StoreAndBreak};
    let (_spool, stub) = sends_all(&[Store, StoreAndBreak, Store, StoreAndBreak, Store]);
    assert!(stub.0.lock().unwrap().duplicates >= 2);
}

#[test]
fn a_collector_without_room_is_asked_again() {
    use Mood::{Retry, Store};
    let (_spool, stub) = sends_all(&[Store, Retry, Retry, Store]);
    assert!(stub.0.lock().unwrap().streams >= 3);
}

/// A schema the collector does not know: the file is kept, the others go on.
#[test]
fn a_refused_file_is_kept_apart() {
    use Mood::{Reject, Store};
    let (spool, stub) = sends_all(&[Store, Reject, Store, Reject, Store]);
    let kept = left(&spool.path().join("rejected"));
    let refused: Vec<_> = stub.0.lock().unwrap().rejected.iter().copied().collect();
    assert_eq!((kept.len(), kept), (2, refused));
}

#[test]
fn an_answer_for_another_batch_is_not_believed() {
    use Mood::{Nonsense, Store};
    sends_all(&[Store, Nonsense, Store]);
}

/// Nobody listens, then somebody does; and the agent stops while nobody does.
#[test]
fn an_absent_collector_is_waited_for_and_holds_up_no_stop() {
    let spool = tempfile::tempdir().unwrap();
    fill(spool.path(), 1..=3);
    let stub = Stub::default();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (listener, url) = listen().await;
        let address = listener.local_addr().unwrap();
        drop(listener);
        let (committed, receiver) = watch::channel(4);
        let shipment = Shipment::new(spool.path(), &url, "agent", "host");
        let sender = tokio::spawn(ship::run(shipment.clone(), receiver));
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert_eq!(left(spool.path()), [1, 2, 3]);
        // The stop comes in the middle of a wait: one more attempt, and the end.
        drop(committed);
        tokio::time::timeout(Duration::from_secs(60), sender)
            .await
            .expect("the sender does not end")
            .unwrap();
        assert_eq!(left(spool.path()), [1, 2, 3]);

        // A port may be taken by another program meanwhile; then there is nothing to test.
        let Ok(listener) = TcpListener::bind(address).await else {
            return;
        };
        let server = serve(listener, &stub);
        let (committed, receiver) = watch::channel(4);
        drop(committed);
        ship::run(shipment, receiver).await;
        assert_eq!(left(spool.path()), [0; 0]);
        server.abort();
    });
}

/// Files that are not committed are nobody's yet.
#[test]
fn what_is_not_committed_stays() {
    let spool = tempfile::tempdir().unwrap();
    fill(spool.path(), 1..=3);
    let stub = Stub::default();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (listener, url) = listen().await;
        let server = serve(listener, &stub);
        let (committed, receiver) = watch::channel(2);
        drop(committed);
        ship::run(Shipment::new(spool.path(), &url, "agent", "host"), receiver).await;
        server.abort();
    });
    assert_eq!(left(spool.path()), [2, 3]);
}
