//! What was sent and what was acknowledged: the truth that tables are compared with.
//!
//! Invariants:
//! - a batch enters before its first byte is sent, and its acknowledgement when it is read;
//! - a judgement takes what was acknowledged before it asked: what is acknowledged meanwhile may
//!   be there or not.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use super::content::Digest;

/// One batch that was sent at least once.
#[derive(Debug, Clone)]
pub struct Sent {
    /// Its table.
    pub table: Table,
    /// What its rows add up to.
    pub digest: Digest,
    /// When its first STORED or DUPLICATE was read.
    pub acknowledged: Option<Instant>,
    /// Answers STORED.
    pub stored: u64,
}

/// A batch's name: the agent's id and the batch's number.
pub type Key = (String, u64);

/// The truth.
#[derive(Debug, Default)]
pub struct Model {
    sent: BTreeMap<Key, Sent>,
    /// What contradicts the protocol at once, in words.
    pub broken: Vec<String>,
    /// Answers by outcome.
    pub answers: HashMap<&'static str, u64>,
}

/// What a comparison found. All zero is what was promised.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Rows that were acknowledged and are not there.
    pub lost: u64,
    /// Rows that are there more than once.
    pub doubled: u64,
    /// Rows of batches that nobody sent.
    pub foreign: u64,
    /// Batches with as many rows as were sent, but others; batches of which a part is there.
    pub changed: u64,
    /// The first of them, in words.
    pub examples: Vec<String>,
}

impl Verdict {
    /// Whether all is as promised.
    pub fn is_clean(&self) -> bool {
        self.lost + self.doubled + self.foreign + self.changed == 0
    }

    fn note(&mut self, what: String) {
        const SHOWN: usize = 10;
        if self.examples.len() < SHOWN {
            self.examples.push(what);
        }
    }
}

/// What the tables say: for each batch its table and digest.
pub type Found = HashMap<(Table, Key), Digest>;

impl Model {
    /// A batch is about to be sent.
    pub fn send(&mut self, agent_id: &str, seq: u64, table: Table, digest: Digest) {
        let sent = Sent {
            table,
            digest,
            acknowledged: None,
            stored: 0,
        };
        self.sent.entry((agent_id.to_string(), seq)).or_insert(sent);
    }

    /// An answer was read to a batch that was sent at `asked`. Of two streams the answers can be
    /// read in any order: a batch is stored twice if two answers say so, or if it was acknowledged
    /// before it was sent.
    pub fn answer(
        &mut self,
        agent_id: &str,
        seq: u64,
        outcome: Outcome,
        asked: Instant,
        message: &str,
    ) {
        *self.answers.entry(outcome.as_str_name()).or_default() += 1;
        let key = (agent_id.to_string(), seq);
        let Some(sent) = self.sent.get_mut(&key) else {
            let text = format!("agent {agent_id} was answered batch {seq}, which it never sent");
            self.broken.push(text);
            return;
        };
        match outcome {
            Outcome::Stored | Outcome::Duplicate => {
                sent.stored += u64::from(outcome == Outcome::Stored);
                let was_known = sent.acknowledged.is_some_and(|read| read < asked);
                if outcome == Outcome::Stored && (was_known || sent.stored > 1) {
                    self.broken.push(format!(
                        "agent {agent_id}: batch {seq} was acknowledged before and is stored again"
                    ));
                }
                sent.acknowledged.get_or_insert_with(Instant::now);
            }
            Outcome::Rejected => self.broken.push(format!(
                "agent {agent_id}: batch {seq} is sound and was rejected: {message}"
            )),
            Outcome::Retry => {}
            Outcome::Unspecified => self
                .broken
                .push(format!("agent {agent_id}: batch {seq} has no outcome")),
        }
    }

    /// What is acknowledged now.
    pub fn acknowledged(&self) -> Vec<Key> {
        let acknowledged = self
            .sent
            .iter()
            .filter(|(_, sent)| sent.acknowledged.is_some());
        acknowledged.map(|(key, _)| key.clone()).collect()
    }

    /// Rows that are acknowledged, by table.
    pub fn acknowledged_rows(&self) -> BTreeMap<Table, u64> {
        let mut rows = BTreeMap::new();
        for sent in self
            .sent
            .values()
            .filter(|sent| sent.acknowledged.is_some())
        {
            *rows.entry(sent.table).or_default() += sent.digest.rows;
        }
        rows
    }

    /// Batches that were sent.
    pub fn batches(&self) -> usize {
        self.sent.len()
    }

    /// Compares the tables with what was acknowledged before they were asked.
    pub fn judge(&self, acknowledged: &[Key], found: &Found) -> Verdict {
        let mut verdict = Verdict::default();
        for key in acknowledged {
            let sent = &self.sent[key];
            let rows = found.get(&(sent.table, key.clone())).map_or(0, |d| d.rows);
            if rows < sent.digest.rows {
                verdict.lost += sent.digest.rows - rows;
                verdict.note(format!(
                    "lost: agent {} batch {} of {}: {rows} of {} rows",
                    key.0,
                    key.1,
                    sent.table.name(),
                    sent.digest.rows
                ));
            }
        }
        for ((table, key), digest) in found {
            let batch = format!("agent {} batch {} of {}", key.0, key.1, table.name());
            match self.sent.get(key).filter(|sent| sent.table == *table) {
                None => {
                    verdict.foreign += digest.rows;
                    verdict.note(format!("never sent: {batch}: {} rows", digest.rows));
                }
                Some(sent) if digest.rows > sent.digest.rows => {
                    verdict.doubled += digest.rows - sent.digest.rows;
                    let (is, was) = (digest.rows, sent.digest.rows);
                    verdict.note(format!("doubled: {batch}: {is} rows of {was}"));
                }
                // A part of a batch that was not acknowledged: all or nothing was promised.
                Some(sent) if digest.rows < sent.digest.rows => {
                    if sent.acknowledged.is_none() {
                        verdict.changed += 1;
                        let (is, was) = (digest.rows, sent.digest.rows);
                        verdict.note(format!("a part: {batch}: {is} rows of {was}"));
                    }
                }
                Some(sent) if *digest != sent.digest => {
                    verdict.changed += 1;
                    verdict.note(format!(
                        "changed: {batch}: {digest:?}, sent {:?}",
                        sent.digest
                    ));
                }
                Some(_) => {}
            }
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(rows: u64, sum: i64) -> Digest {
        Digest {
            rows,
            sum,
            xor: sum,
        }
    }

    fn key(seq: u64) -> Key {
        ("a".to_string(), seq)
    }

    /// Batches 1 to 3 of ten rows, of which 1 and 2 are acknowledged.
    fn model() -> Model {
        let mut model = Model::default();
        for seq in 1..=3 {
            model.send("a", seq, Table::AllocEvents, digest(10, 100));
        }
        answer(&mut model, 1, Outcome::Stored);
        answer(&mut model, 2, Outcome::Duplicate);
        model
    }

    fn answer(model: &mut Model, seq: u64, outcome: Outcome) {
        model.answer("a", seq, outcome, Instant::now(), "");
    }

    fn judge(found: &[(u64, Digest)]) -> Verdict {
        let model = model();
        let found = found
            .iter()
            .map(|(seq, digest)| ((Table::AllocEvents, key(*seq)), *digest))
            .collect();
        let verdict = model.judge(&model.acknowledged(), &found);
        Verdict {
            examples: Vec::new(),
            ..verdict
        }
    }

    #[test]
    fn what_was_acknowledged_must_be_there_once_and_the_rest_may_be() {
        let whole = digest(10, 100);
        assert!(judge(&[(1, whole), (2, whole)]).is_clean());
        assert!(judge(&[(1, whole), (2, whole), (3, whole)]).is_clean());
    }

    #[test]
    fn each_way_to_be_wrong_is_found() {
        let whole = digest(10, 100);
        let clean = Verdict::default();
        let cases = [
            (
                vec![(1, whole)],
                Verdict {
                    lost: 10,
                    ..clean.clone()
                },
            ),
            (
                vec![(1, whole), (2, digest(4, 40))],
                Verdict {
                    lost: 6,
                    ..clean.clone()
                },
            ),
            (
                vec![(1, whole), (2, digest(20, 200))],
                Verdict {
                    doubled: 10,
                    ..clean.clone()
                },
            ),
            (
                vec![(1, whole), (2, digest(10, 101))],
                Verdict {
                    changed: 1,
                    ..clean.clone()
                },
            ),
            (
                vec![(1, whole), (2, whole), (3, digest(9, 90))],
                Verdict {
                    changed: 1,
                    ..clean.clone()
                },
            ),
            (
                vec![(1, whole), (2, whole), (4, whole)],
                Verdict {
                    foreign: 10,
                    ..clean.clone()
                },
            ),
        ];
        for (found, expected) in cases {
            assert_eq!(judge(&found), expected, "{found:?}");
        }
    }

    #[test]
    fn answers_that_contradict_the_protocol_are_kept() {
        let before = Instant::now();
        let mut model = model();
        assert!(model.broken.is_empty());
        answer(&mut model, 1, Outcome::Duplicate);
        answer(&mut model, 3, Outcome::Retry);
        // Its DUPLICATE came on another stream, and was read first.
        model.answer("a", 2, Outcome::Stored, before, "");
        assert!(model.broken.is_empty());
        answer(&mut model, 1, Outcome::Stored);
        answer(&mut model, 9, Outcome::Stored);
        answer(&mut model, 3, Outcome::Rejected);
        assert_eq!(model.broken.len(), 3, "{:?}", model.broken);
    }
}
