//! Rounds of calls: the same function in several copies of one library, each hooked by somebody
//! else (nobody, empty probes, the agent, a peer), called in turns within one process.
//!
//! Invariants:
//! - the copies are files of their own, since the kernel hooks a file and not a path;
//! - a round calls every copy, in an order that rotates, so that a slow moment of the machine
//!   meets all of them; what counts is the median over rounds;
//! - all calls of a function come from the same place, with the same stack below them.

use std::ffi::{CString, c_int, c_void};
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::empty;

/// Frames of our own below the call, besides those of the runtime's start.
const FRAMES: u32 = 8;
/// The size that a peer's probe finds in the second argument.
const SECOND_ARGUMENT: usize = 4096;

#[derive(Debug, Args)]
pub struct Rounds {
    /// The function's name.
    #[arg(long)]
    symbol: String,
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
    /// Time between rounds, for whoever reads the records.
    #[arg(long, default_value_t = 2)]
    pause_ms: u64,
}

fn named_path(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("expected NAME=PATH")?;
    Ok((name.to_string(), path.into()))
}

type Function = unsafe extern "C" fn(*mut usize, usize) -> c_int;

/// Prints the median nanoseconds of a call by copy, and how many calls each copy got.
pub fn run(options: &Rounds) -> Result<Value> {
    let functions = options
        .copies
        .iter()
        .map(|(_, path)| load(path, &options.symbol))
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

    let mut times = vec![Vec::with_capacity(options.rounds); functions.len()];
    // The first round fills caches and page tables.
    for round in 0..=options.rounds {
        for turn in 0..functions.len() {
            let copy = (turn + round) % functions.len();
            let took = below(FRAMES, functions[copy], options.calls)?;
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
    Ok(json!({
        "ns": medians,
        "calls": (options.rounds + 1) * options.calls,
    }))
}

/// Makes the stack deep, then calls.
#[inline(never)]
fn below(frames: u32, function: Function, calls: usize) -> Result<Duration> {
    if black_box(frames) == 0 {
        return call(function, calls);
    }
    let took = below(frames - 1, function, calls);
    // Work after the call keeps it from becoming a jump, which would leave no frame.
    black_box(took)
}

#[inline(never)]
fn call(function: Function, calls: usize) -> Result<Duration> {
    let mut out = 0;
    let mut failed = 0;
    let started = Instant::now();
    for _ in 0..calls {
        // SAFETY: one output and a number, as the callee's functions take.
        failed |= unsafe { function(&raw mut out, black_box(SECOND_ARGUMENT)) };
    }
    let took = started.elapsed();
    if failed != 0 || out == 0 {
        bail!("the function under test failed");
    }
    Ok(took)
}

fn load(path: &std::path::Path, symbol: &str) -> Result<Function> {
    let shown = path.display();
    let path = CString::new(path.as_os_str().as_encoded_bytes())
        .with_context(|| format!("{shown} has a zero byte"))?;
    let symbol = CString::new(symbol).context("the function's name has a zero byte")?;
    // SAFETY: loading runs the library's initialisers, of which ours has none.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        bail!("failed to load {shown}");
    }
    // SAFETY: an open handle and a string with its zero byte.
    let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    if address.is_null() {
        bail!("{shown} has no {}", symbol.to_string_lossy());
    }
    // SAFETY: all functions of the callee have two arguments of these classes and this result.
    Ok(unsafe { std::mem::transmute::<*mut c_void, Function>(address) })
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
