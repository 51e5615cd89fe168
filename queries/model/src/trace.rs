//! What a caching allocator did, event by event: replaying it to maps, and finding out what lived
//! before it began.

mod replay;
mod start;
#[cfg(test)]
mod tests;

pub use replay::{Replay, ReplayCounts, Totals};
pub use start::{Start, StartCounts};

/// One action. The names in brackets are those of PyTorch's memory snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// The program got a block (`alloc`).
    Alloc,
    /// The program gave one back (`free_requested`).
    FreeRequested,
    /// No stream uses it any more (`free_completed`).
    FreeCompleted,
    /// A segment was taken from the driver (`segment_alloc`).
    SegmentAlloc,
    /// … and given back (`segment_free`).
    SegmentFree,
    /// Memory was mapped into an expandable segment (`segment_map`).
    SegmentMap,
    /// … and unmapped (`segment_unmap`).
    SegmentUnmap,
    /// Somebody took a snapshot (`snapshot`).
    Snapshot,
    /// A request failed (`oom`).
    Oom {
        /// Free on the card at that moment, as the driver said.
        device_free: u64,
    },
}

/// One event of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    pub action: Action,
    pub device: i32,
    /// 0 where the action has none (snapshot, oom).
    pub address: u64,
    /// Of `Alloc` and `Oom` as asked for, before rounding; of segments as taken.
    pub bytes: u64,
    /// The framework's id of the stream.
    pub stream: i64,
    /// The private pool that serves it, where the trace says so; `None`: the default pool, or one
    /// that the trace does not name.
    pub private: Option<(u64, u64)>,
    pub time_ns: Option<i64>,
    /// Whatever the maker of the trace wants to find the event's stack by.
    pub tag: Option<u64>,
}
