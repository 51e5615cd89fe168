//! Stand-ins for a GPU driver stack, for machines without a GPU.
//!
//! Three libraries carry the vendor's names and implement a documented part of the vendor's
//! public interfaces: `libcuda.so.1` (driver), `libcudart.so.13` (runtime, on top of the driver)
//! and `libnvidia-ml.so.1` (management). This crate is what they share:
//! - [`card`]: the host they pretend to be on;
//! - [`ledger`]: the books that each process writes of what was really allocated, which tests
//!   compare a tracer's numbers with;
//! - [`per_process`]: state that a fork does not share;
//! - [`ranges`]: who has which part of an address space;
//! - [`arrays`]: how many bytes an array has;
//! - [`install`]: puts the built libraries where a dynamic linker finds them.
//!
//! The crate knows nothing of the agent: its numbers must stay independent of what they check.

pub mod arrays;
pub mod card;
pub mod install;
pub mod ledger;
pub mod per_process;
pub mod process;
pub mod ranges;
