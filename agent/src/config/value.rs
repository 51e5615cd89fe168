//! How values of the configuration are spelt, as people write them and as they are printed.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::host::safety::SeccompRule;
use crate::recorder::Travel;
use crate::traffic::endpoint::Endpoint;

/// A span of time as people write it: `500ms`, `10s`, `2min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let hint = || {
            format!(
                "{text:?} is not a span of time: write a whole number and ms, s, min or h, as in 500ms"
            )
        };
        let number: u64 = number.parse().map_err(|_| hint())?;
        let millis = match unit.trim() {
            "ms" => 1,
            "s" => 1000,
            "min" => 60_000,
            "h" => 3_600_000,
            _ => return Err(hint()),
        };
        let millis = number
            .checked_mul(millis)
            .filter(|m| *m > 0)
            .ok_or_else(hint)?;
        Ok(Self(Duration::from_millis(millis)))
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.as_millis() {
            ms if ms % 1000 == 0 => write!(f, "{}s", ms / 1000),
            ms => write!(f, "{ms}ms"),
        }
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// A number of bytes as people write it: `2GiB`, `500MB`, `4096B`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

/// Largest first, so that the printed form is short.
const BYTE_UNITS: [(&str, u64); 7] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("B", 1),
];

impl std::str::FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let hint = || {
            format!(
                "{text:?} is not a number of bytes: write a whole number and B, KiB, MiB, GiB, TiB, MB or GB, as in 2GiB"
            )
        };
        let number: u64 = number.parse().map_err(|_| hint())?;
        let unit = unit.trim();
        let (_, size) = BYTE_UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(hint)?;
        number.checked_mul(*size).map(Self).ok_or_else(hint)
    }
}

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = |size: u64| self.0 > 0 && self.0.is_multiple_of(size);
        match BYTE_UNITS.iter().find(|(_, size)| whole(*size)) {
            Some((unit, size)) => write!(f, "{}{unit}", self.0 / size),
            None => write!(f, "{}B", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

impl ToToml for Bytes {
    fn to_toml(&self) -> String {
        format!("\"{self}\"")
    }
}

/// How a value is printed as TOML.
pub(super) trait ToToml {
    fn to_toml(&self) -> String;
}

impl ToToml for Span {
    fn to_toml(&self) -> String {
        format!("\"{self}\"")
    }
}

impl ToToml for bool {
    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl ToToml for usize {
    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl ToToml for String {
    fn to_toml(&self) -> String {
        toml::Value::String(self.clone()).to_string()
    }
}

impl ToToml for PathBuf {
    fn to_toml(&self) -> String {
        self.to_string_lossy().into_owned().to_toml()
    }
}

impl ToToml for Travel {
    fn to_toml(&self) -> String {
        self.to_string().to_toml()
    }
}

impl ToToml for SeccompRule {
    fn to_toml(&self) -> String {
        self.to_string().to_toml()
    }
}

impl ToToml for Endpoint {
    fn to_toml(&self) -> String {
        let mut fields = vec![format!("url = {}", self.url.to_toml())];
        fields.extend(self.pid.map(|pid| format!("pid = {pid}")));
        let process = self.process.as_ref();
        fields.extend(process.map(|process| format!("process = {}", process.to_toml())));
        format!("{{ {} }}", fields.join(", "))
    }
}

impl<T: ToToml> ToToml for Vec<T> {
    fn to_toml(&self) -> String {
        let items: Vec<_> = self.iter().map(ToToml::to_toml).collect();
        format!("[{}]", items.join(", "))
    }
}
