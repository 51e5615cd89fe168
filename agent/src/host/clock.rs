//! Clocks. The kernel side stamps CLOCK_MONOTONIC; rows carry CLOCK_REALTIME.

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

/// CLOCK_MONOTONIC, nanoseconds.
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// CLOCK_BOOTTIME, nanoseconds: the clock of process start times in `/proc`.
pub fn boottime_ns() -> u64 {
    read(libc::CLOCK_BOOTTIME)
}

/// Processor time of this process, nanoseconds.
pub fn cpu_ns() -> u64 {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Turns monotonic stamps into nanoseconds since 1970.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    offset: i64,
}

/// The wall clock is slewed and set while we run; below this we keep the old offset, so that
/// stamps of neighbouring events do not jitter against each other.
const TOLERANCE_NS: i64 = 1_000_000;

impl WallClock {
    pub fn new() -> Self {
        Self {
            offset: offset_now(),
        }
    }

    /// Follows the wall clock if it was set.
    pub fn refresh(&mut self) {
        let now = offset_now();
        if (now - self.offset).abs() > TOLERANCE_NS {
            self.offset = now;
        }
    }

    pub fn from_monotonic(&self, monotonic_ns: u64) -> i64 {
        monotonic_ns as i64 + self.offset
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::new()
    }
}

fn offset_now() -> i64 {
    realtime_ns() as i64 - monotonic_ns() as i64
}
