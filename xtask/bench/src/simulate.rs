//! How many allocator events the simulator replays in a second, on one thread.
//!
//! Two programs, both drawn from a generator with a fixed seed: a training step over and over
//! (activations that the backward pass gives back in reverse, temporaries within each layer, an
//! optimizer's small state, batches of varying length), and blocks of any size given back in any
//! order. An event is an allocation or a free; the completion that follows a free is not counted.
//! Seconds are the thread's processor time: one core's, whatever else the machine does.

use std::hint::black_box;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use vramscope_model::settings::Settings;
use vramscope_model::simulator::{BlockId, Card, Request, Scenario, Simulator};
use vramscope_model::trace::{Action, TraceEvent};

/// A card that neither program fills.
const CARD: Card = Card {
    capacity: Some(80 << 30),
    others: 0,
};
const LAYERS: u64 = 48;
/// Blocks of any size that live at once.
const LIVE: usize = 1000;

/// Replays through the simulator.
#[derive(Debug, Args)]
pub struct Simulate {
    /// Events of each trace.
    #[arg(long, default_value_t = 1_000_000)]
    events: usize,
    /// Replays of each; the median counts.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

/// Prints events a second by program and settings.
pub fn run(options: &Simulate) -> Result<Value> {
    let training = training(options.events)?;
    let churn = churn(options.events)?;
    let measure = |events: &[TraceEvent], settings: &str| rate(events, settings, options.rounds);
    Ok(json!({
        "events": count(&training),
        "training": measure(&training, "")?,
        "training_expandable": measure(&training, "expandable_segments:True")?,
        "training_split_limit": measure(&training, "max_split_size_mb:128")?,
        "churn": measure(&churn, "")?,
    }))
}

/// Median events a second over the rounds.
fn rate(events: &[TraceEvent], settings: &str, rounds: usize) -> Result<f64> {
    let scenario = Scenario {
        device: 0,
        events,
        start: None,
        recorded: Settings::default(),
        settings: Settings::parse(settings).settings,
        card: CARD,
    };
    let counted = count(events) as f64;
    let mut rates = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let started = processor_time()?;
        let rerun = black_box(&scenario).run()?;
        let took = processor_time()?.saturating_sub(started);
        rates.push(counted / took.as_secs_f64());
        if rerun.new_failures > 0 || rerun.counts.unmatched_frees > 0 {
            bail!("the replay lost its way: {:?}", rerun.counts);
        }
    }
    rates.sort_by(f64::total_cmp);
    rates.get(rounds / 2).copied().context("no rounds")
}

/// What this thread has used.
fn processor_time() -> Result<Duration> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes into the structure it is given, which outlives it.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    if failed != 0 {
        return Err(std::io::Error::last_os_error()).context("failed to read the processor time");
    }
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

fn count(events: &[TraceEvent]) -> usize {
    let counted =
        |event: &&TraceEvent| matches!(event.action, Action::Alloc | Action::FreeRequested);
    events.iter().filter(counted).count()
}

/// Records what a program does, until it did `events`.
struct Recorder {
    simulator: Simulator,
    left: usize,
}

impl Recorder {
    fn new(events: usize) -> Self {
        let mut simulator = Simulator::new(0, Settings::default(), CARD);
        simulator.start_recording();
        Self {
            simulator,
            left: events,
        }
    }

    fn alloc(&mut self, bytes: u64) -> Result<BlockId> {
        self.left = self.left.saturating_sub(1);
        Ok(self.simulator.alloc(Request::new(bytes, 0))?)
    }

    fn free(&mut self, block: BlockId) -> Result<()> {
        self.left = self.left.saturating_sub(1);
        Ok(self.simulator.free(block)?)
    }
}

fn training(events: usize) -> Result<Vec<TraceEvent>> {
    let mut draw = Draw(1);
    let mut recorder = Recorder::new(events);
    for layer in 0..LAYERS {
        recorder.alloc(48 << 20)?;
        recorder.alloc((layer + 1) * 4096)?;
    }
    while recorder.left > 0 {
        let tokens = 512 + draw.below(4) * 64;
        let mut kept = Vec::new();
        for layer in 0..LAYERS {
            let scores = recorder.alloc(tokens * tokens * 16)?;
            let mask = recorder.alloc(tokens * 4)?;
            kept.push(recorder.alloc(tokens * 8192)?);
            kept.push(recorder.alloc(tokens * (4096 + layer % 3 * 512))?);
            recorder.free(scores)?;
            recorder.free(mask)?;
        }
        let mut gradient = recorder.alloc(tokens * 8192)?;
        for activation in kept.into_iter().rev() {
            let next = recorder.alloc(tokens * 8192)?;
            let scratch = recorder.alloc(1 << (9 + draw.below(11)))?;
            recorder.free(activation)?;
            recorder.free(gradient)?;
            recorder.free(scratch)?;
            gradient = next;
        }
        recorder.free(gradient)?;
    }
    Ok(recorder.simulator.take_recording())
}

fn churn(events: usize) -> Result<Vec<TraceEvent>> {
    let mut draw = Draw(1);
    let mut recorder = Recorder::new(events);
    let mut live = Vec::with_capacity(LIVE);
    while recorder.left > 0 {
        if live.len() == LIVE {
            let chosen = draw.below(LIVE as u64) as usize;
            let block = live.swap_remove(chosen);
            recorder.free(block)?;
        }
        // From 512 bytes to 32 MiB, each power of two as often.
        let power = 9 + draw.below(16);
        live.push(recorder.alloc((1 << power) + draw.below(1 << power))?);
    }
    Ok(recorder.simulator.take_recording())
}

/// Xorshift: regular enough to repeat, irregular enough for nothing to line up.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both traces are as long as asked for and replay without loss.
    #[test]
    fn every_figure_is_measured() {
        let measured = run(&Simulate {
            events: 5000,
            rounds: 1,
        });
        let measured = measured.unwrap();
        for name in [
            "training",
            "training_expandable",
            "training_split_limit",
            "churn",
        ] {
            assert!(measured[name].as_f64().unwrap() > 0.0, "{name}");
        }
        assert!(measured["events"].as_u64().unwrap() >= 5000);
    }
}
