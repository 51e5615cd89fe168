//! The `Recorder` service: hands requests to the agents they are for, and writes down what comes
//! back.
//!
//! Invariants:
//! - an agent gets every open request that is for it at the beginning of each call, so one that
//!   was away, or forgot, gets it again; it answers each as often as it is asked;
//! - only the agent that a request is for can answer it;
//! - an answer counts once it is on disk. A call that brings what no agent should send is ended.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::Stream;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};
use vramscope_wire::proto::recorder_server::Recorder;
use vramscope_wire::proto::{SpanAnswer, SpanKind, SpanOutcome, SpanReport, SpanRequest};

use super::{KEPT, Overwritten, Request, Stage, ids, load, now_ns, path, save};
use crate::access::agents::Agent;
use crate::access::guard;
use crate::ingest::wal;

/// How often new requests are looked for.
const LOOK: Duration = Duration::from_millis(500);
/// How often an agent's certificate is looked at again.
const CHECKED: Duration = Duration::from_secs(5);
/// Longest host name and message that are kept, in characters.
const MAX_TEXT: usize = 1024;
/// Stretches of overwritten rows in one answer that are kept.
const MAX_OVERWRITTEN: usize = 256;

/// The requests of a data folder, in memory as they are on disk. Clones share everything.
#[derive(Clone)]
pub struct Desk {
    shared: Arc<Shared>,
}

struct Shared {
    data: PathBuf,
    requests: Mutex<BTreeMap<String, Request>>,
    /// Files that are no requests; said once each.
    damaged: Mutex<HashSet<String>>,
    changes: watch::Sender<u64>,
    stopping: watch::Receiver<bool>,
}

impl Desk {
    /// Reads what is there.
    pub fn open(data: &Path, stopping: watch::Receiver<bool>) -> anyhow::Result<Desk> {
        let desk = Desk {
            shared: Arc::new(Shared {
                data: data.to_path_buf(),
                requests: Mutex::default(),
                damaged: Mutex::default(),
                changes: watch::Sender::new(0),
                stopping,
            }),
        };
        desk.shared.look()?;
        Ok(desk)
    }

    /// Looks for new requests and for ones that nobody answered, until the collector stops.
    pub async fn run(self) {
        let mut stopping = self.shared.stopping.clone();
        loop {
            tokio::select! {
                () = stopped(&mut stopping) => return,
                () = tokio::time::sleep(LOOK) => {}
            }
            let shared = Arc::clone(&self.shared);
            match tokio::task::spawn_blocking(move || shared.look()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!("failed to look for requests: {error:#}"),
                Err(error) => tracing::warn!("failed to look for requests: {error}"),
            }
        }
    }
}

impl Shared {
    fn requests(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Request>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) -> anyhow::Result<()> {
        let mut has_new = false;
        for id in ids(&self.data)? {
            if self.requests().contains_key(&id) {
                continue;
            }
            match load(&path(&self.data, &id)) {
                Ok(request) if request.id == id => {
                    has_new = true;
                    self.requests().insert(id, request);
                }
                Ok(request) => self.say_damaged(&id, &format!("it says it is {:?}", request.id)),
                Err(error) => self.say_damaged(&id, &format!("{error:#}")),
            }
        }
        if has_new {
            self.changes.send_modify(|changes| *changes += 1);
        }
        let now = now_ns();
        let kept = i64::try_from(KEPT.as_nanos()).unwrap_or(i64::MAX);
        let (mut expired, mut old) = (Vec::new(), Vec::new());
        for request in self.requests().values() {
            if request.stage.is_open() && request.expires_ns <= now {
                expired.push(request.id.clone());
            } else if !request.stage.is_open() && request.stage_ns.saturating_add(kept) <= now {
                old.push(request.id.clone());
            }
        }
        for id in expired {
            self.change(&id, |request| {
                request.stage = Stage::Expired;
                if request.message.is_empty() {
                    request.message = "no answer in time; see whether the agent runs".to_string();
                }
            })?;
        }
        for id in old {
            let path = path(&self.data, &id);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!("failed to remove {}: {error}", path.display());
                }
                _ => {
                    self.requests().remove(&id);
                }
            }
        }
        Ok(())
    }

    fn say_damaged(&self, id: &str, reason: &str) {
        let mut damaged = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        if damaged.len() < 1000 && damaged.insert(id.to_string()) {
            tracing::warn!("request {id} is left alone: {reason}");
        }
    }

    /// Changes a request on disk, then in memory.
    fn change(&self, id: &str, change: impl FnOnce(&mut Request)) -> anyhow::Result<()> {
        let mut requests = self.requests();
        let Some(request) = requests.get_mut(id) else {
            return Ok(());
        };
        let mut changed = request.clone();
        change(&mut changed);
        changed.stage_ns = now_ns();
        save(&self.data, &changed)?;
        *request = changed;
        Ok(())
    }

    /// Open requests for an agent besides those of `sent`.
    fn waiting(&self, agent: &str, host: &str, sent: &HashSet<String>) -> Vec<Request> {
        let requests = self.requests();
        let open = requests.values().filter(|request| request.stage.is_open());
        open.filter(|request| request.is_for(agent, host) && !sent.contains(&request.id))
            .cloned()
            .collect()
    }

    fn answer(&self, agent: &str, host: &str, answer: SpanAnswer) -> Result<(), Status> {
        let is_its = self
            .requests()
            .get(&answer.id)
            .is_some_and(|request| request.is_for(agent, host));
        if !is_its {
            return Err(Status::invalid_argument(format!(
                "agent {agent:?} was not asked {:?}",
                answer.id.chars().take(64).collect::<String>()
            )));
        }
        let outcome = answer.outcome();
        let stage = match outcome {
            SpanOutcome::Done => Stage::Answered,
            SpanOutcome::Refused => Stage::Refused,
            SpanOutcome::Unspecified => {
                return Err(Status::invalid_argument("an answer without outcome"));
            }
        };
        let id = answer.id.clone();
        self.change(&id, |request| {
            // A second answer to the same request tells nothing new.
            if matches!(request.stage, Stage::Answered | Stage::Refused) {
                return;
            }
            request.stage = stage;
            request.rows = answer.rows;
            request.rows_before = answer.rows_before;
            request.message = answer.message.chars().take(MAX_TEXT).collect();
            let overwritten = answer.overwritten.iter().take(MAX_OVERWRITTEN);
            request.overwritten = overwritten
                .map(|gone| Overwritten {
                    first_ns: gone.first_ns,
                    last_ns: gone.last_ns,
                    rows: gone.rows,
                })
                .collect();
        })
        .map_err(|error| Status::unavailable(format!("failed to store the answer: {error:#}")))?;
        tracing::info!(request = %id, agent, rows = answer.rows, "request {}", stage.name());
        Ok(())
    }
}

/// Returns when the collector stops.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop too.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

type Requests = mpsc::Sender<Result<SpanRequest, Status>>;

async fn serve(
    shared: &Arc<Shared>,
    agent: &Agent,
    reports: &mut Streaming<SpanReport>,
    requests: &Requests,
) -> Result<(), Status> {
    let mut stopping = shared.stopping.clone();
    let hello = tokio::select! {
        () = stopped(&mut stopping) => return Ok(()),
        hello = reports.message() => hello?,
    };
    let Some(SpanReport { agent_id, host, .. }) = hello else {
        return Ok(());
    };
    if !wal::is_agent_id(&agent_id) || host.chars().count() > MAX_TEXT {
        return Err(Status::invalid_argument(
            "the first report does not name an agent",
        ));
    }
    let checked = agent.check(&agent_id, &host).await;
    checked
        .map_err(|error| Status::unavailable(format!("{error:#}")))?
        .map_err(|impostor| Status::permission_denied(impostor.to_string()))?;
    let mut changes = shared.changes.subscribe();
    let mut sent = HashSet::new();
    loop {
        changes.mark_unchanged();
        agent
            .still_welcome()
            .map_err(|denied| guard::status(&denied))?;
        for request in shared.waiting(&agent_id, &host, &sent) {
            // Written first: a second agent of the host must not get it as well.
            let id = request.id.clone();
            store(shared, id.clone(), agent_id.clone()).await?;
            sent.insert(id);
            let message = SpanRequest {
                id: request.id,
                kind: SpanKind::FrameworkEvents.into(),
                process_id: request.process_id,
                from_ns: request.from_ns,
                to_ns: request.to_ns,
                reason: request.reason,
            };
            if requests.send(Ok(message)).await.is_err() {
                return Ok(());
            }
        }
        tokio::select! {
            () = stopped(&mut stopping) => {
                return Err(Status::unavailable("the collector is shutting down"));
            }
            _ = changes.changed() => {}
            // A certificate that was revoked meanwhile ends the call, also if nothing is said.
            () = tokio::time::sleep(CHECKED) => {}
            report = reports.message() => {
                let Some(report) = report? else { return Ok(()) };
                let Some(answer) = report.answer else {
                    return Err(Status::invalid_argument("a report without an answer"));
                };
                let (shared, agent, host) = (Arc::clone(shared), agent_id.clone(), host.clone());
                let task = tokio::task::spawn_blocking(move || shared.answer(&agent, &host, answer));
                task.await.map_err(|error| Status::internal(error.to_string()))??;
            }
        }
    }
}

async fn store(shared: &Arc<Shared>, id: String, agent: String) -> Result<(), Status> {
    let shared = Arc::clone(shared);
    let task = tokio::task::spawn_blocking(move || {
        shared.change(&id, |request| {
            request.stage = Stage::Sent;
            request.agent = Some(agent);
        })
    });
    task.await
        .map_err(anyhow::Error::from)
        .and_then(|stored| stored)
        .map_err(|error| Status::unavailable(format!("failed to store a request: {error:#}")))
}

#[tonic::async_trait]
impl Recorder for Desk {
    type SpansStream = Pin<Box<dyn Stream<Item = Result<SpanRequest, Status>> + Send>>;

    async fn spans(
        &self,
        call: tonic::Request<Streaming<SpanReport>>,
    ) -> Result<Response<Self::SpansStream>, Status> {
        let agent = Agent::of(&call)?;
        let mut reports = call.into_inner();
        let (requests, stream) = mpsc::channel(16);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            if let Err(status) = serve(&shared, &agent, &mut reports, &requests).await {
                tracing::debug!(%status, "a call for recorded spans ended");
                let _ = requests.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}
