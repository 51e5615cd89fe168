//! Columns of what happens: calls, and what was measured right after one.

use arrow::datatypes::DataType;

use super::{Column, list_of, node_pages_fields, optional, required, timestamp};

pub(super) fn alloc_events() -> Vec<Column> {
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
        optional(
            "stream",
            Int64,
            "stream handle of stream-ordered calls; of a framework block the framework's own id of the stream",
        ),
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
            "function called, as exported; on implicit rows the reason: process_exit, process_exec, address_reuse, the call that ended the memory with others (cuCtxDestroy_v2, cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxRelease_v2, cuMemPoolDestroy, cuMemUnmap), or baseline; of an import the trace's action (alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom)",
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
            "full (up to the thread's first function, by the rules that compilers write), frame_pointer (callers that keep no frame pointer may be missing), truncated (outer callers are missing), unresolved (no frame lies in known code), or none; with +python behind it where Python frames are in the stack, and -python where there are some that could not be read",
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
        optional(
            "segment_address",
            Int64,
            "first address of the segment that a framework block lies in; NULL if not known",
        ),
        optional(
            "allocator_allocated_bytes",
            Int64,
            "what the framework's allocator itself counted as allocated on the device after the call",
        ),
        optional(
            "allocator_reserved_bytes",
            Int64,
            "what it counted as reserved",
        ),
        optional(
            "device_free_bytes",
            Int64,
            "at an OOM: free on the card, as the report says",
        ),
    ]
}

pub(super) fn host_buffers() -> Vec<Column> {
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
