//! Return addresses into stacks that mean the same on every host.
//!
//! At the event an address becomes (module, offset in its file), which is cheap and has to be
//! done while the process lives. Names come later, once per distinct stack ([`symbols`]), from a thread
//! of their own ([`naming`]).
//!
//! Invariant: `stack_id` depends on the build ids (or file names, where a file has none) and the
//! offsets alone, never on load addresses, paths or names.

pub mod modules;
mod naming;
pub mod symbols;

use std::collections::HashSet;
use std::time::Duration;

use crate::Map;
use crate::host::procfs::{self, Mapping};
use crate::probes::record::{Quality, Stack};
use crate::spool::rows::StackRow;
use modules::{ModuleId, Modules};
use naming::Naming;

/// Keeps hashes inside the positive half of a BIGINT.
const MASK_63: u64 = (1 << 63) - 1;

/// Stacks of one process that were resolved before, by a hash of their return addresses.
/// At some 50 bytes each they take 1.6 MiB at most.
const CACHE_PER_PROCESS: usize = 32_768;

/// Stacks that are known to have been written. When there are more they are forgotten, and then
/// written again, which costs space in the table and nothing else.
const KNOWN: usize = 1 << 20;

/// Stacks that wait for names at most; beyond that they do with modules and offsets.
const UNNAMED: usize = 65_536;

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
    locations: Vec<Location>,
}

impl Unnamed {
    /// What has to be named.
    fn natives(&self) -> impl Iterator<Item = Location> {
        self.locations.iter().copied()
    }
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

/// All stacks of this host.
pub struct Stacks {
    modules: Modules,
    spaces: Map<u32, AddressSpace>,
    known: HashSet<i64>,
    unnamed: Vec<Unnamed>,
    /// Of how many of them, the first ones, the names were asked for.
    asked: usize,
    naming: Naming,
}

impl Stacks {
    /// `names`: where functions' names come from.
    pub fn new(names: symbols::Options) -> Self {
        Self {
            modules: Modules::default(),
            spaces: Map::default(),
            known: HashSet::new(),
            unnamed: Vec::new(),
            asked: 0,
            naming: Naming::start(names),
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
        let waiting: HashSet<i64> = self.unnamed.iter().map(|stack| stack.stack_id).collect();
        self.known.difference(&waiting).copied().collect()
    }

    /// A process is gone, or runs another program.
    pub fn forget(&mut self, pid: u32) {
        self.spaces.remove(&pid);
    }

    fn read_mappings(&mut self, pid: u32) {
        let mappings = procfs::mappings(pid);
        // Of a process that is gone, what was read before is the best there is.
        if !mappings.is_empty() {
            self.spaces.entry(pid).or_default().mappings = mappings;
        }
    }

    /// The stack of a call of the function `api` from its return addresses as the kernel side wrote them,
    /// innermost first; `cut` if there were more. `seen` gives mappings that were read earlier,
    /// for a process that is over.
    pub fn resolve(
        &mut self,
        pid: u32,
        api: &'static str,
        frames: &[u8],
        cut: bool,
        seen: impl FnOnce() -> Vec<Mapping>,
    ) -> Stack {
        if frames.is_empty() {
            return Stack::default();
        }
        // Wide enough for two stacks never to meet by chance.
        // A name's place in memory is as good as the name, and costs nothing to hash.
        let key = xxhash_rust::xxh3::xxh3_128_with_seed(frames, api.as_ptr() as u64);
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
        let addresses: Vec<u64> = frames
            .chunks_exact(8)
            // A chunk of eight bytes always fits an array of eight.
            .map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap()))
            .take_while(|address| *address != 0)
            .collect();
        let stack = self.resolve_new(pid, api, &addresses, cut);
        let space = self.spaces.entry(pid).or_default();
        if space.resolved.len() >= CACHE_PER_PROCESS {
            // A program that makes ever new stacks costs us time then, and no memory.
            space.resolved.clear();
        }
        space.resolved.insert(key, stack);
        stack
    }

    fn resolve_new(&mut self, pid: u32, api: &'static str, frames: &[u64], cut: bool) -> Stack {
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
        if locations.is_empty() {
            return Stack {
                id: None,
                quality: Quality::Unresolved,
            };
        }
        let stack_id = self.hash(api, &locations);
        if self.known.len() >= KNOWN {
            self.known.clear();
        }
        if self.known.insert(stack_id) {
            self.unnamed.push(Unnamed {
                stack_id,
                api,
                locations,
            });
        }
        Stack {
            id: Some(stack_id),
            quality: if complete {
                Quality::FramePointer
            } else {
                Quality::Truncated
            },
        }
    }

    fn hash(&self, api: &str, locations: &[Location]) -> i64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(api.as_bytes());
        for location in locations {
            hash.update(&[0]);
            hash.update(self.modules.get(location.module).identity().as_bytes());
            hash.update(&location.offset.to_le_bytes());
        }
        (hash.digest() & MASK_63) as i64
    }

    /// Has new stacks named, on another thread, and takes what is there. Cheap; does not wait.
    pub fn exchange_names(&mut self) {
        for stack in &self.unnamed[self.asked..] {
            for location in stack.natives() {
                let module = self.modules.get(location.module);
                self.naming.ask(location, module);
            }
        }
        self.asked = self.unnamed.len();
        self.naming.take();
    }

    /// Whether stacks wait for their names.
    pub fn waits_for_names(&self) -> bool {
        !self.unnamed.is_empty() && self.naming.is_waiting()
    }

    /// In the end: waits until all names are there, or that long for the next one. From then on
    /// nothing waits: what is not known by then has module and offset.
    pub fn settle(&mut self, at_most: Duration) {
        self.exchange_names();
        while self.waits_for_names() && self.naming.wait(at_most) {}
        self.naming.give_up();
    }

    /// The rows of new stacks whose names are there; of the others they come with a later call.
    pub fn name_new(&mut self) -> Vec<StackRow> {
        self.exchange_names();
        let must_do = self.unnamed.len() > UNNAMED || self.naming.is_full();
        let new = std::mem::take(&mut self.unnamed);
        let (ready, waiting): (Vec<_>, Vec<_>) = new
            .into_iter()
            .partition(|stack| must_do || self.is_named(stack));
        let rows = ready.iter().map(|stack| self.name(stack)).collect();
        self.naming.tidy(waiting.is_empty());
        self.asked = waiting.len();
        self.unnamed = waiting;
        rows
    }

    fn is_named(&self, stack: &Unnamed) -> bool {
        stack.natives().all(|location| self.naming.has(location))
    }

    fn name(&self, stack: &Unnamed) -> StackRow {
        let mut frames = vec![symbols::probed_function(stack.api)];
        for location in &stack.locations {
            let module = self.modules.get(location.module);
            frames.extend(self.naming.frames(*location, module));
        }
        let folded = symbols::folded(&frames);
        StackRow {
            stack_id: stack.stack_id,
            frames,
            folded,
        }
    }
}
