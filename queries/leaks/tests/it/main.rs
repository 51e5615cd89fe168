//! The detectors on hosts made up here, and the regression against one written another way.
//!
//! Large trials on simulated hosts are `cargo xtask bench leaks`; these are small, fixed and fast.

mod host;
mod naive;
mod regression;
mod verdicts;
