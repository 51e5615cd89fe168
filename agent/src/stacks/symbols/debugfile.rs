//! Separate debug files: what `objcopy --only-keep-debug` leaves of a file whose code runs stripped.
//!
//! They are looked for where debuggers look (<https://sourceware.org/gdb/current/onlinedocs/gdb.html/Separate-Debug-Files.html>):
//! by build id in `FOLDER/.build-id/xx/rest.debug`, and by the name in `.gnu_debuglink` beside the
//! file, in `.debug/` there, and below `FOLDER` under the file's own folder. A file that is found has
//! to have the same build id, or, where there is none, the check sum that the link gives: debug
//! information of another build would give wrong names.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use object::{Object, ObjectSection, ObjectSegment, ReadCache};

/// What concerns names in an ELF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Hexadecimal.
    pub build_id: Option<String>,
    /// It has a whole symbol table, not only the dynamic one.
    pub has_symbols: bool,
    /// It has DWARF.
    pub has_debug_info: bool,
    /// Name and CRC-32 of the separate debug file.
    link: Option<(Vec<u8>, u32)>,
    /// Offset in the file, bytes there, address.
    segments: Vec<(u64, u64, u64)>,
}

impl Facts {
    /// `None` if it is no ELF file that makes sense.
    pub fn read(path: &Path) -> Option<Self> {
        let cache = ReadCache::new(File::open(path).ok()?);
        let elf = object::File::parse(&cache).ok()?;
        let has_content = |name: &str| {
            let section = elf.section_by_name(name);
            section.is_some_and(|s| s.file_range().is_some_and(|(_, bytes)| bytes > 0))
        };
        Some(Self {
            build_id: elf.build_id().ok().flatten().map(hex),
            has_symbols: elf.symbol_table().is_some() && has_content(".symtab"),
            has_debug_info: has_content(".debug_info") || has_content(".zdebug_info"),
            link: elf
                .gnu_debuglink()
                .ok()
                .flatten()
                .map(|(name, crc)| (name.to_vec(), crc)),
            segments: elf
                .segments()
                .map(|segment| {
                    let (offset, bytes) = segment.file_range();
                    (offset, bytes, segment.address())
                })
                .collect(),
        })
    }

    /// The address, as symbols have it, of a byte of the file.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        let within = |(start, bytes, _): &&(u64, u64, u64)| {
            offset.checked_sub(*start).is_some_and(|at| at < *bytes)
        };
        let (start, _, address) = self.segments.iter().find(within)?;
        address.checked_add(offset - start)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The separate debug file of a file, if it is on this host. `path`: the file's, as the process sees
/// it; what lies there for the agent may be another file, which is why each is checked.
pub fn find(facts: &Facts, path: &Path, folders: &[PathBuf]) -> Option<PathBuf> {
    let mut candidates = Vec::new();
    // Two digits name the folder, the rest the file.
    if let Some((first, rest)) = facts
        .build_id
        .as_ref()
        .and_then(|id| id.split_at_checked(2))
        && !rest.is_empty()
    {
        let below = |folder: &PathBuf| folder.join(format!(".build-id/{first}/{rest}.debug"));
        candidates.extend(folders.iter().map(below));
    }
    if let Some((name, _)) = &facts.link
        && is_plain_name(name)
        && let Some(own) = path.parent()
    {
        let name = Path::new(std::ffi::OsStr::from_bytes(name));
        candidates.push(own.join(name));
        candidates.push(own.join(".debug").join(name));
        let below = own.strip_prefix("/").unwrap_or(own);
        candidates.extend(folders.iter().map(|folder| folder.join(below).join(name)));
    }
    candidates
        .into_iter()
        .find(|candidate| belongs(facts, candidate))
}

/// The link comes from the file: it must not lead out of the folders.
fn is_plain_name(name: &[u8]) -> bool {
    !name.is_empty() && !name.contains(&b'/') && name != b".." && name != b"."
}

/// Whether a debug file is that of a file, and has what it is for.
fn belongs(facts: &Facts, candidate: &Path) -> bool {
    let Some(found) = Facts::read(candidate) else {
        return false;
    };
    if !found.has_symbols && !found.has_debug_info {
        return false;
    }
    match (&facts.build_id, &found.build_id, &facts.link) {
        (Some(id), Some(found), _) => id == found,
        (None, None, Some((_, crc))) => crc_of(candidate).is_some_and(|found| found == *crc),
        _ => false,
    }
}

/// Whether a file has that build id, and has names.
pub fn is_of_build(path: &Path, build_id: &str) -> bool {
    Facts::read(path).is_some_and(|facts| {
        facts.build_id.as_deref() == Some(build_id) && (facts.has_symbols || facts.has_debug_info)
    })
}

fn crc_of(path: &Path) -> Option<u32> {
    let mut file = File::open(path).ok()?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(hasher.finalize()),
            read => hasher.update(&buffer[..read]),
        }
    }
}
