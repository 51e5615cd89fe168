//! A host with a load by day and night, made of a fixed sequence of pseudo-random numbers.

use vramscope_leaks::{LoadSlot, Process, StackSlot};

/// A linear congruential generator (Knuth's MMIX constants): fixed numbers, no dependency.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Numbers(seed.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(1))
    }

    /// Between 0 and 1.
    pub fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Mean 0, variance 1, nearly normal: the sum of twelve.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }
}

/// Slots of ten minutes.
pub const SLOTS: usize = 48 * 6;

pub struct Host {
    pub numbers: Numbers,
    pub loads: Vec<LoadSlot>,
    /// Requests completed before each slot, and after the last.
    pub completed: Vec<f64>,
}

impl Host {
    /// Some 600 requests a slot by day, 200 by night.
    pub fn new(seed: u64) -> Host {
        let mut numbers = Numbers::new(seed);
        let mut loads = Vec::new();
        let mut completed = vec![0.0];
        for slot in 0..SLOTS {
            let day = (slot as f64 / 144.0 * std::f64::consts::TAU).sin();
            let requests = (400.0 + 200.0 * day + 40.0 * numbers.normal())
                .max(0.0)
                .round();
            let running = requests / 20.0;
            completed.push(completed[slot] + requests);
            loads.push(LoadSlot {
                slot: slot as i64,
                running,
                running_peak: running * 1.5,
                kv: running / 60.0,
                kv_peak: running / 40.0,
                completed: requests,
            });
        }
        Host {
            numbers,
            loads,
            completed,
        }
    }

    /// A stack's slots from its bytes as a function of (slot, requests completed, running) and
    /// relative noise. Its first allocation lives on.
    pub fn stack(&mut self, noise: f64, bytes: impl Fn(f64, f64, f64) -> f64) -> Vec<StackSlot> {
        (0..SLOTS)
            .map(|slot| {
                let (before, after) = (self.completed[slot], self.completed[slot + 1]);
                let running = self.loads[slot].running;
                let trembling = 1.0 + noise * self.numbers.normal();
                let mean = bytes(slot as f64 + 0.5, (before + after) / 2.0, running) * trembling;
                let last = bytes(slot as f64 + 1.0, after, running) * trembling;
                StackSlot {
                    slot: slot as i64,
                    live_bytes: last as i64,
                    mean_bytes: mean,
                    live_count: 1,
                    oldest_age_ns: Some((slot as i64 + 1) * 600_000_000_000),
                    ..StackSlot::default()
                }
            })
            .collect()
    }

    pub fn process(&self, stacks: Vec<(&'static str, Vec<StackSlot>)>) -> Process<&'static str> {
        Process {
            loads: self.loads.clone(),
            quiet_slots: Vec::new(),
            stacks,
        }
    }
}
