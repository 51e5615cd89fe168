//! Python frames: where a process's CPython keeps them, what the kernel side read of them at a call,
//! and how they come into the native stack.
//!
//! - [`detect`] finds the interpreter of a process and where it keeps things ([`layout`]), which the
//!   kernel side is told through [`table`];
//! - [`walks`] takes what the kernel side sends and gives each call its frames, with [`lines`] and
//!   [`strings`] decoding what CPython wrote;
//! - [`merge`] puts them in the place of the interpreter's own frames.
//!
//! Invariants: an unknown layout is refused and said aloud, never guessed; a name is shown only of
//! the very code object that ran (address and fingerprint); what could not be read is counted, and
//! the stack's quality says so.

pub mod btf;
pub mod detect;
pub mod elf;
pub mod layout;
pub mod lines;
mod memory;
pub mod merge;
pub mod strings;
pub mod table;
pub mod walks;

pub use detect::{Detector, Found};
pub use walks::{PythonFrame, Walks};

/// Whether a file of that path is an interpreter's library.
pub fn is_library(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.strip_prefix("libpython3")
        .is_some_and(|rest| rest.contains(".so"))
}
