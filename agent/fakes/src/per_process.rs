//! State that belongs to one process and is not shared with the children it forks.
//!
//! A library's statics are copied by a fork, a lock that another thread held at that moment
//! included. So every access compares the process number: a child gets a fresh value and never
//! touches the copied one, not even its lock.

use std::sync::atomic::{AtomicPtr, Ordering};

/// One value a process, made on first use.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Slot<T>>,
}

struct Slot<T> {
    pid: libc::pid_t,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// No value yet.
    pub const fn new() -> Self {
        Self {
            current: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// This process's value. `make` may run more than once when threads race for the first use,
    /// so it must have no effect outside of what it returns.
    pub fn get(&self, make: fn() -> T) -> &'static T {
        // SAFETY: getpid takes no argument and cannot fail.
        let pid = unsafe { libc::getpid() };
        let seen = self.current.load(Ordering::Acquire);
        // SAFETY: a non-null pointer came from Box::into_raw below and is never freed once stored.
        if let Some(slot) = unsafe { seen.as_ref() }
            && slot.pid == pid
        {
            return &slot.value;
        }
        let fresh = Box::into_raw(Box::new(Slot { pid, value: make() }));
        // What a parent left is leaked on purpose: its locks may be held for ever.
        let stored =
            self.current
                .compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire);
        let winner = match stored {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: `fresh` lost the race, so nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        };
        // SAFETY: stored pointers are never freed, and both candidates are of this process: only
        // threads of this process race here.
        unsafe { &(*winner).value }
    }
}

impl<T: Send + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}
