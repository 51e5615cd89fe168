//! A spool that is full: what is dropped is counted to the row, and what comes later is not lost.
//! Expectations come from the stand-ins' ledgers.
//!
//! A program of its own, one test at a time: it fills disks.

#[path = "../it/daemon.rs"]
#[allow(dead_code, reason = "another test program uses the rest")]
mod daemon;
#[path = "../it/standins.rs"]
#[allow(dead_code, reason = "another test program uses the rest")]
mod standins;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int32Type, Int64Type};
use vramscope_agent::host::clock;
use vramscope_agent::spool::{folder, journal};
use vramscope_fakes::ledger::{Kind, read_ledgers};
use vramscope_wire::{Table, parquet_file};

use crate::daemon::Daemon;
use crate::standins::Bench;

static ALONE: Mutex<()> = Mutex::new(());

/// Rows that a workload's calls make: a call is a row in its layer, and what lives at the end is
/// freed by the process's end.
fn rows_by_the_ledgers(bench: &Bench) -> u64 {
    let mut rows = 0;
    for ledger in read_ledgers(&bench.books()).unwrap() {
        let is_driver = ledger.layer == vramscope_fakes::ledger::Layer::Driver;
        for device in 0..2 {
            for kind in Kind::ALL {
                let t = ledger.totals(device, kind);
                rows += t.allocations + t.failed_allocations + t.frees + t.failed_frees;
                if is_driver {
                    rows += t.live_count;
                }
            }
        }
    }
    rows
}

/// What a collector would have by now.
#[derive(Debug, Default)]
struct Taken {
    /// Those of them that a call made.
    calls: u64,
    rows_by_pid: BTreeMap<i32, u64>,
    /// Every row by its event and the allocation it ends, and what it is.
    rows: BTreeMap<(i64, Option<i64>), String>,
    stacks_named: BTreeSet<i64>,
    stacks_used: BTreeSet<i64>,
    lost: BTreeMap<String, i64>,
    lossy_windows: usize,
}

/// Calls whose row is whole, and whose stack is less good: told, and no loss.
const STACKS_ALONE: [&str; 2] = ["stack_not_copied", "python_not_read"];

impl Taken {
    /// Takes the files as a collector gets them: those that count, oldest first; reads and
    /// removes them.
    fn consume(&mut self, spool: &Path) {
        let journal = std::fs::read(spool.join("journal")).unwrap();
        let frames = journal::decode(&journal).frames;
        let committed = frames.last().map_or(0, |frame| frame.state.next_batch_seq);
        for file in folder::list(spool).unwrap() {
            if file.batch_seq >= committed {
                break;
            }
            let opened = std::fs::File::open(&file.path).unwrap();
            for batch in parquet_file::decode(file.table, opened).unwrap() {
                match file.table {
                    Table::AllocEvents => self.events(&batch),
                    Table::Stacks => self.stacks_named.extend(longs(&batch, "stack_id")),
                    Table::AgentWindows => self.windows(&batch),
                    _ => {}
                }
            }
            std::fs::remove_file(&file.path).unwrap();
        }
    }

    fn events(&mut self, batch: &RecordBatch) {
        let implicit = batch.column_by_name("implicit").unwrap().as_boolean();
        self.calls += implicit.values().iter().filter(|it| !it).count() as u64;
        let pids = batch.column_by_name("pid").unwrap();
        for pid in pids.as_primitive::<Int32Type>().values() {
            *self.rows_by_pid.entry(*pid).or_default() += 1;
        }
        self.stacks_used.extend(longs(batch, "stack_id"));
        let seqs = batch.column_by_name("seq").unwrap();
        let alloc_seqs = batch.column_by_name("alloc_seq").unwrap();
        let alloc_seqs = alloc_seqs.as_primitive::<Int64Type>();
        for row in 0..batch.num_rows() {
            let seq = seqs.as_primitive::<Int64Type>().value(row);
            // Implicit frees share the number of what ended them.
            let ends = alloc_seqs.is_valid(row).then(|| alloc_seqs.value(row));
            let what = described(batch, row);
            if let Some(before) = self.rows.insert((seq, ends), what.clone()) {
                panic!("two rows of event {seq}, ending {ends:?}:\n{before}\n{what}");
            }
        }
    }

    fn windows(&mut self, batch: &RecordBatch) {
        let lossy = batch.column_by_name("lossy").unwrap().as_boolean();
        let lost = batch.column_by_name("lost").unwrap();
        let lost = lost.as_primitive::<Int64Type>();
        let lists = batch.column_by_name("lost_by_cause").unwrap();
        let lists = lists.as_list::<i32>();
        for row in 0..batch.num_rows() {
            self.lossy_windows += usize::from(lossy.value(row));
            let causes = lists.value(row);
            let causes = causes.as_struct();
            let names = causes.column_by_name("cause").unwrap().as_string::<i32>();
            let counts = causes.column(1).as_primitive::<Int64Type>();
            let mut calls = 0;
            for i in 0..causes.len() {
                let (name, count) = (names.value(i), counts.value(i));
                if STACKS_ALONE.contains(&name) {
                    continue;
                }
                *self.lost.entry(name.to_string()).or_default() += count;
                assert!(lossy.value(row), "a loss by {name} and no mark");
                if !name.starts_with("spool_full_") {
                    calls += count;
                }
            }
            assert_eq!(lost.value(row), calls, "the sum is of calls alone");
        }
    }

    fn dropped(&self) -> u64 {
        self.lost.get("spool_full").copied().unwrap_or(0) as u64
    }

    /// Nothing was lost but for want of room, and every stack that is used has its names.
    fn check(&self, bench: &Bench) {
        let unnamed: Vec<_> = self.stacks_used.difference(&self.stacks_named).collect();
        assert!(unnamed.is_empty(), "stacks without a row: {unnamed:?}");
        let pids: BTreeSet<_> = read_ledgers(&bench.books())
            .unwrap()
            .iter()
            .map(|ledger| ledger.pid as i32)
            .collect();
        let of_ours = self
            .rows_by_pid
            .iter()
            .filter(|(pid, _)| pids.contains(pid));
        let kept: u64 = of_ours.map(|(_, rows)| rows).sum();
        let all = rows_by_the_ledgers(bench);
        assert_eq!(
            kept + self.dropped(),
            all,
            "kept and dropped rows are all rows: {:?}",
            self.lost
        );
        for cause in self.lost.keys() {
            assert!(cause.starts_with("spool_full"), "lost by {cause}");
        }
    }
}

/// A row, for a message.
fn described(batch: &RecordBatch, row: usize) -> String {
    let names = [
        "batch_seq",
        "pid",
        "tid",
        "api",
        "source",
        "device",
        "address",
        "ts_ns",
    ];
    let shown = names.map(|name| {
        let column = batch.column_by_name(name).unwrap();
        let value = arrow::util::display::array_value_to_string(column, row).unwrap();
        format!("{name} {value}")
    });
    shown.join(", ")
}

fn longs(batch: &RecordBatch, column: &str) -> Vec<i64> {
    let values = batch.column_by_name(column).unwrap();
    values
        .as_primitive::<Int64Type>()
        .iter()
        .flatten()
        .collect()
}

/// Runs a workload under the daemon; gives its pid.
fn run(bench: &Bench, arguments: &[&str]) -> i32 {
    let mut child = Command::new(Bench::workload())
        .args(arguments)
        .env("LD_LIBRARY_PATH", bench.libraries())
        .env("VRAMSCOPE_FAKE_DIR", bench.books())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id() as i32;
    child.wait().unwrap();
    pid
}

/// Waits for something that comes sooner or later.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(120), "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn status(daemon: &Daemon<'_>) -> serde_json::Value {
    std::fs::read(daemon.spool().join("status.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default()
}

/// Waits until the agent has read most of what the ring holds: on a busy machine programs are
/// faster than it, and these tests are about another kind of loss.
fn read(daemon: &Daemon<'_>) {
    let began = clock::realtime_ns();
    until("the ring is read", || {
        let status = status(daemon);
        let is_new = status["written_ns"].as_u64() > Some(began);
        is_new && status["ring_fill"].as_f64().is_some_and(|fill| fill < 0.2)
    });
}

const THREADS: [&str; 5] = ["threads", "--threads", "4", "--iterations", "400"];

/// Fills a small spool, kills the agent while it is full, makes room, and fills it again.
#[test]
fn a_full_spool_drops_the_newest_and_counts_them() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(bench) = Bench::new() else { return };
    let options = [
        "--spool-limit",
        "160KiB",
        "--spool-reserve",
        "0B",
        "--window",
        "500ms",
    ];
    let mut daemon = Daemon::hooking(&bench, "full", &options);
    daemon.start();
    let mut taken = Taken::default();
    for _ in 0..50 {
        run(&bench, &THREADS);
        read(&daemon);
        if status(&daemon)["spool_full"] == true {
            break;
        }
    }
    until("the spool is full", || {
        status(&daemon)["spool_full"] == true
    });
    run(&bench, &THREADS);
    // What was counted as dropped must survive a kill.
    daemon.kill();
    daemon.start();
    run(&bench, &THREADS);
    read(&daemon);
    let kept = folder::list(&daemon.spool()).unwrap();
    let raw: u64 = kept
        .iter()
        .filter(|file| file.table == Table::AllocEvents)
        .map(|file| file.path.metadata().unwrap().len())
        .sum();
    assert!(raw <= 160 << 10, "{raw} bytes of raw rows in 160 KiB");
    taken.consume(&daemon.spool());

    // Room again: rows flow again, by themselves.
    until("the agent notices", || {
        let pid = run(&bench, &THREADS);
        read(&daemon);
        std::thread::sleep(Duration::from_millis(500));
        taken.consume(&daemon.spool());
        taken.rows_by_pid.contains_key(&pid)
    });
    daemon.stop();
    taken.consume(&daemon.spool());
    assert!(taken.dropped() > 0 && taken.lossy_windows > 0);
    taken.check(&bench);
}

/// Ring and spool overflow at once, and the agent is killed twice meanwhile: no row comes twice,
/// and what is missing was counted.
#[test]
fn an_overflowing_ring_before_a_full_spool_doubles_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(bench) = Bench::new() else { return };
    let options = [
        "--ring-bytes",
        "262144",
        "--spool-limit",
        "64KiB",
        "--spool-reserve",
        "0B",
        "--window",
        "500ms",
    ];
    let mut daemon = Daemon::hooking(&bench, "both", &options);
    daemon.start();
    daemon.wait_hooked_libraries();
    let mut taken = Taken::default();
    for round in 0..3 {
        for _ in 0..8 {
            run(&bench, &THREADS);
        }
        if round < 2 {
            daemon.kill();
            daemon.start();
        }
        taken.consume(&daemon.spool());
    }
    let calls: u64 = read_ledgers(&bench.books())
        .unwrap()
        .iter()
        .flat_map(|ledger| Kind::ALL.map(|kind| (ledger, kind)))
        .flat_map(|(ledger, kind)| (0..2).map(move |device| ledger.totals(device, kind)))
        .map(|t| t.allocations + t.failed_allocations + t.frees + t.failed_frees)
        .sum();
    // Calls wait a while for others of their chain that were lost. Of what was dropped some may
    // be ends that no call made.
    until("every call is a row or counted as lost", || {
        taken.consume(&daemon.spool());
        let ring_full = taken.lost.get("ring_full").copied().unwrap_or(0) as u64;
        taken.calls + ring_full + taken.dropped() >= calls
    });
    daemon.stop();
    taken.consume(&daemon.spool());
    let (called, lost) = (taken.calls, taken.lost["ring_full"] as u64);
    assert!(lost > 0 && taken.dropped() > 0, "{:?}", taken.lost);
    // Calls that make no row, of contexts, are lost like others: two at most in each process.
    let others = 2 * read_ledgers(&bench.books()).unwrap().len() as u64;
    assert!(
        called + lost <= calls + others,
        "{called} rows and {lost} lost of {calls} calls"
    );
}

/// A file system of its own, unmounted in the end.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    /// `None`, said aloud, where nothing may be mounted.
    fn mount(at: &'a Path, options: &str) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let path = CString::new(at.as_os_str().as_bytes()).unwrap();
        let options = CString::new(options).unwrap();
        // SAFETY: terminated strings; the options are read by the kernel during the call.
        let result = unsafe {
            libc::mount(
                c"tmpfs".as_ptr(),
                path.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                options.as_ptr().cast(),
            )
        };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: no file system can be mounted: {error}"
            );
            return None;
        }
        Some(Self(at))
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let path = CString::new(self.0.as_os_str().as_bytes()).unwrap();
        // SAFETY: a terminated string; our own mount.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

/// The disk is small and another program fills it to the last byte: the reserve keeps the
/// journal going, then nothing can be written at all, and then there is room again.
#[test]
fn a_disk_that_others_fill_loses_nothing_that_is_not_counted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "disk", &["--window", "500ms"]);
    let spool = daemon.spool();
    let Some(_disk) = SmallDisk::mount(&spool, "size=2m") else {
        return;
    };
    daemon.start();
    let mut taken = Taken::default();
    run(&bench, &THREADS);

    let ballast = spool.join("ballast");
    let mut file = std::fs::File::create(&ballast).unwrap();
    let chunk = vec![1; 4096];
    while file.write_all(&chunk).is_ok() {}
    drop(file);
    run(&bench, &THREADS);
    std::thread::sleep(Duration::from_millis(500));
    // A little room: less than the reserve, enough for the journal and for windows.
    std::fs::File::options()
        .write(true)
        .open(&ballast)
        .and_then(|file| file.set_len(file.metadata()?.len() - (96 << 10)))
        .unwrap();
    run(&bench, &THREADS);
    until("rows are dropped", || {
        status(&daemon)["lost"]["spool_full"].as_u64() > Some(0)
    });
    std::fs::remove_file(&ballast).unwrap();
    until("the agent notices", || {
        let pid = run(&bench, &THREADS);
        read(&daemon);
        std::thread::sleep(Duration::from_millis(500));
        taken.consume(&spool);
        taken.rows_by_pid.contains_key(&pid)
    });
    daemon.stop();
    taken.consume(&spool);
    assert!(taken.dropped() > 0);
    taken.check(&bench);
}
