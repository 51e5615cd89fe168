//! `vramscope-agent trace` on the stand-ins, against the stand-ins' own ledgers.
//!
//! These tests load BPF programs: without root they say so and pass without testing.

mod standins;
mod trace;
