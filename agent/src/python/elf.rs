//! What an interpreter's file tells: where its structures and its evaluation function lie.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, ReadCache, ReadRef};

use crate::host::procfs::Mapping;

/// The function that runs Python code; GCC puts what is rarely run of it elsewhere, under the same
/// name with an ending.
const EVAL: &str = "_PyEval_EvalFrameDefault";
/// Bytes of a function that are looked at.
const TEXT: u64 = 96;

/// A part of the file that is mapped.
#[derive(Debug, Clone, Copy)]
struct Segment {
    address: u64,
    offset: u64,
    bytes: u64,
}

/// A file with an interpreter in it. Addresses are the file's own: [`Image::bias`] makes them those
/// of a process.
#[derive(Debug, Clone)]
pub struct Image {
    segments: Vec<Segment>,
    pub runtime: u64,
    pub code_type: u64,
    /// Of the word with the version; 3.10 has none.
    pub version: Option<u64>,
    /// Address and first bytes of `PyGILState_GetThisThreadState`.
    pub accessor: Option<(u64, Vec<u8>)>,
}

impl Image {
    /// `None` for a file without an interpreter.
    pub fn read(path: &Path) -> Option<Self> {
        let cache = ReadCache::new(File::open(path).ok()?);
        let elf = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
        let mut image = Self {
            segments: segments(&elf, &cache)?,
            runtime: 0,
            code_type: 0,
            version: None,
            accessor: None,
        };
        let mut accessor = None;
        let mut take = |name: &str, address: u64| match name {
            "_PyRuntime" => image.runtime = address,
            "PyCode_Type" => image.code_type = address,
            "Py_Version" => image.version = Some(address),
            "PyGILState_GetThisThreadState" => accessor = Some(address),
            _ => {}
        };
        let names = |symbol: &object::read::elf::ElfSymbol64<'_, '_, Endianness, _>| {
            symbol.is_definition() && symbol.address() != 0
        };
        for symbol in elf.dynamic_symbols().filter(names) {
            take(symbol.name().unwrap_or_default(), symbol.address());
        }
        if image.runtime == 0 || image.code_type == 0 {
            return None;
        }
        image.accessor = accessor.and_then(|address| {
            let section = elf
                .sections()
                .find(|s| (s.address()..s.address() + s.size()).contains(&address))?;
            let left = section.address() + section.size() - address;
            let bytes = section.data_range(address, left.min(TEXT)).ok()??;
            Some((address, bytes.to_vec()))
        });
        Some(image)
    }

    /// What to add to the file's addresses for those of a process that maps it so.
    pub fn bias(&self, mapping: &Mapping) -> Option<u64> {
        let segment = self.segments.iter().find(|segment| {
            let start = segment.offset & !0xfff;
            (start..segment.offset + segment.bytes).contains(&mapping.offset)
        })?;
        let address = mapping
            .offset
            .wrapping_sub(segment.offset)
            .wrapping_add(segment.address);
        Some(mapping.start.wrapping_sub(address))
    }
}

fn segments<'data, R: ReadRef<'data>>(
    elf: &ElfFile64<'data, Endianness, R>,
    data: R,
) -> Option<Vec<Segment>> {
    let endian = elf.endian();
    let headers = elf.elf_header().program_headers(endian, data).ok()?;
    let loaded = headers
        .iter()
        .filter(|header| header.p_type(endian) == object::elf::PT_LOAD);
    Some(
        loaded
            .map(|header| Segment {
                address: header.p_vaddr(endian),
                offset: header.p_offset(endian),
                bytes: header.p_filesz(endian),
            })
            .collect(),
    )
}

/// Where in a file the evaluation function's code lies, offsets in the file; empty for a file
/// without one.
pub fn evaluation(path: &Path) -> Vec<Range<u64>> {
    read_evaluation(path).unwrap_or_default()
}

fn read_evaluation(path: &Path) -> Option<Vec<Range<u64>>> {
    let cache = ReadCache::new(File::open(path).ok()?);
    let elf = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let segments = segments(&elf, &cache)?;
    let offset = |address: u64| {
        let segment = segments
            .iter()
            .find(|s| (s.address..s.address.saturating_add(s.bytes)).contains(&address))?;
        Some(address - segment.address + segment.offset)
    };
    let is_eval = |name: &str| {
        name.strip_prefix(EVAL)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let mut found: Vec<Range<u64>> = Vec::new();
    for symbol in elf.dynamic_symbols().chain(elf.symbols()) {
        let is_part = symbol.is_definition() && symbol.size() > 0;
        if is_part
            && symbol.name().is_ok_and(is_eval)
            && let Some(start) = offset(symbol.address())
            && found.iter().all(|range| range.start != start)
        {
            found.push(start..start.saturating_add(symbol.size()));
        }
    }
    if found.len() == 1 {
        // Stripped, as distributions have it: the rest of it has no name.
        found.extend(cold_part(&elf, &found[0], &segments));
    }
    Some(found)
}

/// The part of a function that GCC put elsewhere, without its name: jumps of the function lead into
/// the middle of it, as they lead into no other function. Functions' bounds are those of
/// `.eh_frame_hdr`, whose table every linker makes.
fn cold_part<'data, R: ReadRef<'data>>(
    elf: &ElfFile64<'data, Endianness, R>,
    function: &Range<u64>,
    segments: &[Segment],
) -> Option<Range<u64>> {
    /// So many jumps are no chance: a random one of four bytes hits code once in hundreds.
    const JUMPS: usize = 8;
    let segment = segments
        .iter()
        .find(|s| (s.offset..s.offset + s.bytes).contains(&function.start))?;
    let start = function.start - segment.offset + segment.address;
    let end = start + (function.end - function.start);
    let text = elf
        .sections()
        .find(|s| (s.address()..s.address() + s.size()).contains(&start))?;
    let code = text.data_range(start, end - start).ok()??;
    let header = elf.section_by_name(".eh_frame_hdr")?;
    let starts = function_starts(header.address(), header.data().ok()?)?;
    let mut jumps = std::collections::HashMap::<usize, usize>::new();
    for (at, six) in code.windows(6).enumerate() {
        // A conditional jump, or one without condition.
        let (length, displacement) = match six {
            [0x0f, 0x80..=0x8f, a, b, c, d] => (6, [*a, *b, *c, *d]),
            [0xe9, a, b, c, d, _] => (5, [*a, *b, *c, *d]),
            _ => continue,
        };
        let next = start + at as u64 + length;
        let target = next.wrapping_add(i64::from(i32::from_le_bytes(displacement)) as u64);
        if (start..end).contains(&target) {
            continue;
        }
        let index = starts.partition_point(|start| *start <= target);
        // A jump to a function's first instruction is a call in the last place.
        if index > 0 && index < starts.len() && starts[index - 1] != target {
            *jumps.entry(index - 1).or_default() += 1;
        }
    }
    let (index, count) = jumps.into_iter().max_by_key(|(_, count)| *count)?;
    if count < JUMPS {
        return None;
    }
    let offset = |address: u64| {
        let inside = segments
            .iter()
            .find(|s| (s.address..s.address + s.bytes).contains(&address))?;
        Some(address - inside.address + inside.offset)
    };
    let from = offset(starts[index])?;
    Some(from..from + (starts[index + 1] - starts[index]))
}

/// Starts of all functions, in order, from the table of `.eh_frame_hdr` (Linux Standard Base, 10.6.2)
/// in the form that GNU ld and lld write: counts of four bytes, addresses relative to the section.
fn function_starts(address: u64, data: &[u8]) -> Option<Vec<u64>> {
    let word = |at: usize| {
        let bytes = data.get(at..at + 4)?;
        Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    };
    if data.get(..4)? != [1, 0x1b, 0x03, 0x3b] {
        return None;
    }
    let count = (word(8)? as usize).min(data.len() / 8);
    (0..count)
        .map(|index| Some(address.wrapping_add(i64::from(word(12 + 8 * index)? as i32) as u64)))
        .collect()
}

/// Offset of `specific` in the C library's `struct pthread`, from the description that it exports
/// for debuggers: three words, the size in bits, how many, the offset (`nptl_db`).
pub fn pthread_specific(path: &Path) -> Option<u32> {
    let cache = ReadCache::new(File::open(path).ok()?);
    let elf = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let symbol = elf
        .dynamic_symbols()
        .find(|symbol| symbol.name() == Ok("_thread_db_pthread_specific"))?;
    let section = elf
        .sections()
        .find(|s| (s.address()..s.address() + s.size()).contains(&symbol.address()))?;
    let words = section.data_range(symbol.address(), 12).ok()??;
    Some(u32::from_le_bytes([
        words[8], words[9], words[10], words[11],
    ]))
}
