//! Simulates some hosts and says what they are like:
//! `cargo run -p vramscope-leaksim --example runs -- SEED COUNT`.

use std::time::Instant;

use vramscope_leaksim::{Condition, Kind, Simulator, TUNING_SEEDS};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (first, count) = (number(TUNING_SEEDS.start)?, number(5)?);
    let simulator = Simulator::find()?;
    if !simulator.has_real_traces() {
        println!("no traces (VRAMSCOPE_SHARED): made-up ones are replayed");
    }
    for seed in first..first + count {
        let began = Instant::now();
        let run = simulator.run(seed, &Condition::leaky(Kind::Request, 10_000.0));
        let took = began.elapsed().as_millis();
        let samples = run.traffic.len().max(1) as f64;
        let mean = |of: fn(&vramscope_leaksim::Traffic) -> i64| {
            run.traffic
                .iter()
                .map(|sample| of(sample) as f64)
                .sum::<f64>()
                / samples
        };
        let end = run.windows.last().map_or(0.0, |window| window.start) - 600.0;
        let mut live = std::collections::HashMap::new();
        for window in run.windows.iter().filter(|window| window.start < end) {
            live.insert(window.stack, window.live_bytes);
        }
        println!(
            "seed {seed}: {} {:.1}/s, {:.0} requests, {} processes, running {:.1}, waiting {:.1}, \
             KV pages {:.0} of {:.0}, {} rows, {:.1} GB live, leaked {:.2} GB on {:?}, {took} ms",
            run.truth.trace,
            run.truth.mean_rate,
            run.truth.requests,
            run.processes.len(),
            mean(|sample| sample.running),
            mean(|sample| sample.waiting),
            mean(|sample| sample.kv_used_pages),
            mean(|sample| sample.kv_total_pages),
            run.windows.len(),
            live.values().sum::<i64>() as f64 / 1e9,
            run.truth.leaked_bytes / 1e9,
            run.truth.planted_on,
        );
    }
    Ok(())
}
