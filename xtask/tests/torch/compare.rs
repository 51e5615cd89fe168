//! Differences between what the program says at a checkpoint and what the agent's rows say.
//!
//! A block that another stream may still use (`record_stream`) is given back for the program and not
//! yet for the allocator, which no probe tells: there the rows must know it as given back, and must
//! not claim to know what is active.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::torch::replay::{Segment, State};
use crate::torch::trace::{Rest, Row, Trace, is, number, required, text};
use crate::torch::truth::{self, Checkpoint};

/// Differences, a line each.
#[derive(Debug, Default)]
pub struct Differences {
    at: String,
    pub lines: Vec<String>,
}

/// How much was compared, so that a comparison of nothing is seen.
#[derive(Debug, Default)]
pub struct Compared {
    pub checkpoints: usize,
    pub blocks: usize,
    pub samples: usize,
    pub sample_segments: usize,
    /// Samples at a checkpoint with blocks that streams may still use.
    pub pending_samples: usize,
}

impl Differences {
    /// `ours` should be `theirs`.
    fn expect<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, ours: T, theirs: T) {
        if ours != theirs {
            let line = format!("{}: {what}: rows {ours:?}, program {theirs:?}", self.at);
            self.lines.push(line);
        }
    }

    /// The same where the rows may say that they do not know.
    fn expect_if_known(&mut self, what: &str, ours: Option<i64>, theirs: u64) {
        if ours.is_some() {
            self.expect(what, ours, Some(theirs as i64));
        }
    }
}

/// Compares one checkpoint. `raw_blocks` is how many blocks were asked for in a way that tells no
/// requested size, and `raw_bytes` their requested bytes.
pub fn checkpoint(
    truth: &Checkpoint,
    raw: (usize, u64),
    trace: &Trace,
    differences: &mut Differences,
    compared: &mut Compared,
) {
    let rest = trace.rest(truth.mark_bytes);
    let state = State::at(trace, rest.begins);
    for stats in &truth.devices {
        differences.at = format!("{} device {}", truth.name, stats.device);
        totals(truth, stats, raw, &state, differences);
    }
    differences.at.clone_from(&truth.name);
    map(truth, &state, differences, compared);
    samples(truth, raw, &rest, trace, differences, compared);
    compared.checkpoints += 1;
}

fn totals(
    truth: &Checkpoint,
    stats: &truth::Stats,
    (raw_blocks, raw_bytes): (usize, u64),
    state: &State,
    differences: &mut Differences,
) {
    let device = stats.device;
    let blocks = || state.blocks_of(device);
    let allocated: u64 = blocks().map(|block| block.bytes).sum();
    differences.expect("allocated", allocated, stats.allocated_bytes.current);
    differences.expect("blocks", blocks().count() as u64, stats.allocation.current);
    let reserved = state.reserved_bytes(device);
    if reserved.is_some() || !truth.is_partial {
        differences.expect("reserved", reserved, Some(stats.reserved_bytes.current));
    }
    if truth.pending() == 0 {
        // What is active is what is allocated, then.
        differences.expect("active", allocated, stats.active_bytes.current);
        let requested: u64 = blocks().filter_map(|block| block.requested).sum();
        let unknown = blocks().filter(|block| block.requested.is_none()).count();
        // Blocks without a requested size are of device 0.
        let (raw_blocks, raw_bytes) = if device == 0 {
            (raw_blocks, raw_bytes)
        } else {
            (0, 0)
        };
        differences.expect("blocks of unknown request", unknown, raw_blocks);
        let known = stats.requested_bytes.current - raw_bytes;
        differences.expect("requested", requested, known);
    }
    let count = |counts: &BTreeMap<u32, u64>| counts.get(&device).copied().unwrap_or(0);
    differences.expect("ooms", count(&state.ooms), stats.num_ooms);
    differences.expect("retries", count(&state.retries), stats.num_alloc_retries);
    if let Some((allocated, _)) = state.said.get(&device) {
        differences.expect(
            "allocated as the allocator said last",
            *allocated,
            stats.allocated_bytes.current,
        );
    }
}

/// One tile of a map: address, bytes, whether the program holds it.
type Tile = (u64, u64, bool);

/// What no probe tells apart: a block that a stream may still use is a gap, and gaps join.
fn joined(tiles: impl Iterator<Item = Tile>) -> Vec<Tile> {
    let mut joined: Vec<Tile> = Vec::new();
    for (address, bytes, is_held) in tiles {
        match joined.last_mut() {
            Some(last) if !last.2 && !is_held => last.1 += bytes,
            _ => joined.push((address, bytes, is_held)),
        }
    }
    joined
}

fn truth_tiles(segment: &truth::Segment) -> Vec<Tile> {
    let blocks = segment.blocks.iter();
    joined(blocks.map(|block| (block.address, block.bytes, block.is_allocated())))
}

/// The address map from events against the program's snapshot, block for block.
fn map(truth: &Checkpoint, state: &State, differences: &mut Differences, compared: &mut Compared) {
    let ours: BTreeMap<u64, Segment> = state
        .segments()
        .into_iter()
        .map(|segment| (segment.address, segment))
        .collect();
    let addresses: BTreeSet<u64> = ours.keys().copied().collect();
    let theirs: BTreeSet<u64> = truth.segments.iter().map(|s| s.address).collect();
    differences.expect("segments", addresses, theirs);
    for segment in &truth.segments {
        let Some(our) = ours.get(&segment.address) else {
            continue;
        };
        let what = format!("segment {:#x}", segment.address);
        differences.expect(
            &what,
            (our.bytes, our.expandable),
            (segment.bytes, segment.expandable),
        );
        let tiles = state.tiles(our);
        let plain = tiles
            .iter()
            .map(|(address, bytes, b)| (*address, *bytes, b.is_some()));
        differences.expect(
            &format!("{what} blocks"),
            joined(plain),
            truth_tiles(segment),
        );
        for block in segment.blocks.iter().filter(|block| block.is_allocated()) {
            let Some(our) = state.blocks.get(&block.address) else {
                continue;
            };
            let what = format!("block {:#x}", block.address);
            differences.expect(&format!("{what} bytes"), our.bytes, block.bytes);
            let requested = our.requested.map(|bytes| bytes as i64);
            let what_requested = format!("{what} requested");
            differences.expect_if_known(&what_requested, requested, block.requested_bytes);
            differences.expect(&format!("{what} device"), our.device, segment.device);
            if our.stream.is_some() {
                differences.expect(&format!("{what} stream"), our.stream, Some(segment.stream));
            }
            // Of an expandable one what was mapped may have grown on either side since.
            if !segment.expandable {
                let told = our.segment.map(|address| address as i64);
                differences.expect_if_known(&format!("{what} segment"), told, segment.address);
            }
            compared.blocks += 1;
        }
    }
}

/// The samples that were taken while the program was at rest.
fn samples(
    truth: &Checkpoint,
    raw: (usize, u64),
    rest: &Rest,
    trace: &Trace,
    differences: &mut Differences,
    compared: &mut Compared,
) {
    let is_at_rest = |row: &&Row| {
        let ts_ns = required(row, "ts_ns");
        ts_ns > rest.quiet_from_ns && ts_ns < rest.quiet_to_ns
    };
    let is_known = |row: &&Row| {
        let device = number(row, "device");
        let mut devices = truth.devices.iter();
        !truth.is_partial || devices.any(|stats| device == Some(i64::from(stats.device)))
    };
    for row in trace.samples.iter().filter(is_at_rest).filter(is_known) {
        sample(truth, raw, row, trace, differences, compared);
    }
}

fn sample(
    truth: &Checkpoint,
    raw: (usize, u64),
    sample: &Row,
    trace: &Trace,
    differences: &mut Differences,
    compared: &mut Compared,
) {
    let device = required(sample, "device") as u32;
    let Some(stats) = truth.devices.iter().find(|stats| stats.device == device) else {
        panic!("a sample of device {device}: {sample:?}");
    };
    let reason = text(sample, "reason");
    differences.at = format!("{} {reason} sample of device {device}", truth.name);
    sample_totals(truth, stats, raw, sample, differences);
    compared.samples += 1;
    compared.pending_samples += usize::from(truth.pending() > 0);
    let of_it = |row: &&Row| {
        number(row, "snapshot_id") == number(sample, "snapshot_id")
            && number(row, "device") == number(sample, "device")
    };
    let segments: Vec<&Row> = trace.segments.iter().filter(of_it).collect();
    sample_map(truth, device, &segments, differences);
    compared.sample_segments += segments.len();
}

/// The samples that are taken for a reason: one of device 0 at each request that failed, and the last
/// ones, which are of the last checkpoint.
pub fn at_events(
    last: &Checkpoint,
    trace: &Trace,
    differences: &mut Differences,
    compared: &mut Compared,
) {
    let of = |reason: &str| -> Vec<&Row> {
        let samples = trace.samples.iter();
        samples
            .filter(|row| text(row, "reason") == reason)
            .collect()
    };
    let (failures, ends) = (of("oom"), of("end"));
    let failures: Vec<&&Row> = failures
        .iter()
        .filter(|row| number(row, "device") == Some(0))
        .collect();
    differences.at = "failed requests".to_string();
    differences.expect("samples", failures.len(), last.failures.len());
    for (row, failure) in failures.iter().zip(&last.failures) {
        let exact = [
            ("allocated_bytes", failure.allocated_bytes),
            ("reserved_bytes", failure.reserved_bytes),
            ("retries", failure.retries),
            ("ooms", failure.ooms),
            ("device_free_bytes", failure.device_free_bytes),
        ];
        for (column, theirs) in exact {
            differences.expect(column, number(row, column), Some(theirs as i64));
        }
        // Rounded as the allocator rounds requests: to 512 bytes, or as the settings say.
        let tried = required(row, "tried_bytes");
        let rounds_up = (failure.tried_bytes..2 * failure.tried_bytes).contains(&tried);
        differences.expect("tried_bytes is the request, rounded up", rounds_up, true);
    }
    differences.at = "end".to_string();
    let devices = last
        .devices
        .iter()
        .filter(|stats| stats.allocation.peak > 0);
    differences.expect("samples", ends.len(), devices.count());
    for row in ends {
        sample(last, (0, 0), row, trace, differences, compared);
    }
}

fn sample_totals(
    truth: &Checkpoint,
    stats: &truth::Stats,
    (raw_blocks, _): (usize, u64),
    sample: &Row,
    differences: &mut Differences,
) {
    let has_pending = truth.pending() > 0;
    let told = |column| number(sample, column);
    let exact = [
        ("allocated_bytes", stats.allocated_bytes.current),
        ("reserved_bytes", stats.reserved_bytes.current),
        ("block_count", stats.allocation.current),
        ("retries", stats.num_alloc_retries),
        ("ooms", stats.num_ooms),
        ("peak_allocated_bytes", stats.allocated_bytes.peak),
        ("peak_reserved_bytes", stats.reserved_bytes.peak),
    ];
    for (column, theirs) in exact {
        if !(truth.is_partial && column.starts_with("peak_")) {
            differences.expect(column, told(column), Some(theirs as i64));
        }
    }
    let of_device = truth.segments.iter().filter(|s| s.device == stats.device);
    let segments = of_device.count() as u64;
    differences.expect(
        "segment_count",
        told("segment_count"),
        Some(segments as i64),
    );
    // Not known, or right: blocks that a stream may still use are seen by nobody.
    let active = told("active_bytes");
    differences.expect_if_known("active_bytes", active, stats.active_bytes.current);
    if !has_pending {
        let requested = told("requested_bytes");
        if raw_blocks == 0 || stats.device != 0 {
            let theirs = stats.requested_bytes.current as i64;
            differences.expect("requested_bytes", requested, Some(theirs));
        } else {
            differences.expect(
                "requested_bytes with blocks of unknown request",
                requested,
                None,
            );
        }
    }
    differences.expect("lossy", is(sample, "lossy"), false);
}

fn sample_map(truth: &Checkpoint, device: u32, rows: &[&Row], differences: &mut Differences) {
    let ours: BTreeMap<u64, &Row> = rows
        .iter()
        .map(|row| (required(row, "address"), *row))
        .collect();
    let theirs: BTreeMap<u64, &truth::Segment> = truth
        .segments
        .iter()
        .filter(|segment| segment.device == device)
        .map(|segment| (segment.address, segment))
        .collect();
    let addresses = |keys: Vec<&u64>| keys.into_iter().copied().collect::<Vec<u64>>();
    differences.expect(
        "segments",
        addresses(ours.keys().collect()),
        addresses(theirs.keys().collect()),
    );
    for (address, segment) in &theirs {
        let Some(row) = ours.get(address) else {
            continue;
        };
        let what = format!("segment {address:#x}");
        differences.expect(
            &what,
            (
                required(row, "bytes"),
                is(row, "expandable"),
                required(row, "allocated_bytes"),
            ),
            (segment.bytes, segment.expandable, segment.allocated_bytes),
        );
        if let Some(stream) = number(row, "stream") {
            differences.expect(&format!("{what} stream"), stream, segment.stream);
        }
        let kind = text(row, "segment_type");
        if !kind.is_empty() {
            differences.expect(&format!("{what} type"), kind, segment.kind.as_str());
        }
        if row.contains_key("pool") {
            let pool = match segment.pool {
                (0, 0) => "default".to_string(),
                (graph, of_program) => format!("({graph}, {of_program})"),
            };
            differences.expect(&format!("{what} pool"), text(row, "pool"), pool.as_str());
        }
        let active = number(row, "active_bytes");
        differences.expect_if_known(&format!("{what} active"), active, segment.active_bytes);
        let blocks = row["blocks"].as_array().unwrap();
        let tiles = blocks.iter().map(|block| {
            let field = |name: &str| block[name].as_u64().unwrap();
            let is_held = block["state"] == "active_allocated";
            (field("address"), field("bytes"), is_held)
        });
        differences.expect(
            &format!("{what} blocks"),
            joined(tiles),
            truth_tiles(segment),
        );
        let states = blocks.iter().filter_map(|block| block["state"].as_str());
        // The rows must not tell of what nobody saw.
        differences.expect(
            &format!("{what} pending blocks"),
            states
                .filter(|state| *state == "active_pending_free")
                .count(),
            0,
        );
        for block in blocks.iter().filter(|b| b["state"] == "active_allocated") {
            let address = block["address"].as_u64();
            let theirs = segment.blocks.iter().find(|t| Some(t.address) == address);
            let told = block.get("requested_bytes").and_then(Value::as_i64);
            if let Some(theirs) = theirs {
                let what = format!("block {address:?} requested");
                differences.expect_if_known(&what, told, theirs.requested_bytes);
            }
        }
    }
}
