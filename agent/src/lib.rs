//! The agent: one per GPU host. It finds processes that use CUDA, probes their allocation calls,
//! keeps the books, and ships what it saw to a collector.
//!
//! One event's way through the modules: [`probes`] → [`ledger`] → [`stacks`] → [`spool`] →
//! [`ship`]; [`host`] answers questions about processes and cards on the way; [`engine`] is the
//! loop that moves events along.

pub mod host;
pub mod ledger;
pub mod probes;
pub mod spool;
