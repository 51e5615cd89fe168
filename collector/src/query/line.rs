//! Who may run a query now, and who is next.
//!
//! Invariants:
//! - at most so many queries run at a time as there are places;
//! - one caller never holds all places (if there are two or more), so nobody waits for one other
//!   caller's long queries alone;
//! - a place that becomes free goes to the caller who has the fewest, among equals to who waited
//!   longest: someone who asks a thousand questions delays somebody who asks one by one query;
//! - the line is bounded: who would be too many is turned away at once.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use vramscope_queries::Error;

/// Most questions that wait.
const MAX_WAITING: usize = 256;
/// Most of them of one caller.
const MAX_WAITING_OF_CALLER: usize = 64;

/// The line. Clones share it.
#[derive(Debug, Clone)]
pub struct Line(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    places: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    of_caller: HashMap<Arc<str>, usize>,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    who: Arc<str>,
    turn: oneshot::Sender<Place>,
}

/// A place. Dropping it lets the next one in.
#[derive(Debug)]
pub struct Place {
    line: Option<Line>,
    who: Arc<str>,
}

impl Line {
    /// A line in front of some places, at least one.
    pub fn new(places: usize) -> Line {
        Line(Arc::new(Shared {
            places: places.max(1),
            state: Mutex::default(),
        }))
    }

    /// Waits for a place. Dropping the future leaves the line.
    pub async fn enter(&self, who: &Arc<str>) -> Result<Place, Error> {
        let turn = {
            let mut state = self.state();
            state.waiting.retain(|waiter| !waiter.turn.is_closed());
            let first_in_line = state.waiting.iter().all(|waiter| waiter.who != *who);
            if first_in_line && self.has_place(&state, who) {
                return Ok(self.take(&mut state, who));
            }
            let of_caller = state.waiting.iter().filter(|waiter| waiter.who == *who);
            if of_caller.count() >= MAX_WAITING_OF_CALLER {
                return Err(Error::Busy(format!(
                    "{MAX_WAITING_OF_CALLER} questions of {who} wait already"
                )));
            }
            if state.waiting.len() >= MAX_WAITING {
                return Err(Error::Busy(format!("{MAX_WAITING} questions wait already")));
            }
            let (turn, waits) = oneshot::channel();
            let who = Arc::clone(who);
            state.waiting.push_back(Waiter { who, turn });
            waits
        };
        // The line lives as long as this future, and with it the sender.
        turn.await
            .map_err(|_| Error::Busy("the line was closed".to_string()))
    }

    /// Queries that run, and questions that wait.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.state();
        let waiting = state.waiting.iter().filter(|w| !w.turn.is_closed());
        (state.taken, waiting.count())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_place(&self, state: &State, who: &str) -> bool {
        let own = state.of_caller.get(who).copied().unwrap_or(0);
        let most = self.0.places.saturating_sub(1).max(1);
        state.taken < self.0.places && own < most
    }

    fn take(&self, state: &mut State, who: &Arc<str>) -> Place {
        state.taken += 1;
        *state.of_caller.entry(Arc::clone(who)).or_insert(0) += 1;
        Place {
            line: Some(self.clone()),
            who: Arc::clone(who),
        }
    }

    fn give_back(state: &mut State, who: &str) {
        state.taken = state.taken.saturating_sub(1);
        if let Some(own) = state.of_caller.get_mut(who) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                state.of_caller.remove(who);
            }
        }
    }

    /// Takes the next one out of the line, with the place they get.
    fn next(&self, state: &mut State) -> Option<(Waiter, Place)> {
        let fewest = state
            .waiting
            .iter()
            .enumerate()
            .filter(|(_, waiter)| self.has_place(state, &waiter.who))
            .min_by_key(|(index, waiter)| {
                let own = state.of_caller.get(&waiter.who).copied().unwrap_or(0);
                (own, *index)
            });
        let index = fewest?.0;
        let waiter = state.waiting.remove(index)?;
        let place = self.take(state, &waiter.who);
        Some((waiter, place))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(line) = self.line.take() else { return };
        Line::give_back(&mut line.state(), &self.who);
        loop {
            let next = line.next(&mut line.state());
            let Some((waiter, place)) = next else { return };
            // Whoever left the line gives the place back. Not by dropping it, which would come
            // here again for each of them.
            if let Err(mut unwanted) = waiter.turn.send(place) {
                unwanted.line = None;
                Line::give_back(&mut line.state(), &unwanted.who);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn who(name: &str) -> Arc<str> {
        Arc::from(name)
    }

    /// Lets everything that can go on go on.
    async fn settle() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    #[tokio::test]
    async fn nobody_takes_the_last_place_of_others() {
        let line = Line::new(3);
        let first = line.enter(&who("a")).await.unwrap();
        let _second = line.enter(&who("a")).await.unwrap();
        let third = tokio::spawn({
            let line = line.clone();
            async move { line.enter(&who("a")).await.unwrap() }
        });
        settle().await;
        assert_eq!(line.counts(), (2, 1));
        let _other = line.enter(&who("b")).await.unwrap();
        assert_eq!(line.counts(), (3, 1));
        drop(first);
        let _third = third.await.unwrap();
        assert_eq!(line.counts(), (3, 0));
    }

    #[tokio::test]
    async fn places_go_to_who_has_the_fewest() {
        let line = Line::new(3);
        let held = line.enter(&who("a")).await.unwrap();
        let other = line.enter(&who("b")).await.unwrap();
        let _more = line.enter(&who("b")).await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        // "a" stands in line ten times before "c" comes.
        for name in ["a"; 10].into_iter().chain(["c"]) {
            let (line, order) = (line.clone(), Arc::clone(&order));
            tasks.push(tokio::spawn(async move {
                let place = line.enter(&who(name)).await.unwrap();
                order.lock().unwrap().push(name);
                drop(place);
            }));
            settle().await;
        }
        // "a" may have one more place, but has one already, and "c" has none.
        drop(other);
        settle().await;
        assert_eq!(order.lock().unwrap().first(), Some(&"c"));
        drop(held);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(order.lock().unwrap().len(), 11);
        assert_eq!(line.counts(), (1, 0));
    }

    #[tokio::test]
    async fn who_leaves_the_line_holds_nothing() {
        let line = Line::new(1);
        let held = line.enter(&who("a")).await.unwrap();
        for _ in 0..100 {
            let waits = tokio::time::timeout(Duration::from_millis(1), line.enter(&who("b"))).await;
            assert!(waits.is_err());
        }
        assert_eq!(line.counts(), (1, 0));
        drop(held);
        assert_eq!(line.counts(), (0, 0));
        line.enter(&who("b")).await.unwrap();
    }

    #[tokio::test]
    async fn the_line_is_bounded() {
        let line = Line::new(1);
        let _held = line.enter(&who("a")).await.unwrap();
        let mut waiting = Vec::new();
        for index in 0..MAX_WAITING {
            let name = format!("caller {}", index / MAX_WAITING_OF_CALLER);
            let line = line.clone();
            waiting.push(tokio::spawn(async move { line.enter(&who(&name)).await }));
        }
        settle().await;
        let refused = line.enter(&who("caller 0")).await.unwrap_err().to_string();
        assert!(refused.contains("of caller 0"), "{refused}");
        let refused = line.enter(&who("new")).await.unwrap_err().to_string();
        assert!(refused.contains("256 questions"), "{refused}");
        for task in waiting {
            task.abort();
        }
    }
}
