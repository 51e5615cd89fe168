//! `vramscope-agent` on the stand-ins; what it traced against the stand-ins' own ledgers.
//!
//! These tests load BPF programs: without root they say so and pass without testing.

mod chains;
mod clock;
mod containers;
mod daemon;
mod discovery;
mod engine;
mod framework;
mod kernel;
mod losses;
mod program;
mod python;
mod recorder;
mod safety;
mod serve;
mod ship;
mod spans;
mod standins;
mod symbols;
mod trace;
mod traffic;
mod vendor;
