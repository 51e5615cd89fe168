//! How the live bytes of a stack go on from tick to tick, by its shape.

use rand_pcg::Pcg64Mcg;

use crate::draw::{normal, poisson};
use crate::serving::{Load, TICK};
use crate::stacks::{Clock, Of, Shape, Stack};

const MINUTE: f64 = 60.0;
const HOUR: f64 = 3600.0;

/// What a stack holds now.
#[derive(Debug, Clone)]
pub(crate) struct Level {
    state: f64,
    /// Adapters: when each was loaded, if it is.
    loaded: Vec<Option<f64>>,
    born: Option<f64>,
}

/// One tick of a stack.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    /// Live at the end of the tick.
    pub(crate) bytes: f64,
    /// Most at one moment of the tick; at least `bytes`.
    pub(crate) peak: f64,
    /// Allocated and freed again within the tick, beyond the change of `bytes`.
    pub(crate) churn: f64,
    /// Age of the oldest that lives, seconds.
    pub(crate) oldest: f64,
}

/// What a process has lived through: loads of every tick so far.
pub(crate) struct Past<'a> {
    /// The last one is now.
    pub(crate) loads: &'a [Load],
    /// Seconds since the run began.
    pub(crate) clock: f64,
}

impl Past<'_> {
    fn now(&self) -> &Load {
        &self.loads[self.loads.len() - 1]
    }

    fn completed_within(&self, ticks: usize) -> f64 {
        let before = self.loads.len().checked_sub(ticks + 1);
        self.now().completed - before.map_or(0.0, |index| self.loads[index].completed)
    }

    fn at(&self, clock: Clock) -> f64 {
        match clock {
            Clock::Time => self.now().age,
            Clock::Requests => self.now().completed,
        }
    }
}

impl Level {
    pub(crate) fn new(stack: &Stack) -> Self {
        let adapters = match &stack.shape {
            Shape::Adapters { sizes, .. } => sizes.len(),
            _ => 0,
        };
        Self {
            state: 0.0,
            loaded: vec![None; adapters],
            born: None,
        }
    }

    /// The next tick.
    pub(crate) fn step(&mut self, stack: &Stack, past: &Past, random: &mut Pcg64Mcg) -> Sample {
        let now = *past.now();
        let mut sample = self.shape(stack, past, random);
        // Noise is relative to what moves: constants do not tremble.
        if stack.trembles() {
            let factor = (1.0 + stack.jitter * normal(random)).max(0.0);
            sample.bytes *= factor;
        }
        sample.bytes = sample.bytes.max(0.0);
        sample.peak = sample.peak.max(sample.bytes);
        if sample.bytes <= 0.0 {
            self.born = None;
            sample.oldest = 0.0;
        } else if sample.oldest == 0.0 {
            sample.oldest = now.age - *self.born.get_or_insert(now.age - TICK);
        }
        sample
    }

    fn shape(&mut self, stack: &Stack, past: &Past, random: &mut Pcg64Mcg) -> Sample {
        let now = *past.now();
        let kept = |bytes: f64| Sample {
            bytes,
            ..Sample::default()
        };
        match &stack.shape {
            Shape::Constant { bytes, from } => kept(if now.age > *from { *bytes } else { 0.0 }),
            Shape::Steps { each, sizes } => {
                self.state = self.state.max(now.running_peak);
                // Batches of 1, 2, 4, …
                let seen = (self.state.max(0.5).log2() + 1.0).floor().max(0.0);
                kept(each * seen.min(*sizes as f64))
            }
            Shape::Proportional { unit, of, fixed } => {
                let (level, peak) = match of {
                    Of::KvTokens => (now.kv_tokens, now.kv_peak),
                    _ => (now.running, now.running_peak),
                };
                let per_request = match of {
                    Of::KvTokens => unit * (now.kv_tokens / now.running.max(1.0)),
                    _ => *unit,
                };
                Sample {
                    bytes: fixed + unit * level,
                    peak: fixed + unit * peak,
                    churn: per_request * now.completed_now,
                    oldest: if *fixed > 0.0 {
                        0.0
                    } else {
                        now.oldest.max(1e-3)
                    },
                }
            }
            Shape::Recent { unit, ticks } => Sample {
                bytes: unit * past.completed_within(*ticks),
                peak: 0.0,
                churn: unit * now.completed_now,
                oldest: now.age.min(*ticks as f64 * TICK),
            },
            Shape::Fill { cap, tau, clock } => kept(cap * saturate(past.at(*clock) / tau)),
            Shape::Straight {
                cap,
                full_at,
                longest,
                clock,
            } => {
                // By night a clock of requests stands almost still: the limit is one of time.
                let filled = (past.at(*clock) / full_at).max(now.age / longest);
                kept(cap * filled.min(1.0))
            }
            Shape::Prefix {
                cap,
                tau_tokens,
                gives_way,
            } => {
                let filled = cap * saturate(now.prompt_tokens / tau_tokens);
                Sample {
                    bytes: filled.min((cap - gives_way * now.kv_tokens).max(0.2 * cap)),
                    churn: gives_way * now.completed_now * 100.0,
                    ..Sample::default()
                }
            }
            Shape::Adapters {
                sizes,
                slots,
                rarest,
                skew,
            } => {
                self.load_adapters(&now, *slots, *rarest, *skew, random);
                let live = sizes
                    .iter()
                    .zip(&self.loaded)
                    .filter(|(_, at)| at.is_some());
                kept(live.map(|(bytes, _)| bytes).sum())
            }
            Shape::Log { scale, requests } => kept(scale * (now.completed / requests).ln_1p()),
            Shape::Saw {
                height,
                period,
                clock,
                phase,
            } => {
                let turns = past.at(*clock) / period + phase;
                Sample {
                    bytes: height * turns.fract(),
                    peak: if turns.fract() < 0.1 { *height } else { 0.0 },
                    oldest: now.age.min(turns.fract() * period).max(1.0),
                    churn: 0.0,
                }
            }
            Shape::Hourly {
                bytes,
                seconds,
                offset,
            } => {
                let into = (past.clock + offset) % HOUR;
                kept(if into < *seconds { *bytes } else { 0.0 })
            }
            Shape::Wander {
                mean,
                deviation,
                tau,
            } => {
                let keep = (-TICK / tau).exp();
                let push = deviation * (1.0 - keep * keep).sqrt();
                self.state = self.state * keep + push * normal(random);
                Sample {
                    bytes: mean + self.state,
                    churn: 0.2 * deviation,
                    ..Sample::default()
                }
            }
            Shape::Decay { peak, floor, tau } => kept(floor + peak * (-now.age / tau).exp()),
            Shape::HighWater { unit, of } => {
                let level = match of {
                    Of::Running => now.running_peak,
                    Of::KvTokens => now.kv_peak,
                    Of::LongestPrompt => now.longest_prompt,
                };
                self.state = self.state.max(level);
                kept(unit * self.state)
            }
            Shape::Slow { unit, down } => {
                let target = unit * now.running_peak;
                self.state = target.max(target + (self.state - target) * (-TICK / down).exp());
                Sample {
                    bytes: self.state,
                    churn: unit * now.completed_now * 0.1,
                    ..Sample::default()
                }
            }
            Shape::Root { scale } => kept(scale * now.completed.sqrt()),
            Shape::Hyperbola { cap, half } => kept(cap * now.completed / (now.completed + half)),
            Shape::Logistic { cap, middle, width } => {
                kept(cap / (1.0 + (-(now.age - middle) / width).exp()))
            }
            Shape::Doubling { entry } => {
                let entries = now.completed.sqrt().max(1.0);
                kept(entry * entries.log2().ceil().exp2())
            }
            Shape::Nightly {
                bytes,
                seconds,
                offset,
            } => {
                let into = (past.clock + offset) % (24.0 * HOUR);
                let ramp = (into / (10.0 * MINUTE)).min(1.0);
                kept(if into < *seconds { bytes * ramp } else { 0.0 })
            }
            Shape::Two {
                fast,
                fast_tau,
                slow,
                slow_tau,
            } => kept(fast * saturate(now.age / fast_tau) + slow * saturate(now.age / slow_tau)),
        }
    }

    /// Adapters asked for in this tick are loaded; who is over the slots goes, the longest loaded
    /// first. The rarest is asked for once in so many requests, the others more often (Zipf).
    fn load_adapters(
        &mut self,
        now: &Load,
        slots: usize,
        rarest: f64,
        skew: f64,
        random: &mut Pcg64Mcg,
    ) {
        let count = self.loaded.len();
        for (index, loaded) in self.loaded.iter_mut().enumerate() {
            let rank = (index as f64 + 1.0) / count as f64;
            let asks = now.completed_now / rarest * rank.powf(-skew);
            if loaded.is_none() && poisson(random, asks) > 0 {
                *loaded = Some(now.age);
            }
        }
        while self.loaded.iter().flatten().count() > slots {
            let oldest = (0..count)
                .filter(|index| self.loaded[*index].is_some())
                .min_by(|a, b| {
                    self.loaded[*a]
                        .partial_cmp(&self.loaded[*b])
                        .unwrap_or(std::cmp::Ordering::Equal)
                });
            if let Some(oldest) = oldest {
                self.loaded[oldest] = None;
            }
        }
    }
}

impl Stack {
    fn trembles(&self) -> bool {
        matches!(
            self.shape,
            Shape::Proportional { .. }
                | Shape::Recent { .. }
                | Shape::Prefix { .. }
                | Shape::Slow { .. }
        )
    }
}

fn saturate(x: f64) -> f64 {
    1.0 - (-x).exp()
}
