//! Scenarios about processes and about load: totals worked out by hand.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Stdio},
};

use vramscope_fakes::ledger::{Kind, Layer};

use crate::support::{Bench, Expected, MIB, assert_ledger, succeed};

const LAYERS: [Layer; 2] = [Layer::Driver, Layer::Runtime];

/// What `exit-code`, and so every scenario that does the same, holds.
fn held() -> [(u32, Kind, Expected); 2] {
    [
        (0, Kind::Device, Expected::held(64 * MIB)),
        (0, Kind::PinnedHost, Expected::held(2 * MIB)),
    ]
}

#[test]
fn late_dlopen_allocates_after_its_delay() {
    let bench = Bench::new();
    succeed(&mut bench.workload("late-dlopen --delay-ms 50"));
    for layer in LAYERS {
        assert_ledger(&bench.ledger(layer), &held());
    }
}

/// The second program's allocations come after the first one's were freed by its replacement.
#[test]
fn exec_frees_what_the_first_program_had() {
    let bench = Bench::new();
    succeed(&mut bench.workload("exec"));
    let twice = |bytes| Expected {
        allocations: 2,
        frees: 1,
        allocated: 2 * bytes,
        freed: bytes,
        peak: bytes,
        ..Expected::NONE
    };
    for layer in LAYERS {
        let expected = [
            (0, Kind::Device, twice(64 * MIB)),
            (0, Kind::PinnedHost, twice(2 * MIB)),
        ];
        assert_ledger(&bench.ledger(layer), &expected);
    }
}

#[test]
fn vfork_leaves_the_parents_books_alone() {
    let bench = Bench::new();
    succeed(&mut bench.workload("vfork"));
    let parent = Expected {
        allocations: 2,
        allocated: 10 * MIB,
        peak: 10 * MIB,
        ..Expected::NONE
    };
    for layer in LAYERS {
        let ledger = bench.ledger_with(layer, 10 * MIB);
        assert_ledger(&ledger, &[(0, Kind::Device, parent)]);
        assert_ledger(&bench.ledger_with(layer, 64 * MIB), &held());
    }
}

/// 8 and 9 MiB by a thread that ends, the 9 freed by another, then 4.
#[test]
fn a_threads_end_frees_nothing() {
    let bench = Bench::new();
    succeed(&mut bench.workload("thread-exit"));
    let expected = Expected {
        allocations: 3,
        frees: 1,
        allocated: 21 * MIB,
        freed: 9 * MIB,
        peak: 17 * MIB,
        ..Expected::NONE
    };
    for layer in LAYERS {
        assert_ledger(&bench.ledger(layer), &[(0, Kind::Device, expected)]);
    }
}

/// Starts a scenario that waits, and returns when it does.
fn start_and_wait(bench: &Bench, arguments: &str) -> Child {
    let mut command = bench.workload(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "waiting\n");
    child
}

fn let_go_on(mut child: Child) {
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
}

/// B blocks of 4 MiB and 1 MiB pinned before the wait; after it one of them is freed, and of A blocks of
/// 2 MiB one.
#[test]
fn older_goes_on_when_it_is_told_to() {
    let bench = Bench::new();
    let child = start_and_wait(&bench, "older --before 4 --after 3");
    let pinned = (0, Kind::PinnedHost, Expected::held(MIB));
    let before = Expected {
        allocations: 4,
        allocated: 16 * MIB,
        peak: 16 * MIB,
        ..Expected::NONE
    };
    assert_ledger(
        &bench.ledger(Layer::Driver),
        &[(0, Kind::Device, before), pinned],
    );
    let_go_on(child);
    let after = Expected {
        allocations: 7,
        frees: 2,
        allocated: 22 * MIB,
        freed: 6 * MIB,
        // 12 are left of the first, and 6 come.
        peak: 18 * MIB,
        ..Expected::NONE
    };
    for layer in LAYERS {
        assert_ledger(&bench.ledger(layer), &[(0, Kind::Device, after), pinned]);
    }
}

#[test]
fn live_holds_all_its_blocks() {
    let bench = Bench::new();
    let child = start_and_wait(&bench, "live --count 3000 --stacks 7 --driver");
    let expected = Expected {
        allocations: 3000,
        allocated: 3000 * 4096,
        peak: 3000 * 4096,
        ..Expected::NONE
    };
    assert_ledger(&bench.ledger(Layer::Driver), &[(0, Kind::Device, expected)]);
    let_go_on(child);
    assert_eq!(bench.ledgers().len(), 1, "the runtime was not used");
}

/// Pair number n is of stack n modulo K, and its block of (1 + stack modulo 64) times 4096 bytes.
#[test]
fn churn_counts_its_calls() {
    for (arguments, layers) in [
        ("churn --seconds 0.2 --stacks 100", 2),
        ("churn --seconds 0.2 --stacks 100 --rate 500 --driver", 1),
    ] {
        let bench = Bench::new();
        let output = succeed(&mut bench.workload(arguments));
        let said = String::from_utf8(output.stdout).unwrap();
        let number = |name: &str| -> u64 {
            let line = said.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len() + 1..].parse().unwrap()
        };
        let pairs = number("pairs");
        assert!(pairs > 0);
        assert_eq!(number("calls"), 2 * pairs);
        let bytes: u64 = (0..pairs).map(|pair| (1 + pair % 100 % 64) * 4096).sum();
        let peak = pairs.min(64) * 4096;
        let expected = Expected::ended(pairs, bytes, peak);
        let ledgers = bench.ledgers();
        assert_eq!(ledgers.len(), layers);
        for ledger in &ledgers {
            assert_ledger(ledger, &[(0, Kind::Device, expected)]);
        }
    }
}

/// Two lifetimes of one process number, 5 MiB and 6 MiB.
#[test]
fn a_process_number_given_out_again_is_another_process() {
    let bench = Bench::new();
    let output = bench.workload("pid-reuse").output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    if complaint.contains("CAP_CHECKPOINT_RESTORE") {
        let _ = writeln!(std::io::stderr(), "SKIPPED: {complaint}");
        return;
    }
    assert!(output.status.success(), "{complaint}");
    for layer in LAYERS {
        let first = bench.ledger_with(layer, 5 * MIB);
        let second = bench.ledger_with(layer, 6 * MIB);
        assert_eq!(first.pid, second.pid);
        assert!(first.start_ticks < second.start_ticks);
    }
}
