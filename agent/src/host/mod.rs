//! What the host tells: processes, libraries, cards, NUMA nodes, clocks, and who we are.

pub mod bpffs;
pub mod clock;
pub mod container;
pub mod discovery;
pub mod gpu;
pub mod identity;
pub mod library;
pub mod numa;
pub mod perf;
pub mod procfs;
pub mod realfile;
pub mod redact;
pub mod safety;
pub mod sigbus;
pub mod switch;
pub mod usdt;
pub mod watch;
