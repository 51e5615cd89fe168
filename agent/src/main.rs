//! The command `vramscope-agent`.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use vramscope_agent::config::{Config, Settings};
use vramscope_agent::host::{redact, switch};
use vramscope_agent::probes::preflight;
use vramscope_agent::recorder::view;
use vramscope_agent::trace::Job;
use vramscope_agent::{dump, inspect, serve, status, trace};

/// Traces GPU memory allocations on this host.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Arguments {
    /// Configuration file (TOML).
    #[arg(long, global = true, env = "VRAMSCOPE_CONFIG")]
    config: Option<PathBuf>,
    /// Print the effective configuration as a commented file, and end.
    #[arg(long, global = true)]
    print_config: bool,
    /// Do not hook frameworks' allocators: the same as --framework false.
    #[arg(long, global = true, conflicts_with = "framework")]
    no_framework: bool,
    /// Ask no serving engine for its load: the same as --scrape false.
    #[arg(long, global = true, conflicts_with = "scrape")]
    no_traffic: bool,
    #[command(flatten)]
    settings: Box<Settings>,
    #[command(subcommand)]
    command: Option<Cmd>,
}

#[derive(Subcommand)]
enum Cmd {
    /// Run as the host's agent: trace every process that uses CUDA, send to a collector.
    #[command(
        after_help = "Examples:\n  vramscope-agent serve --config /etc/vramscope/agent.toml\n  vramscope-agent serve --collector http://127.0.0.1:7717 --spool /var/lib/vramscope/spool"
    )]
    Serve,
    /// Trace one command and what it starts, into a folder of Parquet files; no collector needed.
    #[command(
        after_help = "Examples:\n  vramscope-agent trace -o run1 -- python train.py\n  vramscope-agent trace -o run1 --json -- ./server 2> summary.json\n  vramscope sql --data run1 -c 'SELECT * FROM top_stacks'\n\nEnds with the command's own exit code, 128 + N if signal N ended it, 127 if it could not be\nstarted, and 1 if tracing failed before it was."
    )]
    Trace {
        /// Folder to write; must be new or empty.
        #[arg(short, long, value_name = "DIR")]
        output: PathBuf,
        /// Print the summary as one JSON line on standard error.
        #[arg(long)]
        json: bool,
        /// Print no summary.
        #[arg(short, long, conflicts_with = "json")]
        quiet: bool,
        /// The command and its arguments.
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<OsString>,
    },
    /// Print the rows of one table of a trace as JSON lines.
    #[command(after_help = "Example:\n  vramscope-agent rows run1 --table alloc_events")]
    Rows {
        /// The trace's folder.
        #[arg(value_name = "DIR")]
        trace: PathBuf,
        /// Which table.
        #[arg(long, default_value = "alloc_events")]
        table: String,
    },
    /// Show what this host's agent does: events, losses, hooks, spool.
    #[command(
        after_help = "Exit code 0 if it runs, 3 if it does not, 1 if none ever ran on this spool."
    )]
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show and export raw framework events that the flight recorder of this host holds.
    #[command(
        after_help = "Examples:\n  vramscope-agent recorder list\n  vramscope-agent recorder list --process pid:4711 --from 10min --json\n  vramscope-agent recorder export --process pid:4711 --from 10min -o span1\n  vramscope sql --data span1 -c 'SELECT op, count(*) FROM alloc_events GROUP BY op'\n\nOnly reads; an agent may run meanwhile. --spool names its spool."
    )]
    Recorder {
        #[command(subcommand)]
        what: RecorderCmd,
    },
    /// Show what would be hooked in a library or program, and which USDT probes it has.
    #[command(
        after_help = "Examples:\n  vramscope-agent inspect /usr/lib/x86_64-linux-gnu/libcuda.so.1\n  vramscope-agent inspect --json libc10_cuda.so\n\nNeeds no root and touches no process."
    )]
    Inspect {
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// A 64-bit ELF file.
        file: PathBuf,
    },
    /// Take the probes out of the kernel, after the agent was stopped for good.
    Detach,
    /// Kill switch: no program of this host is probed, whether an agent runs or not, until `on`.
    #[command(after_help = "Example:\n  vramscope-agent off --reason 'ticket 4711'")]
    Off {
        /// Kept in the file and shown by `status`, for whoever wonders.
        #[arg(long, default_value = "by vramscope-agent off")]
        reason: String,
    },
    /// Turn the kill switch back: a running agent probes again within a second.
    On,
    /// Try whether a return probe survives a seccomp filter on this kernel.
    #[command(hide = true)]
    Preflight {
        /// Number of the system call that is forbidden.
        #[arg(long, default_value_t = preflight::URETPROBE)]
        forbid: u32,
    },
    #[command(hide = true, name = preflight::CHILD)]
    PreflightChild { forbid: u32 },
}

#[derive(Subcommand)]
enum RecorderCmd {
    /// List what is recorded by process, what was overwritten, and which spans travelled.
    List {
        #[command(flatten)]
        wanted: view::Wanted,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write the rows of a span and their stacks as a trace's folder.
    Export {
        #[command(flatten)]
        wanted: view::Wanted,
        /// Folder to write; must be new or empty.
        #[arg(short, long, value_name = "DIR")]
        output: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

const EXAMPLES: &str = "Examples:
  vramscope-agent trace -o run1 -- python train.py     trace one command, no collector
  vramscope-agent serve --collector http://127.0.0.1:7717
  vramscope-agent serve --print-config > agent.toml    a file to start from
  vramscope-agent status

Messages go to standard error; RUST_LOG=debug shows more of them.";

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        // One command's trace shares the terminal with the command.
        let level = if matches!(arguments.command, Some(Cmd::Serve)) {
            "info"
        } else {
            "error"
        };
        EnvFilter::new(level)
    });
    tracing_subscriber::fmt()
        // No colours in a log file.
        .with_ansi(std::io::stderr().is_terminal())
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("vramscope-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let mut settings = *arguments.settings;
    if arguments.no_framework {
        settings.framework = Some(false);
    }
    if arguments.no_traffic {
        settings.scrape = Some(false);
    }
    let config = Config::load(arguments.config.as_deref(), settings)?;
    if arguments.print_config {
        print!("{}", config.to_toml());
        return Ok(ExitCode::SUCCESS);
    }
    redact::configure(config.redaction().map_err(anyhow::Error::msg)?);
    let Some(command) = arguments.command else {
        anyhow::bail!(
            "say what to do: serve, trace, rows, status, recorder, inspect, off, on or detach; see --help"
        );
    };
    match command {
        Cmd::Serve => {
            serve::check_privileges()?;
            serve::serve(config)?;
        }
        Cmd::Trace {
            output,
            json,
            quiet,
            command,
        } => {
            serve::check_privileges()?;
            let code = trace::trace(
                config,
                &Job {
                    folder: output,
                    command,
                    json,
                    quiet,
                },
            )?;
            return Ok(ExitCode::from(code as u8));
        }
        Cmd::Rows { trace, table } => {
            let out = std::io::BufWriter::new(std::io::stdout().lock());
            dump::rows(&trace, &table, out)?;
        }
        Cmd::Status { json } => {
            let (status, running) = status::read(&config.spool)?;
            if json {
                let mut value = serde_json::to_value(&status)?;
                value["running"] = running.into();
                println!("{}", serde_json::to_string_pretty(&value)?);
            } else {
                print!("{}", status::text(&status, running));
            }
            return Ok(if running {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(3)
            });
        }
        Cmd::Off { reason } => {
            println!("off: {}", serve::switch_off(&config, &reason)?);
        }
        Cmd::On => {
            let was_off = switch::turn_on(&config.off_file)?;
            let file = config.off_file.display();
            println!(
                "{}",
                if was_off {
                    format!("on: removed {file}")
                } else {
                    format!("was on: there is no {file}")
                }
            );
        }
        Cmd::Preflight { forbid } => {
            let preflight = preflight::attempt(forbid)?;
            println!("{}", serde_json::to_string(&preflight)?);
        }
        Cmd::PreflightChild { forbid } => return Ok(ExitCode::from(preflight::child(forbid))),
        Cmd::Inspect { json, file } => {
            let found = inspect::inspect(&file)?;
            if json {
                println!("{}", serde_json::to_string_pretty(&found)?);
            } else {
                print!("{}", inspect::text(&found));
            }
        }
        Cmd::Recorder { what } => match what {
            RecorderCmd::List { wanted, json } => {
                let listing = view::list(&config.spool, &wanted)?;
                if json {
                    println!("{}", serde_json::to_string_pretty(&listing)?);
                } else {
                    print!("{}", view::text(&listing));
                }
            }
            RecorderCmd::Export {
                wanted,
                output,
                json,
            } => {
                let exported = view::export(&config.spool, &wanted, &output)?;
                if json {
                    println!("{}", serde_json::to_string_pretty(&exported)?);
                } else {
                    print!("{}", view::export_text(&exported));
                }
            }
        },
        Cmd::Detach => {
            let found = serve::detach(&config.pin_path)?;
            let path = config.pin_path.display();
            println!(
                "{}",
                if found {
                    format!("took the probes below {path} out")
                } else {
                    format!("no probes below {path}")
                }
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}
