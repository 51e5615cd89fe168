//! The places in a framework's libraries where its allocator tells of itself, and the hooks there.
//!
//! PyTorch has two kinds: USDT probes in `libc10_cuda.so`, each turned on by a counter in the
//! program's memory (the kernel raises it while a probe is attached), and two functions of
//! `libc10.so` that are called whether anybody listens or not. Their names are mangled C++, so
//! the name tells what the arguments are; a form that is not known is refused aloud.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::Context;
use aya::Pod;
use aya::maps::{Array, Map, MapData};
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol, ReadCache, ReadRef};
use vramscope_ebpf_abi::framework as abi;

use super::framework::{FREE, MALLOC, OOM, REPORT};
use super::operands;
use super::site::{self, PREFIX};
use crate::host::library::Library;
use crate::host::usdt;

/// Who the notes of PyTorch's probes name as their provider.
const PROVIDER: &str = "pytorch";
/// A probe, what it is, and how many arguments are read of it.
const PROBES: [(&str, &str, abi::What, usize); 2] = [
    (MALLOC, "malloc", abi::What::Malloc, 4),
    (FREE, "free", abi::What::Free, 1),
];
/// A function, how its mangled name begins, and how it goes on where the arguments are what the
/// kernel side reads: `long` and `unsigned long` fill a register alike.
const FUNCTIONS: [(&str, &str, abi::What, &[&str]); 2] = [
    (
        REPORT,
        "_ZN3c1027reportMemoryUsageToProfiler",
        abi::What::Report,
        &["EPvlmmNS_6DeviceE", "EPvlllNS_6DeviceE"],
    ),
    (
        OOM,
        "_ZN3c1027reportOutOfMemoryToProfiler",
        abi::What::Oom,
        &["ElmmNS_6DeviceE", "ElllNS_6DeviceE"],
    ),
];

/// One place to hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub symbol: &'static str,
    pub what: abi::What,
    /// Offset in the file.
    pub offset: u64,
    /// Offset in the file of the counter that turns it on; 0 for none.
    pub counter: u64,
    pub site: abi::Site,
}

/// What a library has.
#[derive(Debug, Default)]
pub struct Found {
    pub places: Vec<Place>,
    /// Places that cannot be hooked, and why.
    pub refused: Vec<(&'static str, String)>,
}

impl Found {
    fn refuse(&mut self, symbol: &'static str, reason: impl Into<String>) {
        self.refused.push((symbol, reason.into()));
    }

    /// Names of what was found, each once.
    pub fn symbols(&self) -> Vec<&'static str> {
        let mut seen = HashSet::new();
        let places = self.places.iter().map(|place| place.symbol);
        let refused = self.refused.iter().map(|(symbol, _)| *symbol);
        places
            .chain(refused)
            .filter(|symbol| seen.insert(*symbol))
            .collect()
    }
}

/// Looks for the places in a file.
pub fn find(library: &Library) -> anyhow::Result<Found> {
    let file = File::open(&library.open_path)
        .with_context(|| format!("failed to open {}", library.path))?;
    let cache = ReadCache::new(&file);
    let mut found = places(&cache)
        .with_context(|| format!("{} cannot be read as a 64-bit ELF file", library.path))?;
    for place in &mut found.places {
        // A probe's instruction is one that costs little already.
        let mut code = [0; PREFIX];
        if place.counter == 0 && file.read_exact_at(&mut code, place.offset).is_ok() {
            place.offset += site::displacement(&code);
        }
    }
    let name = library.path.rsplit('/').next().unwrap_or_default();
    let has_probes = name.starts_with("libc10_cuda.so");
    let expected = if has_probes {
        [MALLOC, FREE]
    } else {
        [REPORT, OOM]
    };
    for symbol in expected {
        if !found.symbols().contains(&symbol) {
            found.refuse(
                symbol,
                if has_probes {
                    "this version has no such USDT probe: what was asked for, and the stream, are not known"
                } else {
                    super::bpf::NOT_EXPORTED
                },
            );
        }
    }
    Ok(found)
}

/// Looks for the places in a file's bytes.
pub fn places<'data, R: ReadRef<'data>>(data: R) -> anyhow::Result<Found> {
    let elf = ElfFile64::<Endianness, R>::parse(data)?;
    let endian = elf.endian();
    let machine = elf.elf_header().e_machine(endian);
    let mut found = Found::default();
    for probe in usdt::probes(data)? {
        let known = PROBES
            .iter()
            .find(|(_, name, ..)| probe.provider == PROVIDER && probe.name == *name);
        let Some((symbol, _, what, wanted)) = known else {
            continue;
        };
        match operands::site(&probe.arguments, *wanted) {
            Ok(site) => found.places.push(Place {
                symbol,
                what: *what,
                offset: probe.offset,
                counter: probe.semaphore.unwrap_or(0),
                site,
            }),
            Err(error) => {
                found.refuse(
                    symbol,
                    format!("the place at {:#x}: {error}", probe.address),
                );
            }
        }
    }
    let segments = elf.elf_header().program_headers(endian, data)?;
    for exported in elf.dynamic_symbols().filter(ObjectSymbol::is_definition) {
        let Ok(name) = exported.name() else { continue };
        let known = FUNCTIONS
            .iter()
            .find_map(|function| Some((function, name.strip_prefix(function.1)?)));
        let Some(((symbol, _, what, forms), form)) = known else {
            continue;
        };
        if !forms.contains(&form) {
            found.refuse(
                symbol,
                format!("its name {name} tells of arguments that this agent does not know"),
            );
            continue;
        }
        let address = exported.address();
        let segment = segments.iter().find(|segment| {
            let start = segment.p_vaddr(endian);
            segment.p_type(endian) == object::elf::PT_LOAD
                && (start..start.saturating_add(segment.p_filesz(endian))).contains(&address)
        });
        let offset = segment.and_then(|segment| {
            (address - segment.p_vaddr(endian)).checked_add(segment.p_offset(endian))
        });
        match offset {
            Some(offset) => found.places.push(Place {
                symbol,
                what: *what,
                offset,
                counter: 0,
                site: abi::Site::default(),
            }),
            None => found.refuse(symbol, format!("{name} lies in no segment of the file")),
        }
    }
    if machine != object::elf::EM_X86_64 && !found.places.is_empty() {
        for symbol in found.symbols() {
            found.refuse(
                symbol,
                format!("the file is for machine {machine}, and this agent reads x86-64"),
            );
        }
        found.places.clear();
    }
    Ok(found)
}

/// The kernel side's form.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct SitePod(abi::Site);

// SAFETY: plain integers without padding (checked in the abi crate).
unsafe impl Pod for SitePod {}

/// Descriptions of sites, as the kernel side reads them. Pinned probes outlive the agent, so a
/// description that is there is never changed: the same one is used again, a new one takes the
/// next place.
pub(super) struct SiteTable {
    map: Array<MapData, SitePod>,
}

impl SiteTable {
    pub fn open(map: MapData) -> anyhow::Result<Self> {
        Ok(Self {
            map: Array::try_from(Map::Array(map))?,
        })
    }

    /// The number of a description.
    pub fn number(&mut self, site: &abi::Site) -> anyhow::Result<u32> {
        let empty = abi::Site::default();
        if *site == empty {
            return Ok(0);
        }
        // The first place stays empty, for places without operands.
        for number in 1..abi::SITES {
            let there = self.map.get(&number, 0)?.0;
            if there == *site {
                return Ok(number);
            }
            if there == empty {
                self.map.set(number, SitePod(*site), 0)?;
                return Ok(number);
            }
        }
        anyhow::bail!(
            "the kernel side has room for {} forms of arguments, and all are taken; `vramscope-agent detach` frees them",
            abi::SITES - 1
        )
    }
}
