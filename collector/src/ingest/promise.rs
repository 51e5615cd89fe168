//! What an acknowledgement stands for: a key of the configuration.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// What an acknowledgement stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// The batch is in the log, on this machine's disk.
    Fsync,
    /// The rows are in the table, on its storage.
    Store,
}

impl FromStr for Promise {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fsync" => Ok(Promise::Fsync),
            "store" => Ok(Promise::Store),
            _ => Err(format!("{text:?} is no promise; write fsync or store")),
        }
    }
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Promise::Fsync => "fsync",
            Promise::Store => "store",
        })
    }
}

impl<'de> Deserialize<'de> for Promise {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}
