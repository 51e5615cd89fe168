//! How long rows are kept, and taking out what is past its time: whole hours, through the log.
//!
//! An hour goes when its last moment is older than the table's retention. The files stay on disk
//! until vacuum. How many rows went, and up to which moment, stays in the table ([`Count`]).
//!
//! Stacks have no time and are kept: rows of years refer to them, and a fleet has few.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, Utc};
use deltalake::protocol::DeltaOperation;
use serde::{Deserialize, Deserializer};
use serde_json::json;
use vramscope_wire::Table;

use super::swap::{self, Change, Count, Swap, Swapped};
use super::{UpkeepError, delta_error, hour};
use crate::config::Span;
use crate::lake::Lake;

const DAY: Duration = Duration::from_secs(86_400);

/// How long the rows of each table with a time are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention(BTreeMap<Table, Option<Duration>>);

impl Default for Retention {
    fn default() -> Self {
        Retention(timed().map(|table| (table, default(table))).collect())
    }
}

impl Retention {
    /// How long a table's rows are kept; `None` is for ever.
    pub fn of(&self, table: Table) -> Option<Duration> {
        self.0.get(&table).copied().flatten()
    }

    /// The defaults, but for what is given.
    fn with(given: BTreeMap<Table, Option<Duration>>) -> Self {
        let mut kept = Retention::default();
        kept.0.extend(given);
        kept
    }

    /// The moment before which a table's rows are past their time.
    fn horizon(&self, table: Table, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let kept = chrono::Duration::from_std(self.of(table)?).ok()?;
        now.checked_sub_signed(kept)
    }

    /// As an inline table of TOML, each table named.
    pub fn to_toml(&self) -> String {
        let entries =
            timed().map(|table| format!("{} = \"{}\"", table.name(), text(self.of(table))));
        format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
    }
}

/// Raw events are many and their roll-ups travel with them: days. All else is small: a year and a
/// month, to compare with the year before.
fn default(table: Table) -> Option<Duration> {
    match table {
        Table::AllocEvents => Some(7 * DAY),
        Table::Stacks => None,
        _ => Some(400 * DAY),
    }
}

fn timed() -> impl Iterator<Item = Table> {
    Table::ALL
        .into_iter()
        .filter(|table| table.partitioned_by_time())
}

fn text(kept: Option<Duration>) -> String {
    match kept {
        None => "forever".to_string(),
        Some(kept) => Span(kept).to_string(),
    }
}

fn entry(table: &str, kept: &str) -> Result<(Table, Option<Duration>), String> {
    let known = || timed().map(Table::name).collect::<Vec<_>>().join(", ");
    let table = Table::by_name(table)
        .filter(|table| table.partitioned_by_time())
        .ok_or_else(|| {
            format!(
                "no table {table:?} has a retention; these have: {}",
                known()
            )
        })?;
    let kept = match kept {
        "forever" => None,
        kept => Some(
            kept.parse::<Span>()
                .map_err(|error| format!("{error}, d, or `forever`"))?
                .0,
        ),
    };
    if kept.is_some_and(|kept| kept < Duration::from_secs(3600)) {
        return Err(format!("{} is kept for less than an hour", table.name()));
    }
    Ok((table, kept))
}

impl FromStr for Retention {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let mut kept = BTreeMap::new();
        for part in given
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            let (table, time) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?} is not TABLE=TIME, as alloc_events=7d"))?;
            let (table, time) = entry(table.trim(), time.trim())?;
            kept.insert(table, time);
        }
        Ok(Retention::with(kept))
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = timed().map(|table| format!("{}={}", table.name(), text(self.of(table))));
        f.write_str(&parts.collect::<Vec<_>>().join(","))
    }
}

impl<'de> Deserialize<'de> for Retention {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = BTreeMap::<String, String>::deserialize(deserializer)?;
        let entries = given.iter().map(|(table, kept)| entry(table, kept));
        let entries = entries.collect::<Result<_, _>>();
        entries
            .map(Retention::with)
            .map_err(serde::de::Error::custom)
    }
}

/// What went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expired {
    /// Files.
    pub files: u64,
    /// Their rows; of a file without statistics none is counted.
    pub rows: u64,
    /// The first moment that is kept.
    pub kept_from: DateTime<Utc>,
}

/// Takes the hours that are past their time out of a table; `None` if there is none, or somebody
/// else was faster.
pub async fn expire(
    lake: &Lake,
    table: Table,
    retention: &Retention,
    now: DateTime<Utc>,
) -> Result<Option<Expired>, UpkeepError> {
    let Some(horizon) = retention.horizon(table, now) else {
        return Ok(None);
    };
    let delta = lake.table(table);
    let (mut remove, mut rows) = (Vec::new(), 0);
    let mut kept_from: Option<DateTime<Utc>> = None;
    for file in delta.snapshot().map_err(delta_error(table))?.log_data() {
        let Some(hour) = hour(&file).filter(|hour| hour.end() <= horizon) else {
            continue;
        };
        kept_from = kept_from.max(Some(hour.end()));
        rows += file.num_records().unwrap_or(0) as u64;
        remove.push(file.path().into_owned());
    }
    let Some(kept_from) = kept_from else {
        return Ok(None);
    };
    let expired = Expired {
        files: remove.len() as u64,
        rows,
        kept_from,
    };
    let swap = Swap {
        remove,
        add: Vec::new(),
        changes_data: true,
        operation: DeltaOperation::Delete {
            predicate: Some(format!("ts < '{}'", kept_from.format("%Y-%m-%dT%H:%M:%SZ"))),
        },
        counts: vec![
            (Count::Expired, Change::Add(rows)),
            (Count::KeptFrom, Change::Raise(kept_from.timestamp_micros())),
        ],
        metadata: HashMap::from([("vramscope.expired".to_string(), json!({"rows": rows}))]),
    };
    Ok(match swap::commit(lake, table, &swap).await? {
        Swapped::Done => Some(expired),
        Swapped::Overtaken => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_is_kept_as_long_as_it_says_and_the_rest_by_default() {
        let retention: Retention = "alloc_events=36h, traffic=forever".parse().unwrap();
        assert_eq!(
            retention.of(Table::AllocEvents),
            Some(Duration::from_secs(36 * 3600))
        );
        assert_eq!(retention.of(Table::Traffic), None);
        assert_eq!(retention.of(Table::StackWindows), Some(400 * DAY));
        assert_eq!(retention.of(Table::Stacks), None);
        let again: Retention = retention.to_string().parse().unwrap();
        assert!(
            Table::ALL
                .into_iter()
                .all(|table| again.of(table) == retention.of(table))
        );
    }

    #[test]
    fn nonsense_is_refused_with_its_name() {
        for (text, named) in [
            ("alloc_event=7d", "alloc_event"),
            ("stacks=7d", "stacks"),
            ("alloc_events", "alloc_events"),
            ("alloc_events=7", "\"7\""),
            ("alloc_events=1m", "less than an hour"),
        ] {
            let error = text.parse::<Retention>().unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
