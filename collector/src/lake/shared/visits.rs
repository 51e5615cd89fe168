//! Runs of numbers without a gap.

/// Visits that are kept in memory for an agent. Of those that are dropped only unmarked batches
/// would become visits of their own: more marks, and none of them wrong.
const MOST: usize = 256;

/// The visits of one agent to one collector, each a first and a last number. They do not overlap;
/// the newest is the last.
#[derive(Debug, Default)]
pub struct Visits(Vec<(u64, u64)>);

impl Visits {
    /// Whether a number lies in one.
    pub fn contain(&self, seq: u64) -> bool {
        self.first_of(seq).is_some()
    }

    /// First number of the visit that a number lies in.
    pub fn first_of(&self, seq: u64) -> Option<u64> {
        let around = |(first, last): &&(u64, u64)| *first <= seq && seq <= *last;
        self.0.iter().rev().find(around).map(|(first, _)| *first)
    }

    /// Whether one ends just before a number.
    pub fn end_before(&self, seq: u64) -> bool {
        self.0.iter().any(|(_, last)| *last + 1 == seq)
    }

    /// Adds a number: to the visit that ends just before it, or as a new one.
    pub fn take(&mut self, seq: u64) {
        if self.contain(seq) {
            return;
        }
        if let Some(visit) = self.0.iter_mut().rev().find(|(_, last)| *last + 1 == seq) {
            visit.1 = seq;
            return;
        }
        if self.0.len() == MOST {
            self.0.remove(0);
        }
        self.0.push((seq, seq));
    }

    /// Adds a visit that marks tell of, or what they tell of it beyond what is known.
    pub fn restore(&mut self, first: u64, last: u64) {
        match self.0.iter_mut().find(|visit| visit.0 == first) {
            Some(visit) => visit.1 = last.max(visit.1),
            None => {
                self.0.push((first, last));
                self.0.sort_unstable();
            }
        }
    }

    /// Takes a number out again: what is before it and what is after it are two visits from now on.
    pub fn cut_out(&mut self, seq: u64) {
        let around = |(first, last): &(u64, u64)| *first <= seq && seq <= *last;
        let Some(at) = self.0.iter().position(around) else {
            return;
        };
        let (first, last) = self.0.remove(at);
        let parts = [(first, seq.wrapping_sub(1)), (seq + 1, last)];
        let parts = parts.into_iter().filter(|(first, last)| first <= last);
        // What came first stays first. `seq` is at least `first`, which is at least 1.
        self.0.splice(at..at, parts);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn gaps_and_numbers_that_come_late_make_visits_of_their_own() {
        let mut visits = Visits::default();
        [1, 2, 3, 6, 5, 7, 3]
            .iter()
            .for_each(|seq| visits.take(*seq));
        assert_eq!(visits.0, [(1, 3), (6, 7), (5, 5)]);
        assert_eq!(visits.first_of(7), Some(6));
        assert_eq!(visits.first_of(4), None);
        assert!(visits.end_before(4) && !visits.end_before(5));
        visits.cut_out(2);
        visits.cut_out(6);
        assert_eq!(visits.0, [(1, 1), (3, 3), (7, 7), (5, 5)]);
    }

    /// Against a plain set, over every order of a few numbers.
    #[test]
    fn they_hold_what_was_taken_and_nothing_else() {
        for code in 0..6_u64.pow(5) {
            let (mut visits, mut model) = (Visits::default(), BTreeSet::new());
            let mut rest = code;
            for step in 0..5 {
                let seq = rest % 6 + 1;
                rest /= 6;
                if step == 3 {
                    visits.cut_out(seq);
                    model.remove(&seq);
                } else {
                    visits.take(seq);
                    model.insert(seq);
                }
            }
            let found: BTreeSet<u64> = (1..=7).filter(|seq| visits.contain(*seq)).collect();
            assert_eq!(found, model, "{code}");
        }
    }
}
