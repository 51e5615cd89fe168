//! `vramscope diff`: what call stacks hold on one side and on the other: two times, two recordings, two
//! pods, two versions.

mod compare;
mod side;

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value as Json, json};
use vramscope_queries::session::{Limits, Options};

use crate::door::Door;
use crate::frames::{self, Stack, Stacks};
use crate::leaks::signed;
use crate::login::Login;
use crate::map::write_whole;
use crate::profile::flame::{self, Node, Picture};
use crate::profile::owner::By;
use crate::profile::pprof::{self, About, Sample, SampleType};
use crate::profile::{self, Choice, Held, Profile, ROWS, Value};
use crate::scope::Scope;
use crate::target::{ANSWERED, FAILED, NOTHING, Target, USAGE, limits};
use crate::text::{age, counted};
use crate::why::tail;
use compare::{Measured, Pair, compared};
use side::Side;

pub const HELP: &str = "\
A and B are each one of:
  DIR            a data folder: ./monday
  URL            a collector: http://127.0.0.1:7717 (Flight SQL), postgresql://127.0.0.1:7719
  FROM..TO       a time: 2026-11-29T10:00:00Z..2026-11-29T12:00:00Z, 6h..3h (before the end), 3h..
  KEY=VALUE,...  data, collector, url, since, until, host, pid, process, device, namespace, pod, exe,
                 command (text in the command line), build (start of a build id), framework (its version);
                 * in a name stands for any characters
What holds for both is said once, by --data, --collector or --url, --host, --pod and so on.

Examples:
  vramscope diff ./monday ./tuesday                                  two recordings
  vramscope diff --data ./trace 6h..5h 1h..                          two times of one
  vramscope diff --data ./lake pod=server-1 pod=server-2             two pods
  vramscope diff --data ./lake 'pod=api-7d9f8*' 'pod=api-59c4b*'     two versions, by their pods
  vramscope diff --data ./lake build=5f3a build=91bc --by function   two builds of a program
  vramscope diff --data ./lake exe=server-1.4 exe=server-1.5 --value allocated
  vramscope diff ./monday ./tuesday --flamegraph diff.svg            red grew, blue shrank

Stacks that have the same id are the same; others are if their functions are, so that builds can be
compared. Live bytes are compared as they are at the end of each side, growth and allocated bytes by the
hour.

Exit codes: 0 answered, 1 the data cannot be opened or a query failed, 2 wrong usage, 3 a side has nothing.";

#[derive(Args)]
pub struct Arguments {
    /// What is compared
    #[arg(value_name = "A", value_parser = Side::parse)]
    a: Side,
    /// With what
    #[arg(value_name = "B", value_parser = Side::parse)]
    b: Side,
    /// Data folder of both sides
    #[arg(long, value_name = "DIR", conflicts_with_all = ["collector", "url"])]
    data: Option<PathBuf>,
    /// Collector of both sides by Flight SQL, for example http://127.0.0.1:7717
    #[arg(long, value_name = "URL", conflicts_with = "url")]
    collector: Option<String>,
    /// Collector of both sides by the protocol of the URL: http(s), grpc(s) or postgresql
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    #[command(flatten)]
    login: Login,
    #[command(flatten)]
    scope: Scope,
    #[command(flatten)]
    choice: Choice,
    /// What stacks are added up by
    #[arg(long, value_enum, default_value = "stack")]
    by: By,
    /// Lines at most; 0 is all
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Write a flame graph of B to this file, with colours for what changed
    #[arg(long, value_name = "FILE.svg")]
    flamegraph: Option<PathBuf>,
    /// Write the differences to this file, in pprof's format
    #[arg(long, value_name = "FILE.pb.gz")]
    pprof: Option<PathBuf>,
    /// Answer as JSON
    #[arg(long)]
    json: bool,
    /// Stop a query after this many seconds; 0 is never
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// Go on without the damaged files of a trace, and name them
    #[arg(long)]
    skip_damaged: bool,
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
    let common = match (&arguments.data, &arguments.collector, &arguments.url) {
        (Some(dir), _, _) => Some(Target::Data(dir.clone())),
        (None, Some(url), _) => Some(Target::Collector(url.clone())),
        (None, None, Some(url)) => Some(Target::Url(url.clone())),
        (None, None, None) => None,
    };
    let options = Options {
        skip_damaged: arguments.skip_damaged,
        ..Options::default()
    };
    let login = &arguments.login;
    let sides = [&arguments.a, &arguments.b].map(|side| side.or(common.as_ref(), &arguments.scope));
    let [Some(target_a), Some(target_b)] = sides.each_ref().map(|side| side.target.clone()) else {
        eprintln!(
            "error: where the data is was not said: give --data DIR, --collector URL or --url URL, or a folder as A and B"
        );
        return Ok(USAGE);
    };
    let limits = limits(arguments.timeout);
    let mut door = target_a.open(options.clone(), login).await?;
    let a = Half::ask(&mut door, limits, &sides[0], &arguments.choice).await?;
    if target_b != target_a {
        note_losses(&mut door, limits).await;
        door = target_b.open(options, login).await?;
    }
    let b = Half::ask(&mut door, limits, &sides[1], &arguments.choice).await?;
    note_losses(&mut door, limits).await;
    for half in [&a, &b] {
        if half.profile.is_empty() {
            eprintln!(
                "nothing found: {:?} has no {} memory",
                half.side.label,
                arguments.choice.name()
            );
            return Ok(NOTHING);
        }
    }
    let difference = Difference::new(a, b, arguments);
    if let Some(file) = &arguments.flamegraph {
        write_whole(file, difference.flamegraph().as_bytes())?;
        eprintln!("note: the flame graph is in {}", file.display());
    }
    if let Some(file) = &arguments.pprof {
        write_whole(file, &difference.pprof()?)?;
        eprintln!("note: the profile of differences is in {}", file.display());
    }
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&difference.json())?)?;
    } else {
        write!(out, "{}", difference.text())?;
    }
    out.flush()?;
    Ok(ANSWERED)
}

async fn note_losses(door: &mut Door, limits: Limits) {
    if let Some(note) = door.loss_note("SELECT * FROM stack_windows", limits).await {
        eprintln!("{note}");
    }
}

/// One side's answer.
struct Half {
    side: Side,
    profile: Profile,
    stacks: Stacks,
}

impl Half {
    async fn ask(
        door: &mut Door,
        limits: Limits,
        side: &Side,
        choice: &Choice,
    ) -> anyhow::Result<Half> {
        let profile = profile::ask(door, limits, &side.scope, choice, false).await?;
        let (rows, _) = profile.most(ROWS);
        let ids: Vec<i64> = rows.iter().filter_map(|(key, _)| key.stack).collect();
        let stacks = frames::stacks(door, limits, &ids).await?;
        Ok(Half {
            side: side.clone(),
            profile,
            stacks,
        })
    }

    fn measured(&self) -> Measured<'_> {
        Measured {
            profile: &self.profile,
            stacks: &self.stacks,
        }
    }

    fn line(&self) -> String {
        let hours = match self.profile.hours() {
            Some(hours) => format!(" ({})", age(hours * 3600.0)),
            None => String::new(),
        };
        format!(
            "{}: {}{hours}, {}",
            self.side.label,
            self.profile.words(),
            counted(self.profile.processes as usize, "process lifetime")
        )
    }

    fn json(&self) -> Json {
        let total = self.profile.total();
        json!({
            "side": self.side.label, "time": self.profile.words(), "hours": self.profile.hours(),
            "processes": self.profile.processes, "total": held_json(&total, self.profile.hours()),
        })
    }
}

struct Difference<'a> {
    a: Half,
    b: Half,
    /// Largest increase first.
    pairs: Vec<Pair>,
    arguments: &'a Arguments,
}

impl<'a> Difference<'a> {
    fn new(a: Half, b: Half, arguments: &'a Arguments) -> Self {
        let pairs = pairs(&a, &b, arguments.by);
        let mut difference = Difference {
            a,
            b,
            pairs,
            arguments,
        };
        let mut ranked = std::mem::take(&mut difference.pairs);
        ranked.sort_by(|x, y| {
            let by_change = difference.change(y).total_cmp(&difference.change(x));
            by_change.then_with(|| x.name.cmp(&y.name))
        });
        difference.pairs = ranked;
        difference
    }

    fn of_a(&self, held: &Held) -> f64 {
        compared(held, self.arguments.choice.value, self.a.profile.hours())
    }

    fn of_b(&self, held: &Held) -> f64 {
        compared(held, self.arguments.choice.value, self.b.profile.hours())
    }

    fn change(&self, pair: &Pair) -> f64 {
        self.of_b(&pair.b) - self.of_a(&pair.a)
    }

    fn value_name(&self) -> &'static str {
        match self.arguments.choice.value {
            Value::Live => "live",
            Value::Growth => "growth an hour",
            Value::Allocated => "allocated an hour",
        }
    }

    /// Rows with a line: those that changed most, either way.
    fn shown(&self) -> Vec<&Pair> {
        let limit = match self.arguments.limit {
            0 => usize::MAX,
            limit => limit,
        };
        let changed = || self.pairs.iter().filter(|pair| self.change(pair) != 0.0);
        if changed().count() <= limit {
            return changed().collect();
        }
        let mut most: Vec<&Pair> = changed().collect();
        most.sort_by(|x, y| self.change(y).abs().total_cmp(&self.change(x).abs()));
        most.truncate(limit);
        most.sort_by(|x, y| self.change(y).total_cmp(&self.change(x)));
        most
    }

    fn text(&self) -> String {
        let mut text = format!(
            "A  {}\nB  {}\n{} memory, {}\n\n",
            self.a.line(),
            self.b.line(),
            self.arguments.choice.name(),
            self.value_name()
        );
        let line = |change: &str, a: &str, b: &str, matched: &str, name: &str| {
            format!("{change:>13}{a:>13}{b:>13}  {matched:<7} {name}")
                .trim_end()
                .to_string()
                + "\n"
        };
        let by = match self.arguments.by {
            By::Function => "function",
            By::Module => "module",
            By::Stack => "stack",
        };
        text.push_str(&line("change", "A", "B", "", by));
        let shown = self.shown();
        for pair in &shown {
            let name = match self.arguments.by {
                By::Stack => tail(&pair.name),
                _ => pair.name.clone(),
            };
            text.push_str(&line(
                &change_text(self.change(pair)),
                &signed(self.of_a(&pair.a)),
                &signed(self.of_b(&pair.b)),
                pair.matched(),
                &name,
            ));
        }
        let changed = self
            .pairs
            .iter()
            .filter(|pair| self.change(pair) != 0.0)
            .count();
        let (a, b) = (self.a.profile.total(), self.b.profile.total());
        text.push_str(&line(
            &change_text(self.of_b(&b) - self.of_a(&a)),
            &signed(self.of_a(&a)),
            &signed(self.of_b(&b)),
            "",
            "all",
        ));
        if changed > shown.len() {
            text.push_str(&format!(
                "\n{} more changed (--limit 0 shows all)\n",
                changed - shown.len()
            ));
        }
        let unchanged = self.pairs.len() - changed;
        if unchanged > 0 {
            text.push_str(&format!("\n{unchanged} did not change\n"));
        }
        text
    }

    fn json(&self) -> Json {
        let row = |pair: &&Pair| {
            json!({
                "name": pair.name, "stack_id": pair.stack_id, "matched": pair.matched(),
                "change": self.change(pair),
                "a": held_json(&pair.a, self.a.profile.hours()),
                "b": held_json(&pair.b, self.b.profile.hours()),
            })
        };
        json!({
            "a": self.a.json(), "b": self.b.json(), "class": self.arguments.choice.name(),
            "value": self.value_name(), "changed": self.shown().iter().map(row).collect::<Vec<_>>(),
        })
    }

    /// B's stacks, coloured by what they had in A.
    fn flamegraph(&self) -> String {
        let mut root = Node::default();
        let whole = |bytes: f64| bytes.max(0.0).round() as u64;
        let mut gone = 0.0;
        for pair in by_stack(&self.a, &self.b) {
            let (before, now) = (self.of_a(&pair.a), self.of_b(&pair.b));
            if now <= 0.0 {
                gone += before.max(0.0);
            }
            let named = compare::drawn(pair.stack_id, &self.a.stacks, &self.b.stacks);
            let other = Stack {
                folded: pair.name.clone(),
                frames: Vec::new(),
            };
            root.add(Some(named.unwrap_or(&other)), whole(now), whole(before));
        }
        let mut subtitle = format!(
            "{} memory, {}; before: {}",
            self.arguments.choice.name(),
            self.b.line(),
            self.a.line()
        );
        if gone > 0.0 {
            subtitle.push_str(&format!(
                "; {} of before are gone, and not drawn",
                signed(gone)
            ));
        }
        let title = format!("{} bytes by call stack, compared", self.value_name());
        let picture = Picture {
            title: &title,
            subtitle: &subtitle,
            differential: true,
        };
        flame::draw(&picture, &root)
    }

    fn pprof(&self) -> anyhow::Result<Vec<u8>> {
        let pairs = by_stack(&self.a, &self.b);
        let rate = |held: &Held, value, half: &Half| compared(held, value, half.profile.hours());
        let mut samples = Vec::with_capacity(pairs.len());
        for pair in &pairs {
            let by_hour = |value| {
                (rate(&pair.b, value, &self.b) - rate(&pair.a, value, &self.a)).round() as i64
            };
            samples.push(Sample {
                stack: compare::drawn(pair.stack_id, &self.a.stacks, &self.b.stacks),
                name: &pair.name,
                process: None,
                values: vec![
                    pair.b.live_count - pair.a.live_count,
                    pair.b.live_bytes - pair.a.live_bytes,
                    by_hour(Value::Growth),
                    by_hour(Value::Allocated),
                ],
            });
        }
        let default_type = match self.arguments.choice.value {
            Value::Live => "live_bytes",
            Value::Growth => "growth_bytes_per_hour",
            Value::Allocated => "allocated_bytes_per_hour",
        };
        let about = About {
            types: &TYPES,
            default_type,
            time_nanoseconds: self.b.profile.last.unwrap_or_default().saturating_mul(1000),
            duration_nanoseconds: 0,
            comments: &[
                format!(
                    "difference, B less A, {} memory",
                    self.arguments.choice.name()
                ),
                format!("A: {}", self.a.line()),
                format!("B: {}", self.b.line()),
            ],
        };
        pprof::encode(&about, &samples)
    }
}

const TYPES: [SampleType; 4] = [
    SampleType {
        name: "live_count",
        unit: "count",
    },
    SampleType {
        name: "live_bytes",
        unit: "bytes",
    },
    SampleType {
        name: "growth_bytes_per_hour",
        unit: "bytes",
    },
    SampleType {
        name: "allocated_bytes_per_hour",
        unit: "bytes",
    },
];

fn pairs(a: &Half, b: &Half, by: By) -> Vec<Pair> {
    compare::pairs(&a.measured(), &b.measured(), by)
}

/// Pictures and profiles show stacks, whatever the table adds up by.
fn by_stack(a: &Half, b: &Half) -> Vec<Pair> {
    pairs(a, b, By::Stack)
}

fn held_json(held: &Held, hours: Option<f64>) -> Json {
    let rate = |value| hours.map(|hours| held.value(value) as f64 / hours);
    json!({
        "live_bytes": held.live_bytes, "live_count": held.live_count,
        "growth_bytes": held.value(Value::Growth), "growth_bytes_per_hour": rate(Value::Growth),
        "allocated_bytes": held.allocated_bytes, "allocations": held.allocations,
        "allocated_bytes_per_hour": rate(Value::Allocated),
    })
}

fn change_text(bytes: f64) -> String {
    if bytes >= 0.5 {
        format!("+{}", signed(bytes))
    } else {
        signed(bytes)
    }
}
