//! Records of a framework's allocator, and how a probe's operands are found.
//!
//! PyTorch's allocator reports every block it hands out or takes back from inside its own lock
//! ([`What::Report`]), so the order of reports is the order of what happened. The USDT probe
//! [`What::Malloc`] follows on the same thread and adds what was asked for and the stream; it
//! repeats the report's number. The probe [`What::Free`] comes before its report and adds nothing
//! to it, so it makes a record only as long as the thread's reports have not been seen to follow.

/// One event.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// [`crate::KIND_FRAMEWORK`].
    pub kind: u32,
    /// A [`What`].
    pub what: u32,
    pub tgid: u32,
    pub tid: u32,
    /// In the host's order; with [`FLAG_PAIRED`] that of the report it belongs to.
    pub seq: u64,
    /// CLOCK_MONOTONIC nanoseconds.
    pub at_ns: u64,
    /// The block's address; 0 of an OOM.
    pub address: u64,
    /// Report: bytes of the block, negative when it was taken back. Malloc: bytes asked for.
    /// OOM: bytes that could not be had. Free: 0.
    pub size: i64,
    /// Report and OOM: bytes the allocator has handed out. Malloc: the stream's id.
    pub first: u64,
    /// Report and OOM: bytes the allocator holds.
    pub second: u64,
    /// Device ordinal; -1 where the event has none.
    pub device: i32,
    pub flags: u32,
    /// Return addresses that follow.
    pub frames: u32,
    pub unused: u32,
}

/// A [`What::Malloc`] that completes the report with the same `seq`.
pub const FLAG_PAIRED: u32 = 1;
/// A report that a USDT probe of the same thread announced.
pub const FLAG_ANNOUNCED: u32 = 2;
/// The stack filled all frames: callers beyond are missing.
pub const FLAG_STACK_CUT: u32 = 4;
/// As [`crate::FLAG_STACK_COPIED`].
pub const FLAG_COPIED: u32 = 8;

/// What an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum What {
    /// `pytorch:malloc`
    Malloc = 0,
    /// `pytorch:free`
    Free = 1,
    /// `c10::reportMemoryUsageToProfiler`
    Report = 2,
    /// `c10::reportOutOfMemoryToProfiler`
    Oom = 3,
}

impl What {
    pub const fn from_u32(value: u32) -> Option<Self> {
        match value {
            0 => Some(What::Malloc),
            1 => Some(What::Free),
            2 => Some(What::Report),
            3 => Some(What::Oom),
            _ => None,
        }
    }
}

/// `c10::DeviceType::CUDA`; the only reports that are taken.
pub const DEVICE_CUDA: u8 = 1;

/// How many descriptions of sites the kernel side can hold.
pub const SITES: u32 = 1024;
/// Operands of a site that are read.
pub const OPERANDS: usize = 4;

/// The operand is `value`.
pub const OPERAND_CONSTANT: u8 = 1;
/// The operand is in a register.
pub const OPERAND_REGISTER: u8 = 2;
/// The operand is in memory at `value` + register + (index register << shift).
pub const OPERAND_MEMORY: u8 = 3;

/// No index register.
pub const NO_REGISTER: u8 = 0xff;

/// Where an operand lies. Registers are named by their word in `struct pt_regs`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Operand {
    pub kind: u8,
    pub register: u8,
    pub index: u8,
    /// Bits the index register is shifted by.
    pub shift: u8,
    /// Bits the value is shifted left, and then right again, to have its width.
    pub spare_bits: u8,
    /// The value has a sign.
    pub signed: u8,
    /// Bits a register is shifted right before: 8 for `%ah` and its like.
    pub from_bit: u8,
    pub unused: u8,
    pub value: i64,
}

/// The operands of one site.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Site {
    pub operands: [Operand; OPERANDS],
}

/// What a framework's probe is, packed into its cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cookie {
    pub what: What,
    /// Index of its [`Site`]; of a function none.
    pub site: u32,
}

impl Cookie {
    pub const fn pack(self) -> u64 {
        (self.what as u64) << 32 | self.site as u64
    }

    pub const fn unpack(value: u64) -> Self {
        Self {
            what: match (value >> 32) as u32 {
                0 => What::Malloc,
                1 => What::Free,
                2 => What::Report,
                _ => What::Oom,
            },
            site: value as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_survive_packing() {
        for what in [What::Malloc, What::Free, What::Report, What::Oom] {
            let cookie = Cookie { what, site: 1023 };
            assert_eq!(Cookie::unpack(cookie.pack()), cookie);
            assert_eq!(What::from_u32(what as u32), Some(what));
        }
        assert_eq!(What::from_u32(4), None);
    }

    #[test]
    fn layouts_have_no_padding() {
        assert_eq!(size_of::<Told>(), 4 * 4 + 6 * 8 + 4 * 4);
        assert_eq!(size_of::<Operand>(), 16);
        assert_eq!(size_of::<Site>(), 16 * OPERANDS);
        // The kernel side makes it where a call's record would end, before the stack.
        assert!(size_of::<Told>() <= size_of::<crate::Call>());
    }
}
