//! The records that the BPF programs write into the ring buffer and the agent reads, and the
//! names of the maps both sides share. Fixed layout, little-endian, 8-byte aligned.
//!
//! Invariants:
//! - every record starts with its `kind`; its size follows from the kind, and that of a call with
//!   a stack from its `frames`;
//! - `seq` is dense: each value taken belongs to exactly one record or one counted loss; a record
//!   with [`FLAG_PAIRED`] repeats the number of the one it completes;
//! - a free takes its `seq` at entry and an allocation at return, so that an address which one
//!   thread frees and another gets again is seen in the true order.
//!
//! Changing a layout here makes pinned programs of an older agent unreadable: the agent names
//! its pin folder after the BPF object's hash, so that old and new never meet.

#![no_std]

pub mod framework;
pub mod python;
pub mod stack;

/// Frames of a frame-pointer stack that fit into one record.
pub const STACK_FRAMES: usize = 64;

/// Nested traced calls kept per thread. The runtime calls the driver: two in practice.
pub const MAX_DEPTH: usize = 8;

/// Words of a structure that a call's argument points to, kept with its record.
pub const EXTRA_WORDS: usize = 4;

/// Contexts remembered of a thread's stack of current contexts, the current one included.
pub const CONTEXTS: usize = 4;

/// A call, without a stack: it was made inside another traced call, whose record has the stack.
pub const KIND_CALL: u32 = 1;
/// A call with its stack.
pub const KIND_CALL_STACK: u32 = 2;
/// A process replaced its program.
pub const KIND_EXEC: u32 = 3;
/// A thread-group leader exited.
pub const KIND_EXIT: u32 = 4;
/// What a framework's allocator tells: [`framework::Told`], with as many return addresses behind
/// it as its `frames` says.
pub const KIND_FRAMEWORK: u32 = 5;

/// One finished call.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub kind: u32,
    /// Row of the agent's hook table, from the probe's cookie.
    pub hook: u32,
    pub tgid: u32,
    pub tid: u32,
    /// When the call took effect, in the host's order.
    pub seq: u64,
    /// CLOCK_MONOTONIC nanoseconds at entry; with `tid` it names the call.
    pub enter_ns: u64,
    /// The same at return.
    pub exit_ns: u64,
    /// `enter_ns` of the nearest enclosing recorded call of this thread, 0 if there is none.
    pub parent_enter_ns: u64,
    /// Integer arguments in the System V order. With [`Cookie::stack_args`] the last three are
    /// the first three words that were passed in memory.
    pub args: [u64; 6],
    /// What [`Cookie::extra_arg`] pointed to at return; see [`FLAG_EXTRA`].
    pub extra: [u64; EXTRA_WORDS],
    /// What the out-pointer argument pointed to at return; see [`FLAG_OUT`].
    pub out: u64,
    /// Context last made current by this thread; see [`FLAG_CONTEXT`].
    pub context: u64,
    /// Device last chosen by this thread through the runtime; see [`FLAG_DEVICE`].
    pub device: i32,
    /// The call's return value, a CUresult or cudaError_t.
    pub result: i32,
    pub flags: u32,
    /// Frames in the stack that follows, 0 with [`KIND_CALL`].
    pub frames: u32,
}

/// A call and its return addresses, innermost first; sent only as far as there are frames.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CallStack {
    pub call: Call,
    pub stack: [u64; STACK_FRAMES],
}

/// An exec or exit.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pub kind: u32,
    pub tgid: u32,
    pub seq: u64,
    /// CLOCK_MONOTONIC nanoseconds.
    pub at_ns: u64,
}

/// `out` holds a value.
pub const FLAG_OUT: u32 = 1;
/// The out-pointer could not be read: the address given is not known.
pub const FLAG_OUT_FAULT: u32 = 2;
/// `context` holds a value.
pub const FLAG_CONTEXT: u32 = 4;
/// `device` holds a value.
pub const FLAG_DEVICE: u32 = 8;
/// The stack filled all frames: callers beyond are missing.
pub const FLAG_STACK_FULL: u32 = 16;

/// `extra` holds the words that the cookie asks for.
pub const FLAG_EXTRA: u32 = 32;
/// The stack was copied ([`stack::Copied`]); of its return addresses only the first follows.
pub const FLAG_STACK_COPIED: u32 = 64;

/// What a probe does, packed into its cookie so that hooks are table rows and not programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cookie {
    /// Row of the agent's hook table.
    pub hook: u16,
    /// Index of the out-pointer argument, [`NO_ARG`] if there is none.
    pub out_arg: u8,
    pub action: Action,
    /// Take `seq` at entry (frees) instead of at return (allocations).
    pub seq_at_entry: bool,
    /// Copy the stack if the call is the outermost.
    pub stack: bool,
    /// Keep three words passed in memory (a structure passed by value) in place of the last
    /// three register arguments.
    pub stack_args: bool,
    /// Index of an argument that points to something worth reading at return, [`NO_ARG`] if
    /// there is none.
    pub extra_arg: u8,
    /// How many words to read there, at most [`EXTRA_WORDS`].
    pub extra_words: u8,
}

/// No argument.
pub const NO_ARG: u8 = 0xff;

/// What the return probe does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Action {
    /// Send a record.
    Record = 0,
    /// The first argument replaces this thread's current context; no record.
    SetContext = 1,
    /// Remember the first argument as this thread's device; no record.
    SetDevice = 2,
    /// The context below is this thread's current one again; no record.
    PopContext = 3,
    /// Send a record; the out value is pushed as this thread's current context.
    RecordContext = 4,
    /// The first argument is pushed as this thread's current context; no record.
    PushContext = 5,
    /// Send a record; the context in the first argument is gone, also as the current one.
    RecordEnd = 6,
}

impl Cookie {
    pub const fn pack(self) -> u64 {
        self.hook as u64
            | (self.out_arg as u64) << 16
            | (self.action as u64) << 24
            | (self.seq_at_entry as u64) << 32
            | (self.stack as u64) << 33
            | (self.stack_args as u64) << 34
            | (self.extra_arg as u64) << 40
            | (self.extra_words as u64) << 48
    }

    pub const fn unpack(value: u64) -> Self {
        Self {
            hook: value as u16,
            out_arg: (value >> 16) as u8,
            action: match (value >> 24) as u8 {
                1 => Action::SetContext,
                2 => Action::SetDevice,
                3 => Action::PopContext,
                4 => Action::RecordContext,
                5 => Action::PushContext,
                6 => Action::RecordEnd,
                _ => Action::Record,
            },
            seq_at_entry: (value >> 32) & 1 == 1,
            stack: (value >> 33) & 1 == 1,
            stack_args: (value >> 34) & 1 == 1,
            extra_arg: (value >> 40) as u8,
            extra_words: (value >> 48) as u8,
        }
    }
}

/// Why the kernel side could not pass something on: the index into the map `LOST`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Loss {
    /// The ring buffer was full.
    RingFull = 0,
    /// The table of threads was full: the call was not seen.
    ThreadsFull = 1,
    /// More than [`MAX_DEPTH`] calls nested: the innermost was not seen.
    TooDeep = 2,
    /// A call was entered and never returned to its caller: longjmp, an exception through a
    /// callback, a thread or program that ended inside.
    MissedReturn = 3,
    /// A call returned whose entry was not seen (it was under way when the probe came).
    MissedEntry = 4,
    /// What a call gave (an address, a pitch) or was given by pointer could not be read.
    ReadFault = 5,
    /// An exec or exit found the ring full. The agent finds out by itself, a moment later.
    ProcessEvent = 6,
    /// A stack was to be copied and found no room, or could not be read. No event is lost by it:
    /// the stack is the one that frame pointers give.
    StackNotCopied = 7,
    /// Python frames could not be read or sent, or were more than the agent wants of a framework's
    /// events ([`python::Lost`]). No event is lost by it.
    PythonNotRead = 8,
}

impl Loss {
    pub const COUNT: u32 = 9;
    pub const ALL: [Loss; 9] = [
        Loss::RingFull,
        Loss::ThreadsFull,
        Loss::TooDeep,
        Loss::MissedReturn,
        Loss::MissedEntry,
        Loss::ReadFault,
        Loss::ProcessEvent,
        Loss::StackNotCopied,
        Loss::PythonNotRead,
    ];

    /// The name in `agent_windows.lost_by_cause`.
    pub const fn name(self) -> &'static str {
        match self {
            Loss::RingFull => "ring_full",
            Loss::ThreadsFull => "threads_full",
            Loss::TooDeep => "too_deep",
            Loss::MissedReturn => "missed_return",
            Loss::MissedEntry => "missed_entry",
            Loss::ReadFault => "read_fault",
            Loss::ProcessEvent => "process_event",
            Loss::StackNotCopied => "stack_not_copied",
            Loss::PythonNotRead => "python_not_read",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_survive_packing() {
        let cookie = Cookie {
            hook: 513,
            out_arg: NO_ARG,
            action: Action::RecordContext,
            seq_at_entry: true,
            stack: false,
            stack_args: true,
            extra_arg: 3,
            extra_words: 4,
        };
        assert_eq!(Cookie::unpack(cookie.pack()), cookie);
    }

    /// The kernel side and the agent are compiled by different compilers: sizes are pinned.
    #[test]
    fn layouts_have_no_padding() {
        assert_eq!(
            size_of::<Call>(),
            16 + 4 * 8 + 48 + 8 * EXTRA_WORDS + 16 + 16
        );
        assert_eq!(size_of::<CallStack>(), size_of::<Call>() + 8 * STACK_FRAMES);
        assert_eq!(size_of::<Process>(), 24);
    }
}
