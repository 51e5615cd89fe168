//! Columns of what things are: stacks, processes, cards.

use arrow::datatypes::DataType;

use super::{
    Column, coverage_fields, device_process_fields, frame_fields, list_of, optional, required,
    timestamp,
};

pub(super) fn stacks() -> Vec<Column> {
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
            "frames, innermost first: kind (native; inlined: put by the compiler into the function of the next native frame), module, build_id, offset in the file, function, file, line",
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

pub(super) fn processes() -> Vec<Column> {
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
        optional(
            "framework",
            Utf8,
            "the framework whose allocator is traced or imported: pytorch",
        ),
        optional(
            "framework_version",
            Utf8,
            "its version, where it can be read",
        ),
    ]
}

pub(super) fn devices() -> Vec<Column> {
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
