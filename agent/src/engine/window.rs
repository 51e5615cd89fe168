//! What the agent saw and lost since the last row of `agent_windows`.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vramscope_ebpf_abi::Loss;

use crate::host::clock;
use crate::spool::rows::WindowRow;

/// Losses by cause, as the kernel side counts them.
pub type Losses = [u64; Loss::COUNT as usize];

/// The counts of an open window. They are part of the journal: a killed agent forgets no loss.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Nanoseconds since 1970.
    pub start_ns: i64,
    pub uprobe_events: u64,
    pub agent_events: u64,
    pub lost: Losses,
    /// Records that could not be decoded.
    pub undecodable: u64,
    /// For a time nobody watched, and nobody knows how many calls that were.
    pub gap: bool,
    /// For a time the probes were switched off, and nobody knows how many calls that were.
    pub switched_off: bool,
}

impl Counts {
    /// Nothing yet, from now on.
    pub fn begin() -> Self {
        Self {
            start_ns: clock::realtime_ns() as i64,
            uprobe_events: 0,
            agent_events: 0,
            lost: [0; Loss::COUNT as usize],
            undecodable: 0,
            gap: false,
            switched_off: false,
        }
    }
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
        Self {
            started: Instant::now(),
            cpu_ns: clock::cpu_ns(),
            counts: earlier.unwrap_or_else(Counts::begin),
        }
    }

    pub fn is_over(&self, length: Duration) -> bool {
        self.started.elapsed() >= length
    }

    /// Closes the window; a new one begins.
    pub fn close(&mut self) -> WindowRow {
        let closed = std::mem::replace(self, Self::open(None));
        let counts = closed.counts;
        let mut lost_by_cause: Vec<(&'static str, i64)> = Loss::ALL
            .iter()
            .zip(counts.lost)
            .map(|(cause, count)| (cause.name(), count as i64))
            .collect();
        lost_by_cause.push(("undecodable", counts.undecodable as i64));
        lost_by_cause.retain(|(_, count)| *count > 0);
        if counts.gap {
            lost_by_cause.push(("restart_gap", 0));
        }
        if counts.switched_off {
            lost_by_cause.push(("switched_off", 0));
        }
        WindowRow {
            start_ns: counts.start_ns,
            end_ns: clock::realtime_ns() as i64,
            events_by_source: vec![
                ("uprobe", counts.uprobe_events as i64),
                ("agent", counts.agent_events as i64),
            ],
            lossy: !lost_by_cause.is_empty(),
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
        let row = window.close();
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
        let row = window.close();
        assert_eq!(
            (row.lossy, row.lost_by_cause),
            (true, vec![("restart_gap", 0)])
        );
        assert!(!window.close().lossy);
    }

    #[test]
    fn an_interrupted_window_goes_on() {
        let mut earlier = Window::open(None).counts;
        earlier.start_ns = 5;
        earlier.lost[Loss::RingFull as usize] = 2;
        let row = Window::open(Some(earlier)).close();
        assert_eq!(
            (row.start_ns, row.lost_by_cause),
            (5, vec![("ring_full", 2)])
        );
    }
}
