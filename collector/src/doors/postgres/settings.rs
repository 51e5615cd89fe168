//! Settings of a connection: what `SET`, `SHOW`, `RESET` and the start of a connection can name.
//!
//! Invariants:
//! - only settings of this list exist, and none of them reaches the query engine but
//!   `statement_timeout`, which can only shorten what the collector allows;
//! - a value that would change the meaning of an answer and is not followed is refused, never
//!   taken in silence: other encodings, time zones and date styles;
//! - as in PostgreSQL, what a transaction set is undone by ROLLBACK, and `SET LOCAL` by its end.

use std::collections::BTreeMap;
use std::time::Duration;

use super::failure::Failure;

/// The PostgreSQL whose behaviour clients may expect.
pub const SERVER_VERSION: &str = concat!("16.6 (vramscope ", env!("CARGO_PKG_VERSION"), ")");
const SERVER_VERSION_NUM: &str = "160006";
/// Longest value that is kept, in bytes.
const MAX_VALUE: usize = 1024;

/// Values by lower-case names.
pub type Values = BTreeMap<&'static str, String>;

#[derive(Clone, Copy)]
enum Kind {
    /// Cannot be set.
    Fixed,
    /// Any text.
    Text,
    /// One of these, which all mean the default.
    OneOf(&'static [&'static str]),
    /// A whole number in a range.
    Number(i64, i64),
    /// A time in milliseconds.
    Time,
    /// `on` or `off`, without any effect.
    Switch,
    /// Schemas.
    SearchPath,
}

struct Setting {
    /// As `SHOW` and the start of a connection spell it.
    name: &'static str,
    default: &'static str,
    kind: Kind,
    /// Clients are told its value at the start and when it changes.
    reported: bool,
}

const fn setting(name: &'static str, default: &'static str, kind: Kind, reported: bool) -> Setting {
    Setting {
        name,
        default,
        kind,
        reported,
    }
}

const UTF8: Kind = Kind::OneOf(&["utf8", "utf-8", "unicode"]);
const UTC: Kind = Kind::OneOf(&[
    "utc",
    "etc/utc",
    "gmt",
    "etc/gmt",
    "z",
    "zulu",
    "0",
    "+0",
    "+00",
    "+00:00",
    "universal",
    "default",
    "local",
]);
/// Dates are read and written as ISO has them; how `01/02/2003` would be read is no question then.
const ISO: Kind = Kind::OneOf(&[
    "iso", "iso, mdy", "iso, dmy", "iso, ymd", "iso,mdy", "iso,dmy", "iso,ymd", "ymd", "mdy",
    "dmy", "default",
]);
const ISOLATION: Kind = Kind::OneOf(&[
    "read committed",
    "read uncommitted",
    "repeatable read",
    "serializable",
]);

/// Every setting, by lower-case name.
const ALL: &[Setting] = &[
    setting("application_name", "", Kind::Text, true),
    setting("bytea_output", "hex", Kind::OneOf(&["hex"]), false),
    setting("client_encoding", "UTF8", UTF8, true),
    setting("client_min_messages", "notice", Kind::Text, false),
    setting("DateStyle", "ISO, MDY", ISO, true),
    setting(
        "default_transaction_isolation",
        "read committed",
        ISOLATION,
        false,
    ),
    setting("default_transaction_read_only", "on", Kind::Switch, true),
    setting("extra_float_digits", "1", Kind::Number(-15, 3), false),
    setting("geqo", "on", Kind::Switch, false),
    setting(
        "idle_in_transaction_session_timeout",
        "0",
        Kind::Time,
        false,
    ),
    setting("in_hot_standby", "off", Kind::Fixed, true),
    setting("integer_datetimes", "on", Kind::Fixed, true),
    setting(
        "IntervalStyle",
        "postgres",
        Kind::OneOf(&["postgres"]),
        true,
    ),
    setting("is_superuser", "off", Kind::Fixed, true),
    setting("lc_collate", "C", Kind::Fixed, false),
    setting("lc_ctype", "C", Kind::Fixed, false),
    setting("lock_timeout", "0", Kind::Time, false),
    setting("max_identifier_length", "63", Kind::Fixed, false),
    setting("max_index_keys", "32", Kind::Fixed, false),
    setting("row_security", "on", Kind::Switch, false),
    setting("search_path", "\"$user\", public", Kind::SearchPath, false),
    setting("server_encoding", "UTF8", Kind::Fixed, true),
    setting("server_version", SERVER_VERSION, Kind::Fixed, true),
    setting("server_version_num", SERVER_VERSION_NUM, Kind::Fixed, false),
    setting("session_authorization", "", Kind::Fixed, true),
    setting(
        "standard_conforming_strings",
        "on",
        Kind::OneOf(&["on", "true", "yes", "1"]),
        true,
    ),
    setting("statement_timeout", "0", Kind::Time, false),
    setting("TimeZone", "UTC", UTC, true),
    setting("transaction_isolation", "read committed", ISOLATION, false),
    setting("transaction_read_only", "on", Kind::Switch, false),
];

fn find(name: &str) -> Option<&'static Setting> {
    let name = match name.to_ascii_lowercase().as_str() {
        "time zone" => "timezone".to_string(),
        "names" => "client_encoding".to_string(),
        "transaction isolation level" => "transaction_isolation".to_string(),
        "session authorization" => "session_authorization".to_string(),
        other => other.to_string(),
    };
    ALL.iter()
        .find(|setting| setting.name.eq_ignore_ascii_case(&name))
}

fn unknown(name: &str) -> Failure {
    Failure::error(
        "42704",
        format!("unrecognized configuration parameter \"{name}\""),
    )
}

fn refused(setting: &Setting, value: &str) -> Failure {
    Failure::error(
        "22023",
        format!(
            "invalid value for parameter \"{}\": \"{value}\"",
            setting.name
        ),
    )
}

impl Setting {
    /// The value as it is kept.
    fn check(&self, value: &str) -> Result<String, Failure> {
        if value.len() > MAX_VALUE {
            return Err(refused(self, "…").detail(format!(
                "it has {} bytes; {MAX_VALUE} are taken",
                value.len()
            )));
        }
        let lower = value.trim().to_ascii_lowercase();
        match self.kind {
            Kind::Fixed => Err(Failure::error(
                "55P02",
                format!("parameter \"{}\" cannot be changed", self.name),
            )),
            Kind::Text => Ok(value.to_string()),
            Kind::OneOf(known) if known.contains(&lower.as_str()) => match self.kind_is_choice() {
                true => Ok(lower),
                false => Ok(self.default.to_string()),
            },
            Kind::OneOf(_) => Err(refused(self, value).hint(format!(
                "the only value that is followed is {}",
                self.default
            ))),
            Kind::Number(least, most) => match lower.parse::<i64>() {
                Ok(number) if (least..=most).contains(&number) => Ok(number.to_string()),
                _ => Err(refused(self, value).hint(format!("it takes {least} to {most}"))),
            },
            Kind::Time => match milliseconds(&lower) {
                Some(ms) => Ok(spell_time(ms)),
                None => Err(refused(self, value)
                    .hint("it takes milliseconds, or a number with ms, s, min, h or d")),
            },
            Kind::Switch => match lower.as_str() {
                "on" | "true" | "yes" | "1" => Ok("on".to_string()),
                // Whatever is said: nothing can be written.
                "off" | "false" | "no" | "0" => Ok("off".to_string()),
                _ => Err(refused(self, value).hint("it takes on or off")),
            },
            Kind::SearchPath => {
                for schema in value.split(',') {
                    let schema = schema.trim().trim_matches('"');
                    let known = ["", "$user", "public", "pg_catalog", "information_schema"];
                    if !known.contains(&schema) {
                        return Err(Failure::error(
                            "3F000",
                            format!("schema \"{schema}\" does not exist"),
                        )
                        .hint("everything is in the schema public"));
                    }
                }
                Ok(value.to_string())
            }
        }
    }

    /// Whether values differ from each other though none has an effect.
    fn kind_is_choice(&self) -> bool {
        self.name.ends_with("transaction_isolation")
    }
}

/// `250`, `250ms`, `5s`, `1min`.
fn milliseconds(text: &str) -> Option<u64> {
    let units = [
        ("ms", 1),
        ("min", 60_000),
        ("s", 1000),
        ("h", 3_600_000),
        ("d", 86_400_000),
    ];
    let (number, unit) = units
        .into_iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, unit)))
        .unwrap_or((text, 1));
    let number: u64 = number.trim().parse().ok()?;
    let ms = number.checked_mul(unit)?;
    // As in PostgreSQL, whose numbers of milliseconds have 31 bits.
    (ms <= 2_147_483_647).then_some(ms)
}

/// As PostgreSQL shows it: in the largest unit without a rest.
fn spell_time(ms: u64) -> String {
    let units = [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "min"),
        (1000, "s"),
    ];
    match units
        .into_iter()
        .find(|(unit, _)| ms > 0 && ms.is_multiple_of(*unit))
    {
        Some((unit, name)) => format!("{}{name}", ms / unit),
        None if ms == 0 => "0".to_string(),
        None => format!("{ms}ms"),
    }
}

/// The settings of one connection.
#[derive(Debug, Clone)]
pub struct Settings {
    start: Values,
    now: Values,
    transaction: Option<Transaction>,
}

#[derive(Debug, Clone)]
struct Transaction {
    before: Values,
    /// Without what was set with LOCAL.
    kept: Values,
}

impl Settings {
    /// Those of a connection that starts, for a user, with what the client asked for. Settings
    /// that cannot be followed keep their defaults, and the client is told those: a driver sends
    /// the time zone of its host without being asked.
    pub fn start(user: &str, wanted: &[(String, String)]) -> Settings {
        let mut now: Values = ALL
            .iter()
            .map(|setting| (setting.name, setting.default.to_string()))
            .collect();
        now.insert("session_authorization", user.to_string());
        for (name, value) in wanted {
            if let Some(setting) = find(name)
                && let Ok(value) = setting.check(value)
            {
                now.insert(setting.name, value);
            }
        }
        Settings {
            start: now.clone(),
            now,
            transaction: None,
        }
    }

    /// As they are now is what RESET goes back to.
    pub fn into_started(mut self) -> Settings {
        self.start = self.now.clone();
        self
    }

    /// Values, by the names that `SHOW` has.
    pub fn values(&self) -> &Values {
        &self.now
    }

    /// What clients are told at the start.
    pub fn reported(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let reported = ALL.iter().filter(|setting| setting.reported);
        reported.map(|setting| (setting.name, self.value(setting)))
    }

    fn value(&self, setting: &Setting) -> &str {
        self.now.get(setting.name).map_or("", String::as_str)
    }

    /// The name and value of one setting.
    pub fn show(&self, name: &str) -> Result<(&'static str, &str), Failure> {
        let setting = find(name).ok_or_else(|| unknown(name))?;
        Ok((setting.name, self.value(setting)))
    }

    /// Sets one; `None` is the value it had at the start. What clients are to be told, if that.
    pub fn set(
        &mut self,
        name: &str,
        value: Option<&str>,
        local: bool,
    ) -> Result<Option<(&'static str, String)>, Failure> {
        let setting = find(name).ok_or_else(|| unknown(name))?;
        let value = match value {
            Some(value) => setting.check(value)?,
            None => self.start.get(setting.name).cloned().unwrap_or_default(),
        };
        let old = self.now.insert(setting.name, value.clone());
        if !local && let Some(transaction) = &mut self.transaction {
            transaction.kept.insert(setting.name, value.clone());
        }
        let changed = old.as_ref() != Some(&value);
        Ok((setting.reported && changed).then_some((setting.name, value)))
    }

    /// Everything as it was at the start. What clients are to be told.
    pub fn reset_all(&mut self) -> Vec<(&'static str, String)> {
        let start = self.start.clone();
        if let Some(transaction) = &mut self.transaction {
            transaction.kept = start.clone();
        }
        self.replace(start)
    }

    /// A transaction begins.
    pub fn begin(&mut self) {
        if self.transaction.is_none() {
            self.transaction = Some(Transaction {
                before: self.now.clone(),
                kept: self.now.clone(),
            });
        }
    }

    /// A transaction ends. What clients are to be told.
    pub fn end(&mut self, committed: bool) -> Vec<(&'static str, String)> {
        match self.transaction.take() {
            Some(transaction) if committed => self.replace(transaction.kept),
            Some(transaction) => self.replace(transaction.before),
            None => Vec::new(),
        }
    }

    fn replace(&mut self, values: Values) -> Vec<(&'static str, String)> {
        let old = std::mem::replace(&mut self.now, values);
        let reported = ALL.iter().filter(|setting| setting.reported);
        reported
            .filter(|setting| old.get(setting.name) != self.now.get(setting.name))
            .map(|setting| (setting.name, self.value(setting).to_string()))
            .collect()
    }

    /// Time that the client allows a statement.
    pub fn statement_timeout(&self) -> Option<Duration> {
        let text = self.now.get("statement_timeout")?;
        match milliseconds(text) {
            Some(0) | None => None,
            Some(ms) => Some(Duration::from_millis(ms)),
        }
    }

    /// Whether the client wants to see notices.
    pub fn notices(&self) -> bool {
        let least = self.now.get("client_min_messages").map(String::as_str);
        !matches!(least, Some("warning" | "error"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started() -> Settings {
        Settings::start("me", &[])
    }

    #[test]
    fn times_are_read_and_shown_as_postgresql_does() {
        // What PostgreSQL 16 shows after SET statement_timeout to each of these.
        for (set, shown) in [
            ("0", "0"),
            ("250", "250ms"),
            ("5s", "5s"),
            ("90s", "90s"),
            ("60000", "1min"),
            ("7200000ms", "2h"),
            ("1d", "1d"),
        ] {
            let mut settings = started();
            settings.set("statement_timeout", Some(set), false).unwrap();
            assert_eq!(settings.show("STATEMENT_TIMEOUT").unwrap().1, shown);
        }
        for wrong in ["-1", "x", "5 weeks", "999999999999", ""] {
            let error = started().set("statement_timeout", Some(wrong), false);
            assert_eq!(error.unwrap_err().code, "22023", "{wrong}");
        }
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        for (name, value, code) in [
            ("client_encoding", "LATIN1", "22023"),
            ("TimeZone", "Europe/Berlin", "22023"),
            ("DateStyle", "German", "22023"),
            ("standard_conforming_strings", "off", "22023"),
            ("search_path", "secret", "3F000"),
            ("server_version", "17", "55P02"),
            ("session_authorization", "postgres", "55P02"),
            ("datafusion.execution.batch_size", "1", "42704"),
            ("work_mem", "1GB", "42704"),
        ] {
            let error = started().set(name, Some(value), false).unwrap_err();
            assert_eq!(error.code, code, "{name}");
        }
        let told = Settings::start("me", &[("TimeZone".into(), "Europe/Berlin".into())]);
        assert_eq!(told.show("timezone").unwrap(), ("TimeZone", "UTC"));
    }

    #[test]
    fn transactions_undo_what_they_set() {
        let mut settings = started();
        let shown = |settings: &Settings| settings.show("application_name").unwrap().1.to_string();
        settings.begin();
        settings.set("application_name", Some("a"), false).unwrap();
        settings.end(false);
        assert_eq!(shown(&settings), "");
        settings.begin();
        settings.set("application_name", Some("b"), false).unwrap();
        settings.set("application_name", Some("c"), true).unwrap();
        assert_eq!(shown(&settings), "c");
        assert_eq!(settings.end(true), [("application_name", "b".to_string())]);
        assert_eq!(shown(&settings), "b");
        settings.reset_all();
        assert_eq!(shown(&settings), "");
    }
}
