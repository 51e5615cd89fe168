//! Return addresses into stacks that mean the same on every host.
//!
//! At the event an address becomes (module, offset in its file), which is cheap and has to be
//! done while the process lives. Names come later, once per distinct stack ([`symbols`]).
//!
//! Invariant: `stack_id` depends on the build ids (or file names, where a file has none) and the
//! offsets alone, never on load addresses, paths or names.

pub mod modules;
pub mod symbols;

use std::collections::{HashMap, HashSet};

use crate::host::procfs::{self, Mapping};
use crate::ledger;
use crate::probes::hooks::HOOKS;
use crate::probes::order::Ordered;
use crate::spool::rows::StackRow;
use modules::{ModuleId, Modules};

/// Keeps hashes inside the positive half of a BIGINT.
const MASK_63: u64 = (1 << 63) - 1;

/// Stacks of one process that were resolved before, by return addresses.
/// At some 600 bytes each they take 2.5 MiB at most.
const CACHE_PER_PROCESS: usize = 4096;

/// Where one return address lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Location {
    module: ModuleId,
    /// Offset in the file, bytes.
    offset: u64,
}

/// One distinct stack whose names are still to be found.
#[derive(Debug)]
struct Unnamed {
    stack_id: i64,
    api: Option<&'static str>,
    locations: Vec<Location>,
}

/// One process's mappings and the stacks seen in it.
#[derive(Default)]
struct AddressSpace {
    mappings: Vec<Mapping>,
    resolved: HashMap<(Option<u16>, Vec<u64>), ledger::Stack>,
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
    spaces: HashMap<u32, AddressSpace>,
    known: HashSet<i64>,
    unnamed: Vec<Unnamed>,
    symbolizer: symbols::Names,
}

impl Stacks {
    /// `debug_symbols`: read DWARF for files and lines, which can take seconds per large library.
    pub fn new(debug_symbols: bool) -> Self {
        Self {
            modules: Modules::default(),
            spaces: HashMap::new(),
            known: HashSet::new(),
            unnamed: Vec::new(),
            symbolizer: symbols::Names::new(debug_symbols),
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
    }

    /// Reads the mappings of a process that has just shown up: it may be over in milliseconds.
    /// If it is over already, those `seen` earlier serve.
    pub fn meet(&mut self, pid: u32, seen: Vec<Mapping>) {
        self.spaces.entry(pid).or_default().mappings = seen;
        self.read_mappings(pid);
    }

    fn read_mappings(&mut self, pid: u32) {
        let mappings = procfs::mappings(pid);
        // Of a process that is gone, what was read before is the best there is.
        if !mappings.is_empty() {
            self.spaces.entry(pid).or_default().mappings = mappings;
        }
    }

    /// The stack of an event's outermost call.
    pub fn resolve(&mut self, pid: u32, ordered: &Ordered) -> ledger::Stack {
        if ordered.stack.is_empty() {
            return ledger::Stack {
                id: None,
                quality: Some("none"),
            };
        }
        let key = (ordered.root_hook, ordered.stack.clone());
        if let Some(stack) = self
            .spaces
            .get(&pid)
            .and_then(|space| space.resolved.get(&key))
        {
            return *stack;
        }
        let stack = self.resolve_new(pid, ordered);
        let space = self.spaces.entry(pid).or_default();
        if space.resolved.len() >= CACHE_PER_PROCESS {
            // A program that makes ever new stacks costs us time then, and no memory.
            space.resolved.clear();
        }
        space.resolved.insert(key, stack);
        stack
    }

    fn resolve_new(&mut self, pid: u32, ordered: &Ordered) -> ledger::Stack {
        let mut locations = Vec::with_capacity(ordered.stack.len());
        let mut complete = !ordered.stack_full;
        let mut reread = false;
        for address in &ordered.stack {
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
            return ledger::Stack {
                id: None,
                quality: Some("unresolved"),
            };
        }
        let api = ordered.root_hook.map(|hook| HOOKS[hook as usize].symbol);
        let stack_id = self.hash(api, &locations);
        if self.known.insert(stack_id) {
            self.unnamed.push(Unnamed {
                stack_id,
                api,
                locations,
            });
        }
        let quality = if complete {
            "frame_pointer"
        } else {
            "truncated"
        };
        ledger::Stack {
            id: Some(stack_id),
            quality: Some(quality),
        }
    }

    fn hash(&self, api: Option<&str>, locations: &[Location]) -> i64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(api.unwrap_or_default().as_bytes());
        for location in locations {
            hash.update(&[0]);
            hash.update(self.modules.get(location.module).identity().as_bytes());
            hash.update(&location.offset.to_le_bytes());
        }
        (hash.digest() & MASK_63) as i64
    }

    /// Names the stacks that are new since the last call.
    pub fn name_new(&mut self) -> Vec<StackRow> {
        let unnamed = std::mem::take(&mut self.unnamed);
        unnamed.into_iter().map(|stack| self.name(&stack)).collect()
    }

    fn name(&mut self, stack: &Unnamed) -> StackRow {
        let mut frames: Vec<_> = stack
            .api
            .map(symbols::probed_function)
            .into_iter()
            .collect();
        for location in &stack.locations {
            let module = self.modules.get(location.module);
            frames.extend(self.symbolizer.frames(module, location.offset));
        }
        let folded = symbols::folded(&frames);
        StackRow {
            stack_id: stack.stack_id,
            frames,
            folded,
        }
    }
}
