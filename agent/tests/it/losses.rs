//! What is lost is counted to the call, and told where anybody looks.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int32Type, Int64Type};
use vramscope_agent::host::clock;
use vramscope_agent::ledger::rollup::STACKS;
use vramscope_ebpf_abi::Loss;
use vramscope_fakes::card::CONTEXT_OVERHEAD_BYTES;
use vramscope_fakes::ledger::Kind;
use vramscope_wire::Table;

use crate::daemon::Daemon;
use crate::kernel::{self, ProcessNews};
use crate::standins::Bench;

fn workload(bench: &Bench, arguments: &[&str]) -> Command {
    let mut command = Command::new(Bench::workload());
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", bench.libraries())
        .env("VRAMSCOPE_FAKE_DIR", bench.books())
        .stdout(Stdio::null());
    command
}

fn run(bench: &Bench, arguments: &[&str]) {
    assert!(workload(bench, arguments).status().unwrap().success());
}

fn signal(child: u32, signal: i32) {
    // SAFETY: a child of ours, not waited for yet.
    assert_eq!(unsafe { libc::kill(child as i32, signal) }, 0);
}

fn long(batch: &RecordBatch, name: &str, row: usize) -> i64 {
    let column = batch.column_by_name(name).unwrap();
    column.as_primitive::<Int64Type>().value(row)
}

fn text<'a>(batch: &'a RecordBatch, name: &str, row: usize) -> &'a str {
    let column = batch.column_by_name(name).unwrap().as_string::<i32>();
    if column.is_null(row) {
        ""
    } else {
        column.value(row)
    }
}

fn flag(batch: &RecordBatch, name: &str, row: usize) -> bool {
    batch.column_by_name(name).unwrap().as_boolean().value(row)
}

/// Rows of a table for which `of` gives a number, summed.
fn sum(daemon: &Daemon<'_>, table: Table, of: impl Fn(&RecordBatch, usize) -> i64) -> i64 {
    let rows = daemon.rows(table);
    rows.iter()
        .flat_map(|batch| (0..batch.num_rows()).map(|row| of(batch, row)))
        .sum()
}

/// What all windows together say of a cause.
fn lost(daemon: &Daemon<'_>, cause: &str) -> i64 {
    sum(daemon, Table::AgentWindows, |batch, row| {
        let list = batch.column_by_name("lost_by_cause").unwrap();
        let list = list.as_list::<i32>().value(row);
        let entries = list.as_struct();
        let names = entries.column_by_name("cause").unwrap().as_string::<i32>();
        let counts = entries.column_by_name("count").unwrap();
        let counts = counts.as_primitive::<Int64Type>();
        let of_cause = (0..names.len()).filter(|i| names.value(*i) == cause);
        let total = of_cause.map(|i| counts.value(i)).sum();
        assert!(total == 0 || flag(batch, "lossy", row));
        total
    })
}

/// Calls that succeeded, as the driver's own books count them.
fn calls(bench: &Bench) -> i64 {
    let ledgers = bench.ledgers();
    let totals = ledgers.iter().flat_map(|ledger| {
        Kind::ALL
            .iter()
            .flat_map(|kind| (0..2).map(|device| ledger.totals(device, *kind)))
    });
    totals.map(|t| (t.allocations + t.frees) as i64).sum()
}

/// The daemon is stopped while four threads make 4001 pairs of calls, runtime over driver: the
/// ring holds some hundred records. Rows and losses together are all that was called.
#[test]
fn what_a_full_ring_drops_is_counted_to_the_call() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "ring", &["--ring-bytes", "65536"]);
    daemon.start();
    daemon.wait_hooked_libraries();
    signal(daemon.pid(), libc::SIGSTOP);
    run(&bench, &["race", "--threads", "4", "--iterations", "1000"]);
    signal(daemon.pid(), libc::SIGCONT);
    let rows = |daemon: &Daemon<'_>| {
        sum(daemon, Table::AllocEvents, |batch, row| {
            i64::from(!flag(batch, "implicit", row))
        })
    };
    // Calls wait a while for others of their chain that were lost.
    let expected = 2 * calls(&bench);
    daemon.wait_for("all rows and losses", |status| {
        let lost = status["lost"]["ring_full"].as_i64();
        lost.is_some_and(|lost| rows(&daemon) + lost >= expected)
    });
    daemon.stop();
    let (rows, lost) = (rows(&daemon), lost(&daemon, "ring_full"));
    assert!(rows > 10 && lost > 1000, "{rows} rows, {lost} lost");
    assert_eq!(rows + lost, expected);
}

/// Programs begin and end while the ring has no room. Who tells how many is the kernel's process
/// connector, which knows nothing of the ring.
#[test]
fn process_events_without_room_are_counted() {
    let Some(bench) = Bench::new() else { return };
    let Some(mut news) = ProcessNews::listen() else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: no process connector here");
        return;
    };
    let mut daemon = Daemon::hooking(&bench, "ends", &["--ring-bytes", "65536"]);
    daemon.start();
    let pins = daemon.pins().to_path_buf();
    let so_far = || {
        (
            clock::monotonic_ns(),
            kernel::lost(&pins, Loss::ProcessEvent),
        )
    };
    let run_true = || assert!(Command::new("true").status().unwrap().success());
    signal(daemon.pid(), libc::SIGSTOP);
    while so_far().1 == 0 {
        run_true();
    }
    // Other programs of the host come and go as well, so the moments of reading matter: what
    // happened surely between them, and what possibly did. On a host that is quiet for a moment
    // both are the same.
    let edge_ns = 1_000_000;
    let mut exact = 0;
    for _ in 0..20 {
        let (after, before) = so_far();
        (0..10).for_each(|_| run_true());
        std::thread::sleep(Duration::from_millis(5));
        let begin_of_reading = clock::monotonic_ns();
        let lost = so_far().1 - before;
        let end_of_reading = clock::monotonic_ns();
        let surely = news.between(after + edge_ns, begin_of_reading - edge_ns);
        let possibly = news.between(after - edge_ns, end_of_reading + edge_ns);
        assert!(
            (surely..=possibly).contains(&lost),
            "{lost} counted, {surely} to {possibly} happened"
        );
        exact += u32::from(surely == possibly && lost >= 20);
    }
    if exact == 0 {
        let _ = writeln!(std::io::stderr(), "NOT EXACT: the host was never quiet");
    }
    signal(daemon.pid(), libc::SIGCONT);
    daemon.wait_for("the ring has room", |status| {
        status["ring_fill"].as_f64().is_some_and(|fill| fill < 0.5)
    });
    let all = so_far().1;
    daemon.wait_for("all is told", |status| {
        status["lost"]["process_event"].as_u64() == Some(all)
    });
    daemon.stop();
    assert_eq!(lost(&daemon, "process_event"), all as i64);
}

/// Records that nobody can read, such as another version's programs might leave in a ring.
#[test]
fn records_that_cannot_be_decoded_are_counted() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "strange", &[]);
    daemon.start();
    kernel::put_strange_records(daemon.pins(), 7);
    run(&bench, &["threads", "--threads", "1", "--iterations", "20"]);
    daemon.wait_for("they are told", |status| {
        status["lost"]["undecodable"].as_u64() == Some(7)
    });
    daemon.stop();
    assert_eq!(lost(&daemon, "undecodable"), 7);
    let totals = daemon.totals(None);
    let device = totals[&(0, "device".to_string())];
    let ledger = bench.ledgers()[0].totals(0, Kind::Device);
    assert_eq!(
        (device.0, device.1),
        (ledger.allocations, ledger.frees),
        "the rest came"
    );
}

/// More stacks than the roll-up tells apart: what is beyond is booked without one, and counted.
#[test]
fn stacks_beyond_the_limit_are_counted() {
    const BEYOND: i64 = 40;
    let Some(bench) = Bench::new() else { return };
    // One window, and a ring that holds all: naming so many stacks takes a while.
    let options = ["--window", "10min", "--ring-bytes", "134217728"];
    let mut daemon = Daemon::hooking(&bench, "stacks", &options);
    daemon.start();
    let stacks = (STACKS as i64 + BEYOND).to_string();
    let live = ["live", "--driver", "--count", &stacks, "--stacks", &stacks];
    run(&bench, &live);
    daemon.wait_long_for("they are told", Duration::from_secs(400), |status| {
        status["lost"]["stacks_full"].as_i64() >= Some(BEYOND)
    });
    let all_rows = |daemon: &Daemon<'_>| {
        let of_stacks = |batch: &RecordBatch, row: usize| {
            let stack = batch.column_by_name("stack_id").unwrap();
            (stack.is_null(row), long(batch, "alloc_count", row))
        };
        let rows = daemon.rows(Table::StackWindows);
        let rows = rows
            .iter()
            .flat_map(|b| (0..b.num_rows()).map(move |r| of_stacks(b, r)));
        rows.fold((0, 0), |(named, unnamed), (is_unnamed, count)| {
            if is_unnamed {
                (named, unnamed + count)
            } else {
                (named + count, unnamed)
            }
        })
    };
    daemon.stop();
    assert_eq!(lost(&daemon, "stacks_full"), BEYOND);
    assert_eq!(all_rows(&daemon), (STACKS as i64, BEYOND));
}

#[test]
fn what_the_books_have_no_room_for_is_counted() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "limit", &["--live-limit", "10"]);
    daemon.start();
    daemon.wait_hooked_libraries();
    let mut program = workload(&bench, &["live", "--count", "50", "--driver"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    assert!(program.wait().unwrap().success());
    daemon.stop();
    let counted = sum(&daemon, Table::AllocEvents, |batch, row| {
        i64::from(flag(batch, "counted", row) && text(batch, "op", row) == "alloc")
    });
    let rows = sum(&daemon, Table::AllocEvents, |batch, row| {
        i64::from(!flag(batch, "implicit", row))
    });
    assert_eq!((rows, counted, lost(&daemon, "live_full")), (50, 10, 40));
}

/// Two blocks of 4 MiB before the agent came, two of 2 MiB after.
#[test]
fn a_process_older_than_the_agent_has_a_baseline() {
    const MIB: i64 = 1 << 20;
    let Some(bench) = Bench::new() else { return };
    let arguments = ["older", "--before", "2", "--after", "2"];
    let mut program: Child = workload(&bench, &arguments)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    // Its books are there once it has allocated.
    let end = Instant::now() + Duration::from_secs(60);
    let begun = || -> u64 {
        let ledgers = bench.ledgers();
        let totals = ledgers.iter().map(|l| l.totals(0, Kind::Device));
        totals.map(|t| t.allocations).sum()
    };
    while begun() < 2 {
        assert!(Instant::now() < end, "the program allocates nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    let options = ["--sample-interval", "100ms"];
    let mut daemon = Daemon::hooking(&bench, "older", &options);
    daemon.start();
    daemon.wait_hooked_libraries();
    let baseline = |daemon: &Daemon<'_>| {
        sum(daemon, Table::AllocEvents, |batch, row| {
            let is_baseline = text(batch, "api", row) == "baseline";
            assert!(!is_baseline || !flag(batch, "counted", row));
            if is_baseline {
                long(batch, "bytes", row)
            } else {
                0
            }
        })
    };
    daemon.wait_for("a baseline", |_| baseline(&daemon) > 0);
    program.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    assert!(program.wait().unwrap().success());
    daemon.stop();
    assert_eq!(baseline(&daemon), 8 * MIB + CONTEXT_OVERHEAD_BYTES as i64);
    // Of the two frees one is of a block from before: its size is not known, so it counts nowhere.
    let ended = sum(&daemon, Table::AllocEvents, |batch, row| {
        let is_free = text(batch, "api", row) == "cuMemFree_v2";
        let bytes = batch.column_by_name("bytes").unwrap();
        assert!(!is_free || bytes.is_null(row) != flag(batch, "counted", row));
        i64::from(is_free && bytes.is_null(row))
    });
    assert_eq!(ended, 1);
    let begun = sum(&daemon, Table::AllocEvents, |batch, row| {
        let counts = flag(batch, "counted", row) && text(batch, "memory_kind", row) == "device";
        let begins = counts && text(batch, "op", row) == "alloc";
        if begins { long(batch, "bytes", row) } else { 0 }
    });
    assert_eq!(begun, 4 * MIB);
}

/// Several windows, the agent killed in between: roll-ups, by device and by stack, add up to the
/// driver's own books, and so do the raw rows.
#[test]
fn roll_ups_add_up_over_windows_and_kills() {
    let Some(bench) = Bench::new() else { return };
    let options = ["--window", "300ms"];
    let mut daemon = Daemon::hooking(&bench, "windows", &options);
    daemon.start();
    daemon.wait_hooked_libraries();
    let arguments = ["paced", "--seconds", "3", "--rate", "200"];
    let mut program = workload(&bench, &arguments).spawn().unwrap();
    for wait_ms in [700, 430, 910] {
        std::thread::sleep(Duration::from_millis(wait_ms));
        daemon.kill();
        daemon.start();
    }
    assert!(program.wait().unwrap().success());
    let pid = i64::from(program.id());
    daemon.stop();
    let books = bench.ledgers();
    let books = books[0].totals(0, Kind::Device);
    let books = [
        books.allocated_bytes,
        books.allocations,
        // The end of the process ends the rest.
        books.allocated_bytes,
        books.allocations,
    ]
    .map(|figure| figure as i64);
    for table in [Table::DeviceWindows, Table::StackWindows] {
        let of = |name: &'static str| {
            sum(&daemon, table, |batch, row| {
                let pids = batch.column_by_name("pid").unwrap();
                let ours = i64::from(pids.as_primitive::<Int32Type>().value(row)) == pid;
                if ours { long(batch, name, row) } else { 0 }
            })
        };
        let names = ["alloc_bytes", "alloc_count", "free_bytes", "free_count"];
        assert_eq!(names.map(of), books, "{table:?}");
    }
    let peak = daemon
        .rows(Table::DeviceWindows)
        .iter()
        .fold(0, |peak, batch| {
            (0..batch.num_rows())
                .map(|row| long(batch, "process_peak_bytes", row))
                .fold(peak, i64::max)
        });
    assert_eq!(
        peak,
        bench.ledgers()[0].totals(0, Kind::Device).peak_bytes as i64
    );
    let windows = daemon.rows(Table::DeviceWindows).len();
    assert!(windows > 3, "{windows}");
    assert!(daemon.causes().is_empty(), "{:?}", daemon.causes());
}
