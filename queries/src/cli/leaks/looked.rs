//! What was looked at: what "no leak" means, and whether there was enough to tell.

use serde_json::{Value, json};
use vramscope_queries::session::Limits;

use super::found::{self, Leak};
use super::{Arguments, Tier, source};
use crate::door::Door;
use crate::scope::Scope;
use crate::text::{counted, size};

/// Processes that are named one by one.
const NAMED: usize = 5;

#[derive(Debug, Default)]
pub struct Looked {
    /// Process lifetimes with roll-ups, and their hours together.
    processes: i64,
    hours: f64,
    /// Stacks that were judged.
    stacks: i64,
    /// Requests completed; `None` without traffic.
    requests: Option<i64>,
    /// The smallest leak that would have been found in half of the stacks, and in all.
    detectable: Option<f64>,
    detectable_in_all: Option<f64>,
}

pub async fn ask(
    door: &mut Door,
    limits: Limits,
    scope: &Scope,
    settings: Option<&str>,
) -> anyhow::Result<Looked> {
    let sql = format!(
        "SELECT count(*) AS processes, sum(seconds) / 3600.0 AS hours FROM (
            SELECT w.process_id,
                CAST(max(CAST(w.window_end AS BIGINT)) - min(CAST(w.ts AS BIGINT)) AS DOUBLE) / 1e6 AS seconds
            FROM stack_windows AS w
            LEFT JOIN current_processes AS p ON p.process_id = w.process_id
            WHERE true{}
            GROUP BY w.process_id
         )",
        scope.conditions("w", "p")
    );
    let rows = door.collect(&sql, limits).await?;
    let mut looked = Looked::default();
    if let Some(row) = rows.first() {
        looked.processes = row.number("processes")?.unwrap_or_default();
        looked.hours = row.ratio("hours")?.unwrap_or_default();
    }
    if looked.processes == 0 {
        return Ok(looked);
    }
    // Conditions on the device are about the verdict's own row.
    let of_process = Scope {
        device: None,
        ..scope.clone()
    };
    let device = scope
        .device
        .map_or(String::new(), |device| format!(" AND v.device = {device}"));
    let sql = format!(
        "WITH judged AS (
            SELECT v.process_id, v.requests, v.minimum_detectable_bytes_per_request AS detectable
            FROM {} AS v
            LEFT JOIN current_processes AS p ON p.process_id = v.process_id
            WHERE v.tier <> 'insufficient'{}{device}
         )
         SELECT count(*) AS stacks, median(detectable) AS typical, max(detectable) AS worst,
            (SELECT CAST(sum(requests) AS BIGINT) FROM (
                SELECT max(requests) AS requests FROM judged GROUP BY process_id)) AS requests
         FROM judged",
        source("leak_verdicts", Some(settings.unwrap_or_default())),
        of_process.conditions("p", "p")
    );
    let rows = door.collect(&sql, limits).await?;
    if let Some(row) = rows.first() {
        looked.stacks = row.number("stacks")?.unwrap_or_default();
        looked.requests = row.number("requests")?;
        looked.detectable = row.ratio("typical")?;
        looked.detectable_in_all = row.ratio("worst")?;
    }
    Ok(looked)
}

impl Looked {
    /// Whether any stack could be judged.
    pub fn is_enough(&self) -> bool {
        self.stacks > 0
    }

    pub fn json(&self) -> Value {
        json!({
            "processes": self.processes, "hours": self.hours, "stacks": self.stacks,
            "requests": self.requests,
            "minimum_detectable_bytes_per_request": self.detectable,
            "minimum_detectable_bytes_per_request_in_all_stacks": self.detectable_in_all,
        })
    }

    /// What to say when there is no leak to show.
    pub fn text(&self, all: &[Leak], arguments: &Arguments) -> String {
        let whose = match arguments.scope.words() {
            words if words.is_empty() => String::new(),
            words => format!(" of {words}"),
        };
        if self.processes == 0 {
            return format!(
                "nothing to judge{whose}: leaks are found in windows (stack_windows), and none are recorded; \
                 an agent writes one a minute\n"
            );
        }
        let seen = format!(
            "{} of {}",
            hours(self.hours),
            counted(self.processes as usize, "process lifetime")
        );
        let mut text = if self.is_enough() {
            let shown = match arguments.tier {
                Some(Tier::Confirmed) => "no confirmed leak",
                Some(Tier::Suspect) => "no suspect",
                Some(Tier::Ambiguous) => "no ambiguous case",
                None => "no leak found",
            };
            let requests = match self.requests {
                Some(requests) => counted(requests as usize, "request"),
                None => "no traffic".to_string(),
            };
            let mut text = format!(
                "{shown}{whose}: looked at {seen}, {}, {requests}\n",
                counted(self.stacks as usize, "stack")
            );
            if let Some(least) = self.detectable {
                text.push_str(&format!(
                    "a leak of {} a request would have been found in half of the stacks",
                    bytes(least)
                ));
                if let Some(worst) = self.detectable_in_all {
                    text.push_str(&format!(", one of {} in all", bytes(worst)));
                }
                text.push('\n');
            }
            text
        } else {
            format!("too little data to tell{whose}: looked at {seen}\n")
        };
        let lacking: Vec<&Leak> = found::insufficient(all).collect();
        for leak in lacking.iter().take(NAMED) {
            let why = leak.reason.as_deref().unwrap_or("too little is recorded");
            text.push_str(&format!("{}: {why}\n", leak.whose()));
        }
        if lacking.len() > NAMED {
            text.push_str(&format!(
                "and {} more of which too little is recorded\n",
                lacking.len() - NAMED
            ));
        }
        let ambiguous = all.iter().filter(|leak| leak.is(Tier::Ambiguous)).count();
        if ambiguous > 0 && !arguments.all {
            text.push_str(&format!(
                "{} (--all)\n",
                counted(ambiguous, "ambiguous case")
            ));
        }
        text
    }
}

fn bytes(value: f64) -> String {
    size(value.max(0.0).round() as u64)
}

fn hours(hours: f64) -> String {
    if hours < 1.0 {
        format!("{:.0} min", hours * 60.0)
    } else {
        format!("{hours:.1} h")
    }
}
