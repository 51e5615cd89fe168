//! Takes hooks out again: those of one library, or everything. Return probes go first, since they
//! are what can hurt a program. A perf event takes the kernel some 70 ms; a link for a whole library
//! goes at once.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context;
use aya::programs::RawTracePoint;
use aya::programs::links::FdLink;

use super::bpf::{Probes, Programs, TRACEPOINTS};
use crate::host::library::FileId;

impl Probes {
    /// Takes the hooks of one library out. A hook that was never there is no error.
    pub fn detach(&mut self, id: FileId) -> anyhow::Result<()> {
        self.attached.remove(&id);
        self.links.retain(|(of, _)| *of != id);
        let mut perf = std::mem::take(&mut self.perf_links);
        let gone = perf
            .extract_if(.., |(of, ..)| *of == id)
            .collect::<Vec<_>>();
        self.perf_links = perf;
        for (_, program, link) in gone {
            self.programs.get(program)?.detach(link)?;
        }
        let prefix = format!("{:x}-{:x}-", id.device, id.inode);
        self.remove_pinned(|name| name.starts_with(&prefix))
    }

    /// Takes everything out, also what an earlier agent left. Programs and maps stay, so that
    /// [`Self::reattach`] and [`Self::attach`] can put it back.
    pub fn detach_all(&mut self) -> anyhow::Result<()> {
        self.attached.clear();
        self.links.clear();
        let mut perf = std::mem::take(&mut self.perf_links);
        perf.sort_by_key(|(_, program, _)| *program == "enter");
        for (_, program, link) in perf {
            self.programs.get(program)?.detach(link)?;
        }
        for (name, link) in std::mem::take(&mut self.tracepoint_links) {
            if let Programs::Loaded(ebpf, _) = &mut self.programs {
                let program: &mut RawTracePoint = ebpf
                    .program_mut(name)
                    .with_context(|| format!("no BPF program {name:?} in the object"))?
                    .try_into()?;
                program.detach(link)?;
            }
        }
        self.remove_pinned(|_| true)
    }

    /// Puts the process hooks back that [`Self::detach_all`] took out.
    pub fn reattach(&mut self) -> anyhow::Result<()> {
        match (&mut self.programs, &self.pins) {
            (Programs::Loaded(ebpf, _), _) => {
                self.tracepoint_links = super::bpf::attach_tracepoints(ebpf, None)?;
            }
            (Programs::Pinned(_), Some(pins)) => {
                for (name, tracepoint) in TRACEPOINTS {
                    let place = pins.join("links").join(tracepoint);
                    if place.exists() {
                        continue;
                    }
                    let mut program = RawTracePoint::from_pin(pins.join(name))
                        .with_context(|| format!("failed to open pinned program {name}"))?;
                    let id = program
                        .attach(tracepoint)
                        .with_context(|| format!("failed to attach to {tracepoint}"))?;
                    let link: FdLink = program.take_link(id)?.into();
                    link.pin(&place)
                        .with_context(|| format!("failed to pin {}", place.display()))?;
                }
            }
            (Programs::Pinned(_), None) => {}
        }
        Ok(())
    }

    fn remove_pinned(&self, which: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        let Some(pins) = &self.pins else {
            return Ok(());
        };
        let folder = pins.join("links");
        let entries = fs::read_dir(&folder)
            .with_context(|| format!("failed to read {}", folder.display()))?;
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if which(&name) {
                paths.push((name.ends_with("-enter"), path));
            }
        }
        paths.sort();
        paths.iter().try_for_each(|(_, path)| remove(path))
    }

    /// Files that an earlier agent hooked.
    pub fn pinned(&self) -> HashSet<FileId> {
        let folder = self.pins.as_ref().map(|pins| pins.join("links"));
        let entries = folder.and_then(|folder| fs::read_dir(folder).ok());
        entries
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name();
                let mut parts = name.to_str()?.split('-');
                let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
                Some(FileId {
                    device: number()?,
                    inode: number()?,
                })
            })
            .collect()
    }

    /// Lets the next [`Self::attach`] try a library again.
    pub fn forget(&mut self, id: FileId) {
        self.attached.remove(&id);
    }

    /// Whether one link hooks a whole library.
    pub fn uses_multi(&self) -> bool {
        self.multi.is_some()
    }
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("failed to remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
