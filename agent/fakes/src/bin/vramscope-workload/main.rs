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
mod deep;
mod demo;
mod devices;
mod driver;
mod ends;
mod failures;
mod ipc;
mod kinds;
pub mod library;
mod lives;
mod paced;
mod pools;
mod race;
mod runtime;
mod runtime_more;
mod steady;
mod threads;
mod vmm;

use std::{process::ExitCode, time::Duration};

use clap::{Parser, Subcommand};

use self::{library::LibraryMissing, steady::Layer};

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
    /// Free and allocate from many threads, so that one address goes from thread to thread.
    Race {
        /// How many threads.
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=256))]
        threads: u64,
        /// Allocations of each thread.
        #[arg(long, default_value_t = 2000)]
        iterations: u64,
    },
    /// Failed allocations, failed frees and double frees of each kind of memory.
    Failures,
    /// Managed memory.
    Managed,
    /// Pitched memory and arrays.
    Pitched,
    /// Stream-ordered memory: default and made pools, trimmed, synchronised, destroyed with a slice.
    Pools,
    /// Virtual memory management, with several mappings of one handle.
    Vmm,
    /// Virtual memory management as PyTorch's expandable segments do it.
    VmmSegments {
        /// How often to give segments back and take them again.
        #[arg(long, default_value_t = 1)]
        rounds: u64,
    },
    /// Export device memory to a second process.
    Ipc,
    /// The second process of `ipc`.
    #[command(hide = true)]
    IpcOpen {
        /// The handle, in hexadecimal digits.
        handle: String,
    },
    /// Two devices, with a free under the other one and contexts pushed and popped.
    Devices,
    /// Contexts that are destroyed, reset or released with memory in them.
    Contexts,
    /// Reset a device with memory on it, through the runtime, and use it again.
    DeviceReset,
    /// Sleep, then load the CUDA libraries and allocate.
    LateDlopen {
        /// How long to sleep, in milliseconds.
        #[arg(long, default_value_t = 500)]
        delay_ms: u64,
    },
    /// Allocate, then replace this program by another, which allocates.
    Exec,
    /// Allocate, start a program by vfork and exec, which allocates, and allocate again.
    Vfork,
    /// Allocate on a thread that ends, then free from another.
    ThreadExit,
    /// Allocate, say "waiting", wait for a line on standard input, then free and allocate more.
    Older {
        /// Blocks before the wait.
        #[arg(long, default_value_t = 3)]
        before: u64,
        /// Blocks after it.
        #[arg(long, default_value_t = 2)]
        after: u64,
    },
    /// Allocate once and exit with it.
    Hold {
        /// How much, in MiB.
        #[arg(long, default_value_t = 64)]
        mib: usize,
    },
    /// Start two processes with the same process number, one after the other. Needs root.
    PidReuse,
    /// Pairs of an allocation and a free from many call stacks; says how many calls it made. SIGTERM
    /// ends it cleanly.
    Churn {
        /// How long, in seconds.
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
        /// Pairs a second; 0 for as many as can be.
        #[arg(long, default_value_t = 0)]
        rate: u64,
        /// Different call stacks.
        #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
        stacks: u64,
        /// Call the driver, not the runtime.
        #[arg(long)]
        driver: bool,
    },
    /// Many small blocks, all alive; then say "waiting", wait for a line and exit with them.
    Live {
        /// How many.
        #[arg(long, default_value_t = 1000)]
        count: u64,
        /// Different call stacks.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
        stacks: u64,
        /// Call the driver, not the runtime.
        #[arg(long)]
        driver: bool,
    },
    /// Calls inside calls, and calls that are left without a return. Stand-ins only.
    Deep {
        /// How many calls inside each other.
        #[arg(long, default_value_t = 12)]
        depth: u32,
        /// How many calls to leave before they allocate.
        #[arg(long, default_value_t = 3)]
        before: u32,
        /// How many calls to leave after they have allocated.
        #[arg(long, default_value_t = 2)]
        after: u32,
    },
}

pub fn main() -> ExitCode {
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
        Scenario::Race {
            threads,
            iterations,
        } => race::run(threads as usize, iterations)?,
        Scenario::Failures => failures::run()?,
        Scenario::Managed => kinds::managed()?,
        Scenario::Pitched => kinds::pitched()?,
        Scenario::Pools => pools::run()?,
        Scenario::Vmm => vmm::run()?,
        Scenario::VmmSegments { rounds } => vmm::segments(rounds)?,
        Scenario::Ipc => ipc::export()?,
        Scenario::IpcOpen { handle } => ipc::open(&handle)?,
        Scenario::Devices => devices::run()?,
        Scenario::Contexts => devices::contexts()?,
        Scenario::DeviceReset => devices::reset()?,
        Scenario::LateDlopen { delay_ms } => lives::late_dlopen(Duration::from_millis(delay_ms))?,
        Scenario::Exec => lives::exec()?,
        Scenario::Vfork => lives::vfork()?,
        Scenario::ThreadExit => lives::thread_exit()?,
        Scenario::Older { before, after } => lives::older(before, after)?,
        Scenario::Hold { mib } => lives::hold(mib << 20)?,
        Scenario::PidReuse => lives::pid_reuse()?,
        Scenario::Churn {
            seconds,
            rate,
            stacks,
            driver,
        } => {
            let duration = Duration::try_from_secs_f64(seconds)
                .map_err(|_| anyhow::anyhow!("{seconds} is no length of time"))?;
            steady::churn(&Layer::load(driver)?, duration, rate, stacks)?;
        }
        Scenario::Live {
            count,
            stacks,
            driver,
        } => steady::live(&Layer::load(driver)?, count, stacks)?,
        Scenario::Deep {
            depth,
            before,
            after,
        } => deep::run(depth, before, after)?,
    }
    Ok(ExitCode::SUCCESS)
}
