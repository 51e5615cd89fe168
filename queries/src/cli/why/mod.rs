//! `vramscope why`: one failure to get memory: its class, the numbers that led to it, and what would have
//! helped. A setting is proposed only after the recorded trace was rerun with it.

mod evidence;
mod replay;

use std::io::Write;

use clap::Args;
use serde_json::{Value, json};

use crate::door::Door;
use crate::rows::Row;
use crate::target::{ANSWERED, Chosen, FAILED, NOTHING, Place, USAGE};
use crate::text::{age, counted, size};
use evidence::Told;
use replay::Replayed;

pub const HELP: &str = "\
Examples:
  vramscope why --data ./trace                       the newest failure
  vramscope why --data ./trace --list                all of them, a line each
  vramscope why --data ./trace --oom 1234            the one that row 1234 (seq) of oom_events tells
  vramscope why --data ./trace --pid 4711            the newest of one process
  vramscope why --data ./trace --json                for scripts

Allocator settings are proposed only after the recorded requests were rerun with them, by the rules of
PyTorch's allocator on a card of the same size. Where the trace does not allow that, nothing is proposed.

Exit codes: 0 answered, 1 the data cannot be opened or a query failed, 2 wrong usage, 3 nothing found.";

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    chosen: Chosen,
    /// The failure, by its seq in oom_events; or latest
    #[arg(long, value_name = "SEQ", default_value = "latest", value_parser = which)]
    oom: Which,
    /// List the failures instead
    #[arg(long, conflicts_with = "oom")]
    list: bool,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Latest,
    Seq(i64),
}

fn which(text: &str) -> Result<Which, String> {
    if text == "latest" {
        return Ok(Which::Latest);
    }
    let seq = text
        .parse()
        .map_err(|_| format!("{text:?} is neither a seq nor latest"))?;
    Ok(Which::Seq(seq))
}

/// A row of oom_events.
#[derive(Debug, Clone)]
pub struct Failure {
    pub process_id: i64,
    pub pid: i64,
    pub host: String,
    pub device: Option<i64>,
    pub gpu_uuid: Option<String>,
    pub ts: String,
    pub ts_ns: i64,
    pub seq: i64,
    pub source: String,
    pub layer: String,
    pub outcome: String,
    pub api: String,
    pub failed_calls: i64,
    pub tried: Option<u64>,
    pub driver_free: Option<u64>,
    pub driver_free_basis: Option<String>,
    pub driver_free_age: Option<f64>,
    pub reserved: Option<u64>,
    pub allocated: Option<u64>,
    pub stranded: Option<u64>,
    pub releasable: Option<u64>,
    pub allocator_basis: Option<String>,
    pub card: Option<u64>,
    pub process: Option<u64>,
    pub others: Option<u64>,
    pub growth: Option<f64>,
    pub growth_at_least: Option<f64>,
    pub residence_seconds: Option<f64>,
    pub allocated_before: Option<u64>,
    pub waiting_before: Option<u64>,
    pub waiting_at_failure: Option<u64>,
    pub class: String,
    pub missing: Option<u64>,
    pub folded: Option<String>,
    pub lossy: Option<bool>,
}

impl Failure {
    fn from_row(row: Row<'_>) -> anyhow::Result<Failure> {
        let text = |name| -> anyhow::Result<String> { Ok(row.text(name)?.unwrap_or_default()) };
        let number = |name| -> anyhow::Result<i64> { Ok(row.number(name)?.unwrap_or_default()) };
        Ok(Failure {
            process_id: number("process_id")?,
            pid: number("pid")?,
            host: text("host")?,
            device: row.number("device")?,
            gpu_uuid: row.text("gpu_uuid")?,
            ts: text("ts")?,
            ts_ns: number("ts_ns")?,
            seq: number("seq")?,
            source: text("source")?,
            layer: text("layer")?,
            outcome: text("outcome")?,
            api: text("api")?,
            failed_calls: number("failed_calls")?,
            tried: row.bytes("tried_bytes")?,
            driver_free: row.bytes("driver_free_bytes")?,
            driver_free_basis: row.text("driver_free_basis")?,
            driver_free_age: row.ratio("driver_free_age_seconds")?,
            reserved: row.bytes("reserved_bytes")?,
            allocated: row.bytes("allocated_bytes")?,
            stranded: row.bytes("stranded_bytes")?,
            releasable: row.bytes("releasable_bytes")?,
            allocator_basis: row.text("allocator_basis")?,
            card: row.bytes("card_bytes")?,
            process: row.bytes("process_bytes")?,
            others: row.bytes("others_bytes")?,
            growth: row.ratio("growth_bytes_per_request")?,
            growth_at_least: row.ratio("growth_at_least")?,
            residence_seconds: row.ratio("residence_seconds")?,
            allocated_before: row.bytes("allocated_before_bytes")?,
            waiting_before: row.bytes("waiting_before")?,
            waiting_at_failure: row.bytes("waiting_at_failure")?,
            class: text("class")?,
            missing: row.bytes("missing_bytes")?,
            folded: row.text("folded")?,
            lossy: row.flag("lossy")?,
        })
    }

    fn who(&self) -> String {
        if self.source == "import" {
            self.host.clone()
        } else {
            format!("pid {} on {}", self.pid, self.host)
        }
    }

    fn line(&self) -> String {
        let tried = self.tried.map_or("?".to_string(), size);
        format!(
            "{}  seq {}  {}  {} {}: {tried}, {}",
            self.ts,
            self.seq,
            self.who(),
            self.layer,
            self.outcome,
            self.class
        )
    }
}

pub async fn run(arguments: Arguments) -> u8 {
    match answer(&arguments).await {
        Ok(code) => code,
        Err(error) if crate::output::is_closed_pipe(&error) => ANSWERED,
        Err(error) => {
            eprintln!("error: {error:#}");
            FAILED
        }
    }
}

async fn answer(arguments: &Arguments) -> anyhow::Result<u8> {
    let limits = arguments.place.limits();
    let mut door = arguments.place.open().await?;
    let mut conditions = arguments.chosen.conditions();
    if let Which::Seq(seq) = arguments.oom {
        conditions.push_str(&format!(" AND seq = {seq}"));
    }
    let sql = format!("SELECT * FROM oom_events WHERE true{conditions} ORDER BY ts_ns, seq");
    let rows = door.collect(&sql, limits).await?;
    let failures: Vec<Failure> = rows
        .iter()
        .map(Failure::from_row)
        .collect::<Result<_, _>>()?;
    if arguments.list {
        return list(arguments, &failures);
    }
    let failure = match (&failures[..], arguments.oom) {
        ([], _) => {
            nothing(arguments);
            return Ok(NOTHING);
        }
        ([.., last], Which::Latest) => last,
        ([only], Which::Seq(_)) => only,
        (several, Which::Seq(seq)) => {
            eprintln!(
                "error: several processes have a failure with seq {seq}: choose by --process"
            );
            for failure in several {
                eprintln!("  --process {}   {}", failure.process_id, failure.line());
            }
            return Ok(USAGE);
        }
    };
    let told = evidence::tell(&mut door, limits, failure).await?;
    let replayed = replay::try_settings(&mut door, limits, failure).await?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(
            out,
            "{}",
            serde_json::to_string_pretty(&as_json(failure, &told, &replayed))?
        )?;
    } else {
        write!(out, "{}", as_text(failure, &told, &replayed))?;
    }
    out.flush()?;
    note_losses(&mut door, arguments).await;
    Ok(ANSWERED)
}

async fn note_losses(door: &mut Door, arguments: &Arguments) {
    let note = door
        .loss_note("SELECT * FROM oom_events", arguments.place.limits())
        .await;
    if let Some(note) = note {
        eprintln!("{note}");
    }
}

fn nothing(arguments: &Arguments) {
    let which = match arguments.oom {
        Which::Latest => String::new(),
        Which::Seq(seq) => format!(" with seq {seq}"),
    };
    eprintln!(
        "nothing found: no failure to get memory{}{which} is recorded (`vramscope map` shows how full it is now)",
        arguments.chosen.words()
    );
}

fn list(arguments: &Arguments, failures: &[Failure]) -> anyhow::Result<u8> {
    if failures.is_empty() {
        nothing(arguments);
        return Ok(NOTHING);
    }
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let all: Vec<Value> = failures.iter().map(facts).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    } else {
        for failure in failures {
            writeln!(out, "{}", failure.line())?;
        }
    }
    out.flush()?;
    Ok(ANSWERED)
}

fn facts(failure: &Failure) -> Value {
    json!({
        "process_id": failure.process_id, "pid": failure.pid, "host": failure.host, "device": failure.device,
        "gpu_uuid": failure.gpu_uuid, "ts": failure.ts, "seq": failure.seq, "source": failure.source,
        "layer": failure.layer, "outcome": failure.outcome, "api": failure.api,
        "failed_calls": failure.failed_calls, "class": failure.class, "tried_bytes": failure.tried,
        "driver_free_bytes": failure.driver_free, "driver_free_basis": failure.driver_free_basis,
        "reserved_bytes": failure.reserved, "allocated_bytes": failure.allocated,
        "stranded_bytes": failure.stranded, "releasable_bytes": failure.releasable,
        "allocator_basis": failure.allocator_basis, "card_bytes": failure.card,
        "process_bytes": failure.process, "others_bytes": failure.others,
        "growth_bytes_per_request": failure.growth, "growth_at_least": failure.growth_at_least,
        "residence_seconds": failure.residence_seconds, "allocated_before_bytes": failure.allocated_before,
        "waiting_before": failure.waiting_before, "waiting_at_failure": failure.waiting_at_failure,
        "missing_bytes": failure.missing, "folded": failure.folded, "lossy": failure.lossy,
    })
}

fn as_json(failure: &Failure, told: &Told, replayed: &Replayed) -> Value {
    let mut answer = facts(failure);
    let more = json!({
        "meaning": told.meaning, "evidence": told.evidence, "near": told.near, "with_growth": told.with_growth,
        "holders": told.holders, "replay": replayed.json(),
    });
    if let (Value::Object(answer), Value::Object(more)) = (&mut answer, more) {
        answer.extend(more);
    }
    answer
}

fn as_text(failure: &Failure, told: &Told, replayed: &Replayed) -> String {
    let device = failure
        .device
        .map_or(String::new(), |device| format!(", device {device}"));
    let tried = failure
        .tried
        .map_or("an unknown number of bytes".to_string(), size);
    let outcome = match failure.outcome.as_str() {
        "raised" => "the framework gave up",
        "recovered" => "the allocator gave back its cache, tried again and got it",
        _ => "no framework was involved, or none was seen",
    };
    let mut text = format!(
        "{}{device}: {tried} could not be had at {}\n{}: {}; {outcome}\n",
        failure.who(),
        failure.ts,
        failure.layer,
        failure.api
    );
    if failure.failed_calls > 0 {
        text.push_str(&format!(
            "{} of driver or runtime before it\n",
            counted(failure.failed_calls as usize, "failed call")
        ));
    }
    if let Some(folded) = &failure.folded {
        text.push_str(&format!("asked by: {}\n", tail(folded)));
    }
    text.push_str(&format!(
        "\nclass: {}\n  {}\n\nevidence:\n",
        failure.class, told.meaning
    ));
    for line in told.evidence.iter().chain(&told.near) {
        text.push_str(&format!("  - {line}\n"));
    }
    if let Some(seconds) = failure.driver_free_age.filter(|seconds| *seconds > 0.0) {
        text.push_str(&format!(
            "  - the driver's free bytes are from {} before\n",
            age(seconds)
        ));
    }
    if failure.lossy == Some(true) {
        text.push_str("  - events of this process were lost before: numbers may be off\n");
    }
    if !told.holders.is_empty() {
        text.push_str(&format!("\n{}:\n", told.holders_title));
        for line in &told.holders {
            text.push_str(&format!("  - {line}\n"));
        }
    }
    text.push_str(&format!("\nwhat would have helped:\n{}", replayed.text()));
    text
}

/// The innermost functions of a folded stack.
pub fn tail(folded: &str) -> String {
    let functions: Vec<&str> = folded.split(';').collect();
    let from = functions.len().saturating_sub(5);
    let dots = if from > 0 { "… > " } else { "" };
    crate::map::cut(&format!("{dots}{}", functions[from..].join(" > ")), 300)
}
