//! The collector: takes agents' batches, keeps the lake, answers SQL.
//!
//! A batch's way: [`ingest`] checks it and makes it durable in the write-ahead log, and only
//! then acknowledges it; [`lake`] merges logged batches of many agents and commits them to
//! Delta tables; [`doors`] let SQL clients in, [`access`] says who they are, and [`query`] answers
//! SQL over what is committed; [`metrics`] tells how all that goes; [`requests`] asks agents for what they keep to themselves.
//!
//! Invariants:
//! - acknowledged means on disk and fsynced, counted once however often it is sent;
//! - one process writes a data folder ([`folder::Lock`]);
//! - every door listens on loopback only, and the SQL door cannot write.

pub mod access;
pub mod config;
pub mod doors;
pub mod executor;
pub mod folder;
pub mod ingest;
pub mod lake;
pub mod metrics;
pub mod query;
pub mod requests;
pub mod serve;
pub mod status;
