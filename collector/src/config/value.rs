//! How values of the configuration are spelt: sizes, lengths of time, addresses.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// A number of bytes: a plain integer, or text such as `64MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?} is not a size; write bytes, or a number with KiB, MiB, GiB or TiB")
        };
        let (digits, unit) = UNITS
            .into_iter()
            .find_map(|(name, unit)| text.strip_suffix(name).map(|digits| (digits, unit)))
            .unwrap_or((text, 1));
        let number: u64 = digits.trim().parse().map_err(|_| wrong())?;
        number.checked_mul(unit).map(ByteSize).ok_or_else(wrong)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS
            .into_iter()
            .find(|(_, unit)| self.0 > 0 && self.0.is_multiple_of(*unit))
        {
            Some((name, unit)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Number(u64),
            Text(String),
        }
        match Spelling::deserialize(deserializer)? {
            Spelling::Number(bytes) => Ok(ByteSize(bytes)),
            Spelling::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// A length of time such as `500ms`, `2s`, `5m`, `12h`, `7d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

/// "ms" before "m" and "s", which are its ends.
const TIMES: [(&str, u64); 5] = [
    ("ms", 1),
    ("s", 1_000),
    ("m", 60_000),
    ("h", 3_600_000),
    ("d", 86_400_000),
];

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a length of time; write a number with ms, s, m, h or d");
        let (digits, unit_ms) = TIMES
            .into_iter()
            .find_map(|(name, ms)| text.strip_suffix(name).map(|digits| (digits, ms)))
            .ok_or_else(wrong)?;
        let number: u64 = digits.trim().parse().map_err(|_| wrong())?;
        let ms = number.checked_mul(unit_ms).ok_or_else(wrong)?;
        Ok(Span(Duration::from_millis(ms)))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if ms > 0 && ms.is_multiple_of(86_400_000) {
            write!(f, "{}d", ms / 86_400_000)
        } else if ms.is_multiple_of(1000) {
            write!(f, "{}s", ms / 1000)
        } else {
            write!(f, "{ms}ms")
        }
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// Where a door listens, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listen {
    /// It is closed.
    Off,
    /// On this address.
    At(SocketAddr),
}

impl Listen {
    pub(super) fn loopback(port: u16) -> Listen {
        Listen::At(SocketAddr::from(([127, 0, 0, 1], port)))
    }

    /// The address, if it is open.
    pub fn address(self) -> Option<SocketAddr> {
        match self {
            Listen::Off => None,
            Listen::At(address) => Some(address),
        }
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Listen::Off);
        }
        text.parse().map(Listen::At).map_err(|_| {
            format!("{text:?} is no address such as 127.0.0.1:7718 or [::1]:7718, nor \"off\"")
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Off => f.write_str("off"),
            Listen::At(address) => address.fmt(f),
        }
    }
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_as_written() {
        assert_eq!("4096".parse(), Ok(ByteSize(4096)));
        assert_eq!("64MiB".parse(), Ok(ByteSize(67_108_864)));
        assert!("64MB".parse::<ByteSize>().is_err());
        assert!("99999999999TiB".parse::<ByteSize>().is_err());
        assert_eq!("500ms".parse(), Ok(Span(Duration::from_millis(500))));
        assert_eq!("2m".parse(), Ok(Span(Duration::from_secs(120))));
        assert_eq!("7d".parse(), Ok(Span(Duration::from_secs(604_800))));
        assert_eq!(Span(Duration::from_secs(604_800)).to_string(), "7d");
        assert!("2".parse::<Span>().is_err());
    }
}
