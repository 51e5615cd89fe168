//! Agent and collector are killed at random moments while programs run: afterwards every table
//! says what the driver wrote down, as if nothing had happened.

use std::time::{Duration, SystemTime};

use xtask::children::{Child, sleep};

use crate::bench::{Bench, WORKLOAD, say};

/// Of each.
const KILLS: usize = 10;

/// The seed of a run that is to be repeated.
const SEED: &str = "VRAMSCOPE_KILL_SEED";

/// Programs of a moment, so that kills also meet processes that begin and end.
const BRIEF: [&[&str]; 3] = [
    &["threads", "--threads", "4", "--iterations", "80"],
    &["vmm-segments", "--rounds", "12"],
    &["pools"],
];

/// Tables that have rows after this. `host_buffers` need not: no program lives long enough.
const TABLES: [&str; 7] = [
    "alloc_events",
    "stacks",
    "processes",
    "devices",
    "agent_windows",
    "stack_windows",
    "device_windows",
];

#[derive(Debug, Clone, Copy)]
enum Victim {
    Agent,
    Collector,
}

/// Random numbers from a seed: xorshift64*, by Vigna.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) % limit
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

fn seed() -> u64 {
    match std::env::var(SEED) {
        Ok(text) => text.parse().unwrap(),
        Err(_) => SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64,
    }
}

#[test]
fn twenty_random_kills_leave_the_tables_equal_to_the_ledger() {
    let Some(mut bench) = Bench::start("twenty_random_kills") else {
        return;
    };
    let seed = seed();
    say(&format!("twenty random kills: repeat with {SEED}={seed}"));
    // Zero would stay zero.
    let mut random = Random(seed.max(1));
    let mut victims = [[Victim::Agent; KILLS], [Victim::Collector; KILLS]].concat();
    random.shuffle(&mut victims);

    let paced = bench
        .system
        .start_workload(&["paced", "--seconds", "3600", "--rate", "150"])
        .unwrap();
    let mut brief: Vec<Child> = Vec::new();
    for victim in victims {
        for words in BRIEF {
            brief.push(bench.system.start_workload(words).unwrap());
        }
        sleep(Duration::from_millis(random.below(700))).unwrap();
        // Some kills meet a program that has not come up yet.
        let wait = random.below(3) > 0;
        let system = &mut bench.system;
        match victim {
            Victim::Agent => {
                system.kill_agent().unwrap();
                system.launch_agent().unwrap();
            }
            Victim::Collector => {
                system.kill_collector().unwrap();
                system.launch_collector().unwrap();
            }
        }
        if wait {
            system.wait_for_collector().unwrap();
            system.wait_for_agent().unwrap();
        }
    }
    bench.system.wait_for_collector().unwrap();
    bench.system.wait_for_agent().unwrap();
    for workload in &mut brief {
        workload.wait_success(WORKLOAD).unwrap();
    }
    paced.stop().unwrap();

    let ledgers = bench.come_to_rest();
    let drivers = xtask::compare::lives(&ledgers).unwrap();
    assert_eq!(drivers.len(), 1 + 2 * KILLS * BRIEF.len());
    bench.assert_equal_to_ledgers();
    bench.assert_nothing_lost();
    no_row_is_there_twice(&bench);
}

/// Programs that begin and end while no agent runs: when it is back, `/proc` knows none of them.
#[test]
fn whole_lives_without_an_agent_equal_the_ledger() {
    let Some(mut bench) = Bench::start("whole_lives_without_an_agent") else {
        return;
    };
    bench.system.kill_agent().unwrap();
    let scenarios: [&[&str]; 9] = [
        &["pid-reuse"],
        &["exec"],
        &["vfork"],
        &["fork", "--after-use"],
        &["thread-exit"],
        &["ipc"],
        &["contexts"],
        &["failures"],
        &["demo", "--requests", "10"],
    ];
    for words in scenarios {
        let mut workload = bench.system.start_workload(words).unwrap();
        workload.wait_success(WORKLOAD).unwrap();
    }
    bench.system.start_agent().unwrap();
    bench.come_to_rest();
    bench.assert_equal_to_ledgers();
    bench.assert_nothing_lost();
}

/// A batch that was stored twice would have each of its rows twice.
fn no_row_is_there_twice(bench: &Bench) {
    for table in TABLES {
        let rows = bench.query(&format!(
            "SELECT (SELECT count(*) FROM {table}) AS all_rows, \
             (SELECT count(*) FROM (SELECT DISTINCT * FROM {table})) AS different"
        ));
        assert_eq!(rows[0]["all_rows"], rows[0]["different"], "{table}");
        assert_ne!(rows[0]["all_rows"], 0, "{table}");
    }
    // A call has one number, whatever batch its row came in; what ended with it has its own too.
    let rows = bench.query(
        "SELECT seq, alloc_seq, count(*) AS rows FROM alloc_events \
         GROUP BY seq, alloc_seq HAVING count(*) > 1",
    );
    assert!(rows.is_empty(), "{rows:?}");
}
