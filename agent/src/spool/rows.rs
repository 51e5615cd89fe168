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
}

/// One frame of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FrameRow {
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

/// Room for rows of `alloc_events` that is kept from flush to flush.
const KEPT: usize = 65_536;

/// Rows of all tables that wait to be written.
#[derive(Debug, Default)]
pub struct Rows {
    pub alloc_events: Vec<AllocRow>,
    pub stacks: Vec<StackRow>,
    pub processes: Vec<ProcessRow>,
    pub devices: Vec<DeviceRow>,
    pub host_buffers: Vec<HostBufferRow>,
    pub agent_windows: Vec<WindowRow>,
    pub stack_windows: Vec<StackWindowRow>,
    pub device_windows: Vec<DeviceWindowRow>,
}

impl Rows {
    /// Empties all tables. The memory of the large one is kept for the next rows, as long as it is
    /// no more than a usual flush needs.
    pub fn clear(&mut self) {
        let mut alloc_events = std::mem::take(&mut self.alloc_events);
        alloc_events.clear();
        alloc_events.shrink_to(KEPT);
        *self = Self {
            alloc_events,
            ..Self::default()
        };
    }

    pub fn is_empty(&self) -> bool {
        self.alloc_events.is_empty()
            && self.stacks.is_empty()
            && self.processes.is_empty()
            && self.devices.is_empty()
            && self.host_buffers.is_empty()
            && self.agent_windows.is_empty()
            && self.stack_windows.is_empty()
            && self.device_windows.is_empty()
    }
}

#[cfg(test)]
pub mod samples {
    //! Rows for tests of what carries rows.

    use super::*;

    pub fn one_of_each() -> Rows {
        let card = crate::host::gpu::Card {
            index: 0,
            uuid: "GPU-0".into(),
            name: Some("card".into()),
            pci_bus_id: None,
            numa_node: Some(0),
        };
        Rows {
            alloc_events: vec![AllocRow {
                ts_ns: 1_700_000_000_123_456_789,
                ts_enter_ns: None,
                process_id: 5,
                pid: 1,
                tid: Some(2),
                gpu_uuid: None,
                device: Some(0),
                context: None,
                stream: None,
                pool: Some(6),
                layer: "driver",
                source: "uprobe",
                api: "cuMemAlloc_v2",
                op: "alloc",
                memory_kind: Some("device"),
                address: Some(0x1000),
                bytes: Some(512),
                requested_bytes: Some(512),
                result: Some(0),
                duration_ns: Some(10),
                stack_id: Some(3),
                stack_quality: Some("frame_pointer"),
                counted: true,
                parent_seq: None,
                implicit: false,
                alloc_seq: None,
                alloc_stack_id: None,
                lifetime_ns: None,
                seq: 9,
            }],
            stacks: vec![StackRow {
                stack_id: 3,
                frames: vec![
                    FrameRow {
                        function: Some("f".into()),
                        ..FrameRow::default()
                    },
                    FrameRow::default(),
                ],
                folded: "f".into(),
            }],
            processes: vec![ProcessRow {
                ts_ns: 1,
                process_id: 5,
                pid: 1,
                exe: Some("/bin/x".into()),
                command: None,
                started_ns: Some(1),
                ended_ns: None,
                container: crate::host::container::Container {
                    id: Some("c".into()),
                    pod_uid: None,
                    pod: Some("p".into()),
                    namespace: None,
                },
                coverage: vec![crate::host::discovery::Coverage {
                    library: "libcuda.so.1".into(),
                    symbol: "cuMemAlloc_v2",
                    refused: Some("why".into()),
                }],
            }],
            devices: vec![DeviceRow {
                sample: crate::host::gpu::Sample {
                    at_ns: 1,
                    card,
                    total: Some(10),
                    used: None,
                    free: Some(1),
                    reserved: Some(0),
                    utilization: Some(0.5),
                    processes: vec![(1, Some(4)), (2, None)],
                },
                process_ids: vec![Some(5), None],
            }],
            host_buffers: vec![HostBufferRow {
                ts_ns: 1,
                process_id: 5,
                pid: 1,
                seq: 9,
                address: 4096,
                bytes: 8192,
                memory_kind: "pinned_host",
                placement: crate::host::numa::Placement {
                    page_bytes: 4096,
                    sampled: false,
                    pages: [(Some(0), 1), (None, 1)].into(),
                },
                gpu_uuid: None,
                device: None,
                gpu_node: None,
                misplaced_bytes: None,
                stack_id: None,
            }],
            agent_windows: vec![WindowRow {
                start_ns: 1,
                end_ns: 2,
                events_by_source: vec![("uprobe", 4)],
                lost_by_cause: vec![("ring_full", 1)],
                lossy: true,
                clock_step_ns: None,
                cpu_ns: Some(1),
                rss_bytes: None,
            }],
            stack_windows: vec![StackWindowRow {
                of: window_of(),
                stack_id: None,
                sums: Sums::default(),
                oldest_live_age_ns: Some(7),
            }],
            device_windows: vec![DeviceWindowRow {
                of: window_of(),
                device: DeviceSums::default(),
                pool_reserved_bytes: None,
            }],
        }
    }

    fn window_of() -> WindowOf {
        WindowOf {
            start_ns: 1,
            end_ns: 2,
            process_id: 5,
            pid: 1,
            gpu_uuid: None,
            place: Place {
                device: None,
                kind: crate::probes::hooks::MemoryKind::Pool,
                is_driver: true,
            },
            lossy: false,
        }
    }
}
