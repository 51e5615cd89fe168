//! One agent of the release profile over the stand-ins, as benchmarks run it: with the default
//! configuration but for its folders, and, where that is measured, on one CPU alone.
//!
//! Invariant: dropping the value stops the agent and takes its probes out of the kernel.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::children::{self, Child};
use crate::project::Project;

const READY: Duration = Duration::from_secs(60);

/// See the module's text.
#[derive(Debug)]
pub struct Daemon {
    /// Taken when it is stopped.
    child: Option<Child>,
    program: PathBuf,
    folder: PathBuf,
}

impl Daemon {
    /// Starts an agent that keeps everything in `folder`, which is emptied first. `settings` are
    /// more lines of its configuration.
    pub fn start(
        project: &Project,
        folder: &Path,
        libraries: &[PathBuf],
        settings: &[&str],
        cpu: Option<usize>,
    ) -> Result<Self> {
        empty(folder)?;
        let mut daemon = Self {
            child: None,
            program: project.release_binary("vramscope-agent"),
            folder: folder.to_path_buf(),
        };
        daemon.detach();
        let quoted: Vec<String> = libraries.iter().map(|path| toml_path(path)).collect();
        let nvml = project.release_standins().join("libnvidia-ml.so.1");
        let mut lines = vec![
            format!("spool = {}", toml_path(&daemon.spool())),
            format!("pin_path = {}", toml_path(&daemon.pin_path())),
            format!("libraries = [{}]", quoted.join(", ")),
            format!("nvml_library = {}", toml_path(&nvml)),
        ];
        lines.extend(settings.iter().map(|line| (*line).to_string()));
        let config = daemon.config();
        std::fs::write(&config, lines.join("\n") + "\n")
            .with_context(|| format!("failed to write {}", config.display()))?;

        let mut command = Command::new(&daemon.program);
        command.arg("serve").arg("--config").arg(&config);
        command.env_remove("LD_LIBRARY_PATH");
        if let Some(cpu) = cpu {
            pin(&mut command, cpu);
        }
        let mut child = Child::start("agent", &mut command, &folder.join("agent.log"))?;
        child.wait_for_line(READY, |line| (line == "ready").then_some(()))?;
        daemon.child = Some(child);
        Ok(daemon)
    }

    pub fn spool(&self) -> PathBuf {
        self.folder.join("spool")
    }

    fn config(&self) -> PathBuf {
        self.folder.join("agent.toml")
    }

    /// The same for the same folder, so that what an earlier run left is found.
    fn pin_path(&self) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        self.folder.hash(&mut hasher);
        PathBuf::from(format!("/sys/fs/bpf/vramscope-{:016x}", hasher.finish()))
    }

    pub fn pid(&self) -> Result<u32> {
        let child = self.child.as_ref().context("the agent does not run")?;
        Ok(child.id())
    }

    /// What the agent told of itself at its last flush.
    pub fn status(&self) -> Result<Status> {
        let path = self.spool().join("status.json");
        let text =
            std::fs::read(&path).with_context(|| format!("failed to read {}", path.display()))?;
        let json: Value = serde_json::from_slice(&text)
            .with_context(|| format!("{} is not JSON", path.display()))?;
        let number = |name: &str| json[name].as_u64().unwrap_or(0);
        let lost = json["lost"].as_object();
        Ok(Status {
            written_ns: number("written_ns"),
            events: number("events"),
            ring_fill: json["ring_fill"].as_f64().unwrap_or(0.0),
            lost: lost
                .into_iter()
                .flatten()
                .map(|(cause, count)| (cause.clone(), count.as_u64().unwrap_or(0)))
                .collect(),
            live_blocks: number("live_blocks"),
            not_copied: number("stacks_not_copied"),
        })
    }

    /// Waits until it has written all that came before this call: some seconds and flushes, and
    /// nothing waits any more. Events of other processes may go on.
    pub fn wait_until_read(&self, limit: Duration) -> Result<Status> {
        const FLUSHES: u32 = 4;
        const AT_LEAST: Duration = Duration::from_secs(3);
        let began = Instant::now();
        let mut last = self.status()?;
        let mut flushes = 0;
        loop {
            children::sleep(Duration::from_millis(100))?;
            if began.elapsed() > limit {
                eprintln!(
                    "  the agent still reads events after {} s: other processes make them, or it \
                     is behind",
                    limit.as_secs()
                );
                return Ok(last);
            }
            let status = self.status()?;
            if status.written_ns == last.written_ns {
                continue;
            }
            flushes += 1;
            let nothing_waits = status.events == last.events || status.ring_fill < 0.05;
            last = status;
            if flushes >= FLUSHES && began.elapsed() >= AT_LEAST && nothing_waits {
                return Ok(last);
            }
        }
    }

    /// Stops it in order.
    pub fn stop(&mut self) -> Result<()> {
        match self.child.take() {
            Some(child) => child.stop(),
            None => Ok(()),
        }
    }

    fn detach(&self) {
        if !self.pin_path().exists() {
            return;
        }
        let mut command = Command::new(&self.program);
        command.arg("detach").arg("--config").arg(self.config());
        // Not by `children::output`, which gives up at once after a Ctrl-C: this is the clean-up.
        if !command.output().is_ok_and(|output| output.status.success()) {
            let _ = std::fs::remove_dir_all(self.pin_path());
        }
        let _ = std::fs::remove_dir(self.pin_path());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.child.take());
        self.detach();
    }
}

/// What a status file tells.
#[derive(Debug, Clone, Default)]
pub struct Status {
    written_ns: u64,
    ring_fill: f64,
    pub events: u64,
    pub lost: Vec<(String, u64)>,
    pub live_blocks: u64,
    /// Stacks that were to be copied and were not.
    pub not_copied: u64,
}

impl Status {
    pub fn lost(&self) -> u64 {
        self.lost.iter().map(|(_, count)| count).sum()
    }
}

/// Makes an empty folder.
pub fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)
            .with_context(|| format!("failed to empty {}", folder.display()))?;
    }
    std::fs::create_dir_all(folder)
        .with_context(|| format!("failed to create {}", folder.display()))
}

/// A basic string of TOML.
fn toml_path(path: &Path) -> String {
    // JSON's escapes are a subset of TOML's.
    Value::from(path.to_string_lossy()).to_string()
}

/// Keeps a command, and all its threads, on one CPU.
pub fn pin(command: &mut Command, cpu: usize) {
    // SAFETY: a set of bits is plain data.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the macro checks the number against the set's size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: between fork and exec only a system call is made, and it is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            if libc::sched_setaffinity(0, size_of_val(&set), &raw const set) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
}

/// Processor time that a process has used, all threads, in the kernel and outside.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("failed to read {path}"))?;
    // The name, in parentheses, may hold anything. `utime` and `stime` are fields 14 and 15.
    let after = stat.rfind(')').map_or("", |end| &stat[end + 1..]);
    let fields: Vec<&str> = after.split_ascii_whitespace().collect();
    let ticks = |field: usize| {
        fields
            .get(field - 3)
            .and_then(|text| text.parse::<u64>().ok())
    };
    let (Some(user), Some(system)) = (ticks(14), ticks(15)) else {
        bail!("{path} has no processor time");
    };
    // SAFETY: a query without side effects.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Ok(Duration::from_secs_f64(
        (user + system) as f64 / per_second as f64,
    ))
}

/// One size of `/proc/PID/status` in MiB: `VmRSS` now, `VmHWM` at most so far.
pub fn memory_mib(pid: u32, name: &str) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let status =
        std::fs::read_to_string(&path).with_context(|| format!("failed to read {path}"))?;
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.trim().parse::<f64>().ok())
        .map(|kib| kib / 1024.0)
        .with_context(|| format!("{path} has no {name}"))
}

/// Probes need root.
pub fn require_root() -> Result<()> {
    // SAFETY: plain system call.
    if unsafe { libc::geteuid() } != 0 {
        bail!("benchmarks put probes into the kernel: run them as root");
    }
    Ok(())
}

/// Another agent finds every process that maps a CUDA library, and traces what we measure too.
pub fn warn_of_other_agents() -> Result<()> {
    let processes = std::fs::read_dir("/proc").context("failed to read /proc")?;
    for process in processes.flatten() {
        let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        // The kernel keeps 15 characters of a name.
        if name.trim() == "vramscope-agent" {
            eprintln!(
                "warning: process {} is another agent; figures are too high while it runs",
                process.file_name().to_string_lossy()
            );
        }
    }
    Ok(())
}
