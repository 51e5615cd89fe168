//! The questions that are being answered, to cancel them by name.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{QueryId, Question};
use crate::access::{Caller, Role};

/// The list. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Queries(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Several at a time may have one id: a client may fetch the same ticket twice.
    running: HashMap<QueryId, Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    who: Arc<str>,
    cancel: Arc<watch::Sender<bool>>,
}

/// A place in the list. Dropping it takes it out.
#[derive(Debug)]
pub(super) struct Registered {
    queries: Queries,
    id: QueryId,
    number: u64,
    cancel: Arc<watch::Sender<bool>>,
}

impl Queries {
    pub fn register(&self, question: &Question) -> Registered {
        let cancel = Arc::new(watch::Sender::new(false));
        let mut state = self.state();
        state.next += 1;
        let number = state.next;
        state.running.entry(question.id).or_default().push(Entry {
            number,
            who: Arc::clone(&question.caller.name),
            cancel: Arc::clone(&cancel),
        });
        Registered {
            queries: self.clone(),
            id: question.id,
            number,
            cancel,
        }
    }

    pub fn cancel(&self, caller: &Caller, id: QueryId) -> bool {
        let state = self.state();
        let mut any = false;
        for entry in state.running.get(&id).into_iter().flatten() {
            if caller.role == Role::Admin || entry.who == caller.name {
                entry.cancel.send_replace(true);
                any = true;
            }
        }
        any
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Turns true when it is cancelled.
    pub fn cancelled(&self) -> watch::Receiver<bool> {
        self.cancel.subscribe()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut state = self.queries.state();
        if let Some(entries) = state.running.get_mut(&self.id) {
            entries.retain(|entry| entry.number != self.number);
            if entries.is_empty() {
                state.running.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::query::Door;

    fn caller(name: &str, role: Role) -> Caller {
        Caller {
            name: Arc::from(name),
            role,
            namespaces: None,
        }
    }

    #[test]
    fn only_the_asker_and_administrators_cancel() {
        let queries = Queries::default();
        let question = Question::new(caller("ann", Role::Read), Door::Http, "SELECT 1");
        let registered = queries.register(&question);
        let cancelled = registered.cancelled();
        assert!(!queries.cancel(&caller("bob", Role::Read), question.id));
        assert!(!queries.cancel(&caller("ann", Role::Read), QueryId::new()));
        assert!(!*cancelled.borrow());
        assert!(queries.cancel(&caller("ann", Role::Read), question.id));
        assert!(*cancelled.borrow());

        let again = queries.register(&question);
        let cancelled = again.cancelled();
        assert!(queries.cancel(&caller("root", Role::Admin), question.id));
        assert!(*cancelled.borrow());
        drop((registered, again));
        assert!(!queries.cancel(&caller("root", Role::Admin), question.id));
    }
}
