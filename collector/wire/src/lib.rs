//! What agents and collectors agree on: the protocol, the tables' Arrow schemas, and how a
//! spool file names itself. Whoever changes something here changes both sides.
//!
//! Invariants:
//! - columns are only ever appended, and appended columns are nullable;
//! - types are those Delta Lake can hold: no unsigned integers, timestamps in microseconds UTC;
//! - a column that cannot be known is NULL.

pub mod layout;
pub mod parquet_file;
pub mod schema;

/// The generated gRPC types of `proto/ingest.proto`.
pub mod proto {
    #![allow(missing_docs, clippy::all)]
    tonic::include_proto!("vramscope.v1");
}

pub use schema::{SCHEMA_VERSION, Table};

/// The largest spool file an agent may send in one message, in bytes. Both sides set their
/// gRPC message limit to this plus [`MESSAGE_OVERHEAD`].
pub const MAX_BATCH_BYTES: usize = 32 << 20;

/// Room for the other fields of a `Batch`, in bytes.
pub const MESSAGE_OVERHEAD: usize = 64 << 10;
