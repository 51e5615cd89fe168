//! `vramscope map`: where a device's memory is, from the card down to what the program asked for,
//! and the address map of its framework's allocator, as text or as a picture.

mod picture;
mod request;
pub mod segments;
pub mod svg;
mod waterfall;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;

use crate::door::Door;
use crate::rows::quoted;
use crate::target::{ANSWERED, Chosen, FAILED, Moment, NOTHING, Place, USAGE};
use crate::text;
pub use picture::{cut, is_own_native, is_own_python, name as stack_name};

pub const HELP: &str = "\
Examples:
  vramscope map --data ./trace                                  the newest map
  vramscope map --data ./trace --pid 4711 --device 1            of one process and device
  vramscope map --data ./trace --at 2026-11-29T10:15:00Z        as it was at that time
  vramscope map --data ./trace --svg map.svg --color age        as a picture, blocks by age
  vramscope map --data ./trace --request 512MiB                 what such a request would do now
  vramscope map --data ./trace --json > map.json                for scripts

The map is that of the newest snapshot (of an import, an out-of-memory error, a request). The text has a
line a segment; a character stands for an equal share of it:
  # in use   + mostly in use   - mostly free   . free   ~ freed, a stream may still use it

Exit codes: 0 answered, 1 the data cannot be opened or a query failed, 2 wrong usage, 3 nothing found.";

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    chosen: Chosen,
    /// The snapshot, by snapshot_id
    #[arg(long, value_name = "ID", conflicts_with = "at")]
    snapshot: Option<i64>,
    /// The newest map up to this time, for example 2026-11-29T10:15:00Z
    #[arg(long, value_name = "TIME")]
    at: Option<String>,
    /// Write the map as a picture to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// What the colours of the picture's blocks stand for
    #[arg(long, value_enum, default_value = "stack")]
    color: Color,
    /// Say what a request of so many bytes would do now, for example 512MiB
    #[arg(long, value_name = "SIZE", value_parser = crate::parse_size)]
    request: Option<usize>,
    /// The stream that asks (the framework's id; default: that of most of the memory)
    #[arg(long, value_name = "ID", requires = "request")]
    stream: Option<i64>,
    /// Segments that get a line, those with the most stranded bytes first; 0 is all
    #[arg(long, value_name = "N", default_value_t = 40)]
    segments: usize,
    /// Characters in a line (default: the terminal's, else 100)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(60..))]
    width: Option<u16>,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Color {
    /// By the stack that allocated the block
    Stack,
    /// By the time since it was allocated
    Age,
}

pub async fn run(arguments: Arguments) -> u8 {
    match answer(&arguments).await {
        Ok(code) => code,
        Err(error) => {
            if !crate::output::is_closed_pipe(&error) {
                eprintln!("error: {error:#}");
                return FAILED;
            }
            ANSWERED
        }
    }
}

async fn answer(arguments: &Arguments) -> anyhow::Result<u8> {
    let mut door = arguments.place.open().await?;
    let moment = match choose(&mut door, arguments).await? {
        Ok(moment) => moment,
        Err(code) => return Ok(code),
    };
    let waterfall = waterfall::ask(&mut door, arguments.place.limits(), &moment).await?;
    let map = segments::ask(&mut door, arguments.place.limits(), &moment).await?;
    let request = match arguments.request {
        Some(bytes) => Some(request::answer(
            &map,
            &waterfall,
            &moment,
            bytes as u64,
            arguments.stream,
        )?),
        None => None,
    };
    if let Some(file) = &arguments.svg {
        let names = picture::names(&mut door, arguments.place.limits(), &map).await?;
        let drawing = svg::draw(&moment, &waterfall, &map, &names, arguments.color);
        write_whole(file, drawing.as_bytes())?;
    }
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let answer = json!({
            "process_id": moment.process_id, "pid": moment.pid, "host": moment.host,
            "device": moment.device, "gpu_uuid": moment.gpu_uuid, "snapshot_id": moment.snapshot_id,
            "ts": moment.ts, "reason": moment.reason, "source": moment.source,
            "waterfall": waterfall.json(), "segments": map.json(),
            "request": request.as_ref().map(request::Answer::json),
        });
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    } else {
        let width = usize::from(arguments.width.unwrap_or_else(terminal_width));
        writeln!(
            out,
            "{}\nmap of {} ({})\n",
            moment.title(),
            moment.ts,
            moment.reason
        )?;
        writeln!(out, "{}", waterfall.text(width))?;
        if let Some(request) = &request {
            writeln!(out, "{}\n", request.text())?;
        }
        write!(out, "{}", map.text(width, arguments.segments))?;
    }
    out.flush()?;
    if let Some(file) = &arguments.svg {
        eprintln!("note: the picture is in {}", file.display());
    }
    if let Some(note) = door
        .loss_note("SELECT * FROM memory_map", arguments.place.limits())
        .await
    {
        eprintln!("{note}");
    }
    Ok(ANSWERED)
}

/// The map that is meant; else the code to end with, after saying why.
async fn choose(door: &mut Door, arguments: &Arguments) -> anyhow::Result<Result<Moment, u8>> {
    let mut conditions = arguments.chosen.conditions();
    if let Some(snapshot) = arguments.snapshot {
        conditions.push_str(&format!(" AND snapshot_id = {snapshot}"));
    }
    if let Some(at) = &arguments.at {
        if !looks_like_a_time(at) {
            eprintln!("error: {at:?} is not a time; for example 2026-11-29T10:15:00Z");
            return Ok(Err(USAGE));
        }
        conditions.push_str(&format!(" AND ts <= CAST({} AS TIMESTAMP)", quoted(at)));
    }
    let limits = arguments.place.limits();
    let of_device = format!(" AND memory_kind <> 'pinned_host'{conditions}");
    let rows = door
        .collect(&Moment::query("segments", &of_device), limits)
        .await?;
    let found: Vec<Moment> = rows
        .iter()
        .map(Moment::from_row)
        .collect::<Result<_, _>>()?;
    let mut newest: Vec<&Moment> = Vec::new();
    for moment in &found {
        let same = |other: &&Moment| {
            (other.process_id, other.device) == (moment.process_id, moment.device)
        };
        if !newest.iter().any(same) {
            newest.push(moment);
        }
    }
    match newest[..] {
        [] => {
            eprintln!(
                "nothing found: no address map{}; maps come with `vramscope import FILE`, an out-of-memory error of a traced PyTorch, or a recorder's request (`vramscope sql -c 'SELECT * FROM fragmentation_now'` has totals without a map)",
                arguments.chosen.words()
            );
            Ok(Err(NOTHING))
        }
        [only] => Ok(Ok(only.clone())),
        _ => {
            eprintln!(
                "error: several processes or devices have a map: choose by --process and --device"
            );
            for moment in newest {
                eprintln!(
                    "  --process {} --device {}   {}, map of {}",
                    moment.process_id,
                    moment.device,
                    moment.title(),
                    moment.ts
                );
            }
            Ok(Err(USAGE))
        }
    }
}

/// A date first, as in RFC 3339; what is wrong behind it the engine says.
fn looks_like_a_time(text: &str) -> bool {
    let date: Vec<&str> = text.get(..10).unwrap_or_default().split('-').collect();
    date.len() == 3
        && date
            .iter()
            .all(|part| part.chars().all(|c| c.is_ascii_digit()))
}

fn terminal_width() -> u16 {
    if !std::io::stdout().is_terminal() {
        return 100;
    }
    terminal_size::terminal_size().map_or(100, |(width, _)| width.0.max(60))
}

/// The file appears when it is whole.
pub fn write_whole(file: &Path, content: &[u8]) -> anyhow::Result<()> {
    let mut name = file
        .file_name()
        .with_context(|| format!("{file:?} is not a file name"))?
        .to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let partial = file.with_file_name(name);
    std::fs::write(&partial, content).with_context(|| format!("failed to write {partial:?}"))?;
    std::fs::rename(&partial, file).with_context(|| format!("failed to write {file:?}"))
}

/// Bytes of blocks with one state, as text.
fn of(bytes: u64, whole: u64) -> String {
    let share = if whole > 0 {
        bytes as f64 / whole as f64
    } else {
        0.0
    };
    format!("{} ({})", text::size(bytes), text::percent(share))
}
