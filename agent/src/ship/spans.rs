//! The collector's requests for recorded spans, on the same connection as the batches.
//!
//! The agent holds the call open. A request goes to the recorder; an answer goes back once the
//! collector has taken every batch that the answer speaks of, and again whenever it is asked for
//! once more, so neither side has to know what the other remembers.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tracing::{debug, info, warn};
use vramscope_wire::proto::recorder_client::RecorderClient;
use vramscope_wire::proto::{
    OverwrittenSpan, SpanAnswer, SpanKind, SpanOutcome, SpanReport, SpanRequest,
};

use super::Shipment;
use crate::recorder::{Answer, Link, Request};

/// Before the call is made again after it broke and the batches' stream did not.
const AGAIN: Duration = Duration::from_secs(5);
/// Longest name and reason of a request.
const MAX_TEXT: usize = 256;

/// Runs as long as it is not dropped. `taken`: the collector has all batches below it.
pub(super) async fn run(shipment: Shipment, channel: Channel, taken: watch::Receiver<u64>) {
    let Some(link) = shipment.link.clone() else {
        return;
    };
    loop {
        match call(&shipment, &link, channel.clone(), taken.clone()).await {
            Err(status) if status.code() == Code::Unimplemented => {
                info!("the collector is too old to ask for recorded spans");
                return;
            }
            Err(status) => debug!("the call for recorded spans broke: {status}"),
            Ok(()) => {}
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn call(
    shipment: &Shipment,
    link: &Arc<Link>,
    channel: Channel,
    mut taken: watch::Receiver<u64>,
) -> Result<(), Status> {
    let (reports, stream) = mpsc::channel(16);
    let hello = SpanReport {
        agent_id: shipment.agent_id.clone(),
        host: shipment.host.clone(),
        answer: None,
    };
    // The channel is new and has room.
    let _ = reports.send(hello).await;
    let mut client = RecorderClient::new(channel);
    let mut requests = client
        .spans(ReceiverStream::new(stream))
        .await?
        .into_inner();
    let mut changes = link.changes();
    // Requests of this call that are not answered.
    let mut open: HashSet<String> = HashSet::new();
    loop {
        let now_taken = *taken.borrow_and_update();
        changes.mark_unchanged();
        for (id, answer) in link.answers(now_taken) {
            if open.remove(&id) && reports.send(report(id, answer)).await.is_err() {
                return Ok(());
            }
        }
        tokio::select! {
            request = requests.message() => {
                let Some(request) = request? else { return Ok(()) };
                let id = request.id.clone();
                match accept(link, request) {
                    Ok(()) => { open.insert(id); }
                    Err(why) => {
                        warn!("a request for a recorded span is refused: {why}");
                        if reports.send(report(id, Answer::refusal(why))).await.is_err() {
                            return Ok(());
                        }
                    }
                }
            }
            _ = taken.changed() => {}
            _ = changes.changed() => {}
        }
    }
}

/// Hands a request on, or says why not.
fn accept(link: &Link, request: SpanRequest) -> Result<(), String> {
    if SpanKind::try_from(request.kind) != Ok(SpanKind::FrameworkEvents) {
        return Err(format!(
            "this agent ({}) does not know requests of kind {}; upgrade it",
            env!("CARGO_PKG_VERSION"),
            request.kind
        ));
    }
    if request.id.is_empty() || request.id.len() > MAX_TEXT {
        return Err(format!("the id of a request has 1 to {MAX_TEXT} bytes"));
    }
    let asked = Request {
        id: request.id,
        process_id: request.process_id,
        from_ns: request.from_ns,
        to_ns: request.to_ns,
        reason: request.reason.chars().take(MAX_TEXT).collect(),
    };
    if link.ask(asked) {
        Ok(())
    } else {
        Err("too many requests wait; ask again later".to_string())
    }
}

fn report(id: String, answer: Answer) -> SpanReport {
    let (outcome, message) = match answer.refused {
        Some(why) => (SpanOutcome::Refused, why),
        None => (SpanOutcome::Done, answer.remark),
    };
    let overwritten = answer.overwritten.into_iter().map(|gone| OverwrittenSpan {
        first_ns: gone.first_ns,
        last_ns: gone.last_ns,
        rows: gone.rows,
    });
    SpanReport {
        agent_id: String::new(),
        host: String::new(),
        answer: Some(SpanAnswer {
            id,
            outcome: outcome.into(),
            message,
            rows: answer.rows,
            rows_before: answer.rows_before,
            overwritten: overwritten.collect(),
        }),
    }
}
