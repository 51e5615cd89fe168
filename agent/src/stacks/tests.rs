//! Stacks of this very process, against what the compiler's own unwinder says.

use std::arch::asm;
use std::ffi::c_void;

use super::*;
use crate::host::procfs;

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

/// This thread's registers and `limit` bytes of its stack, as the kernel side would take them in the
/// middle of a function.
#[inline(never)]
fn copy(limit: usize) -> (u64, u64, u64, Vec<u8>) {
    let (ip, sp, bp): (u64, u64, u64);
    // SAFETY: registers are read, and nothing is changed.
    unsafe {
        asm!("lea {0}, [rip]", "mov {1}, rsp", "mov {2}, rbp", out(reg) ip, out(reg) sp, out(reg) bp, options(nostack, preserves_flags));
    }
    let top = procfs_stack_end(sp);
    let bytes = limit.min((top - sp) as usize);
    // SAFETY: the thread's own stack, which is mapped up to there.
    let stack = unsafe { std::slice::from_raw_parts(sp as *const u8, bytes) }.to_vec();
    (ip, sp, bp, stack)
}

fn procfs_stack_end(sp: u64) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().filter_map(|line| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        Some((hex(start)?, hex(end)?))
    });
    ranges
        .into_iter()
        .find(|(start, end)| (*start..*end).contains(&sp))
        .unwrap()
        .1
}

#[test]
fn probe() {
    let expected = by_libgcc();
    let (ip, sp, bp, bytes) = copy(64 << 10);
    let mut stacks = Stacks::new(false);
    let copied = Copied { ip, sp, bp, returns: Default::default(), bytes: &bytes };
    let taken = Taken { copied: Some(copied), ..Taken::default() };
    let pid = std::process::id();
    let stack = stacks.resolve(pid, "api", &taken, Vec::new, || None);
    let p = stacks.processes.get_mut(&pid).unwrap();
    let end = stacks.unwinding.unwind(&p.space, &copied);
    println!("{stack:?} {end:?} {:x?}", expected);
    println!("{:x?}", stacks.unwinding.addresses.iter().map(|a| u64::from_ne_bytes(*a)).collect::<Vec<_>>());
    for a in &stacks.unwinding.addresses { println!("{:x?}", p.space.place(pid, u64::from_ne_bytes(*a)-1, &mut stacks.modules)); }
    let _ = procfs::pids;
}
