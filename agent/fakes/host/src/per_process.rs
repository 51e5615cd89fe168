//! State that belongs to one process and is not shared with the children it forks.
//!
//! A library's statics are copied by a fork, a lock that another thread held at that moment
//! included. So every access compares the process's generation: a child gets a fresh value and
//! never touches the copied one, not even its lock.
//!
//! The generation lies in a page that the kernel wipes in a forked child (MADV_WIPEONFORK): reading
//! it costs a nanosecond, where asking for the process number costs a system call, several times a
//! traced call. A child of `vfork` shares its parent's memory and so its parent's values, until it
//! executes another program.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

const PAGE_BYTES: usize = 4096;

/// The page that a fork wipes; null until the first use.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
/// The last generation given. A child's copy goes on from its parent's, so theirs differ.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A number that is this process's own among itself, its forebears and its children.
pub fn generation() -> u64 {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        page = match make_page() {
            Some(fresh) => match PAGE.compare_exchange(
                std::ptr::null_mut(),
                fresh,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => fresh,
                // Another thread was first. Its page is used and this one lies idle.
                Err(other) => other,
            },
            // A kernel older than 4.14: the process number serves, at its price.
            // SAFETY: getpid takes no argument and cannot fail.
            None => return unsafe { libc::getpid() } as u64,
        };
    }
    // SAFETY: the page was mapped by make_page and is never unmapped; it is aligned and zeroed.
    let word = unsafe { &*page };
    let seen = word.load(Ordering::Acquire);
    if seen != 0 {
        return seen;
    }
    let fresh = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    match word.compare_exchange(0, fresh, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => fresh,
        Err(other) => other,
    }
}

fn make_page() -> Option<*mut AtomicU64> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing else,
    // and the advice is about that mapping alone.
    unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            PAGE_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED {
            return None;
        }
        if libc::madvise(page, PAGE_BYTES, libc::MADV_WIPEONFORK) != 0 {
            libc::munmap(page, PAGE_BYTES);
            return None;
        }
        Some(page.cast())
    }
}

/// One value a process, made on first use.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Slot<T>>,
}

struct Slot<T> {
    generation: u64,
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
        let generation = generation();
        let seen = self.current.load(Ordering::Acquire);
        // SAFETY: a non-null pointer came from Box::into_raw below and is never freed once stored.
        if let Some(slot) = unsafe { seen.as_ref() }
            && slot.generation == generation
        {
            return &slot.value;
        }
        let fresh = Box::into_raw(Box::new(Slot {
            generation,
            value: make(),
        }));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_has_another_generation_and_the_parent_keeps_its_own() {
        let before = generation();
        assert_eq!(generation(), before);
        // SAFETY: the child only compares two numbers and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let differs = generation() != before && generation() == generation();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!differs)) };
        }
        let mut status = -1;
        // SAFETY: the child just made, and one output.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(generation(), before);
    }
}
