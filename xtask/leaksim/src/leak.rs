//! Planted leaks: bytes that are allocated at one stack and never freed while the process lives.

use rand::RngExt;
use rand_distr::{Binomial, Distribution};
use rand_pcg::Pcg64Mcg;
use serde::{Deserialize, Serialize};

use crate::draw::{log_uniform, normal, poisson};
use crate::serving::{Load, TICK};

/// What makes a leak grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Every request, or a fixed share of them, leaves something, from the start.
    Request,
    /// Only requests that fail: 0.2 to 5 % of them, more in some half hours than in others.
    Error,
    /// A timer, whatever the load.
    Hour,
    /// As `Request`, but from some moment within hours 4 to 14 on.
    Late,
    /// As `Request`, in a version that is deployed within hours 6 to 16.
    Deploy,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 5] = [
        Kind::Request,
        Kind::Error,
        Kind::Hour,
        Kind::Late,
        Kind::Deploy,
    ];

    /// As it is written in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Request => "request",
            Kind::Error => "error",
            Kind::Hour => "hour",
            Kind::Late => "late",
            Kind::Deploy => "deploy",
        }
    }
}

/// A leak of one host.
#[derive(Debug, Clone)]
pub(crate) struct Leak {
    /// Seconds after the run's begin.
    pub(crate) onset: f64,
    how: How,
}

#[derive(Debug, Clone)]
enum How {
    /// Each of these requests with this probability; bytes of one block.
    Share { probability: f64, block: f64 },
    /// As `Share`, the probability varying over time around its mean.
    Failures {
        probability: f64,
        block: f64,
        spread: f64,
    },
    /// A block every so many seconds.
    Timer { every: f64, block: f64 },
}

/// What a process has leaked so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leaked {
    pub(crate) bytes: f64,
    pub(crate) count: u64,
    /// When the first block was left behind, seconds after the run's begin.
    pub(crate) since: Option<f64>,
    weather: f64,
    ticks: u32,
    due: f64,
}

impl Leak {
    /// A leak of so many bytes per request on average. Per hour it is what `pace` requests a
    /// second would leak.
    pub(crate) fn draw(
        kind: Kind,
        bytes_per_request: f64,
        onset: f64,
        pace: f64,
        random: &mut Pcg64Mcg,
    ) -> Self {
        let how = match kind {
            Kind::Request | Kind::Late | Kind::Deploy => {
                let probability = [1.0, 1.0, 0.5, 0.2][random.random_range(0..4)];
                How::Share {
                    probability,
                    block: bytes_per_request / probability,
                }
            }
            Kind::Error => {
                let probability = log_uniform(random, 0.002, 0.05);
                How::Failures {
                    probability,
                    block: bytes_per_request / probability,
                    spread: 0.4,
                }
            }
            Kind::Hour => {
                let every = log_uniform(random, 10.0, 600.0);
                How::Timer {
                    every,
                    block: bytes_per_request * pace * every,
                }
            }
        };
        Self { onset, how }
    }

    /// One tick of a process; `clock` is its end, in seconds after the run's begin.
    pub(crate) fn step(&self, leaked: &mut Leaked, load: &Load, clock: f64, random: &mut Pcg64Mcg) {
        if clock <= self.onset {
            return;
        }
        let completed = load.completed_now as u64;
        let (count, block) = match self.how {
            How::Share { probability, block } => (some_of(completed, probability, random), block),
            How::Failures {
                probability,
                block,
                spread,
            } => {
                // The weather changes every half hour; its mean factor is 1.
                if leaked.ticks.is_multiple_of(30) {
                    leaked.weather = (spread * normal(random) - spread * spread / 2.0).exp();
                }
                leaked.ticks += 1;
                let mean = completed as f64 * probability * leaked.weather;
                (poisson(random, mean).min(completed), block)
            }
            How::Timer { every, block } => {
                leaked.due += TICK / every;
                let count = leaked.due.floor();
                leaked.due -= count;
                (count as u64, block)
            }
        };
        if count > 0 {
            leaked.since.get_or_insert(clock);
            leaked.count += count;
            leaked.bytes += count as f64 * block;
        }
    }
}

fn some_of(all: u64, probability: f64, random: &mut Pcg64Mcg) -> u64 {
    if probability >= 1.0 {
        return all;
    }
    match Binomial::new(all, probability) {
        Ok(distribution) => distribution.sample(random),
        Err(_) => 0,
    }
}
