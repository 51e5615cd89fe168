//! The rows of the tables as the agent makes them. Names, units and meaning are those of the
//! data model (`vramscope_wire::schema`).

use std::sync::Arc;

use crate::ledger::rollup::{DeviceSums, Place, Sums};

/// A row of `alloc_events`, without the columns that the file adds (host, boot, agent, batch).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllocRow {
    pub ts_ns: i64,
    pub ts_enter_ns: Option<i64>,
    pub process_id: i64,
    pub pid: u32,
    pub tid: Option<u32>,
    pub gpu_uuid: Option<Arc<str>>,
    pub device: Option<i32>,
    pub context: Option<i64>,
    pub stream: Option<i64>,
    pub pool: Option<i64>,
    pub layer: &'static str,
    pub source: &'static str,
    pub api: &'static str,
    pub op: &'static str,
    pub memory_kind: Option<&'static str>,
    pub address: Option<i64>,
    pub bytes: Option<i64>,
    pub requested_bytes: Option<i64>,
    pub result: Option<i32>,
    pub duration_ns: Option<i64>,
    pub stack_id: Option<i64>,
    pub stack_quality: Option<&'static str>,
    pub counted: bool,
    pub parent_seq: Option<i64>,
    pub implicit: bool,
    pub alloc_seq: Option<i64>,
    pub alloc_stack_id: Option<i64>,
    pub lifetime_ns: Option<i64>,
    pub seq: i64,
    pub segment_address: Option<i64>,
    pub allocator_allocated_bytes: Option<i64>,
    pub allocator_reserved_bytes: Option<i64>,
    pub device_free_bytes: Option<i64>,
}

/// What a frame is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FrameKind {
    #[default]
    Native,
    /// Native code that the compiler put into the function of the next native frame.
    Inlined,
    Python,
}

impl FrameKind {
    /// The value in the table.
    pub const fn name(self) -> &'static str {
        match self {
            FrameKind::Native => "native",
            FrameKind::Inlined => "inlined",
            FrameKind::Python => "python",
        }
    }
}

/// One frame of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FrameRow {
    pub kind: FrameKind,
    pub module: Option<String>,
    pub build_id: Option<String>,
    pub offset: Option<i64>,
    pub function: Option<String>,
    pub file: Option<String>,
    pub line: Option<i32>,
}

/// A row of `stacks`; frames innermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackRow {
    pub stack_id: i64,
    pub frames: Vec<FrameRow>,
    pub folded: String,
}

/// A row of `processes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessRow {
    pub ts_ns: i64,
    pub process_id: i64,
    pub pid: u32,
    pub exe: Option<String>,
    pub command: Option<String>,
    pub started_ns: Option<i64>,
    pub ended_ns: Option<i64>,
    pub container: crate::host::container::Container,
    pub coverage: Vec<crate::host::discovery::Coverage>,
    /// The framework whose allocator is traced, and its version.
    pub framework: Option<&'static str>,
    pub framework_version: Option<String>,
}

/// A row of `devices`.
#[derive(Debug, Clone)]
pub struct DeviceRow {
    pub sample: crate::host::gpu::Sample,
    /// Process lifetimes of the sample's processes, in its order.
    pub process_ids: Vec<Option<i64>>,
}

/// A row of `host_buffers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostBufferRow {
    pub ts_ns: i64,
    pub process_id: i64,
    pub pid: u32,
    pub seq: i64,
    pub address: i64,
    pub bytes: i64,
    pub memory_kind: &'static str,
    pub placement: crate::host::numa::Placement,
    pub gpu_uuid: Option<Arc<str>>,
    pub device: Option<i32>,
    pub gpu_node: Option<i32>,
    pub misplaced_bytes: Option<i64>,
    pub stack_id: Option<i64>,
}

/// A row of `agent_windows`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowRow {
    pub start_ns: i64,
    pub end_ns: i64,
    pub events_by_source: Vec<(&'static str, i64)>,
    pub lost_by_cause: Vec<(&'static str, i64)>,
    pub lossy: bool,
    /// How far the wall clock was set while the window was open; `None` if it was not.
    pub clock_step_ns: Option<i64>,
    pub cpu_ns: Option<i64>,
    pub rss_bytes: Option<i64>,
}

/// What rows of `stack_windows` and `device_windows` have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowOf {
    pub start_ns: i64,
    pub end_ns: i64,
    pub process_id: i64,
    pub pid: u32,
    pub gpu_uuid: Option<Arc<str>>,
    pub place: Place,
    pub lossy: bool,
}

/// A row of `stack_windows`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackWindowRow {
    pub of: WindowOf,
    pub stack_id: Option<i64>,
    pub sums: Sums,
    pub oldest_live_age_ns: Option<i64>,
}

/// A row of `device_windows`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceWindowRow {
    pub of: WindowOf,
    pub device: DeviceSums,
    pub pool_reserved_bytes: Option<i64>,
}

/// What rows of `allocator_samples` and `segments` have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleOf {
    pub ts_ns: i64,
    pub process_id: i64,
    pub pid: u32,
    pub gpu_uuid: Option<Arc<str>>,
    pub device: Option<i32>,
    pub framework: &'static str,
    pub source: &'static str,
    pub reason: &'static str,
    pub snapshot_id: i64,
}

/// A row of `allocator_samples`; what is not known is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatorSampleRow {
    pub of: SampleOf,
    pub allocated_bytes: Option<i64>,
    pub reserved_bytes: Option<i64>,
    pub active_bytes: Option<i64>,
    pub requested_bytes: Option<i64>,
    pub peak_allocated_bytes: Option<i64>,
    pub peak_reserved_bytes: Option<i64>,
    pub retries: Option<i64>,
    pub ooms: Option<i64>,
    pub largest_free_block_bytes: Option<i64>,
    pub releasable_bytes: Option<i64>,
    pub stranded_bytes: Option<i64>,
    pub segment_count: Option<i64>,
    pub block_count: Option<i64>,
    pub device_free_bytes: Option<i64>,
    pub tried_bytes: Option<i64>,
    pub lossy: bool,
    pub settings: Option<String>,
}

/// A row of `segments`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentRow {
    pub of: SampleOf,
    pub memory_kind: &'static str,
    pub pool: Option<String>,
    pub segment_type: Option<&'static str>,
    pub stream: Option<i64>,
    pub expandable: bool,
    pub address: i64,
    pub bytes: i64,
    pub allocated_bytes: i64,
    pub active_bytes: Option<i64>,
    pub requested_bytes: Option<i64>,
    pub largest_free_block_bytes: i64,
    pub releasable_bytes: i64,
    pub stranded_bytes: i64,
    pub stack_id: Option<i64>,
    pub allocated_ts_ns: Option<i64>,
    /// In order of address; they tile the segment.
    pub blocks: Vec<BlockRow>,
}

/// An element of `segments.blocks`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRow {
    pub address: i64,
    pub bytes: i64,
    pub requested_bytes: Option<i64>,
    pub state: &'static str,
    pub stack_id: Option<i64>,
    pub allocated_ts_ns: Option<i64>,
    pub alloc_seq: Option<i64>,
}

/// A row of `traffic`.
#[derive(Debug, Clone, PartialEq)]
pub struct TrafficRow {
    pub ts_ns: i64,
    pub process_id: Option<i64>,
    pub pid: Option<u32>,
    pub endpoint: String,
    pub load: crate::traffic::engines::Load,
}

/// Room for rows of `alloc_events` that is kept from flush to flush.
const KEPT: usize = 65_536;

/// Rows of all tables that wait to be written.
#[derive(Debug, Default)]
pub struct Rows {
    pub alloc_events: Vec<AllocRow>,
    /// Rows of `alloc_events` that stay on the host, in the flight recorder.
    pub framework_events: Vec<AllocRow>,
    pub stacks: Vec<StackRow>,
    pub processes: Vec<ProcessRow>,
    pub devices: Vec<DeviceRow>,
    pub host_buffers: Vec<HostBufferRow>,
    pub agent_windows: Vec<WindowRow>,
    pub stack_windows: Vec<StackWindowRow>,
    pub device_windows: Vec<DeviceWindowRow>,
    pub allocator_samples: Vec<AllocatorSampleRow>,
    pub segments: Vec<SegmentRow>,
    pub traffic: Vec<TrafficRow>,
}

impl Rows {
    /// Empties all tables. The memory of the large ones is kept for the next rows, as long as it is
    /// no more than a usual flush needs.
    pub fn clear(&mut self) {
        let kept = |rows: &mut Vec<AllocRow>| {
            let mut rows = std::mem::take(rows);
            rows.clear();
            rows.shrink_to(KEPT);
            rows
        };
        *self = Self {
            alloc_events: kept(&mut self.alloc_events),
            framework_events: kept(&mut self.framework_events),
            ..Self::default()
        };
    }

    pub fn is_empty(&self) -> bool {
        self.alloc_events.is_empty()
            && self.framework_events.is_empty()
            && self.stacks.is_empty()
            && self.processes.is_empty()
            && self.devices.is_empty()
            && self.host_buffers.is_empty()
            && self.agent_windows.is_empty()
            && self.stack_windows.is_empty()
            && self.device_windows.is_empty()
            && self.allocator_samples.is_empty()
            && self.segments.is_empty()
            && self.traffic.is_empty()
    }
}
