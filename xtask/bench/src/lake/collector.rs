//! A collector process: started, asked about, killed.
//!
//! [`Plant::LyingSync`] is the bug that the crash harness has to catch: the process runs under a
//! seccomp filter that answers every system call for durability with success and does nothing.
//! To the collector it looks as if its data were on disk, so that it acknowledges before they
//! are. The program itself is the one that is measured otherwise, byte for byte.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a start may take: a large log is read first.
const START: Duration = Duration::from_secs(120);
/// How long an orderly stop may take: it commits what waits.
const STOP: Duration = Duration::from_secs(300);

/// What is wrong with a collector on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Nothing.
    None,
    /// fsync and its like do nothing and say that they did.
    LyingSync,
}

/// How collectors are started.
#[derive(Debug, Clone)]
pub struct Starter {
    binary: PathBuf,
    flags: Vec<String>,
    log: PathBuf,
    plant: Plant,
    commands: Vec<String>,
    serve_help: String,
}

impl Starter {
    /// Looks at the program: which doors it has that would be in the way.
    pub fn new(binary: &Path, log: &Path, plant: Plant) -> Result<Starter> {
        let serve = help(binary, &["serve", "--help"])?;
        let mut flags = Vec::new();
        for door in ["--http-listen", "--postgres-listen"] {
            if serve.contains(door) {
                flags.extend([door.to_string(), "off".to_string()]);
            }
        }
        let whole = help(binary, &["--help"])?;
        let words = whole.lines().filter_map(|line| {
            let word = line.strip_prefix("  ")?.split_whitespace().next()?;
            line.starts_with("  ").then(|| word.to_string())
        });
        Ok(Starter {
            binary: binary.to_path_buf(),
            flags,
            log: log.to_path_buf(),
            plant,
            commands: words.collect(),
            serve_help: serve,
        })
    }

    /// Whether the program has a command.
    pub fn has(&self, command: &str) -> bool {
        self.commands.iter().any(|word| word == command)
    }

    /// Whether `serve` has a flag.
    pub fn takes(&self, flag: &str) -> bool {
        self.serve_help.contains(flag)
    }

    /// A command of the program on a data folder, its output in our log.
    pub fn command(&self, command: &str, data: &Path) -> Result<Command> {
        let mut started = Command::new(&self.binary);
        clean(&mut started);
        started.arg(command).arg("--data").arg(data);
        started
            .stdin(Stdio::null())
            .stdout(self.open_log()?)
            .stderr(self.open_log()?);
        Ok(started)
    }

    /// What `status --json` tells of a data folder.
    pub fn status(&self, data: &Path) -> Result<serde_json::Value> {
        let mut command = Command::new(&self.binary);
        clean(&mut command);
        let output = command
            .args(["status", "--json", "--data"])
            .arg(data)
            .output()
            .with_context(|| format!("failed to run {}", self.binary.display()))?;
        serde_json::from_slice(&output.stdout).context("status printed no JSON")
    }

    fn open_log(&self) -> Result<File> {
        File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("failed to open log {}", self.log.display()))
    }

    /// Starts one and waits until it listens.
    pub fn start(&self, data: &Path, flags: &[String]) -> Result<Collector> {
        let mut command = Command::new(&self.binary);
        clean(&mut command);
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--data"])
            .arg(data)
            .args(&self.flags)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(self.open_log()?);
        end_with_us(&mut command);
        if self.plant == Plant::LyingSync {
            lie_about_syncs(&mut command);
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("failed to start {}", self.binary.display()))?;
        let (sender, lines) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    // Whoever waited has its line; the rest is only read away.
                    let _ = sender.send(line);
                }
            });
        }
        let mut collector = Collector {
            child,
            address: String::new(),
        };
        let end = Instant::now() + START;
        while collector.address.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(address) = line.strip_prefix("listening on ") {
                        collector.address = address.trim().to_string();
                    }
                }
                Err(_) => bail!(
                    "the collector does not listen within {} s; its log is {}:\n{}",
                    START.as_secs(),
                    self.log.display(),
                    tail(&self.log)
                ),
            }
        }
        Ok(collector)
    }
}

/// The last lines of a log.
pub fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}

/// A running collector. Killed when dropped.
#[derive(Debug)]
pub struct Collector {
    child: Child,
    /// Where it listens, as `ADDRESS:PORT`.
    pub address: String,
}

impl Collector {
    /// SIGKILL: nothing can be cleaned up.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("failed to kill the collector")?;
        self.child
            .wait()
            .context("failed to wait for the collector")?;
        Ok(())
    }

    /// SIGTERM; waits for the end.
    pub fn stop(mut self) -> Result<ExitStatus> {
        // SAFETY: plain system call; our own child, not yet waited for.
        unsafe {
            libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM);
        }
        let end = Instant::now() + STOP;
        loop {
            if let Some(status) = self.child.try_wait().context("failed to wait")? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("the collector did not stop within {} s", STOP.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The status if it ended by itself.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Resident memory now and at most so far, in bytes, as the kernel counts it.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let path = format!("/proc/{}/status", self.child.id());
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("failed to read {path}"))?;
        let kib = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
        };
        let both = kib("VmRSS:").zip(kib("VmHWM:"));
        let (now, peak) = both.with_context(|| format!("{path} tells no memory"))?;
        Ok((now << 10, peak << 10))
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn help(binary: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(binary)
        .args(arguments)
        .output()
        .with_context(|| format!("failed to run {}", binary.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Settings of the shell must not reach what is measured.
fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("VRAMSCOPE_") {
            command.env_remove(name);
        }
    }
}

/// Should we die, the kernel kills the child.
pub fn end_with_us(command: &mut Command) {
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// System calls that make something durable.
const SYNCS: [libc::c_long; 6] = [
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_sync_file_range,
    libc::SYS_msync,
];

/// Lets the system calls for durability return 0 without being made: a filter that answers them
/// with error number 0.
fn lie_about_syncs(command: &mut Command) {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    // The system call's number is the first word of what a filter sees.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (index, call) in SYNCS.iter().enumerate() {
        filter.push(libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            // Behind the other comparisons and the statement that allows.
            jt: (SYNCS.len() - index) as u8,
            jf: 0,
            k: *call as u32,
        });
    }
    filter.push(statement(
        libc::BPF_RET | libc::BPF_K,
        libc::SECCOMP_RET_ALLOW,
    ));
    filter.push(statement(
        libc::BPF_RET | libc::BPF_K,
        libc::SECCOMP_RET_ERRNO,
    ));
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe; the filter
    // lives in the closure, and the kernel copies it.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog {
                len: filter.len() as u16,
                filter: filter.as_mut_ptr(),
            };
            let no_new = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
            if no_new != 0 || libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Under the filter a sync of an impossible file descriptor succeeds; without it, it fails.
    #[test]
    fn the_planted_bug_makes_syncs_lie() {
        let script = "import os, sys\ntry:\n os.fsync(os.pipe()[0])\nexcept OSError:\n sys.exit(3)";
        let run = |plant: bool| {
            let mut command = Command::new("python3");
            command.args(["-c", script]).stderr(Stdio::null());
            if plant {
                lie_about_syncs(&mut command);
            }
            command.status()
        };
        let Ok(honest) = run(false) else {
            eprintln!("SKIPPED the_planted_bug_makes_syncs_lie: no python3");
            return;
        };
        assert_eq!(honest.code(), Some(3), "a pipe cannot be synced");
        assert_eq!(run(true).unwrap().code(), Some(0));
    }
}
