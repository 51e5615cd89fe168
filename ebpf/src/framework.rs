//! What a framework's allocator tells of itself (`vramscope_ebpf_abi::framework`): one program for
//! all of its places, entries of functions and USDT probes alike.

use aya_ebpf::{
    EbpfContext,
    bindings::pt_regs,
    helpers::{
        bpf_get_current_pid_tgid, bpf_ktime_get_ns,
        generated::{bpf_get_attach_cookie, bpf_probe_read_kernel, bpf_probe_read_user},
    },
    macros::uprobe,
    programs::ProbeContext,
};
use vramscope_ebpf_abi::{
    KIND_FRAMEWORK, Loss, STACK_FRAMES,
    framework::{
        Cookie, DEVICE_CUDA, FLAG_ANNOUNCED, FLAG_COPIED, FLAG_PAIRED, FLAG_STACK_CUT, NO_REGISTER,
        OPERAND_CONSTANT, OPERAND_REGISTER, Operand, Site, Told, What,
    },
};

use crate::copy::{Of, copy_stack, may_copy};
use crate::python::walk;
use crate::stack::walk_stack;
use crate::{PIECE_WORDS, SITES_OF, Thread, lose, next_seq, send, thread};

/// What differs between the events.
struct Event {
    what: What,
    seq: u64,
    address: u64,
    size: i64,
    first: u64,
    second: u64,
    device: i32,
    flags: u32,
    /// Python frames are read for it: of frees they are not, which are as many, and whose frames
    /// tell where memory was used last at best.
    python: bool,
}

/// The registers that a function's arguments and its stack are in.
#[derive(Clone, Copy)]
struct Registers {
    arguments: [u64; 5],
    sp: u64,
    frame_pointer: u64,
    ip: u64,
}

/// Each from its fixed place: a place that the compiler chooses between two is one that the
/// verifier does not know.
#[inline(always)]
fn registers(regs: *const pt_regs) -> Registers {
    // SAFETY: the kernel passes the thread's registers.
    unsafe {
        Registers {
            arguments: [
                (&raw const (*regs).rdi).read_volatile(),
                (&raw const (*regs).rsi).read_volatile(),
                (&raw const (*regs).rdx).read_volatile(),
                (&raw const (*regs).rcx).read_volatile(),
                (&raw const (*regs).r8).read_volatile(),
            ],
            sp: (&raw const (*regs).rsp).read_volatile(),
            frame_pointer: (&raw const (*regs).rbp).read_volatile(),
            ip: (&raw const (*regs).rip).read_volatile(),
        }
    }
}

#[uprobe]
pub fn framework(ctx: ProbeContext) -> u32 {
    happened(&ctx, false)
}

/// The same, with Python frames; for kernels that have what reading them takes.
#[uprobe]
pub fn framework_python(ctx: ProbeContext) -> u32 {
    happened(&ctx, true)
}

#[inline(always)]
fn happened(ctx: &ProbeContext, python: bool) -> u32 {
    // SAFETY: the helper takes the program's context.
    let cookie = Cookie::unpack(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    let regs = registers(ctx.regs);
    // The device is a structure of two bytes, type and index.
    let device = match cookie.what {
        What::Report => regs.arguments[4],
        What::Oom => regs.arguments[3],
        What::Malloc | What::Free => u64::from(DEVICE_CUDA),
    };
    // The same functions tell of host memory, to profilers.
    if device as u8 != DEVICE_CUDA {
        return 0;
    }
    let device = i32::from((device >> 8) as i8);
    let pid_tgid = bpf_get_current_pid_tgid();
    let Some(thread) = thread(pid_tgid as u32) else {
        lose(Loss::ThreadsFull);
        return 0;
    };
    // SAFETY: the entry belongs to the running thread alone; no other program writes it.
    let thread = unsafe { &mut *thread };
    match cookie.what {
        What::Report => report(thread, &regs, device, pid_tgid, python),
        What::Oom => {
            let event = Event {
                what: What::Oom,
                seq: next_seq(),
                address: 0,
                size: regs.arguments[0] as i64,
                first: regs.arguments[1],
                second: regs.arguments[2],
                device,
                flags: 0,
                python,
            };
            tell(thread, event, pid_tgid, caller(&regs));
        }
        What::Malloc => malloc(thread, ctx.as_ptr(), cookie.site, &regs, pid_tgid, python),
        What::Free => free(thread, ctx.as_ptr(), cookie.site, &regs, pid_tgid),
    }
    0
}

#[inline(always)]
fn report(thread: &mut Thread, regs: &Registers, device: i32, pid_tgid: u64, python: bool) {
    let (address, size) = (regs.arguments[0], regs.arguments[1] as i64);
    let seq = next_seq();
    let mut flags = 0;
    if size > 0 {
        thread.reported = address;
        thread.reported_seq = seq;
    } else if thread.freeing == address {
        thread.freeing = 0;
        thread.confirmed = 1;
        flags = FLAG_ANNOUNCED;
    }
    let event = Event {
        what: What::Report,
        seq,
        address,
        size,
        first: regs.arguments[2],
        second: regs.arguments[3],
        device,
        flags,
        python: python && size > 0,
    };
    tell(thread, event, pid_tgid, caller(regs));
}

#[inline(always)]
fn malloc(
    thread: &mut Thread,
    ctx: *mut core::ffi::c_void,
    site: u32,
    regs: &Registers,
    pid_tgid: u64,
    python: bool,
) {
    let Some(site) = operands(thread, ctx, site) else {
        return;
    };
    let mut fault = 0;
    let address = operand(thread, &site.operands[0], &mut fault);
    let device = operand(thread, &site.operands[1], &mut fault);
    let size = operand(thread, &site.operands[2], &mut fault);
    let stream = operand(thread, &site.operands[3], &mut fault);
    if fault != 0 {
        lose(Loss::ReadFault);
        return;
    }
    let is_paired = thread.reported == address && address != 0;
    thread.reported = 0;
    let (seq, flags) = if is_paired {
        (thread.reported_seq, FLAG_PAIRED)
    } else {
        (next_seq(), 0)
    };
    let event = Event {
        what: What::Malloc,
        seq,
        address,
        size: size as i64,
        first: stream,
        second: 0,
        device: device as i32,
        flags,
        python: python && !is_paired,
    };
    let mut place = here(regs);
    if is_paired {
        // The report has the stack.
        place.returns_to = 0;
    }
    tell(thread, event, pid_tgid, place);
}

#[inline(always)]
fn free(
    thread: &mut Thread,
    ctx: *mut core::ffi::c_void,
    site: u32,
    regs: &Registers,
    pid_tgid: u64,
) {
    let Some(site) = operands(thread, ctx, site) else {
        return;
    };
    let mut fault = 0;
    let address = operand(thread, &site.operands[0], &mut fault);
    if fault != 0 {
        lose(Loss::ReadFault);
        return;
    }
    // A report that was announced and did not come: this thread's frees are not reported.
    if thread.freeing != 0 {
        thread.confirmed = 0;
    }
    thread.freeing = address;
    if thread.confirmed != 0 {
        return;
    }
    let event = Event {
        what: What::Free,
        seq: next_seq(),
        address,
        size: 0,
        first: 0,
        second: 0,
        device: -1,
        flags: 0,
        python: false,
    };
    tell(thread, event, pid_tgid, here(regs));
}

/// Where an event's stack begins.
#[derive(Clone, Copy)]
struct Place {
    /// The innermost address, as return addresses are: behind the call. 0 for no stack.
    returns_to: u64,
    /// The stack pointer of the function that it lies in.
    sp: u64,
    frame_pointer: u64,
}

/// The caller of a function that was just entered.
#[inline(always)]
fn caller(regs: &Registers) -> Place {
    let mut returns_to = 0u64;
    // SAFETY: eight bytes of a local; the helper checks the source.
    unsafe { bpf_probe_read_user((&raw mut returns_to).cast(), 8, regs.sp as *const _) };
    Place {
        returns_to,
        sp: regs.sp + 8,
        frame_pointer: regs.frame_pointer,
    }
}

/// A place amid a function.
#[inline(always)]
fn here(regs: &Registers) -> Place {
    Place {
        returns_to: regs.ip + 1,
        sp: regs.sp,
        frame_pointer: regs.frame_pointer,
    }
}

/// Sends a record.
#[inline(always)]
fn tell(thread: &mut Thread, event: Event, pid_tgid: u64, place: Place) {
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let mut frames = 0;
    let mut flags = event.flags;
    if event.python {
        flags |= walk(pid_tgid, now_ns, true);
    }
    if place.returns_to != 0 {
        let (ip, sp, bp) = (place.returns_to, place.sp, place.frame_pointer);
        let is_copied = may_copy(thread, Of::Framework, now_ns)
            && copy_stack(thread, event.seq, ip, sp, bp) != 0;
        if is_copied {
            flags |= FLAG_COPIED;
            thread.record.stack[0] = ip;
            frames = 1;
        } else {
            frames = walk_stack(thread, ip, bp);
        }
        if frames as usize == STACK_FRAMES {
            flags |= FLAG_STACK_CUT;
        }
    }
    // Right before the stack, where a call's record ends, so that the two lie together.
    let stack = (&raw mut thread.record.stack).cast::<Told>();
    // SAFETY: the call's record before the stack has more bytes than this one (checked in the abi
    // crate) and belongs to this thread.
    let told = unsafe {
        let told = stack.sub(1);
        *told = Told {
            kind: KIND_FRAMEWORK,
            what: event.what as u32,
            tgid: (pid_tgid >> 32) as u32,
            tid: pid_tgid as u32,
            seq: event.seq,
            at_ns: now_ns,
            address: event.address,
            size: event.size,
            first: event.first,
            second: event.second,
            device: event.device,
            flags,
            frames,
            unused: 0,
        };
        told
    };
    let size = size_of::<Told>() as u64 + 8 * (frames as u64 & (2 * STACK_FRAMES as u64 - 1));
    send(thread, told.cast_const().cast(), size);
}

/// A site's description, with the thread's registers copied to where [`operand`] looks for them.
#[inline(always)]
fn operands(thread: &mut Thread, ctx: *mut core::ffi::c_void, site: u32) -> Option<&'static Site> {
    let registers = (&raw mut thread.piece).cast();
    // SAFETY: the piece has room for all registers; the context is where the kernel put them. A
    // direct access would need an offset known to the verifier.
    let fault =
        unsafe { bpf_probe_read_kernel(registers, size_of::<pt_regs>() as u32, ctx.cast_const()) };
    if fault != 0 {
        lose(Loss::ReadFault);
        return None;
    }
    SITES_OF.get(site)
}

#[inline(always)]
fn register(thread: &Thread, register: u8) -> u64 {
    thread.piece[register as usize & (PIECE_WORDS - 1)]
}

/// An operand's value, with its sign if it has one; `fault` tells if it could not be read. Not an
/// `Option`: the compiler would carry its undefined half along, which the verifier refuses.
#[inline(always)]
fn operand(thread: &Thread, operand: &Operand, fault: &mut i64) -> u64 {
    let mut value = operand.value as u64;
    if operand.kind == OPERAND_REGISTER {
        value = register(thread, operand.register) >> (operand.from_bit & 63);
    } else if operand.kind != OPERAND_CONSTANT {
        let mut address = register(thread, operand.register).wrapping_add(value);
        if operand.index != NO_REGISTER {
            let index = register(thread, operand.index) << (operand.shift & 63);
            address = address.wrapping_add(index);
        }
        let mut there = 0u64;
        let bytes = 8 - u32::from(operand.spare_bits >> 3 & 7);
        // SAFETY: at most the eight bytes of a local; the helper checks the source.
        *fault |=
            unsafe { bpf_probe_read_user((&raw mut there).cast(), bytes, address as *const _) };
        value = there;
    }
    let spare = operand.spare_bits & 63;
    if operand.signed != 0 {
        ((value << spare) as i64 >> spare) as u64
    } else {
        value << spare >> spare
    }
}
