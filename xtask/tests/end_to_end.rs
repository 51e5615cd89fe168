//! The whole path on the stand-ins: workload → probes → agent → collector → SQL, compared with
//! the ledger that the stand-in driver kept by itself.
//!
//! Needs root (BPF) and what `cargo xtask build` builds; without either it is skipped aloud.
//! Run it with `cargo xtask test -p xtask --test end_to_end`.

mod bench;
mod crash;
mod faults;
mod gpu_check;
mod kills;
mod leaks;
mod scenarios;
mod torch;
mod upgrade;
