//! How long to wait before another attempt, and how often to say that one failed.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(200);
const LAST: Duration = Duration::from_secs(10);
/// Between two complaints about the same trouble.
const SILENCE: Duration = Duration::from_secs(60);

/// Doubles up to a limit. Each wait is shortened by chance, up to half: a thousand agents that
/// lost one collector must not all come back at the same moment.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    /// Seeded by the system, anew in each process.
    random: RandomState,
    draws: u64,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self {
            next: FIRST,
            random: RandomState::new(),
            draws: 0,
        }
    }

    pub(super) fn reset(&mut self) {
        self.next = FIRST;
    }

    pub(super) fn next(&mut self) -> Duration {
        let whole = self.next;
        self.next = (whole * 2).min(LAST);
        self.draws += 1;
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.draws);
        let share = (hasher.finish() >> 32) as f64 / f64::from(u32::MAX);
        whole.mul_f64(1.0 - share / 2.0)
    }
}

/// Says trouble once, then at most once a minute, until it is over.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    said: Option<Instant>,
    untold: u64,
}

impl Complaints {
    /// Whether to say it now, and how many were not said since the last time.
    pub(super) fn say(&mut self) -> Option<u64> {
        if self.said.is_some_and(|said| said.elapsed() < SILENCE) {
            self.untold += 1;
            return None;
        }
        self.said = Some(Instant::now());
        Some(std::mem::take(&mut self.untold))
    }

    /// It worked. True the first time after a silence, so that this is said as rarely.
    pub(super) fn settle(&mut self) -> bool {
        let over = self.said.is_some_and(|said| said.elapsed() >= SILENCE);
        if over {
            *self = Self::default();
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_a_limit_and_differ_by_chance() {
        let mut backoff = Backoff::new();
        let mut whole = FIRST;
        for _ in 0..12 {
            let wait = backoff.next();
            assert!(wait <= whole && wait >= whole / 2, "{wait:?} of {whole:?}");
            whole = (whole * 2).min(LAST);
        }
        backoff.reset();
        assert!(backoff.next() <= FIRST);
        let waits = |mut backoff: Backoff| [backoff.next(), backoff.next(), backoff.next()];
        assert_ne!(waits(Backoff::new()), waits(Backoff::new()));
    }

    #[test]
    fn trouble_is_said_once_at_first() {
        let mut complaints = Complaints::default();
        assert_eq!(complaints.say(), Some(0));
        assert_eq!(complaints.say(), None);
        assert!(!complaints.settle());
        assert_eq!(complaints.untold, 1);
    }
}
