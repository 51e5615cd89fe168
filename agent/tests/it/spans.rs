//! A collector asks for recorded spans over the sender's connection. The collector is a stub of
//! the wire's services; the recorder's side of the link is played here.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Response, Status, Streaming};
use vramscope_agent::recorder::{Answer, Link, Request, Stretch};
use vramscope_agent::ship::{self, Shipment};
use vramscope_wire::proto::ingest_server::IngestServer;
use vramscope_wire::proto::recorder_server::{Recorder, RecorderServer};
use vramscope_wire::proto::{SpanOutcome, SpanReport, SpanRequest};

use crate::ship::{Mood, Stub, fill, left};

/// Asks for all that has no answer, at the beginning of each call.
#[derive(Clone, Default)]
struct Asker {
    asks: Arc<Mutex<Vec<SpanRequest>>>,
    /// Who called, and what was answered.
    callers: Arc<Mutex<Vec<(String, String)>>>,
    answers: Arc<Mutex<BTreeMap<String, SpanReport>>>,
    /// Numbers of batches that were there when an answer came.
    stored: Arc<Mutex<Vec<Vec<u64>>>>,
    stub: Stub,
}

#[tonic::async_trait]
impl Recorder for Asker {
    type SpansStream = Pin<Box<dyn Stream<Item = Result<SpanRequest, Status>> + Send>>;

    async fn spans(
        &self,
        call: tonic::Request<Streaming<SpanReport>>,
    ) -> Result<Response<Self::SpansStream>, Status> {
        let mut reports = call.into_inner();
        let (requests, stream) = mpsc::channel(16);
        let asker = self.clone();
        tokio::spawn(async move {
            let Ok(Some(hello)) = reports.message().await else {
                return;
            };
            let caller = (hello.agent_id, hello.host);
            asker.callers.lock().unwrap().push(caller);
            for ask in asker.asks.lock().unwrap().clone() {
                if !asker.answers.lock().unwrap().contains_key(&ask.id) {
                    requests.try_send(Ok(ask)).unwrap();
                }
            }
            while let Ok(Some(report)) = reports.message().await {
                let id = report.answer.as_ref().unwrap().id.clone();
                asker.stored.lock().unwrap().push(asker.stub.stored());
                asker.answers.lock().unwrap().insert(id, report);
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

async fn serve(listener: TcpListener, asker: &Asker) -> tokio::task::JoinHandle<()> {
    let ingest = IngestServer::new(asker.stub.clone()).max_decoding_message_size(64 << 20);
    let recorder = RecorderServer::new(asker.clone());
    tokio::spawn(async move {
        tonic::transport::Server::builder()
            .add_service(ingest)
            .add_service(recorder)
            .serve_with_incoming(TcpListenerStream::new(listener))
            .await
            .unwrap();
    })
}

fn ask(id: &str, kind: i32) -> SpanRequest {
    SpanRequest {
        id: id.to_string(),
        kind,
        process_id: 77,
        from_ns: 1000,
        to_ns: 2000,
        reason: "ticket".to_string(),
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let done = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), done)
        .await
        .unwrap_or_else(|_| panic!("never {what}"));
}

/// The collector comes up after it was asked, puts the batches off twice, and is asked about a
/// span that is in batch 3: the answer comes once, and after batch 3.
#[test]
fn an_answer_follows_the_batches_it_speaks_of() {
    let spool = tempfile::tempdir().unwrap();
    fill(spool.path(), 1..=5);
    let asker = Asker {
        stub: Stub::with(&[
            Mood::Store,
            Mood::Retry,
            Mood::Store,
            Mood::Retry,
            Mood::Slow,
        ]),
        ..Asker::default()
    };
    asker.asks.lock().unwrap().push(ask("r1", 0));
    let link = Arc::new(Link::default());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = serve(listener, &asker).await;
        let (committed, receiver) = watch::channel(6);
        let shipment =
            Shipment::new(spool.path(), &url, "agent", "host").with_link(Arc::clone(&link));
        let sender = tokio::spawn(ship::run(shipment, receiver));
        let asked = Mutex::new(Vec::new());
        until("asked", || {
            asked.lock().unwrap().extend(link.take());
            !asked.lock().unwrap().is_empty()
        })
        .await;
        let expected = Request {
            id: "r1".to_string(),
            process_id: 77,
            from_ns: 1000,
            to_ns: 2000,
            reason: "ticket".to_string(),
        };
        assert_eq!(asked.lock().unwrap()[0], expected);
        let answer = Answer {
            rows: 12,
            rows_before: 3,
            last_batch_seq: 3,
            overwritten: vec![Stretch {
                first_ns: 1000,
                last_ns: 1100,
                rows: 4,
            }],
            ..Answer::default()
        };
        link.publish([("r1".to_string(), answer)].into());
        until("answered", || {
            asker.answers.lock().unwrap().contains_key("r1")
        })
        .await;
        until("sent", || left(spool.path()).is_empty()).await;
        drop(committed);
        tokio::time::timeout(Duration::from_secs(60), sender)
            .await
            .expect("the sender does not end")
            .unwrap();
        server.abort();
    });
    let stored = asker.stored.lock().unwrap();
    assert_eq!(stored.len(), 1, "answered once");
    assert!(stored[0].contains(&3), "{stored:?}");
    let report = asker.answers.lock().unwrap()["r1"].clone();
    let answer = report.answer.unwrap();
    assert_eq!(answer.outcome(), SpanOutcome::Done);
    assert_eq!((answer.rows, answer.rows_before), (12, 3));
    let gone = &answer.overwritten[0];
    assert_eq!((gone.first_ns, gone.last_ns, gone.rows), (1000, 1100, 4));
    let callers = asker.callers.lock().unwrap();
    assert!(
        callers
            .iter()
            .all(|c| *c == ("agent".to_string(), "host".to_string()))
    );
}

/// A newer collector's kind of request, or one without a name: refused, and the call goes on.
#[test]
fn what_is_not_known_is_refused_clearly() {
    let spool = tempfile::tempdir().unwrap();
    let asker = Asker::default();
    asker
        .asks
        .lock()
        .unwrap()
        .extend([ask("r1", 7), ask("", 0), ask("r2", 0)]);
    let link = Arc::new(Link::default());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = serve(listener, &asker).await;
        let (committed, receiver) = watch::channel(1);
        let shipment =
            Shipment::new(spool.path(), &url, "agent", "host").with_link(Arc::clone(&link));
        let sender = tokio::spawn(ship::run(shipment, receiver));
        until("asked", || link.take().iter().any(|r| r.id == "r2")).await;
        until("refused", || asker.answers.lock().unwrap().len() == 2).await;
        drop(committed);
        sender.await.unwrap();
        server.abort();
    });
    let answers = asker.answers.lock().unwrap();
    let of = |id: &str| answers[id].answer.clone().unwrap();
    assert_eq!(of("r1").outcome(), SpanOutcome::Refused);
    assert!(
        of("r1")
            .message
            .contains("does not know requests of kind 7")
    );
    assert!(of("").message.contains("has 1 to"));
}
