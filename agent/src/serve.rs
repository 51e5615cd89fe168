//! The daemon: opens the spool, goes on with the probes an earlier agent left, and runs the
//! engine until it is told to stop.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tracing::{info, warn};

use crate::config::Config;
use crate::engine::{Counts, Engine, Parts, Resumed};
use crate::host::clock;
use crate::host::discovery::{Discovery, Everyone, Search};
use crate::host::gpu::Sampler;
use crate::host::identity::Host;
use crate::host::switch;
use crate::output::Spool;
use crate::probes::bpf;
use crate::probes::channel::{Channel, Taking};
use crate::probes::features::Checks;
use crate::recorder::{self, Link, Recorder};
use crate::ship::{self, Certificates, Shipment};
use crate::spool::folder;
use crate::spool::journal::{Frame, Journal};
use crate::spool::room::Room;
use crate::status::{self, Status};
use crate::traffic::{self, Scraper};

/// How long the last files may take to reach the collector after a stop.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// How long a running agent may take to take its probes out.
const SWITCH_LIMIT: Duration = Duration::from_secs(10);

/// Runs the daemon until SIGINT or SIGTERM.
pub fn serve(config: Config) -> anyhow::Result<()> {
    let host = Host::detect(config.host.clone());
    fs::create_dir_all(&config.spool)
        .with_context(|| format!("failed to create spool folder {}", config.spool.display()))?;
    let _spool_lock = lock(&config.spool.join("lock")).with_context(|| {
        format!(
            "spool {} belongs to a running agent; stop it, or give this one a spool of its own",
            config.spool.display()
        )
    })?;
    let _pin_lock = lock(&pin_lock_path(&config.pin_path)).with_context(|| {
        format!(
            "the probes below {} belong to a running agent; stop it, or set another pin_path",
            config.pin_path.display()
        )
    })?;
    let agent_id = agent_id(&config.spool)?;
    let (journal, frames) = Journal::open(&config.spool)?;
    let next_seq = frames
        .last()
        .and_then(|frame| frame.state.waiting.next_seq)
        .unwrap_or(1);

    let checks = Checks::run(config.uprobe_multi)?;
    let taking = Taking::of(&config)?;
    let (probes, mut channel) = bpf::load_pinned(
        &config.pin_path,
        next_seq,
        bpf::Sizes::of(&config)?,
        bpf::Abilities::of(&config, &checks.features),
    )?;
    channel.set(taking)?;
    let mut resumed = resume(frames, &channel, &host);
    if journal.was_damaged() {
        let window = resumed.state.window.get_or_insert_with(Counts::begin);
        window.gap = true;
    }
    let next_batch_seq = if journal.was_lost() {
        unused_batch_seq(&config.spool)?
    } else {
        resumed.next_batch_seq
    };
    let search = Search::configured(&config, checks, Box::new(Everyone));
    let discovery = Discovery::start(probes, search)?;
    if discovery.known().libraries().is_empty() {
        info!(
            "no CUDA library found yet; looking every {}",
            config.scan_interval
        );
    }
    let sampler = Sampler::start(
        config.nvml_library.clone(),
        config.sysfs.clone(),
        config.sample_interval.0,
    )?;
    let traffic = traffic::Options::configured(&config)
        .map(|options| Scraper::start(host.clone(), options))
        .transpose()?;
    let room = Room::new(
        &config.spool,
        config.spool_limit.0,
        config.spool_reserve.map(|reserve| reserve.0),
    )?;
    let usage = Arc::clone(room.usage());
    let link = Arc::new(Link::default());
    let recorder = Recorder::open(
        &config.spool,
        recorder_options(&config),
        Arc::clone(&link),
        next_batch_seq,
    )?;
    let (mut output, committed) = Spool::open(
        &config.spool,
        host.clone(),
        agent_id.clone(),
        journal,
        next_batch_seq,
        room,
    )?;
    output.record_into(recorder);

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let stop = Arc::new(AtomicBool::new(false));
    {
        let _inside = runtime.enter();
        let signals = stop_on_signal(Arc::clone(&stop)).context("failed to catch signals")?;
        runtime.spawn(signals);
    }
    let sender = match &config.collector {
        Some(collector) => {
            let shipment = Shipment::new(&config.spool, collector, &agent_id, &host.name)
                .with_certificates(certificates(&config))
                .with_usage(usage)
                .with_link(link);
            Some(runtime.spawn(ship::run(shipment, committed)))
        }
        None => {
            warn!(
                "no collector is configured: events stay in {}",
                config.spool.display()
            );
            None
        }
    };

    let parts = Parts {
        host,
        config,
        channel,
        discovery,
        sampler,
        traffic,
        output: Box::new(output),
        filter: None,
        observer: None,
    };
    let mut engine = Engine::new(parts, resumed.state);
    println!("ready");
    io::stdout().flush().ok();
    while !stop.load(Ordering::Relaxed) {
        engine.turn();
    }
    info!(
        "stopping: writing what is there; the probes stay (vramscope-agent detach takes them out)"
    );
    let written = engine.pause();
    // Closes the channel to the sender, which then sends what is left.
    drop(engine);
    if let Some(sender) = sender {
        runtime
            .block_on(async { tokio::time::timeout(SEND_LIMIT, sender).await })
            .ok();
    }
    if !written {
        bail!(
            "the last events could not be written; they stay in the kernel's ring until the next start"
        );
    }
    Ok(())
}

/// The configuration has all three with an `https://` collector, and none else.
fn certificates(config: &Config) -> Option<Certificates> {
    Some(Certificates {
        ca: config.ca.clone()?,
        cert: config.cert.clone()?,
        key: config.key.clone()?,
    })
}

fn recorder_options(config: &Config) -> recorder::Options {
    recorder::Options {
        travel: config.framework_events,
        max_bytes: config.recorder_bytes.0,
        max_age: Duration::from_secs(60 * config.recorder_minutes as u64),
        before: config.recorder_before.0,
        after: config.recorder_after.0,
        settle: config.hold.0 + 2 * config.flush_interval.0 + Duration::from_secs(1),
    }
}

/// Catches SIGINT and SIGTERM from now on; what it gives is to be awaited.
fn stop_on_signal(stop: Arc<AtomicBool>) -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        stop.store(true, Ordering::Relaxed);
    })
}

/// A number that no batch of this spool can have had: above all files, and above what any count
/// of flushes reaches, since a collector takes a number it knows for a resend.
fn unused_batch_seq(spool: &Path) -> anyhow::Result<u64> {
    let highest = folder::list(spool)?.last().map_or(0, |file| file.batch_seq);
    let millis = clock::realtime_ns() / 1_000_000;
    Ok(millis.max(highest + 1))
}

struct ResumedState {
    state: Resumed,
    next_batch_seq: u64,
}

/// Puts a journal's frames together.
fn resume(frames: Vec<Frame>, channel: &Channel, host: &Host) -> ResumedState {
    let mut state = Resumed::default();
    let mut next_batch_seq = 1;
    let Some(last) = frames.last().map(|frame| frame.state.clone()) else {
        return ResumedState {
            state,
            next_batch_seq,
        };
    };
    for frame in frames {
        state.changes.extend(frame.changes);
        state.stacks.extend(frame.stacks);
    }
    next_batch_seq = last.next_batch_seq.max(next_batch_seq);
    state.waiting = last.waiting;
    state.lost_reported = last.lost_reported;
    state.window = last.window;
    let same_ring = last.boot_id == host.boot_id && last.generation == channel.generation;
    if same_ring {
        state.ring_position = Some(last.ring_position);
        info!("going on with the probes and the ring of the agent before");
    } else {
        // Of another boot nothing can have gone on unwatched.
        let mut window = state.window.take().unwrap_or_else(Counts::begin);
        window.gap |= last.boot_id == host.boot_id;
        state.window = Some(window);
        warn!(
            "the probes of the agent before are gone: what happened since it stopped was not seen"
        );
    }
    if last.boot_id != host.boot_id {
        // Those processes are of another boot. Their ends were not seen, so no row tells of them.
        state.changes.clear();
        state.waiting = crate::probes::order::Waiting {
            next_seq: state.waiting.next_seq,
            ..Default::default()
        };
    }
    ResumedState {
        state,
        next_batch_seq,
    }
}

/// The spool's own random name, made once. It names the agent in every row.
fn agent_id(spool: &Path) -> anyhow::Result<String> {
    let path = spool.join("agent_id");
    match fs::read_to_string(&path) {
        Ok(id) if !id.trim().is_empty() => return Ok(id.trim().to_string()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            return Err(error).with_context(|| format!("failed to read {}", path.display()));
        }
    }
    let id = random_id()?;
    folder::write_durably(&path, id.as_bytes())?;
    folder::sync_folder(spool)?;
    Ok(id)
}

/// A random name, as the kernel makes them.
pub fn random_id() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    let id = fs::read_to_string(path).with_context(|| format!("failed to read {path}"))?;
    Ok(id.trim().to_string())
}

fn pin_lock_path(pin_path: &Path) -> PathBuf {
    let hash = xxhash_rust::xxh3::xxh3_64(pin_path.as_os_str().as_encoded_bytes());
    PathBuf::from(format!("/run/vramscope-{hash:016x}.lock"))
}

/// Takes an exclusive lock that ends with the process, however it ends.
fn lock(path: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| format!("failed to open lock file {}", path.display()))?;
    // SAFETY: a system call on a file descriptor we hold.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        return Err(io::Error::last_os_error())
            .with_context(|| format!("failed to lock {}", path.display()));
    }
    Ok(file)
}

/// Whether an agent runs on that spool.
pub fn is_locked(spool: &Path) -> bool {
    let path = spool.join("lock");
    path.exists() && lock(&path).is_err()
}

/// Takes the probes out of the kernel.
pub fn detach(pin_path: &Path) -> anyhow::Result<bool> {
    let _lock =
        lock(&pin_lock_path(pin_path)).context("an agent runs with these probes; stop it first")?;
    bpf::remove_pins(pin_path)
}

/// Turns the kill switch off and sees to it that nothing is probed. Gives what happened.
pub fn switch_off(config: &Config, reason: &str) -> anyhow::Result<String> {
    switch::turn_off(&config.off_file, reason)?;
    let file = config.off_file.display();
    let Ok(_lock) = lock(&pin_lock_path(&config.pin_path)) else {
        let (began, end) = (clock::realtime_ns(), Instant::now() + SWITCH_LIMIT);
        while Instant::now() < end {
            let is_off =
                |status: &Status| status.written_ns > began && status.discovery.off.is_some();
            if status::read(&config.spool).is_ok_and(|(status, _)| is_off(&status)) {
                return Ok(format!(
                    "the running agent has taken its probes out ({file})"
                ));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!(
            "{file} is written, but the running agent has not said within {} s that its probes are out; stop it and run `vramscope-agent detach`",
            SWITCH_LIMIT.as_secs()
        );
    };
    let found = bpf::remove_pins(&config.pin_path)?;
    Ok(if found {
        format!(
            "took the probes below {} out; agents stay off while {file} exists",
            config.pin_path.display()
        )
    } else {
        format!("no probes were in the kernel; agents stay off while {file} exists")
    })
}

/// Says what is missing before anything fails for a less clear reason.
pub fn check_privileges() -> anyhow::Result<()> {
    const CAP_SYS_ADMIN: u32 = 21;
    const CAP_PERFMON: u32 = 38;
    const CAP_BPF: u32 = 39;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    let has = |capability: u32| effective & (1 << capability) != 0;
    if has(CAP_SYS_ADMIN) || (has(CAP_BPF) && has(CAP_PERFMON)) {
        return Ok(());
    }
    bail!(
        "this needs root: loading BPF programs takes CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN; run it with sudo, or in a container with those capabilities and hostPID"
    )
}
