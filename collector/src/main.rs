//! The `vramscope-collector` command.

use std::ffi::{c_int, c_long};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use vramscope_collector::access::commands;
use vramscope_collector::config::{self, Config, Keys};
use vramscope_collector::executor::{self, Executor};
use vramscope_collector::lake::upkeep::cli as upkeep;
use vramscope_collector::requests::{self, Stage, Wish};
use vramscope_collector::{serve, status};
use vramscope_queries::complexity::PARSER_STACK_BYTES;

/// Thousands of connections and the threads that serve them hold small pieces for long and large ones
/// for moments. The system's allocator keeps an arena for each thread, and gives back what is free at
/// an arena's end alone: two thirds of the memory of 10,000 agents was nobody's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc 2 and 3, milliseconds.
const PURGE_DELAY: c_int = 15;

/// Has freed memory given back to the system after 50 ms instead of a second: a commit frees some
/// hundreds of megabytes at once, and the next one takes others. What the variable says counts, if it
/// is set.
fn give_back_soon() {
    unsafe extern "C" {
        fn mi_option_set(option: c_int, value: c_long);
    }
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: the allocator's own function, linked in with it; it sets a number, and takes none
        // that it does not know. No other thread runs yet.
        unsafe { mi_option_set(PURGE_DELAY, 50) };
    }
}

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
  vramscope-collector requests --data /var/lib/vramscope
  vramscope-collector init --dir /etc/vramscope --host collector.example
  vramscope-collector fsck --data /var/lib/vramscope
  vramscope sql --collector http://127.0.0.1:7717 -c 'SELECT * FROM tetrahedron'";

#[derive(Subcommand)]
enum Command {
    /// Runs the collector until SIGINT or SIGTERM
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Box<Serve>),
    /// Tells about a data folder: agents, log, tables; a collector may be running on it
    #[command(after_help = STATUS_EXAMPLES)]
    Status(Status),
    /// Asks an agent for a span of its flight recorder; a collector may be running or not
    #[command(after_help = REQUEST_EXAMPLES)]
    RequestSpan(RequestSpan),
    /// Lists the requests for spans, and what became of them
    #[command(after_help = REQUESTS_EXAMPLES)]
    Requests(Requests),
    /// Makes a CA, the collector's certificate and a first administrator's token
    #[command(after_help = commands::INIT_EXAMPLES)]
    Init(commands::Init),
    /// Makes the certificate by which an agent shows which host it is of
    #[command(after_help = commands::AGENT_EXAMPLES)]
    AgentCertificate(commands::AgentCertificate),
    /// Makes the collector's certificate anew, before the old one ends or for other names
    #[command(after_help = commands::SERVER_EXAMPLES)]
    ServerCertificate(commands::ServerCertificate),
    /// Takes an agent's certificate back, after its key was stolen for example
    #[command(after_help = commands::REVOKE_EXAMPLES)]
    RevokeCertificate(commands::RevokeCertificate),
    /// Adds, removes and lists users: people with a password
    #[command(after_help = commands::USER_EXAMPLES)]
    User(commands::User),
    /// Adds, revokes and lists tokens, for programs
    #[command(after_help = commands::TOKEN_EXAMPLES)]
    Token(commands::Token),
    /// Merges small files of the tables into large ones; a collector may be running
    #[command(after_help = upkeep::COMPACT_EXAMPLES)]
    Compact(upkeep::Compact),
    /// Deletes files that no table refers to any more; a collector may be running
    #[command(after_help = upkeep::VACUUM_EXAMPLES)]
    Vacuum(upkeep::Vacuum),
    /// Proves that every file is whole and every acknowledged row is there once
    #[command(after_help = upkeep::FSCK_EXAMPLES)]
    Fsck(upkeep::Fsck),
    /// Computes parts of queries for others (the distributed engine), until SIGINT or SIGTERM
    #[command(after_help = EXECUTOR_EXAMPLES)]
    Executor(Executor),
}

const EXECUTOR_EXAMPLES: &str = "Examples:
  vramscope-collector executor --data /var/lib/vramscope
  vramscope-collector executor --data s3://bucket/lake --listen 127.0.0.1:7721
  vramscope-collector executor --data s3://bucket/lake --listen 0.0.0.0:7720 \\
      --worker-cert node.pem --worker-key node.key --worker-ca ca.pem
  vramscope sql --data s3://bucket/lake --engine distributed \\
      --workers http://127.0.0.1:7720,http://127.0.0.1:7721 -c 'SELECT * FROM top_stacks'

Prints `listening on ADDRESS:PORT` when it is ready. It reads its lake and nothing else, and writes
nothing but spilled rows.";

const SERVE_EXAMPLES: &str = "Examples:
  vramscope-collector serve --data /var/lib/vramscope
  vramscope-collector serve --data lake --listen 127.0.0.1:0 --commit-interval 500ms
  vramscope-collector serve --data lake --print-config > collector.toml
  vramscope-collector serve --config collector.toml

Prints `listening on ADDRESS:PORT` when it is ready. Logs go to standard error.";

const STATUS_EXAMPLES: &str = "Examples:
  vramscope-collector status --data /var/lib/vramscope
  vramscope-collector status --data /var/lib/vramscope --json | jq .log";

const REQUEST_EXAMPLES: &str = "Examples:
  vramscope-collector request-span --data /var/lib/vramscope --host gpu-17 \\
      --process 6917529027641081856 --from 10m --to now --reason 'ticket 4711'
  vramscope-collector request-span --data /var/lib/vramscope --host gpu-17 \\
      --process 6917529027641081856 --from 2026-11-30T12:00:00Z --to 2026-11-30T12:05:00Z --wait 1m

The process_id is that of the tables. The request is kept until the agent answers, also if it is
away now. Exit code 0 if it was stored (with --wait: answered), 3 if it was refused or expired,
4 if no answer came within --wait.";

const REQUESTS_EXAMPLES: &str = "Examples:
  vramscope-collector requests --data /var/lib/vramscope
  vramscope-collector requests --data /var/lib/vramscope --json | jq '.[] | select(.stage == \"sent\")'";

#[derive(Args)]
struct RequestSpan {
    /// Data folder
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    data: PathBuf,
    /// Host whose agent is asked; with several agents on it, the first that calls
    #[arg(long, required_unless_present = "agent", conflicts_with = "agent")]
    host: Option<String>,
    /// Agent that is asked, by its agent_id
    #[arg(long)]
    agent: Option<String>,
    /// Process lifetime, by its process_id
    #[arg(long, value_name = "ID")]
    process: i64,
    /// From then on: 2026-11-30T12:00:00Z, nanoseconds since 1970, or a length of time ago (5m)
    #[arg(long, value_name = "TIME", value_parser = requests::moment)]
    from: i64,
    /// Until then, without it: as --from, or now
    #[arg(long, value_name = "TIME", value_parser = requests::moment)]
    to: i64,
    /// Who asks, and why; agent and collector keep it
    #[arg(long, default_value = "")]
    reason: String,
    /// How long an answer is waited for
    #[arg(long, value_name = "TIME", default_value = "24h")]
    expires: config::Span,
    /// Wait so long for the answer; a collector must be running
    #[arg(long, value_name = "TIME")]
    wait: Option<config::Span>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Requests {
    /// Data folder
    #[arg(long, value_name = "DIR", env = "VRAMSCOPE_COLLECTOR_DATA")]
    data: PathBuf,
    /// As JSON
    #[arg(long)]
    json: bool,
}

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
    give_back_soon();
    let done = match Cli::parse().command {
        Command::Serve(serve) => run_serve(*serve).map(|()| ExitCode::SUCCESS),
        Command::Status(status) => run_status(&status).map(|()| ExitCode::SUCCESS),
        Command::RequestSpan(wanted) => run_request_span(wanted),
        Command::Requests(wanted) => run_requests(&wanted).map(|()| ExitCode::SUCCESS),
        Command::Init(init) => init.run().map(|()| ExitCode::SUCCESS),
        Command::AgentCertificate(wanted) => wanted.run().map(|()| ExitCode::SUCCESS),
        Command::ServerCertificate(wanted) => wanted.run().map(|()| ExitCode::SUCCESS),
        Command::RevokeCertificate(wanted) => wanted.run().map(|()| ExitCode::SUCCESS),
        Command::User(user) => user.run().map(|()| ExitCode::SUCCESS),
        Command::Token(token) => token.run().map(|()| ExitCode::SUCCESS),
        Command::Compact(options) => {
            runtime().and_then(|rt| rt.block_on(upkeep::compact(&options)))
        }
        Command::Vacuum(options) => runtime().and_then(|rt| rt.block_on(upkeep::vacuum(&options))),
        Command::Fsck(options) => runtime().and_then(|rt| rt.block_on(upkeep::fsck(&options))),
        Command::Executor(wanted) => run_executor(&wanted).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
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
    log_to_stderr(&config.log)?;
    runtime()?.block_on(serve::run(&config))
}

fn run_executor(wanted: &Executor) -> anyhow::Result<()> {
    log_to_stderr(&wanted.log)?;
    runtime()?.block_on(executor::run(wanted))
}

fn log_to_stderr(filter: &str) -> anyhow::Result<()> {
    let filter =
        EnvFilter::try_new(filter).with_context(|| format!("log filter {filter:?} is wrong"))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
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

fn run_request_span(wanted: RequestSpan) -> anyhow::Result<ExitCode> {
    let RequestSpan {
        data,
        host,
        agent,
        process: process_id,
        from: from_ns,
        to: to_ns,
        reason,
        expires,
        wait,
        json,
    } = wanted;
    let wish = Wish {
        host,
        agent,
        process_id,
        from_ns,
        to_ns,
        reason,
        expires: expires.0,
    };
    let mut request = requests::make(&data, wish)?;
    let end = Instant::now() + wait.map_or(Duration::ZERO, |wait| wait.0);
    while request.stage.is_open() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(200));
        request = requests::find(&data, &request.id)?;
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&request)?);
    } else {
        println!("request {}: {}", request.id, request.outcome());
    }
    Ok(match request.stage {
        Stage::Answered => ExitCode::SUCCESS,
        Stage::Refused | Stage::Expired => ExitCode::from(3),
        Stage::Requested | Stage::Sent if wait.is_some() => ExitCode::from(4),
        Stage::Requested | Stage::Sent => ExitCode::SUCCESS,
    })
}

fn run_requests(wanted: &Requests) -> anyhow::Result<()> {
    let (requests, damaged) = requests::list(&wanted.data)?;
    if wanted.json {
        println!("{}", serde_json::to_string_pretty(&requests)?);
        damaged
            .iter()
            .for_each(|problem| eprintln!("vramscope-collector: {problem}"));
    } else {
        print!("{}", requests::text(&requests, &damaged));
    }
    Ok(())
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_stack_size(PARSER_STACK_BYTES)
        .build()
        .context("failed to start the async runtime")
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn mi_option_get(option: c_int) -> c_long;
    }

    /// The allocator's number of the option could become another one's. Of its neighbours none has
    /// the default of 1,000 that its documentation gives for version 3.
    #[test]
    fn the_option_is_the_time_until_memory_is_given_back() {
        // SAFETY: reads a number.
        let delay = || unsafe { mi_option_get(PURGE_DELAY) };
        assert_eq!(delay(), 1000);
        give_back_soon();
        assert_eq!(delay(), 50);
    }
}
