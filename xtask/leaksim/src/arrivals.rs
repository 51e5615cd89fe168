//! When requests reach one host: slices of a real trace, one after the other, played faster or
//! slower so that the rate follows the hour of the day, bursts and quiet times.
//!
//! Stretching time keeps what a trace has at the scale of seconds and minutes (its bursts, its
//! pairing of lengths), and adds what an hour of trace cannot have.

use rand::RngExt;
use rand_pcg::Pcg64Mcg;

use crate::draw::{log_uniform, poisson};
use crate::traces::{Request, Trace};

const HOUR: f64 = 3600.0;
const DAY: f64 = 24.0 * HOUR;

/// Requests a second of one host over its run.
#[derive(Debug, Clone)]
pub(crate) struct Pattern {
    mean_rate: f64,
    amplitude: f64,
    phase: f64,
    /// From, to, factor. A factor of 0 is a quiet time: nothing comes.
    bursts: Vec<(f64, f64, f64)>,
}

impl Pattern {
    /// Draws a host's pattern: 1 to 5 requests a second on average (the traces have 2.5 to 5.5),
    /// by day up to 1.9 times and by night down to 0.1 times of that, some bursts a day, and on
    /// most hosts a few quiet times (maintenance, drained for a moment).
    pub(crate) fn draw(random: &mut Pcg64Mcg, seconds: f64) -> Self {
        let days = seconds / DAY;
        let mut bursts = Vec::new();
        for _ in 0..poisson(random, 6.0 * days) {
            let from = random.random_range(0.0..seconds);
            let long = log_uniform(random, 180.0, 2400.0);
            bursts.push((from, from + long, random.random_range(1.3..2.5)));
        }
        if random.random_bool(0.7) {
            for _ in 0..1 + poisson(random, 1.5 * days) {
                let from = random.random_range(0.0..seconds);
                bursts.push((from, from + random.random_range(480.0..1500.0), 0.0));
            }
        }
        Self {
            mean_rate: log_uniform(random, 1.0, 5.0),
            amplitude: random.random_range(0.2..0.9),
            phase: random.random_range(0.0..DAY),
            bursts,
        }
    }

    pub(crate) fn mean_rate(&self) -> f64 {
        self.mean_rate
    }

    fn rate(&self, at: f64) -> f64 {
        let angle = (at - self.phase) / DAY * std::f64::consts::TAU;
        let of_the_day = self.mean_rate * (1.0 + self.amplitude * angle.cos());
        let now = self
            .bursts
            .iter()
            .filter(|(from, to, _)| (*from..*to).contains(&at));
        // A quiet time wins over a burst.
        now.fold(of_the_day, |rate, (_, _, factor)| rate * factor)
    }
}

/// The requests of one host, in order of time; `at` is seconds after the run's begin.
pub(crate) fn replay(
    trace: &Trace,
    pattern: &Pattern,
    seconds: f64,
    random: &mut Pcg64Mcg,
) -> Vec<Request> {
    let mut requests = Vec::with_capacity((pattern.mean_rate * seconds) as usize);
    let (span, natural) = (trace.span(), trace.rate());
    let mut slice_end = 0.0;
    let mut position = 0.0;
    let mut next = 0;
    let mut now = 0.0;
    // Within a second the rate is taken as constant.
    while now < seconds {
        if position >= slice_end {
            let long = random.random_range(600.0..1800.0);
            position = random.random_range(0.0..span - long);
            slice_end = position + long;
            next = trace
                .requests
                .partition_point(|request| request.at < position);
        }
        let speed = pattern.rate(now) / natural;
        let until = position + speed;
        while let Some(request) = trace.requests.get(next).filter(|r| r.at < until) {
            let at = now + (request.at - position) / speed;
            requests.push(Request { at, ..*request });
            next += 1;
        }
        position = until;
        now += 1.0;
    }
    requests
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;
    use crate::traces::Traces;

    /// The number of requests is the integral of the rate, by a sum of its own.
    #[test]
    fn the_pace_is_what_the_pattern_says() {
        let traces = Traces::made_up();
        for (index, trace) in traces.all().iter().enumerate() {
            let mut random = Pcg64Mcg::seed_from_u64(index as u64);
            let pattern = Pattern::draw(&mut random, 48.0 * HOUR);
            let requests = replay(trace, &pattern, 48.0 * HOUR, &mut random);
            let expected: f64 = (0..48 * 3600).map(|s| pattern.rate(f64::from(s))).sum();
            let ratio = requests.len() as f64 / expected;
            assert!((0.9..1.1).contains(&ratio), "{}: {ratio}", trace.name);
            assert!(requests.windows(2).all(|pair| pair[0].at <= pair[1].at));
        }
    }

    #[test]
    fn nothing_comes_in_a_quiet_time() {
        let traces = Traces::made_up();
        let pattern = Pattern {
            mean_rate: 3.0,
            amplitude: 0.5,
            phase: 0.0,
            bursts: vec![(100.0, 900.0, 2.0), (300.0, 600.0, 0.0)],
        };
        let mut random = Pcg64Mcg::seed_from_u64(1);
        let requests = replay(&traces.all()[0], &pattern, HOUR, &mut random);
        let within = requests.iter().filter(|r| (300.0..600.0).contains(&r.at));
        assert_eq!(within.count(), 0);
        assert!(requests.len() > 5000);
    }
}
