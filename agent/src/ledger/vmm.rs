//! Created memory, its references and its mappings.
//!
//! Created memory lives until every reference to it (its creation, retains) is released and
//! every mapping of it is gone. A handle's value may be given out again before that, so memory
//! is named by the `seq` of its creation.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

/// See the module's text.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Vmm {
    handles: HashMap<u64, u64>,
    uses: HashMap<u64, Uses>,
    mapped: BTreeMap<u64, Mapping>,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Uses {
    references: u32,
    mappings: u32,
}

/// One mapping, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    pub bytes: u64,
    /// The created memory it shows, if its creation was seen.
    pub memory: Option<u64>,
}

/// What changed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum VmmChange {
    /// A handle names new memory.
    Created {
        handle: u64,
        memory: u64,
    },
    /// One more reference, by a handle that may be new.
    Retained {
        handle: u64,
        memory: u64,
    },
    Released {
        handle: u64,
    },
    Mapped {
        address: u64,
        mapping: Mapping,
    },
    Unmapped {
        address: u64,
    },
}

impl Vmm {
    /// The memory a handle names now.
    pub fn memory(&self, handle: u64) -> Option<u64> {
        self.handles.get(&handle).copied()
    }

    /// The memory mapped at an address.
    pub fn memory_at(&self, address: u64) -> Option<u64> {
        let (start, mapping) = self.mapped.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some(mapping.memory?)
    }

    /// How much is mapped by the mapping that begins at an address.
    pub fn mapped_bytes(&self, address: u64) -> Option<u64> {
        Some(self.mapped.get(&address)?.bytes)
    }

    /// Mappings that lie wholly in a range, by address.
    pub fn mapped_in(&self, address: u64, bytes: u64) -> Vec<(u64, Mapping)> {
        let end = address.saturating_add(bytes);
        self.mapped
            .range(address..end)
            .filter(|(start, mapping)| start.saturating_add(mapping.bytes) <= end)
            .map(|(start, mapping)| (*start, *mapping))
            .collect()
    }

    /// Whether releasing a handle ends its memory.
    pub fn release_ends(&self, handle: u64) -> Option<u64> {
        let memory = self.memory(handle)?;
        let uses = self.uses.get(&memory)?;
        (uses.references <= 1 && uses.mappings == 0).then_some(memory)
    }

    /// Whether nothing uses that memory any more.
    pub fn is_unused(&self, memory: u64) -> bool {
        !self.uses.contains_key(&memory)
    }

    pub fn apply(&mut self, change: VmmChange) {
        match change {
            VmmChange::Created { handle, memory } => {
                self.handles.insert(handle, memory);
                self.uses.entry(memory).or_default().references = 1;
            }
            VmmChange::Retained { handle, memory } => {
                self.handles.insert(handle, memory);
                self.uses.entry(memory).or_default().references += 1;
            }
            VmmChange::Released { handle } => {
                let Some(memory) = self.memory(handle) else {
                    return;
                };
                let left = self.take(memory, |uses| {
                    uses.references = uses.references.saturating_sub(1);
                });
                if left == 0 {
                    self.handles.remove(&handle);
                }
            }
            VmmChange::Mapped { address, mapping } => {
                self.mapped.insert(address, mapping);
                if let Some(memory) = mapping.memory {
                    self.uses.entry(memory).or_default().mappings += 1;
                }
            }
            VmmChange::Unmapped { address } => {
                let gone = self.mapped.remove(&address);
                if let Some(memory) = gone.and_then(|mapping| mapping.memory) {
                    self.take(memory, |uses| {
                        uses.mappings = uses.mappings.saturating_sub(1);
                    });
                }
            }
        }
    }

    /// References left.
    fn take(&mut self, memory: u64, edit: impl FnOnce(&mut Uses)) -> u32 {
        let Some(uses) = self.uses.get_mut(&memory) else {
            return 0;
        };
        edit(uses);
        let left = uses.references;
        if uses.references == 0 && uses.mappings == 0 {
            self.uses.remove(&memory);
        }
        left
    }
}
