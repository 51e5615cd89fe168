//! The tables: names, columns, types, units. This is the stable interface.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef, TimeUnit};

/// Version of all schemas together; raised when a column is appended.
pub const SCHEMA_VERSION: u32 = 1;

/// One table of the data model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    /// One call that allocates, frees, registers, unregisters, or fails to.
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
}

impl Table {
    /// Every table, in the order of the documentation.
    pub const ALL: [Table; 6] = [
        Table::AllocEvents,
        Table::Stacks,
        Table::Processes,
        Table::Devices,
        Table::HostBuffers,
        Table::AgentWindows,
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
                "one call that allocates, frees, registers, unregisters, or fails to"
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
            "when the call took effect: an allocation at its return, a free at its entry",
        ),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        optional(
            "ts_enter",
            timestamp(),
            "when the call was entered; NULL for implicit frees",
        ),
        required("host", Utf8, "host name"),
        required("boot_id", Utf8, "the kernel's boot id"),
        required(
            "process_id",
            Int64,
            "one process lifetime (host, boot, pid, start time), hashed to 63 bits",
        ),
        required("pid", Int32, "process id in the host's namespace"),
        optional("tid", Int32, "thread that called; NULL for implicit frees"),
        optional(
            "gpu_uuid",
            Utf8,
            "the card, as NVML names it; NULL when the mapping from device to card is not certain",
        ),
        optional(
            "device",
            Int32,
            "device ordinal as the process sees it; on a free, the device that allocated",
        ),
        optional(
            "context",
            Int64,
            "CUDA context current at the call, if seen",
        ),
        optional("stream", Int64, "stream handle of stream-ordered calls"),
        optional("pool", Int64, "memory pool handle"),
        required("layer", Utf8, "driver, runtime or framework"),
        required(
            "source",
            Utf8,
            "uprobe, usdt, cupti, import, or agent (implicit frees)",
        ),
        required(
            "api",
            Utf8,
            "function called, as exported; process_exit for implicit frees at exit",
        ),
        required(
            "op",
            Utf8,
            "alloc, free, map, unmap, reserve, release, register, unregister, oom",
        ),
        optional(
            "memory_kind",
            Utf8,
            "device, managed, pinned_host, registered_host, vmm_physical, vmm_virtual, pool, array, framework_block; NULL on a free of an unknown address",
        ),
        optional(
            "address",
            Int64,
            "address given or taken; NULL if the call failed to give one",
        ),
        optional(
            "bytes",
            Int64,
            "bytes the call gave or took; 0 if it failed; NULL if not known",
        ),
        optional("requested_bytes", Int64, "bytes asked for"),
        optional(
            "result",
            Int32,
            "result code of the call, 0 is success; NULL for implicit frees",
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
            "true on the one row of a call chain that stands for its physical bytes",
        ),
        optional(
            "parent_seq",
            Int64,
            "seq of the enclosing call's row, for a call made inside another traced call",
        ),
        required(
            "implicit",
            Boolean,
            "true for a free that no call asked for (process exit)",
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
        required("lost", Int64, "calls lost in the window"),
        required(
            "lost_by_cause",
            list_of(count_fields("cause")),
            "the same by cause",
        ),
        required(
            "lossy",
            Boolean,
            "lost > 0, or nobody watched for a time (cause restart_gap, whose count is not known and 0 here)",
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
    ]
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
