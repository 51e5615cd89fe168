//! The project's own tasks, as a library: `main.rs` is the command line over it, and the
//! end-to-end test drives the same machinery as the demo.

pub mod children;
pub mod commands;
pub mod compare;
pub mod progress;
pub mod project;
pub mod system;
pub mod table;
pub mod torch;
