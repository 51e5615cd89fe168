//! Rows on their way out: as typed rows, as Parquet files, and the journal that makes the agent's
//! state and its files one transaction.

pub mod folder;
pub mod journal;
pub mod requeue;
pub mod room;
pub mod rows;
#[cfg(test)]
pub mod samples;
pub mod tables;
