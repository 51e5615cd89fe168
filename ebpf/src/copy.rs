//! Copies of a thread's registers and stack (`vramscope_ebpf_abi::stack`).
//!
//! A read of user memory succeeds as a whole or not at all, so what is there is found out first: by
//! one word where the copy would end, and near a stack's end by a search over pages. Reading finds
//! no page that is not in memory, which is as well: a stack's pages in use are.
//!
//! The ring's record is the only scratch memory: a program may be preempted by others of its
//! CPU, and a thread's entry would grow by what is copied.

use aya_ebpf::helpers::{
    bpf_get_current_pid_tgid, bpf_probe_read_user,
    generated::{
        bpf_probe_read_user as read_user, bpf_ringbuf_discard, bpf_ringbuf_reserve,
        bpf_ringbuf_submit,
    },
};
use vramscope_ebpf_abi::{
    Loss, MAX_DEPTH,
    stack::{Copied, SIZES},
};

use crate::{BPF_RB_NO_WAKEUP, SETTINGS, STACKS, Thread, lose};

const PAGE: u64 = 4096;
const HEADER: u64 = size_of::<Copied>() as u64;

/// What a stack is of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Of {
    Call,
    Framework,
}

/// Whether a stack may be copied: so many a second of each thread.
#[inline(always)]
pub fn may_copy(thread: &mut Thread, of: Of, now_ns: u64) -> bool {
    let Some(settings) = SETTINGS.get(0) else {
        return false;
    };
    if settings.stack_bytes == 0 {
        return false;
    }
    // 1.07 s, without a division.
    let second = now_ns >> 30;
    if thread.second != second {
        thread.second = second;
        thread.call_copies = 0;
        thread.framework_copies = 0;
    }
    let (copies, limit) = match of {
        Of::Call => (&mut thread.call_copies, settings.call_stacks),
        Of::Framework => (&mut thread.framework_copies, settings.framework_stacks),
    };
    if *copies >= limit {
        return false;
    }
    *copies += 1;
    true
}

/// Sends registers and stack; 0 if there was no room or nothing to read, which is counted.
///
/// A function of its own, that its five record sizes are in each program once.
#[inline(never)]
pub fn copy_stack(thread: &Thread, seq: u64, ip: u64, sp: u64, bp: u64) -> u64 {
    let Some(settings) = SETTINGS.get(0) else {
        return 0;
    };
    let limit = settings.stack_bytes as u64;
    let bytes = readable(sp, limit);
    let registers = [seq, ip, sp, bp];
    let sent = if bytes == 0 {
        false
    } else if bytes <= SIZES[0] as u64 {
        send::<{ SIZES[0] as u64 }>(thread, &registers, bytes)
    } else if bytes <= SIZES[1] as u64 {
        send::<{ SIZES[1] as u64 }>(thread, &registers, bytes)
    } else if bytes <= SIZES[2] as u64 {
        send::<{ SIZES[2] as u64 }>(thread, &registers, bytes)
    } else if bytes <= SIZES[3] as u64 {
        send::<{ SIZES[3] as u64 }>(thread, &registers, bytes)
    } else {
        send::<{ SIZES[4] as u64 }>(thread, &registers, bytes)
    };
    if !sent {
        lose(Loss::StackNotCopied);
    }
    sent as u64
}

/// How many bytes from `sp` on can be read, at most `limit`. Where pages are missing in between, it
/// is what lies before them or more; [`send`] finds out.
#[inline(always)]
fn readable(sp: u64, limit: u64) -> u64 {
    if can_read(sp + limit - 8) {
        return limit;
    }
    // The first page is there, or nothing is.
    let page = sp & !(PAGE - 1);
    let mut pages = 0;
    let mut step = 8;
    while step > 0 {
        if can_read(page + (pages + step) * PAGE) {
            pages += step;
        }
        step >>= 1;
    }
    let bytes = page + (pages + 1) * PAGE - sp;
    if bytes < limit { bytes } else { limit }
}

/// As [`readable`], page by page up to the first that is missing.
#[inline(always)]
fn readable_at_once(sp: u64, limit: u64) -> u64 {
    let page = sp & !(PAGE - 1);
    let mut pages = 1;
    while pages < 16 {
        if !can_read(page + pages * PAGE) {
            break;
        }
        pages += 1;
    }
    let bytes = page + pages * PAGE - sp;
    if bytes < limit { bytes } else { limit }
}

#[inline(always)]
fn can_read(address: u64) -> bool {
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_user(address as *const u64) }.is_ok()
}

/// Sends a record with room for `N` bytes of stack. `registers`: seq, ip, sp, bp.
#[inline(always)]
fn send<const N: u64>(thread: &Thread, registers: &[u64; 4], bytes: u64) -> bool {
    let [seq, ip, sp, bp] = *registers;
    let pid_tgid = bpf_get_current_pid_tgid();
    // SAFETY: the record has `HEADER + N` bytes, of which no others are written, and is handed
    // back on both ways out. The helpers check what they read.
    unsafe {
        let record =
            bpf_ringbuf_reserve((&raw const STACKS).cast_mut().cast(), HEADER + N, 0) as *mut u8;
        if record.is_null() {
            return false;
        }
        let to = record.add(HEADER as usize);
        let mut copied = bytes;
        if !copy::<N>(to, sp, bytes) {
            copied = readable_at_once(sp, bytes);
            if !copy::<N>(to, sp, copied) {
                bpf_ringbuf_discard(record.cast(), BPF_RB_NO_WAKEUP);
                return false;
            }
        }
        let header = record as *mut Copied;
        (*header).seq = seq;
        (*header).tgid = (pid_tgid >> 32) as u32;
        (*header).tid = pid_tgid as u32;
        (*header).ip = ip;
        (*header).sp = sp;
        (*header).bp = bp;
        (*header).bytes = copied;
        for i in 0..MAX_DEPTH {
            (*header).returns[i] = if (i as u64) < thread.depth {
                [thread.calls[i].sp, thread.calls[i].returns_to]
            } else {
                [0; 2]
            };
        }
        bpf_ringbuf_submit(record.cast(), BPF_RB_NO_WAKEUP);
    }
    true
}

/// # Safety
/// `to` has room for `N` bytes.
#[inline(always)]
unsafe fn copy<const N: u64>(to: *mut u8, sp: u64, bytes: u64) -> bool {
    // SAFETY: as the caller promises. A mask tells the verifier that fewer are less than `N`.
    unsafe {
        if bytes == N {
            read_user(to.cast(), N as u32, sp as *const _) == 0
        } else {
            read_user(to.cast(), (bytes & (N - 1)) as u32, sp as *const _) == 0
        }
    }
}
