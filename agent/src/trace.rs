//! Local mode: traces one command and what it starts, with no daemon and no collector.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;

use crate::config::{Config, Span};
use crate::engine::{Engine, Parts, Resumed};
use crate::host::discovery::{Discovery, Filter, Search};
use crate::host::gpu::Sampler;
use crate::host::identity::Host;
use crate::host::procfs;
use crate::output::TraceFolder;
use crate::probes::bpf;
use crate::probes::channel::Taking;
use crate::probes::features::Checks;
use crate::serve;
use crate::summary::{self, Summary};
use crate::traffic::{Options, Scraper};

/// Signals that are passed on to the command.
const PASSED_ON: [i32; 7] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
];

/// What to trace and where to.
#[derive(Debug)]
pub struct Job {
    pub folder: PathBuf,
    pub command: Vec<OsString>,
    pub json: bool,
    pub quiet: bool,
}

/// Runs the command; gives the exit code to end with: the command's own, 128 + N if signal N
/// ended it, 127 if it could not be started.
pub fn trace(mut config: Config, job: &Job) -> anyhow::Result<i32> {
    let host = Host::detect(config.host.clone());
    let output = TraceFolder::create(
        &job.folder,
        host.clone(),
        format!("trace-{}", serve::random_id()?),
    )?;
    // Before any thread starts: each would take signals for itself otherwise.
    let signals = Signals::take_over()?;
    let checks = Checks::run(config.uprobe_multi)?;
    let abilities = bpf::Abilities::of(&config, &checks.features);
    let taking = Taking::of(&config)?;
    let (probes, mut channel) = bpf::load_unpinned(bpf::Sizes::of(&config)?, abilities)?;
    channel.set(taking)?;
    // Other processes are none of our business, and hooking their libraries would only cost them.
    let wanted = Box::new(Descendants::asked_anew());
    let search = Search {
        folders: library_path(),
        interval: Duration::from_millis(250),
        ..Search::configured(&config, checks, wanted)
    };
    let discovery = Discovery::start(probes, search)?;
    let sampler = Sampler::start(
        config.nvml_library.clone(),
        config.sysfs.clone(),
        config.sample_interval.0,
    )?;
    let traffic = Options::configured(&config)
        .map(|options| Options {
            // Other programs are none of our business.
            below: Some(std::process::id()),
            ..options
        })
        .map(|options| Scraper::start(host.clone(), options))
        .transpose()?;
    // Few larger files: nobody reads them before the end.
    config.flush_interval = Span(config.flush_interval.0.max(Duration::from_secs(10)));

    // Orphans of the command become our children, so that every descendant can be told.
    // SAFETY: a system call without memory.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    let summary = Arc::new(Mutex::new(Summary::default()));
    let parts = Parts {
        host,
        config,
        channel,
        discovery,
        sampler,
        traffic,
        output: Box::new(output),
        filter: Some(Box::new(Descendants::remembered())),
        observer: Some(Box::new(Arc::clone(&summary))),
    };
    let mut engine = Engine::new(parts, Resumed::default());

    let mut child = match start(&job.command, &signals) {
        Ok(child) => child,
        Err(error) => {
            eprintln!(
                "vramscope-agent: failed to start {}: {error}",
                job.command[0].to_string_lossy()
            );
            fs::remove_dir_all(&job.folder).ok();
            return Ok(127);
        }
    };
    let status = loop {
        engine.turn();
        signals.pass_on(child.id());
        // Zombies among adopted orphans are reaped with it.
        if let Some(status) = child.try_wait().context("failed to wait for the command")? {
            break status;
        }
    };
    let left = still_running();
    let written = engine.finish();
    if !written {
        anyhow::bail!("failed to write the trace to {}", job.folder.display());
    }
    report(
        job,
        &engine,
        &summary.lock().unwrap_or_else(PoisonError::into_inner),
        left,
    )?;
    Ok(exit_code(status))
}

fn report(job: &Job, engine: &Engine, summary: &Summary, left: usize) -> anyhow::Result<()> {
    let (libraries, hooked, not_hooked) = engine.hooked();
    if job.json {
        let json = serde_json::json!({
            "events": engine.totals().events,
            "lost": engine.totals().lost,
            "totals": summary.lines(),
            "top_stacks": summary.top_stacks(),
            "libraries": libraries,
            "hooked": hooked,
            "not_hooked": not_hooked,
            "still_running": left,
            "off": engine.off(),
        });
        eprintln!("{}", serde_json::to_string(&json)?);
        return Ok(());
    }
    if job.quiet {
        return Ok(());
    }
    let folder = job.folder.display().to_string();
    eprint!("{}", summary::text(summary, engine.totals(), &folder));
    if let Some(off) = engine.off() {
        eprintln!("  nothing was hooked: probes are {off}");
    } else if libraries.is_empty() {
        eprintln!(
            "  no CUDA library (libcuda.so*, libcudart.so*) was found: there was nothing to hook"
        );
    }
    if left > 0 {
        eprintln!("  {left} processes started by the command still run; they are traced no more");
    }
    eprintln!("  ask on: vramscope sql --data {folder}");
    Ok(())
}

fn start(command: &[OsString], signals: &Signals) -> std::io::Result<Child> {
    let old_mask = signals.old_mask;
    let mut process = Command::new(&command[0]);
    process.args(&command[1..]);
    // SAFETY: between fork and exec only a system call is made, and it is async-signal-safe.
    unsafe {
        process.pre_exec(move || {
            if libc::sigprocmask(libc::SIG_SETMASK, &raw const old_mask, std::ptr::null_mut()) == 0
            {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
    process.spawn()
}

fn exit_code(status: ExitStatus) -> i32 {
    status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1)
}

/// Folders that the command's loader searches before the usual ones.
fn library_path() -> Vec<PathBuf> {
    std::env::var_os("LD_LIBRARY_PATH")
        .map(|path| {
            std::env::split_paths(&path)
                .filter(|folder| !folder.as_os_str().is_empty())
                .collect()
        })
        .unwrap_or_default()
}

/// Which processes descend from this one. A process that is gone before it could be asked is
/// taken for a descendant: its events would be lost otherwise.
struct Descendants {
    /// Answers given before; `None` asks anew each time.
    known: Option<HashMap<u32, bool>>,
}

impl Descendants {
    /// For who hears of every exit, and can forget answers before a pid is given out again.
    fn remembered() -> Self {
        Self {
            known: Some(HashMap::new()),
        }
    }

    fn asked_anew() -> Self {
        Self { known: None }
    }
}

impl Filter for Descendants {
    fn wants(&mut self, pid: u32) -> bool {
        let Some(known) = &mut self.known else {
            return descends_from_us(pid);
        };
        *known.entry(pid).or_insert_with(|| descends_from_us(pid))
    }

    fn forget(&mut self, pid: u32) {
        if let Some(known) = &mut self.known {
            known.remove(&pid);
        }
    }
}

fn descends_from_us(pid: u32) -> bool {
    let me = std::process::id();
    let mut at = pid;
    loop {
        match procfs::parent(at) {
            _ if at == me => return true,
            Some(0 | 1) => return false,
            Some(parent) => at = parent,
            None => return true,
        }
    }
}

/// Children of this process that live: orphans that the command left.
fn still_running() -> usize {
    let me = std::process::id();
    let path = format!("/proc/self/task/{me}/children");
    let children = fs::read_to_string(path).unwrap_or_default();
    children
        .split_ascii_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .filter(|pid| procfs::stat(*pid).is_some_and(|stat| stat.state != b'Z'))
        .count()
}

/// Blocked signals, read where it suits us.
struct Signals {
    fd: i32,
    old_mask: libc::sigset_t,
}

impl Signals {
    fn take_over() -> anyhow::Result<Self> {
        // SAFETY: both sets are initialised by the calls before they are read.
        unsafe {
            let mut mask = std::mem::zeroed();
            let mut old_mask = std::mem::zeroed();
            libc::sigemptyset(&raw mut mask);
            for signal in PASSED_ON {
                libc::sigaddset(&raw mut mask, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const mask, &raw mut old_mask);
            let fd = libc::signalfd(-1, &raw const mask, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC);
            if fd < 0 {
                return Err(std::io::Error::last_os_error()).context("failed to take over signals");
            }
            Ok(Self { fd, old_mask })
        }
    }

    /// Sends the command what was sent to us. What the terminal sent (Ctrl-C) went to the whole
    /// process group, so the command has it already.
    fn pass_on(&self, child: u32) {
        loop {
            // SAFETY: the structure is plain data and the read fills all of it or nothing.
            let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
            let size = size_of_val(&info);
            // SAFETY: the buffer has `size` bytes.
            let read = unsafe { libc::read(self.fd, (&raw mut info).cast(), size) };
            if read != size as isize {
                return;
            }
            let from_terminal = info.ssi_code == libc::SI_KERNEL;
            if !from_terminal {
                // SAFETY: the child is ours and not reaped yet, so the pid is not another's.
                unsafe { libc::kill(child as i32, info.ssi_signo as i32) };
            }
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: our own file descriptor.
        unsafe { libc::close(self.fd) };
    }
}
