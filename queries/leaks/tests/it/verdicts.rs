use vramscope_leaks::{Detector, Settings, StackSlot, Tier, Verdict, analyse};

use crate::host::{Host, SLOTS};

fn verdict(stack: Vec<StackSlot>, host: &Host) -> Verdict {
    let process = host.process(vec![("it", stack)]);
    let mut report = analyse(&Settings::default(), &process);
    report.verdicts.remove(0)
}

#[test]
fn leaks_are_confirmed_with_their_rate() {
    for seed in 0..5 {
        for per_request in [10e3, 100e3] {
            let mut host = Host::new(seed);
            let stack = host.stack(0.002, |_, n, running| 1e8 + per_request * n + 1e6 * running);
            let found = verdict(stack, &host);
            assert_eq!(
                found.tier,
                Tier::Confirmed,
                "{seed} {per_request} {}",
                found.statistics
            );
            let rate = found.per_request.unwrap();
            assert!(
                rate.low <= per_request && per_request <= rate.high * 1.01,
                "{rate:?}"
            );
            assert!((rate.value / per_request - 1.0).abs() < 0.1, "{rate:?}");
            assert!(found.first_seen <= found.confirmed_at);
        }
    }
}

#[test]
fn leaks_by_the_hour_are_confirmed() {
    let mut host = Host::new(7);
    // 40 MB an hour, by a timer.
    let stack = host.stack(0.002, |slot, _, running| {
        1e8 + 40e6 / 6.0 * slot + 1e6 * running
    });
    let found = verdict(stack, &host);
    assert_eq!(found.tier, Tier::Confirmed, "{}", found.statistics);
    let rate = found.per_hour.unwrap();
    assert!((rate.value / 40e6 - 1.0).abs() < 0.1, "{rate:?}");
}

/// What a detector must not take for a leak.
#[test]
fn legitimate_stacks_are_never_confirmed() {
    type Shape = fn(f64, f64, f64) -> f64;
    let shapes: [(&str, Shape); 8] = [
        ("weights", |_, _, _| 4e9),
        ("state of each request", |_, _, running| 3e6 * running),
        ("a cache by requests", |_, n, _| {
            2e9 * (1.0 - (-n / 5000.0).exp())
        }),
        ("a cache by time", |slot, _, _| {
            2e9 * (1.0 - (-slot / 20.0).exp())
        }),
        ("a straight fill of four hours", |slot, _, _| {
            2e9 * (slot / 24.0).min(1.0)
        }),
        ("the logarithm", |_, n, _| 5e7 * (1.0 + n / 1000.0).ln()),
        ("a sawtooth", |slot, _, _| 3e8 * (slot / 17.0).fract()),
        (
            "an optimizer's state",
            |slot, _, _| if slot > 9.0 { 1e9 } else { 0.0 },
        ),
    ];
    for seed in 0..5 {
        for (name, shape) in shapes {
            let mut host = Host::new(seed);
            let stack = host.stack(0.002, shape);
            let found = verdict(stack, &host);
            assert!(found.confirmed_at.is_none(), "{name}: {}", found.statistics);
        }
    }
}

#[test]
fn a_leak_of_a_megabyte_is_a_suspect_within_an_hour() {
    let mut host = Host::new(3);
    let stack = host.stack(0.0, |_, n, _| 1e6 * n);
    let found = verdict(stack, &host);
    // Slot 6 begins an hour after the start.
    assert!(found.first_seen.unwrap() <= 6, "{:?}", found.first_seen);
    assert_eq!(found.tier, Tier::Confirmed);
}

#[test]
fn without_traffic_growth_is_a_suspect_at_most() {
    let mut host = Host::new(4);
    let stack = host.stack(0.002, |slot, _, _| 1e8 + 5e6 * slot);
    host.loads.clear();
    let found = verdict(stack, &host);
    assert_eq!(found.tier, Tier::Suspect);
    assert!(found.per_request.is_none());
    assert!((found.per_hour.unwrap().value / 30e6 - 1.0).abs() < 0.1);
    assert!(found.reason.unwrap().contains("no traffic"));
}

#[test]
fn what_does_not_keep_anything_is_no_leak() {
    let mut host = Host::new(5);
    let mut stack = host.stack(0.002, |_, n, _| 1e8 + 50e3 * n);
    for slot in &mut stack {
        slot.oldest_age_ns = Some(1_200_000_000_000);
    }
    let found = verdict(stack, &host);
    assert_eq!(found.tier, Tier::Clear);
}

#[test]
fn a_fill_that_ends_is_ambiguous_afterwards() {
    let mut host = Host::new(6);
    // Straight for 24 hours: no byte series tells it from a leak until then.
    let stack = host.stack(0.0, |slot, _, _| 4e9 * (slot / 144.0).min(1.0));
    let found = verdict(stack, &host);
    assert_eq!(found.tier, Tier::Ambiguous, "{}", found.statistics);
    assert!(found.reason.unwrap().contains("has stopped"));
}

#[test]
fn rest_shows_what_noise_hides() {
    let mut host = Host::new(8);
    // State of requests that trembles so much that the growth drowns; at rest it is plain.
    let mut stack = host.stack(0.4, |_, n, running| 5e3 * n + 4e7 * running);
    let quiet: Vec<usize> = (10..SLOTS - 1).step_by(12).collect();
    for slot in &quiet {
        stack[*slot].quiet_bytes = Some((5e3 * host.completed[*slot + 1]) as i64);
    }
    let mut process = host.process(vec![("it", stack)]);
    process.quiet_slots = quiet.iter().map(|slot| *slot as i64).collect();
    let found = &analyse(&Settings::default(), &process).verdicts[0];
    assert_eq!(
        (found.tier, found.detector),
        (Tier::Suspect, Detector::Quiesce)
    );
    assert!((found.per_request.unwrap().value / 5e3 - 1.0).abs() < 0.01);
}

#[test]
fn too_little_says_what_is_missing() {
    let mut host = Host::new(9);
    host.loads.truncate(12);
    host.completed.truncate(13);
    let mut stack = Host::new(9).stack(0.0, |_, n, _| 1e3 * n);
    stack.truncate(12);
    let found = verdict(stack, &host);
    assert_eq!(found.tier, Tier::Insufficient);
    let reason = found.reason.unwrap();
    assert!(
        reason.contains("of 2000 requests") && reason.contains("60 of 360 minutes"),
        "{reason}"
    );
}
