//! Loads the BPF programs, attaches them to libraries, and keeps them in the kernel across
//! restarts of the agent.
//!
//! Pinned form (the daemon): maps, programs and links live in a folder on bpffs named after the
//! BPF object's and hook table's hash. When the agent is killed the probes go on and the ring
//! keeps what they send; the next agent with the same hash goes on reading. An agent with
//! another hash takes the old folder away and starts anew.
//!
//! Unpinned form (`trace`): everything goes away with the process, however it ends.

use std::collections::HashMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use aya::maps::{Array, Map, MapData};
use aya::programs::links::FdLink;
use aya::programs::raw_trace_point::RawTracePointLinkId;
use aya::programs::uprobe::UProbeLinkId;
use aya::programs::{ProbeKind, RawTracePoint, UProbe};
use aya::{Ebpf, EbpfLoader};
use tracing::info;

use super::channel::Channel;
use super::features::{Features, PYTHON_FRAMES};
use super::hooks::HOOKS;
use super::multi;
use super::places::SiteTable;
use crate::host::bpffs;
use crate::host::library::FileId;
use crate::python::table::{self, Table};

/// The object that `cargo xtask ebpf` built; empty if it had not been built.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/vramscope.bpf.o"));

const MAPS: [&str; 14] = [
    "EVENTS",
    "STACKS",
    "SETTINGS",
    "THREADS",
    "NEW_THREAD",
    "SEQ",
    "GENERATION",
    "LOST",
    SITES_OF,
    table::PYTHON,
    table::PYTHON_THREADS,
    "NEW_PYTHON_THREAD",
    table::PYTHON_SEEN,
    table::PYTHON_LOST,
];
/// Programs for entries and returns of functions, and for places of a framework's allocator.
const UPROBES: [&str; 3] = ["enter", "leave", FRAMEWORK];
/// The same with Python frames, where the kernel has what reading them takes; pinned under the same
/// names.
const WITH_PYTHON: [(&str, &str); 2] = [("leave", "leave_python"), (FRAMEWORK, "framework_python")];
pub(super) const FRAMEWORK: &str = "framework";
pub(super) const SITES_OF: &str = "SITES_OF";
pub(super) const TRACEPOINTS: [(&str, &str); 2] = [
    ("exec", "sched_process_exec"),
    ("exit", "sched_process_exit"),
];

/// Why a function is not hooked that its library does not have.
pub const NOT_EXPORTED: &str = "not exported by this library";

/// How large the kernel side's tables are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// A power of two.
    pub ring_bytes: u32,
    /// The same of the ring for copied stacks.
    pub stack_ring_bytes: u32,
    pub threads: u32,
}

impl Sizes {
    pub fn of(config: &crate::config::Config) -> anyhow::Result<Self> {
        let ring = |name: &str, bytes: usize| {
            u32::try_from(bytes)
                .ok()
                .filter(|bytes| bytes.is_power_of_two() && *bytes >= 4096 && *bytes <= 1 << 30)
                .with_context(|| {
                    format!(
                        "{name} is {bytes}: it has to be a power of two from 4096 to 1073741824"
                    )
                })
        };
        let threads = u32::try_from(config.threads_limit).ok().filter(|n| *n > 0);
        Ok(Self {
            ring_bytes: ring("ring_bytes", config.ring_bytes)?,
            stack_ring_bytes: ring("stack_ring_bytes", config.stack_ring_bytes)?,
            threads: threads.with_context(|| {
                format!(
                    "threads_limit is {}: it has to be at least 1 and below 4294967296",
                    config.threads_limit
                )
            })?,
        })
    }
}

/// Which of the kernel's abilities are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    pub uprobe_multi: bool,
    pub python: bool,
}

impl Abilities {
    pub fn of(config: &crate::config::Config, features: &Features) -> Self {
        Self {
            uprobe_multi: config.uprobe_multi && features.has("uprobe_multi"),
            // Whatever the configuration says: the programs do nothing until told of a process, and
            // the next agent may want them.
            python: features.has(PYTHON_FRAMES),
        }
    }

    fn program(self, name: &'static str) -> &'static str {
        let with = WITH_PYTHON.iter().find(|(plain, _)| *plain == name);
        with.filter(|_| self.python).map_or(name, |(_, with)| *with)
    }
}

/// Whether a function of one library is probed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    pub symbol: &'static str,
    /// Why not, `None` if it is.
    pub refused: Option<String>,
}

/// Programs in the kernel and what they are attached to.
pub struct Probes {
    pub(super) programs: Programs,
    /// Folder of the pins, `None` in the unpinned form.
    pub(super) pins: Option<PathBuf>,
    pub(super) attached: HashMap<FileId, Vec<Attachment>>,
    /// Programs for links that hook a whole library, where the kernel has them.
    pub(super) multi: Option<MultiPrograms>,
    /// Such links of the unpinned form, the other links of that form, and those to tracepoints.
    pub(super) links: Vec<(FileId, OwnedFd)>,
    pub(super) perf_links: Vec<(FileId, &'static str, UProbeLinkId)>,
    pub(super) tracepoint_links: Vec<(&'static str, RawTracePointLinkId)>,
    /// Where the operands of a framework's probes lie.
    pub(super) sites: SiteTable,
    /// What the kernel side is told of interpreters, if it can read their frames; whoever finds
    /// them takes it.
    pub python: Option<Table>,
}

pub(super) struct MultiPrograms {
    pub enter: OwnedFd,
    pub leave: OwnedFd,
    pub framework: OwnedFd,
}

pub(super) enum Programs {
    Loaded(Box<Ebpf>, Abilities),
    Pinned(Box<Pinned>),
}

pub(super) struct Pinned {
    enter: UProbe,
    leave: UProbe,
    framework: UProbe,
}

impl Programs {
    pub(super) fn get(&mut self, name: &'static str) -> anyhow::Result<&mut UProbe> {
        match self {
            Programs::Loaded(ebpf, abilities) => {
                let program = ebpf
                    .program_mut(abilities.program(name))
                    .with_context(|| format!("no BPF program {name:?} in the object"))?;
                Ok(program.try_into()?)
            }
            Programs::Pinned(pinned) => Ok(match name {
                "enter" => &mut pinned.enter,
                "leave" => &mut pinned.leave,
                _ => &mut pinned.framework,
            }),
        }
    }
}

/// Loads the programs for one command; they go away with this process. Sequence numbers start
/// at 1.
pub fn load_unpinned(sizes: Sizes, abilities: Abilities) -> anyhow::Result<(Probes, Channel)> {
    let mut ebpf = load_object(sizes, abilities)?;
    let multi = load_multi(&ebpf, abilities);
    // Before anything is attached: numbers must not start over.
    let channel = Channel::open(|name| take_map(&mut ebpf, name), Some(1))?;
    let sites = SiteTable::open(take_map(&mut ebpf, SITES_OF)?)?;
    let tracepoint_links = attach_tracepoints(&mut ebpf, None)?;
    let python = match abilities.python {
        true => Some(Table::open(take_map(&mut ebpf, table::PYTHON)?)?),
        false => None,
    };
    let probes = Probes {
        python,
        programs: Programs::Loaded(Box::new(ebpf), abilities),
        pins: None,
        attached: HashMap::new(),
        multi,
        links: Vec::new(),
        perf_links: Vec::new(),
        tracepoint_links,
        sites,
    };
    Ok((probes, channel))
}

/// The ring and the programs, attached to nothing but what tests attach.
#[cfg(test)]
pub(super) fn load_for_test(sizes: Sizes) -> anyhow::Result<(Channel, Option<MultiPrograms>)> {
    let abilities = Abilities {
        uprobe_multi: true,
        python: true,
    };
    let mut ebpf = load_object(sizes, abilities)?;
    let multi = load_multi(&ebpf, abilities);
    let channel = Channel::open(|name| take_map(&mut ebpf, name), Some(1))?;
    Ok((channel, multi))
}

/// Loads and pins the programs below `root`, or goes on with those an earlier agent left there.
/// New maps start their sequence numbers at `next_seq`.
pub fn load_pinned(
    root: &Path,
    next_seq: u64,
    sizes: Sizes,
    abilities: Abilities,
) -> anyhow::Result<(Probes, Channel)> {
    bpffs::ensure_mounted(root)?;
    let pins = root.join(format!("{:016x}", identity()));
    let links = pins.join("links");
    // `complete` is made last: a folder without it is what a killed agent left half done.
    let complete = pins.join("complete");
    let fresh = !complete.exists();
    if fresh {
        remove_pins(root)?;
        fs::create_dir_all(&links)
            .with_context(|| format!("failed to create {}", links.display()))?;
        let mut ebpf = load_object(sizes, abilities)?;
        for name in MAPS {
            let map = ebpf
                .map_mut(name)
                .with_context(|| format!("no BPF map {name:?} in the object"))?;
            map.pin(pins.join(name))
                .with_context(|| format!("failed to pin map {name}"))?;
        }
        for name in UPROBES {
            let program: &mut UProbe = ebpf
                .program_mut(abilities.program(name))
                .context("no such BPF program")?
                .try_into()?;
            program
                .pin(pins.join(name))
                .with_context(|| format!("failed to pin program {name}"))?;
        }
        for (name, _) in TRACEPOINTS {
            let program: &mut RawTracePoint = ebpf
                .program_mut(name)
                .context("no such BPF program")?
                .try_into()?;
            program
                .pin(pins.join(name))
                .with_context(|| format!("failed to pin program {name}"))?;
        }
        if let Some(multi) = load_multi(&ebpf, abilities) {
            for (name, program) in [
                ("enter-multi", &multi.enter),
                ("leave-multi", &multi.leave),
                ("framework-multi", &multi.framework),
            ] {
                multi::pin(program, &pins.join(name))
                    .with_context(|| format!("failed to pin program {name}"))?;
            }
        }
        // Before anything is attached: numbers must not start over.
        set_start(&pins, next_seq)?;
        attach_tracepoints(&mut ebpf, Some(&links))?;
        fs::create_dir(&complete)
            .with_context(|| format!("failed to create {}", complete.display()))?;
    }
    let open = |name: &str| {
        let path = pins.join(name);
        MapData::from_pin(&path)
            .with_context(|| format!("failed to open pinned map {}", path.display()))
    };
    let mut channel = Channel::open(open, None)?;
    channel.fresh = fresh;
    let sites = SiteTable::open(open(SITES_OF)?)?;
    let python = match abilities.python {
        true => Some(Table::open(open(table::PYTHON)?)?),
        false => None,
    };
    if !fresh {
        table::forget_seen(open(table::PYTHON_SEEN)?)?;
    }
    let open = |name: &str| multi::open_pin(&pins.join(name)).ok();
    let multi = open("enter-multi")
        .zip(open("leave-multi"))
        .zip(open("framework-multi"))
        .map(|((enter, leave), framework)| MultiPrograms {
            enter,
            leave,
            framework,
        });
    let programs = Programs::Pinned(Box::new(Pinned {
        enter: UProbe::from_pin(pins.join("enter"), ProbeKind::Entry)?,
        leave: UProbe::from_pin(pins.join("leave"), ProbeKind::Return)?,
        framework: UProbe::from_pin(pins.join(FRAMEWORK), ProbeKind::Entry)?,
    }));
    Ok((
        Probes {
            programs,
            pins: Some(pins),
            attached: HashMap::new(),
            multi,
            links: Vec::new(),
            perf_links: Vec::new(),
            tracepoint_links: Vec::new(),
            sites,
            python,
        },
        channel,
    ))
}

/// Takes every probe below `root` out of the kernel. True if there were any.
pub fn remove_pins(root: &Path) -> anyhow::Result<bool> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => {
            return Err(error).with_context(|| format!("failed to read {}", root.display()));
        }
    };
    let mut found = false;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            found = true;
            fs::remove_dir_all(&path)
                .with_context(|| format!("failed to remove {}", path.display()))?;
        }
    }
    Ok(found)
}

/// Changes whenever pinned programs could not be understood by this agent.
fn identity() -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(OBJECT);
    for hook in HOOKS {
        hash.update(hook.symbol.as_bytes());
    }
    hash.digest()
}

fn load_object(sizes: Sizes, abilities: Abilities) -> anyhow::Result<Ebpf> {
    if OBJECT.is_empty() {
        bail!(
            "this agent was built without its BPF program: run `cargo xtask ebpf` and build it again"
        );
    }
    let mut loader = EbpfLoader::new();
    loader
        .map_max_entries("EVENTS", sizes.ring_bytes)
        .map_max_entries("STACKS", sizes.stack_ring_bytes)
        .map_max_entries("THREADS", sizes.threads)
        .map_max_entries(table::PYTHON_THREADS, sizes.threads);
    let mut ebpf = loader.load(OBJECT).map_err(|error| {
        anyhow::anyhow!(
            "failed to load the BPF program: {}; it needs a kernel from 5.15 on with BPF, and root or CAP_BPF + CAP_PERFMON + CAP_SYS_ADMIN",
            chain(&error)
        )
    })?;
    for name in UPROBES.map(|name| abilities.program(name)) {
        let program: &mut UProbe = ebpf
            .program_mut(name)
            .context("no such BPF program")?
            .try_into()?;
        program
            .load()
            .with_context(|| format!("the kernel refused BPF program {name}"))?;
    }
    for (name, _) in TRACEPOINTS {
        let program: &mut RawTracePoint = ebpf
            .program_mut(name)
            .context("no such BPF program")?
            .try_into()?;
        program
            .load()
            .with_context(|| format!("the kernel refused BPF program {name}"))?;
    }
    Ok(ebpf)
}

/// Kernels before 6.6 know no uprobe-multi links; perf events do the same, slower to take away.
fn load_multi(ebpf: &Ebpf, abilities: Abilities) -> Option<MultiPrograms> {
    if !abilities.uprobe_multi {
        return None;
    }
    let maps: Vec<(String, RawFd)> = ebpf
        .maps()
        .filter_map(|(name, map)| {
            let (Map::Array(data)
            | Map::RingBuf(data)
            | Map::PerCpuArray(data)
            | Map::LruHashMap(data)
            | Map::HashMap(data)) = map
            else {
                return None;
            };
            Some((name.to_string(), data.fd().as_fd().as_raw_fd()))
        })
        .collect();
    let load = |name| {
        multi::load(OBJECT, &maps, abilities.program(name))
            .inspect_err(|error| info!("hooking by perf events: {error:#}"))
            .ok()
    };
    Some(MultiPrograms {
        enter: load("enter")?,
        leave: load("leave")?,
        framework: load(FRAMEWORK)?,
    })
}

/// An error with its causes in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

pub(super) fn attach_tracepoints(
    ebpf: &mut Ebpf,
    links: Option<&Path>,
) -> anyhow::Result<Vec<(&'static str, RawTracePointLinkId)>> {
    let mut kept = Vec::new();
    for (name, tracepoint) in TRACEPOINTS {
        let program: &mut RawTracePoint = ebpf
            .program_mut(name)
            .context("no such BPF program")?
            .try_into()?;
        let id = program
            .attach(tracepoint)
            .with_context(|| format!("failed to attach to {tracepoint}"))?;
        if let Some(links) = links {
            let link: FdLink = program.take_link(id)?.into();
            link.pin(links.join(tracepoint))
                .with_context(|| format!("failed to pin the link to {tracepoint}"))?;
        } else {
            kept.push((name, id));
        }
    }
    Ok(kept)
}

fn take_map(ebpf: &mut Ebpf, name: &str) -> anyhow::Result<MapData> {
    match ebpf.take_map(name) {
        Some(
            Map::Array(data)
            | Map::RingBuf(data)
            | Map::PerCpuArray(data)
            | Map::LruHashMap(data)
            | Map::HashMap(data),
        ) => Ok(data),
        _ => bail!("no BPF map {name:?} in the object"),
    }
}

fn set_start(pins: &Path, next_seq: u64) -> anyhow::Result<()> {
    let mut seq = Array::<_, u64>::try_from(Map::Array(MapData::from_pin(pins.join("SEQ"))?))?;
    seq.set(0, next_seq, 0)?;
    let mut generation =
        Array::<_, u64>::try_from(Map::Array(MapData::from_pin(pins.join("GENERATION"))?))?;
    // Since boot, as processes' start times are: the wall clock may be set meanwhile.
    generation.set(0, crate::host::clock::boottime_ns(), 0)?;
    Ok(())
}
