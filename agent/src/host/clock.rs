//! Clocks. The kernel side stamps CLOCK_MONOTONIC; rows carry CLOCK_REALTIME.
//!
//! What a stepped wall clock (an operator, NTP, a suspended host) may and may not do:
//! - order is `seq`, durations and lifetimes are differences of monotonic stamps: no step touches
//!   them;
//! - a stamp is converted with the offset that held when it was taken, also if it is looked at
//!   after the step, because [`WallClock`] remembers the last offsets;
//! - a step ends the open window, so that every window has one clock, starts before it ends, and
//!   says how far the clock was set.

use std::collections::VecDeque;
use std::sync::OnceLock;

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the buffer is valid; both clocks exist on every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds since 1970.
pub fn realtime_ns() -> u64 {
    read(libc::CLOCK_REALTIME)
}

/// CLOCK_MONOTONIC as BPF programs see it, nanoseconds.
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC).wrapping_add_signed(-namespace_offset())
}

/// CLOCK_BOOTTIME, nanoseconds: the clock of process start times in `/proc`, which shifts them
/// into the reader's time namespace.
pub fn boottime_ns() -> u64 {
    read(libc::CLOCK_BOOTTIME)
}

/// Processor time of this process, nanoseconds.
pub fn cpu_ns() -> u64 {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// What our time namespace adds to the monotonic clock. BPF programs know no namespaces.
fn namespace_offset() -> i64 {
    static OFFSET: OnceLock<i64> = OnceLock::new();
    *OFFSET.get_or_init(|| {
        // Kernels before 5.6 have neither the file nor such namespaces.
        let text = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        parse_offset(&text, "monotonic").unwrap_or(0)
    })
}

/// Lines `CLOCK SECONDS NANOSECONDS`.
fn parse_offset(text: &str, clock: &str) -> Option<i64> {
    text.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        if fields.next()? != clock {
            return None;
        }
        let seconds: i64 = fields.next()?.parse().ok()?;
        let nanos: i64 = fields.next()?.parse().ok()?;
        seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
    })
}

/// The three clocks at one moment, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    pub monotonic: u64,
    pub realtime: u64,
    pub boottime: u64,
}

/// Reads the clocks as close to one moment as can be: another thread's turn between two reads
/// would look like a step.
pub fn read_all() -> Reading {
    let attempt = || {
        let before = monotonic_ns();
        let (realtime, boottime) = (realtime_ns(), boottime_ns());
        let after = monotonic_ns();
        let reading = Reading {
            monotonic: before + (after - before) / 2,
            realtime,
            boottime,
        };
        (after - before, reading)
    };
    let mut best = attempt();
    // A few hundred nanoseconds when undisturbed.
    for _ in 0..8 {
        if best.0 < 10_000 {
            break;
        }
        best = std::cmp::min_by_key(best, attempt(), |(width, _)| *width);
    }
    best.1
}

/// The wall clock was set, or stood still while the host was suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Positive: forward.
    pub ns: i64,
    /// The part of it that the host spent suspended.
    pub suspended_ns: i64,
}

/// From a monotonic moment on, what has to be added for the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Offset {
    since: u64,
    ns: i64,
}

/// Turns monotonic stamps into nanoseconds since 1970.
#[derive(Debug, Clone)]
pub struct WallClock {
    source: fn() -> Reading,
    /// Oldest first, never empty.
    offsets: VecDeque<Offset>,
    suspended_ns: i64,
    /// Of the last reading; with it and the offset in force the end of a window is told.
    last_monotonic: u64,
    step: Option<Step>,
}

/// The wall clock is slewed while we run; below this we keep the old offset, so that stamps of
/// neighbouring events do not jitter against each other.
const TOLERANCE_NS: i64 = 1_000_000;
/// What the kernel slews at most, and adjtime besides, is no step: 0.1 % of the time that passed,
/// and what a busy machine makes of one reading.
const STEP_NS: i64 = 20_000_000;
/// Offsets that are remembered. More steps than that within the life of one waiting event are
/// somebody's test.
const REMEMBERED: usize = 64;

impl WallClock {
    pub fn new() -> Self {
        Self::with_source(read_all)
    }

    /// With clocks of the caller's own.
    pub fn with_source(source: fn() -> Reading) -> Self {
        let now = source();
        Self {
            source,
            offsets: VecDeque::from([Offset {
                since: 0,
                ns: offset(now),
            }]),
            suspended_ns: suspended(now),
            last_monotonic: now.monotonic,
            step: None,
        }
    }

    /// Follows the wall clock. To be called often: a step is known to lie between two calls, and
    /// stamps in between are taken for later ones. True if it was stepped.
    pub fn refresh(&mut self) -> bool {
        let now = (self.source)();
        let moved = offset(now) - self.current();
        let elapsed = now.monotonic.saturating_sub(self.last_monotonic);
        let suspended_ns = suspended(now) - self.suspended_ns;
        self.suspended_ns = suspended(now);
        let since = self.last_monotonic;
        self.last_monotonic = self.last_monotonic.max(now.monotonic);
        if moved.abs() <= TOLERANCE_NS {
            return false;
        }
        let is_step = moved.abs() > STEP_NS.saturating_add((elapsed / 1000) as i64);
        self.offsets.push_back(Offset {
            since,
            ns: offset(now),
        });
        if self.offsets.len() > REMEMBERED {
            self.offsets.pop_front();
        }
        if is_step {
            let earlier = self.step.unwrap_or(Step {
                ns: 0,
                suspended_ns: 0,
            });
            self.step = Some(Step {
                ns: earlier.ns + moved,
                suspended_ns: earlier.suspended_ns + suspended_ns,
            });
        }
        is_step
    }

    /// The step since this was last asked.
    pub fn take_step(&mut self) -> Option<Step> {
        self.step.take()
    }

    /// Never before 1970, which no table can hold: a host whose clock battery is dead.
    pub fn from_monotonic(&self, monotonic_ns: u64) -> i64 {
        // Nearly always the last one.
        let valid = self
            .offsets
            .iter()
            .rev()
            .find(|offset| offset.since < monotonic_ns);
        let ns = valid.or(self.offsets.front()).map_or(0, |offset| offset.ns);
        (monotonic_ns as i64).saturating_add(ns).max(0)
    }

    /// Now, by the offset in force.
    pub fn now_ns(&self) -> i64 {
        self.from_monotonic((self.source)().monotonic)
    }

    /// When a window ends that is closed now: if the clock was stepped since the window's start,
    /// by the clock it started with, just before the step.
    pub fn window_end_ns(&self) -> i64 {
        let steps = self.step.is_some();
        match self.offsets.back() {
            Some(last) if steps => self.from_monotonic(last.since),
            _ => self.now_ns(),
        }
    }

    fn current(&self) -> i64 {
        self.offsets.back().map_or(0, |offset| offset.ns)
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::new()
    }
}

fn offset(reading: Reading) -> i64 {
    reading.realtime as i64 - reading.monotonic as i64
}

fn suspended(reading: Reading) -> i64 {
    reading.boottime as i64 - reading.monotonic as i64
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000_000;

    thread_local! {
        static NOW: Cell<Reading> = const { Cell::new(Reading { monotonic: 0, realtime: 0, boottime: 0 }) };
    }

    fn injected() -> Reading {
        NOW.get()
    }

    /// Time goes by.
    fn pass(ns: u64) {
        let mut now = NOW.get();
        now.monotonic += ns;
        now.realtime += ns;
        now.boottime += ns;
        NOW.set(now);
    }

    /// Somebody sets the clock.
    fn set_clock(by: i64) {
        let mut now = NOW.get();
        now.realtime = now.realtime.wrapping_add_signed(by);
        NOW.set(now);
    }

    fn clock_at(realtime: u64) -> WallClock {
        NOW.set(Reading {
            monotonic: 100 * S,
            realtime,
            boottime: 100 * S,
        });
        WallClock::with_source(injected)
    }

    #[test]
    fn a_stamp_keeps_the_clock_it_was_taken_by() {
        let mut clock = clock_at(10_000 * S);
        pass(S);
        let before_the_step = NOW.get().monotonic;
        assert!(!clock.refresh());
        pass(S);
        set_clock(-3600 * S as i64);
        assert!(clock.refresh());
        pass(S);
        let after = NOW.get().monotonic;
        assert_eq!(clock.from_monotonic(before_the_step), 10_001 * S as i64);
        assert_eq!(
            clock.from_monotonic(after),
            (10_003 - 3600) * S as i64,
            "by the new clock"
        );
        assert_eq!(
            clock.take_step(),
            Some(Step {
                ns: -3600 * S as i64,
                suspended_ns: 0
            })
        );
        assert_eq!(clock.take_step(), None);
    }

    #[test]
    fn a_suspended_host_is_a_step_and_told_apart() {
        let mut clock = clock_at(1000 * S);
        let mut now = NOW.get();
        now.realtime += 7200 * S;
        now.boottime += 7200 * S;
        NOW.set(now);
        assert!(clock.refresh());
        let step = clock.take_step().unwrap();
        assert_eq!(
            (step.ns, step.suspended_ns),
            (7200 * S as i64, 7200 * S as i64)
        );
    }

    /// 500 ppm for an hour is 1.8 s: followed, and no step.
    #[test]
    fn slewing_is_followed_and_is_no_step() {
        let mut clock = clock_at(1000 * S);
        for _ in 0..3600 {
            pass(S);
            set_clock(500_000);
            assert!(!clock.refresh());
        }
        assert_eq!(clock.take_step(), None);
        let now = NOW.get();
        let error = clock.from_monotonic(now.monotonic) - now.realtime as i64;
        assert!(error.abs() <= 1_000_000, "{error}");
    }

    #[test]
    fn a_window_ends_before_the_step_by_the_old_clock() {
        let mut clock = clock_at(10_000 * S);
        pass(10 * S);
        clock.refresh();
        pass(1000);
        set_clock(-3600 * S as i64);
        clock.refresh();
        assert_eq!(clock.window_end_ns(), 10_010 * S as i64);
        clock.take_step();
        assert_eq!(clock.window_end_ns(), clock.now_ns());
        assert_eq!(clock.now_ns(), (6410 * S) as i64 + 1000);
    }

    proptest! {
        /// Whatever is done to the clock: what was taken within one pair of looks at it is
        /// converted in order, and nothing is off after the next look.
        #[test]
        fn no_stamp_is_stale_after_a_look(
            acts in prop::collection::vec((0..5 * S, prop::option::of(-100_000 * S as i64..100_000 * S as i64)), 1..40)
        ) {
            let mut clock = clock_at(1_700_000_000 * S);
            for (ns, set) in acts {
                pass(ns);
                if let Some(by) = set {
                    set_clock(by);
                }
                clock.refresh();
                pass(1);
                let now = NOW.get();
                let error = clock.from_monotonic(now.monotonic) - now.realtime as i64;
                prop_assert!(error.abs() <= TOLERANCE_NS, "off by {}", error);
                prop_assert!(clock.from_monotonic(now.monotonic + 1) > clock.from_monotonic(now.monotonic));
                prop_assert!(clock.offsets.len() <= REMEMBERED);
            }
        }
    }

    #[test]
    fn namespaces_are_read_as_the_kernel_writes_them() {
        let text = "monotonic           86400         5\nboottime            -7         0\n";
        assert_eq!(parse_offset(text, "monotonic"), Some(86_400_000_000_005));
        assert_eq!(parse_offset(text, "boottime"), Some(-7_000_000_000));
        assert_eq!(parse_offset("", "monotonic"), None);
    }

    #[test]
    fn the_real_clocks_agree() {
        let clock = WallClock::new();
        let error = clock.from_monotonic(monotonic_ns()) - realtime_ns() as i64;
        // A loaded machine may take its time between the two.
        assert!(error.abs() < 10_000_000_000, "{error}");
    }
}
