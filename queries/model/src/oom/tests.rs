use super::*;

const MIB: f64 = (1u64 << 20) as f64;
const GIB: f64 = (1u64 << 30) as f64;

fn mib(amount: f64) -> u64 {
    (amount * MIB) as u64
}

fn gib(amount: f64) -> u64 {
    (amount * GIB) as u64
}

fn message(tried: u64, free: u64, unallocated: u64) -> OomFacts {
    OomFacts::from_message(tried, free, unallocated)
}

/// Failures as people reported them in public, with the cause that was found there.
#[test]
fn public_reports_get_the_class_that_was_found() {
    use OomClass::{Capacity, DriverRefused, ExternalProcess, Fragmentation};
    let unknown_cache = |tried, free| OomFacts {
        tried,
        driver_free: Some(free),
        ..OomFacts::default()
    };
    let reports = [
        (message(gib(1.96), gib(1.08), gib(1.83)), Fragmentation),
        (message(mib(138.0), mib(2.2), mib(612.0)), Fragmentation),
        (message(mib(222.0), mib(218.0), mib(1608.0)), Fragmentation),
        (message(mib(60.0), mib(8.4), mib(1055.0)), Fragmentation),
        (message(mib(524.0), mib(137.0), mib(121.0)), Capacity),
        (unknown_cache(gib(1.16), gib(1.17)), DriverRefused),
        (unknown_cache(mib(960.0), gib(15.5)), DriverRefused),
        (
            // The report gives the card and the process; what is free is less than was tried.
            OomFacts {
                tried: mib(20.0),
                driver_free: Some(mib(19.0)),
                card_total: Some(gib(39.6)),
                process_used: Some(gib(0.68)),
                ..OomFacts::default()
            },
            ExternalProcess,
        ),
    ];
    for (facts, class) in reports {
        assert_eq!(facts.classify().class, class, "{facts:?}");
    }
}

/// The fourth report: fragmentation, and live bytes had grown as well.
#[test]
fn growth_shows_beside_fragmentation() {
    let facts = OomFacts {
        growth: Some(Growth {
            bytes_per_request: 10_240.0,
            at_least: 4_096.0,
        }),
        ..message(mib(60.0), mib(8.4), mib(1055.0))
    };
    let verdict = facts.classify();
    assert_eq!(verdict.class, OomClass::Fragmentation);
    assert!(verdict.with_growth);
    assert!(verdict.evidence.contains(&Evidence::Growth {
        bytes_per_request: 10_240.0,
        at_least: 4_096.0
    }));
}

#[test]
fn what_is_not_within_reach_is_leak_burst_or_capacity() {
    let capacity = message(mib(524.0), mib(137.0), mib(121.0));
    let growth = |at_least| {
        Some(Growth {
            bytes_per_request: 1000.0,
            at_least,
        })
    };
    let leak = OomFacts {
        growth: growth(1.0),
        ..capacity
    };
    assert_eq!(leak.classify().class, OomClass::Leak);
    let no_leak = OomFacts {
        growth: growth(-1.0),
        ..capacity
    };
    assert_eq!(no_leak.classify().class, OomClass::Capacity);

    // 266 MiB were missing.
    let residence = |jump, queue| {
        Some(Residence {
            live_bytes_before: mib(1000.0),
            live_bytes_at_failure: mib(1000.0 + jump),
            queue_before: Some(3),
            queue_at_failure: Some(queue),
            prefill_before: None,
            prefill_at_failure: None,
        })
    };
    for (jump, queue, class) in [
        (266.0, 4, OomClass::Burst),
        (265.0, 4, OomClass::Capacity),
        (266.0, 3, OomClass::Capacity),
    ] {
        let facts = OomFacts {
            residence: residence(jump, queue),
            ..capacity
        };
        let verdict = facts.classify();
        assert_eq!(verdict.class, class, "{jump} {queue}");
        let jump = Evidence::Jump {
            jump: mib(jump),
            missing: mib(266.0),
        };
        assert!(verdict.evidence.contains(&jump));
    }
}

#[test]
fn a_number_that_is_missing_decides_nothing() {
    let facts = OomFacts {
        tried: 100,
        driver_free: Some(99),
        stranded: None,
        releasable: Some(0),
        ..OomFacts::default()
    };
    let verdict = facts.classify();
    assert_eq!(verdict.class, OomClass::Unknown);
    let told: Vec<String> = verdict.evidence.iter().map(|e| e.to_string()).collect();
    assert_eq!(
        told,
        [
            "not known: what other processes hold",
            "the driver had 99 bytes free, 100 were tried",
            "not known: what the allocator had reserved without use",
        ]
    );
    let nothing = OomFacts {
        tried: 100,
        ..OomFacts::default()
    };
    assert_eq!(nothing.classify().class, OomClass::Unknown);
}

/// 1.16 of 1.17 GiB and 218 of 222 MiB are so near that the other class is named.
#[test]
fn a_narrow_decision_says_so() {
    let refused = message(gib(1.16), gib(1.17), gib(0.5)).classify();
    assert_eq!(refused.near[0].class, OomClass::Fragmentation);
    assert_eq!(refused.near[0].margin, gib(1.17) - gib(1.16));
    assert_eq!(refused.margin, Some(gib(1.17) - gib(1.16)));

    let fragmented = message(mib(222.0), mib(218.0), mib(1608.0)).classify();
    let near = Near {
        class: OomClass::DriverRefused,
        margin: mib(4.0),
    };
    assert_eq!(fragmented.near, [near]);
    assert_eq!(fragmented.margin, Some(mib(1604.0)));

    assert_eq!(
        message(mib(138.0), mib(2.2), mib(612.0)).classify().near,
        []
    );
}

#[test]
fn half_the_card_is_not_most_of_it() {
    let facts = |others| OomFacts {
        card_total: Some(1000),
        others_used: Some(others),
        ..message(100, 10, 0)
    };
    assert_eq!(facts(501).classify().class, OomClass::ExternalProcess);
    let narrow = facts(500).classify();
    assert_eq!(narrow.class, OomClass::Capacity);
    assert_eq!(narrow.near[0].class, OomClass::ExternalProcess);
    assert_eq!(facts(300).classify().near, []);
}
