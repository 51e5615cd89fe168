//! The agent comes back with other probes, as after an upgrade: what nobody saw is told as a gap,
//! and what was seen stays right.

use std::time::{Duration, Instant};

use vramscope_fakes::ledger::{Kind, Layer};
use xtask::children::{Child, sleep};
use xtask::compare::{self, Source};

use crate::bench::{Bench, WORKLOAD};

/// Waits until something is so.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + WORKLOAD;
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        sleep(Duration::from_millis(100)).unwrap();
    }
}

/// A sum over all rows of `process_totals`.
fn total(bench: &Bench, column: &str) -> u64 {
    let sql = format!("SELECT coalesce(sum({column}), 0) AS total FROM process_totals");
    let rows = bench.query(&sql);
    compare::number(&rows[0], "total").unwrap().unwrap()
}

/// Allocations of device memory by the books.
fn allocations(bench: &Bench) -> u64 {
    let ledgers = bench.system.read_ledgers().unwrap();
    let drivers = ledgers.iter().filter(|l| l.layer == Layer::Driver);
    drivers.map(|l| l.totals(0, Kind::Device).allocations).sum()
}

/// Waits for so many more calls.
fn call_on(bench: &Bench, calls: u64) {
    let before = allocations(bench);
    wait_until("more calls", || allocations(bench) >= before + calls);
}

/// Two programs hold memory while the agent is gone, and one of them ends in that time.
#[test]
fn an_agent_with_other_probes_states_a_gap() {
    let Some(mut bench) = Bench::start("an_agent_with_other_probes_states_a_gap") else {
        return;
    };
    let hold = |bench: &Bench| bench.system.start_workload(&["sleep", "3600"]).unwrap();
    let [ends_unseen, lives_on] = [hold(&bench), hold(&bench)];
    wait_until("device and pinned memory of both", || {
        total(&bench, "live_count") == 4
    });
    bench.system.kill_agent().unwrap();
    pretend_other_probes(&bench);
    ends_unseen.kill().unwrap();
    bench.system.start_agent().unwrap();

    let mut later: Vec<Child> = [&["demo", "--requests", "20"][..], &["pools"], &["vmm"]]
        .iter()
        .map(|words| bench.system.start_workload(words).unwrap())
        .collect();
    for workload in &mut later {
        workload.wait_success(WORKLOAD).unwrap();
    }
    lives_on.kill().unwrap();

    bench.come_to_rest();
    // No program called anything in the gap, so nothing is missing.
    for source in Source::ALL {
        let differences = bench.system.differences_in(source).unwrap();
        assert_eq!(differences, Vec::<String>::new(), "{source:?}");
    }
    let rows = bench.query("SELECT cause, missing, lost, windows FROM losses");
    assert_eq!(rows.len(), 1, "{rows:?}");
    let row = &rows[0];
    assert_eq!(
        (&row["cause"], &row["missing"]),
        (&"restart_gap".into(), &"time".into())
    );
    assert!(
        row.get("lost").is_none_or(serde_json::Value::is_null),
        "{row:?}"
    );
    assert_eq!(row["windows"], 1);
}

/// A program calls all the time: what fell into the gap is missing, and nothing is counted twice or
/// made up.
#[test]
fn what_a_gap_swallows_is_missing_and_no_more() {
    let Some(mut bench) = Bench::start("what_a_gap_swallows_is_missing_and_no_more") else {
        return;
    };
    let paced = bench
        .system
        .start_workload(&["paced", "--seconds", "3600", "--rate", "200"])
        .unwrap();
    wait_until("rows of its calls", || total(&bench, "frees") > 0);
    bench.system.kill_agent().unwrap();
    pretend_other_probes(&bench);
    call_on(&bench, 20);
    bench.system.start_agent().unwrap();
    call_on(&bench, 100);
    paced.stop().unwrap();
    bench.come_to_rest();

    let (ledger, sql) = bench.system.sides(Source::Totals).unwrap();
    let place = ledger.places().find(|p| p.memory_kind.is_some()).unwrap();
    for name in ["allocations", "allocated_bytes", "frees", "freed_bytes"] {
        let (truth, told) = (ledger.get(place, name), sql.get(place, name));
        assert!(told > 0 && told < truth, "{name}: {told} of {truth}");
    }
    for name in ["failed_allocations", "failed_frees"] {
        assert_eq!(sql.get(place, name), 0);
    }
    // What began has ended, one way or another.
    assert_eq!(
        sql.get(place, "allocations"),
        sql.get(place, "frees") + sql.get(place, "live_at_exit")
    );
    // Probes of entries and of returns come one after the other: a call in between is seen to return
    // and counted as such. Each is one of those that are missing, of the runtime or of the driver.
    let missing = |name| ledger.get(place, name) - sql.get(place, name);
    let swallowed = 2 * (missing("allocations") + missing("frees"));
    let (mut causes, mut under_way) = (Vec::new(), 0);
    for row in bench.query("SELECT cause, lost FROM losses") {
        match row["cause"].as_str().unwrap() {
            "missed_entry" => under_way += row["lost"].as_u64().unwrap(),
            other => causes.push(other.to_string()),
        }
    }
    assert_eq!(causes, ["restart_gap"]);
    assert!(
        under_way <= swallowed,
        "{under_way} calls were seen to return, {swallowed} are missing"
    );
}

/// Renames the pinned probes' folder, whose name is what the agent knows its own probes by.
fn pretend_other_probes(bench: &Bench) {
    let root = bench.system.pin_path();
    let pins: Vec<_> = std::fs::read_dir(&root).unwrap().flatten().collect();
    assert_eq!(pins.len(), 1);
    std::fs::rename(pins[0].path(), root.join("0000000000000000")).unwrap();
}
