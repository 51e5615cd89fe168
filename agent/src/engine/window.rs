//! What the agent saw and lost since the last row of `agent_windows`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::warn;
use vramscope_ebpf_abi::Loss;
use vramscope_wire::Table;

use crate::host::clock::{self, WallClock};
use crate::spool::room;
use crate::spool::rows::WindowRow;

/// Losses by cause, as the kernel side counts them.
pub type Losses = [u64; Loss::COUNT as usize];

/// The counts of an open window. They are part of the journal: a killed agent forgets no loss.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Nanoseconds since 1970.
    pub start_ns: i64,
    /// The same of the roll-ups, which go on where `agent_windows` waits for room.
    pub rollup_start_ns: i64,
    pub uprobe_events: u64,
    /// What frameworks' allocators told.
    pub usdt_events: u64,
    pub agent_events: u64,
    pub lost: Losses,
    /// Records that could not be decoded.
    pub undecodable: u64,
    /// Allocations that were not entered in the books, and events that were booked without their
    /// stack, since there were too many.
    pub live_full: u64,
    pub stacks_full: u64,
    /// For a time nobody watched, and nobody knows how many calls that were.
    pub gap: bool,
    /// Rows that found no room in the spool, by cause.
    pub no_room: BTreeMap<String, u64>,
    /// How far the wall clock was set, if it was.
    pub clock_step_ns: Option<i64>,
    /// For a time the probes were switched off, and nobody knows how many calls that were.
    pub switched_off: bool,
}

impl Counts {
    /// Nothing yet, from now on.
    pub fn begin() -> Self {
        Self {
            start_ns: clock::realtime_ns() as i64,
            rollup_start_ns: clock::realtime_ns() as i64,
            uprobe_events: 0,
            usdt_events: 0,
            agent_events: 0,
            lost: [0; Loss::COUNT as usize],
            undecodable: 0,
            live_full: 0,
            stacks_full: 0,
            gap: false,
            no_room: BTreeMap::new(),
            clock_step_ns: None,
            switched_off: false,
        }
    }

    pub fn drop_rows(&mut self, dropped: &BTreeMap<&'static str, u64>) {
        for (cause, rows) in dropped {
            *self.no_room.entry((*cause).to_string()).or_default() += rows;
        }
    }

    /// What was lost, by cause, without zeros. How many calls a gap held is not known: it has a
    /// cause and no number.
    pub fn lost_by_cause(&self) -> Vec<(&'static str, i64)> {
        let of_kernel = Loss::ALL.iter().map(|cause| cause.name()).zip(self.lost);
        let own = [
            ("undecodable", self.undecodable),
            ("live_full", self.live_full),
            ("stacks_full", self.stacks_full),
        ];
        let mut lost: Vec<_> = of_kernel
            .chain(own)
            .filter(|(_, count)| *count > 0)
            .map(|(cause, count)| (cause, count as i64))
            .collect();
        for cause in Table::FROM_AGENTS
            .map(room::cause)
            .into_iter()
            .chain(room::RECORDER)
        {
            let rows = self.no_room.get(cause).copied().unwrap_or(0);
            if rows > 0 {
                lost.push((cause, rows as i64));
            }
        }
        if self.gap {
            lost.push(("restart_gap", 0));
        }
        if self.switched_off {
            lost.push(("switched_off", 0));
        }
        lost
    }

    pub fn is_lossy(&self) -> bool {
        is_lossy(&self.lost_by_cause())
    }
}

/// Rows that the flight recorder let go as it is meant to are told, and are no loss.
fn is_lossy(causes: &[(&str, i64)]) -> bool {
    causes.iter().any(|(cause, _)| room::is_loss(cause))
}

/// An open window.
pub struct Window {
    started: Instant,
    cpu_ns: u64,
    pub counts: Counts,
}

impl Window {
    /// Opens a window, or goes on with the one of an agent that was stopped in its middle.
    pub fn open(earlier: Option<Counts>) -> Self {
        let counts = earlier.unwrap_or_else(Counts::begin);
        // A window does not begin anew with each restart.
        let age_ns = (clock::realtime_ns() as i64).saturating_sub(counts.start_ns);
        let age = Duration::from_nanos(u64::try_from(age_ns).unwrap_or(0));
        let now = Instant::now();
        Self {
            started: now.checked_sub(age).unwrap_or(now),
            cpu_ns: clock::cpu_ns(),
            counts,
        }
    }

    pub fn is_over(&self, length: Duration) -> bool {
        self.started.elapsed() >= length
    }

    /// Closes the window; a new one begins. `clock` has followed the wall clock until now.
    pub fn close(&mut self, clock: &mut WallClock) -> WindowRow {
        let end_ns = clock.window_end_ns();
        let mut next = Self::open(None);
        next.counts.start_ns = clock.now_ns();
        next.counts.rollup_start_ns = self.counts.rollup_start_ns;
        let mut closed = std::mem::replace(self, next);
        if let Some(step) = clock.take_step() {
            warn!(
                step_ms = step.ns / 1_000_000,
                suspended_ms = step.suspended_ns / 1_000_000,
                "the wall clock was set: a window ends here, order and lifetimes are as they were"
            );
            *closed.counts.clock_step_ns.get_or_insert(0) += step.ns;
        }
        let counts = closed.counts;
        let lost_by_cause = counts.lost_by_cause();
        WindowRow {
            // A clock that was set back while no agent ran must not turn a window round.
            start_ns: counts.start_ns.min(end_ns),
            end_ns,
            events_by_source: vec![
                ("uprobe", counts.uprobe_events as i64),
                ("usdt", counts.usdt_events as i64),
                ("agent", counts.agent_events as i64),
            ],
            lossy: is_lossy(&lost_by_cause),
            clock_step_ns: counts.clock_step_ns,
            lost_by_cause,
            cpu_ns: Some(clock::cpu_ns().saturating_sub(closed.cpu_ns) as i64),
            rss_bytes: rss_bytes(),
        }
    }
}

fn rss_bytes() -> Option<i64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: i64 = statm.split(' ').nth(1)?.parse().ok()?;
    // SAFETY: a query without side effects.
    Some(pages * unsafe { libc::sysconf(libc::_SC_PAGESIZE) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_window_tells_losses_by_cause_and_starts_anew() {
        let mut window = Window::open(None);
        window.counts.uprobe_events = 7;
        window.counts.lost[Loss::RingFull as usize] = 3;
        window.counts.undecodable = 1;
        let row = window.close(&mut WallClock::new());
        assert_eq!(row.lost_by_cause, [("ring_full", 3), ("undecodable", 1)]);
        assert_eq!(row.events_by_source[0], ("uprobe", 7));
        assert_eq!(window.counts.uprobe_events, 0);
        assert!(row.end_ns >= row.start_ns && row.rss_bytes.is_some_and(|rss| rss > 0));
    }

    /// How many calls a gap held is not known: no number, but no clean bill either.
    #[test]
    fn a_gap_makes_a_window_lossy() {
        let mut window = Window::open(None);
        window.counts.gap = true;
        let row = window.close(&mut WallClock::new());
        assert_eq!(
            (row.lossy, row.lost_by_cause),
            (true, vec![("restart_gap", 0)])
        );
        assert!(!window.close(&mut WallClock::new()).lossy);
    }

    /// Rows without room make a window lossy, whatever their table.
    #[test]
    fn rows_without_room_are_told_by_table() {
        let mut window = Window::open(None);
        let dropped = BTreeMap::from([("spool_full", 5), ("spool_full_devices", 2)]);
        window.counts.drop_rows(&dropped);
        window.counts.drop_rows(&dropped);
        let row = window.close(&mut WallClock::new());
        assert_eq!(
            (row.lossy, row.lost_by_cause),
            (true, vec![("spool_full", 10), ("spool_full_devices", 4)])
        );
    }

    /// The ring is meant to overwrite: told, no loss. What it had no room for is one.
    #[test]
    fn what_the_recorder_overwrites_makes_no_window_lossy() {
        let mut window = Window::open(None);
        window
            .counts
            .drop_rows(&BTreeMap::from([("recorder_overwritten", 7)]));
        assert!(!window.counts.is_lossy());
        let row = window.close(&mut WallClock::new());
        assert_eq!(
            (row.lossy, row.lost_by_cause),
            (false, vec![("recorder_overwritten", 7)])
        );
        window
            .counts
            .drop_rows(&BTreeMap::from([("recorder_full", 1)]));
        assert!(window.close(&mut WallClock::new()).lossy);
    }

    #[test]
    fn a_window_of_the_future_is_not_turned_round() {
        let mut earlier = Window::open(None).counts;
        earlier.start_ns = i64::MAX;
        let row = Window::open(Some(earlier)).close(&mut WallClock::new());
        assert!(row.start_ns <= row.end_ns);
    }

    #[test]
    fn an_interrupted_window_goes_on() {
        let mut earlier = Window::open(None).counts;
        earlier.start_ns = 5;
        earlier.lost[Loss::RingFull as usize] = 2;
        let row = Window::open(Some(earlier)).close(&mut WallClock::new());
        assert_eq!(
            (row.start_ns, row.lost_by_cause),
            (5, vec![("ring_full", 2)])
        );
    }
}
