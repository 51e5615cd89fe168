//! Stacks of this very process, against what the compiler's own unwinder says.

use std::arch::asm;
use std::ffi::c_void;

use super::*;

type Trace = extern "C" fn(*mut c_void, *mut c_void) -> i32;

unsafe extern "C" {
    fn _Unwind_Backtrace(trace: Trace, argument: *mut c_void) -> i32;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// Return addresses by libgcc's unwinder, innermost first.
fn by_libgcc() -> Vec<u64> {
    extern "C" fn take(context: *mut c_void, to: *mut c_void) -> i32 {
        // SAFETY: the vector that is passed below, and the context of this call.
        unsafe {
            let to = &mut *to.cast::<Vec<u64>>();
            to.push(_Unwind_GetIP(context) as u64);
        }
        0
    }
    let mut addresses: Vec<u64> = Vec::new();
    // SAFETY: the callback takes what is passed.
    unsafe { _Unwind_Backtrace(take, (&raw mut addresses).cast()) };
    addresses
}

/// What the kernel side would take in the middle of a function.
struct Taking {
    ip: u64,
    sp: u64,
    bp: u64,
    bytes: Vec<u8>,
}

impl Taking {
    /// This function's own place, and at most `limit` bytes of the stack.
    #[inline(never)]
    fn here(limit: usize) -> Self {
        let (ip, sp, bp): (u64, u64, u64);
        // SAFETY: registers are read, and nothing is changed.
        unsafe {
            asm!(
                "lea {0}, [rip]", "mov {1}, rsp", "mov {2}, rbp",
                out(reg) ip, out(reg) sp, out(reg) bp,
                options(nostack, preserves_flags),
            );
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let end = maps.lines().find_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let hex = |text| u64::from_str_radix(text, 16).ok();
            let range = hex(start)?..hex(end)?;
            range.contains(&sp).then_some(range.end)
        });
        let bytes = limit.min((end.unwrap() - sp) as usize);
        // SAFETY: the thread's own stack, which is mapped up to there.
        let bytes = unsafe { std::slice::from_raw_parts(sp as *const u8, bytes) }.to_vec();
        Self { ip, sp, bp, bytes }
    }

    fn copied(&self) -> Copied<'_> {
        Copied {
            ip: self.ip,
            sp: self.sp,
            bp: self.bp,
            returns: [(0, 0); 8],
            bytes: &self.bytes,
        }
    }
}

/// Resolves it as a stack of this process: the outcome, and the addresses it was made from.
fn resolve(stacks: &mut Stacks, copied: Copied<'_>) -> (Stack, Vec<u64>) {
    let taken = Taken {
        copied: Some(copied),
        ..Taken::default()
    };
    let stack = stacks.resolve(std::process::id(), "cudaMalloc", &taken, Vec::new);
    let addresses = stacks.unwinding.addresses.iter();
    (
        stack,
        addresses.map(|bytes| u64::from_ne_bytes(*bytes)).collect(),
    )
}

/// Both unwinders from one function, `depth` calls down: the callers of this function have to be
/// the same.
#[inline(never)]
fn from_below(depth: u32) -> (Vec<u64>, Taking) {
    if std::hint::black_box(depth) == 0 {
        return std::hint::black_box((by_libgcc(), Taking::here(64 << 10)));
    }
    std::hint::black_box(from_below(depth - 1))
}

#[test]
fn a_whole_stack_is_the_one_that_libgcc_finds() {
    let (expected, taking) = from_below(20);
    let mut stacks = Stacks::new(symbols::Options::default());
    let (stack, addresses) = resolve(&mut stacks, taking.copied());
    assert_eq!(stack.quality, Quality::Full);
    // Without the functions that ask, and libgcc's zero at the end.
    let callers: Vec<u64> = expected
        .into_iter()
        .filter(|address| *address != 0)
        .collect();
    assert!(addresses.len() > 22);
    assert_eq!(addresses[2..], callers[2..]);
    // The same again, from what is kept.
    assert_eq!(resolve(&mut stacks, taking.copied()).0, stack);
    assert_eq!(stacks.name_new().len(), 1);
    assert_eq!(stacks.name_new().len(), 0);
}

#[test]
fn bytes_that_end_early_give_the_innermost_frames() {
    let (_, taking) = from_below(20);
    let mut stacks = Stacks::new(symbols::Options::default());
    let (_, whole) = resolve(&mut stacks, taking.copied());
    let mut copied = taking.copied();
    copied.bytes = &taking.bytes[..1024];
    let (stack, cut) = resolve(&mut stacks, copied);
    assert_eq!(stack.quality, Quality::Truncated);
    assert!(cut.len() > 1 && cut.len() < whole.len());
    assert_eq!(cut, whole[..cut.len()]);
    // And no rule was forgotten by it.
    assert_eq!(
        resolve(&mut stacks, taking.copied()).0.quality,
        Quality::Full
    );
}

/// A return probe's address stands in place of the true one, which the kernel side has kept.
#[test]
fn hidden_return_addresses_are_put_back() {
    let (_, mut taking) = from_below(20);
    let mut stacks = Stacks::new(symbols::Options::default());
    let (expected, whole) = resolve(&mut stacks, taking.copied());
    let word = |bytes: &[u8], at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    let place = (0..taking.bytes.len() - 8)
        .step_by(8)
        .find(|at| word(&taking.bytes, *at) == whole[5])
        .unwrap();
    const PROBED: u64 = 0x7fff_ffff_e000;
    taking.bytes[place..place + 8].copy_from_slice(&PROBED.to_ne_bytes());
    let mut copied = taking.copied();
    let (stack, _) = resolve(&mut stacks, copied);
    assert_eq!(stack.quality, Quality::Truncated);
    copied.returns[3] = (taking.sp + place as u64, whole[5]);
    assert_eq!(resolve(&mut stacks, copied), (expected, whole));
}

/// Whatever is on a stack, no more comes of it than a stack of less quality.
#[test]
fn any_bytes_are_survived() {
    let taking = Taking::here(4096);
    let mut stacks = Stacks::new(symbols::Options::default());
    let mut state = 1u64;
    for _ in 0..200 {
        let mut bytes = taking.bytes.clone();
        for byte in bytes.iter_mut().skip(64) {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            // Some words stay.
            if state >> 62 == 0 {
                *byte = (state >> 40) as u8;
            }
        }
        let mut copied = taking.copied();
        copied.bytes = &bytes;
        copied.bp = taking.sp.wrapping_add(state >> 50);
        let (stack, _) = resolve(&mut stacks, copied);
        assert_ne!(stack.quality, Quality::None);
    }
    let mut copied = taking.copied();
    (copied.ip, copied.bytes) = (8, &[]);
    let stack = resolve(&mut stacks, copied).0;
    assert_eq!((stack.id, stack.quality), (None, Quality::Unresolved));
}
