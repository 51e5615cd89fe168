//! Which call stacks leak: statistics over roll-ups, pure and without I/O.
//!
//! A process lifetime comes in as sums over slots of ten minutes ([`Process`]): what its serving
//! engine said of its load, and what each call stack held. [`analyse`] goes through the recording as
//! a live run would have, and says of every stack whether it leaks, how much per request and per
//! hour, how sure that is, and what would have been too small to see.
//!
//! - [`growth`]: detector (a), growth with requests or time that no other explanation takes away;
//!   [`design`]: the regressions under it; [`rapid`]: the quick look for very large leaks;
//! - [`quiet`]: detector (b), the difference between moments at rest;
//! - [`peaks`]: detector (c), what peaks of the load leave behind;
//! - [`report`]: tiers, bounds and reasons;
//! - [`gather`]: slots from the rows of roll-ups, as the product's SQL makes them.
//!
//! Bytes are bytes; a rate is per completed request or per hour. `docs/leaks.md` names the source of
//! each rule and constant.

pub mod design;
pub mod gather;
pub mod growth;
mod onset;
pub mod peaks;
pub mod quiet;
pub mod rapid;
pub mod report;
pub mod series;
pub mod settings;
pub mod stats;

pub use report::{Detector, Evaluation, Rate, Report, Tier, Verdict, analyse};
pub use series::{LoadSlot, Process, StackSlot};
pub use settings::{Settings, SettingsError};
