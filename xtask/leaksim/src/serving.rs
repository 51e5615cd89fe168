//! A serving engine with continuous batching, as far as memory depends on it: requests wait, run
//! side by side, hold KV tokens while they run, and complete.
//!
//! A request is admitted when the batch has a place and the KV pool has room for its prompt and
//! whole output; it then takes prefill time by its prompt and decode time by its output, slower the
//! fuller the batch was when it began. Invariant: counts are integers, KV tokens never exceed the
//! pool. What is sampled are states at the end of each [`TICK`], and what happened within it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rand::RngExt;
use rand_pcg::Pcg64Mcg;

use crate::draw::log_uniform;
use crate::traces::Request;

/// Seconds between two samples.
pub const TICK: f64 = 60.0;

/// Requests that wait beyond this are turned away, as a load balancer would do.
const LONGEST_QUEUE: usize = 400;

/// Tokens in a page of the KV pool.
pub const PAGE_TOKENS: i64 = 16;

/// One engine's abilities.
#[derive(Debug, Clone)]
pub(crate) struct Engine {
    max_batch: usize,
    /// Tokens of the KV pool.
    pub(crate) pool_tokens: f64,
    prefill_rate: f64,
    decode_rate: f64,
    half_speed_batch: f64,
}

impl Engine {
    /// An engine that carries the given load by day, and at times makes requests wait.
    pub(crate) fn draw(random: &mut Pcg64Mcg, mean_rate: f64, trace: &[Request]) -> Self {
        let mean = |of: fn(&Request) -> f64| trace.iter().map(of).sum::<f64>() / trace.len() as f64;
        let prompt = mean(|request| f64::from(request.prompt));
        let output = mean(|request| f64::from(request.output));
        let longest = trace.iter().map(|r| r.prompt + r.output).max().unwrap_or(1);
        let decode_rate = random.random_range(35.0..90.0);
        let half_speed_batch = random.random_range(40.0..200.0);
        // One prefill at a time must keep up with the busiest hours.
        let prefill_rate = log_uniform(random, 8_000.0, 40_000.0).max(6.0 * mean_rate * prompt);
        let residence = prompt / prefill_rate + output / decode_rate * 1.3;
        let at_once = mean_rate * residence;
        let wanted = at_once * random.random_range(2.5..6.0) + 8.0;
        let tokens = at_once * (prompt + output);
        Self {
            max_batch: (wanted as usize).next_power_of_two(),
            pool_tokens: (tokens * random.random_range(3.0..8.0))
                .max(1.5 * f64::from(longest))
                .max(100_000.0),
            prefill_rate,
            decode_rate,
            half_speed_batch,
        }
    }

    fn residence(&self, request: &Request, running: usize) -> f64 {
        let slower = 1.0 + running as f64 / self.half_speed_batch;
        f64::from(request.prompt) / self.prefill_rate
            + f64::from(request.output) / self.decode_rate * slower
    }
}

/// The engine at the end of a tick, and what happened within it. Totals count from the process's
/// start.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// Seconds since the process started.
    pub age: f64,
    /// Requests that run.
    pub running: f64,
    /// Most that ran at one moment of the tick.
    pub running_peak: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// KV tokens in use.
    pub kv_tokens: f64,
    /// Most KV tokens in use at one moment of the tick.
    pub kv_peak: f64,
    /// Requests completed so far.
    pub completed: f64,
    /// Of these, in this tick.
    pub completed_now: f64,
    /// Prompt tokens of completed requests so far.
    pub prompt_tokens: f64,
    /// Generated tokens of completed requests so far.
    pub output_tokens: f64,
    /// The longest prompt so far.
    pub longest_prompt: f64,
    /// Age of the oldest running request, seconds.
    pub oldest: f64,
}

/// One that runs. Ordered by its end; ends are compared as bits, which for positive numbers is the
/// order of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Running {
    end: u64,
    began: u64,
    prompt: u32,
    output: u32,
}

/// Serves the requests that come from `start` to `end` and samples every tick. The first
/// `loading` seconds the model is loaded: whoever comes then goes elsewhere.
pub(crate) fn serve(
    engine: &Engine,
    requests: &[Request],
    start: f64,
    loading: f64,
    end: f64,
) -> Vec<Load> {
    let ready = start + loading;
    let first = requests.partition_point(|request| request.at < ready);
    let mut server = Server {
        engine,
        running: BinaryHeap::new(),
        waiting: VecDeque::new(),
        held_tokens: 0.0,
        kv_constant: 0.0,
        kv_slope: 0.0,
        load: Load::default(),
    };
    let mut coming = requests[first..].iter().peekable();
    let ticks = ((end - start) / TICK) as usize;
    let mut samples = Vec::with_capacity(ticks);
    for tick in 1..=ticks {
        let until = start + tick as f64 * TICK;
        loop {
            let arrival = coming.peek().map_or(f64::INFINITY, |request| request.at);
            let completion = server.next_end();
            if arrival.min(completion) >= until {
                break;
            }
            if completion <= arrival {
                server.complete(completion);
            } else if let Some(request) = coming.next() {
                server.arrive(request, arrival);
            }
        }
        samples.push(server.sample(until, until - start));
    }
    samples
}

struct Server<'a> {
    engine: &'a Engine,
    running: BinaryHeap<Reverse<Running>>,
    waiting: VecDeque<Request>,
    /// Tokens promised to those that run.
    held_tokens: f64,
    /// KV tokens in use are `kv_constant + kv_slope * time`: each prompt at once, each output
    /// token by token.
    kv_constant: f64,
    kv_slope: f64,
    load: Load,
}

impl Server<'_> {
    fn next_end(&self) -> f64 {
        self.running
            .peek()
            .map_or(f64::INFINITY, |first| f64::from_bits(first.0.end))
    }

    fn kv_tokens(&self, now: f64) -> f64 {
        (self.kv_constant + self.kv_slope * now).max(0.0)
    }

    fn arrive(&mut self, request: &Request, now: f64) {
        if self.waiting.len() < LONGEST_QUEUE {
            self.waiting.push_back(*request);
        }
        self.admit(now);
    }

    fn admit(&mut self, now: f64) {
        while let Some(request) = self.waiting.front() {
            let tokens = f64::from(request.prompt + request.output);
            let has_place = self.running.len() < self.engine.max_batch;
            let has_room = self.held_tokens + tokens <= self.engine.pool_tokens;
            if !has_place || !has_room {
                break;
            }
            let took = self.engine.residence(request, self.running.len());
            self.running.push(Reverse(Running {
                end: (now + took).to_bits(),
                began: now.to_bits(),
                prompt: request.prompt,
                output: request.output,
            }));
            self.held_tokens += tokens;
            let slope = f64::from(request.output) / took;
            self.kv_slope += slope;
            self.kv_constant += f64::from(request.prompt) - slope * now;
            self.load.longest_prompt = self.load.longest_prompt.max(f64::from(request.prompt));
            self.waiting.pop_front();
            self.note_peaks(now);
        }
    }

    fn complete(&mut self, now: f64) {
        self.note_peaks(now);
        let Some(Reverse(done)) = self.running.pop() else {
            return;
        };
        let (prompt, output) = (f64::from(done.prompt), f64::from(done.output));
        let began = f64::from_bits(done.began);
        let slope = output / (f64::from_bits(done.end) - began);
        self.kv_slope -= slope;
        self.kv_constant -= prompt - slope * began;
        self.held_tokens -= prompt + output;
        if self.running.is_empty() {
            // Rounding errors do not outlive a quiet moment.
            (self.kv_slope, self.kv_constant, self.held_tokens) = (0.0, 0.0, 0.0);
        }
        self.load.completed += 1.0;
        self.load.completed_now += 1.0;
        self.load.prompt_tokens += prompt;
        self.load.output_tokens += output;
        self.admit(now);
    }

    fn note_peaks(&mut self, now: f64) {
        self.load.running_peak = self.load.running_peak.max(self.running.len() as f64);
        self.load.kv_peak = self.load.kv_peak.max(self.kv_tokens(now));
    }

    fn sample(&mut self, now: f64, age: f64) -> Load {
        self.note_peaks(now);
        let began = self
            .running
            .iter()
            .map(|running| f64::from_bits(running.0.began));
        let oldest = began.fold(now, f64::min);
        self.load.age = age;
        self.load.running = self.running.len() as f64;
        self.load.waiting = self.waiting.len() as f64;
        self.load.kv_tokens = self.kv_tokens(now);
        self.load.oldest = now - oldest;
        let sample = self.load;
        self.load.completed_now = 0.0;
        self.load.running_peak = sample.running;
        self.load.kv_peak = sample.kv_tokens;
        sample
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn engine(max_batch: usize) -> Engine {
        Engine {
            max_batch,
            pool_tokens: 1e9,
            prefill_rate: 1000.0,
            decode_rate: 10.0,
            half_speed_batch: f64::INFINITY,
        }
    }

    fn at(at: f64) -> Request {
        Request {
            at,
            prompt: 1000,
            output: 90,
        }
    }

    /// By hand: 1 s of prefill and 9 s of decoding each, one at a time.
    #[test]
    fn a_batch_of_one_serves_in_turn() {
        let requests: Vec<Request> = (0..8).map(|_| at(0.5)).collect();
        let samples = serve(&engine(1), &requests, 0.0, 0.0, 120.0);
        let first = &samples[0];
        assert_eq!(
            (first.completed, first.running, first.waiting),
            (5.0, 1.0, 2.0)
        );
        assert!((first.oldest - 9.5).abs() < 1e-9, "{}", first.oldest);
        // 1000 of the prompt and nine tenths of 90 and a half.
        assert!(
            (first.kv_tokens - 1085.5).abs() < 1e-6,
            "{}",
            first.kv_tokens
        );
        let second = &samples[1];
        assert_eq!(
            (second.completed, second.completed_now, second.running),
            (8.0, 3.0, 0.0)
        );
        assert_eq!(second.kv_tokens, 0.0);
        assert_eq!(second.output_tokens, 720.0);
    }

    /// Little's law: requests in the engine = arrivals a second x seconds in the engine. Without a
    /// queue and with constant service every term is known: 2 a second, 10 s.
    #[test]
    fn follows_littles_law() {
        let mut random = Pcg64Mcg::seed_from_u64(7);
        let mut now = 0.0;
        let mut requests = Vec::new();
        while now < 48.0 * 3600.0 {
            now += -random.random_range(f64::MIN_POSITIVE..1.0f64).ln() / 2.0;
            requests.push(at(now));
        }
        let samples = serve(&engine(1000), &requests, 0.0, 0.0, 48.0 * 3600.0);
        let mean = samples[1..].iter().map(|s| s.running).sum::<f64>() / (samples.len() - 1) as f64;
        assert!((mean - 20.0).abs() < 0.5, "{mean}");
        let kv = samples[1..].iter().map(|s| s.kv_tokens).sum::<f64>() / (samples.len() - 1) as f64;
        // Half of an output is there on average.
        assert!((kv / (20.0 * 1045.0) - 1.0).abs() < 0.03, "{kv}");
    }

    #[test]
    fn the_pool_bounds_who_runs() {
        let mut engine = engine(1000);
        engine.pool_tokens = 3.0 * 1090.0;
        let requests: Vec<Request> = (0..200).map(|i| at(f64::from(i) * 0.1)).collect();
        let samples = serve(&engine, &requests, 0.0, 0.0, 600.0);
        assert!(
            samples
                .iter()
                .all(|s| s.running_peak <= 3.0 && s.kv_peak <= 3270.0)
        );
        assert_eq!(samples[9].completed, 177.0);
    }

    #[test]
    fn who_comes_while_the_model_loads_goes_elsewhere() {
        let requests = [at(10.0), at(70.0)];
        let samples = serve(&engine(4), &requests, 0.0, 60.0, 120.0);
        assert_eq!(samples[1].completed, 1.0);
    }
}
