//! Columns of what a serving engine says of its own load.

use arrow::datatypes::DataType;

use super::{Column, optional, required, timestamp};

pub(super) fn traffic() -> Vec<Column> {
    use DataType::{Float64, Int32, Int64, Utf8};
    vec![
        required("ts", timestamp(), "when the sample was taken"),
        required("ts_ns", Int64, "the same, nanoseconds since 1970"),
        required("host", Utf8, "host name"),
        required("boot_id", Utf8, "the kernel's boot id"),
        optional(
            "process_id",
            Int64,
            "one process lifetime, hashed to 63 bits; NULL when only the endpoint is known",
        ),
        optional("pid", Int32, "process id in the host's namespace"),
        optional("endpoint", Utf8, "where the figures were read"),
        required(
            "engine",
            Utf8,
            "which engine: vllm, sglang, triton, trtllm, tgi",
        ),
        optional("model", Utf8, "model name, as the engine gives it"),
        optional("running", Int64, "requests being served"),
        optional("waiting", Int64, "requests that wait"),
        optional("completed_total", Int64, "requests completed so far"),
        optional("prompt_tokens_total", Int64, "prompt tokens so far"),
        optional("generation_tokens_total", Int64, "generated tokens so far"),
        optional(
            "kv_usage_ratio",
            Float64,
            "share of the KV pool in use, 0..1",
        ),
        optional("kv_page_tokens", Int64, "tokens in one page of the KV pool"),
        optional("kv_total_pages", Int64, "pages of the KV pool"),
        optional("kv_used_pages", Int64, "pages that running requests hold"),
        optional(
            "kv_cached_pages",
            Int64,
            "pages that nobody holds and that still keep a prefix: soft-free",
        ),
        optional("kv_free_pages", Int64, "pages that are really free"),
        optional(
            "preemptions_total",
            Int64,
            "requests put back for want of pages, so far",
        ),
        optional("swapped_bytes", Int64, "KV bytes now on the host"),
        required("agent_id", Utf8, "agent that wrote the row"),
        required("batch_seq", Int64, "batch that carried the row"),
    ]
}
