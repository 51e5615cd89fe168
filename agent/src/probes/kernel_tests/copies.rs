//! Copies of stacks: with their record, without room, and without a record.

use std::hint::black_box;
use std::time::Instant;

use super::*;
use crate::probes::channel::Taking;

const TAKING: Taking = Taking {
    stack_bytes: 16 << 10,
    call_stacks: 1_000_000,
    framework_stacks: 3,
};

fn bed(ring_bytes: u32, stack_ring_bytes: u32, taking: Taking) -> Option<Bed> {
    let sizes = Sizes {
        ring_bytes,
        stack_ring_bytes,
        threads: 100,
    };
    let mut bed = Bed::of(sizes)?;
    bed.channel.set(taking).unwrap();
    let cookie = Cookie {
        stack: true,
        ..plain("cuMemAlloc_v2")
    };
    bed.attach(gives as Probed, cookie, true);
    Some(bed)
}

/// What came: number, whether its stack was copied, bytes of its return addresses.
fn records(bed: &mut Bed) -> Vec<(u64, bool, usize)> {
    let mut records = Vec::new();
    bed.channel.ring.read(usize::MAX, |bytes| {
        let decoded = record::decode(bytes).unwrap();
        if matches!(decoded.event, Event::Call(_) | Event::Framework(_)) {
            let copied = decoded.copied;
            records.push((decoded.event.seq(), copied, decoded.frames.len()));
        }
    });
    bed.channel.release(bed.channel.ring.position());
    records
}

#[test]
fn a_copy_comes_with_its_record() {
    let _turn = turn();
    let Some(mut bed) = bed(RING, RING, TAKING) else {
        return;
    };
    let marks = black_box([0x5eed_1234_5678_9abc_u64; 8]);
    for size in 0..3 {
        gives(std::ptr::null(), size);
    }
    let records = records(&mut bed);
    assert_eq!(records.len(), 3);
    // In any order.
    for index in [2, 0, 1] {
        let (seq, is_copied, frames) = records[index];
        assert!(is_copied && frames == 8);
        let copied = bed.channel.copies.find(seq).unwrap();
        let local = &raw const marks as u64;
        let place = (local - copied.sp) as usize;
        let bytes: Vec<u8> = marks.iter().flat_map(|mark| mark.to_ne_bytes()).collect();
        assert_eq!(copied.bytes[place..place + 64], bytes);
        assert!(bed.channel.copies.find(seq).is_none(), "once");
    }
    assert_eq!(bed.total_lost(), 0);
}

#[test]
fn a_copy_without_room_costs_no_event() {
    let _turn = turn();
    let Some(mut bed) = bed(RING, 4096, TAKING) else {
        return;
    };
    for _ in 0..10 {
        gives(std::ptr::null(), 1);
    }
    let records = records(&mut bed);
    assert_eq!(records.len(), 10);
    assert!(
        records
            .iter()
            .all(|(_, copied, frames)| !copied && *frames >= 8)
    );
    assert_eq!(bed.lost(Loss::StackNotCopied), 10);
    assert_eq!(bed.total_lost(), 10);
}

/// Their records found the ring full: they are nobody's, and must not keep the room for ever.
#[test]
fn copies_without_a_record_are_given_up() {
    let _turn = turn();
    let Some(mut bed) = bed(4096, RING, TAKING) else {
        return;
    };
    for _ in 0..1000 {
        gives(std::ptr::null(), 1);
    }
    assert!(bed.lost(Loss::RingFull) > 900 && bed.lost(Loss::StackNotCopied) > 0);
    for (seq, is_copied, _) in records(&mut bed) {
        assert!(is_copied && bed.channel.copies.find(seq).is_some());
    }
    for _ in 0..4 {
        bed.channel.copies.end_turn(true);
    }
    bed.channel.release(bed.channel.ring.position());
    gives(std::ptr::null(), 1);
    let after = records(&mut bed);
    assert_eq!(after.len(), 1);
    assert!(after[0].1 && bed.channel.copies.find(after[0].0).is_some());
}

#[test]
fn a_framework_has_so_many_copies_a_second() {
    let _turn = turn();
    let Some(mut bed) = bed(RING, RING, TAKING) else {
        return;
    };
    bed.attach_framework(reports, What::Report);
    let started = Instant::now();
    for _ in 0..100 {
        reports(0x1000, 512, 512, 512, 1);
    }
    // The kernel side's seconds may begin anew meanwhile.
    let seconds = 2 + (started.elapsed().as_nanos() >> 30) as usize;
    let records = records(&mut bed);
    assert_eq!(records.len(), 100);
    let copied = records.iter().filter(|(_, copied, _)| *copied).count();
    assert!((3..=3 * seconds).contains(&copied), "{copied}");
    assert!(records.iter().all(|(_, _, frames)| *frames >= 8));
    assert_eq!(bed.total_lost(), 0);
}

#[test]
fn nothing_is_copied_where_nothing_is_asked_for() {
    let _turn = turn();
    let none = Taking {
        stack_bytes: 0,
        ..TAKING
    };
    let Some(mut bed) = bed(RING, RING, none) else {
        return;
    };
    gives(std::ptr::null(), 1);
    assert!(matches!(records(&mut bed)[..], [(_, false, frames)] if frames >= 8));
    assert_eq!(bed.total_lost(), 0);
}
