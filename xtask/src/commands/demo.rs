//! `cargo xtask demo`: the whole product on this machine, in one command.
//!
//! Sets up, builds, starts a collector and an agent on loopback, traces a workload that
//! allocates, fails, leaks and pins, and asks the collector what happened. On a machine with a
//! GPU the workload uses it; elsewhere it uses the stand-in driver, whose ledger the answers are
//! then checked against. Everything lies in `target/demo`, fresh each time.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};

use super::build;
use crate::compare::{self, Row};
use crate::progress::{Step, spell};
use crate::project::Project;
use crate::system::{Driver, System};
use crate::table;

/// How long the tables may take to hold what the workload did.
const SETTLE: Duration = Duration::from_secs(60);

/// How long the workload may take.
const WORKLOAD: Duration = Duration::from_secs(120);

/// Requests that the workload serves; it leaks 1 MiB in each.
const REQUESTS: &str = "200";

/// How long the second process holds its memory.
const HOLD_SECONDS: &str = "3";

/// Sets up, builds, traces a workload and prints where its memory went.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask demo                   see it work (root, since it loads BPF programs)
  cargo xtask demo --json | tail -1  one JSON line with the totals, for scripts

Everything it writes is in target/demo; Ctrl-C leaves nothing running.")]
pub struct Demo {
    /// End with one JSON line: events, lost, ledger_match, rows per table
    #[arg(long)]
    pub json: bool,
}

/// One question of the demo.
struct Question {
    /// Name of the table in the JSON line.
    name: &'static str,
    /// What the answer shows.
    heading: &'static str,
    sql: &'static str,
    columns: &'static [&'static str],
}

const QUESTIONS: [Question; 6] = [
    Question {
        name: "tetrahedron",
        heading: "The four vertices: allocation, fragmentation, leak, peak",
        sql: include_str!("demo/tetrahedron.sql"),
        columns: &[
            "level",
            "pid",
            "device",
            "live_bytes",
            "total_bytes",
            "external_ratio",
            "leaked_at_exit_bytes",
            "peak_live_bytes",
            "peak_ratio",
            "failed_allocations",
            "lost",
        ],
    },
    Question {
        name: "leaking_stacks",
        heading: "Stacks whose memory only the end of the process gave back, most often first \
                  (a leak allocates again and again, weights once)",
        sql: include_str!("demo/leaking_stacks.sql"),
        columns: &[
            "never_freed",
            "bytes",
            "of_allocations",
            "memory_kind",
            "stack",
        ],
    },
    Question {
        name: "failed_calls",
        heading: "Calls that failed: the evidence of an OOM",
        sql: include_str!("demo/failed_calls.sql"),
        columns: &["api", "result", "requested_bytes", "device", "stack"],
    },
    Question {
        name: "numa_placement",
        heading: "Pinned host memory by NUMA node (NULL: the platform does not say)",
        sql: include_str!("demo/numa_placement.sql"),
        columns: &[
            "pid",
            "device",
            "memory_kind",
            "gpu_node",
            "node",
            "buffers",
            "bytes",
            "misplaced_bytes",
        ],
    },
    Question {
        name: "coverage",
        heading: "Coverage: functions hooked per library, and why others are not",
        sql: include_str!("demo/coverage.sql"),
        columns: &["library", "attached", "functions", "reason"],
    },
    Question {
        name: "loss",
        heading: "Loss: what the agent saw and what it lost",
        sql: include_str!("demo/loss.sql"),
        columns: &["host", "windows", "lossy_windows", "events", "lost"],
    },
];

/// The command.
pub fn run(project: &Project, options: &Demo) -> Result<()> {
    let started = std::time::Instant::now();
    require_root()?;
    build::everything(project)?;

    let folder = project.target.join("demo");
    let driver = Driver::detect(project);
    let real_gpu = matches!(driver, Driver::Real { .. });
    match &driver {
        Driver::StandIns { .. } => {
            eprintln!("this machine has no GPU: the workload uses the stand-in driver");
        }
        Driver::Real { libcuda } => {
            eprintln!(
                "this machine has a GPU: the workload uses {}",
                libcuda.display()
            );
        }
    }
    let mut system = System::new(project, &folder, driver)?;
    let pids = trace_workload(&mut system, real_gpu)?;

    let step = Step::start("waiting until the collector has committed every event");
    system.wait_until_ended(&pids, SETTLE)?;
    let differences = if real_gpu {
        None
    } else {
        Some(system.wait_for_match(SETTLE)?)
    };
    step.done("");

    let mut rows_by_table = serde_json::Map::new();
    for question in &QUESTIONS {
        let rows = system.query(question.sql)?;
        print_answer(question, &rows);
        rows_by_table.insert(question.name.to_string(), json!(rows.len()));
    }
    let totals = system.query(include_str!("demo/totals.sql"))?;
    let events = total(&totals, "events")?;
    let lost = total(&totals, "lost")?;
    print_verdict(differences.as_deref(), events, lost);

    system.stop_agent()?;
    system.stop_collector()?;
    print_next_steps(project, &system.data());
    eprintln!("done in {}", spell(started.elapsed()));

    let ledger_match = differences.as_ref().map(Vec::is_empty);
    if options.json {
        let line = json!({
            "events": events,
            "lost": lost,
            "ledger_match": ledger_match,
            "tables": rows_by_table,
        });
        println!("{line}");
    }
    if ledger_match == Some(false) {
        bail!("the SQL does not match the ledger");
    }
    Ok(())
}

/// Starts collector and agent, runs the workload to its end; gives its processes.
fn trace_workload(system: &mut System, real_gpu: bool) -> Result<Vec<u32>> {
    let step = Step::start("starting the collector");
    system.start_collector()?;
    step.done(&system.url());
    let step = Step::start("starting the agent");
    system.start_agent()?;
    step.done("probes attached");

    let step = Step::start("running the workload");
    // A process that holds memory for some seconds: placement of pinned pages and NVML's view are
    // measured while a process lives, and the serving workload is over in a blink.
    let mut holder = system.start_workload(&["sleep", HOLD_SECONDS])?;
    let mut server = system.start_workload(&["demo", "--requests", REQUESTS])?;
    let status = server.wait(WORKLOAD)?;
    // Many machines have the driver and no runtime library: the workload says so with 3.
    let runtime_is_missing = real_gpu && status.code() == Some(3);
    if runtime_is_missing {
        step.done("no libcudart here; using the driver interface alone");
        let step = Step::start("running the workload on the driver interface");
        let mut workload = system.start_workload(&["driver"])?;
        workload.wait_success(WORKLOAD)?;
        step.done("");
        return Ok(vec![workload.id()]);
    }
    server.wait_success(WORKLOAD)?;
    holder.wait_success(WORKLOAD)?;
    step.done(&format!(
        "{REQUESTS} requests served; a second process held memory for {HOLD_SECONDS} s"
    ));
    Ok(vec![server.id(), holder.id()])
}

fn require_root() -> Result<()> {
    // SAFETY: plain system call.
    if unsafe { libc::geteuid() } != 0 {
        bail!("the demo loads BPF programs, which needs root: run it as root or with sudo -E");
    }
    Ok(())
}

fn print_answer(question: &Question, rows: &[Row]) {
    println!("\n{}\n", question.heading);
    print!("{}", table::draw(question.columns, rows));
}

fn print_verdict(differences: Option<&[String]>, events: u64, lost: u64) {
    println!("\n{events} events recorded, {lost} lost.");
    match differences {
        None => println!(
            "There is no ledger to compare with on a real GPU: the vendor's driver keeps none. \
             `SELECT * FROM reconciliation` compares with NVML."
        ),
        Some([]) => println!(
            "Every total equals the stand-in driver's own ledger: allocations, frees, failures, \
             live at exit, peak."
        ),
        Some(differences) => {
            println!("The SQL differs from the stand-in driver's own ledger:");
            for difference in differences {
                println!("  {difference}");
            }
        }
    }
}

fn print_next_steps(project: &Project, data: &Path) {
    let program = |name: &str| project.binary(name).display().to_string();
    println!(
        "
How to go on:
  ask this data more      {vramscope} sql --data {data}
  see what can be asked   {vramscope} views
  trace your own program  {agent} trace -o trace -- PROGRAM ARGUMENTS
                          {vramscope} sql --data trace -c 'SELECT * FROM top_stacks'
  read                    docs/quick-start.md
",
        vramscope = program("vramscope"),
        agent = program("vramscope-agent"),
        data = data.display(),
    );
}

fn total(rows: &[Row], column: &str) -> Result<u64> {
    let value = rows.first().map(|row| compare::number(row, column));
    match value.transpose()?.flatten() {
        Some(value) => Ok(value),
        None => bail!(
            "the totals have no {column}: {}",
            Value::from(rows.first().cloned().unwrap_or_default())
        ),
    }
}
