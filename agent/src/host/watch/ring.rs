//! The ring of one perf event, mapped. Records are copied out and their space given back at once:
//! what they tell is only a hint where to look.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Data pages of a ring: 64 KiB hold some 450 mappings.
const PAGES: usize = 16;
/// Places of `data_head` and `data_tail` in `struct perf_event_mmap_page`.
const HEAD: usize = 1024;
const TAIL: usize = 1032;
/// Bytes of `struct perf_event_header`.
pub const HEADER: usize = 8;

/// A ring and its event.
pub struct Ring {
    base: NonNull<u8>,
    page: usize,
    event: OwnedFd,
}

// SAFETY: the mapping belongs to this value alone and may be used from any one thread.
unsafe impl Send for Ring {}

impl Ring {
    pub fn map(event: OwnedFd) -> io::Result<Self> {
        // SAFETY: a query without side effects.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        // SAFETY: a new mapping of a descriptor that we own.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                (1 + PAGES) * page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { base, page, event })
    }

    pub fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    pub fn event(&self) -> &OwnedFd {
        &self.event
    }

    fn word(&self, place: usize) -> &AtomicU64 {
        // SAFETY: an aligned word inside the first page, which is mapped as long as `self`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(place).cast()) }
    }

    /// Appends all records that are there to `into`, whole and in order.
    pub fn drain(&mut self, into: &mut Vec<u8>) {
        let size = PAGES * self.page;
        let head = self.word(HEAD).load(Ordering::Acquire);
        let tail = self.word(TAIL).load(Ordering::Relaxed);
        let length = (head.wrapping_sub(tail) as usize).min(size);
        let from = tail as usize % size;
        let first = length.min(size - from);
        // SAFETY: the data begins behind the first page and has `size` bytes; `from + first` and
        // `length - first` stay within it. The kernel does not write between tail and head.
        unsafe {
            let data = self.base.as_ptr().add(self.page);
            into.extend_from_slice(std::slice::from_raw_parts(data.add(from), first));
            into.extend_from_slice(std::slice::from_raw_parts(data, length - first));
        }
        self.word(TAIL).store(head, Ordering::Release);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length.
        unsafe { libc::munmap(self.base.as_ptr().cast(), (1 + PAGES) * self.page) };
    }
}
