//! Logs of an earlier version: one file per batch, taken in at start.
//!
//! ```text
//! _wal/AGENT_ID/00000000000000000042-alloc_events-1c291ca3.parquet   batch_seq, table, CRC-32
//! _wal/AGENT_ID/.tmp-42                                              never acknowledged
//! ```
//!
//! In such a log a batch whose number is not above its table's transaction of that agent was
//! committed already. Agents' folders stay: `status` knows agents by them that have sent nothing
//! since. Files are deleted one by one after their batch is in a segment, so that a start that
//! was interrupted goes on where it ended.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vramscope_wire::Table;

use super::{DAMAGED, is_agent_id, segment};

const TEMPORARY: &str = ".tmp-";

/// One batch of an earlier version's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Legacy {
    /// Agent that sent it.
    pub agent: Arc<str>,
    /// Its number in the agent's line.
    pub seq: u64,
    /// Table it belongs to.
    pub table: Table,
    /// CRC-32 of the file.
    pub crc32: u32,
    /// The file.
    pub path: PathBuf,
}

impl Legacy {
    /// Takes a damaged batch out of the line.
    pub fn set_aside(&self, root: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let aside = segment::set_aside(root, &format!("{}-{name}", self.agent), bytes)?;
        fs::remove_file(&self.path)?;
        Ok(aside)
    }
}

/// Lists the batches of an earlier version's log, each agent's in ascending order.
pub fn list(root: &Path) -> io::Result<Vec<Legacy>> {
    let mut found = Vec::new();
    for (agent, dir) in agent_dirs(root)? {
        let agent: Arc<str> = agent.into();
        for file in fs::read_dir(&dir)? {
            let path = file?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            match name.map(|name| (name, parse_name(name))) {
                Some((_, Some((seq, table, crc32)))) => found.push(Legacy {
                    agent: Arc::clone(&agent),
                    seq,
                    table,
                    crc32,
                    path,
                }),
                Some((name, None)) if name.starts_with(TEMPORARY) => {}
                _ => {
                    tracing::warn!(path = %path.display(), "not a file of the log, left alone");
                }
            }
        }
    }
    found.sort_by_key(|legacy| legacy.seq);
    Ok(found)
}

/// Removes what was never acknowledged. For the holder of the folder's lock.
pub fn remove_temporaries(root: &Path) -> io::Result<()> {
    for (_, dir) in agent_dirs(root)? {
        for file in fs::read_dir(&dir)? {
            let file = file?;
            let name = file.file_name();
            if name.to_string_lossy().starts_with(TEMPORARY) {
                fs::remove_file(file.path())?;
            }
        }
    }
    Ok(())
}

/// Agents that stored something here before logs had segments.
pub fn agents(root: &Path) -> io::Result<Vec<String>> {
    Ok(agent_dirs(root)?
        .into_iter()
        .map(|(agent, _)| agent)
        .collect())
}

fn agent_dirs(root: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut dirs = Vec::new();
    let listing = match fs::read_dir(root) {
        Ok(listing) => listing,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(dirs),
        Err(error) => return Err(error),
    };
    for dir in listing {
        let dir = dir?;
        let name = dir.file_name();
        let Some(name) = name.to_str() else { continue };
        if dir.file_type()?.is_dir() && is_agent_id(name) && name != DAMAGED {
            dirs.push((name.to_string(), dir.path()));
        }
    }
    Ok(dirs)
}

fn parse_name(name: &str) -> Option<(u64, Table, u32)> {
    let mut parts = name.strip_suffix(".parquet")?.split('-');
    let (seq, table, crc32) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || seq.len() != 20 {
        return None;
    }
    Some((
        seq.parse().ok()?,
        Table::by_name(table)?,
        u32::from_str_radix(crc32, 16).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        assert_eq!(
            parse_name("00000000000000000042-stacks-deadbeef.parquet"),
            Some((42, Table::Stacks, 0xdead_beef))
        );
        for wrong in [
            "42-stacks-deadbeef.parquet",
            "x",
            "00000000000000000042-nonesuch-deadbeef.parquet",
        ] {
            assert_eq!(parse_name(wrong), None, "{wrong}");
        }
    }
}
