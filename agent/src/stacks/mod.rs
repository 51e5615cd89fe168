//! Call stacks that mean the same on every host.
//!
//! At the event a stack becomes a list of return addresses ([`unwind`], or frame pointers, which the
//! kernel side followed), and each address becomes (module, offset in its file): that is cheap and
//! has to be done while the process lives. Names come later, once per distinct stack ([`symbols`]),
//! from a thread of their own ([`naming`]).
//!
//! The list of addresses is what everything that follows depends on, so it is the key under which the
//! outcome is kept: the same list again costs the unwinding and one look-up. A list that is new is
//! looked at frame by frame: every address has to lie in code. That gives [`Native`] frames, from
//! which [`Stacks::enter`] makes the stack: frames of an interpreter take the place of native ones
//! there, and what they are made from has to be part of the key.
//!
//! Invariant: `stack_id` depends on the build ids (or file names, where a file has none) and the
//! offsets alone, and of Python frames on what the packages' own files say; never on load addresses
//! or where things are installed.

pub mod modules;
mod naming;
mod pythonic;
pub mod rules;
pub mod space;
pub mod symbols;
pub mod unwind;

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::time::Duration;

use vramscope_ebpf_abi::python::Interpreter;

use crate::Map;
use crate::host::procfs::Mapping;
use crate::host::sigbus;
use crate::probes::copies::Copied;
use crate::probes::record::{PythonOf, Quality, Stack};
use crate::python::walks::{Walked, Walks};
use crate::spool::rows::StackRow;
use modules::{ModuleId, Modules};
use naming::Naming;
use pythonic::{Interpreters, Place, Seen};
use rules::Step;
use space::AddressSpace;
use unwind::{End, Unwinding};

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
    places: Vec<Place>,
}

impl Unnamed {
    /// What has to be named.
    fn natives(&self) -> impl Iterator<Item = Location> {
        self.places.iter().filter_map(|place| match place {
            Place::Native(location) => Some(*location),
            Place::Python(_) => None,
        })
    }
}

/// One frame of native code, before the stack has its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Native {
    /// The return address in the process.
    pub address: u64,
    location: Location,
}

/// What the kernel side took of a stack.
#[derive(Debug, Clone, Copy, Default)]
pub struct Taken<'a> {
    /// Return addresses by frame pointers, innermost first, eight bytes each. With a copy the first
    /// one alone.
    pub frames: &'a [u8],
    /// There were more of them.
    pub cut: bool,
    /// Registers and bytes to find them from.
    pub copied: Option<Copied<'a>>,
    /// The walk of its Python frames, and what the kernel side said of it.
    pub walked: Option<&'a Walked>,
    pub python: PythonOf,
}

/// A stack that was looked at before.
#[derive(Debug, Clone, Copy)]
struct Resolved {
    stack: Stack,
    /// It left a wrong rule in the unwinder's cache ([`Step::Odd`]), and does so each time.
    spoils: bool,
}

/// One process's code and the stacks seen in it.
#[derive(Default)]
struct Process {
    space: AddressSpace,
    resolved: Map<u128, Resolved>,
}

/// What tells a stack from others of its process. Wide enough for two never to meet by chance.
fn key(frames: &[u8], seed: u64, taken: &Taken<'_>) -> u128 {
    let seed = seed << 2 | taken.python as u64;
    let Some(walked) = taken.walked else {
        return xxhash_rust::xxh3::xxh3_128_with_seed(frames, seed);
    };
    let mut hash = xxhash_rust::xxh3::Xxh3::with_seed(seed);
    hash.update(frames);
    // No address of code is so low.
    hash.update(&u64::from(walked.is_whole()).to_le_bytes());
    hash.update(walked.bytes());
    hash.digest128()
}

/// All stacks of this host.
pub struct Stacks {
    modules: Modules,
    processes: Map<u32, Process>,
    unwinding: Unwinding,
    known: HashSet<i64>,
    unnamed: Vec<Unnamed>,
    /// Of how many of them, the first ones, the names were asked for.
    asked: usize,
    naming: Naming,
    /// What the kernel side sends of Python.
    pub python: Walks,
    interpreters: Interpreters,
}

impl Stacks {
    /// `names`: where functions' names come from.
    pub fn new(names: symbols::Options) -> Self {
        sigbus::survive();
        Self {
            modules: Modules::default(),
            processes: Map::default(),
            unwinding: Unwinding::default(),
            known: HashSet::new(),
            unnamed: Vec::new(),
            asked: 0,
            naming: Naming::start(names),
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
            for process in self.processes.values_mut() {
                process.resolved.clear();
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
        self.processes.remove(&pid);
        self.python.forget(pid);
    }

    /// The stack of a call of the function `api`. `seen` gives mappings that were read earlier, for a
    /// process that is over; `layout` where its interpreter keeps things.
    pub fn resolve(
        &mut self,
        pid: u32,
        api: &'static str,
        taken: &Taken<'_>,
        seen: impl FnOnce() -> Vec<Mapping>,
        layout: impl FnOnce() -> Option<Interpreter>,
    ) -> Stack {
        if taken.frames.is_empty() && taken.copied.is_none() {
            return Stack::default();
        }
        let process = self.processes.entry(pid).or_insert_with(|| {
            let mut space = AddressSpace::seen(seen());
            // It may be over in milliseconds.
            space.read(pid);
            Process {
                space,
                resolved: Map::default(),
            }
        });
        let mut may_read = true;
        // Round again when code lies where none was known.
        let (key, looked, end) = loop {
            let (frames, end) = match &taken.copied {
                Some(copied) => {
                    let (space, modules) = (&mut process.space, &mut self.modules);
                    let end = self.unwinding.unwind(pid, space, modules, copied);
                    (self.unwinding.addresses.as_flattened(), Some(end))
                }
                None => (taken.frames, None),
            };
            // Wide enough for two stacks never to meet by chance. A name's place in memory is as
            // good as the name, and costs nothing to hash.
            let ways = u64::from(taken.cut) | end.map_or(0, |end| (end as u64 + 1) << 1);
            let seed = (api.as_ptr() as u64) << 4 | ways;
            let key = key(frames, seed, taken);
            if let Some(resolved) = process.resolved.get(&key) {
                if resolved.spoils {
                    self.unwinding.forget();
                }
                return resolved.stack;
            }
            let looked = Looked::at(pid, frames, &mut process.space, &mut self.modules);
            if looked.is_lost && may_read {
                // Mapped since we last looked.
                may_read = false;
                if process.space.read(pid) {
                    process.resolved.clear();
                    continue;
                }
            }
            break (key, looked, end);
        };
        let quality = looked.quality(end, taken.cut);
        let spoils = looked.has_odd && quality != Quality::Full;
        if spoils {
            self.unwinding.forget();
        }
        let walked = taken
            .walked
            .map(|walked| self.python.resolve(walked, layout));
        // Names that are missing may come with a later record.
        let is_final = walked.as_ref().is_none_or(|walked| !walked.is_nameless);
        let seen = Seen {
            walked,
            of: taken.python,
        };
        let (places, quality) =
            self.interpreters
                .merge(&self.modules, &looked.natives, seen, quality);
        let stack = self.enter(api, places, quality);
        if !is_final {
            return stack;
        }
        let process = self.processes.entry(pid).or_default();
        if process.resolved.len() >= CACHE_PER_PROCESS {
            // A program that makes ever new stacks costs us time then, and no memory.
            process.resolved.clear();
        }
        process.resolved.insert(key, Resolved { stack, spoils });
        stack
    }

    /// Gives a stack its id, and has it named if it is new.
    fn enter(&mut self, api: &'static str, places: Vec<Place>, quality: Quality) -> Stack {
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
        for place in &stack.places {
            match place {
                Place::Native(location) => {
                    let module = self.modules.get(location.module);
                    frames.extend(self.naming.frames(*location, module));
                }
                Place::Python(frame) => frames.push(pythonic::row(frame)),
            }
        }
        let folded = symbols::folded(&frames);
        StackRow {
            stack_id: stack.stack_id,
            frames,
            folded,
        }
    }
}

/// A list of addresses, looked at frame by frame.
#[derive(Default)]
struct Looked {
    /// Up to the first address where no code is.
    natives: Vec<Native>,
    /// There was such an address: it was none, and what follows is not to be trusted.
    is_lost: bool,
    has_odd: bool,
    /// Every way up went by a rule.
    is_ruled: bool,
}

impl Looked {
    fn at(pid: u32, frames: &[u8], space: &mut AddressSpace, modules: &mut Modules) -> Self {
        let mut looked = Self {
            is_ruled: true,
            ..Self::default()
        };
        let mut last = None;
        for bytes in frames.as_chunks().0 {
            let address = u64::from_ne_bytes(*bytes);
            // The byte before the return address belongs to the call.
            let Some(place) = space.place(pid, address.wrapping_sub(1), modules) else {
                looked.is_lost = true;
                break;
            };
            looked.has_odd |= place.step == Step::Odd;
            // The last frame need not have a way up.
            looked.is_ruled &= last.is_none_or(|step| matches!(step, Step::Ruled | Step::Odd));
            last = Some(place.step);
            looked.natives.push(Native {
                address,
                location: Location {
                    module: place.module,
                    offset: place.offset + u64::from(place.is_file),
                },
            });
        }
        looked.is_ruled &= last.is_some_and(|step| step != Step::Unruled);
        looked
    }

    fn quality(&self, end: Option<End>, cut: bool) -> Quality {
        match end {
            _ if self.natives.is_empty() => Quality::Unresolved,
            _ if self.is_lost || cut => Quality::Truncated,
            None => Quality::FramePointer,
            Some(End::First) if self.is_ruled => Quality::Full,
            Some(End::First) => Quality::FramePointer,
            Some(End::Bytes | End::Lost | End::NoCode) => Quality::Truncated,
        }
    }
}
