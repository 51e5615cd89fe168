//! What the agent spends on one copied stack: this process copies its own, some frames deep, as the
//! kernel side would, and has the agent's code resolve it over and over.

use std::arch::asm;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};
use vramscope_agent::probes::copies::Copied;
use vramscope_agent::probes::record::Quality;
use vramscope_agent::stacks::{Stacks, Taken};

#[derive(Debug, Args)]
pub struct Unwind {
    /// Return addresses that the stack is to have.
    #[arg(long, default_value_t = 40)]
    frames: usize,
    /// Bytes of the stack that are copied.
    #[arg(long, default_value_t = 16384)]
    bytes: usize,
    #[arg(long, default_value_t = 20_000)]
    times: usize,
}

/// Registers and bytes of a stack.
struct Taking {
    ip: u64,
    sp: u64,
    bp: u64,
    bytes: Vec<u8>,
}

impl Taking {
    #[inline(never)]
    fn here(limit: usize) -> Self {
        let (ip, sp, bp): (u64, u64, u64);
        // SAFETY: registers are read, and nothing is changed.
        unsafe {
            asm!(
                "lea {0}, [rip]", "mov {1}, rsp", "mov {2}, rbp",
                out(reg) ip, out(reg) sp, out(reg) bp,
                options(nostack, preserves_flags),
            );
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let end = maps.lines().find_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let hex = |text| u64::from_str_radix(text, 16).ok();
            let range = hex(start)?..hex(end)?;
            range.contains(&sp).then_some(range.end)
        });
        let bytes = limit.min((end.unwrap_or(sp) - sp) as usize);
        // SAFETY: the thread's own stack, which is mapped up to there.
        let bytes = unsafe { std::slice::from_raw_parts(sp as *const u8, bytes) }.to_vec();
        Self { ip, sp, bp, bytes }
    }

    fn taken(&self) -> Taken<'_> {
        Taken {
            copied: Some(Copied {
                ip: self.ip,
                sp: self.sp,
                bp: self.bp,
                returns: [(0, 0); 8],
                bytes: &self.bytes,
            }),
            ..Taken::default()
        }
    }
}

/// `depth` frames down.
#[inline(never)]
fn below(depth: usize, limit: usize) -> Taking {
    if black_box(depth) == 0 {
        return black_box(Taking::here(limit));
    }
    // Work after the call keeps it from becoming a jump, which would leave no frame.
    black_box(below(depth - 1, limit))
}

/// Prints microseconds for a stack: the first in a new process, and each one after.
pub fn run(options: &Unwind) -> Result<Value> {
    // What the program's start adds is found out first.
    let (_, found) = measure(options, options.frames)?;
    let depth = (2 * options.frames).saturating_sub(found);
    let (measured, found) = measure(options, depth)?;
    if found != options.frames {
        bail!("the stack has {found} frames and not {}", options.frames);
    }
    Ok(measured)
}

/// The figures for a stack so many frames down, and the frames it has in all.
fn measure(options: &Unwind, depth: usize) -> Result<(Value, usize)> {
    let taking = below(depth, options.bytes);
    let pid = std::process::id();
    let mut stacks = Stacks::new(vramscope_agent::stacks::symbols::Options::default());
    let mut resolve = || stacks.resolve(pid, "cudaMalloc", &taking.taken(), Vec::new, || None);
    let started = Instant::now();
    let first = resolve();
    let cold_us = started.elapsed().as_secs_f64() * 1e6;
    let times = (options.times / ROUNDS).max(1);
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for _ in 0..times {
            if black_box(resolve()) != first {
                bail!("one stack has two outcomes");
            }
        }
        rounds.push(started.elapsed().as_secs_f64() * 1e6 / times as f64);
    }
    rounds.sort_by(f64::total_cmp);
    if first.quality != Quality::Full {
        bail!("the stack is {} and not whole", first.quality.name());
    }
    stacks.settle(Duration::from_secs(60));
    let rows = stacks.name_new();
    // The probed function comes first, and was no address. Inlined functions have no rows of their
    // own without debug information.
    let found = rows.first().map_or(0, |row| row.frames.len() - 1);
    let figures = json!({
        "unwind_us": rounds[rounds.len() / 2],
        "cold_us": cold_us,
        "frames": found,
    });
    Ok((figures, found))
}

const ROUNDS: usize = 20;
