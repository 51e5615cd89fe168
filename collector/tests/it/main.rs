//! The collector as its users meet it: the real binary, its gRPC and SQL doors, its folder on
//! disk. What was sent is remembered here and compared with what comes back.

mod access;
mod cli;
mod crash;
mod flight;
mod hostile;
mod http;
mod ingest;
mod postgres;
mod query;
mod requests;
mod support;
mod upkeep;
mod url;
mod versions;
