//! Copied stacks: the registers and a piece of a thread's stack, from which the agent finds the
//! callers of code without frame pointers.
//!
//! They travel in a ring of their own (map `STACKS`): a copy is a hundred times the size of the
//! record it belongs to and is of no use once it was unwound, so it must neither take the records'
//! room nor wait as long as they do. A copy that finds no room is left out and counted
//! ([`crate::Loss::StackNotCopied`]); its record goes with the stack that frame pointers give.
//!
//! A copy is sent before its record, by the same thread, and has the record's `seq`. A copy whose
//! record found no room is nobody's, and is skipped.

use crate::MAX_DEPTH;

/// How many bytes of a stack may be copied: what `STACKS` has records for.
pub const SIZES: [u32; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];

/// What is before the bytes. The words of the stack follow, from `sp` upwards.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// `seq` of the record it belongs to.
    pub seq: u64,
    pub tgid: u32,
    pub tid: u32,
    /// Whither the probed function returns, and the registers as they are then: the start of the
    /// unwinding.
    pub ip: u64,
    pub sp: u64,
    pub bp: u64,
    /// How many bytes of the stack follow. The record may be longer.
    pub bytes: u64,
    /// Return addresses that probes of outer functions have replaced: where each lies, and what
    /// it was. Zeros where there is none.
    pub returns: [[u64; 2]; MAX_DEPTH],
}

/// How stacks are taken, in the map `SETTINGS`: the agent may change it at any time.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settings {
    /// Bytes of the stack to copy with a call, one of [`SIZES`]; 0 for frame pointers alone.
    pub stack_bytes: u32,
    /// How many stacks of calls are copied in a second of each thread; the others go by frame
    /// pointers.
    pub call_stacks: u32,
    /// The same for a framework's events.
    pub framework_stacks: u32,
    pub unused: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_no_padding() {
        assert_eq!(size_of::<Copied>(), 6 * 8 + 16 * MAX_DEPTH);
        assert_eq!(size_of::<Settings>(), 16);
        // Masks on the kernel side count on it.
        assert!(SIZES.iter().all(|size| size.is_power_of_two()));
    }
}
