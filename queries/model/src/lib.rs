//! What the numbers mean: pure rules about memory, without input or output, so that agent, queries
//! and tests share one definition of each measure.
//!
//! Invariants:
//! - bytes are bytes; addresses are device addresses; times are nanoseconds;
//! - the blocks of a [`map::Segment`] tile it: in order of address, without hole or overlap;
//! - what is not known is `None`, never 0.

pub mod kv;
pub mod map;
pub mod oom;
pub mod rules;
pub mod settings;
pub mod simulator;
pub mod trace;
