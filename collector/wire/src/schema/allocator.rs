//! Columns of what a framework's caching allocator holds: totals, and the address map.

use arrow::datatypes::DataType;

use super::{Column, block_fields, list_of, optional, required, timestamp};

/// Who and when, the same in both tables.
fn sample_key() -> Vec<Column> {
    use DataType::{Int32, Int64, Utf8};
    vec![
        required("ts", timestamp(), "when the sample was taken"),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        required("host", Utf8, "host name; of an import the file's name"),
        required("boot_id", Utf8, "the kernel's boot id; of an import empty"),
        required(
            "process_id",
            Int64,
            "one process lifetime, hashed to 63 bits; of an import a hash of the file's content",
        ),
        required(
            "pid",
            Int32,
            "process id in the host's namespace; of an import 0",
        ),
        optional(
            "gpu_uuid",
            Utf8,
            "the card, as NVML names it; NULL when not certain",
        ),
        optional(
            "device",
            Int32,
            "device ordinal as the process sees it; NULL for host memory",
        ),
        required("framework", Utf8, "whose allocator: pytorch"),
        required("source", Utf8, "usdt (traced) or import"),
        required(
            "reason",
            Utf8,
            "why the sample was taken: window, oom, request, end (of the process), import",
        ),
        required(
            "snapshot_id",
            Int64,
            "rows of one moment share it: the sample's and its segments'; 63-bit hash",
        ),
    ]
}

fn origin() -> Vec<Column> {
    use DataType::{Int64, Utf8};
    vec![
        required("agent_id", Utf8, "agent or import that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
    ]
}

pub(super) fn allocator_samples() -> Vec<Column> {
    use DataType::{Boolean, Int64, Utf8};
    let own = vec![
        optional(
            "allocated_bytes",
            Int64,
            "bytes of blocks that the program holds, after rounding",
        ),
        optional("reserved_bytes", Int64, "bytes of all segments"),
        optional(
            "active_bytes",
            Int64,
            "allocated_bytes and what is freed but still in use on a stream",
        ),
        optional(
            "requested_bytes",
            Int64,
            "bytes asked for by the blocks that the program holds, before rounding",
        ),
        optional(
            "peak_allocated_bytes",
            Int64,
            "most allocated_bytes so far, over events; of an import over the trace",
        ),
        optional(
            "peak_reserved_bytes",
            Int64,
            "most reserved_bytes so far, over events; of an import over the trace",
        ),
        optional(
            "retries",
            Int64,
            "how often the allocator had to give back its cached segments to get a new one, so far",
        ),
        optional("ooms", Int64, "out-of-memory errors so far"),
        optional(
            "largest_free_block_bytes",
            Int64,
            "the largest cached free block of any pool and stream",
        ),
        optional(
            "releasable_bytes",
            Int64,
            "bytes that the allocator could give back to the driver: fully inactive segments, of expandable segments whole chunks",
        ),
        optional(
            "stranded_bytes",
            Int64,
            "inactive bytes that it could not: reserved - active - releasable",
        ),
        optional("segment_count", Int64, "segments"),
        optional("block_count", Int64, "blocks that the program holds"),
        optional(
            "device_free_bytes",
            Int64,
            "free on the card at that moment, as the driver or NVML said",
        ),
        optional("tried_bytes", Int64, "at an OOM: bytes that were asked for"),
        required(
            "lossy",
            Boolean,
            "events of this process were lost before the sample, so that its totals may be off",
        ),
        optional(
            "settings",
            Utf8,
            "the allocator's settings (PYTORCH_CUDA_ALLOC_CONF or as a snapshot records them); NULL if not known",
        ),
    ];
    [sample_key(), own, origin()]
        .into_iter()
        .flatten()
        .collect()
}

pub(super) fn segments() -> Vec<Column> {
    use DataType::{Boolean, Int64, Utf8};
    let own = vec![
        required(
            "memory_kind",
            Utf8,
            "device, vmm_physical (expandable segments), or pinned_host",
        ),
        optional(
            "pool",
            Utf8,
            "default, or a private pool's id as the framework names it, such as (0, 1)",
        ),
        optional(
            "segment_type",
            Utf8,
            "small (requests up to 1 MiB) or large",
        ),
        optional(
            "stream",
            Int64,
            "the framework's id of the stream it belongs to",
        ),
        required("expandable", Boolean, "part of an expandable segment"),
        required("address", Int64, "first address"),
        required(
            "bytes",
            Int64,
            "size; of an expandable segment one row per contiguous mapped range",
        ),
        required("allocated_bytes", Int64, "in blocks that the program holds"),
        optional(
            "active_bytes",
            Int64,
            "allocated_bytes and what is freed but still in use on a stream",
        ),
        optional(
            "requested_bytes",
            Int64,
            "asked for by the blocks that the program holds",
        ),
        required(
            "largest_free_block_bytes",
            Int64,
            "the largest free block in it; 0 if none",
        ),
        required(
            "releasable_bytes",
            Int64,
            "could be given back to the driver: all of it if nothing in it is active, of an expandable segment whole chunks",
        ),
        required("stranded_bytes", Int64, "inactive and not releasable"),
        optional(
            "stack_id",
            Int64,
            "stack that took the segment from the driver; joins stacks",
        ),
        optional(
            "allocated_ts_ns",
            Int64,
            "when it was taken, nanoseconds since 1970",
        ),
        required(
            "blocks",
            list_of(block_fields()),
            "blocks in order of address; they tile the segment: address, bytes, requested_bytes, state (active_allocated, active_pending_free, inactive), stack_id, allocated_ts_ns, alloc_seq",
        ),
    ];
    [sample_key(), own, origin()]
        .into_iter()
        .flatten()
        .collect()
}
