//! What other allocator settings would have done: the recorded requests, rerun by the allocator's rules.
//!
//! Invariants:
//! - nothing is proposed that was not rerun, and nothing where the rerun under the recorded settings does
//!   not fail where the program failed;
//! - a trace with a hole in it is not rerun.

use serde_json::{Value, json};
use vramscope_model::map::AddressMap;
use vramscope_model::settings::Settings;
use vramscope_model::simulator::{Card, Rerun, Scenario};
use vramscope_model::trace::{Action, Start, TraceEvent};
use vramscope_queries::session::Limits;

use super::Failure;
use crate::door::Door;
use crate::rows::Row;
use crate::target::Moment;
use crate::text::{counted, size};

/// Settings that are tried, one by one, on top of the recorded ones.
const TRIED: [&str; 8] = [
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "expandable_segments:True,roundup_power2_divisions:8",
];

pub enum Replayed {
    /// Why no rerun is possible; nothing is proposed.
    Not(String),
    Done {
        /// Under the recorded settings.
        as_recorded: Outcome,
        /// Settings as the variable would hold them.
        tried: Vec<Outcome>,
        /// What has to be known to read the figures.
        notes: Vec<String>,
        events: usize,
    },
}

/// One rerun. Bytes.
pub struct Outcome {
    pub settings: String,
    pub peak_reserved: u64,
    pub stranded: u64,
    pub avoided: bool,
    /// Failures of requests that the recorded allocator served.
    pub new_failures: u64,
}

impl Outcome {
    fn helps(&self) -> bool {
        self.avoided && self.new_failures == 0
    }

    fn json(&self) -> Value {
        json!({
            "settings": self.settings, "peak_reserved_bytes": self.peak_reserved,
            "stranded_bytes": self.stranded, "avoided": self.avoided, "new_failures": self.new_failures,
        })
    }
}

/// What can be rerun.
struct Recorded {
    events: Vec<TraceEvent>,
    /// Index of the failure among the events.
    failure: usize,
    /// What lived before; `None`: nothing.
    start: Option<AddressMap>,
    notes: Vec<String>,
    /// Rows that the events are from.
    rows: usize,
}

pub async fn try_settings(
    door: &mut Door,
    limits: Limits,
    failure: &Failure,
) -> anyhow::Result<Replayed> {
    let why_not = |why: &str| Ok(Replayed::Not(why.to_string()));
    let Some(device) = failure.device.and_then(|device| i32::try_from(device).ok()) else {
        return why_not("the device of the failure is not known");
    };
    if failure.layer != "framework" {
        return why_not(
            "the failure is the driver's: it did not come out of a framework's allocator",
        );
    }
    if failure.class == "external process" {
        return why_not("settings of the allocator do not give back what other processes hold");
    }
    let (Some(free), Some(reserved)) = (failure.driver_free, failure.reserved) else {
        return why_not("what the card had left for this process is not known");
    };
    if failure.lossy == Some(true) {
        return why_not("events of this process were lost: the trace has holes");
    }
    let known = recorded_settings(door, limits, failure).await?;
    let recorded = match record(door, limits, failure, device, &known.settings).await? {
        Ok(recorded) => recorded,
        Err(why) => return Ok(Replayed::Not(why)),
    };
    let card = Card::with_free(free, reserved, failure.card);
    let rerun = |text: &str, settings: &Settings| -> anyhow::Result<Outcome> {
        let scenario = Scenario {
            device,
            events: &recorded.events,
            start: recorded.start.as_ref(),
            recorded: known.settings.clone(),
            settings: settings.clone(),
            card,
        };
        Ok(outcome(text, &scenario.run()?, recorded.failure))
    };
    let as_recorded = rerun(&known.text, &known.settings)?;
    if as_recorded.avoided {
        return why_not(
            "rerun under the recorded settings, the request succeeds: the rerun does not show what happened (another request at the same time, or memory that the trace does not have)",
        );
    }
    let mut tried = Vec::new();
    for text in TRIED {
        let settings = known.with(text);
        if settings != known.settings {
            tried.push(rerun(&known.joined(text), &settings)?);
        }
    }
    Ok(Replayed::Done {
        as_recorded,
        tried,
        notes: recorded.notes,
        events: recorded.rows,
    })
}

fn outcome(text: &str, rerun: &Rerun, failure: usize) -> Outcome {
    let avoided = rerun
        .ooms
        .iter()
        .any(|oom| oom.event == failure && oom.avoided);
    Outcome {
        settings: text.to_string(),
        peak_reserved: rerun.stats.reserved_bytes.all.peak,
        stranded: rerun.measures.stranded,
        avoided,
        new_failures: rerun.new_failures,
    }
}

/// The settings that the trace was recorded under.
struct Known {
    text: String,
    settings: Settings,
}

impl Known {
    /// These settings, with others on top.
    fn with(&self, text: &str) -> Settings {
        Settings::parse(&self.joined(text)).settings
    }

    fn joined(&self, text: &str) -> String {
        if self.text.is_empty() {
            text.to_string()
        } else {
            format!("{},{text}", self.text)
        }
    }
}

async fn recorded_settings(
    door: &mut Door,
    limits: Limits,
    failure: &Failure,
) -> anyhow::Result<Known> {
    let sql = format!(
        "SELECT max(settings) AS settings FROM allocator_samples WHERE process_id = {}",
        failure.process_id
    );
    let rows = door.collect(&sql, limits).await?;
    let text = rows
        .first()
        .map_or(Ok(None), |row| row.text("settings"))?
        .unwrap_or_default();
    let settings = Settings::parse(&text).settings;
    Ok(Known { text, settings })
}

/// The trace up to the failure's map, or why there is none.
async fn record(
    door: &mut Door,
    limits: Limits,
    failure: &Failure,
    device: i32,
    settings: &Settings,
) -> anyhow::Result<Result<Recorded, String>> {
    let is_import = failure.source == "import";
    let end = map_after(door, limits, failure, device).await?;
    let until = match &end {
        Some((_, ts_ns)) if !is_import => (*ts_ns).max(failure.ts_ns),
        _ => i64::MAX,
    };
    // Of a traced process the driver's calls tell when segments came and went.
    let sql = format!(
        "SELECT seq, ts_ns, layer, api, op, memory_kind, address, bytes, requested_bytes, stream, device_free_bytes,
            allocator_allocated_bytes
         FROM alloc_events
         WHERE process_id = {} AND device = {device} AND ts_ns <= {until}
           AND coalesce(result, 0) = 0 AND op IN ('alloc', 'free', 'oom')
           AND (layer = 'framework' OR (counted AND memory_kind = 'device' AND address IN (
                SELECT segment_address FROM alloc_events
                WHERE process_id = {} AND device = {device} AND layer = 'framework')))
         ORDER BY seq",
        failure.process_id, failure.process_id
    );
    let rows = door.collect(&sql, limits).await?;
    let mut trace = Trace::new(device, is_import);
    for row in rows.iter() {
        if let Err(why) = trace.add(row, failure)? {
            return Ok(Err(why));
        }
    }
    let Some(at) = trace.failure else {
        return Ok(Err("the failure is not in the trace".to_string()));
    };
    if trace.requests == 0 {
        return Ok(Err(
            "no requests are recorded before it (a snapshot taken without its history, or the recorder's events did not travel)".to_string(),
        ));
    }
    let mut notes = Vec::new();
    let has_private = |(map, _): &(AddressMap, i64)| {
        map.segments
            .iter()
            .any(|segment| segment.pool.private.is_some())
    };
    if end.as_ref().is_some_and(has_private) {
        notes.push("requests of captured graphs are rerun in the default pool".to_string());
    }
    let start = if trace.from_the_start {
        None
    } else {
        let Some((map, _)) = end else {
            return Ok(Err(
                "the trace begins late, and there is no address map at its end to conclude its start from".to_string(),
            ));
        };
        let start = Start::find(&trace.events, &map, settings);
        let counts = start.counts;
        let differences = counts.missing_at_end
            + counts.unexpected_at_end
            + counts.contradictions
            + start.problems.len() as u64;
        if differences > 0 {
            return Ok(Err(format!(
                "the trace is cut: it and the address map at its end differ in {}",
                counted(usize::try_from(differences)?, "place")
            )));
        }
        notes.push(format!(
            "the trace begins with {} in {} held already: they lie where they lay",
            counted(usize::try_from(counts.blocks)?, "block"),
            counted(usize::try_from(counts.segments)?, "segment")
        ));
        Some(start.map)
    };
    Ok(Ok(Recorded {
        events: trace.events,
        failure: at,
        start,
        notes,
        rows: trace.rows,
    }))
}

/// The first map at or after the failure (of an import its only one), and when it is from.
async fn map_after(
    door: &mut Door,
    limits: Limits,
    failure: &Failure,
    device: i32,
) -> anyhow::Result<Option<(AddressMap, i64)>> {
    let conditions = format!(
        " AND memory_kind <> 'pinned_host' AND process_id = {} AND device = {device} AND (ts_ns >= {} OR reason = 'import')",
        failure.process_id, failure.ts_ns
    );
    let rows = door
        .collect(&Moment::query("segments", &conditions), limits)
        .await?;
    let moments: Vec<Moment> = rows
        .iter()
        .map(Moment::from_row)
        .collect::<Result<_, _>>()?;
    let Some(moment) = moments.last() else {
        return Ok(None);
    };
    let map = crate::map::segments::ask(door, limits, moment).await?;
    Ok(Some((map.address_map(device), moment.ts_ns)))
}

/// A trace in the making.
struct Trace {
    device: i32,
    is_import: bool,
    events: Vec<TraceEvent>,
    failure: Option<usize>,
    requests: u64,
    rows: usize,
    from_the_start: bool,
    /// What the allocator itself counted as allocated after the event before.
    allocated: Option<u64>,
}

impl Trace {
    fn new(device: i32, is_import: bool) -> Self {
        Trace {
            device,
            is_import,
            events: Vec::new(),
            failure: None,
            requests: 0,
            rows: 0,
            from_the_start: false,
            allocated: None,
        }
    }

    /// One more row; the error is why the trace cannot be rerun.
    fn add(&mut self, row: Row<'_>, failure: &Failure) -> anyhow::Result<Result<(), String>> {
        self.rows += 1;
        let text = |name| -> anyhow::Result<String> { Ok(row.text(name)?.unwrap_or_default()) };
        let (op, kind, api) = (text("op")?, text("memory_kind")?, text("api")?);
        let is_block = text("layer")? == "framework" && kind == "framework_block";
        let (bytes, requested) = (
            row.bytes("bytes")?.unwrap_or_default(),
            row.bytes("requested_bytes")?,
        );
        let device = self.device;
        let event = |action: Action, bytes: u64| TraceEvent {
            action,
            device,
            address: 0,
            bytes,
            stream: 0,
            private: None,
            time_ns: None,
            tag: None,
        };
        let action = match (op.as_str(), is_block) {
            ("oom", _) => {
                let device_free = row.bytes("device_free_bytes")?.unwrap_or_default();
                if row.number("seq")? == Some(failure.seq) {
                    self.failure = Some(self.events.len());
                }
                Action::Oom { device_free }
            }
            ("alloc", true) => Action::Alloc,
            ("free", true) if api == "free_completed" => Action::FreeCompleted,
            ("free", true) => Action::FreeRequested,
            ("alloc", false) if kind == "vmm_physical" => Action::SegmentMap,
            ("alloc", false) => Action::SegmentAlloc,
            ("free", false) if kind == "vmm_physical" => Action::SegmentUnmap,
            _ => Action::SegmentFree,
        };
        if action == Action::Alloc {
            if requested.is_none() {
                return Ok(Err(
                    "the trace does not say how much was asked for".to_string()
                ));
            }
            self.requests += u64::from(self.failure.is_none());
        }
        if is_block && !self.is_import && !matches!(action, Action::Oom { .. }) {
            let after = row.bytes("allocator_allocated_bytes")?;
            if let Err(why) = self.follow(action, bytes, after) {
                return Ok(Err(why));
            }
        }
        // Of blocks what was asked for, of segments what was taken.
        let wanted = match action {
            Action::Alloc | Action::Oom { .. } => requested.unwrap_or(bytes),
            Action::FreeRequested | Action::FreeCompleted => requested.unwrap_or(bytes),
            _ => bytes,
        };
        let mut event = event(action, wanted);
        event.address = row.bytes("address")?.unwrap_or_default();
        event.stream = row.number("stream")?.unwrap_or_default();
        event.time_ns = row.number("ts_ns")?;
        self.events.push(event);
        // Tracing sees one free, which stands for both.
        if action == Action::FreeRequested && !self.is_import {
            self.events.push(TraceEvent {
                action: Action::FreeCompleted,
                ..event
            });
        }
        Ok(Ok(()))
    }

    /// Whether the allocator's own count went on from the event before: a hole shows there.
    fn follow(&mut self, action: Action, bytes: u64, after: Option<u64>) -> Result<(), String> {
        let Some(after) = after else {
            return Err(
                "the allocator's own totals are not recorded, so holes in the trace would not show"
                    .to_string(),
            );
        };
        let expected = match (self.allocated, action) {
            (None, Action::Alloc) => {
                self.from_the_start = after == bytes;
                after
            }
            (None, _) => after,
            (Some(before), Action::Alloc) => before.saturating_add(bytes),
            (Some(before), _) => before.saturating_sub(bytes),
        };
        self.allocated = Some(after);
        if expected == after {
            return Ok(());
        }
        Err(
            "the trace has holes: the allocator's own totals do not follow from its events"
                .to_string(),
        )
    }
}

impl Replayed {
    fn best(&self) -> Option<&Outcome> {
        let Replayed::Done { tried, .. } = self else {
            return None;
        };
        let helping = tried.iter().filter(|outcome| outcome.helps());
        helping.min_by_key(|outcome| outcome.peak_reserved)
    }

    pub fn text(&self) -> String {
        let (as_recorded, tried, notes, events) = match self {
            Replayed::Not(why) => {
                return format!("  nothing is proposed: no rerun is possible, since {why}\n");
            }
            Replayed::Done {
                as_recorded,
                tried,
                notes,
                events,
            } => (as_recorded, tried, notes, events),
        };
        let mut text = format!(
            "  {} rerun by the allocator's rules, on a card with as much room:\n",
            counted(*events, "recorded event")
        );
        let line = |name: &str, outcome: &Outcome| {
            let result = match (outcome.avoided, outcome.new_failures) {
                (true, 0) => "avoided".to_string(),
                (true, more) => format!(
                    "avoided, but {} elsewhere",
                    counted(more as usize, "failure")
                ),
                (false, _) => "fails".to_string(),
            };
            format!(
                "  {name:<52}{:>11}{:>12}  {result}\n",
                size(outcome.peak_reserved),
                size(outcome.stranded)
            )
        };
        text.push_str(&format!(
            "  {:<52}{:>11}{:>12}\n",
            "settings", "peak", "stranded"
        ));
        let recorded = if as_recorded.settings.is_empty() {
            "as recorded (defaults)"
        } else {
            "as recorded"
        };
        text.push_str(&line(recorded, as_recorded));
        for outcome in tried {
            text.push_str(&line(&outcome.settings, outcome));
        }
        for note in notes {
            text.push_str(&format!("  note: {note}\n"));
        }
        match self.best() {
            Some(best) => text.push_str(&format!(
                "  proposed: PYTORCH_CUDA_ALLOC_CONF={} (peak {} instead of {})\n",
                best.settings,
                size(best.peak_reserved),
                size(as_recorded.peak_reserved)
            )),
            None => text.push_str("  no setting that was tried avoids it: nothing is proposed\n"),
        }
        text
    }

    pub fn json(&self) -> Value {
        match self {
            Replayed::Not(why) => json!({"possible": false, "reason": why, "proposed": null}),
            Replayed::Done {
                as_recorded,
                tried,
                notes,
                events,
            } => json!({
                "possible": true, "events": events, "as_recorded": as_recorded.json(),
                "tried": tried.iter().map(Outcome::json).collect::<Vec<_>>(), "notes": notes,
                "proposed": self.best().map(|best| best.settings.clone()),
            }),
        }
    }
}
