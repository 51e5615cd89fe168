//! Python frames at the moment of a call, and where a CPython interpreter keeps what they are read
//! from.
//!
//! A [`Walk`] is sent by the calling thread just before the record of the call it belongs to, which
//! has the same `tid` and `enter_ns`. It names code objects by address and fingerprint; the names
//! themselves travel once, in a [`Code`], the first time a code object is met, since it may be freed
//! and its memory used for another one by the time that the agent looks.

/// Frames of one walk at most; what lies beyond is cut off and said so.
pub const FRAMES: usize = 64;

/// A [`Walk`] with as many [`Frame`]s behind it as its `frames` says.
pub const KIND_PYTHON: u32 = 16;
/// A [`Code`] with [`FILE_BYTES`] + [`NAME_BYTES`] + `table_room` bytes behind it.
pub const KIND_PYTHON_CODE: u32 = 17;

/// Python frames of this call were sent.
pub const CALL_PYTHON: u32 = 1 << 16;
/// This call has Python frames, and they could not be read or sent.
pub const CALL_PYTHON_LOST: u32 = 1 << 17;

/// Frames of one thread, innermost first.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    /// [`KIND_PYTHON`].
    pub kind: u32,
    pub tgid: u32,
    pub tid: u32,
    /// Frames that follow.
    pub frames: u32,
    /// Entry of the call they belong to, CLOCK_MONOTONIC nanoseconds.
    pub enter_ns: u64,
    /// [`WALK_CUT`], [`WALK_FAULT`].
    pub flags: u32,
    /// Minor version of the interpreter.
    pub version: u32,
}

/// There are more frames than were sent.
pub const WALK_CUT: u32 = 1;
/// A frame could not be read: those further out are missing.
pub const WALK_FAULT: u32 = 2;

/// One frame.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Frame {
    /// Address of the code object.
    pub code: u64,
    /// Tells code objects apart that had this address one after the other.
    pub fingerprint: u64,
    /// CPython 3.10: `f_lasti`, in units of two bytes; 3.11 on: bytes from the code's start. Less
    /// than 0 before the first instruction.
    pub instruction: i32,
    /// [`FRAME_ENTRY`], [`FRAME_SHIM`].
    pub flags: u32,
}

/// The frame with which a call of the evaluation function began.
pub const FRAME_ENTRY: u32 = 1;
/// No frame of Python's: it stands where a call of the evaluation function began.
pub const FRAME_SHIM: u32 = 2;

/// A walk being made.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WalkFrames {
    pub walk: Walk,
    pub frames: [Frame; FRAMES],
}

/// Bytes of a file's name that are sent: of a longer one the last.
pub const FILE_BYTES: usize = 512;
/// Bytes of a function's name that are sent: of a longer one the first.
pub const NAME_BYTES: usize = 256;
/// Room for a line table, for most code objects and for the others.
pub const TABLE_SMALL: usize = 256;
pub const TABLE_LARGE: usize = 4096;

/// A code object.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// [`KIND_PYTHON_CODE`].
    pub kind: u32,
    pub tgid: u32,
    pub code: u64,
    pub fingerprint: u64,
    pub version: u32,
    pub first_line: i32,
    /// Lengths in characters and the strings' states, as CPython has them.
    pub file_length: u32,
    pub file_state: u32,
    pub name_length: u32,
    pub name_state: u32,
    /// Bytes of the whole line table.
    pub table_length: u32,
    /// Bytes of it that there is room for.
    pub table_room: u32,
}

/// A code object with its strings and table.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CodeRecord<const TABLE: usize> {
    pub code: Code,
    pub file: [u8; FILE_BYTES],
    pub name: [u8; NAME_BYTES],
    pub table: [u8; TABLE],
}

/// Bytes of a frame, or of a code object, that are read at once.
pub const SPAN: usize = 128;

/// How the outermost frame of a call of the evaluation function is known.
pub const ENTRY_EVERY: u32 = 0;
/// A byte of the frame that is not 0.
pub const ENTRY_FLAG: u32 = 1;
/// A frame of its own, whose byte is 3 (`FRAME_OWNED_BY_CSTACK`).
pub const ENTRY_SHIM: u32 = 2;
/// `enum _frameowner` in CPython's `pycore_frame.h`, 3.12 and 3.13.
pub const OWNED_BY_CSTACK: u64 = 3;

/// The thread state itself has the current frame.
pub const NO_CFRAME: u32 = u32::MAX;
/// The C library has no such place: threads are looked for in the interpreter's own lists.
pub const NO_SPECIFIC: u32 = u32::MAX;

/// Where one process's interpreter keeps things. Offsets in bytes; those in frames and code objects
/// that are read at once (`frame_…`, `print_…`) count from `frame_start` and `print_start` and are
/// multiples of 8, except that of the entry mark.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interpreter {
    /// Address of `_PyRuntime`.
    pub runtime: u64,
    /// Address of the `pthread_key_t` under which each thread keeps its state.
    pub key: u64,
    /// Address of `PyCode_Type`.
    pub code_type: u64,
    /// Walks for a framework's events, for each thread in a tenth of a second at most.
    pub framework_limit: u32,
    /// Minor version.
    pub version: u32,
    /// Of `thread.fsbase` in the kernel's `task_struct`.
    pub fsbase: u32,
    /// Of `specific` in the C library's `struct pthread`, or [`NO_SPECIFIC`].
    pub specific: u32,
    pub first_interpreter: u32,
    pub next_interpreter: u32,
    pub first_thread: u32,
    pub next_thread: u32,
    pub thread_id: u32,
    pub thread_frame: u32,
    /// Of the current frame in `_PyCFrame`, or [`NO_CFRAME`].
    pub cframe_frame: u32,
    pub frame_start: u32,
    pub frame_bytes: u32,
    pub frame_code: u32,
    pub frame_previous: u32,
    pub frame_instruction: u32,
    pub frame_entry: u32,
    pub entry: u32,
    pub print_start: u32,
    pub print_bytes: u32,
    /// Two words that make the fingerprint, and with `print_name` not 0 the name's hash.
    pub print_first: u32,
    pub print_table: u32,
    pub print_name: u32,
    pub code_file: u32,
    pub code_name: u32,
    pub code_table: u32,
    pub code_first_line: u32,
    /// Of the instructions; 0 if frames count them themselves (3.10).
    pub code_body: u32,
    /// Where a string's characters begin: one of ASCII, and any other.
    pub ascii: u32,
    pub compact: u32,
}

/// Why there are no Python frames: the index into the map `PYTHON_LOST`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Lost {
    /// The ring was full.
    RingFull = 0,
    /// A code object's names found the ring full; they are sent the next time it is met.
    CodeRingFull = 1,
    /// The table of threads was full.
    ThreadsFull = 2,
    /// A frame could not be read.
    Fault = 3,
    /// A framework's events were more than the limit.
    Limited = 4,
}

impl Lost {
    pub const COUNT: u32 = 5;
    pub const ALL: [Lost; 5] = [
        Lost::RingFull,
        Lost::CodeRingFull,
        Lost::ThreadsFull,
        Lost::Fault,
        Lost::Limited,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Lost::RingFull => "ring_full",
            Lost::CodeRingFull => "code_ring_full",
            Lost::ThreadsFull => "threads_full",
            Lost::Fault => "fault",
            Lost::Limited => "limited",
        }
    }
}

/// What odd 64-bit number mixes the words of a fingerprint: 2^64 divided by the golden ratio, as in
/// Knuth's multiplicative hashing.
pub const MIX: u64 = 0x9E37_79B9_7F4A_7C15;

/// The fingerprint of a code object from its words; `name` 0 where the layout takes none. The agent
/// makes the same of what it reads later.
#[inline(always)]
pub const fn fingerprint(first: u64, table: u64, name: u64) -> u64 {
    first
        .wrapping_mul(MIX)
        .wrapping_add(table)
        .wrapping_mul(MIX)
        .wrapping_add(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_no_padding() {
        assert_eq!(size_of::<Walk>(), 32);
        assert_eq!(size_of::<Frame>(), 24);
        assert_eq!(size_of::<WalkFrames>(), 32 + 24 * FRAMES);
        assert_eq!(size_of::<Code>(), 56);
        assert_eq!(
            size_of::<CodeRecord<TABLE_SMALL>>(),
            56 + FILE_BYTES + NAME_BYTES + TABLE_SMALL
        );
        assert_eq!(size_of::<Interpreter>(), 3 * 8 + 30 * 4);
    }
}
