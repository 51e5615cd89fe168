//! Blocks of a framework's allocator: histories calculated by hand from what PyTorch's allocator
//! does.

use super::*;
use crate::ledger::framework::{Moment, Reason, Totals};
use crate::probes::framework::{Told, What as ToldWhat};

const MIB: u64 = 1 << 20;
const BASE: u64 = 0x7000_0000_0000;

fn told(what: ToldWhat, seq: u64, address: u64, bytes: i64, totals: Option<(u64, u64)>) -> Told {
    Told {
        what,
        tgid: PID,
        tid: 4_000_001,
        seq,
        at_ns: seq * 10,
        address,
        bytes,
        totals,
        device: (what != ToldWhat::Free).then_some(1),
        asked: None,
        announced: false,
        stack: Stack::default(),
    }
}

/// A block as both sources tell of it: requested bytes on stream 3.
fn block(seq: u64, address: u64, bytes: u64, requested: u64, totals: (u64, u64)) -> Told {
    Told {
        asked: Some((requested, 3)),
        announced: true,
        ..told(ToldWhat::Report, seq, address, bytes as i64, Some(totals))
    }
}

fn taken(seq: u64, address: u64, bytes: u64, totals: (u64, u64)) -> Told {
    told(
        ToldWhat::Report,
        seq,
        address,
        -(bytes as i64),
        Some(totals),
    )
}

fn tell(ledger: &mut Ledger, told: &Told) -> Vec<AllocRow> {
    rows_of(ledger, |ledger, desk| {
        ledger.framework(told, told.stack, desk);
    })
}

fn driver(ledger: &mut Ledger, seq: u64, address: u64, bytes: u64, result: i32) -> Vec<AllocRow> {
    let out = (result == 0).then_some(address);
    apply(
        ledger,
        &call("cuMemAlloc_v2", seq, [0, bytes], out, result),
        false,
    )
}

fn gives_back(ledger: &mut Ledger, seq: u64, address: u64) -> Vec<AllocRow> {
    apply(
        ledger,
        &call("cuMemFree_v2", seq, [address, 0], None, 0),
        false,
    )
}

fn totals(ledger: &Ledger) -> Totals {
    let heap = ledger.get(PID).unwrap().heap.as_ref().unwrap();
    heap.totals(1)
}

fn settings(ledger: &mut Ledger, text: &str) {
    ledger.meet(PID, 0, None).program.allocator_settings = Some(text.into());
}

/// The books as a restart rebuilds them from the journal.
fn restarted(ledger: &mut Ledger) -> Ledger {
    let changes = ledger.take_changes();
    let bytes = postcard::to_stdvec(&changes).unwrap();
    let changes: Vec<Change> = postcard::from_bytes(&bytes).unwrap();
    let mut again = new_ledger();
    changes.iter().for_each(|change| again.restore(change));
    again.restored();
    again
}

#[test]
fn a_block_lies_in_its_segment_and_counts_no_byte_of_the_card() {
    let mut ledger = new_ledger();
    driver(&mut ledger, 1, BASE, 20 * MIB, 0);
    let rows = tell(
        &mut ledger,
        &block(2, BASE, 5 * MIB, 5 * MIB - 7, (5 * MIB, 20 * MIB)),
    );
    let row = &rows[0];
    assert_eq!(
        (row.layer, row.source, row.op, row.memory_kind, row.counted),
        ("framework", "usdt", "alloc", Some("framework_block"), true)
    );
    assert_eq!(
        (row.bytes, row.requested_bytes, row.stream),
        (Some(5 << 20), Some((5 << 20) - 7), Some(3))
    );
    assert_eq!(row.segment_address, Some(BASE as i64));
    assert_eq!(row.device, Some(1));
    let rollup = &ledger.get(PID).unwrap().rollup;
    assert_eq!(rollup.live(Class::Physical), (20 * MIB, 1));
    assert_eq!(rollup.live(Class::SubAllocated), (5 * MIB, 1));

    let rows = tell(&mut ledger, &taken(3, BASE, 5 * MIB, (0, 20 * MIB)));
    assert_eq!(
        (rows[0].op, rows[0].alloc_seq, rows[0].lifetime_ns),
        ("free", Some(2), Some(10))
    );
    assert_eq!(
        rows[0].requested_bytes,
        Some((5 << 20) - 7),
        "as its beginning said"
    );
    assert!(totals(&ledger).is_whole() && !totals(&ledger).strayed);
}

/// What was there before is unknown, and the allocator's own totals are right all the same.
#[test]
fn totals_are_the_allocators_own() {
    let mut ledger = new_ledger();
    // It says 30 MiB in use of 100, of which nothing was seen.
    tell(
        &mut ledger,
        &block(5, BASE, MIB, MIB, (30 * MIB, 100 * MIB)),
    );
    assert_eq!(totals(&ledger).allocated(), Some(30 * MIB));
    assert_eq!(totals(&ledger).reserved(), Some(100 * MIB));
    assert!(totals(&ledger).strayed);
    // One of the old blocks goes.
    let rows = tell(
        &mut ledger,
        &taken(6, BASE + 64 * MIB, 10 * MIB, (20 * MIB, 100 * MIB)),
    );
    assert_eq!(
        (rows[0].counted, rows[0].alloc_seq, rows[0].bytes),
        (false, None, Some(10 << 20))
    );
    assert_eq!(totals(&ledger).allocated(), Some(20 * MIB));
    assert_eq!(totals(&ledger).peak_allocated, 30 * MIB);
}

#[test]
fn a_lost_end_is_found_out_by_whoever_comes_next() {
    let mut ledger = new_ledger();
    driver(&mut ledger, 1, BASE, 20 * MIB, 0);
    tell(&mut ledger, &block(2, BASE, MIB, MIB, (MIB, 20 * MIB)));
    tell(
        &mut ledger,
        &block(3, BASE + MIB, MIB, MIB, (2 * MIB, 20 * MIB)),
    );
    // Both were freed and joined, and half of the second is handed out again.
    let rows = tell(
        &mut ledger,
        &block(4, BASE + MIB / 2, MIB, MIB, (MIB, 20 * MIB)),
    );
    let ends: Vec<_> = rows
        .iter()
        .map(|r| (r.api, r.op, r.implicit, r.alloc_seq))
        .collect();
    assert_eq!(
        ends,
        [
            ("address_reuse", "free", true, Some(2)),
            ("address_reuse", "free", true, Some(3)),
            ("pytorch:malloc", "alloc", false, None)
        ]
    );
    // The segment goes, and with it what lies in it; first the block, whose memory it is.
    let rows = gives_back(&mut ledger, 5, BASE);
    let ends: Vec<_> = rows.iter().map(|r| (r.layer, r.implicit)).collect();
    assert!(ends.contains(&("framework", true)), "{ends:?}");
    assert_eq!(totals(&ledger).blocks, 0);
    assert_eq!(totals(&ledger).segments_bytes, 0);
}

/// Reserved addresses are mapped piece by piece: a contiguous range is one segment, and two
/// reservations side by side are two.
#[test]
fn expandable_segments_are_contiguous_ranges() {
    let mut ledger = new_ledger();
    let piece = 20 * MIB;
    let vmm = |symbol: &str, seq: u64, args: [u64; 4], out| {
        let mut call = call(symbol, seq, [args[0], args[1]], out, 0);
        call.args[2..4].copy_from_slice(&args[2..4]);
        call.extra = Some([1, 1 | 1 << 32, 0, 0]);
        call
    };
    let mut seq = 0;
    let mut next = || {
        seq += 1;
        seq
    };
    for index in 0..2 {
        let address = BASE + index * 3 * piece;
        let call = vmm(
            "cuMemAddressReserve",
            next(),
            [0, 3 * piece, 0, 0],
            Some(address),
        );
        apply(&mut ledger, &call, false);
    }
    // All of the first reservation, and the beginning of the second.
    for index in 0..4 {
        let handle = 100 + index;
        let create = vmm("cuMemCreate", next(), [0, piece, 0, 0], Some(handle));
        apply(&mut ledger, &create, false);
        let map = vmm(
            "cuMemMap",
            next(),
            [BASE + index * piece, piece, 0, handle],
            None,
        );
        apply(&mut ledger, &map, false);
    }
    let whole = 4 * piece;
    let one = tell(
        &mut ledger,
        &block(
            next(),
            BASE + piece,
            30 * MIB,
            30 * MIB,
            (30 * MIB, 3 * piece),
        ),
    );
    let two = tell(
        &mut ledger,
        &block(next(), BASE + 3 * piece, MIB, MIB, (31 * MIB, whole)),
    );
    assert_eq!(one[0].segment_address, Some(BASE as i64));
    assert_eq!(two[0].segment_address, Some((BASE + 3 * piece) as i64));
    assert_eq!(totals(&ledger).reserved(), Some(whole));
    assert!(totals(&ledger).is_whole() && !totals(&ledger).strayed);
    // The first piece is unmapped: what is left of the first reservation begins later.
    let unmap = vmm("cuMemUnmap", next(), [BASE, piece, 0, 0], None);
    apply(&mut ledger, &unmap, false);
    let three = tell(
        &mut ledger,
        &block(
            next(),
            BASE + piece + 30 * MIB,
            MIB,
            MIB,
            (32 * MIB, whole - piece),
        ),
    );
    assert_eq!(three[0].segment_address, Some((BASE + piece) as i64));
    assert!(totals(&ledger).is_whole());
    let heap = ledger.get(PID).unwrap().heap.as_ref().unwrap();
    let ranges: Vec<_> = heap
        .segments()
        .iter()
        .map(|s| (s.address, s.bytes))
        .collect();
    assert_eq!(
        ranges,
        [(BASE + piece, 2 * piece), (BASE + 3 * piece, piece)]
    );
}

/// `num_alloc_retries` of PyTorch: the attempt after it gave back all it could. By hand from
/// `DeviceCachingAllocator::malloc`.
#[test]
fn retries_are_counted_as_the_allocator_counts_them() {
    let figures = |ledger: &Ledger| (totals(ledger).retries, totals(ledger).ooms);
    let block_at = |seq, address| block(seq, address, 20 * MIB, 20 * MIB, (20 * MIB, 20 * MIB));
    let oom = |seq| told(ToldWhat::Oom, seq, 0, 64 << 20, Some((20 * MIB, 20 * MIB)));

    let mut ledger = new_ledger();
    driver(&mut ledger, 1, BASE, 20 * MIB, 0);
    tell(&mut ledger, &block_at(2, BASE));
    assert_eq!(figures(&ledger), (0, 0));
    // The driver had none, cached memory went back, then it had some: one retry.
    driver(&mut ledger, 3, 0, 20 * MIB, 2);
    driver(&mut ledger, 4, BASE + 64 * MIB, 20 * MIB, 0);
    tell(&mut ledger, &block_at(5, BASE + 64 * MIB));
    assert_eq!(figures(&ledger), (1, 0));
    // Twice none, and an error: one retry, one OOM; the card's free bytes as the program asked.
    driver(&mut ledger, 6, 0, 64 * MIB, 2);
    driver(&mut ledger, 7, 0, 64 * MIB, 2);
    let ask = call("cuMemGetInfo_v2", 8, [0, 0], Some(7 * MIB), 0);
    assert!(apply(&mut ledger, &ask, false).is_empty());
    let rows = tell(&mut ledger, &oom(9));
    assert_eq!(
        (rows[0].op, rows[0].requested_bytes, rows[0].bytes),
        ("oom", Some(64 << 20), Some(0))
    );
    assert_eq!(
        (rows[0].result, rows[0].device_free_bytes, rows[0].counted),
        (None, Some(7 << 20), false)
    );
    assert_eq!(figures(&ledger), (2, 1));
    // The program's own limit: no driver was asked, and all was given back in vain.
    tell(&mut ledger, &oom(10));
    assert_eq!(figures(&ledger), (3, 2));
    // While a graph is captured nothing is given back: one refusal, no retry.
    driver(&mut ledger, 11, 0, 64 * MIB, 2);
    tell(&mut ledger, &oom(12));
    assert_eq!(figures(&ledger), (3, 3));
}

/// With `max_split_size` there is a step between: large blocks of the request's stream go back, and
/// that is no retry.
#[test]
fn giving_back_large_blocks_is_no_retry() {
    for (stream_of_freed, freed_bytes, retries) in [
        (3, 128 * MIB, 0),
        // Another stream's, or too little, is what the last step gives back.
        (4, 128 * MIB, 1),
        (3, 2 * MIB, 1),
    ] {
        let mut ledger = new_ledger();
        settings(&mut ledger, "max_split_size_mb:64");
        driver(&mut ledger, 1, BASE, freed_bytes, 0);
        let mut old = block(
            2,
            BASE,
            freed_bytes,
            freed_bytes,
            (freed_bytes, freed_bytes),
        );
        old.asked = Some((freed_bytes, stream_of_freed));
        tell(&mut ledger, &old);
        tell(&mut ledger, &taken(3, BASE, freed_bytes, (0, freed_bytes)));
        driver(&mut ledger, 4, 0, 100 * MIB, 2);
        gives_back(&mut ledger, 5, BASE);
        driver(&mut ledger, 6, BASE + 512 * MIB, 100 * MIB, 0);
        let new = block(
            7,
            BASE + 512 * MIB,
            100 * MIB,
            100 * MIB,
            (100 * MIB, 100 * MIB),
        );
        tell(&mut ledger, &new);
        assert_eq!(
            totals(&ledger).retries,
            retries,
            "{stream_of_freed} {freed_bytes}"
        );
    }
}

/// 5 MiB in use at the beginning and 2 MiB in the middle of a segment of 20, another one empty.
#[test]
fn a_sample_is_the_map_with_its_measures() {
    let mut ledger = new_ledger();
    driver(&mut ledger, 1, BASE, 20 * MIB, 0);
    driver(&mut ledger, 2, BASE + 64 * MIB, 20 * MIB, 0);
    tell(
        &mut ledger,
        &block(3, BASE, 5 * MIB, 5 * MIB - 1, (5 * MIB, 40 * MIB)),
    );
    tell(
        &mut ledger,
        &block(4, BASE + 8 * MIB, 2 * MIB, 2 * MIB, (7 * MIB, 40 * MIB)),
    );
    tell(
        &mut ledger,
        &block(5, BASE + 64 * MIB, 4 * MIB, 4 * MIB, (11 * MIB, 40 * MIB)),
    );
    tell(
        &mut ledger,
        &taken(6, BASE + 64 * MIB, 4 * MIB, (7 * MIB, 40 * MIB)),
    );
    let moment = Moment {
        ts_ns: 1,
        reason: Reason::Window,
        oom: None,
        blocks: 100,
    };
    let card = |_: &Process, _: Option<i32>| None;
    let sampled = ledger.sample(PID, moment, &WallClock::new(), &card);
    let sample = &sampled.samples[0];
    assert_eq!(
        (sample.allocated_bytes, sample.reserved_bytes),
        (Some(7 << 20), Some(40 << 20))
    );
    assert_eq!(sample.requested_bytes, Some((7 << 20) - 1));
    assert_eq!(sample.active_bytes, None, "pending frees are not seen");
    assert_eq!(
        (sample.releasable_bytes, sample.stranded_bytes),
        (Some(20 << 20), Some(13 << 20))
    );
    assert_eq!(sample.largest_free_block_bytes, Some(20 << 20));
    assert_eq!(
        (sample.peak_allocated_bytes, sample.lossy),
        (Some(11 << 20), true),
        "two segments and one block of them: the first report strayed"
    );
    let tiles: Vec<Vec<_>> = sampled
        .segments
        .iter()
        .map(|segment| {
            let blocks = segment.blocks.iter();
            blocks.map(|b| (b.bytes >> 20, b.state)).collect()
        })
        .collect();
    let (held, free) = ("active_allocated", "inactive");
    assert_eq!(
        tiles,
        [
            vec![(5, held), (3, free), (2, held), (10, free)],
            vec![(20, free)]
        ]
    );
    assert!(
        sampled
            .segments
            .iter()
            .all(|s| s.of.snapshot_id == sample.of.snapshot_id)
    );
    // Too many for a map: the totals are there, the rest is not known.
    let cut = ledger.sample(
        PID,
        Moment {
            blocks: 3,
            ..moment
        },
        &WallClock::new(),
        &card,
    );
    assert!(cut.is_cut && cut.segments.is_empty());
    assert_eq!(cut.samples[0].allocated_bytes, Some(7 << 20));
    assert_eq!(cut.samples[0].stranded_bytes, None);
}

#[test]
fn an_exit_ends_blocks_piece_by_piece_and_a_restart_knows_them() {
    let mut ledger = new_ledger();
    driver(&mut ledger, 1, BASE, 20 * MIB, 0);
    for index in 0..10 {
        let at = BASE + index * MIB;
        tell(
            &mut ledger,
            &block(2 + index, at, MIB, MIB, ((index + 1) * MIB, 20 * MIB)),
        );
    }
    assert_eq!(ledger.live(), 11);
    let mut ledger = restarted(&mut ledger);
    assert_eq!((ledger.live(), totals(&ledger).blocks), (11, 10));
    assert!(totals(&ledger).is_whole());
    ledger.exiting(PID, 50, 500);
    let rows = rows_of(&mut ledger, |ledger, desk| {
        assert!(!ledger.end_some(PID, 600, 4, desk));
        assert!(!ledger.end_some(PID, 600, 4, desk));
        assert!(ledger.end_some(PID, 600, 4, desk));
    });
    assert_eq!(rows.len(), 11);
    assert!(
        rows.iter()
            .all(|row| row.implicit && row.api == "process_exit" && row.counted)
    );
    assert_eq!(
        rows.iter().filter(|row| row.layer == "framework").count(),
        10
    );
    assert_eq!(live(&ledger), (0, 0));
}
