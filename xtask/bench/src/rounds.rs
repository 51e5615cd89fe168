//! Rounds of calls: the same function in several copies of one library, each hooked by somebody
//! else (nobody, empty probes, the agent, a peer), called in turns within one process.
//!
//! Invariants:
//! - the copies are files of their own, since the kernel hooks a file and not a path;
//! - a round calls every copy, in an order that rotates, so that a slow moment of the machine
//!   meets all of them; what counts is the median over rounds;
//! - all calls of a function come from the same place, with the same stack below them.

use std::ffi::{CString, c_void};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::empty;
use crate::library::{Alloc, Free, Library};

/// Frames of our own below the call, besides those of the runtime's start.
const FRAMES: u32 = 4;
/// The size that a peer's probe finds in the second argument.
const SECOND_ARGUMENT: usize = 4096;

#[derive(Debug, Args)]
pub struct Rounds {
    /// The function's name.
    #[arg(long)]
    symbol: String,
    /// A function that takes back what each call gave, outside of the measured time.
    #[arg(long)]
    release: Option<String>,
    /// A copy of the library: NAME=PATH.
    #[arg(long = "copy", value_parser = named_path)]
    copies: Vec<(String, PathBuf)>,
    /// The copy that gets an empty probe at entry and one at return.
    #[arg(long)]
    empty: Option<String>,
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// Calls of one copy in one round.
    #[arg(long, default_value_t = 500)]
    calls: usize,
    /// Bytes of stack to have above the calls, besides what their frames take.
    #[arg(long, default_value_t = 0)]
    deep: usize,
    /// Time between rounds, for whoever reads the records.
    #[arg(long, default_value_t = 5)]
    pause_ms: u64,
}

fn named_path(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("expected NAME=PATH")?;
    Ok((name.to_string(), path.into()))
}

/// The function under test in one copy, and the one that undoes it.
struct Side {
    function: Alloc,
    release: Option<Free>,
}

/// Prints the median nanoseconds of a call by copy, and how many calls each copy got.
pub fn run(options: &Rounds) -> Result<Value> {
    let sides = options
        .copies
        .iter()
        .map(|(_, path)| Side::load(path, &options.symbol, options.release.as_deref()))
        .collect::<Result<Vec<_>>>()?;
    let probes = options
        .empty
        .as_ref()
        .map(|name| {
            let (_, path) = options
                .copies
                .iter()
                .find(|(copy, _)| copy == name)
                .with_context(|| format!("no copy is named {name:?}"))?;
            empty::attach(path, &options.symbol)
        })
        .transpose()?;

    let mut times = vec![Vec::with_capacity(options.rounds); sides.len()];
    let mut given = vec![0; options.calls];
    // The first round fills caches and page tables.
    for round in 0..=options.rounds {
        for turn in 0..sides.len() {
            let copy = (turn + round) % sides.len();
            let took = deep(options.deep, &sides[copy], &mut given)?;
            if round > 0 {
                times[copy].push(took.as_nanos() as f64 / options.calls as f64);
            }
        }
        std::thread::sleep(Duration::from_millis(options.pause_ms));
    }
    drop(probes);

    let medians: serde_json::Map<String, Value> = options
        .copies
        .iter()
        .zip(&mut times)
        .map(|((name, _), times)| (name.clone(), json!(median(times))))
        .collect();
    let each = 1 + usize::from(options.release.is_some());
    Ok(json!({
        "ns": medians,
        "calls": (options.rounds + 1) * options.calls * each,
    }))
}

/// Uses so many bytes of stack, then goes on.
#[inline(never)]
fn deep(bytes: usize, side: &Side, given: &mut [usize]) -> Result<Duration> {
    const PIECE: usize = 4096;
    if bytes == 0 {
        return below(FRAMES, side, given);
    }
    let piece = black_box([1u8; PIECE]);
    let took = deep(bytes.saturating_sub(PIECE), side, given);
    black_box(&piece);
    took
}

/// Makes the stack deep, then calls.
#[inline(never)]
fn below(frames: u32, side: &Side, given: &mut [usize]) -> Result<Duration> {
    if black_box(frames) == 0 {
        return side.call(given);
    }
    // Work after the call keeps it from becoming a jump, which would leave no frame.
    black_box(below(frames - 1, side, given))
}

impl Side {
    fn load(path: &Path, symbol: &str, release: Option<&str>) -> Result<Self> {
        let library = Library::load(path)?;
        let address = |symbol: &str| {
            let symbol = CString::new(symbol).context("a function's name has a zero byte")?;
            library.address(&symbol)
        };
        let release = release.map(address).transpose()?;
        // SAFETY: the callee's functions that give something have these arguments, and the one
        // that takes it back has that.
        let (function, release) = unsafe {
            (
                std::mem::transmute::<*mut c_void, Alloc>(address(symbol)?),
                release.map(|address| std::mem::transmute::<*mut c_void, Free>(address)),
            )
        };
        Ok(Self { function, release })
    }

    /// One call for each place; gives the time they took together.
    #[inline(never)]
    fn call(&self, given: &mut [usize]) -> Result<Duration> {
        let mut failed = 0;
        let started = Instant::now();
        for out in given.iter_mut() {
            // SAFETY: one output and a number, as the callee's functions take.
            failed |= unsafe { (self.function)(out, black_box(SECOND_ARGUMENT)) };
        }
        let took = started.elapsed();
        for address in given {
            let Some(release) = self.release else { break };
            // SAFETY: what a call above gave.
            failed |= unsafe { release(*address) };
        }
        if failed != 0 {
            bail!("the function under test failed");
        }
        Ok(took)
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_have_names() {
        assert_eq!(
            named_path("bare=/x/a=b.so"),
            Ok(("bare".into(), "/x/a=b.so".into()))
        );
        assert!(named_path("/x/a.so").is_err());
    }
}
