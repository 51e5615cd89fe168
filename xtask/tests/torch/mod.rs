//! The proof of the framework layer against the real PyTorch, on the stand-ins.
//!
//! A program allocates in many ways through PyTorch's own caching allocator and says at checkpoints
//! what that allocator knows: `torch.cuda.memory_stats()` and `memory_snapshot()`. The agent traces it.
//! At each checkpoint what follows from the rows equals the program's account exactly: allocated,
//! reserved, active and requested bytes, retries, out-of-memory errors, and the address map block for
//! block. It is compared twice: from `alloc_events` by a reading of its own (`replay`), and from the
//! `allocator_samples` and `segments` that were written while the program rested.
//!
//! The small variant (the allocator's two libraries, a C++ harness) always runs, and fetches what it
//! needs; the full one (all of PyTorch, from Python) runs if `cargo xtask torch --full` or `cargo xtask
//! test --with-torch` has fetched it. Without network, compiler or root both are skipped aloud.

mod compare;
mod replay;
mod spans;
mod stacks;
mod trace;
mod truth;

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use vramscope_fakes::ledger::{Kind, Layer, read_ledgers};
use xtask::project::Project;
use xtask::torch;

use crate::bench::{cannot_run, say, take_turn};
use compare::{Compared, Differences};
use trace::Trace;
use truth::Checkpoint;

/// How often the agent samples, and how long a program rests at a checkpoint: two samples lie in it if
/// the machine keeps up. None has to.
const WINDOW: &str = "250ms";
const REST: Duration = Duration::from_millis(600);

/// Blocks that the harness asks for by address alone, at its checkpoint "raw", and their bytes.
const RAW: (usize, u64) = (3, ((11 << 20) + 5) + 1111 + (50 << 20));

const EXPANDABLE: &str = "expandable_segments:True";
const SETTINGS: &str = "max_split_size_mb:64,roundup_power2_divisions:4";

/// One run's folders, and what is run in them.
struct Run<'a> {
    project: &'a Project,
    /// Interpreter and script, or the harness.
    program: &'a [&'a Path],
    settings: &'a str,
    /// PyTorch's.
    libraries: &'a Path,
    folder: tempfile::TempDir,
}

impl<'a> Run<'a> {
    fn new(
        project: &'a Project,
        program: &'a [&'a Path],
        settings: &'a str,
        libraries: &'a Path,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let run = Self {
            project,
            program,
            settings,
            libraries,
            folder,
        };
        std::fs::create_dir(run.path("out")).unwrap();
        std::fs::create_dir(run.path("books")).unwrap();
        run
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The agent's command, with what both ways of running it have in common.
    fn agent(&self, what: &str) -> Command {
        let standins = self.project.standins();
        let hooked = [
            standins.join("libcuda.so.1"),
            standins.join("libcudart.so.13"),
            self.libraries.join("libc10.so"),
            self.libraries.join("libc10_cuda.so"),
        ];
        let hooked = hooked.map(|path| path.display().to_string());
        let mut command = Command::new(self.project.binary("vramscope-agent"));
        command
            .arg(what)
            .args(["--window", WINDOW, "--libraries", &hooked.join(",")])
            // Other programs of this host are none of the test's business.
            .args(["--only-libraries", &hooked.join(",")])
            .arg("--off-file")
            .arg(self.path("off"))
            .arg("--nvml-library")
            .arg(standins.join("libnvidia-ml.so.1"))
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_PRELOAD");
        command
    }

    /// `env`, the program's variables, and the program: the agent itself must not load the stand-ins.
    fn words(&self) -> Vec<String> {
        let mut environment = Command::new("env");
        torch::on_standins(self.project, self.libraries, &mut environment);
        let mut words = vec!["env".to_string()];
        for (name, value) in environment.get_envs() {
            let value = value.unwrap().to_string_lossy();
            words.push(format!("{}={value}", name.to_string_lossy()));
        }
        words.push(format!("PYTORCH_CUDA_ALLOC_CONF={}", self.settings));
        words.push(format!(
            "VRAMSCOPE_FAKE_DIR={}",
            self.path("books").display()
        ));
        words.extend(self.program.iter().map(|path| path.display().to_string()));
        words.push(self.path("out").display().to_string());
        words
    }

    fn truths(&self, names: &[String]) -> Vec<Checkpoint> {
        let out = self.path("out");
        names
            .iter()
            .map(|name| Checkpoint::read(&out, name))
            .collect()
    }

    /// Fails if there is a difference, and keeps the files then.
    fn conclude(self, differences: &Differences, compared: &Compared) {
        let program = self.program[0].display();
        say(&format!("{program} {}: {compared:?}", self.settings));
        let lines = &differences.lines;
        if !lines.is_empty() {
            let kept = self.folder.keep();
            let first: Vec<&String> = lines.iter().take(20).collect();
            panic!(
                "{} differences, the first are {first:#?}; kept in {}",
                lines.len(),
                kept.display()
            );
        }
        assert!(compared.samples > 0, "no sample was taken at rest");
    }
}

/// A program that stops at checkpoints.
struct Stops {
    child: Child,
    go_ahead: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Stops {
    fn start(command: &mut Command, errors: &Path) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(errors).unwrap())
            .spawn()
            .unwrap();
        Self {
            go_ahead: child.stdin.take().unwrap(),
            lines: BufReader::new(child.stdout.take().unwrap()).lines(),
            child,
        }
    }

    /// Lets it go on at each checkpoint, after a rest, up to one that is named, or to its end. Gives
    /// their names.
    fn follow(&mut self, rest: Duration, last: Option<&str>) -> Vec<String> {
        let mut names = Vec::new();
        let mut is_done = false;
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            if let Some(name) = line.strip_prefix("checkpoint ") {
                names.push(name.to_string());
                if Some(name) == last {
                    return names;
                }
                std::thread::sleep(rest);
                writeln!(self.go_ahead).unwrap();
            }
            is_done |= line == "done";
        }
        let status = self.child.wait().unwrap();
        assert!(status.success() && is_done, "{status} after {names:?}");
        names
    }
}

impl Drop for Stops {
    fn drop(&mut self) {
        // Of a program that has ended this does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program under the agent.
fn traced(run: &Run<'_>) -> Command {
    let mut command = run.agent("trace");
    command
        .args(["--json", "-o"])
        .arg(run.path("trace"))
        .arg("--")
        .args(run.words());
    command
}

/// Runs a program under the agent and compares every checkpoint.
fn prove(run: Run<'_>) {
    let mut program = Stops::start(&mut traced(&run), &run.path("errors"));
    let names = program.follow(REST, None);

    let agent = run.project.binary("vramscope-agent");
    let trace = Trace::read(&agent, &run.path("trace"));
    equals_the_books(&trace, &run.path("books"));
    assert_eq!(trace.lost(), Vec::<&trace::Row>::new());
    let (mut differences, mut compared) = (Differences::default(), Compared::default());
    let truths = run.truths(&names);
    for truth in &truths {
        let raw = if truth.name == "raw" { RAW } else { (0, 0) };
        compare::checkpoint(truth, raw, &trace, &mut differences, &mut compared);
    }
    let last = truths.last().unwrap();
    compare::at_events(last, &trace, &mut differences, &mut compared);
    run.conclude(&differences, &compared);
    // The program did what it is for.
    assert!(names.len() > 10 && compared.blocks > 200, "{compared:?}");
    let pending = truths.iter().map(Checkpoint::pending).sum::<usize>();
    assert!(pending > 0, "no block waited for a stream");
    assert!(last.failures.len() > 3 && last.devices[0].num_alloc_retries > 4);
    assert!(compared.sample_segments > 0, "no map was taken at rest");
}

/// A daemon, whose probes are taken out with it.
struct Daemon<'a> {
    run: &'a Run<'a>,
    pins: String,
    child: Child,
}

impl<'a> Daemon<'a> {
    /// Waits until its probes are in place.
    fn start(run: &'a Run<'a>) -> Self {
        let pins = format!("/sys/fs/bpf/vramscope-torch-{}", std::process::id());
        let mut child = run
            .agent("serve")
            .args(["--pin-path", &pins, "--flush-interval", "100ms"])
            // Raw events into the spool as well, where they are read.
            .args(["--framework-events", "always", "--spool"])
            .arg(run.path("spool"))
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(run.path("agent-errors")).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let daemon = Self { run, pins, child };
        let said = || std::fs::read_to_string(run.path("agent-errors")).unwrap_or_default();
        assert_eq!(line, "ready\n", "{}", said());
        daemon
    }

    /// Ends it in order, and puts what it wrote where a trace would have it.
    fn stop(mut self) {
        // SAFETY: our own child, not waited for yet.
        unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM) };
        assert!(self.child.wait().unwrap().success());
        for entry in std::fs::read_dir(self.run.path("spool")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let parts = name
                .strip_suffix(".parquet")
                .and_then(|n| n.split_once('-'));
            let Some((_, table)) = parts else { continue };
            let folder = self.run.path("trace").join(table);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::hard_link(&path, folder.join(&name)).unwrap();
        }
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        // Of one that has ended this does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut detach = self.run.agent("detach");
        let _ = detach.args(["--pin-path", &self.pins]).output();
        let _ = std::fs::remove_dir_all(&self.pins);
    }
}

/// The agent comes when the program has run for a while and holds nothing on its first card: from then
/// on that card's figures are whole.
fn prove_late(run: &Run<'_>) -> (Differences, Compared) {
    let words = run.words();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    let mut program = Stops::start(&mut command, &run.path("errors"));
    program.follow(Duration::ZERO, Some("all-freed"));
    let daemon = Daemon::start(run);
    writeln!(program.go_ahead).unwrap();
    let names = program.follow(REST, None);
    daemon.stop();

    let agent = run.project.binary("vramscope-agent");
    let trace = Trace::read(&agent, &run.path("trace"));
    let (mut differences, mut compared) = (Differences::default(), Compared::default());
    for truth in &mut run.truths(&names) {
        let raw = if truth.name == "raw" { RAW } else { (0, 0) };
        truth.keep_device(0);
        compare::checkpoint(truth, raw, &trace, &mut differences, &mut compared);
    }
    (differences, compared)
}

/// What the driver gave and took back, against its own books.
fn equals_the_books(trace: &Trace, folder: &Path) {
    let ledgers = read_ledgers(folder).unwrap();
    let driver: Vec<_> = ledgers
        .iter()
        .filter(|l| l.layer == Layer::Driver)
        .collect();
    assert_eq!(driver.len(), 1, "one process reached the driver");
    let mut seen = 0;
    for kind in [Kind::Device, Kind::VmmPhysical, Kind::PinnedHost] {
        for device in [0, 1] {
            let totals = driver[0].totals(device, kind);
            let counted = |op: &str| {
                let rows = trace.events.iter().filter(|row| {
                    trace::text(row, "memory_kind") == kind.name()
                        && trace::number(row, "device") == Some(i64::from(device))
                        && trace::is(row, "counted")
                        && !trace::is(row, "implicit")
                        && trace::number(row, "result") == Some(0)
                });
                let of_op = rows.filter(|row| trace::text(row, "op") == op);
                let bytes = of_op.map(|row| trace::required(row, "bytes"));
                bytes.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
            };
            let given = (totals.allocations, totals.allocated_bytes);
            assert_eq!(counted("alloc"), given, "{kind:?} of device {device}");
            seen += totals.allocations;
        }
    }
    assert!(seen > 30, "{seen} allocations of the driver");
}

/// The project, and why the tests cannot run.
fn project() -> Result<Project, String> {
    let project = Project::find().unwrap();
    cannot_run(&project).map_or(Ok(project), Err)
}

/// What the small variant needs, or the reason, said aloud, why it is not there.
fn prepared(test: &str) -> Option<(Project, PathBuf, torch::Small)> {
    let prepared = project().and_then(|project| {
        let prepare = || {
            let small = torch::small(&torch::cache_folder()?)?;
            Ok((torch::harness(&project, &small)?, small))
        };
        let prepared: anyhow::Result<_> = prepare();
        let (harness, small) = prepared.map_err(|error| format!("{error:#}"))?;
        Ok((project, harness, small))
    });
    let said = prepared.map_err(|reason| say(&format!("SKIPPED {test}: {reason}")));
    said.ok()
}

fn on_the_allocator(test: &str, settings: &str) {
    let Some((project, harness, small)) = prepared(test) else {
        return;
    };
    let _turn = take_turn();
    prove(Run::new(&project, &[&harness], settings, &small.libraries));
}

/// All of PyTorch, or the reason, said aloud, why it is not there.
fn prepared_full(test: &str) -> Option<(Project, torch::Full)> {
    let prepared = project().and_then(|project| {
        let cache = torch::cache_folder().map_err(|error| format!("{error:#}"))?;
        let full = torch::find_full(&cache).ok_or_else(|| {
            "all of PyTorch is not in the cache: run `cargo xtask torch --full`, or `cargo xtask \
             test --with-torch`"
                .to_string()
        })?;
        Ok((project, full))
    });
    let said = prepared.map_err(|reason| say(&format!("SKIPPED {test}: {reason}")));
    said.ok()
}

fn on_all_of_pytorch(test: &str, settings: &str) {
    let Some((project, full)) = prepared_full(test) else {
        return;
    };
    let _turn = take_turn();
    let script = project.root.join("agent/fakes/torch/script.py");
    let program: [&Path; 2] = [&full.python, &script];
    prove(Run::new(&project, &program, settings, &full.libraries));
}

#[test]
fn rows_equal_the_allocator() {
    on_the_allocator("rows_equal_the_allocator", "");
}

#[test]
fn rows_equal_the_allocator_with_expandable_segments() {
    on_the_allocator(
        "rows_equal_the_allocator_with_expandable_segments",
        EXPANDABLE,
    );
}

#[test]
fn rows_equal_the_allocator_with_other_settings() {
    on_the_allocator("rows_equal_the_allocator_with_other_settings", SETTINGS);
}

#[test]
fn rows_equal_all_of_pytorch() {
    on_all_of_pytorch("rows_equal_all_of_pytorch", "");
}

#[test]
fn rows_equal_all_of_pytorch_with_expandable_segments() {
    on_all_of_pytorch(
        "rows_equal_all_of_pytorch_with_expandable_segments",
        EXPANDABLE,
    );
}

/// By default and with expandable segments.
#[test]
fn rows_of_a_program_that_ran_before_equal_the_allocator() {
    let test = "rows_of_a_program_that_ran_before_equal_the_allocator";
    let Some((project, harness, small)) = prepared(test) else {
        return;
    };
    let _turn = take_turn();
    for settings in ["", EXPANDABLE] {
        let program: [&Path; 1] = [&harness];
        let run = Run::new(&project, &program, settings, &small.libraries);
        let (differences, compared) = prove_late(&run);
        assert!(
            compared.checkpoints > 6 && compared.blocks > 10,
            "{compared:?}"
        );
        run.conclude(&differences, &compared);
    }
}
