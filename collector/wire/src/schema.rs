//! The tables: names, columns, types, units. This is the stable interface.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef, TimeUnit};

/// Version of all schemas together; raised when a column or a table is added. A collector
/// takes every version up to its own: what an older agent's rows lack is NULL.
///
/// 1: the first. 2: `stack_windows`, `device_windows`, `processes.pod_uid`, the memory kinds
/// `vmm_mapped` and `ipc`.
pub const SCHEMA_VERSION: u32 = 2;

/// One table of the data model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    /// One call that allocates, frees, reserves, maps, registers, or fails to; the other way
    /// round likewise.
    AllocEvents,
    /// One distinct call stack.
    Stacks,
    /// One state of one process lifetime; the last row by `ts_ns` is the current one.
    Processes,
    /// One sample of one card.
    Devices,
    /// Placement of one pinned host buffer, measured once after the call.
    HostBuffers,
    /// One window of one agent: what it saw and what it lost.
    AgentWindows,
    /// What one stack did in one window of one process: the roll-up that outlives raw events.
    StackWindows,
    /// What one process did on one device in one window, by kind of memory.
    DeviceWindows,
}

impl Table {
    /// Every table, in the order of the documentation.
    pub const ALL: [Table; 8] = [
        Table::AllocEvents,
        Table::Stacks,
        Table::Processes,
        Table::Devices,
        Table::HostBuffers,
        Table::AgentWindows,
        Table::StackWindows,
        Table::DeviceWindows,
    ];

    /// The table's name in SQL and on disk.
    pub const fn name(self) -> &'static str {
        match self {
            Table::AllocEvents => "alloc_events",
            Table::Stacks => "stacks",
            Table::Processes => "processes",
            Table::Devices => "devices",
            Table::HostBuffers => "host_buffers",
            Table::AgentWindows => "agent_windows",
            Table::StackWindows => "stack_windows",
            Table::DeviceWindows => "device_windows",
        }
    }

    /// The table of that name, if there is one.
    pub fn by_name(name: &str) -> Option<Table> {
        Table::ALL.into_iter().find(|t| t.name() == name)
    }

    /// Whether a lake partitions the table by `date` and `hour` of `ts`. Stacks have no time.
    pub const fn partitioned_by_time(self) -> bool {
        !matches!(self, Table::Stacks)
    }

    /// What a row is, for documentation and the prompt.
    pub const fn doc(self) -> &'static str {
        match self {
            Table::AllocEvents => {
                "one call that allocates, frees, reserves, releases, maps, unmaps, registers, unregisters, or fails to"
            }
            Table::Stacks => "one distinct call stack",
            Table::Processes => {
                "one state of one process lifetime; the last by ts_ns is the current one"
            }
            Table::Devices => "one sample of one card",
            Table::HostBuffers => {
                "placement of one pinned or registered host buffer, measured once after the call"
            }
            Table::AgentWindows => "one window of one agent: events seen and lost",
            Table::StackWindows => {
                "what one stack did in one window (default 60 s) of one process: the roll-up of counted rows, written for every stack that was active, when its process ends, and every 60th window for all that live"
            }
            Table::DeviceWindows => {
                "what one process did on one device in one window (default 60 s), by kind of memory: the roll-up of counted rows and of failures, written as stack_windows"
            }
        }
    }

    /// The columns with their documentation.
    pub fn columns(self) -> Vec<Column> {
        match self {
            Table::AllocEvents => alloc_events(),
            Table::Stacks => stacks(),
            Table::Processes => processes(),
            Table::Devices => devices(),
            Table::HostBuffers => host_buffers(),
            Table::AgentWindows => agent_windows(),
            Table::StackWindows => stack_windows(),
            Table::DeviceWindows => device_windows(),
        }
    }

    /// The Arrow schema that spool files, the write-ahead log and the lake share. (The lake
    /// adds the partition columns `date` and `hour` of its own.)
    pub fn schema(self) -> SchemaRef {
        let fields: Vec<Field> = self.columns().into_iter().map(|c| c.field).collect();
        Arc::new(Schema::new(fields))
    }
}

/// A column and what it means.
#[derive(Debug, Clone)]
pub struct Column {
    /// Name, type, nullability.
    pub field: Field,
    /// Meaning and unit, one line.
    pub doc: &'static str,
}

/// TIMESTAMP in microseconds UTC, the only timestamp type of the data model.
pub fn timestamp() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

/// Fields of one element of `stacks.frames`; leaf first.
pub fn frame_fields() -> Fields {
    Fields::from(vec![
        Field::new("kind", DataType::Utf8, false),
        Field::new("module", DataType::Utf8, true),
        Field::new("build_id", DataType::Utf8, true),
        Field::new("offset", DataType::Int64, true),
        Field::new("function", DataType::Utf8, true),
        Field::new("file", DataType::Utf8, true),
        Field::new("line", DataType::Int32, true),
    ])
}

/// Fields of one element of `processes.coverage`.
pub fn coverage_fields() -> Fields {
    Fields::from(vec![
        Field::new("library", DataType::Utf8, false),
        Field::new("symbol", DataType::Utf8, false),
        Field::new("attached", DataType::Boolean, false),
        Field::new("reason", DataType::Utf8, true),
    ])
}

/// Fields of one element of `devices.processes`.
pub fn device_process_fields() -> Fields {
    Fields::from(vec![
        Field::new("pid", DataType::Int32, false),
        Field::new("process_id", DataType::Int64, true),
        Field::new("used_bytes", DataType::Int64, true),
    ])
}

/// Fields of one element of `host_buffers.pages`. A NULL node means pages that were not
/// resident or could not be asked for.
pub fn node_pages_fields() -> Fields {
    Fields::from(vec![
        Field::new("node", DataType::Int32, true),
        Field::new("pages", DataType::Int64, false),
    ])
}

/// Fields of one element of a list of named counts.
pub fn count_fields(name: &str) -> Fields {
    Fields::from(vec![
        Field::new(name, DataType::Utf8, false),
        Field::new("count", DataType::Int64, false),
    ])
}

/// A list type as both Arrow and Delta spell it (`element`, as Parquet's own convention).
pub fn list_of(fields: Fields) -> DataType {
    DataType::List(Arc::new(Field::new(
        "element",
        DataType::Struct(fields),
        true,
    )))
}

fn required(name: &str, data_type: DataType, doc: &'static str) -> Column {
    Column {
        field: Field::new(name, data_type, false),
        doc,
    }
}

fn optional(name: &str, data_type: DataType, doc: &'static str) -> Column {
    Column {
        field: Field::new(name, data_type, true),
        doc,
    }
}

fn alloc_events() -> Vec<Column> {
    use DataType::{Boolean, Int32, Int64, Utf8};
    vec![
        required(
            "ts",
            timestamp(),
            "when the call took effect: what gives (alloc, reserve, map, register) at its return, what takes (free, release, unmap, unregister) at its entry",
        ),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        optional(
            "ts_enter",
            timestamp(),
            "when the call was entered; NULL on implicit rows",
        ),
        required("host", Utf8, "host name"),
        required("boot_id", Utf8, "the kernel's boot id"),
        required(
            "process_id",
            Int64,
            "one process lifetime (host, boot, pid, start time), hashed to 63 bits",
        ),
        required("pid", Int32, "process id in the host's namespace"),
        optional("tid", Int32, "thread that called; NULL on implicit rows"),
        optional(
            "gpu_uuid",
            Utf8,
            "the card, as NVML names it; NULL when the mapping from device to card is not certain",
        ),
        optional(
            "device",
            Int32,
            "device ordinal as the process sees it; on a free, the device that allocated; NULL if not certain",
        ),
        optional(
            "context",
            Int64,
            "CUDA context current at the call, if seen",
        ),
        optional("stream", Int64, "stream handle of stream-ordered calls"),
        optional(
            "pool",
            Int64,
            "memory pool handle; NULL on a slice whose call names no pool (the device's current pool)",
        ),
        required("layer", Utf8, "driver, runtime or framework"),
        required(
            "source",
            Utf8,
            "uprobe, usdt, cupti, import, agent (implicit rows), or nvml (baseline rows)",
        ),
        required(
            "api",
            Utf8,
            "function called, as exported; on implicit rows the reason: process_exit, process_exec, address_reuse, the call that ended the memory with others (cuCtxDestroy_v2, cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxRelease_v2, cuMemPoolDestroy, cuMemUnmap), or baseline",
        ),
        required(
            "op",
            Utf8,
            "what begins: alloc, reserve (addresses), map, register; what ends it: free, release, unmap, unregister; oom (an allocator's report)",
        ),
        optional(
            "memory_kind",
            Utf8,
            "physical: device, managed, array, vmm_physical; host: pinned_host, registered_host; virtual: vmm_virtual (reserved), vmm_mapped (mapped); sub-allocated: pool, framework_block; another process's: ipc. NULL on a baseline row and on a free of an unknown address. Bytes of two classes are never summed",
        ),
        optional(
            "address",
            Int64,
            "address given or taken, for vmm_physical the handle; NULL if the call failed to give one",
        ),
        optional(
            "bytes",
            Int64,
            "bytes the call gave or took, a pitched allocation's with its padding; 0 if it failed or only took or dropped a reference; NULL if not known (ipc, an imported handle, a free of an unknown address)",
        ),
        optional(
            "requested_bytes",
            Int64,
            "bytes asked for; of a pitched allocation without the padding",
        ),
        optional(
            "result",
            Int32,
            "result code of the call, 0 is success; NULL on implicit rows",
        ),
        optional("duration_ns", Int64, "time inside the call, nanoseconds"),
        optional(
            "stack_id",
            Int64,
            "stack of the outermost call of the chain; joins stacks",
        ),
        optional(
            "stack_quality",
            Utf8,
            "frame_pointer, truncated, unresolved, or none",
        ),
        required(
            "counted",
            Boolean,
            "true on the one row of a call chain that stands for its bytes, within the class of its memory_kind; never true for ipc, baseline, a reference, an imported handle, or an unknown address",
        ),
        optional(
            "parent_seq",
            Int64,
            "seq of the enclosing call's row, for a call made inside another traced call",
        ),
        required(
            "implicit",
            Boolean,
            "true for a free that no call asked for by name (see api), and for a baseline row: what a process older than the agent held on a card when first met",
        ),
        optional(
            "alloc_seq",
            Int64,
            "on a free: seq of the allocation it ends",
        ),
        optional(
            "alloc_stack_id",
            Int64,
            "on a free: stack of the allocation it ends",
        ),
        optional(
            "lifetime_ns",
            Int64,
            "on a free: how long the allocation lived, nanoseconds",
        ),
        required(
            "seq",
            Int64,
            "order in which calls took effect on this host since boot of the probes",
        ),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
    ]
}

fn stacks() -> Vec<Column> {
    use DataType::{Int64, Utf8};
    vec![
        required(
            "stack_id",
            Int64,
            "63-bit hash of the frame list; the same code gives the same id on every host",
        ),
        required(
            "frames",
            list_of(frame_fields()),
            "frames, innermost first: kind, module, build_id, offset in the file, function, file, line",
        ),
        required(
            "folded",
            Utf8,
            "function names, outermost first, joined by ';'",
        ),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
    ]
}

fn processes() -> Vec<Column> {
    use DataType::{Int32, Int64, Utf8};
    vec![
        required("ts", timestamp(), "when this row was written"),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        required("host", Utf8, "host name"),
        required("boot_id", Utf8, "the kernel's boot id"),
        required(
            "process_id",
            Int64,
            "one process lifetime, hashed to 63 bits",
        ),
        required("pid", Int32, "process id in the host's namespace"),
        optional("exe", Utf8, "path of the executable"),
        optional("command", Utf8, "command line, cut at 4096 bytes"),
        optional("started", timestamp(), "when the process started"),
        optional("ended", timestamp(), "when it ended; NULL while it lives"),
        optional("container_id", Utf8, "container, from the cgroup path"),
        optional("pod", Utf8, "Kubernetes pod"),
        optional("namespace", Utf8, "Kubernetes namespace"),
        required(
            "coverage",
            list_of(coverage_fields()),
            "symbols hooked in the libraries this process maps, and why not",
        ),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
        optional(
            "pod_uid",
            Utf8,
            "uid of the Kubernetes pod, from the cgroup path",
        ),
    ]
}

fn devices() -> Vec<Column> {
    use DataType::{Float64, Int32, Int64, Utf8};
    vec![
        required("ts", timestamp(), "when the sample was taken"),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        required("host", Utf8, "host name"),
        required("gpu_uuid", Utf8, "the card, as NVML names it"),
        required("device", Int32, "NVML index of the card"),
        optional("name", Utf8, "product name"),
        optional("total_bytes", Int64, "capacity"),
        optional("used_bytes", Int64, "in use, NVML"),
        optional("free_bytes", Int64, "free, NVML"),
        optional("reserved_bytes", Int64, "reserved by the driver, NVML"),
        optional("utilization", Float64, "share of time a kernel ran, 0..1"),
        optional(
            "numa_node",
            Int32,
            "NUMA node of the card; NULL when the platform does not say",
        ),
        optional("pci_bus_id", Utf8, "PCI address, as NVML spells it"),
        required(
            "processes",
            list_of(device_process_fields()),
            "processes on the card and their bytes, NVML",
        ),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
    ]
}

fn host_buffers() -> Vec<Column> {
    use DataType::{Boolean, Int32, Int64, Utf8};
    vec![
        required("ts", timestamp(), "when the placement was measured"),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        required("host", Utf8, "host name"),
        required(
            "process_id",
            Int64,
            "one process lifetime, hashed to 63 bits",
        ),
        required("pid", Int32, "process id in the host's namespace"),
        required("seq", Int64, "seq of the allocation's row in alloc_events"),
        required("address", Int64, "address of the buffer"),
        required("bytes", Int64, "size of the buffer"),
        required("memory_kind", Utf8, "pinned_host or registered_host"),
        required("page_bytes", Int64, "size of the pages that were asked for"),
        required(
            "sampled",
            Boolean,
            "true if one page per 2 MiB was asked for and the rest inferred",
        ),
        required(
            "pages",
            list_of(node_pages_fields()),
            "pages per NUMA node; NULL node: not resident or not known",
        ),
        optional(
            "gpu_uuid",
            Utf8,
            "the card that was current when the buffer was pinned",
        ),
        optional("device", Int32, "its ordinal as the process sees it"),
        optional(
            "gpu_node",
            Int32,
            "NUMA node of that card; NULL when the platform does not say",
        ),
        optional(
            "misplaced_bytes",
            Int64,
            "bytes on another node than the card's; NULL when the card's node or all pages are unknown",
        ),
        optional("stack_id", Int64, "stack that pinned it; joins stacks"),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
    ]
}

fn agent_windows() -> Vec<Column> {
    use DataType::{Boolean, Int64, Utf8};
    vec![
        required("ts", timestamp(), "end of the window"),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        required("host", Utf8, "host name"),
        required("window_start", timestamp(), "start of the window"),
        required("window_end", timestamp(), "end of the window"),
        required("events", Int64, "calls taken in the window"),
        required(
            "events_by_source",
            list_of(count_fields("source")),
            "the same by source",
        ),
        required(
            "lost",
            Int64,
            "calls lost in the window, or kept without their stack or end: the sum of lost_by_cause",
        ),
        required(
            "lost_by_cause",
            list_of(count_fields("cause")),
            "the same by cause: ring_full, threads_full, too_deep, missed_return, missed_entry, read_fault, undecodable (calls that never became rows), spool_full (rows not written), live_full (allocations not followed to their end), stacks_full (rows without their stack), restart_gap (nobody watched; how many is not known, 0 here)",
        ),
        required(
            "lossy",
            Boolean,
            "lost > 0, or nobody watched for a time (cause restart_gap)",
        ),
        optional(
            "cpu_ns",
            Int64,
            "processor time of the agent in the window, nanoseconds",
        ),
        optional(
            "rss_bytes",
            Int64,
            "resident memory of the agent at the end",
        ),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
        optional(
            "clock_step_ns",
            Int64,
            "how far the wall clock was set while the window was open, nanoseconds; NULL if it was not",
        ),
    ]
}

/// The columns that `stack_windows` and `device_windows` begin with.
fn window_key() -> Vec<Column> {
    use DataType::{Int32, Int64, Utf8};
    vec![
        required("ts", timestamp(), "start of the window"),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        required("window_end", timestamp(), "end of the window"),
        required("host", Utf8, "host name"),
        required("boot_id", Utf8, "the kernel's boot id"),
        required(
            "process_id",
            Int64,
            "one process lifetime, hashed to 63 bits",
        ),
        required("pid", Int32, "process id in the host's namespace"),
        optional(
            "gpu_uuid",
            Utf8,
            "the card, as NVML names it; NULL when not certain",
        ),
        optional(
            "device",
            Int32,
            "device ordinal as the process sees it; NULL when not certain",
        ),
        required("memory_kind", Utf8, "as in alloc_events"),
        required(
            "layer",
            Utf8,
            "layer of the counted rows: driver or runtime",
        ),
    ]
}

fn window_counts() -> Vec<Column> {
    use DataType::Int64;
    vec![
        required(
            "alloc_bytes",
            Int64,
            "bytes of what began in the window (counted rows)",
        ),
        required("alloc_count", Int64, "how many began in the window"),
        required(
            "free_bytes",
            Int64,
            "bytes of what ended in the window, charged to who allocated",
        ),
        required("free_count", Int64, "how many ended in the window"),
    ]
}

fn window_origin() -> Vec<Column> {
    use DataType::{Boolean, Int64, Utf8};
    vec![
        required(
            "lossy",
            Boolean,
            "the agent lost events in this window, or nobody watched for a time",
        ),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
    ]
}

fn stack_windows() -> Vec<Column> {
    use DataType::Int64;
    let own = vec![
        required(
            "live_bytes",
            Int64,
            "bytes of the stack that live at the end of the window",
        ),
        required("live_count", Int64, "how many live at the end"),
        optional(
            "oldest_live_age_ns",
            Int64,
            "age of the oldest that lives at the end, nanoseconds; NULL when nothing lives",
        ),
        required(
            "peak_live_bytes",
            Int64,
            "most live bytes of the stack at one moment of the window, over events",
        ),
    ];
    let stack = optional(
        "stack_id",
        Int64,
        "stack that allocated; joins stacks; NULL: no stack was taken",
    );
    [
        window_key(),
        vec![stack],
        window_counts(),
        own,
        window_origin(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn device_windows() -> Vec<Column> {
    use DataType::Int64;
    let own = vec![
        required(
            "failed_allocations",
            Int64,
            "calls that would have begun something and failed, one per call chain",
        ),
        required(
            "failed_frees",
            Int64,
            "calls that would have ended something and failed, one per call chain",
        ),
        required(
            "live_bytes",
            Int64,
            "bytes that live at the end of the window",
        ),
        required("live_count", Int64, "how many live at the end"),
        required(
            "peak_live_bytes",
            Int64,
            "most live bytes at one moment of the window, over events",
        ),
        required(
            "process_peak_bytes",
            Int64,
            "most live bytes at one moment since the process was met, over events",
        ),
        optional(
            "pool_reserved_bytes",
            Int64,
            "memory that pools of the device hold, as the program itself last read it (pool attribute 5); NULL when it never asked",
        ),
    ];
    [window_key(), window_counts(), own, window_origin()]
        .into_iter()
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Delta Lake has no unsigned integers and no nanosecond timestamps.
    #[test]
    fn types_are_those_delta_can_hold() {
        fn check(data_type: &DataType, path: &str) {
            match data_type {
                DataType::Boolean
                | DataType::Int32
                | DataType::Int64
                | DataType::Float64
                | DataType::Utf8 => {}
                DataType::Timestamp(TimeUnit::Microsecond, Some(tz)) if tz.as_ref() == "UTC" => {}
                DataType::List(element) => check(element.data_type(), path),
                DataType::Struct(fields) => fields.iter().for_each(|f| check(f.data_type(), path)),
                other => panic!("{path} has type {other}"),
            }
        }
        for table in Table::ALL {
            for column in table.columns() {
                check(
                    column.field.data_type(),
                    &format!("{}.{}", table.name(), column.field.name()),
                );
                assert!(!column.doc.is_empty());
            }
        }
    }

    #[test]
    fn names_lead_back_to_tables() {
        for table in Table::ALL {
            assert_eq!(Table::by_name(table.name()), Some(table));
        }
        assert_eq!(Table::by_name("nonesuch"), None);
    }
}
