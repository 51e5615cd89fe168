//! The collector as its users meet it: the real binary, its gRPC and SQL doors, its folder on
//! disk. What was sent is remembered here and compared with what comes back.

mod access;
mod cli;
mod crash;
mod engine;
mod flight;
mod hostile;
mod http;
mod ingest;
mod memory;
mod postgres;
mod put_off;
mod query;
mod query_log;
mod requests;
mod s3;
#[allow(dead_code, unused_imports)] // Its other users are the tests of the queries.
#[path = "../../../queries/tests/it/seed/mod.rs"]
mod seed;
mod shared;
mod support;
mod upkeep;
mod url;
mod versions;
