//! The words that are known.

use crate::machine::Value;
use crate::tables::{Tables, Text};

/// The words of snapshots. Their texts come first in the tables, in this order.
macro_rules! keys {
    ($($key:ident = $name:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Key { $($key,)* }

        const KEYS: &[(Key, &str)] = &[$((Key::$key, $name),)*];
    };
}

keys! {
    Segments = "segments",
    DeviceTraces = "device_traces",
    HostSegments = "host_segments",
    HostTraces = "host_traces",
    AllocatorSettings = "allocator_settings",
    Action = "action",
    Addr = "addr",
    DeviceFree = "device_free",
    Size = "size",
    Stream = "stream",
    TimeUs = "time_us",
    PoolId = "pool_id",
    Frames = "frames",
    Name = "name",
    FileName = "filename",
    Line = "line",
    Device = "device",
    Address = "address",
    TotalSize = "total_size",
    SegmentType = "segment_type",
    SegmentPoolId = "segment_pool_id",
    IsExpandable = "is_expandable",
    Blocks = "blocks",
    RequestedSize = "requested_size",
    State = "state",
    History = "history",
    RealSize = "real_size",
    Alloc = "alloc",
    FreeRequested = "free_requested",
    FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc",
    SegmentFree = "segment_free",
    SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap",
    Snapshot = "snapshot",
    Oom = "oom",
    Annotate = "annotate",
    ActiveAllocated = "active_allocated",
    ActiveAwaitingFree = "active_awaiting_free",
    ActivePendingFree = "active_pending_free",
    Inactive = "inactive",
    Small = "small",
    Large = "large",
}

impl Key {
    #[inline]
    pub fn of(text: Text) -> Option<Key> {
        KEYS.get(text.0 as usize).map(|(key, _)| *key)
    }

    /// Whether a snapshot's dictionary has it and somebody reads it.
    pub const fn is_top_level(self) -> bool {
        matches!(
            self,
            Key::Segments
                | Key::DeviceTraces
                | Key::HostSegments
                | Key::HostTraces
                | Key::AllocatorSettings
        )
    }

    /// Puts the words into empty tables.
    pub fn intern_all(tables: &mut Tables) {
        for (_, name) in KEYS {
            tables.intern(name);
        }
    }
}

pub(super) fn key_of(value: Value) -> Option<Key> {
    match value {
        Value::Text(text) => Key::of(text),
        _ => None,
    }
}
