//! Agents by the thousand, and the proof of what a collector promises them.
//!
//! Everything here is outside of the collector: it starts the real program, talks to it as agents
//! do (gRPC, `vramscope-wire`) and asks it in SQL (Flight SQL). It knows the documented protocol
//! and that tables are Delta tables, and nothing of how the collector keeps its promises.
//!
//! Invariants:
//! - what was sent and what was acknowledged stands in a [`model::Model`] of our own, and every
//!   judgement compares the tables with it;
//! - only processes that were started here are ended, by their ids.

pub mod crash;
pub mod fleet;
pub mod ingest;

mod agent;
mod collector;
mod content;
mod disk;
mod faults;
mod latency;
mod listing;
mod load;
mod model;
mod prepared;
mod proxy;
mod sql;
mod tally;

/// Random numbers from a seed: xorshift64*, by Vigna.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Zero would stay zero.
    pub fn new(seed: u64) -> Self {
        Random(seed.max(1))
    }

    /// At least 0, below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) % limit.max(1)
    }

    /// Once in `many` times.
    pub fn once_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    /// Another stream of numbers, for whoever runs beside.
    pub fn split(&mut self) -> Random {
        let (high, low) = (self.below(1 << 32), self.below(1 << 32));
        Random::new(high << 32 | low)
    }

    /// Puts items into another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// Tells whoever started us how far we are: a line of its own on standard error.
fn progress(position: u64, total: u64, message: &str) {
    eprintln!("progress {position} {total} {message}");
}
