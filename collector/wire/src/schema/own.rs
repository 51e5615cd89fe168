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

pub(super) fn batches() -> Vec<Column> {
    use DataType::{Int64, Utf8};
    vec![
        required(
            "ts",
            timestamp(),
            "when the collector took the batch; it was acknowledged as soon as it was durable",
        ),
        required("agent_id", Utf8, "agent that sent it"),
        required(
            "batch_seq",
            Int64,
            "its number in the agent's line; with agent_id the batch's name for ever",
        ),
        optional(
            "host",
            Utf8,
            "the agent's host, as the batch said; NULL if it came before the collector kept it",
        ),
        required("table_name", Utf8, "table that its rows are in"),
        required("rows", Int64, "rows of the batch"),
        required(
            "bytes",
            Int64,
            "size of the batch as it came, a Parquet file",
        ),
        required(
            "crc32",
            Int64,
            "CRC-32 of those bytes; a resend under the same name has the same",
        ),
        optional(
            "ts_min",
            timestamp(),
            "earliest ts of its rows; NULL if they have none",
        ),
        optional(
            "ts_max",
            timestamp(),
            "latest ts of its rows; NULL if they have none",
        ),
        required(
            "misdated_rows",
            Int64,
            "rows whose ts was further from the collector's clock than it allows (by default 24 hours ahead, 31 days behind): they keep their ts and lie in the partition (date, hour) of the batch's arrival",
        ),
        required(
            "promise",
            Utf8,
            "what the acknowledgement stood for: fsync (on the collector's disk) or store (in the table, on its storage)",
        ),
        required("collector", Utf8, "the collector's own id"),
    ]
}
