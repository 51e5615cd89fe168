//! What whole runs guarantee. Expectations come from sums over the rows themselves, from the
//! requests in `traffic`, and from what was asked to be planted.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use vramscope_leaksim::{
    Ambiguous, Class, Condition, Kind, Planted, REPORT_SEEDS, Run, Simulator, Window,
};

fn simulator() -> Simulator {
    Simulator::new(None).unwrap()
}

fn short(kind: Kind, bytes_per_request: f64) -> Condition {
    Condition {
        hours: 24,
        ..Condition::leaky(kind, bytes_per_request)
    }
}

/// Rows of each stack of each process, in order of time.
fn by_stack(run: &Run) -> BTreeMap<(usize, usize), Vec<Window>> {
    let mut stacks: BTreeMap<_, Vec<Window>> = BTreeMap::new();
    for window in &run.windows {
        stacks
            .entry((window.process, window.stack))
            .or_default()
            .push(*window);
    }
    stacks
}

/// The last row at or before `until`, of a stack given by id.
fn live_at(run: &Run, stack_id: i64, process: usize, until: f64) -> i64 {
    let mut rows = run.windows.iter().filter(|window| {
        run.stacks[window.stack].stack_id == stack_id
            && window.process == process
            && window.start < until
    });
    rows.next_back().map_or(0, |window| window.live_bytes)
}

#[test]
fn live_bytes_are_what_came_less_what_went() {
    let simulator = simulator();
    for seed in [1, 2, 3, REPORT_SEEDS.start + 1] {
        let run = simulator.run(seed, &short(Kind::Deploy, 50_000.0));
        assert!(run.processes.len() > 1, "a deploy starts another process");
        for ((process, stack), rows) in by_stack(&run) {
            let (mut bytes, mut count, mut before) = (0, 0, 0);
            for row in &rows {
                bytes += row.alloc_bytes - row.free_bytes;
                count += row.alloc_count - row.free_count;
                let what = format!("seed {seed}, process {process}, stack {stack}: {row:?}");
                assert_eq!((row.live_bytes, row.live_count), (bytes, count), "{what}");
                assert!(row.peak_live_bytes >= row.live_bytes.max(before), "{what}");
                assert_eq!(row.alloc_bytes > 0, row.alloc_count > 0, "{what}");
                assert_eq!(row.free_bytes > 0, row.free_count > 0, "{what}");
                assert_eq!(row.live_bytes > 0, row.oldest_live_age.is_some(), "{what}");
                before = row.live_bytes;
            }
            if !run.processes[process].lives {
                assert_eq!(bytes, 0, "what a process leaves ends with it");
            }
        }
    }
}

#[test]
fn a_seed_is_one_run() {
    let (once, again) = (simulator(), simulator());
    let condition = short(Kind::Error, 20_000.0);
    assert_eq!(once.run(11, &condition), again.run(11, &condition));
    let other = once.run(12, &condition);
    assert_ne!(once.run(11, &condition).windows, other.windows);
}

/// The same load, the same names, the same bytes of every other stack.
#[test]
fn a_clean_twin_differs_by_the_leak_alone() {
    for kind in Kind::ALL {
        let condition = short(kind, 30_000.0);
        let leaky = simulator().run(21, &condition);
        let clean = simulator().run(21, &condition.clean());
        assert_eq!(leaky.traffic, clean.traffic);
        assert_eq!(leaky.stacks, clean.stacks);
        assert_eq!(leaky.processes, clean.processes);
        assert_eq!(leaky.truth.planted_stack_ids, clean.truth.planted_stack_ids);
        assert_eq!(clean.truth.leaked_bytes, 0.0);
        assert!(leaky.truth.leaked_bytes > 0.0);
        let of_others = |run: &Run| -> Vec<Window> {
            let planted = &run.truth.planted_stack_ids;
            let others = run
                .windows
                .iter()
                .filter(|window| !planted.contains(&run.stacks[window.stack].stack_id));
            others.copied().collect()
        };
        assert_eq!(of_others(&leaky), of_others(&clean), "{kind:?}");
    }
}

/// What the leaky run holds more than its twin, divided by the requests that its `traffic` counts
/// since the leak began, is what was to be planted.
#[test]
fn the_planted_slope_is_the_true_one() {
    let simulator = simulator();
    let bytes = 25_000.0;
    for kind in Kind::ALL {
        let (mut more, mut requests, mut by_pace) = (0.0, 0.0, 0.0);
        for seed in 30..36 {
            let condition = short(kind, bytes);
            let leaky = simulator.run(seed, &condition);
            let clean = simulator.run(seed, &condition.clean());
            let onset = leaky.truth.onset;
            for (index, process) in leaky.processes.iter().enumerate() {
                // Before its end: with it, everything is freed.
                let until = if process.lives {
                    process.end
                } else {
                    process.end - 600.0
                };
                let from = onset.max(process.start);
                if until <= from {
                    continue;
                }
                for id in &leaky.truth.planted_stack_ids {
                    let difference =
                        live_at(&leaky, *id, index, until) - live_at(&clean, *id, index, until);
                    more += difference as f64;
                }
                let completed = |at: f64| {
                    let mut samples = leaky
                        .traffic
                        .iter()
                        .filter(|s| s.process == index && s.at <= at);
                    samples
                        .next_back()
                        .map_or(0, |sample| sample.completed_total) as f64
                };
                requests += completed(until) - completed(from);
                by_pace += leaky.truth.mean_rate * (until - from);
            }
        }
        let expected = if kind == Kind::Hour {
            by_pace
        } else {
            requests
        };
        let slope = more / expected;
        // Failures come in bursts: their sum over these hours scatters by some per cent.
        let near = if kind == Kind::Error { 0.15 } else { 0.03 };
        assert!((slope / bytes - 1.0).abs() < near, "{kind:?}: {slope}");
    }
}

#[test]
fn ids_and_order_tell_nothing() {
    let simulator = simulator();
    let run = |seed| {
        simulator.run(
            seed,
            &Condition {
                hours: 2,
                ..Condition::CLEAN
            },
        )
    };
    let (one, other) = (run(41), run(42));
    let ids = |run: &Run| -> HashSet<i64> { run.stacks.iter().map(|s| s.stack_id).collect() };
    assert_eq!(ids(&one).len(), one.stacks.len(), "every id once");
    assert!(ids(&one).is_disjoint(&ids(&other)), "hosts share no id");
    assert!(ids(&one).iter().all(|id| *id > 0));
    assert_ne!(
        one.truth.classes, other.truth.classes,
        "places are shuffled"
    );
}

/// Over some seeds leaks are planted on every kind of stack, and only report seeds have the
/// look-alikes that are held back.
#[test]
fn leaks_lie_everywhere_and_some_classes_are_held_back() {
    let simulator = simulator();
    let run = |seed| {
        simulator
            .run(
                seed,
                &Condition {
                    hours: 1,
                    ..Condition::CLEAN
                },
            )
            .truth
    };
    let tuning: Vec<_> = (100..260).map(run).collect();
    let on: BTreeSet<Class> = tuning.iter().map(|truth| truth.planted_on).collect();
    assert_eq!(on, Class::USUAL.map(|(class, _)| class).into());
    for truth in &tuning {
        assert_eq!(truth.classes.len(), 200);
        assert!(
            Class::HELD_BACK
                .iter()
                .all(|class| !truth.classes.contains(class))
        );
    }
    let report = run(REPORT_SEEDS.start + 7);
    assert_eq!(report.classes.len(), 200);
    assert!(
        Class::HELD_BACK
            .iter()
            .all(|class| report.classes.contains(class))
    );
}

/// No cache fills in a straight line beyond the declared limit: in the last hours of a long life
/// every one of them rests.
#[test]
fn straight_caches_are_full_after_four_hours() {
    let simulator = simulator();
    for seed in 300..306 {
        let run = simulator.run(
            seed,
            &Condition {
                hours: 24,
                ..Condition::CLEAN
            },
        );
        for ((process, stack), rows) in by_stack(&run) {
            if run.truth.classes[stack] != Class::StraightCache {
                continue;
            }
            let full = run.processes[process].start + 4.0 * 3600.0 + 600.0;
            let end = run.processes[process].end - 600.0;
            let late = rows
                .iter()
                .filter(|row| row.start > full && row.start < end);
            let levels: BTreeSet<i64> = late.map(|row| row.live_bytes).collect();
            assert!(levels.len() <= 1, "seed {seed}: {levels:?}");
        }
    }
}

#[test]
fn ambiguous_cases_grow_for_hours_and_stop() {
    let simulator = simulator();
    for what in [Ambiguous::SlowFill, Ambiguous::SlowStaircase] {
        // A seed without restarts: the first of the tuning seeds that has none.
        let run = (400..)
            .map(|seed| simulator.run(seed, &Condition::ambiguous(what)))
            .find(|run| run.processes.len() == 1)
            .unwrap();
        let id = run.truth.ambiguous_stack_ids[0];
        let live = |hours: f64| live_at(&run, id, 0, hours * 3600.0) as f64;
        assert!(live(6.0) > 0.1 * live(48.0), "{what:?}");
        assert!(live(6.0) < 0.8 * live(48.0), "{what:?}");
        assert!(live(8.0) > live(6.0) && live(6.0) > live(4.0), "{what:?}");
    }
}

#[test]
fn nobody_leaks_before_the_onset() {
    let condition = Condition {
        leak: Some(Planted {
            kind: Kind::Late,
            bytes_per_request: 1e6,
        }),
        hours: 16,
        ..Condition::CLEAN
    };
    let leaky = simulator().run(51, &condition);
    let clean = simulator().run(51, &condition.clean());
    let onset = leaky.truth.onset;
    assert!((4.0 * 3600.0..14.0 * 3600.0).contains(&onset));
    let before = |run: &Run| -> Vec<Window> {
        run.windows
            .iter()
            .filter(|w| w.start + 300.0 <= onset)
            .copied()
            .collect()
    };
    assert_eq!(before(&leaky), before(&clean));
}
