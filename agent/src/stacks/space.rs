//! Where one process has its code, and how to go up its stacks.

use std::sync::Arc;

use framehop::Unwinder;
use framehop::x86_64::UnwinderX86_64;

use super::modules::{ModuleId, Modules};
use super::rules::{Rules, Section, Step};
use crate::Map;
use crate::host::procfs::{self, Mapping};

/// One executable mapping.
struct Code {
    start: u64,
    end: u64,
    /// `None` for code that was made while the program ran.
    file: Option<Mapping>,
    /// Found out when a stack first leads there.
    known: Option<Known>,
}

#[derive(Clone)]
struct Known {
    module: ModuleId,
    rules: Option<(Arc<Rules>, u64)>,
}

/// What lies at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub module: ModuleId,
    /// In the file, bytes; 0 in code of no file.
    pub offset: u64,
    pub is_file: bool,
    /// How to go up from there.
    pub step: Step,
}

/// See the module's text.
#[derive(Default)]
pub struct AddressSpace {
    code: Vec<Code>,
    pub(super) unwinder: UnwinderX86_64<Section>,
    /// Of the unwinder's list of modules.
    changes: u32,
    /// What was found at addresses of stacks; the same come again and again.
    steps: Map<u64, Step>,
}

/// At some 20 bytes each they take 0.7 MiB at most, and are looked up anew when there are more.
const STEPS: usize = 32_768;

impl AddressSpace {
    /// What was read of a process earlier.
    pub fn seen(mappings: Vec<Mapping>) -> Self {
        let mut space = Self::default();
        space.take(mappings, Vec::new());
        space
    }

    /// Reads the process's mappings anew. Of a process that is gone, what was read before is the
    /// best there is. True if it has other code now than was known.
    pub fn read(&mut self, pid: u32) -> bool {
        let now = procfs::code(pid);
        !now.files.is_empty() && self.take(now.files, now.anonymous)
    }

    fn take(&mut self, files: Vec<Mapping>, anonymous: Vec<std::ops::Range<u64>>) -> bool {
        let of_file = |mapping: Mapping| Code {
            start: mapping.start,
            end: mapping.end,
            file: Some(mapping),
            known: None,
        };
        let of_none = |range: std::ops::Range<u64>| Code {
            start: range.start,
            end: range.end,
            file: None,
            known: None,
        };
        let executable = files.into_iter().filter(|mapping| mapping.executable);
        let mut code: Vec<Code> = executable
            .map(of_file)
            .chain(anonymous.into_iter().map(of_none))
            .collect();
        code.sort_by_key(|code| code.start);
        let mut before = std::mem::take(&mut self.code);
        let is_same = |a: &Code, b: &Code| (a.start, a.end, &a.file) == (b.start, b.end, &b.file);
        let unchanged = before.len() == code.len()
            && before
                .iter()
                .zip(&code)
                .all(|(before, now)| is_same(before, now));
        for now in &mut code {
            let kept = before.iter_mut().find(|before| is_same(before, now));
            now.known = kept.and_then(|kept| kept.known.take());
        }
        for gone in before {
            // What is still known of it lies there no more.
            if gone.known.is_some_and(|known| known.rules.is_some()) {
                self.unwinder.remove_module(gone.start);
                self.changes += 1;
            }
        }
        self.code = code;
        self.steps.clear();
        !unchanged
    }

    /// How often the unwinder's list of modules has changed since this was last asked.
    pub fn take_changes(&mut self) -> u32 {
        std::mem::take(&mut self.changes)
    }

    fn index(&self, address: u64) -> Option<usize> {
        let after = self.code.partition_point(|code| code.start <= address);
        let index = after.checked_sub(1)?;
        (address < self.code[index].end).then_some(index)
    }

    /// Whether there is code.
    pub fn has_code(&self, address: u64) -> bool {
        self.index(address).is_some()
    }

    /// How to go up from an address, with the rules for it known to the unwinder; `None` where there
    /// is no code.
    pub fn step(&mut self, pid: u32, address: u64, modules: &mut Modules) -> Option<Step> {
        if let Some(step) = self.steps.get(&address) {
            return Some(*step);
        }
        let step = self.place(pid, address, modules)?.step;
        if self.steps.len() >= STEPS {
            self.steps.clear();
        }
        self.steps.insert(address, step);
        Some(step)
    }

    /// What lies at an address; `None` where there is no code.
    pub fn place(&mut self, pid: u32, address: u64, modules: &mut Modules) -> Option<Place> {
        let index = self.index(address)?;
        let code = &mut self.code[index];
        let known = match &code.known {
            Some(known) => known.clone(),
            None => {
                let known = match &code.file {
                    Some(mapping) => {
                        let module = modules.intern(pid, mapping);
                        let rules = modules.rules(module).and_then(|rules| {
                            let bias = rules.bias(code.start, mapping.offset)?;
                            Some((rules, bias))
                        });
                        Known { module, rules }
                    }
                    None => Known {
                        module: modules.anonymous(),
                        rules: None,
                    },
                };
                if let Some((rules, bias)) = &known.rules {
                    let module = rules.module(code.start..code.end, *bias);
                    self.unwinder.add_module(module);
                    self.changes += 1;
                }
                code.known = Some(known.clone());
                known
            }
        };
        let step = known.rules.as_ref().map_or(Step::Unruled, |(rules, bias)| {
            rules.step(address.wrapping_sub(*bias))
        });
        let offset = code
            .file
            .as_ref()
            .map_or(0, |file| address - file.start + file.offset);
        Some(Place {
            module: known.module,
            offset,
            is_file: code.file.is_some(),
            step,
        })
    }
}
