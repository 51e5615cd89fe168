//! A library file that exports hooked functions: found, named and opened by (device, inode).

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol, ReadCache, ReadRef};

use crate::probes::hooks::{HOOKS, Hook, Layer};
use crate::probes::{places, site};

/// A file on this host, whatever its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

impl FileId {
    /// Asks the file behind `path` itself, so that overlay file systems give the real one.
    pub fn of(path: &Path) -> std::io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }
}

/// One file to hook.
#[derive(Debug, Clone)]
pub struct Library {
    pub id: FileId,
    /// Path for people, as the process that maps it sees it.
    pub path: String,
    /// Path that opens it.
    pub open_path: PathBuf,
    pub layer: Layer,
    /// A program with a runtime linked into it, rather than a library.
    pub is_program: bool,
}

/// What a program's symbols tell of a runtime linked into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaticRuntime {
    Present,
    Absent,
    /// It has no symbol table to look in.
    Stripped,
}

/// Which layer a file of that path belongs to, if any.
pub fn layer_of(path: &str) -> Option<Layer> {
    let name = path.rsplit('/').next()?;
    if name.starts_with("libcuda.so") {
        Some(Layer::Driver)
    } else if name.starts_with("libcudart.so") {
        Some(Layer::Runtime)
    } else if name.starts_with("libc10.so") || name.starts_with("libc10_cuda.so") {
        Some(Layer::Framework)
    } else {
        None
    }
}

impl Library {
    /// A file that no process has mapped yet.
    pub fn from_path(path: &Path) -> anyhow::Result<Self> {
        let display = path.to_string_lossy().into_owned();
        let Some(layer) = layer_of(&display) else {
            bail!(
                "{display} is none of libcuda.so*, libcudart.so*, libc10.so* and libc10_cuda.so*"
            );
        };
        let id = FileId::of(path).with_context(|| format!("failed to open {display}"))?;
        Ok(Self {
            id,
            path: display,
            open_path: path.to_path_buf(),
            layer,
            is_program: false,
        })
    }

    /// Looks for a runtime inside a program.
    pub fn static_runtime(&self) -> anyhow::Result<StaticRuntime> {
        if !self.function_offsets()?.is_empty() {
            return Ok(StaticRuntime::Present);
        }
        let file =
            File::open(&self.open_path).with_context(|| format!("failed to open {}", self.path))?;
        let cache = ReadCache::new(file);
        let elf = object::read::elf::ElfFile64::<Endianness, _>::parse(&cache)?;
        Ok(if elf.symbols().next().is_some() {
            StaticRuntime::Absent
        } else {
            StaticRuntime::Stripped
        })
    }

    /// File offsets of the hooked functions that the library exports, or that the program
    /// contains.
    pub fn function_offsets(&self) -> anyhow::Result<HashMap<&'static str, u64>> {
        let file =
            File::open(&self.open_path).with_context(|| format!("failed to open {}", self.path))?;
        let cache = ReadCache::new(file);
        // A program exports little: its own functions are in the full table alone.
        let functions = hooked_functions(&cache, self.is_program)
            .with_context(|| format!("{} is not a 64-bit ELF file", self.path))?;
        let offsets = functions
            .into_iter()
            .filter(|(hook, _)| hook.layer == self.layer)
            .map(|(hook, offset)| (hook.symbol, offset))
            .collect();
        Ok(offsets)
    }
}

/// A place that is hooked in a library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    pub symbol: &'static str,
    /// Offset in the file.
    pub offset: u64,
    /// Offset of the counter that turns it on; 0 for none.
    pub counter: u32,
}

impl Library {
    /// Where a library is hooked, if it is.
    pub fn points(&self) -> anyhow::Result<Vec<Point>> {
        if self.layer == Layer::Framework {
            let places = places::find(self)?.places;
            return Ok(places
                .iter()
                .map(|place| Point {
                    symbol: place.symbol,
                    offset: place.offset,
                    counter: u32::try_from(place.counter).unwrap_or(0),
                })
                .collect());
        }
        let chosen = site::choose_sites(self, &self.function_offsets()?);
        Ok(chosen
            .sites
            .iter()
            .map(|(symbol, site)| Point {
                symbol,
                offset: site.offset,
                counter: 0,
            })
            .collect())
    }
}

/// The hooked functions that an ELF file exports, or, with `all`, contains under their names, and
/// their offsets in the file. A function outside the file's segments cannot be hooked.
pub fn hooked_functions<'data, R: ReadRef<'data>>(
    data: R,
    all: bool,
) -> object::Result<Vec<(&'static Hook, u64)>> {
    let elf = object::read::elf::ElfFile64::<Endianness, R>::parse(data)?;
    let endian = elf.endian();
    let segments = elf.elf_header().program_headers(endian, data)?;
    let inner = all.then(|| elf.symbols());
    let mut functions: Vec<(&'static Hook, u64)> = Vec::new();
    for symbol in elf.dynamic_symbols().chain(inner.into_iter().flatten()) {
        if !symbol.is_definition() {
            continue;
        }
        let Ok(name) = symbol.name() else { continue };
        let Some(hook) = HOOKS.iter().find(|hook| hook.symbol == name) else {
            continue;
        };
        let address = symbol.address();
        let segment = segments.iter().find(|segment| {
            let start = segment.p_vaddr(endian);
            segment.p_type(endian) == object::elf::PT_LOAD
                && (start..start.saturating_add(segment.p_filesz(endian))).contains(&address)
        });
        // A file may be made to claim any offset.
        let offset = segment.and_then(|segment| {
            (address - segment.p_vaddr(endian)).checked_add(segment.p_offset(endian))
        });
        let is_new = !functions.iter().any(|(known, _)| known.symbol == name);
        if let Some(offset) = offset.filter(|_| is_new) {
            functions.push((hook, offset));
        }
    }
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_go_by_file_name() {
        assert_eq!(
            layer_of("/usr/lib/x86_64-linux-gnu/libcuda.so.580.65"),
            Some(Layer::Driver)
        );
        assert_eq!(layer_of("/opt/libcudart.so.13"), Some(Layer::Runtime));
        assert_eq!(layer_of("/x/lib/libc10_cuda.so"), Some(Layer::Framework));
        assert_eq!(layer_of("/x/lib/libc10.so"), Some(Layer::Framework));
        assert_eq!(layer_of("/x/lib/libc10_hip.so"), None);
        assert_eq!(layer_of("/opt/libcudadebugger.so.1"), None);
    }

    #[test]
    fn a_file_that_is_no_library_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        std::fs::write(&path, "not an ELF file").unwrap();
        let library = Library::from_path(&path).unwrap();
        let error = format!("{:#}", library.function_offsets().unwrap_err());
        assert!(
            error.contains("libcuda.so.1 is not a 64-bit ELF file"),
            "{error}"
        );
        assert!(Library::from_path(Path::new("/nonexistent/libcuda.so.1")).is_err());
    }
}
