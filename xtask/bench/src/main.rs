//! `vramscope-bench`: the parts of `cargo xtask bench` that have to be processes of their own.
//! Not meant to be started by hand; every command prints one JSON object.

mod churn;
mod empty;
mod lake;
mod leaks;
mod library;
mod parquet_bytes;
mod questions;
mod rounds;
mod simulate;
mod snapshot;
mod unwind;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Parts of `cargo xtask bench`.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Call one function in copies of one library, in turns, and measure a call in each.
    Rounds(rounds::Rounds),
    /// Hold empty programs at places of files until the input ends.
    Hold(empty::Hold),
    /// Allocate and free at a pace from many stacks.
    Churn(churn::Churn),
    /// Allocate from many stacks, keep all, and wait to be ended.
    Live(churn::Live),
    /// Read a memory snapshot and replay its trace.
    Snapshot(snapshot::Snapshot),
    /// Make up a large memory snapshot.
    MakeSnapshot(snapshot::Make),
    /// Run a program, and measure its time and memory.
    Run(snapshot::Run),
    /// Resolve a copied stack of this process over and over.
    Unwind(unwind::Unwind),
    /// Replay allocator traces through the simulator.
    Simulate(simulate::Simulate),
    /// Write hosts with known leaks as tables, and say what is true of them.
    LeakHosts(leaks::Hosts),
    /// Write many events and the roll-up of them as tables.
    LeakEvents(leaks::events::Events),
    /// Write a day of a fleet as a lake, for questions to be asked of.
    QueryLake(questions::Lake),
    /// Kill a collector in every way, and compare its tables with what it acknowledged.
    Crash(lake::crash::Crash),
    /// Send prepared batches to a collector from many agents.
    Ingest(lake::ingest::Ingest),
    /// Behave as thousands of agents with little to say.
    Fleet(lake::fleet::Fleet),
    /// Weigh the columns of Parquet files.
    Weigh {
        /// Files, or folders of them.
        paths: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().part {
        Part::Rounds(options) => rounds::run(&options),
        Part::Hold(options) => empty::hold(&options),
        Part::Churn(options) => churn::run(&options),
        Part::Live(options) => churn::live(&options),
        Part::Snapshot(options) => snapshot::read(&options),
        Part::MakeSnapshot(options) => snapshot::make(&options),
        Part::Run(options) => snapshot::run(&options),
        Part::Unwind(options) => unwind::run(&options),
        Part::Simulate(options) => simulate::run(&options),
        Part::LeakHosts(options) => leaks::hosts(&options),
        Part::LeakEvents(options) => leaks::events::events(&options),
        Part::QueryLake(options) => questions::write(&options),
        Part::Crash(options) => lake::crash::run(&options),
        Part::Ingest(options) => lake::ingest::run(&options),
        Part::Fleet(options) => lake::fleet::run(&options),
        Part::Weigh { paths } => parquet_bytes::weigh(&paths),
    };
    match outcome {
        Ok(json) => {
            println!("{json}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("vramscope-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
