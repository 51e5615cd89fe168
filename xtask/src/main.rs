//! `cargo xtask`: everything a newcomer or CI runs, one command each.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use xtask::children::{self, Interrupted};
use xtask::commands::setup::ByHand;
use xtask::commands::{bench, build, demo, ebpf, gpu_check, mutants, one_copy, setup, test, torch};
use xtask::project::Project;

/// Set-up, builds, demo, tests and benchmarks of vramscope
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
#[command(after_help = "Examples:
  cargo xtask demo           see it work: sets up, builds, traces a workload, prints the answers
  cargo xtask test           set up, build, run every test
  cargo xtask setup --check  what is missing on this machine")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    Setup(setup::Setup),
    Ebpf(ebpf::Ebpf),
    Build(build::Build),
    Demo(demo::Demo),
    Test(test::Test),
    Bench(Box<bench::Bench>),
    GpuCheck(gpu_check::GpuCheck),
    Mutants(mutants::Mutants),
    OneCopy(one_copy::OneCopy),
    Torch(torch::Torch),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    children::watch_signals();
    let error = match run(cli.task) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(error) => error,
    };
    if error.is::<Interrupted>() {
        eprintln!("interrupted; everything that was started has been stopped");
        return ExitCode::from(130);
    }
    eprintln!("error: {error:#}");
    if error.is::<ByHand>() {
        return ExitCode::from(2);
    }
    ExitCode::FAILURE
}

fn run(task: Task) -> Result<()> {
    let project = Project::find()?;
    match task {
        Task::Setup(options) => setup::run(&project, &options),
        Task::Ebpf(options) => ebpf::run(&project, &options),
        Task::Build(options) => build::run(&project, &options),
        Task::Demo(options) => demo::run(&project, &options),
        Task::Test(options) => test::run(&project, &options),
        Task::Bench(options) => bench::run(&project, &options),
        Task::GpuCheck(options) => gpu_check::run(&project, &options),
        Task::Mutants(options) => mutants::run(&project, &options),
        Task::OneCopy(options) => one_copy::run(&project, &options),
        Task::Torch(options) => torch::run(&options),
    }
}
