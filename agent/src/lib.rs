//! The agent: one per GPU host. It finds processes that use CUDA, probes their allocation calls,
//! keeps the books, and ships what it saw to a collector.
//!
//! One event's way through the modules: [`probes`] → [`ledger`] → [`stacks`] → [`spool`] →
//! [`ship`]; [`python`] reads the frames of
//! interpreters; [`host`] answers questions about processes and cards on the way, [`engine`] is the
//! loop that moves events along, and [`output`] is where a flush becomes durable. Raw framework
//! events wait in the [`recorder`] until something asks for them; [`traffic`] asks
//! serving engines for their load. [`serve`] and [`trace`] are the two ways to run it.

pub mod config;
pub mod dump;
pub mod engine;
pub mod host;
pub mod inspect;
pub mod ledger;
pub mod output;
pub mod probes;
pub mod python;
pub mod recorder;
pub mod serve;
pub mod ship;
pub mod spool;
pub mod stacks;
pub mod status;
pub mod summary;
pub mod trace;
pub mod traffic;

/// Maps that every event looks into: a hash of a few nanoseconds, seeded, in place of the standard
/// library's of twenty.
pub type Map<K, V> = std::collections::HashMap<K, V, foldhash::fast::RandomState>;
