//! Rows for tests of what carries rows.

use super::rows::*;
use crate::ledger::rollup::{DeviceSums, Place, Sums};

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
            segment_address: None,
            allocator_allocated_bytes: Some(512),
            allocator_reserved_bytes: None,
            device_free_bytes: None,
        }],
        framework_events: Vec::new(),
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
            framework: Some("pytorch"),
            framework_version: None,
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
        allocator_samples: vec![AllocatorSampleRow {
            of: sample_of(),
            allocated_bytes: Some(512),
            reserved_bytes: Some(2 << 20),
            active_bytes: None,
            requested_bytes: Some(500),
            peak_allocated_bytes: None,
            peak_reserved_bytes: None,
            retries: Some(0),
            ooms: Some(0),
            largest_free_block_bytes: None,
            releasable_bytes: None,
            stranded_bytes: None,
            segment_count: Some(1),
            block_count: Some(1),
            device_free_bytes: None,
            tried_bytes: None,
            lossy: false,
            settings: None,
        }],
        segments: vec![SegmentRow {
            of: sample_of(),
            memory_kind: "device",
            pool: Some("default".into()),
            segment_type: Some("small"),
            stream: Some(0),
            expandable: false,
            address: 0x20_0000,
            bytes: 1024,
            allocated_bytes: 512,
            active_bytes: None,
            requested_bytes: Some(500),
            largest_free_block_bytes: 512,
            releasable_bytes: 0,
            stranded_bytes: 512,
            stack_id: None,
            allocated_ts_ns: Some(1),
            blocks: vec![block(0, "active_allocated"), block(512, "inactive")],
        }],
        traffic: vec![TrafficRow {
            ts_ns: 1,
            process_id: None,
            pid: None,
            endpoint: "http://127.0.0.1:8000/metrics".into(),
            load: crate::traffic::engines::Load {
                engine: "vllm",
                running: Some(3),
                kv_usage_ratio: Some(0.5),
                ..Default::default()
            },
        }],
    }
}

fn block(offset: i64, state: &'static str) -> BlockRow {
    BlockRow {
        address: 0x20_0000 + offset,
        bytes: 512,
        requested_bytes: None,
        state,
        stack_id: None,
        allocated_ts_ns: None,
        alloc_seq: Some(9),
    }
}

fn sample_of() -> SampleOf {
    SampleOf {
        ts_ns: 1,
        process_id: 5,
        pid: 1,
        gpu_uuid: None,
        device: Some(0),
        framework: "pytorch",
        source: "usdt",
        reason: "window",
        snapshot_id: 4,
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
            layer: crate::probes::hooks::Layer::Driver,
        },
        lossy: false,
    }
}
