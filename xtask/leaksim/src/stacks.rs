//! What legitimate call stacks hold: every shape of live bytes that a detector must not take for a
//! leak.
//!
//! A stack is drawn once per host; its level starts anew with every process. Sizes and time
//! constants are log-uniform within the bounds given here. The limit of what is asked of a detector:
//! **a cache that fills in a straight line is full within 4 hours, and one that fills exponentially
//! has a time constant of at most 4 hours**; slower fills cannot be told from leaks by bytes alone
//! and come only as the ambiguous conditions of [`crate::Condition`].

use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use serde::{Deserialize, Serialize};

use crate::Ambiguous;
use crate::draw::log_uniform;
use crate::serving::TICK;

const KB: f64 = 1e3;
const MB: f64 = 1e6;
const GB: f64 = 1e9;
const MINUTE: f64 = 60.0;
const HOUR: f64 = 3600.0;

/// The longest that a straight fill takes, and the longest time constant: the declared limit.
pub const SLOWEST_FILL: f64 = 4.0 * HOUR;

/// What kind of code allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Loaded at the start, kept.
    Weights,
    /// Made when first used, kept.
    Workspace,
    /// Captured when a batch of a new size comes.
    Graphs,
    /// State of each running request.
    PerRequest,
    /// KV tokens in use.
    Kv,
    /// Kept for a fixed time after a request.
    RecentRequests,
    /// A cache that fills ever slower.
    Cache,
    /// A cache that fills in a straight line to its cap.
    StraightCache,
    /// A prefix cache: fills, and gives way to running requests.
    PrefixCache,
    /// Adapters loaded when first asked for, up to a number of slots.
    Adapters,
    /// Grows with the logarithm of requests.
    Log,
    /// Filled and flushed in turns.
    Sawtooth,
    /// Held for some minutes of every hour.
    Housekeeping,
    /// A level that wanders around its mean.
    Fragmentation,
    /// High at the start, then released.
    WarmUp,
    /// The most ever needed.
    HighWater,
    /// A pool that grows at once and shrinks over hours.
    SlowPool,
    /// Held back for reports: grows with the square root of requests.
    SquareRoot,
    /// Held back for reports: half full after some requests, and full never.
    Hyperbolic,
    /// Held back for reports: an S-shaped fill.
    SCurve,
    /// Held back for reports: a buffer that doubles when it is full.
    Doubling,
    /// Held back for reports: hours of other work once a day.
    Nightly,
    /// Held back for reports: two caches behind one stack, a fast and a slow one.
    TwoCaches,
}

impl Class {
    /// Those of every run, with how many stacks of 200 have them.
    pub const USUAL: [(Class, usize); 17] = [
        (Class::Weights, 12),
        (Class::Workspace, 12),
        (Class::Graphs, 8),
        (Class::PerRequest, 34),
        (Class::Kv, 16),
        (Class::RecentRequests, 16),
        (Class::Cache, 22),
        (Class::StraightCache, 8),
        (Class::PrefixCache, 6),
        (Class::Adapters, 6),
        (Class::Log, 12),
        (Class::Sawtooth, 12),
        (Class::Housekeeping, 8),
        (Class::Fragmentation, 12),
        (Class::WarmUp, 6),
        (Class::HighWater, 6),
        (Class::SlowPool, 4),
    ];

    /// Those that only report seeds have, two stacks each, in place of some of the usual.
    pub const HELD_BACK: [Class; 6] = [
        Class::SquareRoot,
        Class::Hyperbolic,
        Class::SCurve,
        Class::Doubling,
        Class::Nightly,
        Class::TwoCaches,
    ];
}

/// How a stack's bytes come about. Bytes, seconds and requests.
#[derive(Debug, Clone)]
pub(crate) enum Shape {
    Constant {
        bytes: f64,
        from: f64,
    },
    Steps {
        each: f64,
        sizes: usize,
    },
    Proportional {
        unit: f64,
        of: Of,
        fixed: f64,
    },
    Recent {
        unit: f64,
        ticks: usize,
    },
    Fill {
        cap: f64,
        tau: f64,
        clock: Clock,
    },
    Straight {
        cap: f64,
        full_at: f64,
        longest: f64,
        clock: Clock,
    },
    Prefix {
        cap: f64,
        tau_tokens: f64,
        gives_way: f64,
    },
    Adapters {
        sizes: Vec<f64>,
        slots: usize,
        rarest: f64,
        skew: f64,
    },
    Log {
        scale: f64,
        requests: f64,
    },
    Saw {
        height: f64,
        period: f64,
        clock: Clock,
        phase: f64,
    },
    Hourly {
        bytes: f64,
        seconds: f64,
        offset: f64,
    },
    Wander {
        mean: f64,
        deviation: f64,
        tau: f64,
    },
    Decay {
        peak: f64,
        floor: f64,
        tau: f64,
    },
    HighWater {
        unit: f64,
        of: Of,
    },
    Slow {
        unit: f64,
        down: f64,
    },
    Root {
        scale: f64,
    },
    Hyperbola {
        cap: f64,
        half: f64,
    },
    Logistic {
        cap: f64,
        middle: f64,
        width: f64,
    },
    Doubling {
        entry: f64,
    },
    Nightly {
        bytes: f64,
        seconds: f64,
        offset: f64,
    },
    Two {
        fast: f64,
        fast_tau: f64,
        slow: f64,
        slow_tau: f64,
    },
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Clock {
    Time,
    Requests,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Of {
    Running,
    KvTokens,
    LongestPrompt,
}

/// One call stack of one host.
#[derive(Debug, Clone)]
pub(crate) struct Stack {
    pub(crate) class: Class,
    pub(crate) shape: Shape,
    /// Relative noise of what moves.
    pub(crate) jitter: f64,
    /// Bytes of a typical block: makes counts of bytes.
    pub(crate) block: f64,
}

/// Whether a clock of requests or of time; request clocks are set by the host's usual pace, so
/// that both kinds take about as long.
fn clock(random: &mut Pcg64Mcg, pace: f64, seconds: f64) -> (Clock, f64) {
    if random.random_bool(0.5) {
        (Clock::Time, seconds)
    } else {
        (Clock::Requests, seconds * pace)
    }
}

impl Stack {
    /// Draws a stack of a class on a host with `pace` requests a second on average.
    pub(crate) fn draw(class: Class, pace: f64, random: &mut Pcg64Mcg) -> Self {
        let shape = Self::shape(class, pace, random);
        Self {
            class,
            shape,
            jitter: log_uniform(random, 0.002, 0.02),
            block: log_uniform(random, 16.0 * KB, 4.0 * MB),
        }
    }

    /// One that bytes alone cannot tell from a leak.
    pub(crate) fn ambiguous(what: Ambiguous, pace: f64, random: &mut Pcg64Mcg) -> Self {
        let (class, shape) = match what {
            Ambiguous::SlowFill => {
                let full_at = random.random_range(8.0..24.0) * HOUR;
                let cap = log_uniform(random, GB, 8.0 * GB);
                let shape = Shape::Straight {
                    cap,
                    full_at,
                    longest: full_at,
                    clock: Clock::Time,
                };
                (Class::StraightCache, shape)
            }
            Ambiguous::SlowStaircase => {
                let count = random.random_range(24..48);
                let sizes = (0..count).map(|_| log_uniform(random, 16.0 * MB, 150.0 * MB));
                let shape = Shape::Adapters {
                    sizes: sizes.collect(),
                    slots: count,
                    rarest: pace * random.random_range(12.0..30.0) * HOUR,
                    skew: 0.3,
                };
                (Class::Adapters, shape)
            }
        };
        Self {
            class,
            shape,
            jitter: 0.0,
            block: 16.0 * MB,
        }
    }

    fn shape(class: Class, pace: f64, random: &mut Pcg64Mcg) -> Shape {
        let r = random;
        match class {
            Class::Weights => Shape::Constant {
                bytes: log_uniform(r, 100.0 * MB, 5.0 * GB),
                from: 0.0,
            },
            Class::Workspace => Shape::Constant {
                bytes: log_uniform(r, 8.0 * MB, 500.0 * MB),
                from: log_uniform(r, MINUTE, 2.0 * HOUR),
            },
            Class::Graphs => Shape::Steps {
                each: log_uniform(r, 5.0 * MB, 80.0 * MB),
                sizes: r.random_range(5..9),
            },
            Class::PerRequest => Shape::Proportional {
                unit: log_uniform(r, 16.0 * KB, 4.0 * MB),
                of: Of::Running,
                fixed: r.random_range(0.0..50.0 * MB),
            },
            Class::Kv => Shape::Proportional {
                unit: log_uniform(r, 16.0, 4.0 * KB),
                of: Of::KvTokens,
                fixed: 0.0,
            },
            Class::RecentRequests => Shape::Recent {
                unit: log_uniform(r, 0.5 * KB, 15.0 * KB),
                ticks: (log_uniform(r, 10.0 * MINUTE, SLOWEST_FILL) / TICK) as usize,
            },
            Class::Cache => {
                let tau = log_uniform(r, 3.0 * MINUTE, SLOWEST_FILL);
                let (clock, tau) = clock(r, pace, tau);
                let cap = log_uniform(r, 20.0 * MB, 4.0 * GB);
                Shape::Fill { cap, tau, clock }
            }
            Class::StraightCache => {
                let full_at = log_uniform(r, 10.0 * MINUTE, SLOWEST_FILL);
                let (clock, full_at) = clock(r, pace, full_at);
                let cap = log_uniform(r, 20.0 * MB, 4.0 * GB);
                Shape::Straight {
                    cap,
                    full_at,
                    longest: SLOWEST_FILL,
                    clock,
                }
            }
            Class::PrefixCache => Shape::Prefix {
                cap: log_uniform(r, 200.0 * MB, 6.0 * GB),
                tau_tokens: log_uniform(r, 1e5, 1e7),
                gives_way: log_uniform(r, 16.0, 2.0 * KB),
            },
            Class::Adapters => {
                let count = r.random_range(8..40);
                let sizes = (0..count).map(|_| log_uniform(r, 16.0 * MB, 150.0 * MB));
                Shape::Adapters {
                    sizes: sizes.collect(),
                    slots: r.random_range(4..24),
                    rarest: pace * log_uniform(r, 5.0 * MINUTE, SLOWEST_FILL / 3.0),
                    skew: r.random_range(0.6..1.1),
                }
            }
            Class::Log => Shape::Log {
                scale: log_uniform(r, 4.0 * MB, 80.0 * MB),
                requests: log_uniform(r, 200.0, 20_000.0),
            },
            Class::Sawtooth => {
                let period = log_uniform(r, 15.0 * MINUTE, 3.0 * HOUR);
                let (clock, period) = clock(r, pace, period);
                let height = log_uniform(r, 10.0 * MB, 300.0 * MB);
                let phase = r.random_range(0.0..1.0);
                Shape::Saw {
                    height,
                    period,
                    clock,
                    phase,
                }
            }
            Class::Housekeeping => Shape::Hourly {
                bytes: log_uniform(r, 20.0 * MB, 500.0 * MB),
                seconds: r.random_range(2.0..12.0) * MINUTE,
                offset: r.random_range(0.0..HOUR),
            },
            Class::Fragmentation => Shape::Wander {
                mean: log_uniform(r, 50.0 * MB, 800.0 * MB),
                deviation: log_uniform(r, 3.0 * MB, 50.0 * MB),
                tau: log_uniform(r, 3.0 * MINUTE, HOUR),
            },
            Class::WarmUp => Shape::Decay {
                peak: log_uniform(r, 100.0 * MB, 3.0 * GB),
                floor: log_uniform(r, 5.0 * MB, 100.0 * MB),
                tau: log_uniform(r, 2.0 * MINUTE, 15.0 * MINUTE),
            },
            Class::HighWater => {
                let (of, unit) = match r.random_range(0..3) {
                    0 => (Of::Running, log_uniform(r, 0.1 * MB, 4.0 * MB)),
                    1 => (Of::KvTokens, log_uniform(r, 16.0, 2.0 * KB)),
                    _ => (Of::LongestPrompt, log_uniform(r, 1.0 * KB, 32.0 * KB)),
                };
                Shape::HighWater { unit, of }
            }
            Class::SlowPool => Shape::Slow {
                unit: log_uniform(r, 64.0 * KB, 4.0 * MB),
                down: log_uniform(r, 20.0 * MINUTE, SLOWEST_FILL),
            },
            Class::SquareRoot => Shape::Root {
                scale: log_uniform(r, 50.0 * KB, 400.0 * KB),
            },
            Class::Hyperbolic => Shape::Hyperbola {
                cap: log_uniform(r, 50.0 * MB, GB),
                half: pace * log_uniform(r, 5.0 * MINUTE, HOUR),
            },
            Class::SCurve => Shape::Logistic {
                cap: log_uniform(r, 100.0 * MB, 3.0 * GB),
                middle: r.random_range(0.7..2.2) * HOUR,
                width: r.random_range(0.1..0.4) * HOUR,
            },
            Class::Doubling => Shape::Doubling {
                entry: log_uniform(r, 100.0 * KB, 400.0 * KB),
            },
            Class::Nightly => Shape::Nightly {
                bytes: log_uniform(r, 200.0 * MB, 3.0 * GB),
                seconds: r.random_range(1.0..4.0) * HOUR,
                offset: r.random_range(0.0..24.0 * HOUR),
            },
            Class::TwoCaches => Shape::Two {
                fast: log_uniform(r, 50.0 * MB, 2.0 * GB),
                fast_tau: log_uniform(r, 3.0 * MINUTE, 20.0 * MINUTE),
                slow: log_uniform(r, 50.0 * MB, 2.0 * GB),
                slow_tau: log_uniform(r, HOUR, SLOWEST_FILL),
            },
        }
    }
}
