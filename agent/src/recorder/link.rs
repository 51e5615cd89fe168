//! Between the recorder, which lives in the engine's thread, and the sender, which talks to the
//! collector: requests come this way, answers go that way. Neither waits for the other.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::state::Stretch;

/// Requests that wait for the engine at most.
const MAX_WAITING: usize = 64;

/// A collector asks for a span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub id: String,
    pub process_id: i64,
    pub from_ns: i64,
    pub to_ns: i64,
    pub reason: String,
}

/// What became of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Why it will never be done, if so.
    pub refused: Option<String>,
    /// For people, beside the numbers.
    pub remark: String,
    pub rows: u64,
    pub rows_before: u64,
    /// Only when the collector has this batch is the answer true.
    pub last_batch_seq: u64,
    pub overwritten: Vec<Stretch>,
}

impl Answer {
    pub fn refusal(why: impl Into<String>) -> Self {
        Self {
            refused: Some(why.into()),
            ..Self::default()
        }
    }
}

#[derive(Debug, Default)]
struct Inside {
    waiting: Vec<Request>,
    answers: BTreeMap<String, Answer>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Link {
    inside: Mutex<Inside>,
    /// Counts changes of the answers.
    changes: watch::Sender<u64>,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            inside: Mutex::default(),
            changes: watch::Sender::new(0),
        }
    }
}

impl Link {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sender hands over a request. One that was answered is not asked again. False if too
    /// many wait.
    pub fn ask(&self, request: Request) -> bool {
        let mut inside = self.inside();
        let is_known = inside.answers.contains_key(&request.id)
            || inside
                .waiting
                .iter()
                .any(|waiting| waiting.id == request.id);
        if is_known {
            return true;
        }
        if inside.waiting.len() >= MAX_WAITING {
            return false;
        }
        inside.waiting.push(request);
        true
    }

    /// The recorder takes what waits.
    pub fn take(&self) -> Vec<Request> {
        std::mem::take(&mut self.inside().waiting)
    }

    /// The recorder tells all answers that it knows.
    pub fn publish(&self, answers: BTreeMap<String, Answer>) {
        let mut inside = self.inside();
        if inside.answers != answers {
            inside.answers = answers;
            drop(inside);
            self.changes.send_modify(|changes| *changes += 1);
        }
    }

    /// Answers that are true once the collector has all batches below `taken`.
    pub fn answers(&self, taken: u64) -> Vec<(String, Answer)> {
        let inside = self.inside();
        let of = inside.answers.iter();
        of.filter(|(_, answer)| answer.last_batch_seq < taken)
            .map(|(id, answer)| (id.clone(), answer.clone()))
            .collect()
    }

    /// Changes when there is a new answer.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
