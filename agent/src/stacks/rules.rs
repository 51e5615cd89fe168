//! What a file says about unwinding its code: `.eh_frame`, by way of `.eh_frame_hdr`.
//!
//! The file is mapped, not read: of 495 MB of libtorch_cuda only the pages come in that stacks need,
//! and they belong to the page cache. A file that is cut short meanwhile reads as zeros
//! ([`crate::host::sigbus`]).

use std::fs::File;
use std::ops::{Deref, Range};
use std::sync::Arc;

use framehop::{Module, ModuleSectionInfo};
use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EndianSlice, EvaluationResult, LittleEndian,
    Location, Operation, Register, RegisterRule, UnwindContext, UnwindSection, Value, X86_64,
};
use memmap2::{Advice, Mmap};
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Object, ObjectSection};

/// A file without `.eh_frame_hdr` is indexed in memory, eight bytes for each function: no larger
/// sections are.
const INDEXED_BYTES: usize = 4 << 20;

/// A section of a mapped file.
#[derive(Clone)]
pub struct Section {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl Deref for Section {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // The range was checked when the section was made.
        &self.map[self.range.clone()]
    }
}

/// What is known of going up from a place in the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// By the file's rules.
    Ruled,
    /// The same, but the rule has to be worked out each time. The unwinder remembers it as
    /// [`Self::Unruled`] once that failed for want of bytes.
    Odd,
    /// Nobody called this: a thread's first function.
    First,
    /// The file has no rule, or one that the unwinder cannot follow: it goes by frame pointer.
    Unruled,
    /// The rule is a program that can run in a loop. No compiler writes such, and a file that holds up
    /// the agent is not followed.
    Endless,
}

/// One file's rules.
pub struct Rules {
    eh_frame: Option<Section>,
    eh_frame_hdr: Option<Section>,
    /// Where sections begin in the file's own addresses.
    bases: BaseAddresses,
    text: Option<Range<u64>>,
    /// Parts loaded as code: offset in the file, bytes there, the file's own address.
    segments: Vec<(u64, u64, u64)>,
}

impl Rules {
    /// `None` if the file cannot be mapped or is no 64-bit ELF file.
    pub fn read(file: &File) -> Option<Self> {
        // SAFETY: what others do to the file shows in the bytes alone: they are checked wherever they
        // are used, and pages that go away read as zeros.
        let map = Arc::new(unsafe { Mmap::map(file) }.ok()?);
        // No read-ahead: only what is touched comes in.
        let _ = map.advise(Advice::Random);
        let elf = ElfFile64::<object::Endianness>::parse(&map[..]).ok()?;
        let endian = elf.endian();
        // Others may begin or end in the same page of the file.
        let loaded = elf.elf_program_headers().iter().filter(|header| {
            let is_code = header.p_flags(endian) & object::elf::PF_X != 0;
            header.p_type(endian) == object::elf::PT_LOAD && is_code
        });
        let segments = loaded
            .map(|header| {
                (
                    header.p_offset(endian),
                    header.p_filesz(endian),
                    header.p_vaddr(endian),
                )
            })
            .collect();
        let mut bases = BaseAddresses::default();
        let (mut eh_frame, mut eh_frame_hdr, mut text) = (None, None, None);
        for section in elf.sections() {
            let at = section.address();
            let bytes = || {
                let (offset, size) = section.file_range()?;
                let start = usize::try_from(offset).ok()?;
                let range = start..start.checked_add(usize::try_from(size).ok()?)?;
                (range.end <= map.len()).then(|| Section {
                    map: Arc::clone(&map),
                    range,
                })
            };
            match section.name_bytes() {
                Ok(b".eh_frame") => {
                    bases = bases.set_eh_frame(at);
                    eh_frame = bytes();
                }
                Ok(b".eh_frame_hdr") => {
                    bases = bases.set_eh_frame_hdr(at);
                    eh_frame_hdr = bytes();
                }
                Ok(b".text") => {
                    bases = bases.set_text(at);
                    text = Some(at..at.saturating_add(section.size()));
                }
                Ok(b".got") => bases = bases.set_got(at),
                _ => {}
            }
        }
        if eh_frame_hdr.is_none() {
            eh_frame = eh_frame.filter(|section| section.len() <= INDEXED_BYTES);
        }
        Some(Self {
            eh_frame,
            eh_frame_hdr,
            bases,
            text,
            segments,
        })
    }

    /// What to take from an address of a mapping that begins at `start` with the file's `offset`,
    /// so as to have the file's own address. `None` if the file loads nothing from there.
    pub fn bias(&self, start: u64, offset: u64) -> Option<u64> {
        let page = |value: u64| value & !4095;
        let (from, _, address) = self
            .segments
            .iter()
            // A mapping begins at the page that the segment begins in.
            .find(|(from, bytes, _)| {
                (page(*from)..from.saturating_add(*bytes)).contains(&offset)
            })?;
        Some(start.wrapping_sub(offset.wrapping_sub(*from).wrapping_add(*address)))
    }

    /// The file as the unwinder wants it, mapped at `range` with `bias`.
    pub fn module(&self, range: Range<u64>, bias: u64) -> Module<Section> {
        Module::new(String::new(), range, bias, self)
    }

    /// What is known at one of the file's own addresses.
    pub fn step(&self, address: u64) -> Step {
        self.rule(address).unwrap_or(Step::Unruled)
    }

    fn rule(&self, address: u64) -> Option<Step> {
        let mut section = EhFrame::new(self.eh_frame.as_deref()?, LittleEndian);
        section.set_address_size(8);
        let entry = match self.eh_frame_hdr.as_deref() {
            Some(bytes) => {
                let header = EhFrameHdr::new(bytes, LittleEndian)
                    .parse(&self.bases, 8)
                    .ok()?;
                let table = header.table()?;
                let at = table.lookup(address, &self.bases).ok()?;
                let offset = table.pointer_to_offset(at).ok()?;
                section
                    .fde_from_offset(&self.bases, offset, EhFrame::cie_from_offset)
                    .ok()?
            }
            None => section
                .fde_for_address(&self.bases, address, EhFrame::cie_from_offset)
                .ok()?,
        };
        let mut context = UnwindContext::new();
        let row = entry
            .unwind_info_for_address(&section, &self.bases, &mut context, address)
            .ok()?;
        let rules = [row.register(X86_64::RA), row.register(X86_64::RBP)];
        let programs = rules.into_iter().filter_map(|rule| match rule? {
            RegisterRule::Expression(at) | RegisterRule::ValExpression(at) => Some(at),
            _ => None,
        });
        let of_frame = match row.cfa() {
            CfaRule::Expression(at) => Some(*at),
            CfaRule::RegisterAndOffset { .. } => None,
        };
        for program in programs.chain(of_frame) {
            let program = program.get(&section).ok()?;
            if !is_bounded(program, entry.cie().encoding()) {
                return Some(Step::Endless);
            }
        }
        match row.register(X86_64::RA) {
            None | Some(RegisterRule::Undefined) => return Some(Step::First),
            Some(RegisterRule::Offset(_)) => {}
            Some(_) => return None,
        }
        let frame_pointer = row.register(X86_64::RBP);
        match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => match *register {
                X86_64::RBP if *offset == 16 => Some(Step::Ruled),
                X86_64::RBP => Some(Step::Odd),
                X86_64::RSP => Some(match frame_pointer {
                    None
                    | Some(
                        RegisterRule::Undefined | RegisterRule::SameValue | RegisterRule::Offset(_),
                    ) => Step::Ruled,
                    Some(_) => Step::Odd,
                }),
                _ => None,
            },
            CfaRule::Expression(expression) => {
                let expression = expression.get(&section).ok()?;
                can_evaluate(expression, entry.cie().encoding()).then_some(Step::Odd)
            }
        }
    }
}

impl ModuleSectionInfo<Section> for &Rules {
    /// Biases are taken from the file's own addresses.
    fn base_svma(&self) -> u64 {
        0
    }

    fn section_svma_range(&mut self, name: &[u8]) -> Option<Range<u64>> {
        let of = |base: Option<u64>, section: &Option<Section>| {
            let bytes = section.as_ref()?.len() as u64;
            base.map(|base| base..base.saturating_add(bytes))
        };
        match name {
            b".text" => self.text.clone(),
            b".eh_frame" => of(self.bases.eh_frame.section, &self.eh_frame),
            b".eh_frame_hdr" => of(self.bases.eh_frame_hdr.section, &self.eh_frame_hdr),
            b".got" => self.bases.eh_frame.data.map(|got| got..got),
            _ => None,
        }
    }

    fn section_data(&mut self, name: &[u8]) -> Option<Section> {
        match name {
            b".eh_frame" => self.eh_frame.clone(),
            b".eh_frame_hdr" => self.eh_frame_hdr.clone(),
            _ => None,
        }
    }
}

/// The registers whose values are known all the way up.
fn is_followed(register: Register) -> bool {
    matches!(register, X86_64::RSP | X86_64::RBP | X86_64::RA)
}

/// Whether an expression has no way back in it, so that it ends.
fn is_bounded(
    expression: gimli::Expression<EndianSlice<'_, LittleEndian>>,
    encoding: gimli::Encoding,
) -> bool {
    let mut operations = expression.operations(encoding);
    loop {
        match operations.next() {
            Ok(Some(Operation::Skip { target } | Operation::Bra { target })) if target < 0 => {
                return false;
            }
            Ok(Some(_)) => {}
            // What cannot be read is not run either.
            Ok(None) | Err(_) => return true,
        }
    }
}

/// Whether an expression asks for nothing but such registers.
fn can_evaluate(
    expression: gimli::Expression<EndianSlice<'_, LittleEndian>>,
    encoding: gimli::Encoding,
) -> bool {
    let mut evaluation = expression.evaluation(encoding);
    let mut state = evaluation.evaluate();
    loop {
        state = match state {
            Ok(EvaluationResult::Complete) => break,
            Ok(EvaluationResult::RequiresRegister { register, .. }) if is_followed(register) => {
                evaluation.resume_with_register(Value::Generic(0x1000))
            }
            _ => return false,
        };
    }
    let result = evaluation.as_result();
    matches!(
        result.last().map(|piece| &piece.location),
        Some(Location::Address { .. })
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function of this program goes by its rules; the program's first function has no caller.
    #[test]
    fn this_program_has_rules() {
        let file = File::open("/proc/self/exe").unwrap();
        let rules = Rules::read(&file).unwrap();
        let bytes = std::fs::read("/proc/self/exe").unwrap();
        let entry = ElfFile64::<object::Endianness>::parse(&bytes[..])
            .unwrap()
            .entry();
        assert_eq!(rules.step(entry), Step::First);
        let here = this_program_has_rules as *const () as u64;
        let mappings = crate::host::procfs::code(std::process::id()).files;
        let mapping = mappings
            .iter()
            .find(|mapping| (mapping.start..mapping.end).contains(&here))
            .unwrap();
        let bias = rules.bias(mapping.start, mapping.offset).unwrap();
        assert_eq!(rules.step(here - bias), Step::Ruled);
        assert_eq!(rules.step(1), Step::Unruled);
    }

    #[test]
    fn what_is_no_program_has_none() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"#!/bin/sh\n").unwrap();
        assert!(Rules::read(&file).is_none());
        assert!(Rules::read(&tempfile::tempfile().unwrap()).is_none());
    }
}
