//! A framework's allocator: what the probes and reports of the stand-in c10 tell, against its own
//! ledger. Its places have their arguments in registers of every width, in memory and behind an
//! index; its counters show who listens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int32Type, Int64Type};
use serde_json::Value;
use vramscope_agent::host::{perf, usdt};
use vramscope_wire::Table;

use crate::daemon::Daemon;
use crate::program::Program;
use crate::standins::Bench;

/// Device and stream -> allocations, frees by calls, bytes, bytes asked for.
type Sums = BTreeMap<(i64, Option<i64>), (u64, u64, u64, u64)>;

/// The counters while the agent listens: it has a probe at each place of malloc and of free.
pub const LISTENED: (i64, i64) = (4, 3);

/// One row of the framework's layer.
#[derive(Debug, Clone)]
struct Row {
    op: String,
    api: String,
    address: Option<i64>,
    bytes: Option<i64>,
    requested: Option<i64>,
    stream: Option<i64>,
    device: Option<i64>,
    counted: bool,
    implicit: bool,
    seq: i64,
    alloc_seq: Option<i64>,
    allocated: Option<i64>,
}

/// In order of `seq`.
fn rows(batches: &[RecordBatch]) -> Vec<Row> {
    let mut rows = Vec::new();
    for batch in batches {
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let text = |name: &str, row: usize| column(name).as_string::<i32>().value(row).to_string();
        let long = |name: &str, row: usize| {
            let column = column(name).as_primitive::<Int64Type>();
            column.is_valid(row).then(|| column.value(row))
        };
        let devices = column("device").as_primitive::<Int32Type>();
        for row in 0..batch.num_rows() {
            if text("layer", row) != "framework" {
                continue;
            }
            rows.push(Row {
                op: text("op", row),
                api: text("api", row),
                address: long("address", row),
                bytes: long("bytes", row),
                requested: long("requested_bytes", row),
                stream: long("stream", row),
                device: devices.is_valid(row).then(|| i64::from(devices.value(row))),
                counted: column("counted").as_boolean().value(row),
                implicit: column("implicit").as_boolean().value(row),
                seq: long("seq", row).unwrap(),
                alloc_seq: long("alloc_seq", row),
                allocated: long("allocator_allocated_bytes", row),
            });
        }
    }
    rows.sort_by_key(|row| row.seq);
    rows
}

/// Sums, and what lives: bytes and bytes asked for by address.
fn found(rows: &[Row]) -> (Sums, BTreeMap<i64, (i64, Option<i64>)>) {
    let mut sums = Sums::new();
    let mut live = BTreeMap::new();
    for row in rows.iter().filter(|row| row.counted) {
        let entry = sums.entry((row.device.unwrap(), row.stream)).or_default();
        let address = row.address.unwrap();
        match row.op.as_str() {
            "alloc" => {
                entry.0 += 1;
                entry.2 += row.bytes.unwrap() as u64;
                entry.3 += row.requested.unwrap_or(0) as u64;
                live.insert(address, (row.bytes.unwrap(), row.requested));
            }
            "free" if row.implicit => {}
            "free" => {
                entry.1 += 1;
                assert!(live.remove(&address).is_some(), "{row:?}");
            }
            other => panic!("{other}"),
        }
    }
    (sums, live)
}

/// The same from the stand-in's books.
fn expected(books: &Value) -> (Sums, BTreeMap<i64, (i64, Option<i64>)>) {
    let figure = |value: &Value, name: &str| value[name].as_u64().unwrap();
    let sums = books["sums"].as_array().unwrap().iter().map(|sums| {
        let key = (sums["device"].as_i64().unwrap(), sums["stream"].as_i64());
        let value = (
            figure(sums, "allocations"),
            figure(sums, "frees"),
            figure(sums, "allocated_bytes"),
            figure(sums, "requested_bytes"),
        );
        (key, value)
    });
    let live = books["live"].as_array().unwrap().iter().map(|block| {
        let long = |name: &str| block[name].as_i64();
        (
            long("address").unwrap(),
            (long("bytes").unwrap(), long("requested")),
        )
    });
    (sums.collect(), live.collect())
}

/// A program that can load the stand-in.
pub struct Torch {
    pub program: Program,
    books: PathBuf,
    pub library: PathBuf,
}

impl Torch {
    pub fn start(bench: &Bench) -> Self {
        let library = bench.install_c10(&bench.libraries());
        let (libraries, books) = (bench.libraries(), bench.books());
        Self {
            program: Program::start("", &Program::exe(), &libraries, &books),
            books: bench.root().join("c10.json"),
            library,
        }
    }

    pub fn load(&mut self) {
        self.program
            .tell(&format!("open {}", self.library.display()));
    }

    pub fn call(&mut self, call: &str) -> i64 {
        self.program.call(call)
    }

    /// Listeners of malloc and of free.
    pub fn listeners(&mut self) -> (i64, i64) {
        let both = self.call("fake_c10_listeners");
        (both & 0xffff, both >> 16)
    }

    pub fn books(&mut self) -> Value {
        let path = self.books.display().to_string();
        assert_eq!(self.call(&format!("fake_c10_write_books text:{path}")), 0);
        serde_json::from_slice(&std::fs::read(&self.books).unwrap()).unwrap()
    }
}

/// Waits until something holds.
pub fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "never {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn hooks(daemon: &Daemon<'_>, library: &Path) {
    let name = library.to_string_lossy().into_owned();
    daemon.wait_for("hooked", |status| {
        let libraries = status["libraries"].as_array();
        libraries.is_some_and(|all| all.iter().any(|l| l.as_str() == Some(name.as_str())))
    });
}

/// A program that ran before the agent loads the library late; all places, four threads.
#[test]
fn blocks_of_a_late_library_equal_its_ledger() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    let mut daemon = Daemon::new(&bench, "c10-late", &["--window", "500ms"]);
    daemon.start();
    torch.load();
    hooks(&daemon, &torch.library);
    wait("listened to", || torch.listeners() == LISTENED);
    torch.call("fake_c10_churn 400 4");
    torch.call("fake_c10_out_of_memory 1048576 1");
    let books = torch.books();
    let pid = torch.program.pid();
    torch.program.end();
    daemon.stop();
    let rows = rows(&daemon.rows(Table::AllocEvents));
    assert_eq!(found(&rows), {
        let (sums, _) = expected(&books);
        // What lived was freed by the process's end.
        (sums, expected(&books).1)
    });
    let exits = rows.iter().filter(|row| row.api == "process_exit").count();
    assert_eq!(exits, books["live"].as_array().unwrap().len());
    let ooms: Vec<_> = rows.iter().filter(|row| row.op == "oom").collect();
    assert_eq!(ooms.len(), 1);
    assert_eq!(
        (ooms[0].requested, ooms[0].device, ooms[0].counted),
        (Some(1 << 20), Some(1), false)
    );
    let (attached, refused) = daemon.coverage(pid);
    assert_eq!((attached, refused), (4, vec![]));
    assert_eq!(daemon.causes(), Vec::<String>::new());
}

/// One perf event a place does the same as one link for all.
#[test]
fn perf_events_raise_the_counters_too() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let mut daemon = Daemon::new(&bench, "c10-perf", &["--uprobe-multi", "false"]);
    daemon.start();
    hooks(&daemon, &torch.library);

    wait("listened to", || torch.listeners() == LISTENED);
    torch.call("fake_c10_churn 100 1");
    let books = torch.books();
    torch.program.end();
    daemon.stop();
    let rows = rows(&daemon.rows(Table::AllocEvents));
    assert_eq!(found(&rows).0, expected(&books).0);
}

/// Blocks from before are unknown: their ends are rows that say so, and the allocator's own totals
/// come all the same.
#[test]
fn a_process_that_ran_before_is_told_of_from_then_on() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let old = torch.call("fake_c10_allocate 1000 0 3 0");
    let mut daemon = Daemon::new(&bench, "c10-running", &["--window", "200ms"]);
    daemon.start();
    hooks(&daemon, &torch.library);
    wait("listened to", || torch.listeners() == LISTENED);
    let new = torch.call("fake_c10_allocate 5000 0 -1 1");
    assert_eq!(torch.call(&format!("fake_c10_free {old} 0")), 0);
    assert_eq!(torch.call(&format!("fake_c10_free {new} 1")), 0);
    torch.program.end();
    daemon.stop();
    let rows = rows(&daemon.rows(Table::AllocEvents));
    assert_eq!(rows.len(), 3, "{rows:#?}");
    let [alloc, unknown, free] = [&rows[0], &rows[1], &rows[2]];
    assert_eq!(
        (alloc.bytes, alloc.requested, alloc.stream, alloc.allocated),
        (Some(5120), Some(5000), Some(-1), Some(1024 + 5120))
    );
    assert_eq!(
        (unknown.address, unknown.bytes, unknown.requested),
        (Some(old), Some(1024), None)
    );
    assert_eq!(
        (unknown.counted, unknown.alloc_seq, unknown.allocated),
        (false, None, Some(5120))
    );
    assert_eq!(
        (free.counted, free.alloc_seq, free.allocated),
        (true, Some(alloc.seq), Some(0))
    );
    // What it held before was not seen, and its samples say that.
    let samples = daemon.rows(Table::AllocatorSamples);
    let lossy = samples
        .iter()
        .map(|batch| batch.column_by_name("lossy").unwrap().as_boolean())
        .flat_map(|lossy| (0..lossy.len()).map(|row| lossy.value(row)));
    assert!(lossy.clone().count() > 0 && lossy.into_iter().all(|lossy| lossy));
}

/// A killed agent's probes stay, and so does what they count on; the next one goes on from the
/// journal. Taking the probes out lowers the counters.
#[test]
fn a_killed_agent_loses_no_block() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let mut daemon = Daemon::new(&bench, "c10-killed", &[]);
    daemon.start();
    hooks(&daemon, &torch.library);
    wait("listened to", || torch.listeners() == LISTENED);
    torch.call("fake_c10_churn 300 2");
    daemon.kill();
    assert_eq!(torch.listeners(), LISTENED);
    torch.call("fake_c10_churn 300 2");
    daemon.start();
    torch.call("fake_c10_churn 300 2");
    let books = torch.books();
    daemon.stop();
    let found = found(&rows(&daemon.rows(Table::AllocEvents)));
    assert_eq!(found, expected(&books));
    assert!(daemon.run("detach").status.success());
    wait("silent", || torch.listeners() == (0, 0));
    torch.program.end();
}

/// A trace holds its probes itself: when it is killed the kernel lowers the counters.
#[test]
fn a_killed_trace_leaves_no_listener() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let hooked = torch.library.to_string_lossy().into_owned();
    let mut trace = bench
        .tracer(&["--libraries", &hooked, "--quiet"])
        .args(["sleep", "600"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait("listened to", || torch.listeners() == LISTENED);
    trace.kill().unwrap();
    trace.wait().unwrap();
    wait("silent", || torch.listeners() == (0, 0));
    torch.program.end();
    // The command outlived the agent.
    let _ = Command::new("true").status();
}

/// The layer can be left out, by a flag, and the kill switch takes it out as well.
#[test]
fn the_layer_is_off_when_told_so() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let mut daemon = Daemon::new(&bench, "c10-without", &["--no-framework"]);
    daemon.start();
    let status = daemon.wait_for("refused", |status| {
        !Daemon::refused(status, &bench).is_empty()
    });
    let refused = Daemon::refused(&status, &bench);
    assert!(refused[0].1.contains("framework = false"), "{refused:?}");
    assert_eq!(status["discovery"]["framework"], false);
    assert_eq!(torch.listeners(), (0, 0));
    daemon.stop();

    let mut daemon = Daemon::new(&bench, "c10-switch", &[]);
    daemon.start();
    wait("listened to", || torch.listeners() == LISTENED);
    assert!(daemon.run("off").status.success());
    wait("silent", || torch.listeners() == (0, 0));
    assert!(daemon.run("on").status.success());
    wait("listened to again", || torch.listeners() == LISTENED);
    daemon.stop();
    torch.program.end();
}

/// An allocator that does not cache tells of blocks by its probes alone: a block is then all of
/// what the driver gave at its address.
#[test]
fn blocks_that_nobody_reports_are_told_of_by_the_probes() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let mut daemon = Daemon::hooking(&bench, "c10-uncached", &[]);
    daemon.start();
    hooks(&daemon, &torch.library);
    wait("listened to", || torch.listeners() == LISTENED);
    // 4096 bytes at a real address, and a block there.
    torch.program.tell("shared");
    let address = torch.program.allocate(4096);
    torch.call(&format!("fake_c10_tell_uncached {address} 4000 1"));
    torch.call(&format!("fake_c10_tell_uncached {address} 4000 0"));
    torch.call(&format!("fake_c10_tell_uncached {address} 4000 1"));
    // The second one's end is the driver's alone.
    torch.program.free(address);
    torch.program.end();
    daemon.stop();
    let rows = rows(&daemon.rows(Table::AllocEvents));
    let told: Vec<_> = rows
        .iter()
        .map(|row| (row.op.as_str(), row.api.as_str(), row.bytes, row.requested))
        .collect();
    assert_eq!(
        told,
        [
            ("alloc", "pytorch:malloc", Some(4096), Some(4000)),
            ("free", "pytorch:free", Some(4096), Some(4000)),
            ("alloc", "pytorch:malloc", Some(4096), Some(4000)),
            ("free", "cuMemFree_v2", Some(4096), Some(4000)),
        ]
    );
    assert!(rows.iter().all(|row| row.counted) && rows[3].implicit);
}

/// The kernel allows one counter a place: who came first without it is in the way, and is named.
#[test]
fn a_foreign_probe_without_the_counter_is_named() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let bytes = std::fs::read(&torch.library).unwrap();
    let probes = usdt::probes(bytes.as_slice()).unwrap();
    let taken = probes.iter().find(|probe| probe.name == "malloc").unwrap();
    let foreign = perf::open_everywhere(&torch.library, taken.offset, 0).unwrap();
    let mut daemon = Daemon::new(&bench, "c10-foreign", &[]);
    daemon.start();
    hooks(&daemon, &torch.library);
    // All places but that one.
    wait("listened to", || {
        torch.listeners() == (LISTENED.0 - 1, LISTENED.1)
    });
    let pid = torch.program.pid();
    wait("told", || daemon.coverage(pid).0 > 0);
    torch.program.end();
    daemon.stop();
    drop(foreign);
    let (attached, refused) = daemon.coverage(pid);
    assert_eq!(attached, 3);
    assert_eq!(
        (refused.len(), refused[0].1.as_str()),
        (1, "pytorch:malloc")
    );
    let reason = &refused[0].2;
    assert!(
        reason.contains("1 of its places") && reason.contains("another tool has a probe"),
        "{reason}"
    );
}
