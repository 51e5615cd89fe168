//! Columns of roll-ups: what happened between two moments.

use arrow::datatypes::DataType;

use super::{Column, count_fields, list_of, optional, required, timestamp};

pub(super) fn agent_windows() -> Vec<Column> {
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
            "the same by cause: ring_full, threads_full, too_deep, missed_return, missed_entry, read_fault, undecodable (calls that never became rows), spool_full (rows not written), live_full (allocations not followed to their end), stacks_full (rows without their stack), restart_gap (nobody watched; how many is not known, 0 here), recorder_full (raw framework rows that found no room on the host); recorder_overwritten and recorder_off (raw framework rows that were let go as configured) are no loss, nor are stack_not_copied (stacks that go by frame pointers since they could not be copied) and python_not_read (stacks without their Python frames): they are not in lost and make no window lossy",
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
            "layer of the counted rows: driver, runtime or framework",
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

pub(super) fn stack_windows() -> Vec<Column> {
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

pub(super) fn device_windows() -> Vec<Column> {
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
