//! What the recorder has to remember: which spans were asked for and how far each has travelled,
//! and what was overwritten.
//!
//! Format of the file `state`: eight bytes that name it, the CRC-32 of the rest (little-endian),
//! the rest in postcard. It is replaced as a whole.
//!
//! Invariants:
//! - the file holds the state that counts, and beside it the one that counts once the journal
//!   knows the batches it speaks of. So the account of what has travelled and the batches that
//!   carried it become true in the same moment, whenever the agent is killed;
//! - it grows with the spans that are open or whose files are still there, never with the rows;
//! - a state that cannot be read forgets what has travelled. Nothing that is there may travel
//!   then, since it could do so twice.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::files::Pick;
use super::ranges::Ranges;
use crate::spool::folder;

pub(super) const FILE: &str = "state";
const FORMAT: [u8; 8] = *b"vrsrec01";

/// Spans that are remembered at most; further triggers are counted and not followed.
pub const MAX_SPANS: usize = 4096;
/// Answers to a collector that are kept after their files are gone.
const MAX_ANSWERED: usize = 256;
/// Processes whose overwritten rows are told one by one.
const MAX_PROCESSES: usize = 256;
/// Stretches of one process that are told apart.
const MAX_STRETCHES: usize = 32;

/// Rows that are gone: from the first to the last of them, nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretch {
    pub first_ns: i64,
    pub last_ns: i64,
    pub rows: u64,
}

impl Stretch {
    /// Makes it reach over another one.
    pub fn join(&mut self, other: Stretch) {
        self.first_ns = self.first_ns.min(other.first_ns);
        self.last_ns = self.last_ns.max(other.last_ns);
        self.rows += other.rows;
    }
}

/// What of one process was overwritten and had not travelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overwritten {
    pub process_id: i64,
    pub pid: u32,
    /// Oldest first; rows between two of them have travelled.
    pub stretches: Vec<Stretch>,
    /// The last stretch goes on with the next file.
    pub goes_on: bool,
}

/// Why a span travels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    Oom,
    FailedAllocation,
    Request { id: String, reason: String },
}

impl Cause {
    pub fn text(&self) -> String {
        match self {
            Cause::Oom => "oom".to_string(),
            Cause::FailedAllocation => "failed allocation".to_string(),
            Cause::Request { id, reason } => format!("request {id}: {reason}"),
        }
    }
}

/// Rows of one process with `from_ns <= ts_ns < to_ns` that are to travel, or have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    pub cause: Cause,
    pub process_id: i64,
    pub from_ns: i64,
    pub to_ns: i64,
    /// How many triggers it stands for.
    pub triggers: u64,
    /// Files below this number were searched: what they had of the span has travelled.
    pub next_file: u64,
    /// The latest row in a file that was searched.
    pub seen_ns: i64,
    /// From then on no row of it can come any more.
    pub over_ns: i64,
    pub is_done: bool,
    /// Rows that travelled for it.
    pub rows: u64,
    /// Rows of the span that had travelled for another one.
    pub rows_before: u64,
    /// The last batch that carried rows of it.
    pub last_batch_seq: u64,
    /// What was overwritten before it travelled.
    pub gone: Vec<Stretch>,
}

impl Span {
    /// What it takes of a file.
    pub fn pick(&self) -> Pick {
        Pick {
            process_id: Some(self.process_id),
            from_ns: self.from_ns,
            to_ns: self.to_ns,
        }
    }

    /// Rows of it are gone.
    pub fn lose(&mut self, stretch: Stretch) {
        match self.gone.last_mut() {
            Some(last) => last.join(stretch),
            None => self.gone.push(stretch),
        }
    }

    pub fn of_request(&self) -> Option<&str> {
        match &self.cause {
            Cause::Request { id, .. } => Some(id),
            _ => None,
        }
    }
}

/// See the module's text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Files of events below this number are overwritten.
    pub horizon: u64,
    /// Files of events below this number must not travel: what of them has is not known.
    pub floor: u64,
    pub overwritten: Vec<Overwritten>,
    /// Of processes that are not among them any more.
    pub overwritten_others: Option<Stretch>,
    pub overwritten_rows: u64,
    pub travelled_rows: u64,
    pub triggers: u64,
    /// Triggers that found no place.
    pub triggers_refused: u64,
    pub spans: Vec<Span>,
}

impl State {
    /// Which rows of a process in a file have travelled, or count as if they had.
    pub fn travelled(&self, file: u64, process_id: i64) -> Ranges {
        let mut ranges = Ranges::default();
        if file < self.floor {
            ranges.add(i64::MIN, i64::MAX);
        }
        for span in &self.spans {
            if span.process_id == process_id && span.next_file > file {
                ranges.add(span.from_ns, span.to_ns);
            }
        }
        ranges
    }

    /// Books a file of which nothing more is known.
    pub fn overwrite_whole(&mut self, stretch: Stretch) {
        self.overwritten_rows += stretch.rows;
        match &mut self.overwritten_others {
            Some(others) => others.join(stretch),
            None => self.overwritten_others = Some(stretch),
        }
    }

    /// Books rows of one file's process as overwritten. `rows` 0: all of it had travelled.
    pub fn overwrite(&mut self, process_id: i64, pid: u32, stretch: Stretch) {
        let known = self
            .overwritten
            .iter()
            .position(|o| o.process_id == process_id);
        if stretch.rows == 0 {
            if let Some(at) = known {
                self.overwritten[at].goes_on = false;
            }
            return;
        }
        self.overwritten_rows += stretch.rows;
        let mut entry = match known {
            Some(at) => self.overwritten.remove(at),
            None => Overwritten {
                process_id,
                pid,
                stretches: Vec::new(),
                goes_on: false,
            },
        };
        match entry.stretches.last_mut() {
            Some(last) if entry.goes_on => last.join(stretch),
            _ => entry.stretches.push(stretch),
        }
        entry.goes_on = true;
        if entry.stretches.len() > MAX_STRETCHES {
            let first = entry.stretches.remove(0);
            entry.stretches[0].join(first);
        }
        // The one that was overwritten last is last.
        self.overwritten.push(entry);
        if self.overwritten.len() > MAX_PROCESSES {
            for stretch in self.overwritten.remove(0).stretches {
                match &mut self.overwritten_others {
                    Some(others) => others.join(stretch),
                    None => self.overwritten_others = Some(stretch),
                }
            }
        }
    }

    /// What was overwritten of a process and lies in a span of time, cut to it.
    pub fn overwritten_in(&self, process_id: i64, from_ns: i64, to_ns: i64) -> Vec<Stretch> {
        let of_process = self
            .overwritten
            .iter()
            .filter(|o| o.process_id == process_id);
        of_process
            .flat_map(|o| &o.stretches)
            .filter(|s| s.first_ns < to_ns && s.last_ns >= from_ns)
            .map(|s| Stretch {
                first_ns: s.first_ns.max(from_ns),
                last_ns: s.last_ns.min(to_ns - 1),
                rows: s.rows,
            })
            .collect()
    }

    /// Forgets spans that nothing can ask for any more: a span that is done keeps its rows from
    /// travelling again as long as there is a file that it took them from.
    pub fn forget(&mut self, oldest_file: Option<u64>) {
        let oldest = oldest_file.unwrap_or(u64::MAX);
        let can_go = |span: &Span| span.is_done && span.next_file <= oldest;
        let answered = self
            .spans
            .iter()
            .filter(|span| can_go(span) && span.of_request().is_some())
            .count();
        let mut spare = answered.saturating_sub(MAX_ANSWERED);
        self.spans.retain(|span| {
            if !can_go(span) {
                return true;
            }
            let is_request = span.of_request().is_some();
            let goes = !is_request || spare > 0;
            if is_request && goes {
                spare -= 1;
            }
            !goes
        });
    }
}

/// The file's content.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Stored {
    state: State,
    /// The state that counts if the journal knows this batch.
    staged: Option<(u64, State)>,
}

/// What was found.
#[derive(Debug)]
pub enum Found {
    Nothing,
    State(State),
    Damaged,
}

/// Reads the state. `next_batch_seq` is the journal's; without it (for a look from outside) the
/// latest state counts.
pub fn load(recorder: &Path, next_batch_seq: Option<u64>) -> anyhow::Result<Found> {
    let path = recorder.join(FILE);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => {
            return Err(error).with_context(|| format!("failed to read {}", path.display()));
        }
    };
    let Some(stored) = decode(&bytes) else {
        return Ok(Found::Damaged);
    };
    Ok(Found::State(match stored.staged {
        Some((batch_seq, state)) if next_batch_seq.is_none_or(|next| batch_seq < next) => state,
        _ => stored.state,
    }))
}

fn decode(bytes: &[u8]) -> Option<Stored> {
    let rest = bytes.strip_prefix(&FORMAT)?;
    let (crc, payload) = rest.split_first_chunk::<4>()?;
    (u32::from_le_bytes(*crc) == crc32fast::hash(payload))
        .then(|| postcard::from_bytes(payload).ok())
        .flatten()
}

/// Writes the state that counts and, if there is one, the state that counts once the journal
/// knows `staged`'s batch. Durable when it returns.
pub fn save(recorder: &Path, state: &State, staged: Option<(u64, &State)>) -> anyhow::Result<()> {
    let stored = Stored {
        state: state.clone(),
        staged: staged.map(|(seq, state)| (seq, state.clone())),
    };
    let payload = postcard::to_stdvec(&stored)?;
    let mut bytes = FORMAT.to_vec();
    bytes.extend(crc32fast::hash(&payload).to_le_bytes());
    bytes.extend(payload);
    folder::write_durably(&recorder.join(FILE), &bytes)?;
    folder::sync_folder(recorder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(first_ns: i64, last_ns: i64, rows: u64) -> Stretch {
        Stretch {
            first_ns,
            last_ns,
            rows,
        }
    }

    /// Killed before the journal knew batch 7, the old state counts; after it, the new one.
    #[test]
    fn the_journal_decides_which_state_counts() {
        let folder = tempfile::tempdir().unwrap();
        let old = State {
            travelled_rows: 1,
            ..State::default()
        };
        let new = State {
            travelled_rows: 2,
            ..State::default()
        };
        save(folder.path(), &old, Some((7, &new))).unwrap();
        let rows = |next| match load(folder.path(), next).unwrap() {
            Found::State(state) => state.travelled_rows,
            other => panic!("{other:?}"),
        };
        assert_eq!((rows(Some(7)), rows(Some(8)), rows(None)), (1, 2, 2));
        let path = folder.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert!(matches!(load(folder.path(), None).unwrap(), Found::Damaged));
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(matches!(load(folder.path(), None).unwrap(), Found::Damaged));
        }
    }

    #[test]
    fn stretches_join_until_something_travelled_in_between() {
        let mut state = State::default();
        state.overwrite(5, 1, stretch(0, 9, 10));
        state.overwrite(5, 1, stretch(10, 19, 10));
        state.overwrite(5, 1, stretch(20, 29, 0));
        state.overwrite(5, 1, stretch(30, 39, 7));
        assert_eq!(
            state.overwritten[0].stretches,
            [stretch(0, 19, 20), stretch(30, 39, 7)]
        );
        assert_eq!(state.overwritten_rows, 27);
        assert_eq!(
            state.overwritten_in(5, 15, 35),
            [stretch(15, 19, 20), stretch(30, 34, 7)]
        );
        assert_eq!(state.overwritten_in(5, 20, 30), []);
        assert_eq!(state.overwritten_in(6, 0, 100), []);
    }

    #[test]
    fn what_is_told_is_bounded_and_sums_stay() {
        let mut state = State::default();
        for process in 0..1000 {
            state.overwrite(process, 1, stretch(process, process, 2));
        }
        let told: u64 = state
            .overwritten
            .iter()
            .flat_map(|o| &o.stretches)
            .map(|s| s.rows)
            .sum();
        let others = state.overwritten_others.unwrap();
        assert_eq!(state.overwritten.len(), MAX_PROCESSES);
        assert_eq!((others.first_ns, told + others.rows), (0, 2000));
    }
}
