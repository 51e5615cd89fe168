//! What the stand-in libraries share:
//! - [`card`]: the host they pretend to be on;
//! - [`ledger`]: the books that each process writes of what was really allocated, which tests
//!   compare a tracer's numbers with;
//! - [`per_process`]: state that a fork does not share;
//! - [`process`]: which process lifetime this is;
//! - [`ranges`]: who has which part of an address space;
//! - [`arrays`]: how many bytes an array has.
//!
//! A package of its own, so that it can be built with optimisation while the workloads, whose stacks
//! are looked at, are not; and so that the libraries need none of what their programs need.
//!
//! The crate knows nothing of the agent: its numbers must stay independent of what they check.

pub mod arrays;
pub mod card;
pub mod ledger;
pub mod per_process;
pub mod process;
pub mod ranges;
