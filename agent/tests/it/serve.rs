//! The daemon by itself, without a collector: restarts, locks, `status`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use arrow::array::{Array, AsArray};
use vramscope_agent::spool::folder;
use vramscope_wire::{Table, parquet_file};

use crate::standins::Bench;

/// A daemon's folders; its probes are taken out in the end.
struct Daemon<'a> {
    bench: &'a Bench,
    pins: String,
}

impl<'a> Daemon<'a> {
    fn new(bench: &'a Bench, name: &str) -> Self {
        let pins = format!("/sys/fs/bpf/vramscope-test-{}-{name}", std::process::id());
        Self { bench, pins }
    }

    fn spool(&self) -> PathBuf {
        self.bench.trace().join("spool")
    }

    fn command(&self, what: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope-agent"));
        command
            .arg(what)
            .args(["--pin-path", &self.pins, "--flush-interval", "100ms"])
            .arg("--spool")
            .arg(self.spool())
            .arg("--off-file")
            .arg(self.bench.root().join("off"))
            // Other programs of this host are none of the test's business.
            .arg("--only-libraries")
            .arg(format!("{}/*", self.bench.root().display()))
            .arg("--nvml-library")
            .arg(self.bench.libraries().join("libnvidia-ml.so.1"))
            .arg("--libraries")
            .arg(self.bench.libraries().join("libcuda.so.1"))
            .env("VRAMSCOPE_FAKE_DIR", self.bench.books());
        command
    }

    fn run(&self, what: &str) -> Output {
        self.command(what).output().unwrap()
    }

    /// Starts it and waits until it hooks.
    fn start(&self) -> Child {
        let mut child = self
            .command("serve")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n");
        child
    }

    fn stop(child: &mut Child) {
        // SAFETY: our own child, not waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
        assert!(child.wait().unwrap().success());
    }

    /// The causes of loss in all windows written so far.
    fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        for file in folder::list(&self.spool()).unwrap() {
            if file.table != Table::AgentWindows {
                continue;
            }
            let opened = std::fs::File::open(&file.path).unwrap();
            for batch in parquet_file::decode(file.table, opened).unwrap() {
                let lists = batch
                    .column_by_name("lost_by_cause")
                    .unwrap()
                    .as_list::<i32>();
                let names = lists.values().as_struct().column_by_name("cause").unwrap();
                let names = names.as_string::<i32>();
                causes.extend((0..names.len()).map(|i| names.value(i).to_string()));
            }
        }
        causes
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.run("detach");
        let _ = std::fs::remove_dir(&self.pins);
    }
}

/// With the probes still in the kernel a restart misses nothing; once they were taken out, what
/// happened until the next start was not seen, and the window says so.
#[test]
fn a_restart_without_probes_is_a_gap_and_one_with_them_is_not() {
    let Some(bench) = Bench::new() else { return };
    let daemon = Daemon::new(&bench, "gap");
    Daemon::stop(&mut daemon.start());
    Daemon::stop(&mut daemon.start());
    assert_eq!(daemon.causes(), [""; 0]);
    let detached = daemon.run("detach");
    assert!(String::from_utf8_lossy(&detached.stdout).starts_with("took the probes"));
    Daemon::stop(&mut daemon.start());
    assert_eq!(daemon.causes(), ["restart_gap"]);
}

#[test]
fn a_second_agent_on_the_same_spool_is_refused() {
    let Some(bench) = Bench::new() else { return };
    let daemon = Daemon::new(&bench, "second");
    let mut first = daemon.start();
    let second = daemon.run("serve");
    let message = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1));
    assert!(message.contains("belongs to a running agent"), "{message}");
    let detach = daemon.run("detach");
    assert_eq!(
        detach.status.code(),
        Some(1),
        "probes in use are not taken out"
    );
    Daemon::stop(&mut first);
}

/// Exit code 1 before any agent ran, 0 while one runs, 3 after it.
#[test]
fn status_tells_whether_it_runs() {
    let Some(bench) = Bench::new() else { return };
    let daemon = Daemon::new(&bench, "status");
    assert_eq!(daemon.run("status").status.code(), Some(1));
    let mut child = daemon.start();
    // The first flush writes it.
    let mut code = Some(1);
    for _ in 0..100 {
        code = daemon.run("status").status.code();
        if code == Some(0) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(code, Some(0));
    let text = String::from_utf8_lossy(&daemon.run("status").stdout).into_owned();
    assert!(
        text.contains(&format!("running, pid {}", child.id())),
        "{text}"
    );
    assert!(text.contains("libcuda.so.1"), "{text}");
    Daemon::stop(&mut child);
    assert_eq!(daemon.run("status").status.code(), Some(3));
}
