//! Settings as text: `key:value,key:value`, as PyTorch reads it from the environment.
//!
//! Invariants: what is not understood is reported with its key and changes nothing; printing what
//! was read and reading that again gives the same settings.

use std::fmt;
use std::str::FromStr;

use super::Settings;
use crate::rules;

const MIB: u64 = 1 << 20;
/// PyTorch keeps the divisions of sixteen powers of two: up to 2 MiB, up to 4 MiB, …, from 32 GiB.
const INTERVALS: usize = 16;

/// Settings, and what in their text was not understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    pub settings: Settings,
    /// `backend`: `native` unless said otherwise. Of other backends none of the settings hold.
    pub backend: Option<String>,
    /// In the text's order.
    pub problems: Vec<Problem>,
}

/// A key whose value had no effect here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {kind}")]
pub struct Problem {
    pub key: String,
    pub kind: ProblemKind,
}

/// Why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProblemKind {
    /// PyTorch may know it, this model does not.
    #[error("unknown setting, not modelled")]
    Unknown,
    /// A known setting that says nothing about where blocks go.
    #[error("has no bearing on where blocks go, not modelled")]
    Elsewhere,
    /// PyTorch would refuse to start with it.
    #[error("expected {expected}, found {found:?}")]
    Value {
        expected: &'static str,
        found: String,
    },
}

/// Known to PyTorch, without influence on the address map of the native backend.
const ELSEWHERE: [&str; 14] = [
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
];

impl Settings {
    /// Reads the value of `PYTORCH_ALLOC_CONF` or `PYTORCH_CUDA_ALLOC_CONF`. Never fails: what
    /// PyTorch would refuse, or this model does not know, is among the problems.
    pub fn parse(text: &str) -> Parsed {
        let mut parsed = Parsed {
            settings: Settings::default(),
            backend: None,
            problems: Vec::new(),
        };
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let mut entries: Vec<(&str, &str)> = split_outside_brackets(&text)
            .into_iter()
            .filter(|entry| !entry.is_empty())
            .map(|entry| entry.split_once(':').unwrap_or((entry, "")))
            .collect();
        // The least value of two others depends on this one, wherever it stands.
        entries.sort_by_key(|(key, _)| *key != "large_segment_size_mb");
        for (key, value) in entries {
            if let Err(kind) = parsed.set(key, value) {
                let key = key.to_string();
                parsed.problems.push(Problem { key, kind });
            }
        }
        parsed
    }
}

impl Parsed {
    fn set(&mut self, key: &str, value: &str) -> Result<(), ProblemKind> {
        let settings = &mut self.settings;
        let large = settings.large_segment();
        match key {
            "max_split_size_mb" => {
                settings.max_split_size = Some(mib_from(value, large)?);
            }
            "max_non_split_rounding_mb" => {
                settings.max_non_split_rounding = Some(mib_from(value, large)?);
            }
            "large_segment_size_mb" => {
                let above = rules::MIN_LARGE_REQUEST + MIB;
                settings.large_segment_size = Some(mib_from(value, above)?);
            }
            "garbage_collection_threshold" => {
                let expected = "a number between 0 and 1";
                let share = number(value, expected)?;
                check(share > 0.0 && share < 1.0, expected, value)?;
                settings.garbage_collection_threshold = Some(share);
            }
            "per_process_memory_fraction" => {
                let expected = "a number from 0 to 1";
                let share = number(value, expected)?;
                check((0.0..=1.0).contains(&share), expected, value)?;
                settings.memory_fraction = Some(share).filter(|share| *share < 1.0);
            }
            "expandable_segments" => {
                settings.expandable_segments = match value {
                    "True" => true,
                    "False" => false,
                    _ => return Err(unexpected("True or False", value)),
                };
            }
            "roundup_power2_divisions" => {
                settings.roundup_power2_divisions = divisions(value)?;
            }
            "backend" => match value {
                "native" | "cudaMallocAsync" | "hipMallocAsync" => {
                    self.backend = Some(value.to_string());
                }
                _ => return Err(unexpected("native or cudaMallocAsync", value)),
            },
            _ if ELSEWHERE.contains(&key) => return Err(ProblemKind::Elsewhere),
            _ => return Err(ProblemKind::Unknown),
        }
        Ok(())
    }
}

/// One number for all powers of two, or `[256:1,512:2,>:4]`: by powers of two in MiB. What lies
/// below the first one named is rounded as that, what lies above the last one as `>` says; what
/// lies between and is not named is rounded to 512 bytes.
fn divisions(value: &str) -> Result<Vec<(u64, u32)>, ProblemKind> {
    const EXPECTED: &str = "a power of two, or a list like [256:1,512:2,>:4] of powers of two";
    let mut table = [0u32; INTERVALS];
    let list = value
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let Some(list) = list else {
        let steps: u32 = number(value, EXPECTED)?;
        check(steps.is_power_of_two(), EXPECTED, value)?;
        table.fill(steps);
        return Ok(runs(&table));
    };
    let mut last: Option<usize> = None;
    for entry in list.split(',') {
        let (bound, steps) = entry
            .split_once(':')
            .ok_or_else(|| unexpected(EXPECTED, value))?;
        let steps: u32 = number(steps, EXPECTED)?;
        check(steps == 0 || steps.is_power_of_two(), EXPECTED, value)?;
        if bound == ">" {
            // Older versions of PyTorch let `>` overwrite the last one named too.
            let from = last.map_or(0, |last| last + 1);
            table[from..].fill(steps);
            continue;
        }
        let bound: u64 = number(bound, EXPECTED)?;
        check(bound.is_power_of_two(), EXPECTED, value)?;
        let index = (bound.ilog2() as usize).min(INTERVALS - 1);
        if last.is_none() {
            table[..index].fill(steps);
        }
        table[index] = steps;
        last = Some(index);
    }
    Ok(runs(&table))
}

/// `(lower bound, divisions)` wherever the table changes; nothing for a table of zeros.
fn runs(table: &[u32; INTERVALS]) -> Vec<(u64, u32)> {
    let mut runs: Vec<(u64, u32)> = Vec::new();
    for (index, steps) in table.iter().enumerate() {
        let bound = if index == 0 { 0 } else { MIB << index };
        if runs.last().is_none_or(|(_, before)| before != steps) {
            runs.push((bound, *steps));
        }
    }
    if runs == [(0, 0)] {
        runs.clear();
    }
    runs
}

fn split_outside_brackets(text: &str) -> Vec<&str> {
    let mut depth = 0usize;
    text.split(|c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .collect()
}

/// A number of MiB of at least `least` bytes, in bytes.
fn mib_from(value: &str, least: u64) -> Result<u64, ProblemKind> {
    const EXPECTED: &str = "a whole number of MiB, at least the large segment's size";
    let mib: u64 = number(value, EXPECTED)?;
    let bytes = mib.min(u64::MAX / MIB) * MIB;
    check(bytes >= least, EXPECTED, value)?;
    Ok(bytes)
}

fn number<T: FromStr>(value: &str, expected: &'static str) -> Result<T, ProblemKind> {
    value.parse().map_err(|_| unexpected(expected, value))
}

fn check(good: bool, expected: &'static str, found: &str) -> Result<(), ProblemKind> {
    if good {
        Ok(())
    } else {
        Err(unexpected(expected, found))
    }
}

fn unexpected(expected: &'static str, found: &str) -> ProblemKind {
    let found = found.to_string();
    ProblemKind::Value { expected, found }
}

impl fmt::Display for Settings {
    /// What differs from the default, as PyTorch reads it; empty for the default. Sizes are
    /// written in whole MiB.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut entries = Vec::new();
        let sizes = [
            ("large_segment_size_mb", self.large_segment_size),
            ("max_split_size_mb", self.max_split_size),
            ("max_non_split_rounding_mb", self.max_non_split_rounding),
        ];
        for (key, size) in sizes {
            entries.extend(size.map(|bytes| format!("{key}:{}", bytes / MIB)));
        }
        if !self.roundup_power2_divisions.is_empty() {
            let text = divisions_text(self);
            entries.push(format!("roundup_power2_divisions:{text}"));
        }
        let shares = [
            (
                "garbage_collection_threshold",
                self.garbage_collection_threshold,
            ),
            ("per_process_memory_fraction", self.memory_fraction),
        ];
        for (key, share) in shares {
            entries.extend(share.map(|share| format!("{key}:{share}")));
        }
        if self.expandable_segments {
            entries.push("expandable_segments:True".to_string());
        }
        formatter.write_str(&entries.join(","))
    }
}

fn divisions_text(settings: &Settings) -> String {
    let table: Vec<u32> = (0..INTERVALS)
        .map(|index| settings.divisions(MIB << index))
        .collect();
    let first = table[0];
    if first > 0 && table.iter().all(|steps| *steps == first) {
        return first.to_string();
    }
    // The first run by its last power of two, the last run by its first and by `>`, which all
    // versions of PyTorch read alike.
    let begin = table.iter().take_while(|steps| **steps == first).count() - 1;
    let tail = table[INTERVALS - 1];
    let end = INTERVALS - table.iter().rev().take_while(|s| **s == tail).count();
    let mut entries: Vec<String> = (begin..=end.min(INTERVALS - 1))
        .map(|index| format!("{}:{}", 1u64 << index, table[index]))
        .collect();
    entries.push(format!(">:{tail}"));
    format!("[{}]", entries.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_of_the_documentation() {
        let parsed = Settings::parse(
            "max_split_size_mb:128, garbage_collection_threshold:0.8,expandable_segments:True,\
             backend:native",
        );
        assert_eq!(parsed.problems, []);
        assert_eq!(parsed.backend.as_deref(), Some("native"));
        assert_eq!(
            parsed.settings,
            Settings {
                max_split_size: Some(134_217_728),
                garbage_collection_threshold: Some(0.8),
                expandable_segments: true,
                ..Settings::default()
            }
        );
    }

    /// The example of PyTorch's documentation, taken through its parser by hand: the entry for 256
    /// holds from 256 to 512 MiB, and below it as the first one named.
    #[test]
    fn divisions_by_power_of_two() {
        let parsed = Settings::parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
        assert_eq!(parsed.problems, []);
        let settings = parsed.settings;
        for (mib, divisions) in [
            (1, 1),
            (256, 1),
            (511, 1),
            (512, 2),
            (1024, 4),
            (2048, 8),
            (99_999, 8),
        ] {
            assert_eq!(settings.divisions(mib * MIB), divisions, "{mib} MiB");
        }
        assert_eq!(settings.divisions(700), 1);
    }

    #[test]
    fn what_is_not_named_between_is_off() {
        let settings = Settings::parse("roundup_power2_divisions:[64:8,256:4]").settings;
        let of = |mib: u64| settings.divisions(mib * MIB);
        assert_eq!([of(2), of(64), of(128), of(256), of(512)], [8, 8, 0, 4, 0]);
    }

    #[test]
    fn what_is_not_understood_is_reported_and_changes_nothing() {
        let parsed = Settings::parse(
            "max_split_size_mb:19,frobnicate:[1:2,3:4],pinned_use_background_threads:True,\
             garbage_collection_threshold:1.5,expandable_segments:true,roundup_power2_divisions:3,\
             max_split_size_mb",
        );
        assert_eq!(parsed.settings, Settings::default());
        let told: Vec<String> = parsed.problems.iter().map(|p| p.to_string()).collect();
        assert_eq!(told.len(), 7, "{told:?}");
        assert!(told[0].contains("max_split_size_mb") && told[0].contains("\"19\""));
        assert_eq!(told[1], "frobnicate: unknown setting, not modelled");
        assert!(told[2].contains("no bearing"));
        assert!(told[4].contains("True or False"));
    }

    #[test]
    fn a_smaller_large_segment_allows_a_smaller_split_size_wherever_it_stands() {
        let parsed = Settings::parse("max_split_size_mb:12,large_segment_size_mb:12");
        assert_eq!(parsed.problems, []);
        assert_eq!(parsed.settings.max_split_size, Some(12 * MIB));
        assert_eq!(
            Settings::parse("large_segment_size_mb:10").problems.len(),
            1
        );
    }

    #[test]
    fn text_that_is_printed_reads_the_same() {
        for text in [
            "",
            "max_split_size_mb:128,expandable_segments:True",
            "roundup_power2_divisions:4",
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            "roundup_power2_divisions:[64:8,256:4]",
            "roundup_power2_divisions:[1:2]",
            "roundup_power2_divisions:[32768:2]",
            "garbage_collection_threshold:0.6,per_process_memory_fraction:0.5",
            "large_segment_size_mb:40,max_non_split_rounding_mb:60",
        ] {
            let settings = Settings::parse(text).settings;
            let again = Settings::parse(&settings.to_string());
            assert_eq!(again.problems, [], "{text}: {settings}");
            assert_eq!(again.settings, settings, "{text}: {settings}");
        }
    }
}
