//! A daemon with folders of its own, and what it wrote.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int32Type, Int64Type};
use serde_json::Value;
use vramscope_agent::spool::folder;
use vramscope_fakes::ledger::Kind;
use vramscope_wire::{Table, parquet_file};

use crate::standins::Bench;

/// Device, kind -> allocations, frees by calls, bytes that are left.
pub type Totals = BTreeMap<(i32, String), (u64, u64, u64)>;

/// See the module's text. Its probes are taken out in the end.
pub struct Daemon<'a> {
    bench: &'a Bench,
    pins: String,
    options: Vec<String>,
    child: Option<Child>,
}

impl<'a> Daemon<'a> {
    /// `name` tells it from the other tests' daemons.
    pub fn new(bench: &'a Bench, name: &str, options: &[&str]) -> Self {
        let pins = format!("/sys/fs/bpf/vramscope-test-{}-{name}", std::process::id());
        Self {
            bench,
            pins,
            options: options.iter().map(|o| (*o).to_string()).collect(),
            child: None,
        }
    }

    /// The same, and the bench's libraries are hooked before any process maps them.
    pub fn hooking(bench: &'a Bench, name: &str, options: &[&str]) -> Self {
        let folder = bench.libraries();
        let files = format!("{0}/libcuda.so.1,{0}/libcudart.so.13", folder.display());
        Self::new(bench, name, &[&["--libraries", &files], options].concat())
    }

    pub fn spool(&self) -> PathBuf {
        self.bench.trace().join("spool")
    }

    pub fn off_file(&self) -> PathBuf {
        self.bench.root().join("off")
    }

    /// Where its maps are pinned.
    pub fn pins(&self) -> &Path {
        Path::new(&self.pins)
    }

    /// How many links it has in the kernel.
    pub fn links(&self) -> usize {
        let Ok(entries) = std::fs::read_dir(&self.pins) else {
            return 0;
        };
        entries
            .flatten()
            .filter_map(|entry| std::fs::read_dir(entry.path().join("links")).ok())
            .map(Iterator::count)
            .sum()
    }

    pub fn command(&self, what: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope-agent"));
        command
            .arg(what)
            .args(["--pin-path", &self.pins, "--flush-interval", "100ms"])
            .arg("--spool")
            .arg(self.spool())
            .arg("--off-file")
            .arg(self.off_file())
            // Other programs of this host are none of the test's business.
            .arg("--only-libraries")
            .arg(format!("{}/*", self.bench.root().display()))
            .arg("--nvml-library")
            .arg(self.bench.libraries().join("libnvidia-ml.so.1"))
            .args(self.framework_events())
            .args(&self.options)
            .env("VRAMSCOPE_FAKE_DIR", self.bench.books())
            .env_remove("LD_LIBRARY_PATH")
            .stderr(Stdio::null());
        command
    }

    /// Raw rows of frameworks are in the spool, unless the test is about the flight recorder.
    fn framework_events(&self) -> &'static [&'static str] {
        let is_given = |option: &String| option == "--framework-events";
        if self.options.iter().any(is_given) {
            &[]
        } else {
            &["--framework-events", "always"]
        }
    }

    pub fn run(&self, what: &str) -> Output {
        self.command(what).stderr(Stdio::piped()).output().unwrap()
    }

    /// Starts it and waits until it is ready.
    pub fn start(&mut self) {
        let log = self.bench.root().join("daemon.log");
        let mut child = self
            .command("serve")
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        self.child = Some(child);
        let log = || std::fs::read_to_string(&log).unwrap_or_default();
        assert_eq!(line, "ready\n", "{}", log());
    }

    pub fn signal(&self, signal: i32) {
        let pid = self.child.as_ref().unwrap().id();
        // SAFETY: our own child, not waited for yet.
        assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
    }

    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // SAFETY: our own child, not waited for yet.
            unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
            assert!(child.wait().unwrap().success());
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Waits until the libraries of the test's bench are hooked.
    pub fn wait_hooked_libraries(&self) {
        self.wait_hooked(&self.bench.libraries().to_string_lossy());
    }

    /// The state that it wrote last.
    pub fn status(&self) -> Value {
        let text = std::fs::read(self.spool().join("status.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or(Value::Null)
    }

    /// Waits until the state is as wanted.
    pub fn wait_for(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.wait_long_for(what, Duration::from_secs(60), wanted)
    }

    /// The same, for what takes a loaded machine a while.
    pub fn wait_long_for(
        &self,
        what: &str,
        at_most: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Value {
        let end = Instant::now() + at_most;
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < end, "never {what}: {status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until files below that folder are hooked: driver and runtime.
    pub fn wait_hooked(&self, folder: &str) {
        self.wait_for(&format!("hooked {folder}"), |status| {
            let libraries = status["libraries"].as_array();
            let count = libraries.map_or(0, |libraries| {
                libraries
                    .iter()
                    .filter(|l| l.as_str().is_some_and(|l| l.contains(folder)))
                    .count()
            });
            count >= 2
        });
    }

    /// Files below the test's folder that are not hooked as a whole, and why.
    pub fn refused(status: &Value, bench: &Bench) -> Vec<(String, String)> {
        let root = bench.root().to_string_lossy().into_owned();
        let refused = status["discovery"]["refused"].as_array();
        let text = |value: &Value| value.as_str().unwrap().to_string();
        refused
            .into_iter()
            .flatten()
            .map(|entry| (text(&entry[0]), text(&entry[1])))
            .filter(|(library, _)| library.contains(&root))
            .collect()
    }

    /// The rows of one table written so far.
    pub fn rows(&self, table: Table) -> Vec<RecordBatch> {
        folder::list(&self.spool())
            .unwrap()
            .into_iter()
            .filter(|file| file.table == table)
            .flat_map(|file| {
                let opened = std::fs::File::open(&file.path).unwrap();
                parquet_file::decode(file.table, opened).unwrap()
            })
            .collect()
    }

    /// The causes of loss in all windows written so far. A stack that is less good, as its quality
    /// says, is none.
    pub fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        for batch in self.rows(Table::AgentWindows) {
            let lists = batch.column_by_name("lost_by_cause").unwrap();
            let values = lists.as_list::<i32>().values().as_struct();
            let names = values.column_by_name("cause").unwrap().as_string::<i32>();
            causes.extend((0..names.len()).map(|i| names.value(i).to_string()));
        }
        causes.retain(|cause| cause != "stack_not_copied" && cause != "python_not_read");
        causes
    }

    /// Counted calls of one process, or of all.
    pub fn totals(&self, of: Option<u32>) -> Totals {
        let mut totals = Totals::new();
        for batch in self.rows(Table::AllocEvents) {
            let column = |name: &str| batch.column_by_name(name).unwrap();
            let text = |name: &str| column(name).as_string::<i32>();
            let pids = column("pid").as_primitive::<Int32Type>();
            let devices = column("device").as_primitive::<Int32Type>();
            let bytes = column("bytes").as_primitive::<Int64Type>();
            let counted = column("counted").as_boolean();
            let implicit = column("implicit").as_boolean();
            for row in 0..batch.num_rows() {
                let is_ours = of.is_none_or(|pid| pids.value(row) as u32 == pid);
                if !is_ours || !counted.value(row) || implicit.value(row) {
                    continue;
                }
                let place = (
                    devices.value(row),
                    text("memory_kind").value(row).to_string(),
                );
                let entry = totals.entry(place).or_default();
                let bytes = bytes.value(row) as u64;
                match text("op").value(row) {
                    "alloc" | "register" => {
                        entry.0 += 1;
                        entry.2 += bytes;
                    }
                    "free" | "unregister" => {
                        entry.1 += 1;
                        entry.2 -= bytes;
                    }
                    other => panic!("{other:?} is no call of these programs"),
                }
            }
        }
        totals
    }

    /// The library, symbol and reason of what a process's last row says is not hooked; and how many
    /// functions are.
    pub fn coverage(&self, pid: u32) -> (usize, Vec<(String, String, String)>) {
        let rows = self.coverage_rows(pid);
        let attached = rows.iter().filter(|(.., reason)| reason.is_none()).count();
        let refused = rows
            .into_iter()
            .filter_map(|(library, symbol, reason)| Some((library, symbol, reason?)))
            .collect();
        (attached, refused)
    }

    /// Library, symbol and, of what is not hooked, the reason: all that a process's last row says.
    pub fn coverage_rows(&self, pid: u32) -> Vec<(String, String, Option<String>)> {
        let mut last = Vec::new();
        for batch in self.rows(Table::Processes) {
            let pids = batch.column_by_name("pid").unwrap();
            let lists = batch.column_by_name("coverage").unwrap().as_list::<i32>();
            for row in 0..batch.num_rows() {
                if pids.as_primitive::<Int32Type>().value(row) as u32 != pid {
                    continue;
                }
                let list = lists.value(row);
                let list = list.as_struct();
                let text = |name: &str| list.column_by_name(name).unwrap().as_string::<i32>();
                let attached = list.column_by_name("attached").unwrap().as_boolean();
                let entries = (0..list.len()).map(|entry| {
                    let value = |name: &str| text(name).value(entry).to_string();
                    let reason = (!attached.value(entry)).then(|| value("reason"));
                    (value("library"), value("symbol"), reason)
                });
                last = entries.collect();
            }
        }
        last
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = self.run("detach");
        let _ = std::fs::remove_dir(&self.pins);
    }
}

/// What the drivers of these processes wrote down.
pub fn ledgers(bench: &Bench, of: Option<u32>) -> Totals {
    let mut totals = Totals::new();
    for ledger in bench.ledgers() {
        if of.is_some_and(|pid| ledger.pid != pid) {
            continue;
        }
        for device in 0..2 {
            for kind in Kind::ALL {
                let t = ledger.totals(device, kind);
                if t.allocations > 0 {
                    let place = (device as i32, kind.name().to_string());
                    let entry = totals.entry(place).or_default();
                    entry.0 += t.allocations;
                    entry.1 += t.frees;
                    entry.2 += t.live_bytes;
                }
            }
        }
    }
    totals
}
