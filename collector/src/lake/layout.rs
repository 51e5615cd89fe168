//! How the lake's files are laid out. The recipe lies where those find it who write the same files
//! without a collector: benchmarks.

pub use vramscope_wire::layout::*;
