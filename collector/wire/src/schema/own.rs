//! Columns of the tables that a collector writes about its own work. Agents cannot send them.

use arrow::datatypes::DataType;

use super::{Column, optional, required, timestamp};

pub(super) fn query_log() -> Vec<Column> {
    use DataType::{Boolean, Int64, Utf8};
    vec![
        required("ts", timestamp(), "when the question came"),
        required(
            "query_id",
            Utf8,
            "the question's id, as the doors give it to the client",
        ),
        required("who", Utf8, "the caller's name"),
        required("door", Utf8, "how it came: flight, http or postgres"),
        required(
            "sql_hash",
            Utf8,
            "SHA-256 of the whole statement, the first 16 hexadecimal digits: the same text has the same hash",
        ),
        required(
            "sql",
            Utf8,
            "the statement, cut after 4,096 bytes; parameters are not in it",
        ),
        required("rows", Int64, "rows handed to the client"),
        optional(
            "bytes_scanned",
            Int64,
            "bytes read from the tables' files, by the plan's own counts; NULL if nothing ran",
        ),
        optional(
            "peak_memory_bytes",
            Int64,
            "most memory that the query had reserved at a time; NULL if nothing ran",
        ),
        required(
            "duration_ms",
            Int64,
            "from the question to its end, waiting in line included, milliseconds",
        ),
        required(
            "outcome",
            Utf8,
            "ok, error (also a limit that was met), cancelled (also a client that went away) or refused (not allowed, or no room)",
        ),
        optional(
            "error",
            Utf8,
            "what the client was told, cut after 1,024 bytes",
        ),
        optional(
            "lossy",
            Boolean,
            "whether windows were lossy in what the question reads; NULL if it is not known",
        ),
    ]
}
