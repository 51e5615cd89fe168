//! The crate's one integration-test binary.
//!
//! The answers of the views are pinned by `sql/NAME.slt`, run over one seeded data set
//! ([`seed`]) as a trace and as a lake. Every expectation there is calculated by hand from the
//! seed's table of events.

mod bad_input;
mod booked;
mod cli;
mod commands;
mod docs;
mod folder;
mod framework_rows;
mod functions;
mod import;
mod leaks;
mod limits;
mod remote;
mod seed;
mod slt;
#[path = "../../snapshot/tests/it/writer.rs"]
mod writer;
