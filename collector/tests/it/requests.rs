//! Requests for spans of flight recorders, from the command to an agent and back. The agent is a
//! client of the wire's service that is played here.

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use vramscope_wire::proto::recorder_client::RecorderClient;
use vramscope_wire::proto::{
    OverwrittenSpan, SpanAnswer, SpanKind, SpanOutcome, SpanReport, SpanRequest,
};

use crate::support::*;

fn ask(data: &Path, arguments: &[&str]) -> Output {
    binary()
        .args(["request-span", "--json", "--data"])
        .arg(data)
        .args(arguments)
        .output()
        .unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const SPAN: [&str; 6] = ["--process", "77", "--from", "1000", "--to", "2000"];

/// The id of a new request.
fn asked(data: &Path, arguments: &[&str]) -> String {
    let made = json(&ask(data, &[&SPAN[..], arguments].concat()));
    made["id"].as_str().unwrap().to_string()
}

fn requests(data: &Path) -> Vec<Value> {
    let output = binary()
        .args(["requests", "--json", "--data"])
        .arg(data)
        .output()
        .unwrap();
    json(&output).as_array().unwrap().clone()
}

fn request(data: &Path, id: &str) -> Value {
    let all = requests(data);
    all.into_iter().find(|request| request["id"] == id).unwrap()
}

async fn wait_for_stage(data: &Path, id: &str, stage: &str) -> Value {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let now = request(data, id);
        if now["stage"] == stage {
            return now;
        }
        assert!(Instant::now() < end, "never {stage}: {now}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// An agent's call.
struct Agent {
    reports: mpsc::Sender<SpanReport>,
    requests: Streaming<SpanRequest>,
}

impl Agent {
    async fn call(address: &str, agent: &str, host: &str) -> Agent {
        let (reports, stream) = mpsc::channel(16);
        let hello = SpanReport {
            agent_id: agent.to_string(),
            host: host.to_string(),
            answer: None,
        };
        reports.send(hello).await.unwrap();
        let mut client = RecorderClient::connect(address.to_string()).await.unwrap();
        let requests = client.spans(ReceiverStream::new(stream)).await.unwrap();
        Agent {
            reports,
            requests: requests.into_inner(),
        }
    }

    async fn next(&mut self) -> SpanRequest {
        let next = tokio::time::timeout(Duration::from_secs(60), self.requests.message());
        next.await.expect("no request").unwrap().unwrap()
    }

    /// Nothing comes for a while.
    async fn is_left_alone(&mut self) {
        let next = tokio::time::timeout(Duration::from_millis(1500), self.requests.message());
        assert!(next.await.is_err());
    }

    async fn answer(&self, answer: SpanAnswer) {
        let report = SpanReport {
            answer: Some(answer),
            ..SpanReport::default()
        };
        self.reports.send(report).await.unwrap();
    }

    /// The call was ended, and why.
    async fn ended(&mut self) -> String {
        let end = tokio::time::timeout(Duration::from_secs(60), self.requests.message());
        let status = end.await.expect("the call goes on").unwrap_err();
        status.message().to_string()
    }
}

fn done(id: &str, rows: u64) -> SpanAnswer {
    SpanAnswer {
        id: id.to_string(),
        outcome: SpanOutcome::Done.into(),
        rows,
        ..SpanAnswer::default()
    }
}

/// Asked while no collector runs and the agent is away; the collector is killed after it was sent.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_its_agent_over_restarts() {
    let data = tempfile::tempdir().unwrap();
    let id = asked(data.path(), &["--host", "gpu-1", "--reason", "ticket 4711"]);
    assert_eq!(request(data.path(), &id)["stage"], "requested");
    let collector = Collector::start(data.path(), FAST);
    // Another host's agent does not get it.
    let mut other = Agent::call(&collector.address, "agent-b", "gpu-2").await;
    other.is_left_alone().await;
    let mut agent = Agent::call(&collector.address, "agent-a", "gpu-1").await;
    let expected = SpanRequest {
        id: id.clone(),
        kind: SpanKind::FrameworkEvents.into(),
        process_id: 77,
        from_ns: 1000,
        to_ns: 2000,
        reason: "ticket 4711".to_string(),
    };
    assert_eq!(agent.next().await, expected);
    let sent = wait_for_stage(data.path(), &id, "sent").await;
    assert_eq!(sent["agent"], "agent-a");
    collector.kill();

    let collector = Collector::start(data.path(), FAST);
    // It is that agent's now, also if another one of the host calls first.
    let mut second = Agent::call(&collector.address, "agent-c", "gpu-1").await;
    second.is_left_alone().await;
    let mut agent = Agent::call(&collector.address, "agent-a", "gpu-1").await;
    assert_eq!(agent.next().await, expected);
    let overwritten = OverwrittenSpan {
        first_ns: 1000,
        last_ns: 1200,
        rows: 9,
    };
    let answer = SpanAnswer {
        rows_before: 5,
        overwritten: vec![overwritten],
        message: "the recorder holds little".to_string(),
        ..done(&id, 37)
    };
    agent.answer(answer).await;
    let answered = wait_for_stage(data.path(), &id, "answered").await;
    assert_eq!(answered["rows"], 37);
    assert_eq!(answered["rows_before"], 5);
    let gone = serde_json::json!([{"first_ns": 1000, "last_ns": 1200, "rows": 9}]);
    assert_eq!(answered["overwritten"], gone);
    // What is answered is not asked again.
    let mut agent = Agent::call(&collector.address, "agent-a", "gpu-1").await;
    agent.is_left_alone().await;
    assert!(collector.stop().success());
    let text = binary()
        .args(["requests", "--data"])
        .arg(data.path())
        .output()
        .unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("answered with 42 rows (5 were here before)"),
        "{text}"
    );
    assert!(
        text.contains("OVERWRITTEN 1970-01-01T00:00:00.000Z"),
        "{text}"
    );
}

/// Asked while the agent's call is open: it comes at once. Who waits is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_told_to_who_waits() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let mut agent = Agent::call(&collector.address, "agent-a", "gpu-1").await;
    let folder = data.path().to_path_buf();
    let waiting = tokio::task::spawn_blocking(move || {
        let arguments = [&SPAN[..], &["--agent", "agent-a", "--wait", "60s"]].concat();
        ask(&folder, &arguments)
    });
    let asked = agent.next().await;
    agent
        .answer(SpanAnswer {
            outcome: SpanOutcome::Refused.into(),
            message: "the recorder is off".to_string(),
            ..done(&asked.id, 0)
        })
        .await;
    let told = waiting.await.unwrap();
    assert_eq!(told.status.code(), Some(3));
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(told["stage"], "refused");
    assert_eq!(told["message"], "the recorder is off");
    // Nobody answers: that is another code.
    let unanswered = ask(
        data.path(),
        &[&SPAN[..], &["--host", "nobody", "--wait", "1s"]].concat(),
    );
    assert_eq!(unanswered.status.code(), Some(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_expires() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let id = asked(data.path(), &["--host", "gpu-1", "--expires", "100ms"]);
    wait_for_stage(data.path(), &id, "expired").await;
    let mut agent = Agent::call(&collector.address, "agent-a", "gpu-1").await;
    agent.is_left_alone().await;
}

/// What no agent should send ends its call and changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn nonsense_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let id = asked(data.path(), &["--host", "gpu-1"]);
    let mut nameless = Agent::call(&collector.address, "../x", "gpu-1").await;
    assert!(nameless.ended().await.contains("does not name an agent"));
    let mut other = Agent::call(&collector.address, "agent-b", "gpu-2").await;
    other.answer(done(&id, 1)).await;
    assert!(other.ended().await.contains("was not asked"));
    let mut agent = Agent::call(&collector.address, "agent-a", "gpu-1").await;
    agent.next().await;
    agent
        .answer(SpanAnswer {
            outcome: 9,
            ..done(&id, 1)
        })
        .await;
    assert!(agent.ended().await.contains("without outcome"));
    assert_eq!(request(data.path(), &id)["stage"], "sent");

    for (arguments, part) in [
        (
            vec!["--host", "h", "--process", "x", "--from", "1", "--to", "2"],
            "--process",
        ),
        (
            vec!["--host", "h", "--process", "1", "--from", "2", "--to", "2"],
            "is not before",
        ),
        (
            vec![
                "--host",
                "h",
                "--process",
                "1",
                "--from",
                "yesterday",
                "--to",
                "2",
            ],
            "not a time",
        ),
        (vec!["--process", "1", "--from", "1", "--to", "2"], "--host"),
    ] {
        let refused = ask(data.path(), &arguments);
        let message = String::from_utf8(refused.stderr).unwrap();
        assert!(
            !refused.status.success() && message.contains(part),
            "{message}"
        );
    }
    // A file that somebody damaged is named, and the others go on.
    std::fs::write(data.path().join("_requests/1-bad.json"), "{").unwrap();
    let next = asked(data.path(), &["--host", "gpu-1"]);
    let mut agent = Agent::call(&collector.address, "agent-a", "gpu-1").await;
    let first = agent.next().await.id;
    let both = [first, agent.next().await.id];
    assert!(both.contains(&id) && both.contains(&next));
}
