//! Every scenario of the stand-ins' workload, several at a time, under one agent and one
//! collector: what SQL says of each process equals what the driver wrote down.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use vramscope_fakes::ledger::{Kind, Layer, ProcessLedger, Totals};
use xtask::children::Child;
use xtask::compare::{self, Row, number};
use xtask::project::Project;

use crate::bench::{Bench, WORKLOAD};

const MIB: u64 = 1 << 20;

/// How a scenario ends.
#[derive(Clone, Copy)]
enum End {
    Code(i32),
    Signal,
}

const DONE: End = End::Code(0);

/// Every scenario of `vramscope-workload` but `deep`, which loses calls and has a test of its own.
const SCENARIOS: &[(&[&str], End)] = &[
    (&["demo", "--requests", "50"], DONE),
    (&["threads", "--threads", "8", "--iterations", "300"], DONE),
    (&["threads", "--threads", "16", "--iterations", "50"], DONE),
    (&["race", "--threads", "4", "--iterations", "500"], DONE),
    (&["paced", "--seconds", "3", "--rate", "100"], DONE),
    (
        &["churn", "--seconds", "2", "--rate", "200", "--stacks", "20"],
        DONE,
    ),
    (
        &["churn", "--seconds", "1", "--rate", "300", "--driver"],
        DONE,
    ),
    (&["live", "--count", "300", "--stacks", "7"], DONE),
    (&["live", "--count", "200", "--driver"], DONE),
    (&["failures"], DONE),
    (&["managed"], DONE),
    (&["pitched"], DONE),
    (&["pools"], DONE),
    (&["vmm"], DONE),
    (&["vmm-segments", "--rounds", "3"], DONE),
    (&["ipc"], DONE),
    (&["devices"], DONE),
    (&["contexts"], DONE),
    (&["device-reset"], DONE),
    (&["fork"], DONE),
    (&["fork", "--after-use"], DONE),
    (&["exit-code", "7"], End::Code(7)),
    (&["crash"], End::Signal),
    (&["sleep", "1"], DONE),
    (&["late-dlopen", "--delay-ms", "300"], DONE),
    (&["hold", "--mib", "9"], DONE),
    (&["exec"], DONE),
    (&["vfork"], DONE),
    (&["thread-exit"], DONE),
    (&["older", "--before", "3", "--after", "2"], DONE),
    (&["pid-reuse"], DONE),
    (&["driver"], DONE),
];

/// How many run at the same time.
const AT_A_TIME: usize = 3;

#[test]
fn every_scenario_equals_its_ledger() {
    let Some(mut bench) = Bench::start("every_scenario_equals_its_ledger") else {
        return;
    };
    let listed: BTreeSet<_> = SCENARIOS.iter().map(|(words, _)| words[0]).collect();
    let mut tested: BTreeSet<String> = listed.iter().map(ToString::to_string).collect();
    tested.insert("deep".to_string());
    assert_eq!(
        tested,
        scenarios_of_the_workload(),
        "a scenario has no test"
    );

    let mut pids = BTreeMap::new();
    for together in SCENARIOS.chunks(AT_A_TIME) {
        let started: Vec<(Child, _)> = together
            .iter()
            .map(|(words, end)| (bench.system.start_workload(words).unwrap(), (words, end)))
            .collect();
        for (mut workload, (words, end)) in started {
            let status = workload.wait(WORKLOAD).unwrap();
            match end {
                End::Code(code) => assert_eq!(status.code(), Some(*code), "{words:?}: {status}"),
                End::Signal => assert_eq!(status.code(), None, "{words:?}: {status}"),
            }
            pids.insert(words[0], workload.id());
        }
    }
    // The runtime linked in: no library of it is loaded.
    let mut linked = bench
        .system
        .start_program(
            "vramscope-workload-static",
            &["demo", "--requests", "20"],
            &[],
        )
        .unwrap();
    linked.wait_success(WORKLOAD).unwrap();

    let ledgers = bench.come_to_rest();
    let lives = compare::lives(&ledgers).unwrap();
    // Two forks, a vfork and an opener have a child each; of pid-reuse the children are traced.
    assert_eq!(lives.len(), SCENARIOS.len() + 1 + 4 + 1);
    bench.assert_equal_to_ledgers();
    bench.assert_nothing_lost();
    pools_equal_the_ledger(&bench, &lives);
    addresses_equal_the_ledger(&bench, &lives);
    what_programs_read_of_pools_is_told(&bench, pids["pools"]);
    every_view_answers_in_full(&bench);
}

/// The names that the program itself lists.
fn scenarios_of_the_workload() -> BTreeSet<String> {
    let workload = Project::find().unwrap().binary("vramscope-workload");
    let output = Command::new(workload).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let commands = help.split("Commands:").nth(1).unwrap();
    let commands = commands.split("Options:").next().unwrap();
    let names = commands
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .map(ToString::to_string);
    names.filter(|name| name != "help").collect()
}

fn count(row: &Row, column: &str) -> u64 {
    number(row, column)
        .unwrap()
        .unwrap_or_else(|| panic!("{column} is NULL in {row:?}"))
}

/// The rows of a view by pid. Two processes of one pid have theirs together.
fn by_pid(rows: &[Row]) -> BTreeMap<u32, Vec<&Row>> {
    let mut all: BTreeMap<u32, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        all.entry(count(row, "pid") as u32).or_default().push(row);
    }
    all
}

/// View `pools`: slices given, their bytes and failures, pool by pool, add up to the books of each
/// device; nothing is in use once the process has ended.
fn pools_equal_the_ledger(bench: &Bench, lives: &[(compare::Life, &ProcessLedger)]) {
    let rows = bench.query("SELECT * FROM pools");
    let by_pid = by_pid(&rows);
    let mut with_pools = BTreeSet::new();
    for (life, ledger) in lives {
        for device in [Some(0), Some(1), None] {
            let truth = totals(ledger, device, Kind::Pool);
            let of_device = |row: &&&Row| number(row, "device").unwrap() == device.map(u64::from);
            let of_pid = by_pid.get(&life.pid).into_iter().flatten();
            let of_place: Vec<_> = of_pid.filter(of_device).collect();
            let sum = |column| of_place.iter().map(|row| count(row, column)).sum::<u64>();
            assert_eq!(
                (
                    sum("slices"),
                    sum("slice_bytes"),
                    sum("failed_allocations"),
                    sum("used_slices"),
                    sum("used_bytes")
                ),
                (
                    truth.allocations,
                    truth.allocated_bytes,
                    truth.failed_allocations,
                    0,
                    0
                ),
                "{life:?} device {device:?}: {of_place:?}"
            );
            // Pools do not have their peaks at one moment.
            let highest = of_place.iter().map(|row| count(row, "peak_used_bytes"));
            assert!(highest.max().unwrap_or(0) <= truth.peak_bytes);
            assert!(sum("peak_used_bytes") >= truth.peak_bytes);
            if truth != Totals::default() {
                with_pools.insert(life.pid);
            }
        }
    }
    // failures, pools, contexts, device-reset.
    assert!(with_pools.len() >= 4, "{with_pools:?}");
    assert_eq!(by_pid.into_keys().collect::<BTreeSet<_>>(), with_pools);
}

/// The scenario reads its default pool last: 64 MiB reserved. It never asks for device 1.
fn what_programs_read_of_pools_is_told(bench: &Bench, pid: u32) {
    let rows = bench.query(&format!(
        "SELECT DISTINCT device, device_reserved_bytes FROM pools WHERE pid = {pid} ORDER BY device"
    ));
    let told: Vec<_> = rows
        .iter()
        .map(|row| {
            (
                count(row, "device"),
                number(row, "device_reserved_bytes").unwrap(),
            )
        })
        .collect();
    assert_eq!(told, [(0, Some(64 * MIB)), (1, None)]);
}

/// View `address_space`: peaks against the books, and nothing left.
fn addresses_equal_the_ledger(bench: &Bench, lives: &[(compare::Life, &ProcessLedger)]) {
    let rows = bench.query("SELECT * FROM address_space");
    let by_pid = by_pid(&rows);
    let mut seen = 0;
    for (life, ledger) in lives {
        let kinds = [
            (Kind::VmmVirtual, "peak_reserved_bytes"),
            (Kind::VmmMapped, "peak_mapped_bytes"),
            (Kind::VmmPhysical, "peak_physical_bytes"),
        ];
        for (kind, column) in kinds {
            let peaks = [Some(0), Some(1), None].map(|d| totals(ledger, d, kind).peak_bytes);
            let row = by_pid.get(&life.pid).and_then(|rows| rows.first());
            let told = row.map_or(0, |row| count(row, column));
            // The view is over all devices, whose peaks need not be at one moment; with one of them
            // in use the bounds meet.
            let highest = peaks.into_iter().max().unwrap_or(0);
            assert!(
                told >= highest && told <= peaks.iter().sum(),
                "{life:?} {column}: {told}, in the ledger {peaks:?}"
            );
            seen += u64::from(told > 0);
        }
    }
    assert!(seen >= 6, "vmm and vmm-segments have all three: {seen}");
    for row in &rows {
        for column in [
            "reserved_bytes",
            "reservations",
            "mapped_bytes",
            "mappings",
            "physical_bytes",
            "handles",
            "ipc_open",
        ] {
            assert_eq!(
                count(row, column),
                0,
                "{column} of an ended process: {row:?}"
            );
        }
    }
}

fn totals(ledger: &ProcessLedger, device: Option<u32>, kind: Kind) -> Totals {
    match device {
        Some(device) => ledger.totals(device, kind),
        None => ledger.without_device[kind.name()],
    }
}

/// Plans differ between a lake's files and the small tables of the views' own tests, and between
/// some columns and all of them.
fn every_view_answers_in_full(bench: &Bench) {
    let folder =
        std::path::Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../queries/sql");
    let mut views = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "sql") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            bench.query(&format!("SELECT * FROM {name}"));
            views += 1;
        }
    }
    assert!(views >= 10, "only {views} views were found");
}

/// Calls inside calls beyond what is followed, and calls that never return: each is counted, by its
/// cause, and what is left equals the books.
#[test]
fn calls_too_deep_and_calls_left_are_counted() {
    const DEPTH: u64 = 12;
    const BEFORE: u64 = 3;
    const AFTER: u64 = 2;
    let Some(mut bench) = Bench::start("calls_too_deep_and_calls_left_are_counted") else {
        return;
    };
    let [depth, before, after] = [DEPTH, BEFORE, AFTER].map(|n| n.to_string());
    let words = [
        "deep", "--depth", &depth, "--before", &before, "--after", &after,
    ];
    let mut workload = bench.system.start_workload(&words).unwrap();
    workload.wait_success(WORKLOAD).unwrap();
    let pid = workload.id();
    let ledgers = bench.come_to_rest();

    // A nested allocation is two calls, the runtime's and under it the driver's; eight calls inside
    // each other are followed. A call that is left takes the runtime's with it.
    let lost = [
        ("missed_return", 2 * (BEFORE + AFTER)),
        ("too_deep", 2 * DEPTH - 8),
    ];
    let rows = bench.query("SELECT cause, missing, lost FROM losses ORDER BY cause");
    let told: Vec<_> = rows
        .iter()
        .map(|row| {
            assert_eq!(row["missing"], "call");
            (row["cause"].as_str().unwrap(), count(row, "lost"))
        })
        .collect();
    assert_eq!(told, lost);
    let windows = bench.query("SELECT sum(lost) AS lost FROM answer_quality");
    assert_eq!(count(&windows[0], "lost"), lost[0].1 + lost[1].1);

    // The rest: the outer four nested ones.
    let books = ledgers.iter().find(|l| l.layer == Layer::Driver).unwrap();
    let truth = books.totals(0, Kind::Device);
    assert_eq!(truth.allocations, DEPTH + AFTER);
    let missing = DEPTH - 4 + AFTER;
    let missing_bytes = (DEPTH - 4) * MIB + AFTER * 2 * MIB;
    let rows = bench.query(&format!(
        "SELECT allocations, allocated_bytes, failed_allocations FROM process_totals WHERE pid = {pid}"
    ));
    assert_eq!(rows.len(), 1);
    assert_eq!(count(&rows[0], "allocations") + missing, truth.allocations);
    assert_eq!(
        count(&rows[0], "allocated_bytes") + missing_bytes,
        truth.allocated_bytes
    );
    assert_eq!(count(&rows[0], "failed_allocations"), 0);
}
