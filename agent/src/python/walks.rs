//! What the kernel side sends of Python: walks of frames, kept until their call's record follows,
//! and the names of code objects, kept as long as their process lives.
//!
//! Memory is bounded: names by [`NAMES_BYTES`], beyond which all are let go, and walks without a call
//! (its record found the ring full) by [`PENDING`]. A name that is missing here is read of the
//! process itself, if the code object is still the one that ran.

use std::sync::Arc;

use vramscope_ebpf_abi::python::{
    Code, FILE_BYTES, FRAME_ENTRY, FRAME_SHIM, Frame, Interpreter, KIND_PYTHON, KIND_PYTHON_CODE,
    NAME_BYTES, WALK_CUT, WALK_FAULT, Walk, fingerprint,
};

use super::lines;
use super::memory::Memory;
use super::merge::Python;
use super::strings;
use crate::Map;

/// What all names may take; some 60,000 code objects of the usual size.
const NAMES_BYTES: usize = 32 << 20;
/// What a code object's names take besides their texts.
const NAME_OVERHEAD: usize = 128;
/// Walks that wait for their calls.
const PENDING: usize = 4096;
/// Longest string and line table that are read of a process, bytes.
const LATE_STRING: u64 = 4096;
const LATE_TABLE: u64 = 1 << 20;

/// One frame with its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PythonFrame {
    /// As the code object has it; `None` for a frame whose code object is unknown.
    pub file: Option<Arc<str>>,
    /// Qualified (`Class.method`) from 3.11 on.
    pub function: Option<Arc<str>>,
    pub line: Option<i32>,
    pub kind: Python,
}

/// Frames of one call, innermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    pub frames: Vec<PythonFrame>,
    /// No frame is missing.
    pub is_whole: bool,
    /// A code object's names are unknown: they may come yet.
    pub is_nameless: bool,
}

/// A walk as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walked {
    tgid: u32,
    enter_ns: u64,
    version: u32,
    flags: u32,
    /// [`Frame`]s.
    frames: Vec<u8>,
}

impl Walked {
    /// What tells it from others of the process.
    pub fn bytes(&self) -> &[u8] {
        &self.frames
    }

    /// No frame is missing.
    pub fn is_whole(&self) -> bool {
        self.flags & (WALK_CUT | WALK_FAULT) == 0
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Names {
    file: Arc<str>,
    function: Arc<str>,
    first_line: i32,
    version: u32,
    table: Box<[u8]>,
    /// Nothing of it was cut off.
    is_whole: bool,
}

impl Names {
    fn bytes(&self) -> usize {
        NAME_OVERHEAD + self.file.len() + self.function.len() + self.table.len()
    }
}

/// What came and is needed yet.
#[derive(Default)]
pub struct Walks {
    names: Map<(u32, u64, u64), Arc<Names>>,
    names_bytes: usize,
    /// By thread.
    pending: Map<u32, Walked>,
}

/// Whether a record is one of Python's.
pub fn is_record(bytes: &[u8]) -> bool {
    matches!(word(bytes, 0), KIND_PYTHON | KIND_PYTHON_CODE)
}

impl Walks {
    /// Takes a record of Python's. False if it makes no sense.
    pub fn take(&mut self, bytes: &[u8]) -> bool {
        match word(bytes, 0) {
            KIND_PYTHON => self.take_walk(bytes),
            KIND_PYTHON_CODE => self.take_code(bytes),
            _ => None,
        }
        .is_some()
    }

    fn take_walk(&mut self, bytes: &[u8]) -> Option<()> {
        macro_rules! at {
            ($field:ident) => {
                core::mem::offset_of!(Walk, $field)
            };
        }
        let length = word(bytes, at!(frames)) as usize * size_of::<Frame>();
        let frames = bytes.get(size_of::<Walk>()..)?.get(..length)?.to_vec();
        if self.pending.len() >= PENDING {
            self.pending.clear();
        }
        let walked = Walked {
            tgid: word(bytes, at!(tgid)),
            enter_ns: long(bytes, at!(enter_ns)),
            version: word(bytes, at!(version)),
            flags: word(bytes, at!(flags)),
            frames,
        };
        self.pending.insert(word(bytes, at!(tid)), walked);
        Some(())
    }

    fn take_code(&mut self, bytes: &[u8]) -> Option<()> {
        macro_rules! at {
            ($field:ident) => {
                core::mem::offset_of!(Code, $field)
            };
        }
        let rest = bytes.get(size_of::<Code>()..)?;
        let file = rest.get(..FILE_BYTES)?;
        let name = rest.get(FILE_BYTES..FILE_BYTES + NAME_BYTES)?;
        let room = word(bytes, at!(table_room)) as usize;
        let table = rest.get(FILE_BYTES + NAME_BYTES..)?.get(..room)?;
        let length = word(bytes, at!(table_length)) as usize;
        let (file_length, file_state) =
            (word(bytes, at!(file_length)), word(bytes, at!(file_state)));
        let (name_length, name_state) =
            (word(bytes, at!(name_length)), word(bytes, at!(name_state)));
        let fits = |length: u32, state: u32, room: usize| {
            strings::bytes_of_character(state).is_some_and(|width| length as usize * width <= room)
        };
        let names = Names {
            file: strings::decode_sent(file, file_length, file_state, true)?.into(),
            function: strings::decode_sent(name, name_length, name_state, false)?.into(),
            first_line: word(bytes, at!(first_line)) as i32,
            version: word(bytes, at!(version)),
            table: table[..length.min(room)].into(),
            is_whole: length <= room
                && fits(file_length, file_state, FILE_BYTES)
                && fits(name_length, name_state, NAME_BYTES),
        };
        let key = (
            word(bytes, at!(tgid)),
            long(bytes, at!(code)),
            long(bytes, at!(fingerprint)),
        );
        self.keep(key, Arc::new(names));
        Some(())
    }

    fn keep(&mut self, key: (u32, u64, u64), names: Arc<Names>) {
        if self.names_bytes + names.bytes() > NAMES_BYTES {
            self.names.clear();
            self.names_bytes = 0;
        }
        self.names_bytes += names.bytes();
        if let Some(old) = self.names.insert(key, names) {
            self.names_bytes -= old.bytes();
        }
    }

    /// The walk of a call, which is given once.
    pub fn of_call(&mut self, tid: u32, enter_ns: u64) -> Option<Walked> {
        let walked = self.pending.remove(&tid)?;
        // Of a call whose record was lost.
        (walked.enter_ns == enter_ns).then_some(walked)
    }

    /// A process is gone, or runs another program.
    pub fn forget(&mut self, tgid: u32) {
        let mut freed = 0;
        self.names.retain(|(of, _, _), names| {
            if *of == tgid {
                freed += names.bytes();
            }
            *of != tgid
        });
        self.names_bytes -= freed;
        self.pending.retain(|_, walked| walked.tgid != tgid);
    }

    /// Frames with their names. `layout` is asked where names are missing.
    pub fn resolve(
        &mut self,
        walked: &Walked,
        layout: impl FnOnce() -> Option<Interpreter>,
    ) -> Resolved {
        let mut late = Late {
            layout: Some(layout),
            asked: None,
        };
        let mut is_nameless = false;
        let frames = walked
            .frames
            .chunks_exact(size_of::<Frame>())
            .map(|bytes| {
                let flags = word(bytes, core::mem::offset_of!(Frame, flags));
                let kind = if flags & FRAME_SHIM != 0 {
                    Python::Shim
                } else if flags & FRAME_ENTRY != 0 {
                    Python::Entry
                } else {
                    Python::Frame
                };
                let names = if kind == Python::Shim {
                    None
                } else {
                    let code = long(bytes, core::mem::offset_of!(Frame, code));
                    let print = long(bytes, core::mem::offset_of!(Frame, fingerprint));
                    let names = self.names(walked.tgid, code, print, &mut late);
                    is_nameless |= names.is_none();
                    names
                };
                let instruction = word(bytes, core::mem::offset_of!(Frame, instruction)) as i32;
                PythonFrame {
                    line: names.as_ref().and_then(|names| {
                        lines::line(names.version, &names.table, names.first_line, instruction)
                    }),
                    file: names.as_ref().map(|names| Arc::clone(&names.file)),
                    function: names.as_ref().map(|names| Arc::clone(&names.function)),
                    kind,
                }
            })
            .collect();
        Resolved {
            frames,
            is_whole: walked.is_whole(),
            is_nameless,
        }
    }

    fn names(
        &mut self,
        tgid: u32,
        code: u64,
        print: u64,
        late: &mut Late<impl FnOnce() -> Option<Interpreter>>,
    ) -> Option<Arc<Names>> {
        let key = (tgid, code, print);
        let sent = self.names.get(&key).cloned();
        if sent.as_ref().is_some_and(|names| names.is_whole) {
            return sent;
        }
        // Too long to be sent, or sent to an earlier agent.
        let read = late
            .of(tgid)
            .and_then(|(memory, layout)| read(memory, layout, code, print));
        match (read, sent) {
            (Some(names), _) => {
                let names = Arc::new(names);
                self.keep(key, Arc::clone(&names));
                Some(names)
            }
            (None, Some(sent)) => {
                // It is the best there will be: no use in trying again each time.
                let names = Arc::new(Names {
                    is_whole: true,
                    ..(*sent).clone()
                });
                self.keep(key, Arc::clone(&names));
                Some(names)
            }
            (None, None) => None,
        }
    }
}

/// The process itself, asked once if at all.
struct Late<F> {
    layout: Option<F>,
    asked: Option<(Memory, Interpreter)>,
}

impl<F: FnOnce() -> Option<Interpreter>> Late<F> {
    fn of(&mut self, pid: u32) -> Option<(&Memory, &Interpreter)> {
        if let Some(layout) = self.layout.take() {
            self.asked = layout().and_then(|layout| Some((Memory::of(pid)?, layout)));
        }
        let (memory, layout) = self.asked.as_ref()?;
        Some((memory, layout))
    }
}

/// Reads a code object's names of the process, if it is still the one with that fingerprint.
fn read(memory: &Memory, layout: &Interpreter, code: u64, print: u64) -> Option<Names> {
    let is_same = || {
        let start = code + u64::from(layout.print_start);
        let word = |offset: u32| memory.u64(start + u64::from(offset));
        let name = match layout.print_name {
            0 => 0,
            offset => memory.u64(word(offset)? + 24)?,
        };
        let now = fingerprint(word(layout.print_first)?, word(layout.print_table)?, name);
        let is_code = memory.u64(code + 8)? == layout.code_type;
        Some(now == print && is_code)
    };
    let text = |offset: u32| {
        let string = memory.u64(code + u64::from(offset))?;
        let (length, state) = (memory.u64(string + 16)?, memory.u32(string + 32)?);
        let width = strings::bytes_of_character(state)?;
        let bytes = length
            .checked_mul(width as u64)
            .filter(|bytes| *bytes <= LATE_STRING)?;
        let header = if strings::is_ascii(state) {
            layout.ascii
        } else {
            layout.compact
        };
        let bytes = memory.bytes(string + u64::from(header), bytes as usize)?;
        Some(Arc::from(strings::decode(&bytes, width)))
    };
    if !is_same()? {
        return None;
    }
    let table = memory.u64(code + u64::from(layout.code_table))?;
    let length = memory
        .u64(table + 16)
        .filter(|length| *length <= LATE_TABLE)?;
    let names = Names {
        file: text(layout.code_file)?,
        function: text(layout.code_name)?,
        first_line: memory.u32(code + u64::from(layout.code_first_line))? as i32,
        version: layout.version,
        table: memory.bytes(table + 32, length as usize)?.into(),
        is_whole: true,
    };
    // It may have been freed while it was read.
    is_same()?.then_some(names)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..at + 4) {
        Some(word) => u32::from_ne_bytes([word[0], word[1], word[2], word[3]]),
        None => 0,
    }
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
#[path = "walks_tests.rs"]
mod tests;
