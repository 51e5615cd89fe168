//! What the agent is measured with: a stream of allocations and frees at a pace, or a large live
//! set, from many distinct stacks.
//!
//! Which stack, size and block comes next is drawn from a generator with a fixed seed: no column
//! is regular, and every run is the same.

use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

use crate::library::{Driver, Library};

/// Blocks that live at once in a stream.
const LIVE: usize = 1000;
/// Two ways at each of eight levels make 256 stacks.
const LEVELS: u32 = 8;
/// Calls between two looks at the clock.
const BURST: u64 = 32;

/// A stream of allocations and frees.
#[derive(Debug, Args)]
pub struct Churn {
    /// The callee.
    library: PathBuf,
    #[arg(long)]
    seconds: u64,
    /// Calls a second.
    #[arg(long)]
    rate: u64,
    /// Distinct stacks, of allocations and again of frees.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=256))]
    stacks: u32,
}

/// Allocations that stay.
#[derive(Debug, Args)]
pub struct Live {
    /// The callee.
    library: PathBuf,
    #[arg(long)]
    count: u64,
    /// Calls a second.
    #[arg(long)]
    rate: u64,
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=256))]
    stacks: u32,
}

/// Prints how many calls there were and in how long.
pub fn run(options: &Churn) -> Result<Value> {
    let driver = Driver::start(&Library::load(&options.library)?)?;
    let mut draw = Draw(1);
    let mut blocks = vec![0; LIVE];
    let planned = options.seconds * options.rate;
    let mut pace = Pace::new(options.rate);
    while pace.calls < planned && pace.started.elapsed() < Duration::from_secs(options.seconds + 5)
    {
        let slot = draw.below(LIVE as u32) as usize;
        let stack = draw.below(options.stacks);
        if blocks[slot] != 0 {
            free_from(&driver, stack, blocks[slot])?;
            pace.made_one();
        }
        blocks[slot] = allocate_from(&driver, stack, draw.bytes())?;
        pace.made_one();
    }
    Ok(pace.told())
}

/// Makes the live set, then waits to be ended.
pub fn live(options: &Live) -> Result<Value> {
    let driver = Driver::start(&Library::load(&options.library)?)?;
    let mut draw = Draw(1);
    let mut pace = Pace::new(options.rate);
    for _ in 0..options.count {
        allocate_from(&driver, draw.below(options.stacks), draw.bytes())?;
        pace.made_one();
    }
    println!("live");
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Calls made, no more than the rate allows: a late call is made up for.
struct Pace {
    started: Instant,
    rate: u64,
    calls: u64,
}

impl Pace {
    fn new(rate: u64) -> Self {
        Self {
            started: Instant::now(),
            rate,
            calls: 0,
        }
    }

    fn made_one(&mut self) {
        self.calls += 1;
        if !self.calls.is_multiple_of(BURST) {
            return;
        }
        let due = Duration::from_secs_f64(self.calls as f64 / self.rate as f64);
        loop {
            let early = due.saturating_sub(self.started.elapsed());
            if early.is_zero() {
                return;
            }
            // A sleep is some 60 us longer than asked for.
            if early > Duration::from_micros(200) {
                std::thread::sleep(early - Duration::from_micros(100));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn told(&self) -> Value {
        json!({"calls": self.calls, "seconds": self.started.elapsed().as_secs_f64()})
    }
}

/// Marsaglia's xorshift64*.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u32) -> u32 {
        (((self.next() >> 32) * u64::from(end)) >> 32) as u32
    }

    /// Sizes as of tensors: 512 bytes to 64 MiB, each power of two as likely as the next, with
    /// one of four steps between.
    fn bytes(&mut self) -> usize {
        let power = 9 + self.below(17);
        (1 << power) + (1 << (power - 2)) * self.below(4) as usize
    }
}

fn allocate_from(driver: &Driver, stack: u32, bytes: usize) -> Result<usize> {
    descend(LEVELS, stack, &mut || driver.alloc(bytes))
}

fn free_from(driver: &Driver, stack: u32, address: usize) -> Result<()> {
    descend(LEVELS, stack, &mut || driver.free(address).map(|()| 0)).map(|_| ())
}

type Call<'a> = &'a mut dyn FnMut() -> Result<usize>;

/// Every bit of `stack` chooses one of two callers, so that each number is a stack of its own.
#[inline(never)]
fn descend(level: u32, stack: u32, call: Call<'_>) -> Result<usize> {
    if level == 0 {
        return black_box(call());
    }
    if stack & 1 == 0 {
        even(level - 1, stack >> 1, call)
    } else {
        odd(level - 1, stack >> 1, call)
    }
}

#[inline(never)]
fn even(level: u32, stack: u32, call: Call<'_>) -> Result<usize> {
    // Work after the call keeps it from becoming a jump, which would leave no frame.
    black_box(descend(level, stack, call))
}

#[inline(never)]
fn odd(level: u32, stack: u32, call: Call<'_>) -> Result<usize> {
    black_box(black_box(descend(level, stack, call)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_fill_their_range() {
        let mut draw = Draw(1);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[draw.below(7) as usize] = true;
            let bytes = draw.bytes();
            assert!((512..128 << 20).contains(&bytes) && bytes.is_multiple_of(128));
        }
        assert_eq!(seen, [true; 7]);
    }
}
