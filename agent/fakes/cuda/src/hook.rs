//! A hook for tests, which the vendor's has not: a function that runs inside the thread's next
//! `cuMemAlloc_v2`, before or after it allocates. From there a workload can call again, however
//! deep, or leave the call without returning from it, as a C++ exception or a `longjmp` through a
//! callback does to the vendor's.
//!
//! No lock is held and nothing waits to be dropped when the hook runs, so leaving is harmless.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
};

/// The function, with the argument it was installed with.
pub type Hook = unsafe extern "C" fn(*mut c_void);

/// When the hook runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    Before = 0,
    After = 1,
}

thread_local! {
    static HOOK: Cell<Option<(Hook, *mut c_void, c_int)>> = const { Cell::new(None) };
}

/// Installs a hook for this thread's next allocation; null takes it away.
pub fn install(hook: Option<Hook>, argument: *mut c_void, moment: c_int) {
    let hook = hook.map(|hook| (hook, argument, moment));
    // A thread that is ending allocates no more.
    let _ = HOOK.try_with(|cell| cell.set(hook));
}

/// Runs the hook if this is its moment. It runs once: it has to install itself again to run again.
#[inline]
pub fn run(moment: Moment) {
    let installed = HOOK.try_with(Cell::get).ok().flatten();
    let Some((hook, argument, wanted)) = installed else {
        return;
    };
    if wanted == moment as c_int {
        let _ = HOOK.try_with(|cell| cell.set(None));
        // SAFETY: whoever installed it vouches for the function and its argument.
        unsafe { hook(argument) };
    }
}
