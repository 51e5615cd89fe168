//! A daemon under test, with folders and probes of its own.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use crate::standins::Bench;

/// A daemon's folders; its probes are taken out in the end.
pub struct Daemon<'a> {
    bench: &'a Bench,
    pins: String,
    /// More options of `serve`.
    pub options: Vec<String>,
}

impl<'a> Daemon<'a> {
    pub fn new(bench: &'a Bench, name: &str) -> Self {
        let pins = format!("/sys/fs/bpf/vramscope-test-{}-{name}", std::process::id());
        Self {
            bench,
            pins,
            options: Vec::new(),
        }
    }

    pub fn spool(&self) -> PathBuf {
        self.bench.trace().join("spool")
    }

    pub fn command(&self, what: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope-agent"));
        command
            .arg(what)
            .args(["--pin-path", &self.pins, "--flush-interval", "100ms"])
            .arg("--spool")
            .arg(self.spool())
            .arg("--nvml-library")
            .arg(self.bench.libraries().join("libnvidia-ml.so.1"))
            .arg("--libraries")
            .arg(self.bench.libraries().join("libcuda.so.1"))
            .args(&self.options)
            .env("VRAMSCOPE_FAKE_DIR", self.bench.books());
        command
    }

    pub fn run(&self, what: &str) -> Output {
        self.command(what).output().unwrap()
    }

    /// Starts it and waits until it hooks.
    pub fn start(&self) -> Child {
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

    pub fn stop(child: &mut Child) {
        // SAFETY: our own child, not waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
        assert!(child.wait().unwrap().success());
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.run("detach");
        let _ = std::fs::remove_dir(&self.pins);
    }
}
