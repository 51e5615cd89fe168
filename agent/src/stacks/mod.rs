//! Return addresses into stacks that mean the same on every host.
//!
//! At the event an address becomes (module, offset in its file), which is cheap and has to be
//! done while the process lives. Names come later, once per distinct stack ([`symbols`]).
//!
//! Invariant: `stack_id` depends on the build ids (or file names, where a file has none) and the
//! offsets alone, and of Python frames on what the packages' own files say, never on load addresses
//! or where things are installed.

pub mod modules;
mod pythonic;
pub mod symbols;

use std::collections::HashSet;

use vramscope_ebpf_abi::python::Interpreter;

use crate::Map;
use crate::host::procfs::{self, Mapping};
use crate::probes::record::{PythonOf, Quality, Stack};
use crate::python::walks::{Walked, Walks};
use crate::spool::rows::{FrameRow, StackRow};
use modules::{ModuleId, Modules};
use pythonic::{Interpreters, Place, Seen};

/// Keeps hashes inside the positive half of a BIGINT.
const MASK_63: u64 = (1 << 63) - 1;

/// Stacks of one process that were resolved before, by a hash of their return addresses.
/// At some 50 bytes each they take 1.6 MiB at most.
const CACHE_PER_PROCESS: usize = 32_768;

/// Stacks that are known to have been written. When there are more they are forgotten, and then
/// written again, which costs space in the table and nothing else.
const KNOWN: usize = 1 << 20;

/// Return addresses whose names are kept: the stacks of a program share most of them. At some 300
/// bytes each they take 10 MiB at most, and are looked up anew when there are more.
const NAMED: usize = 32_768;

/// Where one return address lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Location {
    module: ModuleId,
    /// Offset in the file, bytes.
    offset: u64,
}

/// One distinct stack whose names are still to be found.
#[derive(Debug)]
struct Unnamed {
    stack_id: i64,
    api: &'static str,
    places: Vec<Place>,
}

/// One process's mappings and the stacks seen in it.
#[derive(Default)]
struct AddressSpace {
    mappings: Vec<Mapping>,
    resolved: Map<u128, Stack>,
}

impl AddressSpace {
    fn find(&self, address: u64) -> Option<&Mapping> {
        let after = self
            .mappings
            .partition_point(|mapping| mapping.start <= address);
        let mapping = self.mappings.get(after.checked_sub(1)?)?;
        (address < mapping.end && mapping.executable).then_some(mapping)
    }
}

/// What tells a stack from others of its process. Wide enough for two never to meet by chance.
fn key(taken: Taken<'_>) -> u128 {
    // A name's place in memory is as good as the name, and costs nothing to hash.
    let seed = taken.api.as_ptr() as u64;
    let mut hash = xxhash_rust::xxh3::Xxh3::with_seed(seed);
    hash.update(taken.frames);
    hash.update(&[u8::from(taken.cut), taken.python as u8]);
    if let Some(walked) = taken.walked {
        hash.update(walked.bytes());
        hash.update(&[walked.is_whole().into()]);
    }
    hash.digest128()
}

/// All stacks of this host.
pub struct Stacks {
    modules: Modules,
    spaces: Map<u32, AddressSpace>,
    known: HashSet<i64>,
    unnamed: Vec<Unnamed>,
    symbolizer: symbols::Names,
    named: Map<Location, Vec<FrameRow>>,
    /// What the kernel side sends of Python.
    pub python: Walks,
    interpreters: Interpreters,
}

/// A stack as it was taken.
#[derive(Debug, Clone, Copy)]
pub struct Taken<'a> {
    pub pid: u32,
    /// The function that was called.
    pub api: &'static str,
    /// Return addresses as the kernel side wrote them, innermost first.
    pub frames: &'a [u8],
    /// There were more.
    pub cut: bool,
    /// The walk of its Python frames.
    pub walked: Option<&'a Walked>,
    /// What the kernel side said of it.
    pub python: PythonOf,
}

impl Stacks {
    /// `debug_symbols`: read DWARF for files and lines, which can take seconds per large library.
    pub fn new(debug_symbols: bool) -> Self {
        Self {
            modules: Modules::default(),
            spaces: Map::default(),
            known: HashSet::new(),
            unnamed: Vec::new(),
            symbolizer: symbols::Names::new(debug_symbols),
            named: Map::default(),
            python: Walks::default(),
            interpreters: Interpreters::default(),
        }
    }

    /// Stacks that an earlier run has written already.
    pub fn restore(&mut self, stack_ids: impl IntoIterator<Item = i64>) {
        self.known.extend(stack_ids);
    }

    /// Stacks whose rows were given up: they are named again when next seen.
    pub fn unwritten(&mut self, stack_ids: &[i64]) {
        for stack_id in stack_ids {
            self.known.remove(stack_id);
        }
        if !stack_ids.is_empty() {
            // A stack found there would not be looked at again.
            for space in self.spaces.values_mut() {
                space.resolved.clear();
            }
        }
    }

    /// Stacks that were written, for the journal.
    pub fn known(&self) -> Vec<i64> {
        self.known.iter().copied().collect()
    }

    /// A process is gone, or runs another program.
    pub fn forget(&mut self, pid: u32) {
        self.spaces.remove(&pid);
        self.python.forget(pid);
    }

    fn read_mappings(&mut self, pid: u32) {
        let mappings = procfs::mappings(pid);
        // Of a process that is gone, what was read before is the best there is.
        if !mappings.is_empty() {
            self.spaces.entry(pid).or_default().mappings = mappings;
        }
    }

    /// The stack of a call. `seen` gives mappings that were read earlier, for a process that is over;
    /// `layout` where its interpreter keeps things.
    pub fn resolve(
        &mut self,
        taken: Taken<'_>,
        seen: impl FnOnce() -> Vec<Mapping>,
        layout: impl FnOnce() -> Option<Interpreter>,
    ) -> Stack {
        let pid = taken.pid;
        if taken.frames.is_empty() {
            return Stack::default();
        }
        let key = key(taken);
        match self.spaces.get(&pid) {
            Some(space) => {
                if let Some(stack) = space.resolved.get(&key) {
                    return *stack;
                }
            }
            None => {
                self.spaces.entry(pid).or_default().mappings = seen();
                // It may be over in milliseconds.
                self.read_mappings(pid);
            }
        }
        let addresses: Vec<u64> = taken
            .frames
            .chunks_exact(8)
            // A chunk of eight bytes always fits an array of eight.
            .map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap()))
            .take_while(|address| *address != 0)
            .collect();
        let (locations, quality) = self.locate(pid, &addresses, taken.cut);
        let walked = taken
            .walked
            .map(|walked| self.python.resolve(walked, layout));
        // Names that are missing may come with a later record.
        let is_final = walked.as_ref().is_none_or(|walked| !walked.is_nameless);
        let seen = Seen {
            walked,
            of: taken.python,
        };
        let merged = self
            .interpreters
            .merge(&self.modules, &locations, seen, quality);
        let stack = self.intern(taken.api, merged);
        if is_final {
            let space = self.spaces.entry(pid).or_default();
            if space.resolved.len() >= CACHE_PER_PROCESS {
                // A program that makes ever new stacks costs us time then, and no memory.
                space.resolved.clear();
            }
            space.resolved.insert(key, stack);
        }
        stack
    }

    /// Where return addresses lie, and how many of them are to be trusted.
    fn locate(&mut self, pid: u32, frames: &[u64], cut: bool) -> (Vec<Location>, Quality) {
        let mut locations = Vec::with_capacity(frames.len());
        let mut complete = !cut;
        let mut reread = false;
        for address in frames {
            // The byte before the return address belongs to the call.
            let called_from = address - 1;
            let mut found = self
                .spaces
                .get(&pid)
                .and_then(|space| space.find(called_from))
                .cloned();
            if found.is_none() && !reread {
                // Mapped since we last looked.
                reread = true;
                self.read_mappings(pid);
                found = self
                    .spaces
                    .get(&pid)
                    .and_then(|space| space.find(called_from))
                    .cloned();
            }
            let Some(mapping) = found else {
                // No code there: the frame pointer was not one. What follows is not to be trusted.
                complete = false;
                break;
            };
            let offset = address - mapping.start + mapping.offset;
            locations.push(Location {
                module: self.modules.intern(pid, &mapping),
                offset,
            });
        }
        let quality = match (locations.is_empty(), complete) {
            (true, _) => Quality::Unresolved,
            (_, true) => Quality::FramePointer,
            (_, false) => Quality::Truncated,
        };
        (locations, quality)
    }

    fn intern(&mut self, api: &'static str, (places, quality): (Vec<Place>, Quality)) -> Stack {
        if places.is_empty() {
            return Stack { id: None, quality };
        }
        let stack_id = self.hash(api, &places);
        if self.known.len() >= KNOWN {
            self.known.clear();
        }
        if self.known.insert(stack_id) {
            self.unnamed.push(Unnamed {
                stack_id,
                api,
                places,
            });
        }
        Stack {
            id: Some(stack_id),
            quality,
        }
    }

    fn hash(&self, api: &str, places: &[Place]) -> i64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(api.as_bytes());
        for place in places {
            match place {
                Place::Native(location) => {
                    hash.update(&[0]);
                    hash.update(self.modules.get(location.module).identity().as_bytes());
                    hash.update(&location.offset.to_le_bytes());
                }
                Place::Python(frame) => pythonic::hash(frame, |bytes| hash.update(bytes)),
            }
        }
        (hash.digest() & MASK_63) as i64
    }

    /// Names the stacks that are new since the last call.
    pub fn name_new(&mut self) -> Vec<StackRow> {
        let unnamed = std::mem::take(&mut self.unnamed);
        unnamed.into_iter().map(|stack| self.name(&stack)).collect()
    }

    fn name(&mut self, stack: &Unnamed) -> StackRow {
        let mut frames = vec![symbols::probed_function(stack.api)];
        for place in &stack.places {
            let location = match place {
                Place::Native(location) => location,
                Place::Python(frame) => {
                    frames.push(pythonic::row(frame));
                    continue;
                }
            };
            if self.named.len() >= NAMED {
                self.named.clear();
            }
            let named = self.named.entry(*location).or_insert_with(|| {
                let module = self.modules.get(location.module);
                self.symbolizer.frames(module, location.offset)
            });
            frames.extend_from_slice(named);
        }
        let folded = symbols::folded(&frames);
        StackRow {
            stack_id: stack.stack_id,
            frames,
            folded,
        }
    }
}
