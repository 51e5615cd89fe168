//! Where calls come from: the hook table, the BPF programs and their attachment, the ring, and
//! the order in which calls took effect.

mod attach;
pub mod bpf;
pub mod channel;
pub mod copies;
mod detach;
pub mod features;
pub mod framework;
pub mod hooks;
#[cfg(test)]
mod kernel_tests;
pub(crate) mod multi;
pub mod operands;
pub mod order;
pub mod places;
pub mod preflight;
pub mod record;
pub mod ring;
pub mod samefile;
pub mod site;

pub use record::{Event, TracedCall};
