//! What a snapshot holds, as it is handed out.
//!
//! Names and numbers are PyTorch's. What an older PyTorch did not write is `None`.

use vramscope_model::map::{
    Block as MapBlock, BlockState, PoolKey, PoolSize, Segment as MapSegment,
};
use vramscope_model::trace::{Action as TraceAction, TraceEvent};

use crate::tables::{StackId, Text};

/// Size of PyTorch's segments for small requests, for snapshots that do not name the pool.
const SMALL_SEGMENT: u64 = 2 << 20;

/// Device number that the model's types carry for host memory, which belongs to no device.
pub const HOST: i32 = -1;

/// Whose memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Memory {
    /// Of the device with that index.
    Device(i32),
    /// Pinned host memory (`host_segments`, `host_traces`).
    Host,
}

impl Memory {
    /// As the model's types number devices.
    pub const fn device(self) -> i32 {
        match self {
            Memory::Device(device) => device,
            Memory::Host => HOST,
        }
    }
}

/// One thing read.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// A segment of the final address map.
    Segment(Segment),
    /// An entry of a trace; those of one memory come in order of time.
    Event(Event),
}

/// Memory taken from the driver, with its blocks in order of address: they tile it.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    pub memory: Memory,
    pub address: u64,
    /// `total_size`.
    pub bytes: u64,
    pub stream: i64,
    /// `segment_type`.
    pub size: Option<PoolSize>,
    /// `segment_pool_id`; `None` for the default pool `(0, 0)` and where none is given.
    pub private_pool: Option<(u64, u64)>,
    /// `is_expandable`.
    pub expandable: bool,
    /// Who took it.
    pub stack: Option<StackId>,
    pub blocks: Vec<Block>,
}

/// A block or a gap.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    pub address: u64,
    pub bytes: u64,
    /// `requested_size`; `None` for a gap.
    pub requested: Option<u64>,
    pub state: BlockState,
    pub stack: Option<StackId>,
}

impl Segment {
    /// As the model has it; a tag is the stack's number.
    pub fn to_map(&self) -> MapSegment {
        let tag = |stack: Option<StackId>| stack.map(|stack| u64::from(stack.0));
        MapSegment {
            pool: PoolKey {
                device: self.memory.device(),
                private: self.private_pool,
                size: self.size.unwrap_or(if self.bytes > SMALL_SEGMENT {
                    PoolSize::Large
                } else {
                    PoolSize::Small
                }),
                stream: self.stream,
            },
            address: self.address,
            bytes: self.bytes,
            expandable: self.expandable,
            blocks: self
                .blocks
                .iter()
                .map(|block| MapBlock {
                    address: block.address,
                    bytes: block.bytes,
                    requested: block.requested,
                    state: block.state,
                    tag: tag(block.stack),
                })
                .collect(),
            tag: tag(self.stack),
        }
    }
}

/// What an allocator did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    /// Somebody took a snapshot.
    Snapshot,
    Oom,
    /// Text was put on a live block.
    Annotate,
    /// One that this reader does not know.
    Other(Text),
}

impl Action {
    /// PyTorch's name; `None` for one that is not known.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::Oom => "oom",
            Action::Annotate => "annotate",
            Action::Other(_) => return None,
        })
    }
}

/// An entry of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Event {
    pub memory: Memory,
    pub action: Action,
    /// `addr`; `None` of an OOM, and where a rare action has none.
    pub address: Option<u64>,
    /// `size`: of `alloc` and `oom` as asked for, of segments as taken; 0 where a rare action has
    /// none.
    pub bytes: u64,
    pub stream: i64,
    /// Microseconds since 1970.
    pub time_us: Option<i64>,
    /// `pool_id`, as [`Segment::private_pool`].
    pub private_pool: Option<(u64, u64)>,
    /// `device_free` of an OOM: what the driver still had.
    pub device_free: Option<u64>,
    pub stack: Option<StackId>,
}

impl Event {
    /// As the model has it; a tag is the stack's number. `None` for what changes nothing and is
    /// no OOM (`annotate`, unknown actions).
    pub fn to_trace(&self) -> Option<TraceEvent> {
        let action = match self.action {
            Action::Alloc => TraceAction::Alloc,
            Action::FreeRequested => TraceAction::FreeRequested,
            Action::FreeCompleted => TraceAction::FreeCompleted,
            Action::SegmentAlloc => TraceAction::SegmentAlloc,
            Action::SegmentFree => TraceAction::SegmentFree,
            Action::SegmentMap => TraceAction::SegmentMap,
            Action::SegmentUnmap => TraceAction::SegmentUnmap,
            Action::Snapshot => TraceAction::Snapshot,
            Action::Oom => TraceAction::Oom {
                device_free: self.device_free.unwrap_or(0),
            },
            Action::Annotate | Action::Other(_) => return None,
        };
        Some(TraceEvent {
            action,
            device: self.memory.device(),
            address: self.address.unwrap_or(0),
            bytes: self.bytes,
            stream: self.stream,
            private: self.private_pool,
            time_ns: self.time_us.and_then(|time| time.checked_mul(1000)),
            tag: self.stack.map(|stack| u64::from(stack.0)),
        })
    }
}

/// What is known once the file is read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outline {
    /// The allocator's settings as `PYTORCH_CUDA_ALLOC_CONF` spells them; empty if all were left
    /// at their defaults, `None` where the snapshot does not say.
    pub settings: Option<String>,
    /// How many traces of devices there are; PyTorch writes one for each device, also an empty one.
    pub device_traces: usize,
    /// Top-level keys that were not looked at.
    pub skipped_keys: Vec<String>,
}
