//! What the built stand-ins promise: how their functions begin, what their calls answer, and that
//! each scenario's ledgers hold the totals worked out by hand from what the scenario does.

mod copies;
mod driver;
mod lives;
mod nvml;
mod prologues;
mod scenarios;
mod situations;
mod support;
