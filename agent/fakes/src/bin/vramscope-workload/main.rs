//! `vramscope-workload`: programs that use GPU memory in known ways, to trace.
//!
//! It loads the CUDA libraries at run time by their plain names, so `LD_LIBRARY_PATH` chooses
//! between the vendor's and the stand-ins. Every scenario is deterministic: its totals can be worked
//! out by hand from its arguments. Functions that allocate are never inlined and are named for
//! what they do, so that their stacks can be told apart.
//!
//! Exit codes: 0 done, 1 a call did not do what the scenario needs, 2 bad arguments, 3 no CUDA
//! library; `exit-code` and `crash` end as asked.

mod cuda;
mod demo;
mod ends;
mod library;
mod paced;
mod runtime;
mod threads;

use std::{process::ExitCode, time::Duration};

use clap::{Parser, Subcommand};

use crate::library::LibraryMissing;

/// Use GPU memory in known ways. LD_LIBRARY_PATH chooses the CUDA libraries.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// Serve requests as an inference server does: weights, KV cache, activations, pinned buffers,
    /// a leak of 1 MiB a request, a failed allocation, a double free; ends with live memory.
    Demo {
        /// How many requests to serve.
        #[arg(long, default_value_t = 100)]
        requests: u64,
    },
    /// Allocate and free from many threads, some blocks freed by another thread than allocated them.
    /// The peak is reached before, by one thread, so it is always the same.
    Threads {
        /// How many threads.
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=256))]
        threads: u64,
        /// Allocations of each thread.
        #[arg(long, default_value_t = 1024)]
        iterations: u64,
        /// Chooses the order of the sizes.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Allocate and free at a steady rate, leaking every tenth block; SIGTERM ends it cleanly.
    Paced {
        /// How long, in seconds.
        #[arg(long, default_value_t = 10)]
        seconds: u64,
        /// Pairs of an allocation and a free a second.
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
        rate: u64,
    },
    /// Fork a child that allocates by itself and exits, then allocate in the parent.
    Fork {
        /// Use CUDA before the fork too. The vendor's driver refuses the child's calls then; the
        /// stand-ins give it a fresh start.
        #[arg(long)]
        after_use: bool,
    },
    /// Allocate, then exit with a code without freeing.
    ExitCode {
        /// The code.
        code: u8,
    },
    /// Allocate, then abort.
    Crash,
    /// Allocate, sleep, and exit without freeing.
    Sleep {
        /// How long, in seconds.
        seconds: u64,
    },
    /// Use the driver interface alone, without the runtime library.
    Driver,
}

fn main() -> ExitCode {
    match run(Arguments::parse().scenario) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("vramscope-workload: {error:#}");
            if error.is::<LibraryMissing>() {
                ExitCode::from(3)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

fn run(scenario: Scenario) -> anyhow::Result<ExitCode> {
    match scenario {
        Scenario::Demo { requests } => demo::run(requests)?,
        Scenario::Threads {
            threads,
            iterations,
            seed,
        } => threads::run(threads as usize, iterations, seed)?,
        Scenario::Paced { seconds, rate } => paced::run(Duration::from_secs(seconds), rate)?,
        Scenario::Fork { after_use } => ends::fork(after_use)?,
        Scenario::ExitCode { code } => {
            ends::hold_memory()?;
            return Ok(ExitCode::from(code));
        }
        Scenario::Crash => {
            ends::hold_memory()?;
            std::process::abort();
        }
        Scenario::Sleep { seconds } => {
            ends::hold_memory()?;
            std::thread::sleep(Duration::from_secs(seconds));
        }
        Scenario::Driver => cuda::run()?,
    }
    Ok(ExitCode::SUCCESS)
}
