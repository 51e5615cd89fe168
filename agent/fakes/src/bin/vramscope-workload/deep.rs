//! `deep`: calls inside calls, and calls that are left without a return. Only on the stand-ins, which
//! have a hook for it (`vramscope_fake_hook`).
//!
//! With the vendor's, callbacks and C++ exceptions through them do the same.

use std::{
    arch::global_asm,
    cell::Cell,
    ffi::{c_int, c_void},
};

use anyhow::ensure;

use super::{library::Library, runtime::Runtime};

const MIB: usize = 1 << 20;

const NESTED_BYTES: usize = MIB;
const ABANDONED_BYTES: usize = 2 * MIB;

type Hook = unsafe extern "C" fn(*mut c_void);
type SetHook = unsafe extern "C" fn(Option<Hook>, *mut c_void, c_int);

/// When the hook runs: before the driver allocates, or after it.
const BEFORE: c_int = 0;
const AFTER: c_int = 1;

// What setjmp and longjmp are in C, which cannot be called from Rust. `vramscope_catch` calls a
// function with an argument and returns 0; if `vramscope_throw` is called in between with what
// `vramscope_catch` left in its third argument, it returns 1 there and then, and all calls in between
// are abandoned.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".globl vramscope_catch",
    ".globl vramscope_throw",
    "vramscope_catch:",
    "push rbp",
    "mov rbp, rsp",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "sub rsp, 8",
    "mov [rdx], rsp",
    "mov rax, rdi",
    "mov rdi, rsi",
    "call rax",
    "xor eax, eax",
    "jmp 2f",
    "vramscope_throw:",
    "mov rsp, rdi",
    "mov eax, 1",
    "2:",
    "add rsp, 8",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "ret",
);

unsafe extern "C" {
    fn vramscope_catch(function: Hook, argument: *mut c_void, place: *mut usize) -> c_int;
    fn vramscope_throw(place: usize) -> !;
}

struct Deep {
    runtime: Runtime,
    set_hook: SetHook,
    /// How many calls deeper to go.
    left: Cell<u32>,
    allocated: Cell<u32>,
    /// Where an abandoned call goes on.
    place: Cell<usize>,
    moment: Cell<c_int>,
}

/// `depth` calls inside each other, then `before` calls left before they allocate and `after` calls
/// left after it.
pub fn run(depth: u32, before: u32, after: u32) -> anyhow::Result<()> {
    let library = Library::load(&[c"libcuda.so.1"])?;
    let address = library.function(c"vramscope_fake_hook")?;
    // SAFETY: the stand-in documents this signature for this name.
    let set_hook = unsafe { std::mem::transmute::<*mut c_void, SetHook>(address) };
    let deep = Deep {
        runtime: Runtime::load()?,
        set_hook,
        left: Cell::new(depth),
        allocated: Cell::new(0),
        place: Cell::new(0),
        moment: Cell::new(BEFORE),
    };
    deep.nest();
    ensure!(
        deep.allocated.get() == depth,
        "{} of {depth} allocations inside each other succeeded",
        deep.allocated.get()
    );
    for _ in 0..before {
        deep.abandon(BEFORE)?;
    }
    for _ in 0..after {
        deep.abandon(AFTER)?;
    }
    Ok(())
}

impl Deep {
    fn this(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    fn install(&self, hook: Hook, moment: c_int) {
        // SAFETY: the hook gets this value, which outlives every call made here.
        unsafe { (self.set_hook)(Some(hook), self.this(), moment) };
    }

    /// One call, with another inside it before it allocates, and so on: the innermost allocates first.
    #[inline(never)]
    fn nest(&self) {
        let Some(left) = self.left.get().checked_sub(1) else {
            return;
        };
        self.left.set(left);
        if left > 0 {
            self.install(nest_in_hook, BEFORE);
        }
        if self.runtime.try_malloc(NESTED_BYTES).is_ok() {
            self.allocated.set(self.allocated.get() + 1);
        }
    }

    /// One call that does not return.
    #[inline(never)]
    fn abandon(&self, moment: c_int) -> anyhow::Result<()> {
        self.moment.set(moment);
        // SAFETY: the call gets this value. What it abandons holds nothing that has to be dropped.
        let code =
            unsafe { vramscope_catch(allocate_to_abandon, self.this(), self.place.as_ptr()) };
        ensure!(code == 1, "the call returned");
        Ok(())
    }
}

unsafe extern "C" fn nest_in_hook(argument: *mut c_void) {
    // SAFETY: installed with a value that lives.
    let deep = unsafe { &*argument.cast::<Deep>() };
    deep.nest();
}

unsafe extern "C" fn allocate_to_abandon(argument: *mut c_void) {
    // SAFETY: called with a value that lives.
    let deep = unsafe { &*argument.cast::<Deep>() };
    deep.install(leave_in_hook, deep.moment.get());
    // The hook leaves this call, so nothing comes after it.
    let _ = deep.runtime.try_malloc(ABANDONED_BYTES);
}

unsafe extern "C" fn leave_in_hook(argument: *mut c_void) {
    // SAFETY: installed with a value that lives; the place is that of a call that still runs.
    unsafe { vramscope_throw((*argument.cast::<Deep>()).place.get()) }
}
