//! From copied registers and stack bytes to return addresses, by framehop and the rules of
//! `.eh_frame`.
//!
//! framehop does not say where it had no rule and went by frame pointer, nor that such a way led
//! nowhere. So each address is looked up before it goes on from there: it has to lie in code, its
//! module's rules are made known, and what kind of way up it has decides about the stack's quality.

use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64};
use framehop::{FrameAddress, Unwinder as _};

use super::modules::Modules;
use super::rules::Step;
use super::space::AddressSpace;
use crate::probes::copies::Copied;

/// Frames of a stack; a deeper recursion is cut there.
pub const FRAMES: usize = 512;

/// The unwinder's cache tells rules apart by a number of 16 bits that counts all changes to lists of
/// modules, of all processes. After that many changes it starts anew.
const CHANGES: u32 = 30_000;

/// How an unwinding ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Nobody called the last frame, as its rule or an address of zero says.
    First,
    /// The copied bytes were used up.
    Bytes,
    /// There was no way up, or there were too many frames.
    Lost,
    /// The last address lies in no code.
    NoCode,
}

/// The part that all processes share.
pub struct Unwinding {
    cache: CacheX86_64,
    changes: u32,
    /// Return addresses of the last stack, innermost first, as eight bytes each.
    pub addresses: Vec<[u8; 8]>,
}

impl Default for Unwinding {
    fn default() -> Self {
        Self {
            cache: CacheX86_64::new(),
            changes: 0,
            addresses: Vec::new(),
        }
    }
}

impl Unwinding {
    /// Lets go of what the cache holds.
    pub fn forget(&mut self) {
        self.changes = 0;
        self.cache = CacheX86_64::new();
    }

    /// The list of modules of some process has changed so many times.
    pub fn changed(&mut self, times: u32) {
        self.changes += times;
        if self.changes >= CHANGES {
            self.forget();
        }
    }

    /// Fills `addresses`.
    pub fn unwind(
        &mut self,
        pid: u32,
        space: &mut AddressSpace,
        modules: &mut Modules,
        copied: &Copied<'_>,
    ) -> End {
        self.addresses.clear();
        let words = copied.bytes;
        let has_hidden = copied.returns.iter().any(|(at, _)| *at >= copied.sp);
        let mut used_up = false;
        let mut registers = UnwindRegsX86_64::new(copied.ip, copied.sp, copied.bp);
        let mut next = Some(copied.ip);
        while let Some(address) = next {
            let Some(frame) = FrameAddress::from_return_address(address) else {
                return End::First;
            };
            if self.addresses.len() == FRAMES {
                return End::Lost;
            }
            self.addresses.push(address.to_ne_bytes());
            match space.step(pid, frame.address_for_lookup(), modules) {
                None => return End::NoCode,
                Some(Step::First) => return End::First,
                Some(Step::Endless) => return End::Lost,
                Some(Step::Ruled | Step::Odd | Step::Unruled) => {}
            }
            let changes = space.take_changes();
            if changes > 0 {
                self.changed(changes);
            }
            let mut read = |address: u64| {
                let offset = address.wrapping_sub(copied.sp) as usize;
                let word = words.get(offset..).and_then(|rest| rest.first_chunk());
                let Some(word) = word else {
                    // Below the stack pointer lies what functions that have returned left there.
                    used_up |= address >= copied.sp;
                    return Err(());
                };
                let value = u64::from_le_bytes(*word);
                if has_hidden
                    && let Some((_, was)) = copied.returns.iter().find(|(at, _)| *at == address)
                    && !space.has_code(value.wrapping_sub(1))
                {
                    return Ok(*was);
                }
                Ok(value)
            };
            let unwinder = &space.unwinder;
            match unwinder.unwind_frame(frame, &mut registers, &mut self.cache, &mut read) {
                Ok(caller) => next = caller,
                Err(_) if used_up => return End::Bytes,
                Err(_) => return End::Lost,
            }
        }
        End::First
    }
}
