//! The `vramscope-collector` command.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use vramscope_collector::config::{Config, Keys};
use vramscope_collector::{serve, status};

/// Takes vramscope agents' events, keeps them as Delta tables, answers SQL
#[derive(Parser)]
#[command(name = "vramscope-collector", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  vramscope-collector serve --data /var/lib/vramscope
  vramscope-collector status --data /var/lib/vramscope
  vramscope sql --collector http://127.0.0.1:7717 -c 'SELECT * FROM tetrahedron'";

#[derive(Subcommand)]
enum Command {
    /// Runs the collector until SIGINT or SIGTERM
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Serve),
    /// Tells about a data folder: agents, log, tables; a collector may be running on it
    #[command(after_help = STATUS_EXAMPLES)]
    Status(Status),
}

const SERVE_EXAMPLES: &str = "Examples:
  vramscope-collector serve --data /var/lib/vramscope
  vramscope-collector serve --data lake --listen 127.0.0.1:0 --commit-interval 500ms
  vramscope-collector serve --data lake --print-config > collector.toml
  vramscope-collector serve --config collector.toml

Prints `listening on ADDRESS:PORT` when it is ready. Logs go to standard error.";

const STATUS_EXAMPLES: &str = "Examples:
  vramscope-collector status --data /var/lib/vramscope
  vramscope-collector status --data /var/lib/vramscope --json | jq .log";

#[derive(Args)]
struct Serve {
    /// TOML configuration; flags and environment variables win over it
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_COLLECTOR_CONFIG")]
    config: Option<PathBuf>,
    /// Prints the effective configuration as commented TOML and exits
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    keys: Keys,
}

#[derive(Args)]
struct Status {
    /// Data folder
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    data: PathBuf,
    /// As JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(serve) => run_serve(serve),
        Command::Status(status) => run_status(&status),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vramscope-collector: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_serve(serve: Serve) -> anyhow::Result<()> {
    let file = match &serve.config {
        Some(path) => Keys::from_file(path)?,
        None => Keys::default(),
    };
    let config = Config::from_keys(serve.keys.over(file))?;
    if serve.print_config {
        print!("{}", config.to_toml());
        return Ok(());
    }
    let filter = EnvFilter::try_new(&config.log)
        .with_context(|| format!("log filter {:?} is wrong", config.log))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    runtime()?.block_on(serve::run(&config))
}

fn run_status(status: &Status) -> anyhow::Result<()> {
    let report = runtime()?.block_on(status::report(&status.data))?;
    if status.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&report).context("failed to write JSON")?
        );
    } else {
        print!("{}", report.to_text());
    }
    Ok(())
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("failed to start the async runtime")
}
