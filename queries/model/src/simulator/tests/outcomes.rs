//! What a request would do, and what a rerun comes to.

use super::*;
use crate::oom::OomClass;

fn rerun(events: &[TraceEvent], settings: &str, card: Card) -> Rerun {
    let scenario = Scenario {
        device: 0,
        events,
        start: None,
        recorded: Settings::default(),
        settings: Settings::parse(settings).settings,
        card,
    };
    scenario.run().unwrap()
}

const CARD: Card = Card {
    capacity: Some(100 * MIB),
    others: 0,
};

/// By hand: of 20 MiB the first 5 are in use, of 30 MiB nothing is.
#[test]
fn what_a_request_would_do_now() {
    let mut simulator = simulator("", 60 * MIB);
    let first = alloc(&mut simulator, 5 * MIB);
    let base = simulator.address(first);
    let idle = alloc(&mut simulator, 30 * MIB);
    let idle_base = simulator.address(idle);
    simulator.free(idle).unwrap();
    let map = simulator.map();
    let ask = |bytes: u64, driver_free: Option<u64>| {
        let card = driver_free.map_or_else(Card::default, |free| {
            Card::with_free(free, simulator.reserved(), Some(60 * MIB))
        });
        let request = Request::new(bytes, 0);
        what_if(&map, 0, request, &Settings::default(), card).unwrap()
    };

    let answer = ask(6 * MIB - 1, None);
    let cached = |segment, address, found, rest| Placement::Cached {
        segment,
        address,
        found,
        rest,
    };
    assert_eq!(answer.rounded, 6 * MIB);
    assert_eq!(answer.block, Some(6 * MIB));
    assert_eq!(answer.released, 0);
    assert_eq!(answer.pool.size, PoolSize::Large);
    assert!(!answer.supposes_driver);
    assert_eq!(
        answer.placement,
        cached(base, base + 5 * MIB, 15 * MIB, 9 * MIB)
    );
    // A rest of 1 MiB is not split off.
    let answer = ask(29 * MIB, None);
    assert_eq!(answer.placement, cached(idle_base, idle_base, 30 * MIB, 0));
    assert_eq!(answer.block, Some(30 * MIB));

    let answer = ask(31 * MIB, None);
    assert_eq!(answer.placement, Placement::NewSegment { bytes: 32 * MIB });
    assert!(answer.supposes_driver);
    assert_eq!(answer.released, 0);

    // 10 MiB free and 30 from the flush.
    let answer = ask(39 * MIB, Some(10 * MIB));
    assert_eq!(answer.placement, Placement::NewSegment { bytes: 40 * MIB });
    assert_eq!(answer.released, 30 * MIB);
    assert!(!answer.supposes_driver);

    let answer = ask(41 * MIB, Some(10 * MIB));
    assert_eq!(answer.block, None);
    let Placement::Fails { failure, verdict } = answer.placement else {
        panic!("{answer:?}");
    };
    assert_eq!(
        (failure.tried, failure.device_free),
        (42 * MIB, Some(40 * MIB))
    );
    // 40 free and 15 stranded are more than 42.
    assert_eq!(verdict.class, OomClass::Fragmentation);
    let expandable = Settings::parse("expandable_segments:True").settings;
    let answer = what_if(
        &map,
        0,
        Request::new(41 * MIB, 0),
        &expandable,
        Card::default(),
    );
    let Placement::Mapped { bytes, .. } = answer.unwrap().placement else {
        panic!("not mapped");
    };
    assert_eq!(bytes, 60 * MIB);
}

/// By hand: two segments of 40 MiB lose every second of their blocks of 10, then 40 do not fit on
/// a card of 100. Chunks of 20 MiB would be half in use each, so expandable segments do not help.
#[test]
fn a_rerun_under_the_same_settings_is_the_same() {
    let mut simulator = Simulator::new(0, Settings::default(), CARD);
    simulator.start_recording();
    for block in [0, 1].map(|_| alloc(&mut simulator, 40 * MIB)) {
        simulator.free(block).unwrap();
    }
    let blocks: Vec<BlockId> = (0..8).map(|_| alloc(&mut simulator, 10 * MIB)).collect();
    for block in blocks.iter().step_by(2) {
        simulator.free(*block).unwrap();
    }
    assert!(simulator.alloc(Request::new(40 * MIB, 0)).is_err());
    let events = simulator.take_recording();

    let same = rerun(&events, "", CARD);
    assert_eq!(same.map, simulator.map());
    assert_eq!(&same.stats, simulator.stats());
    assert_eq!(same.ooms.len(), 1);
    assert!(!same.ooms[0].avoided && !same.avoids_all());
    assert_eq!(same.ooms[0].driver_free, Some(20 * MIB));
    assert_eq!(same.measures.stranded, 40 * MIB);
    assert_eq!(same.new_failures, 0);

    let expandable = rerun(&events, "expandable_segments:True", CARD);
    assert!(!expandable.avoids_all());
    assert_eq!(expandable.new_failures, 0);
}

/// By hand: 40 and 20 MiB are taken, the 40 freed but for 2 that a later request gets, and then 60
/// do not fit into the remaining 40. Of an expandable segment 20 of the 38 free ones go back, and
/// 100 are just enough.
#[test]
fn a_rerun_says_that_a_failure_would_have_been_avoided() {
    let mut simulator = Simulator::new(0, Settings::default(), CARD);
    simulator.start_recording();
    let low = alloc(&mut simulator, 40 * MIB);
    let high = alloc(&mut simulator, 20 * MIB);
    simulator.free(low).unwrap();
    let kept = alloc(&mut simulator, 2 * MIB);
    assert!(simulator.alloc(Request::new(60 * MIB, 0)).is_err());
    simulator.free(kept).unwrap();
    simulator.free(high).unwrap();
    let events = simulator.take_recording();

    assert!(!rerun(&events, "", CARD).avoids_all());
    let avoided = rerun(&events, "expandable_segments:True", CARD);
    assert!(avoided.avoids_all());
    assert_eq!(
        events[avoided.ooms[0].event].action,
        Action::Oom {
            device_free: 40 * MIB
        }
    );
    assert_eq!(avoided.stats.num_ooms, 0);
    assert_eq!(avoided.stats.num_alloc_retries, 1);
    assert_eq!(avoided.stats.reserved_bytes.all.peak, 100 * MIB);
    assert_eq!(avoided.stats.allocated_bytes.all.current, 0);
}

/// Who gave the segments back: the program where nothing follows that needed it.
#[test]
fn a_rerun_tells_flushes_from_empty_cache() {
    let mut simulator = Simulator::new(0, Settings::default(), CARD);
    simulator.start_recording();
    let block = alloc(&mut simulator, 60 * MIB);
    simulator.free(block).unwrap();
    // By the allocator, since 60 and 70 exceed the card.
    let block = alloc(&mut simulator, 70 * MIB);
    simulator.free(block).unwrap();
    // By the program.
    simulator.empty_cache();
    let block = alloc(&mut simulator, 20 * MIB);
    simulator.free(block).unwrap();
    simulator.empty_cache();
    let events = simulator.take_recording();
    let known = rerun(&events, "", CARD);
    assert_eq!(known.map, simulator.map());
    assert_eq!(&known.stats, simulator.stats());
    assert_eq!(known.counts.empty_caches, 2);
    assert_eq!(known.counts.unclear_releases, 0);
    // On a card of unknown size the first two cannot be told apart.
    let unknown = rerun(&events, "", Card::default());
    assert_eq!(unknown.counts.empty_caches, 1);
    assert_eq!(unknown.counts.unclear_releases, 2);
}
