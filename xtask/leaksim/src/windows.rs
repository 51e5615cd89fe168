//! From a stack's live bytes to what an agent would have written: allocations and frees whose
//! difference is the change, counts, peak, age of the oldest.
//!
//! Invariant: at every row, the live bytes (and the count) are the sum of allocations less the sum of
//! frees since the process started; what is allocated or freed has a count.

use crate::Window;
use crate::leak::Leaked;
use crate::levels::Sample;

/// Allocators hand out multiples of this.
const ROUNDING: f64 = 512.0;

/// One stack of one process.
pub(crate) struct Books {
    block: i64,
    /// Live bytes and blocks but for what leaked.
    base: i64,
    base_count: i64,
    leaked: i64,
    leaked_count: i64,
    oldest: f64,
    row: Row,
}

#[derive(Default)]
struct Row {
    alloc_bytes: i64,
    alloc_count: i64,
    free_bytes: i64,
    free_count: i64,
    peak: i64,
}

fn rounded(bytes: f64) -> i64 {
    ((bytes / ROUNDING).round() * ROUNDING) as i64
}

fn blocks(bytes: i64, block: i64) -> i64 {
    (bytes + block - 1) / block
}

impl Books {
    pub(crate) fn new(block: f64) -> Self {
        Self {
            block: rounded(block).max(ROUNDING as i64),
            base: 0,
            base_count: 0,
            leaked: 0,
            leaked_count: 0,
            oldest: 0.0,
            row: Row::default(),
        }
    }

    /// What happened in a tick that ended at `clock`.
    pub(crate) fn tick(&mut self, sample: &Sample, leaked: &Leaked, clock: f64) {
        let base = rounded(sample.bytes);
        let count = blocks(base, self.block);
        let churn = rounded(sample.churn);
        self.allocate(churn, blocks(churn, self.block));
        self.free(churn, blocks(churn, self.block));
        let (more, more_blocks) = (base - self.base, count - self.base_count);
        // A change within a block is one block less and another more.
        let within = (more != 0 && more_blocks == 0) as i64;
        let swapped = within * self.block.min(base).min(self.base);
        self.allocate(more.max(0) + swapped, more_blocks.max(0) + within);
        self.free((-more).max(0) + swapped, (-more_blocks).max(0) + within);
        (self.base, self.base_count) = (base, count);

        let total = leaked.bytes.round() as i64;
        self.allocate(total - self.leaked, leaked.count as i64 - self.leaked_count);
        (self.leaked, self.leaked_count) = (total, leaked.count as i64);

        let peak = rounded(sample.peak).max(base) + self.leaked;
        self.row.peak = self.row.peak.max(peak);
        let leak_age = leaked.since.map_or(0.0, |since| clock - since);
        self.oldest = sample.oldest.max(leak_age);
    }

    /// The process ends, and everything with it.
    pub(crate) fn end_all(&mut self) {
        self.free(self.live(), self.live_count());
        (self.base, self.base_count, self.leaked, self.leaked_count) = (0, 0, 0, 0);
    }

    /// Closes the window. A row only if something happened, or `always` and something lives.
    pub(crate) fn close(
        &mut self,
        process: usize,
        stack: usize,
        start: f64,
        always: bool,
    ) -> Option<Window> {
        let next = Row {
            peak: self.live(),
            ..Row::default()
        };
        let row = std::mem::replace(&mut self.row, next);
        let idle = row.alloc_count + row.free_count == 0;
        if idle && !(always && self.live_count() > 0) {
            return None;
        }
        Some(Window {
            process,
            stack,
            start,
            alloc_bytes: row.alloc_bytes,
            alloc_count: row.alloc_count,
            free_bytes: row.free_bytes,
            free_count: row.free_count,
            live_bytes: self.live(),
            live_count: self.live_count(),
            oldest_live_age: (self.live_count() > 0).then_some(self.oldest),
            peak_live_bytes: row.peak,
        })
    }

    fn live(&self) -> i64 {
        self.base + self.leaked
    }

    fn live_count(&self) -> i64 {
        self.base_count + self.leaked_count
    }

    fn allocate(&mut self, bytes: i64, count: i64) {
        self.row.alloc_bytes += bytes;
        self.row.alloc_count += count;
    }

    fn free(&mut self, bytes: i64, count: i64) {
        self.row.free_bytes += bytes;
        self.row.free_count += count;
    }
}
