//! The detectors' constants. Each default is the published one (`docs/leaks.md` says where each
//! comes from); a text can override those that depend on how long a recording is.

use thiserror::Error;

const MINUTE_NS: i64 = 60_000_000_000;

/// A settings text that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SettingsError {
    /// A key that is not one of [`KEYS`].
    #[error("unknown leak setting {0:?}; known are {known}", known = KEYS.join(", "))]
    UnknownKey(String),
    /// An entry that is not `key:value`.
    #[error("leak setting {0:?} is not of the form key:value")]
    NoValue(String),
    /// A value that is no number, or out of bounds.
    #[error("leak setting {key} is {value:?}; it takes a number from {low} to {high}")]
    BadValue {
        /// Which setting.
        key: String,
        /// What was given.
        value: String,
        /// Smallest value it takes.
        low: u32,
        /// Largest value it takes.
        high: u32,
    },
}

/// Keys that [`Settings::parse`] knows.
pub const KEYS: [&str; 4] = [
    "block_minutes",
    "warmup_minutes",
    "min_requests",
    "bytes_per_request",
];

/// Parts of a block for which roll-ups are summed up: the block's median is over them.
pub const SLOTS_PER_BLOCK: i64 = 3;
/// Blocks of the windows that may confirm.
pub const WINDOWS: [usize; 3] = [20, 32, 48];
/// Blocks of the window that makes a suspect.
pub const SUSPECT_WINDOW: usize = 12;
/// Blocks from one evaluation to the next.
pub const EVALUATION_STEP: usize = 4;
/// Evaluations in a row that confirm.
pub const CONFIRMING: usize = 3;

/// See the module's text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Length of a block, minutes.
    pub block_minutes: u32,
    /// What is left out after a process starts, minutes.
    pub warmup_minutes: u32,
    /// Fewest completed requests in a window that is judged.
    pub min_requests: f64,
    /// What a lower bound must exceed, bytes per request.
    pub bytes_per_request: f64,
    /// What the first look must show, bytes per request.
    pub candidate_bytes_per_request: f64,
    /// Kendall's tau that the first look must show.
    pub candidate_tau: f64,
    /// Standard errors below the estimate at which the lower bound lies.
    pub standard_errors: f64,
    /// Standard errors that a rival explanation's coefficient must be above 0 to count.
    pub rival_errors: f64,
    /// Noise that a fit is never better than, bytes.
    pub noise_bytes: f64,
    /// Least share of the plain fit's growth that must remain beside every other explanation.
    pub remaining_share: f64,
    /// Largest share of the growth that may come in one block.
    pub largest_rise: f64,
    /// Least median slope from block to block, as a share of the growth.
    pub block_slope: f64,
    /// The same over four blocks.
    pub four_block_slope: f64,
    /// Largest fall below the highest value so far, as a share of the growth.
    pub drawdown: f64,
    /// Least slope in the last third of the window, as a share of the growth.
    pub last_third: f64,
    /// Least rise over everything earlier, as a share of the growth.
    pub new_high: f64,
    /// Growth that the lower bound must exceed where no traffic is known, bytes per hour.
    pub bytes_per_hour: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            block_minutes: 30,
            warmup_minutes: 30,
            min_requests: 2000.0,
            bytes_per_request: 1500.0,
            candidate_bytes_per_request: 1200.0,
            candidate_tau: 0.2,
            standard_errors: 3.0,
            rival_errors: 1.0,
            noise_bytes: 1000.0,
            remaining_share: 0.6,
            largest_rise: 0.15,
            block_slope: 0.4,
            four_block_slope: 0.5,
            drawdown: 0.4,
            last_third: 0.5,
            new_high: 0.3,
            bytes_per_hour: 8e6,
        }
    }
}

impl Settings {
    /// Reads `key:value` pairs separated by commas over the defaults, as in
    /// `block_minutes:2,warmup_minutes:2,min_requests:100`. An empty text is the defaults.
    pub fn parse(text: &str) -> Result<Settings, SettingsError> {
        let mut settings = Settings::default();
        for entry in text.split(',').map(str::trim).filter(|e| !e.is_empty()) {
            let (key, value) = entry
                .split_once(':')
                .ok_or_else(|| SettingsError::NoValue(entry.to_string()))?;
            let (key, value) = (key.trim(), value.trim());
            let number = |low: u32, high: u32| {
                let number = value.parse::<u32>().ok();
                let within = number.filter(|n| (low..=high).contains(n));
                within.ok_or_else(|| SettingsError::BadValue {
                    key: key.to_string(),
                    value: value.to_string(),
                    low,
                    high,
                })
            };
            match key {
                "block_minutes" => settings.block_minutes = number(1, 1440)?,
                "warmup_minutes" => settings.warmup_minutes = number(0, 10_080)?,
                "min_requests" => settings.min_requests = f64::from(number(1, 1_000_000_000)?),
                "bytes_per_request" => {
                    let bytes = f64::from(number(1, 1_000_000_000)?);
                    settings.bytes_per_request = bytes;
                    settings.candidate_bytes_per_request = bytes * 0.8;
                }
                _ => return Err(SettingsError::UnknownKey(key.to_string())),
            }
        }
        Ok(settings)
    }

    /// Length of a slot, nanoseconds.
    pub fn slot_ns(&self) -> i64 {
        i64::from(self.block_minutes) * MINUTE_NS / SLOTS_PER_BLOCK
    }

    /// Length of a slot, hours.
    pub fn slot_hours(&self) -> f64 {
        self.slot_ns() as f64 / 3.6e12
    }

    /// Slots left out after a process starts.
    pub fn warmup_slots(&self) -> i64 {
        let slots = i64::from(self.warmup_minutes) * MINUTE_NS;
        (slots + self.slot_ns() - 1) / self.slot_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_overrides_and_errors_name_the_value() {
        let settings = Settings::parse("block_minutes:3, warmup_minutes:0").unwrap();
        assert_eq!(
            (settings.slot_ns(), settings.warmup_slots()),
            (MINUTE_NS, 0)
        );
        assert_eq!(Settings::parse("").unwrap(), Settings::default());
        assert_eq!(Settings::default().warmup_slots(), 3);
        let message = |text: &str| Settings::parse(text).unwrap_err().to_string();
        assert!(message("blocks:3").contains("block_minutes"));
        assert!(message("block_minutes:0").contains("from 1 to 1440"));
        assert!(message("block_minutes").contains("key:value"));
    }
}
