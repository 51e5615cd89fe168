//! Stand-ins for a GPU driver stack, for machines without a GPU.
//!
//! Four libraries carry the vendor's names and implement a documented part of the vendor's public
//! interfaces: `libcuda.so.1` (driver), `libcudart.so.13` (runtime, on top of the driver),
//! `libnvidia-ml.so.1` (management) and `libcupti.so.13` (profiling). This crate is for who uses them:
//! - [`install`]: puts the built libraries where a dynamic linker finds them;
//! - [`ledger`], [`card`], [`process`]: what their processes really allocated, and the host they
//!   pretend to be on;
//! - [`pythons`]: interpreters to trace.

pub mod install;
pub mod pythons;

pub use vramscope_fake_host::{card, ledger, process};
