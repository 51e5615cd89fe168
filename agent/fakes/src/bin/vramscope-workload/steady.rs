//! `churn` and `live`: load for benchmarks, from as many call stacks as wanted.

use std::{
    hint::black_box,
    io::{BufRead, Write},
    time::{Duration, Instant},
};

use anyhow::Context;

use super::{
    driver::Driver,
    paced::{is_asked_to_stop, stop_on_signals},
    runtime::{Address, Runtime},
};

const STEP_BYTES: usize = 4096;
const SIZES: u64 = 64;
/// How far ahead of its time the loop may run before it sleeps: sleeping costs more than a pair.
const AHEAD: Duration = Duration::from_millis(1);
/// So many pairs pass between two looks at the clock where the rate is not limited.
const UNLIMITED_BATCH: u64 = 64;

/// Which library is called.
pub enum Layer {
    Runtime(Runtime),
    Driver(Driver),
}

impl Layer {
    pub fn load(driver_only: bool) -> anyhow::Result<Self> {
        if !driver_only {
            return Ok(Self::Runtime(Runtime::load()?));
        }
        let driver = Driver::load()?;
        let context = driver.retain_primary(0)?;
        driver.set_current(context)?;
        Ok(Self::Driver(driver))
    }

    fn allocate(&self, bytes: usize) -> anyhow::Result<usize> {
        match self {
            Self::Runtime(runtime) => Ok(runtime.malloc(bytes)?.0),
            Self::Driver(driver) => driver.allocate(bytes),
        }
    }

    fn free(&self, address: usize) -> anyhow::Result<()> {
        match self {
            Self::Runtime(runtime) => runtime.check("cudaFree", runtime.try_free(Address(address))),
            Self::Driver(driver) => driver.free(address),
        }
    }
}

/// Pairs of an allocation and its free, one after the other, for a time; `rate` pairs a second, 0 for
/// as many as can be. Says on standard output how many there were.
pub fn churn(layer: &Layer, duration: Duration, rate: u64, stacks: u64) -> anyhow::Result<()> {
    stop_on_signals();
    let depth = bits_for(stacks);
    let started = Instant::now();
    let mut pairs = 0;
    'run: while !is_asked_to_stop() {
        let elapsed = started.elapsed();
        if elapsed >= duration {
            break;
        }
        let due = match rate {
            0 => pairs + UNLIMITED_BATCH,
            _ => (elapsed.as_secs_f64() * rate as f64) as u64 + 1,
        };
        while pairs < due {
            let stack = pairs % stacks;
            let bytes = (stack % SIZES + 1) as usize * STEP_BYTES;
            let block = descend(stack, depth, &|| layer.allocate(bytes))?;
            layer.free(block)?;
            pairs += 1;
            if rate == 0 && pairs % UNLIMITED_BATCH == 0 && is_asked_to_stop() {
                break 'run;
            }
        }
        if rate > 0 {
            let next = Duration::from_secs_f64(pairs as f64 / rate as f64);
            let ahead = next.saturating_sub(started.elapsed());
            if ahead > AHEAD {
                std::thread::sleep(ahead.min(Duration::from_millis(50)));
            }
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("pairs {pairs}");
    println!("calls {}", 2 * pairs);
    eprintln!("{:.0} calls a second", 2.0 * pairs as f64 / seconds);
    Ok(())
}

/// So many blocks, all alive; then waits for a line on standard input, or its end, and exits with
/// them.
pub fn live(layer: &Layer, count: u64, stacks: u64) -> anyhow::Result<()> {
    let depth = bits_for(stacks);
    for index in 0..count {
        descend(index % stacks, depth, &|| layer.allocate(STEP_BYTES))
            .context("the card is full: use a smaller count")?;
    }
    wait_for_a_line()
}

/// Says "waiting" on standard output and waits for a line on standard input, or its end.
pub fn wait_for_a_line() -> anyhow::Result<()> {
    println!("waiting");
    std::io::stdout().flush().context("failed to say so")?;
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .context("failed to read standard input")?;
    Ok(())
}

fn bits_for(stacks: u64) -> u32 {
    stacks.next_power_of_two().trailing_zeros()
}

/// Calls `action` from a stack of its own for each number: at each level one of two functions is
/// called, as the number's next bit says.
fn descend<T>(number: u64, depth: u32, action: &dyn Fn() -> T) -> T {
    if depth == 0 {
        return action();
    }
    if number & 1 == 0 {
        turn_left(number >> 1, depth - 1, action)
    } else {
        turn_right(number >> 1, depth - 1, action)
    }
}

#[inline(never)]
fn turn_left<T>(number: u64, depth: u32, action: &dyn Fn() -> T) -> T {
    // Something is left to do after the call, so the call stays a call.
    black_box(descend(number, depth, action))
}

#[inline(never)]
fn turn_right<T>(number: u64, depth: u32, action: &dyn Fn() -> T) -> T {
    // Unlike its neighbour in its code, or an optimiser could make them one.
    black_box(descend(number, black_box(depth), action))
}
