//! Which processes and which time a question is about, as conditions in SQL.

use anyhow::Context;
use arrow::compute::kernels::cast_utils::string_to_timestamp_nanos;
use clap::Args;

use crate::door::Door;
use crate::rows::quoted;
use vramscope_queries::session::Limits;

/// What narrows the choice. Text may hold `*` for any characters.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct Scope {
    /// The host; * stands for any characters, here and below
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// The process, by pid
    #[arg(long, value_name = "PID")]
    pub pid: Option<i32>,
    /// The process, by process_id (one process lifetime; of an import the file)
    #[arg(long, value_name = "ID", allow_hyphen_values = true)]
    pub process: Option<i64>,
    /// The device, as the process numbers it
    #[arg(long, value_name = "N")]
    pub device: Option<i32>,
    /// The Kubernetes pod, for example 'server-*'
    #[arg(long, value_name = "NAME")]
    pub pod: Option<String>,
    /// The Kubernetes namespace
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// The executable, by path or file name
    #[arg(long, value_name = "PATH")]
    pub exe: Option<String>,
    /// From this time on: 2026-11-29T10:15:00Z, or 90m, 6h, 2d before the end of the data
    #[arg(long, value_name = "TIME", value_parser = When::parse)]
    pub since: Option<When>,
    /// Up to this time
    #[arg(long, value_name = "TIME", value_parser = When::parse)]
    pub until: Option<When>,
    /// Text of the command line.
    #[arg(skip)]
    pub command: Option<String>,
    /// Version of the framework.
    #[arg(skip)]
    pub framework_version: Option<String>,
    /// Start of a build id that the process runs.
    #[arg(skip)]
    pub build: Option<String>,
}

/// A moment as users say it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    /// Microseconds since 1970.
    At(i64),
    /// Microseconds before the end of the data.
    Before(i64),
}

impl When {
    pub fn parse(text: &str) -> Result<When, String> {
        let wrong = || {
            format!(
                "{text:?} is not a time; for example 2026-11-29T10:15:00Z, or 90m, 6h, 2d before the end of the data"
            )
        };
        let looks_like_a_date = text.get(4..5) == Some("-");
        if looks_like_a_date {
            // A time without a zone is UTC.
            let nanoseconds = string_to_timestamp_nanos(text).map_err(|_| wrong())?;
            return Ok(When::At(nanoseconds / 1000));
        }
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let seconds = match &text[digits.len()..] {
            "s" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err(wrong()),
        };
        let number: i64 = digits.parse().map_err(|_| wrong())?;
        let microseconds = number.checked_mul(seconds * 1_000_000);
        let microseconds = microseconds.filter(|us| *us >= 0).ok_or_else(wrong)?;
        Ok(When::Before(microseconds))
    }
}

/// The time that is meant, in microseconds since 1970. What is not bounded is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    pub since: Option<i64>,
    pub until: Option<i64>,
}

impl Scope {
    /// Conditions on rows with host, pid, process_id and device, and on rows of
    /// `current_processes`, each with an AND before it. Both may be the same rows.
    pub fn conditions(&self, rows: &str, processes: &str) -> String {
        let mut sql = String::new();
        let mut and = |condition: String| {
            sql.push_str(" AND ");
            sql.push_str(&condition);
        };
        if let Some(host) = &self.host {
            and(like(&format!("{rows}.host"), host));
        }
        if let Some(pid) = self.pid {
            and(format!("{rows}.pid = {pid}"));
        }
        if let Some(process) = self.process {
            and(format!("{rows}.process_id = {process}"));
        }
        if let Some(device) = self.device {
            and(format!("{rows}.device = {device}"));
        }
        if let Some(pod) = &self.pod {
            and(like(&format!("{processes}.pod"), pod));
        }
        if let Some(namespace) = &self.namespace {
            and(like(&format!("{processes}.namespace"), namespace));
        }
        if let Some(exe) = &self.exe {
            let column = format!("{processes}.exe");
            let by_name = like(&column, &format!("*/{exe}"));
            and(format!("({} OR {by_name})", like(&column, exe)));
        }
        if let Some(command) = &self.command {
            let anywhere = format!("*{command}*");
            and(like(&format!("{processes}.command"), &anywhere));
        }
        if let Some(version) = &self.framework_version {
            and(like(&format!("{processes}.framework_version"), version));
        }
        if let Some(build) = &self.build {
            and(format!(
                "{rows}.process_id IN (
                    SELECT of_build.process_id FROM stack_windows AS of_build
                    WHERE of_build.stack_id IN (
                        SELECT stack_id FROM (SELECT stack_id, unnest(frames) AS frame FROM stacks)
                        WHERE {}))",
                like("frame['build_id']", &format!("{build}*"))
            ));
        }
        sql
    }

    /// The times, of which those that count from the end of the data need to know it.
    pub async fn span(&self, door: &mut Door, limits: Limits) -> anyhow::Result<Span> {
        let counts_back = |when: &Option<When>| matches!(when, Some(When::Before(_)));
        let mut end = None;
        if counts_back(&self.since) || counts_back(&self.until) {
            let sql = "SELECT coalesce(
                    (SELECT max(CAST(window_end AS BIGINT)) FROM stack_windows),
                    (SELECT max(CAST(ts AS BIGINT)) FROM alloc_events)) AS end_us";
            let rows = door.collect(sql, limits).await?;
            let row = rows.first().context("no answer to when the data ends")?;
            end = row.number("end_us")?;
        }
        let absolute = |when: Option<When>| match when {
            Some(When::At(at)) => Some(at),
            // Without data there is no end, and nothing to choose from.
            Some(When::Before(before)) => Some(end.unwrap_or_default() - before),
            None => None,
        };
        Ok(Span {
            since: absolute(self.since),
            until: absolute(self.until),
        })
    }

    /// As the user said it, for messages; empty if nothing was said.
    pub fn words(&self) -> String {
        let text = |name: &str, value: &Option<String>| {
            value.as_ref().map(|value| format!("{name} {value}"))
        };
        let parts = [
            text("host", &self.host),
            self.pid.map(|pid| format!("pid {pid}")),
            self.process.map(|process| format!("process {process}")),
            self.device.map(|device| format!("device {device}")),
            text("namespace", &self.namespace),
            text("pod", &self.pod),
            text("executable", &self.exe),
            text("command", &self.command),
            text("framework version", &self.framework_version),
            text("build", &self.build),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        parts.join(", ")
    }
}

/// Equality, or a pattern where the text has a `*`.
fn like(column: &str, text: &str) -> String {
    if !text.contains('*') {
        return format!("{column} = {}", quoted(text));
    }
    let mut pattern = String::with_capacity(text.len() + 4);
    for c in text.chars() {
        match c {
            '*' => pattern.push('%'),
            '%' | '_' | '\\' => {
                pattern.push('\\');
                pattern.push(c);
            }
            c => pattern.push(c),
        }
    }
    format!("{column} LIKE {}", quoted(&pattern))
}

/// Microseconds since 1970 as people read them, by the SQL engine's own calendar.
pub fn moment(microseconds: i64) -> String {
    use arrow::temporal_conversions::timestamp_us_to_datetime;
    match timestamp_us_to_datetime(microseconds) {
        Some(time) => format!("{}Z", time.format("%Y-%m-%dT%H:%M:%S")),
        None => format!("{microseconds} us"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_absolute_or_count_back() {
        // 20,786 days and 10 hours after 1970.
        let ten = (20_786 * 86_400 + 36_000) * 1_000_000;
        assert_eq!(When::parse("2026-11-29T10:00:00Z"), Ok(When::At(ten)));
        assert_eq!(When::parse("2026-11-29T11:00:00+01:00"), Ok(When::At(ten)));
        assert_eq!(
            When::parse("2026-11-29"),
            Ok(When::At(ten - 36_000_000_000))
        );
        assert_eq!(When::parse("90m"), Ok(When::Before(5_400_000_000)));
        assert_eq!(When::parse("2d"), Ok(When::Before(172_800_000_000)));
        for wrong in [
            "",
            "h",
            "yesterday",
            "6 parsecs",
            "2026-13-01",
            "-5m",
            "99999999999999999d",
            "ä",
        ] {
            assert!(When::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(moment(ten), "2026-11-29T10:00:00Z");
    }

    #[test]
    fn patterns_match_nothing_but_stars() {
        assert_eq!(like("p.pod", "it's"), "p.pod = 'it''s'");
        assert_eq!(like("p.pod", "a_b-*"), r"p.pod LIKE 'a\_b-%'");
    }
}
