//! USDT probes of a 64-bit ELF file: the notes that `sys/sdt.h` leaves in `.note.stapsdt`.
//!
//! A note names a place in the code (`pc`), optionally a counter that turns the probe on
//! (`semaphore`), and says in assembler terms where the probe's arguments lie there. Addresses
//! are those the linker gave; a prelinked file was moved since, which shows in the difference
//! between the section `.stapsdt.base` and what the note remembers of it. A file without that
//! section was not moved.
//!
//! Files come from other people's containers: nothing is assumed of them. Notes are bounded in
//! number and length, and an address outside the file's segments is an error of that note.

use object::Endianness;
use object::read::ReadRef;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};

type Header = object::elf::FileHeader64<Endianness>;

const NOTES: &[u8] = b".note.stapsdt";
const BASE: &[u8] = b".stapsdt.base";
const OWNER: &[u8] = b"stapsdt";
const TYPE: u32 = 3;
/// A file with more has been made to hurt; libpython has some twenty, a JVM some 500.
const MAX_PROBES: usize = 65_536;
/// Longest provider, name, or argument string.
const MAX_TEXT: usize = 4096;

/// One place of a probe. A probe has several where it was inlined.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Probe {
    pub provider: String,
    pub name: String,
    /// Where the arguments lie, as in `-4@%edi 8@-16(%rbp)`.
    pub arguments: String,
    /// Address of the probe's instruction as the linker gave it, base adjusted.
    pub address: u64,
    /// The same as an offset in the file, which is what a uprobe takes.
    pub offset: u64,
    /// Offset in the file of the 16-bit counter of listeners, if the probe has one.
    pub semaphore: Option<u64>,
}

/// Why a file's notes cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UsdtError {
    #[error("not a 64-bit ELF file: {0}")]
    Elf(String),
    #[error(
        "the note at offset {at} of {NOTES} is cut short",
        NOTES = ".note.stapsdt"
    )]
    Short { at: usize },
    #[error("probe {probe} lies at {address:#x}, which is in no segment of the file")]
    Nowhere { probe: String, address: u64 },
    #[error("more than {MAX_PROBES} probes")]
    Many,
}

fn elf(error: object::Error) -> UsdtError {
    UsdtError::Elf(error.to_string())
}

/// A part of the file that is mapped.
#[derive(Debug, Clone, Copy)]
struct Segment {
    address: u64,
    offset: u64,
    size: u64,
}

impl Segment {
    fn file_offset(&self, address: u64) -> Option<u64> {
        let into = address.checked_sub(self.address)?;
        if into >= self.size {
            return None;
        }
        self.offset.checked_add(into)
    }
}

/// The probes of a file, in the order of its notes. Empty if it has none.
pub fn probes<'data, R: ReadRef<'data>>(data: R) -> Result<Vec<Probe>, UsdtError> {
    let header = Header::parse(data).map_err(elf)?;
    let endian = header.endian().map_err(elf)?;
    let sections = header.sections(endian, data).map_err(elf)?;
    let Some((_, notes)) = sections.section_by_name(endian, NOTES) else {
        return Ok(Vec::new());
    };
    let base = sections
        .section_by_name(endian, BASE)
        .map(|(_, section)| section.sh_addr(endian));
    let segments: Vec<Segment> = header
        .program_headers(endian, data)
        .map_err(elf)?
        .iter()
        .filter(|segment| segment.p_type(endian) == object::elf::PT_LOAD)
        .map(|segment| Segment {
            address: segment.p_vaddr(endian),
            offset: segment.p_offset(endian),
            size: segment.p_filesz(endian),
        })
        .collect();
    let bytes = notes.data(endian, data).map_err(elf)?;
    parse_notes(bytes, endian, base, |address| {
        segments
            .iter()
            .find_map(|segment| segment.file_offset(address))
    })
}

/// Walks a note section by hand: `object` gives up the rest after one note it does not like.
fn parse_notes(
    bytes: &[u8],
    endian: Endianness,
    base: Option<u64>,
    file_offset: impl Fn(u64) -> Option<u64>,
) -> Result<Vec<Probe>, UsdtError> {
    let mut probes = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let short = UsdtError::Short { at };
        let word = |i: usize| -> Option<usize> {
            let bytes: [u8; 4] = bytes.get(at + 4 * i..at + 4 * i + 4)?.try_into().ok()?;
            Some(match endian {
                Endianness::Little => u32::from_le_bytes(bytes),
                Endianness::Big => u32::from_be_bytes(bytes),
            } as usize)
        };
        let (Some(owner_len), Some(desc_len), Some(kind)) = (word(0), word(1), word(2)) else {
            // Padding at the end is no note.
            if bytes[at..].iter().all(|byte| *byte == 0) {
                break;
            }
            return Err(short);
        };
        let parts = || -> Option<(&[u8], &[u8], usize)> {
            let owner_at = at + 12;
            let desc_at = owner_at
                .checked_add(owner_len)?
                .checked_next_multiple_of(4)?;
            let desc_end = desc_at.checked_add(desc_len)?;
            let owner = bytes.get(owner_at..owner_at.checked_add(owner_len)?)?;
            let desc = bytes.get(desc_at..desc_end)?;
            Some((owner, desc, desc_end.checked_next_multiple_of(4)?))
        };
        let Some((owner, desc, next)) = parts() else {
            return Err(short);
        };
        at = next;
        let owner = owner.strip_suffix(&[0]).unwrap_or(owner);
        if owner != OWNER || kind != TYPE as usize {
            continue;
        }
        if probes.len() >= MAX_PROBES {
            return Err(UsdtError::Many);
        }
        let Some(note) = Note::parse(desc, endian) else {
            return Err(short);
        };
        probes.push(note.probe(base, &file_offset)?);
    }
    Ok(probes)
}

/// A note as it is written.
struct Note {
    pc: u64,
    base: u64,
    semaphore: u64,
    provider: String,
    name: String,
    arguments: String,
}

impl Note {
    fn parse(desc: &[u8], endian: Endianness) -> Option<Self> {
        let long = |i: usize| -> Option<u64> {
            let bytes: [u8; 8] = desc.get(8 * i..8 * i + 8)?.try_into().ok()?;
            Some(match endian {
                Endianness::Little => u64::from_le_bytes(bytes),
                Endianness::Big => u64::from_be_bytes(bytes),
            })
        };
        let mut rest = desc.get(24..)?;
        let mut text = || -> Option<String> {
            let end = rest.iter().take(MAX_TEXT).position(|byte| *byte == 0)?;
            let text = String::from_utf8_lossy(&rest[..end]).into_owned();
            rest = &rest[end + 1..];
            Some(text)
        };
        Some(Self {
            pc: long(0)?,
            base: long(1)?,
            semaphore: long(2)?,
            provider: text()?,
            name: text()?,
            arguments: text()?,
        })
    }

    fn probe(
        self,
        base: Option<u64>,
        file_offset: impl Fn(u64) -> Option<u64>,
    ) -> Result<Probe, UsdtError> {
        // Without the section nothing was moved, whatever the note remembers.
        let moved = match base {
            Some(base) if self.base != 0 => base.wrapping_sub(self.base),
            _ => 0,
        };
        let address = self.pc.wrapping_add(moved);
        let nowhere = |address| UsdtError::Nowhere {
            probe: format!("{}:{}", self.provider, self.name),
            address,
        };
        let offset = file_offset(address).ok_or_else(|| nowhere(address))?;
        let semaphore = match self.semaphore {
            0 => None,
            semaphore => {
                let semaphore = semaphore.wrapping_add(moved);
                Some(file_offset(semaphore).ok_or_else(|| nowhere(semaphore))?)
            }
        };
        Ok(Probe {
            provider: self.provider,
            name: self.name,
            arguments: self.arguments,
            address,
            offset,
            semaphore,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::Write;
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    /// One note as `sys/sdt.h` has the assembler write it.
    fn note(pc: u64, base: u64, semaphore: u64, texts: &[u8]) -> Vec<u8> {
        let mut desc = Vec::new();
        for value in [pc, base, semaphore] {
            desc.extend(value.to_le_bytes());
        }
        desc.extend(texts);
        let mut note = Vec::new();
        for value in [8, desc.len() as u32, 3] {
            note.extend(value.to_le_bytes());
        }
        note.extend(b"stapsdt\0");
        note.extend(desc);
        note.resize(note.len().next_multiple_of(4), 0);
        note
    }

    fn parse(bytes: &[u8], base: Option<u64>) -> Result<Vec<Probe>, UsdtError> {
        // One segment: addresses 0x1000 to 0x2000 lie at offset 0x400.
        let segment = Segment {
            address: 0x1000,
            offset: 0x400,
            size: 0x1000,
        };
        parse_notes(bytes, Endianness::Little, base, |address| {
            segment.file_offset(address)
        })
    }

    #[test]
    fn notes_give_places_and_arguments() {
        let bytes = [
            note(0x1234, 0x1500, 0x1800, b"pytorch\0malloc\08@%rax -4@%edi\0"),
            note(0x1300, 0x1500, 0, b"pytorch\0free\0\0"),
        ]
        .concat();
        let probes = parse(&bytes, Some(0x1500)).unwrap();
        assert_eq!(probes[0].provider, "pytorch");
        assert_eq!(probes[0].arguments, "8@%rax -4@%edi");
        assert_eq!(
            (probes[0].offset, probes[0].semaphore),
            (0x634, Some(0xc00))
        );
        assert_eq!((probes[1].name.as_str(), probes[1].offset), ("free", 0x700));
        assert_eq!(probes[1].semaphore, None);
    }

    #[test]
    fn a_prelinked_file_was_moved_and_one_without_a_base_was_not() {
        let bytes = note(0x1234, 0x1500, 0x1800, b"p\0n\0\0");
        let moved = parse(&bytes, Some(0x1540)).unwrap();
        assert_eq!(
            (moved[0].address, moved[0].semaphore),
            (0x1274, Some(0xc40))
        );
        assert_eq!(parse(&bytes, None).unwrap()[0].address, 0x1234);
        // libc10_cuda.so: the note remembers no base.
        let bytes = note(0x1234, 0, 0, b"p\0n\0\0");
        assert_eq!(parse(&bytes, Some(0x1540)).unwrap()[0].address, 0x1234);
    }

    #[test]
    fn damage_is_an_error_that_says_where() {
        let good = note(0x1234, 0, 0, b"p\0n\0\0");
        for cut in 1..good.len() - 3 {
            assert_eq!(
                parse(&good[..cut], None),
                Err(UsdtError::Short { at: 0 }),
                "cut at {cut}"
            );
        }
        let outside = note(0x9999, 0, 0, b"p\0n\0\0");
        let error = parse(&outside, None).unwrap_err().to_string();
        assert!(error.contains("p:n lies at 0x9999"), "{error}");
        let endless = note(0x1234, 0, 0, &[b'x'; 5000]);
        assert_eq!(parse(&endless, None), Err(UsdtError::Short { at: 0 }));
        // Another's note is passed over.
        let mut other = note(0x1234, 0, 0, b"p\0n\0\0");
        other[12] = b'X';
        assert_eq!(parse(&[other, good].concat(), None).unwrap().len(), 1);
    }

    /// Provider, name, address, arguments as binutils prints them.
    type Printed = BTreeSet<(String, String, u64, String)>;

    fn by_readelf(path: &std::path::Path) -> Option<Printed> {
        let output = Command::new("readelf").arg("-nW").arg(path).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut printed = Printed::new();
        let mut provider = String::new();
        let (mut name, mut address) = (String::new(), 0);
        for line in text.lines().map(str::trim) {
            if let Some((_, rest)) = line.split_once("Provider: ") {
                provider = rest.to_string();
            } else if let Some(rest) = line.strip_prefix("Name: ") {
                name = rest.to_string();
            } else if let Some(rest) = line.strip_prefix("Location: 0x") {
                address = u64::from_str_radix(rest.split(',').next()?, 16).ok()?;
            } else if let Some(rest) = line.strip_prefix("Arguments:") {
                printed.insert((
                    provider.clone(),
                    name.clone(),
                    address,
                    rest.trim().to_string(),
                ));
            }
        }
        Some(printed)
    }

    /// What binutils finds in the libraries of this system.
    #[test]
    fn real_libraries_have_the_probes_that_readelf_prints() {
        let folders = ["/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"];
        let wanted = ["libc.so", "libstdc++.so", "libpython3", "libglib-2.0.so"];
        let files: Vec<PathBuf> = folders
            .iter()
            .filter_map(|folder| std::fs::read_dir(folder).ok())
            .flat_map(|entries| entries.flatten().map(|entry| entry.path()))
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                wanted.iter().any(|wanted| name.starts_with(wanted))
            })
            .collect();
        let mut compared = 0;
        for path in files {
            let Ok(bytes) = std::fs::read(&path) else {
                continue;
            };
            // Linker scripts are named like libraries.
            if !bytes.starts_with(b"\x7fELF") {
                continue;
            }
            let Some(expected) = by_readelf(&path) else {
                break;
            };
            let found: Printed = probes(bytes.as_slice())
                .unwrap()
                .into_iter()
                .map(|p| (p.provider, p.name, p.address, p.arguments))
                .collect();
            assert_eq!(found, expected, "{}", path.display());
            compared += found.len();
        }
        if compared == 0 {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: no readelf, or no library with USDT probes"
            );
        }
    }
}
