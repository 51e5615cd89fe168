//! One file per command of `cargo xtask`.

pub mod bench;
pub mod build;
pub mod demo;
pub mod ebpf;
pub mod gpu_check;
pub mod mutants;
pub mod one_copy;
pub mod setup;
pub mod test;
pub mod torch;
