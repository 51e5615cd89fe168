//! Which files are merged next. Pure: files and the clock in, groups of files out.
//!
//! Files of one partition (one hour) grow in levels:
//! - **minute**: while the hour goes on, [`MINUTE_FILES`] or more small files become one, and a
//!   larger one is only taken along if the others hold three times its bytes. So a row is rewritten
//!   once per quadrupling, however many commits an hour has;
//! - **hour**: once the hour is over, what is left of it is merged as soon as the smaller files hold
//!   as much as the largest;
//! - **day**: an hour after the day is over, each of its hours is merged to the end: files of
//!   [`TARGET_FILE_BYTES`], and one smaller.
//!
//! A day's files stay apart by hour, since `date` and `hour` partition the tables: a query that
//! names them must find what it names. A file that has reached three quarters of the target is left
//! alone for ever.
//!
//! Stacks have no time. They are merged like the files of an hour that goes on; by hand, all
//! together, since only that leaves each stack once.

use chrono::{DateTime, Duration, NaiveDate, Utc};

use crate::lake::layout::TARGET_FILE_BYTES;

/// Small files that are worth a merge while more come.
pub const MINUTE_FILES: usize = 8;

/// A file of so many bytes is not merged again.
pub const FULL_BYTES: u64 = TARGET_FILE_BYTES / 4 * 3;

/// Bytes that one merge reads, if it can help it: a merge that takes minutes holds up others and
/// is for nothing if the process ends.
const JOB_BYTES: u64 = 2 * TARGET_FILE_BYTES;

/// A file as the planner sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its path, as the table's log has it.
    pub path: String,
    /// Its bytes.
    pub bytes: u64,
    /// When it was written.
    pub written: DateTime<Utc>,
    /// Its partition.
    pub hour: Option<Hour>,
}

/// The hour of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hour(DateTime<Utc>);

impl Hour {
    /// From the values of `date` and `hour`, as a table's log spells them.
    pub fn parse(date: &str, hour: &str) -> Option<Hour> {
        let date: NaiveDate = date.parse().ok()?;
        let start = date.and_hms_opt(hour.parse().ok()?, 0, 0)?;
        Some(Hour(start.and_utc()))
    }

    /// Its first moment.
    pub fn start(self) -> DateTime<Utc> {
        self.0
    }

    /// The moment after its last.
    pub fn end(self) -> DateTime<Utc> {
        self.0 + Duration::hours(1)
    }

    fn day_end(self) -> DateTime<Utc> {
        let next = self.0.date_naive().succ_opt();
        // The last day that a calendar knows does not end.
        next.and_then(|day| day.and_hms_opt(0, 0, 0))
            .map_or(DateTime::<Utc>::MAX_UTC, |midnight| midnight.and_utc())
    }
}

/// How far files are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// By the levels, as time goes on.
    Levels,
    /// To the end, now.
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Minute,
    Hour,
    Last,
}

/// The files of one merge; they are of one partition.
pub type Job = Vec<File>;

/// What is to be merged, oldest hours first. A file is in one job at most.
pub fn jobs(files: Vec<File>, depth: Depth, now: DateTime<Utc>) -> Vec<Job> {
    let mut by_hour: std::collections::BTreeMap<Option<Hour>, Vec<File>> = Default::default();
    for file in files {
        by_hour.entry(file.hour).or_default().push(file);
    }
    by_hour
        .into_iter()
        .filter_map(|(hour, files)| job(hour, files, depth, now))
        .collect()
}

fn job(hour: Option<Hour>, mut files: Vec<File>, depth: Depth, now: DateTime<Utc>) -> Option<Job> {
    let level = level(hour, depth, now);
    let merges_full_files = hour.is_none() && depth == Depth::Full;
    if !merges_full_files {
        files.retain(|file| file.bytes < FULL_BYTES);
    }
    files.sort_by(|a, b| (a.bytes, &a.path).cmp(&(b.bytes, &b.path)));
    let is_quiet = depth == Depth::Full
        || files
            .iter()
            .all(|file| now - file.written > Duration::minutes(15));
    let count = match level {
        Level::Last if is_quiet => files.len(),
        Level::Last | Level::Hour => worth(&files, 2, 1),
        Level::Minute => 0,
    };
    let count = count.max(worth(&files, MINUTE_FILES, 3));
    files.truncate(count);
    if !merges_full_files {
        files.truncate(within(&files, JOB_BYTES));
    }
    (files.len() > 1).then_some(files)
}

fn level(hour: Option<Hour>, depth: Depth, now: DateTime<Utc>) -> Level {
    let Some(hour) = hour else {
        return match depth {
            Depth::Full => Level::Last,
            Depth::Levels => Level::Minute,
        };
    };
    let is_over = |end: DateTime<Utc>, wait: Duration| now - wait > end;
    if depth == Depth::Full || is_over(hour.day_end(), Duration::hours(1)) {
        Level::Last
    } else if is_over(hour.end(), Duration::minutes(5)) {
        Level::Hour
    } else {
        Level::Minute
    }
}

/// How many of the files, from the smallest on, are worth a merge: at least `least`, and `ratio`
/// times the largest of them is not more than the others hold.
fn worth(files: &[File], least: usize, ratio: u64) -> usize {
    let mut found = 0;
    let mut before = 0_u64;
    for (index, file) in files.iter().enumerate() {
        let is_worth = file.bytes.saturating_mul(ratio) <= before;
        if index + 1 >= least && is_worth {
            found = index + 1;
        }
        before += file.bytes;
    }
    found
}

/// How many of the files, from the smallest on, stay within so many bytes; two in any case.
fn within(files: &[File], bytes: u64) -> usize {
    let mut sum = 0;
    let fitting = files.iter().take_while(|file| {
        sum += file.bytes;
        sum <= bytes
    });
    fitting.count().max(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn at(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    fn files(hour: Option<Hour>, sizes: &[u64]) -> Vec<File> {
        let file = |(number, bytes): (usize, &u64)| File {
            path: format!("{number}"),
            bytes: *bytes,
            written: at("2026-11-29T13:30:00Z"),
            hour,
        };
        sizes.iter().enumerate().map(file).collect()
    }

    fn sizes(jobs: &[Job]) -> Vec<Vec<u64>> {
        jobs.iter()
            .map(|job| job.iter().map(|file| file.bytes).collect())
            .collect()
    }

    fn planned(sizes_in: &[u64], depth: Depth, now: &str) -> Vec<Vec<u64>> {
        let hour = Hour::parse("2026-11-29", "13");
        sizes(&jobs(files(hour, sizes_in), depth, at(now)))
    }

    #[test]
    fn an_hour_that_goes_on_merges_eight_and_spares_the_large_one() {
        let now = "2026-11-29T13:40:00Z";
        assert_eq!(planned(&[MIB; 7], Depth::Levels, now), [[0; 0]; 0]);
        assert_eq!(planned(&[MIB; 8], Depth::Levels, now), [[MIB; 8]]);
        let with_large = [9 * MIB, MIB, MIB, MIB, MIB, MIB, MIB, MIB, MIB];
        assert_eq!(planned(&with_large, Depth::Levels, now), [[MIB; 8]]);
        // Thirty of them hold three times as much as the one.
        let with_many = [[MIB; 30].as_slice(), &[10 * MIB]].concat();
        assert_eq!(planned(&with_many, Depth::Levels, now)[0].len(), 31);
    }

    #[test]
    fn an_hour_that_is_over_is_merged_when_it_is_worth_it_and_a_day_in_any_case() {
        let sizes = [50 * MIB, 20 * MIB, 20 * MIB];
        let hour_over = "2026-11-29T14:10:00Z";
        assert_eq!(
            planned(&sizes, Depth::Levels, hour_over),
            [[20 * MIB, 20 * MIB]]
        );
        let day_over = "2026-11-30T01:10:00Z";
        assert_eq!(planned(&sizes, Depth::Levels, day_over)[0].len(), 3);
        assert_eq!(planned(&sizes, Depth::Full, hour_over)[0].len(), 3);
        assert_eq!(planned(&[50 * MIB], Depth::Full, hour_over), [[0; 0]; 0]);
    }

    #[test]
    fn full_files_are_left_alone_and_a_job_is_bounded() {
        let now = "2026-11-30T01:10:00Z";
        let full = [250 * MIB, 200 * MIB, 5 * MIB, 6 * MIB];
        assert_eq!(planned(&full, Depth::Levels, now), [[5 * MIB, 6 * MIB]]);
        let many = planned(&[100 * MIB; 20], Depth::Levels, now);
        assert_eq!(many, [[100 * MIB; 5]]);
    }

    #[test]
    fn stacks_are_merged_by_the_dozen_and_by_hand_all_together() {
        let now = at("2026-11-29T13:40:00Z");
        let stacks = || files(None, &[300 * MIB, MIB, MIB]);
        assert_eq!(jobs(stacks(), Depth::Levels, now), [] as [Job; 0]);
        assert_eq!(jobs(stacks(), Depth::Full, now)[0].len(), 3);
    }

    #[test]
    fn hours_are_read_as_the_log_spells_them() {
        let hour = Hour::parse("2026-11-29", "7").unwrap();
        assert_eq!(hour.start(), at("2026-11-29T07:00:00Z"));
        assert_eq!(hour.end(), at("2026-11-29T08:00:00Z"));
        assert_eq!(Hour::parse("2026-11-29", "24"), None);
        assert_eq!(Hour::parse("__HIVE_DEFAULT_PARTITION__", "1"), None);
    }
}
