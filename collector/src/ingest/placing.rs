//! Where a row with a wrong time goes.
//!
//! Tables are partitioned by the hour of `ts`. A host whose clock is wrong by years would make
//! partitions that nothing ever finds or cleans up, so only a time near the collector's own is
//! believed. Rows with another keep their `ts` as it was sent and lie in the partition of the hour
//! in which their batch arrived; `batches.misdated_rows` counts them.
//!
//! What was believed is kept with the batch, so that a restart with another configuration cannot
//! place its rows differently.

use std::time::Duration;

/// Microseconds of an hour.
pub const HOUR_US: i64 = 3_600_000_000;

/// How far from the collector's clock a row's time may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Ahead of it.
    pub ahead: Duration,
    /// Behind it.
    pub behind: Duration,
}

impl Clock {
    /// The placing of a batch that arrives now.
    pub fn now(&self) -> Placing {
        self.at(chrono::Utc::now().timestamp_micros())
    }

    /// The placing of a batch that arrived at a time, microseconds since 1970.
    pub fn at(&self, arrived_us: i64) -> Placing {
        let us = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Placing {
            arrived_us,
            earliest_us: arrived_us.saturating_sub(us(self.behind)),
            latest_us: arrived_us.saturating_add(us(self.ahead)),
        }
    }
}

/// When a batch arrived and which times of its rows are believed, microseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placing {
    /// Arrival.
    pub arrived_us: i64,
    /// Earliest time believed.
    pub earliest_us: i64,
    /// Latest time believed.
    pub latest_us: i64,
}

impl Placing {
    /// Whether a row's time is believed.
    pub fn believes(&self, ts: i64) -> bool {
        (self.earliest_us..=self.latest_us).contains(&ts)
    }

    /// The hour, counted from 1970, of the partition that a row belongs to.
    pub fn hour(&self, ts: i64) -> i64 {
        let of = if self.believes(ts) {
            ts
        } else {
            self.arrived_us
        };
        of.div_euclid(HOUR_US)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-30 12:00:00 UTC is 1,796,040,000 seconds after 1970 (`date -u -d … +%s`), its hour
    /// 498,900.
    #[test]
    fn only_times_near_the_clock_are_believed() {
        let day = Duration::from_secs(86_400);
        let clock = Clock {
            ahead: day,
            behind: 31 * day,
        };
        let placing = clock.at(1_796_040_000_000_000);
        let at = |days: i64, us: i64| 1_796_040_000_000_000 + days * 24 * HOUR_US + us;
        assert_eq!(placing.hour(at(0, 0)), 498_900);
        assert_eq!(placing.hour(at(1, 0)), 498_924);
        assert_eq!(placing.hour(at(1, 1)), 498_900);
        assert_eq!(placing.hour(at(-31, 0)), 498_900 - 31 * 24);
        assert_eq!(placing.hour(at(-31, -1)), 498_900);
        // The year 2106, where 32-bit seconds end.
        assert_eq!(placing.hour(4_294_967_295_000_000), 498_900);
    }
}
