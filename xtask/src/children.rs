//! Child processes that never outlive us.
//!
//! Invariants:
//! - each child leads a process group of its own, so a Ctrl-C at the terminal reaches only us
//!   and we stop the children in order;
//! - dropping a [`Child`] ends it: SIGTERM, a grace period, then SIGKILL, always by its own
//!   process id;
//! - should we die without dropping (SIGKILL), the kernel sends the child SIGTERM.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a child may take to end itself before it is killed.
const GRACE: Duration = Duration::from_secs(15);

/// How long a child that is stopped in order may take: it writes and sends what it has.
const ORDERLY: Duration = Duration::from_secs(60);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// What every wait returns after a Ctrl-C.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

extern "C" fn on_signal(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Turns SIGINT, SIGTERM and SIGHUP into an [`Interrupted`] error of whatever is waiting, so
/// that children are stopped by their destructors. A second signal ends us at once.
pub fn watch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `action` is fully initialised, the handler only stores to an atomic, and both
        // outlive the process.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESETHAND | libc::SA_RESTART;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Fails once a signal asked us to stop.
pub fn check_interrupted() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        return Err(Interrupted.into());
    }
    Ok(())
}

/// Sleeps, waking early to fail when we are asked to stop.
pub fn sleep(duration: Duration) -> Result<()> {
    let end = Instant::now() + duration;
    loop {
        check_interrupted()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}

/// Makes a command lead its own process group and end when we do.
pub fn tie_to_us(command: &mut Command) {
    command.process_group(0);
    let parent = std::process::id();
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // We may have died between the fork and the call above.
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// One running child whose output goes to a log file.
#[derive(Debug)]
pub struct Child {
    name: String,
    inner: std::process::Child,
    status: Option<ExitStatus>,
    log: PathBuf,
    lines: Receiver<String>,
}

impl Child {
    /// Starts `command` with both outputs in `log` (appended); lines of its standard output can
    /// also be waited for.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("failed to open log {}", log.display()))?;
        let for_stderr = file
            .try_clone()
            .with_context(|| format!("failed to open log {}", log.display()))?;
        tie_to_us(command);
        let mut inner = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(for_stderr)
            .spawn()
            .with_context(|| {
                format!(
                    "failed to start {name} ({})",
                    command.get_program().to_string_lossy()
                )
            })?;
        let lines = match inner.stdout.take() {
            Some(stdout) => tee(stdout, file),
            None => bail!("{name} has no standard output"),
        };
        Ok(Self {
            name: name.to_string(),
            inner,
            status: None,
            log: log.to_path_buf(),
            lines,
        })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.inner.id()
    }

    /// Where its output goes.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Waits for a line on standard output for which `wanted` gives a value.
    pub fn wait_for_line<T>(
        &mut self,
        limit: Duration,
        mut wanted: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        let end = Instant::now() + limit;
        loop {
            check_interrupted()?;
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => {
                    if let Some(value) = wanted(&line) {
                        return Ok(value);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Standard output is closed: it ended, or will print nothing more.
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.inner.wait().context("failed to wait")?;
                    self.status = Some(status);
                    bail!(
                        "{} ended ({status}) before it was ready; its log:\n{}",
                        self.name,
                        tail(&self.log, 30)
                    );
                }
            }
            if Instant::now() > end {
                bail!(
                    "{} was not ready within {} s; its log:\n{}",
                    self.name,
                    limit.as_secs(),
                    tail(&self.log, 30)
                );
            }
        }
    }

    /// Its exit status if it has ended.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self
                .inner
                .try_wait()
                .with_context(|| format!("failed to wait for {}", self.name))?;
        }
        Ok(self.status)
    }

    /// Waits until it ends by itself.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.poll()? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!(
                    "{} did not end within {} s; its log:\n{}",
                    self.name,
                    limit.as_secs(),
                    tail(&self.log, 30)
                );
            }
            sleep(Duration::from_millis(20))?;
        }
    }

    /// Waits until it ends by itself, and fails unless it succeeded.
    pub fn wait_success(&mut self, limit: Duration) -> Result<()> {
        let status = self.wait(limit)?;
        if !status.success() {
            bail!(
                "{} failed ({status}); its log:\n{}",
                self.name,
                tail(&self.log, 30)
            );
        }
        Ok(())
    }

    /// Asks it to end (SIGTERM), and fails unless it exits with 0.
    pub fn stop(mut self) -> Result<()> {
        if self.poll()?.is_none() {
            self.signal(libc::SIGTERM);
        }
        self.wait_success(ORDERLY)
    }

    /// Ends it at once, as a crash would (SIGKILL to the one process).
    pub fn kill(mut self) -> Result<()> {
        self.inner
            .kill()
            .with_context(|| format!("failed to kill {}", self.name))?;
        self.status = Some(self.inner.wait().context("failed to wait")?);
        Ok(())
    }

    fn signal(&self, signal: libc::c_int) {
        // The child has not been waited for (callers checked), so its id cannot be reused yet.
        // SAFETY: plain system call without pointers.
        unsafe {
            libc::kill(self.inner.id() as libc::pid_t, signal);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !matches!(self.poll(), Ok(None)) {
            return;
        }
        self.signal(libc::SIGTERM);
        let end = Instant::now() + GRACE;
        while Instant::now() < end {
            if !matches!(self.poll(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // SAFETY: plain system call; the group is led by our own child, not yet waited for.
        unsafe {
            libc::kill(-(self.inner.id() as libc::pid_t), libc::SIGKILL);
        }
        let _ = self.inner.wait();
    }
}

/// Runs a short command to its end and gives its output; ends it when we are asked to stop.
pub fn output(command: &mut Command) -> Result<Output> {
    tie_to_us(command);
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {program}"))?;
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    let status = loop {
        if let Some(status) = child.try_wait().context("failed to wait")? {
            break status;
        }
        if let Err(interrupted) = sleep(Duration::from_millis(10)) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(interrupted);
        }
    };
    // A reader that panicked has nothing to give; reading itself does not panic.
    let collect = |reader: Option<JoinHandle<Vec<u8>>>| {
        reader.and_then(|r| r.join().ok()).unwrap_or_default()
    };
    Ok(Output {
        status,
        stdout: collect(stdout),
        stderr: collect(stderr),
    })
}

fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What could be read before an error is still worth showing.
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

/// Copies a child's standard output to its log and hands out its lines. Lines nobody takes are
/// dropped with the receiver; the copy goes on so that the child never blocks on a full pipe.
fn tee(stdout: impl Read + Send + 'static, mut log: File) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            let Ok(line) = line else { break };
            let _ = writeln!(log, "{line}");
            let _ = sender.send(line);
        }
    });
    receiver
}

/// The last lines of a file, for error messages.
pub fn tail(path: &Path, lines: usize) -> String {
    let Ok(file) = File::open(path) else {
        return format!("(no log at {})", path.display());
    };
    let mut last = VecDeque::with_capacity(lines);
    for line in BufReader::new(file).lines().map_while(Result::ok) {
        if last.len() == lines {
            last.pop_front();
        }
        last.push_back(format!("  {line}"));
    }
    Vec::from(last).join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_alive(pid: u32) -> bool {
        Path::new(&format!("/proc/{pid}")).exists()
    }

    /// Dropping ends a child that obeys, and its exit is waited for.
    #[test]
    fn dropping_ends_the_child() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sleep");
        command.arg("600");
        let child = Child::start("sleep", &mut command, &folder.path().join("log")).unwrap();
        let pid = child.id();
        assert!(is_alive(pid));
        drop(child);
        assert!(!is_alive(pid));
    }

    /// A child that dies before its line arrives gives an error that shows its log.
    #[test]
    fn early_death_shows_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo the port is taken >&2; exit 3"]);
        let mut child = Child::start("server", &mut command, &folder.path().join("log")).unwrap();
        let error = child
            .wait_for_line(Duration::from_secs(10), |line| {
                (line == "ready").then_some(())
            })
            .unwrap_err()
            .to_string();
        assert!(error.contains("the port is taken"), "{error}");
        assert!(error.contains("exit status: 3"), "{error}");
    }

    /// Both streams come back whole, beyond what a pipe holds.
    #[test]
    fn output_is_whole() {
        let mut command = Command::new("sh");
        command.args(["-c", "seq 1 100000; seq 1 50000 >&2; exit 4"]);
        let output = output(&mut command).unwrap();
        assert_eq!(output.status.code(), Some(4));
        assert_eq!(
            output.stdout.iter().filter(|b| **b == b'\n').count(),
            100_000
        );
        assert_eq!(
            output.stderr.iter().filter(|b| **b == b'\n').count(),
            50_000
        );
    }

    /// The wanted line is found among others, and its value returned.
    #[test]
    fn waits_for_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "echo hello; echo listening on 127.0.0.1:4711; sleep 600",
        ]);
        let mut child = Child::start("server", &mut command, &folder.path().join("log")).unwrap();
        let port: u16 = child
            .wait_for_line(Duration::from_secs(10), |line| {
                line.strip_prefix("listening on 127.0.0.1:")?.parse().ok()
            })
            .unwrap();
        assert_eq!(port, 4711);
    }
}
