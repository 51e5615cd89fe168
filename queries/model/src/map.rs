//! The address map of a framework's caching allocator: segments taken from the driver, and the
//! blocks and gaps that tile them.

mod build;
mod measures;

pub use build::{Built, MapProblem};
pub use measures::{MapMeasures, Measures, fragmentation_ratio, request_headroom_ratio};

/// What a block is at the moment of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// The program holds it.
    Allocated,
    /// The program gave it back, a stream may still use it. PyTorch spells it
    /// `active_awaiting_free` or `active_pending_free`.
    PendingFree,
    /// A gap: cached, free for the next request.
    Inactive,
}

impl BlockState {
    /// As the `segments` table spells it.
    pub const fn name(self) -> &'static str {
        match self {
            BlockState::Allocated => "active_allocated",
            BlockState::PendingFree => "active_pending_free",
            BlockState::Inactive => "inactive",
        }
    }
}

/// One block or gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    pub address: u64,
    /// After rounding.
    pub bytes: u64,
    /// As asked for; `None` for a gap, or where nobody knows.
    pub requested: Option<u64>,
    pub state: BlockState,
    /// Whatever the maker of the map wants to find the block's stack and time by.
    pub tag: Option<u64>,
}

impl Block {
    /// Free memory.
    pub const fn gap(address: u64, bytes: u64) -> Self {
        Self {
            address,
            bytes,
            requested: None,
            state: BlockState::Inactive,
            tag: None,
        }
    }

    /// The first address behind it.
    pub const fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes)
    }

    /// Whether a program or a stream uses it.
    pub fn is_active(&self) -> bool {
        self.state != BlockState::Inactive
    }
}

/// Which of the allocator's two sorts of pool a segment belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PoolSize {
    /// Requests up to 1 MiB.
    Small,
    Large,
}

impl PoolSize {
    /// As the `segments` table spells it.
    pub const fn name(self) -> &'static str {
        match self {
            PoolSize::Small => "small",
            PoolSize::Large => "large",
        }
    }
}

/// Blocks of two pools never serve each other's requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolKey {
    pub device: i32,
    /// `None`: the default pool; else a private pool's id (of a captured graph).
    pub private: Option<(u64, u64)>,
    pub size: PoolSize,
    /// The framework's id of the stream.
    pub stream: i64,
}

/// Memory taken from the driver; of an expandable segment one contiguous mapped range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    pub pool: PoolKey,
    pub address: u64,
    pub bytes: u64,
    pub expandable: bool,
    /// In order of address; they tile the segment.
    pub blocks: Vec<Block>,
    /// Whatever the maker of the map wants to find the segment's stack and time by.
    pub tag: Option<u64>,
}

impl Segment {
    /// The first address behind it.
    pub const fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes)
    }
}

/// All segments of one process at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AddressMap {
    pub segments: Vec<Segment>,
}
