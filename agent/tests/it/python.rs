//! Python frames of known programs, against what the programs' own interpreters say.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Int32Type, Int64Type};
use vramscope_fakes::pythons;
use vramscope_wire::Table;

use crate::daemon::Daemon;
use crate::framework;
use crate::standins::Bench;

/// File, function, line.
type Frame = (String, String, i64);

/// A Python program that does as it is told.
struct Script {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pid: u32,
}

impl Script {
    fn start(bench: &Bench, command: &mut Command) -> Self {
        let mut child = command
            .env("LD_LIBRARY_PATH", bench.libraries())
            .env("VRAMSCOPE_FAKE_DIR", bench.books())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let pid = line.strip_prefix("ready ").expect("it is ready").trim();
        let pid = pid.parse().unwrap();
        Self {
            child,
            input,
            output,
            pid,
        }
    }

    /// Lets it go on; gives what it expects, by the size of the call.
    fn go(&mut self) -> HashMap<i64, Vec<Frame>> {
        writeln!(self.input, "go").unwrap();
        let mut expected = HashMap::new();
        loop {
            let mut line = String::new();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "it broke off"
            );
            if line == "done\n" {
                return expected;
            }
            let (bytes, frames) = serde_json::from_str(&line).unwrap();
            expected.insert(bytes, frames);
        }
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }
}

/// One frame of a stack: its kind and what names it.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    is_python: bool,
    frame: Frame,
}

/// What `frames.py` calls of the runtime.
const MALLOC: &str = "cudaMalloc";

/// A call's quality and stack.
type Call = (String, Vec<Row>);

/// Allocations of one process through `api`, by the size asked for.
fn calls(daemon: &Daemon<'_>, pid: u32, api: &str) -> HashMap<i64, Call> {
    let mut stacks = HashMap::new();
    for batch in daemon.rows(Table::Stacks) {
        let ids = batch.column_by_name("stack_id").unwrap();
        let ids = ids.as_primitive::<Int64Type>();
        let lists = batch.column_by_name("frames").unwrap().as_list::<i32>();
        for row in 0..batch.num_rows() {
            let list = lists.value(row);
            let list = list.as_struct();
            let text = |name: &str| {
                list.column_by_name(name)
                    .unwrap()
                    .as_string::<i32>()
                    .clone()
            };
            let (kinds, modules, functions) = (text("kind"), text("module"), text("function"));
            let lines = list.column_by_name("line").unwrap();
            let lines = lines.as_primitive::<Int32Type>();
            let frames: Vec<Row> = (0..list.len())
                .map(|i| Row {
                    is_python: kinds.value(i) == "python",
                    frame: (
                        modules.value(i).to_string(),
                        functions.value(i).to_string(),
                        if lines.is_null(i) {
                            -1
                        } else {
                            i64::from(lines.value(i))
                        },
                    ),
                })
                .collect();
            stacks.insert(ids.value(row), frames);
        }
    }
    let mut calls = HashMap::new();
    for batch in daemon.rows(Table::AllocEvents) {
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let pids = column("pid").as_primitive::<Int32Type>();
        // A framework's blocks are rounded up, what is asked of the driver is not.
        let bytes = column(if api == MALLOC {
            "bytes"
        } else {
            "requested_bytes"
        });
        let bytes = bytes.as_primitive::<Int64Type>();
        let ids = column("stack_id").as_primitive::<Int64Type>();
        let (apis, qualities) = (column("api"), column("stack_quality"));
        let (apis, qualities) = (apis.as_string::<i32>(), qualities.as_string::<i32>());
        for row in 0..batch.num_rows() {
            if pids.value(row) as u32 == pid && apis.value(row) == api {
                let stack = stacks.get(&ids.value(row)).cloned().unwrap_or_default();
                let call = (qualities.value(row).to_string(), stack);
                assert!(calls.insert(bytes.value(row), call).is_none());
            }
        }
    }
    calls
}

fn is_read(status: &serde_json::Value, pid: u32) -> bool {
    let pythons = status["discovery"]["pythons"].as_array();
    pythons
        .into_iter()
        .flatten()
        .any(|python| python["pid"].as_u64() == Some(pid.into()) && python["refused"].is_null())
}

fn script(name: &str) -> PathBuf {
    Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap())
        .join("tests/it/python")
        .join(name)
}

fn find(minor: u32) -> Option<PathBuf> {
    let found = pythons::find(minor);
    if found.is_none() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: no CPython 3.{minor}");
    }
    found
}

/// Frames that one record has room for; those of 3.12 and later share it with the marks between.
const ROOM: usize = 64;

fn every_frame_is_there(minor: u32) {
    let Some(python) = find(minor) else { return };
    every_frame_of(&python, &format!("3-{minor}"));
}

fn every_frame_of(python: &Path, name: &str) {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, &format!("py{name}"), &[]);
    daemon.start();
    daemon.wait_hooked_libraries();
    let mut program = Script::start(&bench, Command::new(python).arg(script("frames.py")));
    daemon.wait_for("read the interpreter", |status| {
        is_read(status, program.pid)
    });
    let expected = program.go();
    let pid = program.pid;
    daemon.stop();
    program.end();
    let calls = calls(&daemon, pid, MALLOC);
    assert!(expected.len() > 400, "{}", expected.len());
    let (mut whole, mut cut, mut full, mut compared) = (0, 0, 0, 0);
    for (bytes, frames) in &expected {
        let (quality, stack) = calls
            .get(bytes)
            .unwrap_or_else(|| panic!("no call of {bytes} bytes, from {frames:?}"));
        let python = stack.iter().filter(|row| row.is_python);
        let found: Vec<Frame> = python.map(|row| row.frame.clone()).collect();
        if quality.starts_with("truncated") && found.len() < frames.len() {
            assert!(found.len() > ROOM / 2, "{quality}: {found:#?}");
            assert_eq!(found, frames[..found.len()], "{bytes}: the innermost");
            cut += 1;
        } else {
            assert_eq!(found, *frames, "{bytes} bytes, {quality}");
            whole += 1;
        }
        assert!(quality.ends_with("+python"), "{bytes}: {quality}");
        full += usize::from(quality == "full+python");
        // The sort is C code between its caller and what it calls to compare.
        if let Some(at) = stack.iter().position(|row| row.frame.1.ends_with("__lt__")) {
            assert!(
                stack[at].is_python && !stack[at + 1].is_python,
                "{stack:#?}"
            );
            compared += 1;
        }
        assert!(!stack[0].is_python && stack[0].frame.1 == "cudaMalloc");
    }
    // Those of `deep`, and what the executor's thread or asyncio has beyond the room.
    assert!(cut >= 1 && cut < whole / 20, "{cut} of {}", whole + cut);
    assert!(
        full > whole * 9 / 10,
        "{full} of {whole} were unwound to their ends"
    );
    assert!(compared >= 8, "{compared}");
}

#[test]
fn every_frame_of_cpython_3_10_is_there() {
    every_frame_is_there(10);
}

#[test]
fn every_frame_of_cpython_3_11_is_there() {
    every_frame_is_there(11);
}

#[test]
fn every_frame_of_cpython_3_12_is_there() {
    every_frame_is_there(12);
}

#[test]
fn every_frame_of_cpython_3_13_is_there() {
    every_frame_is_there(13);
}

/// Hot events of a framework carry frame pointers and Python, and a whole stack only now and then:
/// the Python frames are there either way.
#[test]
fn every_frame_above_a_frameworks_allocator_is_there() {
    let Some(python) = find(12) else { return };
    let Some(bench) = Bench::new() else { return };
    let library = bench.install_c10(&bench.libraries());
    let mut daemon = Daemon::new(
        &bench,
        "py-c10",
        &["--framework-events", "always", "--framework-stacks", "1"],
    );
    daemon.start();
    let mut command = Command::new(python);
    command.arg(script("frames.py")).arg(&library);
    let mut program = Script::start(&bench, &mut command);
    framework::hooks(&daemon, &library);
    daemon.wait_for("read the interpreter", |status| {
        is_read(status, program.pid)
    });
    let expected = program.go();
    let pid = program.pid;
    daemon.stop();
    program.end();
    let calls = calls(&daemon, pid, "pytorch:malloc");
    assert!(expected.len() > 400, "{}", expected.len());
    let mut qualities = BTreeMap::new();
    for (bytes, frames) in &expected {
        let (quality, stack) = calls
            .get(bytes)
            .unwrap_or_else(|| panic!("no call of {bytes} bytes, from {frames:?}"));
        *qualities.entry(quality.as_str()).or_insert(0) += 1;
        let python = stack.iter().filter(|row| row.is_python);
        let found: Vec<Frame> = python.map(|row| row.frame.clone()).collect();
        let is_cut = quality.starts_with("truncated") && found.len() > ROOM / 2;
        let room = if is_cut { found.len() } else { frames.len() };
        assert_eq!(found, frames[..room], "{bytes} bytes, {quality}");
        assert!(quality.ends_with("+python"), "{bytes}: {quality}");
        // What the report was made from, as the runtime's calls begin with themselves.
        assert_eq!(
            (stack[0].is_python, stack[0].frame.1.as_str()),
            (false, "c10::reportMemoryUsageToProfiler")
        );
    }
    let full = qualities.get("full+python").copied().unwrap_or(0);
    assert!(full > 0 && full < expected.len() / 2, "{qualities:?}");
}

/// Distributions link the interpreter into the program, and strip it.
#[test]
fn every_frame_of_a_static_stripped_interpreter_is_there() {
    let python = Path::new("/usr/bin/python3");
    let output = Command::new(python)
        .args(["-c", "import sys; print(sys.version_info[1])"])
        .output();
    let minor = output.ok().and_then(|output| {
        let text = String::from_utf8(output.stdout).ok()?;
        text.trim().parse::<u32>().ok()
    });
    if !minor.is_some_and(|minor| (10..=13).contains(&minor)) {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: no /usr/bin/python3 of 3.10 to 3.13"
        );
        return;
    }
    every_frame_of(python, "system");
}

/// What is not known is said, and guessed by nobody.
#[test]
fn an_old_interpreter_is_refused_aloud() {
    let Some(python) = find(9) else { return };
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "py-old", &[]);
    daemon.start();
    daemon.wait_hooked_libraries();
    let mut program = Script::start(&bench, Command::new(python).arg(script("frames.py")));
    let pid = program.pid;
    let status = daemon.wait_for("refused the interpreter", |status| {
        let pythons = status["discovery"]["pythons"].as_array();
        pythons.into_iter().flatten().any(|python| {
            let reason = python["refused"].as_str().unwrap_or_default();
            python["pid"].as_u64() == Some(pid.into()) && reason.contains("CPython before 3.10")
        })
    });
    assert!(!is_read(&status, pid));
    let expected = program.go();
    daemon.stop();
    program.end();
    let (_, refused) = daemon.coverage(pid);
    let said = |(_, symbol, reason): &(String, String, String)| {
        symbol == "python frames" && reason.contains("CPython before 3.10")
    };
    assert!(refused.iter().any(said), "{refused:?}");
    let calls = calls(&daemon, pid, MALLOC);
    for bytes in expected.keys() {
        let (quality, stack) = &calls[bytes];
        assert!(!quality.ends_with("+python"), "{quality}");
        assert!(stack.iter().all(|row| !row.is_python));
    }
}
