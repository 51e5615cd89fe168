//! The doors: how SQL clients come in. Each speaks one protocol, finds out who calls, and asks the
//! [gate](crate::query::Gate) for everything else.

pub mod flight;
pub mod http;
pub mod postgres;
