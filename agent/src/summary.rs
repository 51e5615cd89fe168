//! What a trace's summary tells, gathered while rows pass by, so that no query engine is needed.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use crate::engine::{Observer, Totals};
use crate::spool::rows::{AllocRow, StackRow};

/// Stacks that are listed.
const TOP: usize = 5;

/// One process, device and kind of memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Line {
    pub pid: u32,
    /// `None`: the device is not known.
    pub device: Option<i32>,
    pub memory_kind: &'static str,
    pub allocations: u64,
    pub frees: u64,
    pub failed_allocations: u64,
    pub failed_frees: u64,
    pub allocated_bytes: u64,
    pub live_bytes: u64,
    pub live_blocks: u64,
    /// Running maximum over events.
    pub peak_bytes: u64,
    /// Live when the process ended, freed by its end.
    pub live_at_exit_bytes: u64,
    pub live_at_exit_blocks: u64,
}

/// Bytes one stack holds and took.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StackLine {
    pub stack_id: i64,
    pub folded: String,
    pub allocated_bytes: u64,
    pub allocations: u64,
    /// Never freed by a call.
    pub kept_bytes: u64,
    pub kept_blocks: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Summary {
    lines: BTreeMap<(u32, Option<i32>, &'static str), Line>,
    stacks: HashMap<i64, StackLine>,
    names: HashMap<i64, String>,
}

impl Summary {
    /// Takes one row, in order of `seq`.
    pub fn add(&mut self, row: &AllocRow) {
        let begins = matches!(row.op, "alloc" | "register" | "reserve" | "map" | "oom");
        let failed = row.op == "oom" || row.result.is_some_and(|result| result != 0);
        // A failure counts once a chain, where it began.
        let counts = if failed {
            row.parent_seq.is_none()
        } else {
            row.counted
        };
        if !counts {
            return;
        }
        // What a free of an unknown address would have freed is not known.
        let kind = row.memory_kind.unwrap_or("unknown");
        let line = self
            .lines
            .entry((row.pid, row.device, kind))
            .or_insert_with(|| Line {
                pid: row.pid,
                device: row.device,
                memory_kind: kind,
                ..Line::default()
            });
        let bytes = row.bytes.unwrap_or(0) as u64;
        match (begins, failed) {
            (true, true) => line.failed_allocations += 1,
            (false, true) => line.failed_frees += 1,
            (true, false) => {
                line.allocations += 1;
                line.allocated_bytes += bytes;
                line.live_bytes += bytes;
                line.live_blocks += 1;
                line.peak_bytes = line.peak_bytes.max(line.live_bytes);
            }
            (false, false) => {
                line.live_bytes = line.live_bytes.saturating_sub(bytes);
                line.live_blocks = line.live_blocks.saturating_sub(1);
                if row.api == "process_exit" {
                    line.live_at_exit_bytes += bytes;
                    line.live_at_exit_blocks += 1;
                } else {
                    line.frees += 1;
                }
            }
        }
        self.add_to_stack(row, begins, failed, bytes);
    }

    fn add_to_stack(&mut self, row: &AllocRow, begins: bool, failed: bool, bytes: u64) {
        if failed {
            return;
        }
        let Some(stack_id) = (if begins {
            row.stack_id
        } else {
            row.alloc_stack_id
        }) else {
            return;
        };
        let stack = self.stacks.entry(stack_id).or_default();
        stack.stack_id = stack_id;
        if begins {
            stack.allocated_bytes += bytes;
            stack.allocations += 1;
            stack.kept_bytes += bytes;
            stack.kept_blocks += 1;
        } else if !row.implicit {
            stack.kept_bytes = stack.kept_bytes.saturating_sub(bytes);
            stack.kept_blocks = stack.kept_blocks.saturating_sub(1);
        }
    }

    pub fn lines(&self) -> Vec<Line> {
        self.lines.values().cloned().collect()
    }

    /// Stacks that keep most, then those that took most.
    pub fn top_stacks(&self) -> Vec<StackLine> {
        let mut stacks: Vec<_> = self.stacks.values().cloned().collect();
        stacks.sort_by_key(|s| std::cmp::Reverse((s.kept_bytes, s.allocated_bytes, s.stack_id)));
        stacks.truncate(TOP);
        for stack in &mut stacks {
            stack.folded = self.names.get(&stack.stack_id).cloned().unwrap_or_default();
        }
        stacks
    }
}

/// A summary that the engine fills while somebody else waits to read it.
impl Observer for Arc<Mutex<Summary>> {
    fn row(&mut self, row: &AllocRow) {
        self.lock().unwrap_or_else(PoisonError::into_inner).add(row);
    }

    fn stack(&mut self, stack: &StackRow) {
        let mut summary = self.lock().unwrap_or_else(PoisonError::into_inner);
        summary.names.insert(stack.stack_id, stack.folded.clone());
    }
}

/// The printed form.
pub fn text(summary: &Summary, totals: &Totals, folder: &str) -> String {
    let mut text = String::new();
    let lost: u64 = totals.lost.values().sum();
    let _ = writeln!(
        text,
        "vramscope: {} calls seen, {lost} lost; written to {folder}",
        totals.events
    );
    for (cause, count) in &totals.lost {
        let _ = writeln!(
            text,
            "  lost by {cause}: {count}; totals below are short by what those calls did"
        );
    }
    let _ = writeln!(
        text,
        "  {:>8} {:>6} {:<15} {:>8} {:>8} {:>7} {:>10} {:>10} {:>12}",
        "pid", "device", "memory", "allocs", "frees", "failed", "peak", "live", "at exit"
    );
    for line in summary.lines() {
        let device = line
            .device
            .map_or("?".to_string(), |device| device.to_string());
        let _ = writeln!(
            text,
            "  {:>8} {device:>6} {:<15} {:>8} {:>8} {:>7} {:>10} {:>10} {:>12}",
            line.pid,
            line.memory_kind,
            line.allocations,
            line.frees,
            line.failed_allocations + line.failed_frees,
            bytes(line.peak_bytes),
            bytes(line.live_bytes),
            bytes(line.live_at_exit_bytes),
        );
    }
    let stacks = summary.top_stacks();
    if !stacks.is_empty() {
        let _ = writeln!(
            text,
            "  stacks that keep most (bytes never freed by a call):"
        );
    }
    for stack in stacks {
        let _ = writeln!(
            text,
            "  {:>10} in {} blocks, {} allocated: {}",
            bytes(stack.kept_bytes),
            stack.kept_blocks,
            bytes(stack.allocated_bytes),
            stack.folded
        );
    }
    text
}

/// Bytes for people, in powers of 1024.
pub fn bytes(value: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = value as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{value} B")
    } else {
        format!("{scaled:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spool::samples;

    fn row(op: &'static str, bytes: i64, seq: i64) -> AllocRow {
        AllocRow {
            op,
            bytes: Some(bytes),
            seq,
            alloc_stack_id: (op == "free").then_some(3),
            ..samples::one_of_each().alloc_events.remove(0)
        }
    }

    #[test]
    fn totals_by_hand() {
        let mut summary = Summary::default();
        summary.add(&row("alloc", 100, 1));
        summary.add(&row("alloc", 50, 2));
        summary.add(&row("free", 100, 3));
        summary.add(&row("alloc", 20, 4));
        // A failure of the driver and of the runtime above it are one.
        let failed = |seq, parent_seq| AllocRow {
            result: Some(2),
            counted: false,
            parent_seq,
            ..row("alloc", 0, seq)
        };
        summary.add(&failed(5, Some(6)));
        summary.add(&failed(6, None));
        let outer = AllocRow {
            result: Some(1),
            counted: false,
            ..row("free", 0, 7)
        };
        summary.add(&outer);
        summary.add(&AllocRow {
            parent_seq: Some(7),
            seq: 8,
            ..outer
        });
        summary.add(&AllocRow {
            implicit: true,
            api: "process_exit",
            result: None,
            ..row("free", 50, 9)
        });
        let line = &summary.lines()[0];
        assert_eq!(
            (
                line.allocations,
                line.frees,
                line.peak_bytes,
                line.live_bytes
            ),
            (3, 1, 150, 20)
        );
        assert_eq!((line.failed_allocations, line.failed_frees), (1, 1));
        assert_eq!((line.live_at_exit_bytes, line.live_at_exit_blocks), (50, 1));
        let stack = &summary.top_stacks()[0];
        assert_eq!(
            (stack.allocated_bytes, stack.kept_bytes, stack.kept_blocks),
            (170, 70, 2)
        );
    }

    #[test]
    fn bytes_for_people() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(8 << 30), "8.0 GiB");
    }
}
