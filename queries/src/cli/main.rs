//! `vramscope`: asks questions in SQL, of a data folder or of a collector.
//!
//! Exit codes: 0 answered; 1 the data could not be opened or a query failed; 2 wrong usage;
//! 130 cancelled with Ctrl-C. Answers go to stdout, everything about them to stderr.

mod diff;
mod door;
mod engine;
mod frames;
mod import;
mod leaks;
mod login;
mod map;
mod output;
mod profile;
mod prompt;
mod rows;
mod scope;
mod target;
mod text;
mod threads;
mod why;

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use vramscope_queries::describe::Catalog;
use vramscope_queries::session::{Limits, Options};
use vramscope_queries::{Error, near, reference, statements};

use crate::door::Door;
use crate::login::Login;
use crate::output::{Format, Sink};
use crate::target::Source;

/// Rows of a table on the screen, if nothing else is said. Widths are known only once all rows
/// are there, so all of them are held in memory.
const TABLE_ROWS: usize = 10_000;

/// Where did the GPU memory go: questions in SQL over recorded allocations.
#[derive(Parser)]
#[command(name = "vramscope", version, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  vramscope sql --data ./trace                                  a prompt over a trace
  vramscope sql --data ./trace -c 'SELECT * FROM top_stacks'    one question
  vramscope sql --collector http://127.0.0.1:7717 report.sql    a file, asked of a collector
  vramscope map --data ./trace --svg map.svg                    the allocator's address map
  vramscope import snapshot.pickle                              PyTorch's own record, as tables
  vramscope why --data ./trace                                  why memory ran out
  vramscope leaks --data ./trace                                which call stacks leak
  vramscope diff ./monday ./tuesday                             what grew between two recordings
  vramscope views                                               which views there are
  vramscope views tetrahedron                                   its columns and their units";

const SQL_HELP: &str = "\
Examples:
  vramscope sql --data ./trace
  vramscope sql --data ./trace -c 'SELECT folded, live_bytes FROM top_stacks ORDER BY 2 DESC LIMIT 5'
  vramscope sql --data /var/lib/vramscope -c 'SELECT * FROM process_totals' --format csv > totals.csv
  vramscope sql --data s3://bucket/lake -c 'SELECT count(*) FROM alloc_events'
  vramscope sql --data s3://bucket/lake --engine distributed --workers http://127.0.0.1:7720,http://127.0.0.1:7721
  vramscope sql --data ./trace -c 'SELECT * FROM alloc_events' --format parquet --output events.parquet
  vramscope sql --collector http://127.0.0.1:7717 -c 'SELECT * FROM answer_quality' --format json
  vramscope sql --url http://127.0.0.1:7718 -c 'SELECT * FROM tetrahedron'
  vramscope sql --url https://collector:7718 --ca-file ca.pem --token-file ~/.vramscope-token
  vramscope sql --url postgresql://ann@collector:7719 --ca-file ca.pem    password in PGPASSWORD
  echo 'SELECT count(*) FROM alloc_events' | vramscope sql --data ./trace

A collector is asked by --collector (Flight SQL) or by --url, whose scheme says the protocol:
  http, https        its HTTP API, port 7718
  grpc, grpcs        Flight SQL, port 7717
  postgresql         PostgreSQL, port 7719; TLS unless it is on this machine
A token is read from --token-file, --token or VRAMSCOPE_TOKEN; a password from --password-file or
PGPASSWORD. Neither is sent unencrypted to another machine.

Only queries are answered: SELECT, WITH, SHOW, DESCRIBE, EXPLAIN.
Several statements, separated by ';', are answered one after the other.

Formats:
  table    for people; shows at most 10000 rows unless --max-rows says otherwise
  csv      a header line, then a line per row; NULL is empty; lists and structs are JSON text
  json     one array per statement, an object per row; NULL is null
  parquet  one statement; needs --output

Exit codes: 0 answered, 1 the data cannot be opened or a query failed, 2 wrong usage, 130 cancelled.";

#[derive(Subcommand)]
enum Command {
    /// Ask questions in SQL; without one, open a prompt
    #[command(after_help = SQL_HELP)]
    Sql(SqlArguments),
    /// Show where a device's memory is, and the address map of its framework's allocator
    #[command(after_help = map::HELP)]
    Map(map::Arguments),
    /// Import PyTorch memory snapshots, to ask questions of them
    #[command(after_help = import::HELP)]
    Import(import::Arguments),
    /// Say why memory could not be had, and what would have helped
    #[command(after_help = why::HELP)]
    Why(why::Arguments),
    /// Rank the call stacks that leak; draw what stacks hold, as flame graph or profile
    #[command(after_help = leaks::HELP)]
    Leaks(Box<leaks::Arguments>),
    /// Compare what call stacks hold: two times, two recordings, two pods, two versions
    #[command(after_help = diff::HELP)]
    Diff(Box<diff::Arguments>),
    /// List the views, tables and functions, or explain one of them
    Views {
        /// View, table or function to explain
        name: Option<String>,
    },
    /// Print the SQL reference as Markdown
    Reference,
}

#[derive(Args)]
struct SqlArguments {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    login: Login,
    /// SQL to answer; several statements are separated by ';'
    #[arg(
        short = 'c',
        long = "command",
        // SQL may begin with a comment.
        allow_hyphen_values = true,
        value_name = "SQL",
        conflicts_with = "file"
    )]
    sql: Option<String>,
    /// File with SQL to answer
    file: Option<PathBuf>,
    /// How the answer is written
    #[arg(long, value_enum, default_value = "table")]
    format: FormatName,
    /// File to write the answer to instead of stdout; it appears when the answer is complete
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Cut the answer after this many rows, and say so
    #[arg(long, value_name = "N")]
    max_rows: Option<usize>,
    /// Stop a query after this many seconds; 0 is never
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// Memory for queries, for example 512MiB; beyond it they spill to the temporary folder
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = parse_size)]
    memory: usize,
    /// Folder to spill to (default: the system's temporary folder)
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
    /// Go on without the damaged files of a trace, and name them
    #[arg(long)]
    skip_damaged: bool,
    #[command(flatten)]
    engine: engine::Arguments,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum FormatName {
    Table,
    Csv,
    Json,
    Parquet,
}

/// Bytes, with an optional unit: 1048576, 512MiB, 2G, 1.5GB.
fn parse_size(text: &str) -> Result<usize, String> {
    let digits_end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        other => return Err(format!("unknown unit {other:?}; use MiB, GiB, MB or GB")),
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a size; for example 512MiB"))?;
    let bytes = number * factor;
    if bytes < 1.0 {
        return Err("must be at least one byte".to_string());
    }
    Ok(bytes as usize)
}

#[tokio::main]
async fn main() -> ExitCode {
    let code = match Cli::parse().command {
        Command::Sql(arguments) => sql(arguments).await,
        Command::Map(arguments) => map::run(arguments).await,
        Command::Why(arguments) => why::run(arguments).await,
        Command::Import(arguments) => import::run(arguments).await,
        Command::Leaks(arguments) => leaks::run(&arguments).await,
        Command::Diff(arguments) => diff::run(&arguments).await,
        Command::Views { name } => print_or_fail(views(name).await),
        Command::Reference => print_or_fail(
            reference::markdown()
                .map(|text| (text, 0))
                .map_err(anyhow::Error::msg),
        ),
    };
    ExitCode::from(code)
}

async fn views(name: Option<String>) -> anyhow::Result<(String, u8)> {
    let catalog = Catalog::load().await?;
    let Some(name) = name else {
        return Ok((catalog.list(), 0));
    };
    let text = catalog.describe(&name).await?;
    text.map(|text| (text, 0)).with_context(|| {
        format!("no view, table or function named {name:?}; `vramscope views` lists them")
    })
}

fn print_or_fail(text: anyhow::Result<(String, u8)>) -> u8 {
    match text {
        Ok((text, code)) => match std::io::stdout().write_all(text.as_bytes()) {
            // The reader of the pipe has seen enough.
            Ok(()) | Err(_) => code,
        },
        Err(error) => {
            eprintln!("error: {error:#}");
            1
        }
    }
}

/// Ends the program as clap does for wrong usage: the text, the usage line, exit code 2.
fn usage_error(text: &str) -> ! {
    let mut command = Cli::command();
    let sql = command
        .find_subcommand_mut("sql")
        .map(|c| c.clone().bin_name("vramscope sql"));
    sql.unwrap_or(command)
        .error(clap::error::ErrorKind::ArgumentConflict, text)
        .exit()
}

async fn sql(arguments: SqlArguments) -> u8 {
    let text = match question(&arguments) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("error: {error:#}");
            return 1;
        }
    };
    check_usage(&arguments, text.as_deref());
    let mut door = match open(&arguments).await {
        Ok(door) => door,
        Err(error) => {
            eprintln!("error: {error:#}");
            return 1;
        }
    };
    let limits = Limits {
        time: (arguments.timeout > 0).then(|| Duration::from_secs(arguments.timeout)),
        rows: row_limit(&arguments),
    };
    match text {
        None => prompt::run(&mut door, limits, arguments.format.into()).await,
        Some(text) => batch(&mut door, &text, limits, &arguments).await,
    }
}

/// The SQL that was given, or `None` for a prompt.
fn question(arguments: &SqlArguments) -> anyhow::Result<Option<String>> {
    if let Some(sql) = &arguments.sql {
        return Ok(Some(sql.clone()));
    }
    if let Some(file) = &arguments.file {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("failed to read {file:?}"))?;
        return Ok(Some(text));
    }
    if std::io::stdin().is_terminal() {
        return Ok(None);
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .context("failed to read SQL from stdin")?;
    Ok(Some(text))
}

fn check_usage(arguments: &SqlArguments, text: Option<&str>) {
    let is_parquet = arguments.format == FormatName::Parquet;
    if is_parquet && arguments.output.is_none() {
        usage_error("--format parquet needs --output FILE");
    }
    let Some(text) = text else {
        if arguments.output.is_some() {
            usage_error("--output needs SQL: give -c SQL or a file");
        }
        return;
    };
    let count = statements::split(text).len();
    if count == 0 {
        usage_error("there is no SQL to answer");
    }
    if count > 1 && arguments.output.is_some() {
        usage_error(&format!(
            "--output holds one answer, but there are {count} statements"
        ));
    }
}

fn row_limit(arguments: &SqlArguments) -> Option<usize> {
    let is_table = arguments.format == FormatName::Table;
    arguments.max_rows.or(is_table.then_some(TABLE_ROWS))
}

async fn open(arguments: &SqlArguments) -> Result<Door, Error> {
    let options = Options {
        memory_bytes: arguments.memory,
        temp_dir: arguments.temp_dir.clone(),
        skip_damaged: arguments.skip_damaged,
        engine: arguments.engine.engine()?,
        ..Options::default()
    };
    let target = arguments.source.target();
    target.open(options, &arguments.login).await
}

async fn batch(door: &mut Door, text: &str, limits: Limits, arguments: &SqlArguments) -> u8 {
    for statement in statements::split(text) {
        let work = async {
            let mut sink = Sink::open(arguments.format.into(), arguments.output.as_deref())?;
            answer(door, statement, limits, &mut sink).await
        };
        let outcome = tokio::select! {
            outcome = work => outcome,
            _ = tokio::signal::ctrl_c() => {
                eprintln!("cancelled");
                return 130;
            }
        };
        if let Err(error) = outcome {
            if output::is_closed_pipe(&error) {
                return 0;
            }
            eprintln!("error: {}", near::with_suggestion(format!("{error:#}")));
            return 1;
        }
    }
    0
}

/// Asks one question, writes the answer, and says on stderr what has to be known about it.
async fn answer(door: &mut Door, sql: &str, limits: Limits, sink: &mut Sink) -> anyhow::Result<()> {
    let started = std::time::Instant::now();
    let cut = match door.answer(sql, limits, sink).await {
        Ok(()) => None,
        Err(error) => match error.downcast_ref::<Error>() {
            Some(limit) if limit.is_too_many_rows() => limits.rows,
            _ => return Err(error),
        },
    };
    sink.finish(started.elapsed())?;
    if let Some(rows) = cut {
        eprintln!("note: cut after {rows} rows; there are more (--max-rows)");
    }
    if let Some(note) = door.loss_note(sql, limits).await {
        eprintln!("{note}");
    }
    Ok(())
}

impl From<FormatName> for Format {
    fn from(name: FormatName) -> Self {
        match name {
            FormatName::Table => Format::Table,
            FormatName::Csv => Format::Csv,
            FormatName::Json => Format::Json,
            FormatName::Parquet => Format::Parquet,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_decimal_and_binary_units() {
        assert_eq!(parse_size("1048576"), Ok(1_048_576));
        assert_eq!(parse_size("2GiB"), Ok(2_147_483_648));
        assert_eq!(parse_size("1.5MB"), Ok(1_500_000));
        assert!(parse_size("2 parsecs").is_err());
        assert!(parse_size("MiB").is_err());
        assert!(parse_size("0").is_err());
    }

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
