//! `vramscope leaks`: which call stacks leak, ranked; and pictures and profiles of what stacks hold.

mod found;
mod looked;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::json;
use vramscope_queries::session::Limits;

use crate::door::Door;
use crate::frames::{self, Stacks};
use crate::map::write_whole;
use crate::profile::flame::{self, Node, Picture};
use crate::profile::pprof::{self, About, Sample, SampleType};
use crate::profile::{self, Choice, Profile, ROWS, Value};
use crate::rows::quoted;
use crate::scope::Scope;
use crate::target::{ANSWERED, FAILED, NOTHING, Place};
use crate::text::{counted, size};
use found::Leak;
pub use found::signed;

/// A leak was found, and --fail-on asked to say so.
const LEAKS: u8 = 4;

pub const HELP: &str = "\
Examples:
  vramscope leaks --data ./trace                                     what leaks, the first to look at first
  vramscope leaks --collector http://127.0.0.1:7717 --pod 'server-*' of some pods
  vramscope leaks --data ./trace --all                               also what bytes alone cannot tell
  vramscope leaks --data ./trace --json > leaks.json                 for scripts
  vramscope leaks --data ./trace --fail-on confirmed                 for CI: exit code 4 if one is confirmed
  vramscope leaks --data ./trace --flamegraph live.svg               all live bytes by stack, for a browser
  vramscope leaks --data ./trace --flamegraph grown.svg --value growth --since 6h
  vramscope leaks --data ./trace --pprof live.pb.gz                  for `pprof`, Grafana and others
  vramscope leaks --data ./trace --settings block_minutes:2,warmup_minutes:2,min_requests:100

Tiers:
  confirmed     passed three evaluations in a row
  suspect       passed one, by a faster rule; known hours earlier, wrong more often
  ambiguous     grows as a leak does and as a filling cache does; the line says what would settle it (--all)

--since and --until bound the list by when a leak was first seen, and pictures and profiles by time. What
is found is found over the whole recording: the view leak_by_stack, which `vramscope views` explains.

Exit codes: 0 answered, leaks or none; 1 the data cannot be opened or a query failed; 2 wrong usage;
3 too little data to tell; 4 a leak was found that --fail-on names.";

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    scope: Scope,
    /// Show only this tier
    #[arg(long, value_enum, conflicts_with = "all")]
    tier: Option<Tier>,
    /// Show ambiguous cases too
    #[arg(long)]
    all: bool,
    /// Lines at most; 0 is all
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// End with exit code 4 if there is a leak of this tier or a surer one
    #[arg(long, value_enum, value_name = "TIER")]
    fail_on: Option<FailOn>,
    /// Settings of the detectors, for example block_minutes:2 for a short recording
    #[arg(long, value_name = "SETTINGS")]
    settings: Option<String>,
    /// Write a flame graph of all stacks to this file
    #[arg(long, value_name = "FILE.svg")]
    flamegraph: Option<PathBuf>,
    /// Write a profile of all stacks to this file, in pprof's format
    #[arg(long, value_name = "FILE.pb.gz")]
    pprof: Option<PathBuf>,
    #[command(flatten)]
    choice: Choice,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Tier {
    Confirmed,
    Suspect,
    Ambiguous,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FailOn {
    /// Only confirmed leaks
    Confirmed,
    /// Suspects too
    Suspect,
}

pub async fn run(arguments: &Arguments) -> u8 {
    match answer(arguments).await {
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
    if arguments.flamegraph.is_some() || arguments.pprof.is_some() {
        let only_files = !arguments.json && arguments.fail_on.is_none();
        let code = write_files(&mut door, limits, arguments).await?;
        if only_files || code != ANSWERED {
            note_losses(&mut door, limits).await;
            return Ok(code);
        }
    }
    let all = ask(&mut door, limits, arguments).await?;
    let mut leaks: Vec<&Leak> = all.iter().filter(|leak| arguments.shows(leak)).collect();
    let found = leaks.len();
    if arguments.limit > 0 {
        leaks.truncate(arguments.limit);
    }
    let looked = looked::ask(
        &mut door,
        limits,
        &arguments.scope,
        arguments.settings.as_deref(),
    )
    .await?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let answer = json!({
            "found": found, "looked_at": looked.json(),
            "leaks": leaks.iter().map(|leak| leak.json()).collect::<Vec<_>>(),
            "insufficient": found::insufficient(&all).map(Leak::json).collect::<Vec<_>>(),
        });
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    } else if found > 0 {
        write!(out, "{}", found::table(&leaks))?;
        if found > leaks.len() {
            writeln!(
                out,
                "and {} more (--limit 0 shows all)",
                found - leaks.len()
            )?;
        }
        let ambiguous = all.iter().filter(|leak| leak.is(Tier::Ambiguous)).count();
        if ambiguous > 0 && arguments.tier.is_none() && !arguments.all {
            writeln!(
                out,
                "\n{} not shown (--all)",
                counted(ambiguous, "ambiguous case")
            )?;
        }
    } else {
        write!(out, "{}", looked.text(&all, arguments))?;
    }
    out.flush()?;
    drop(out);
    note_losses(&mut door, limits).await;
    if arguments.fails(&all) {
        return Ok(LEAKS);
    }
    Ok(if found == 0 && !looked.is_enough() {
        NOTHING
    } else {
        ANSWERED
    })
}

impl Arguments {
    fn shows(&self, leak: &Leak) -> bool {
        let Some(tier) = leak.tier() else {
            return false;
        };
        match self.tier {
            Some(only) => tier == only,
            None => tier != Tier::Ambiguous || self.all,
        }
    }

    fn fails(&self, leaks: &[Leak]) -> bool {
        let least = match self.fail_on {
            None => return false,
            Some(FailOn::Confirmed) => Tier::Confirmed,
            Some(FailOn::Suspect) => Tier::Suspect,
        };
        leaks
            .iter()
            .any(|leak| leak.tier().is_some_and(|tier| tier <= least))
    }
}

/// The view, or the function of its name where there are settings.
fn source(name: &str, settings: Option<&str>) -> String {
    match settings {
        Some(settings) => format!("{name}({})", quoted(settings)),
        None => name.to_string(),
    }
}

async fn ask(door: &mut Door, limits: Limits, arguments: &Arguments) -> anyhow::Result<Vec<Leak>> {
    let span = arguments.scope.span(door, limits).await?;
    let mut conditions = arguments.scope.conditions("l", "l");
    let first_seen = "CAST(coalesce(l.first_seen, l.since) AS BIGINT)";
    if let Some(since) = span.since {
        conditions.push_str(&format!(" AND coalesce({first_seen} >= {since}, true)"));
    }
    if let Some(until) = span.until {
        conditions.push_str(&format!(" AND coalesce({first_seen} < {until}, true)"));
    }
    let sql = format!(
        "SELECT * FROM {} AS l WHERE true{conditions} ORDER BY rank",
        source("leak_by_stack", arguments.settings.as_deref())
    );
    let rows = door.collect(&sql, limits).await?;
    rows.iter().map(Leak::from_row).collect()
}

async fn note_losses(door: &mut Door, limits: Limits) {
    let note = door.loss_note("SELECT * FROM stack_windows", limits).await;
    if let Some(note) = note {
        eprintln!("{note}");
    }
}

/// Writes the picture and the profile that were asked for.
async fn write_files(door: &mut Door, limits: Limits, arguments: &Arguments) -> anyhow::Result<u8> {
    let by_process = arguments.pprof.is_some();
    let profile = profile::ask(
        door,
        limits,
        &arguments.scope,
        &arguments.choice,
        by_process,
    )
    .await?;
    if profile.is_empty() {
        let whose = match arguments.scope.words() {
            words if words.is_empty() => String::new(),
            words => format!(" of {words}"),
        };
        eprintln!(
            "nothing found: no {} memory{whose} is recorded",
            arguments.choice.name()
        );
        return Ok(NOTHING);
    }
    let (rows, rest) = profile.most(ROWS);
    let mut ids: Vec<i64> = rows.iter().filter_map(|(key, _)| key.stack).collect();
    ids.sort_unstable();
    ids.dedup();
    let stacks = frames::stacks(door, limits, &ids).await?;
    let drawn = Drawn {
        profile: &profile,
        rows,
        rest,
        stacks,
    };
    if let Some(file) = &arguments.flamegraph {
        drawn.flamegraph(file, arguments)?;
    }
    if let Some(file) = &arguments.pprof {
        drawn.pprof(door, limits, file, arguments).await?;
    }
    Ok(ANSWERED)
}

struct Drawn<'a> {
    profile: &'a Profile,
    rows: Vec<profile::Line>,
    rest: Option<profile::Rest>,
    stacks: Stacks,
}

impl Drawn<'_> {
    fn flamegraph(&self, file: &Path, arguments: &Arguments) -> anyhow::Result<()> {
        let value = arguments.choice.value;
        let mut root = Node::default();
        let mut shrunk = 0u64;
        let rest = self.rest.map(|(_, held)| held.value(value));
        let of_rows = self
            .rows
            .iter()
            .map(|(key, held)| (key.stack, held.value(value)));
        for (stack, bytes) in of_rows {
            let Ok(bytes) = u64::try_from(bytes) else {
                shrunk += bytes.unsigned_abs();
                continue;
            };
            root.add(stack.and_then(|id| self.stacks.get(&id)), bytes, 0);
        }
        if let Some(bytes) = rest.and_then(|bytes| u64::try_from(bytes).ok()) {
            root.add(Some(&other_stacks(self.rest)), bytes, 0);
        }
        let title = format!("{} bytes by call stack", value.name());
        let subtitle = self.about(arguments);
        let picture = Picture {
            title: &title,
            subtitle: &subtitle,
            differential: false,
        };
        write_whole(file, flame::draw(&picture, &root).as_bytes())?;
        eprintln!(
            "note: the flame graph of {} {} is in {}",
            size(root.value()),
            value.name(),
            file.display()
        );
        if shrunk > 0 {
            eprintln!(
                "note: stacks that shrank, by {} together, cannot be drawn",
                size(shrunk)
            );
        }
        Ok(())
    }

    fn about(&self, arguments: &Arguments) -> String {
        let mut text = format!(
            "{} memory of {}, {}",
            arguments.choice.name(),
            counted(self.profile.processes as usize, "process lifetime"),
            self.profile.words()
        );
        let whose = arguments.scope.words();
        if !whose.is_empty() {
            text.push_str(&format!(", {whose}"));
        }
        text
    }

    async fn pprof(
        &self,
        door: &mut Door,
        limits: Limits,
        file: &Path,
        arguments: &Arguments,
    ) -> anyhow::Result<()> {
        let mut ids: Vec<i64> = self
            .rows
            .iter()
            .filter_map(|(key, _)| key.process)
            .collect();
        ids.sort_unstable();
        ids.dedup();
        let processes = profile::processes(door, limits, &ids).await?;
        let mut samples: Vec<Sample<'_>> = Vec::with_capacity(self.rows.len() + 1);
        for (key, held) in &self.rows {
            samples.push(Sample {
                stack: key.stack.and_then(|id| self.stacks.get(&id)),
                name: "(no stack)",
                process: key.process.and_then(|id| processes.get(&id)),
                values: values(held),
            });
        }
        let others = other_stacks(self.rest);
        if let Some((_, held)) = &self.rest {
            samples.push(Sample {
                stack: None,
                name: &others.folded,
                process: None,
                values: values(held),
            });
        }
        let default_type = match arguments.choice.value {
            Value::Live => "live_bytes",
            Value::Growth => "growth_bytes",
            Value::Allocated => "allocated_bytes",
        };
        let from = self.profile.span.since.max(self.profile.first);
        let last = self.profile.last.unwrap_or_default();
        let about = About {
            types: &TYPES,
            default_type,
            time_nanoseconds: last.saturating_mul(1000),
            duration_nanoseconds: from.map_or(0, |from| (last - from).saturating_mul(1000)),
            comments: &[self.about(arguments)],
        };
        write_whole(file, &pprof::encode(&about, &samples)?)?;
        eprintln!(
            "note: the profile, {} live in {}, is in {}",
            size(self.profile.total().live_bytes.max(0) as u64),
            counted(samples.len(), "sample"),
            file.display()
        );
        Ok(())
    }
}

const TYPES: [SampleType; 5] = [
    SampleType {
        name: "live_count",
        unit: "count",
    },
    SampleType {
        name: "live_bytes",
        unit: "bytes",
    },
    SampleType {
        name: "growth_bytes",
        unit: "bytes",
    },
    SampleType {
        name: "allocations",
        unit: "count",
    },
    SampleType {
        name: "allocated_bytes",
        unit: "bytes",
    },
];

/// In the order of [`TYPES`].
fn values(held: &profile::Held) -> Vec<i64> {
    vec![
        held.live_count,
        held.live_bytes,
        held.value(Value::Growth),
        held.allocations,
        held.allocated_bytes,
    ]
}

fn other_stacks(rest: Option<profile::Rest>) -> frames::Stack {
    let count = rest.map_or(0, |(count, _)| count);
    frames::Stack {
        folded: format!("({count} other stacks)"),
        frames: Vec::new(),
    }
}
