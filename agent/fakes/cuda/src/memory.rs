//! The address space behind the pretended memory.
//!
//! Device memory is address space that nobody may touch (PROT_NONE): it takes no host memory, and a
//! program that reads device memory from the host faults, as it should. All of it comes from one
//! mapping, made at the first use, in whole granules of 2 MiB, the lowest free one first: an
//! allocation costs no system call, and a freed address is given out again as soon as it can be.
//! Pinned and managed memory are real.
//!
//! What programs copy to the card lies in a second mapping of the same length, made at the first
//! copy; a page of it takes memory once it is written, and none any more once its granule is freed.

use std::collections::BTreeSet;

use vramscope_fake_host::{card::GRANULE_BYTES, ranges::Ranges};

const PAGE_BYTES: usize = 4096;

/// Every live block takes a granule or more, so this bounds their number, to two millions. Less is
/// taken where a limit on address space forbids so much.
const LARGEST_BYTES: usize = 4 << 40;
const SMALLEST_BYTES: usize = 16 << 30;

/// Address space for memory that has no pages.
#[derive(Default)]
pub struct AddressSpace {
    space: Option<Space>,
}

struct Space {
    free: Ranges,
    start: usize,
    bytes: usize,
    /// Where the content of `start` lies, once there is any.
    content: Option<usize>,
    /// Granules whose content may have been touched, by their address.
    touched: BTreeSet<usize>,
}

impl AddressSpace {
    /// Takes whole granules; `None` if there is no room.
    pub fn take(&mut self, bytes: usize, alignment: usize) -> Option<usize> {
        let length = granules(bytes)?;
        let free = &mut self.space()?.free;
        free.take(length, alignment.max(GRANULE_BYTES))
    }

    /// Takes whole granules at a wanted place; false if that is not free.
    pub fn take_at(&mut self, place: usize, bytes: usize) -> bool {
        let length = granules(bytes).filter(|_| place.is_multiple_of(GRANULE_BYTES));
        match (length, self.space()) {
            (Some(length), Some(space)) => space.free.take_at(place, length),
            _ => false,
        }
    }

    /// Gives back what was taken with the same number of bytes.
    pub fn give(&mut self, start: usize, bytes: usize) {
        if let (Some(space), Some(length)) = (&mut self.space, granules(bytes)) {
            space.forget(start, length);
            space.free.give(start, length);
        }
    }

    /// Whether an address is one of the card's.
    pub fn holds(&self, address: usize) -> bool {
        let space = self.space.as_ref();
        space.is_some_and(|space| (space.start..space.start + space.bytes).contains(&address))
    }

    /// Where the content of a range of the card lies; `None` if there is no room for it.
    pub fn content(&mut self, address: usize, bytes: usize) -> Option<usize> {
        let space = self.space.as_mut()?;
        let content = match space.content {
            Some(content) => content,
            None => {
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                // A granule more, so that both mappings are aligned alike.
                let length = space.bytes.checked_add(GRANULE_BYTES)?;
                let place = map(length, protection, libc::MAP_NORESERVE)?;
                *space.content.insert(place.next_multiple_of(GRANULE_BYTES))
            }
        };
        let end = address.checked_add(bytes)?;
        if address < space.start || end > space.start + space.bytes {
            return None;
        }
        let first = address - address % GRANULE_BYTES;
        space.touched.extend((first..end).step_by(GRANULE_BYTES));
        Some(content + (address - space.start))
    }

    fn space(&mut self) -> Option<&mut Space> {
        if self.space.is_none() {
            self.space = reserve();
        }
        self.space.as_mut()
    }
}

impl Space {
    /// Drops the content of a range of whole granules: whoever gets it next reads zeros.
    fn forget(&mut self, start: usize, bytes: usize) {
        let Some(content) = self.content else { return };
        while let Some(granule) = self.touched.range(start..start + bytes).next().copied() {
            self.touched.remove(&granule);
            let place = content + (granule - self.start);
            // SAFETY: a granule of the content's own mapping, which nobody else points into.
            unsafe { libc::madvise(place as *mut _, GRANULE_BYTES, libc::MADV_DONTNEED) };
        }
    }
}

fn reserve() -> Option<Space> {
    let mut bytes = LARGEST_BYTES;
    while bytes >= SMALLEST_BYTES {
        if let Some(start) = map(bytes, libc::PROT_NONE, libc::MAP_NORESERVE) {
            let aligned = start.next_multiple_of(GRANULE_BYTES);
            let usable = (bytes - (aligned - start)) / GRANULE_BYTES * GRANULE_BYTES;
            return Some(Space {
                free: Ranges::whole(aligned, usable),
                start: aligned,
                bytes: usable,
                content: None,
                touched: BTreeSet::new(),
            });
        }
        bytes /= 4;
    }
    None
}

/// Maps memory that host and card share, resident as it is touched.
pub fn map_managed(bytes: usize) -> Option<usize> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    map(granules(bytes)?, protection, libc::MAP_NORESERVE)
}

pub fn unmap_managed(address: usize, bytes: usize) {
    // The sum succeeded when the block was made.
    unmap(address, bytes.next_multiple_of(GRANULE_BYTES));
}

/// Maps host memory and makes it resident; `None` if there is not enough.
pub fn pin_new(bytes: usize) -> Option<usize> {
    // A request beyond half of the machine's memory is refused: filling it could bring the machine down.
    if bytes > physical_bytes() / 2 {
        return None;
    }
    let length = bytes.checked_next_multiple_of(PAGE_BYTES)?;
    let start = map(length, libc::PROT_READ | libc::PROT_WRITE, 0)?;
    if !pin(start, bytes) {
        for page in (start..start + length).step_by(PAGE_BYTES) {
            // SAFETY: the page lies in the mapping just made, which nobody else knows.
            unsafe { (page as *mut u8).write_volatile(0) };
        }
    }
    Some(start)
}

pub fn unmap_pinned(address: usize, bytes: usize) {
    unmap(address, bytes.next_multiple_of(PAGE_BYTES));
}

/// Locks pages into memory; false if the process's limits forbid that.
pub fn pin(address: usize, bytes: usize) -> bool {
    // SAFETY: mlock reads no memory and fails cleanly on a range that is not mapped.
    unsafe { libc::mlock(address as *const _, bytes) == 0 }
}

pub fn unpin(address: usize, bytes: usize) {
    // SAFETY: munlock touches no memory. Its failure leaves pages locked, no more.
    unsafe { libc::munlock(address as *const _, bytes) };
}

/// Whether every page of a range is mapped.
pub fn exists(address: usize, bytes: usize) -> bool {
    let start = address - address % PAGE_BYTES;
    // One byte of answer a page, fetched in pieces, so that a huge range needs no huge answer.
    let mut residency = [0u8; 1024];
    let Some(end) = address.checked_add(bytes) else {
        return false;
    };
    (start..end)
        .step_by(PAGE_BYTES * residency.len())
        .all(|piece| {
            let length = (end - piece).min(PAGE_BYTES * residency.len());
            // SAFETY: mincore writes one byte for each page of at most 1024 pages.
            unsafe { libc::mincore(piece as *mut _, length, residency.as_mut_ptr()) == 0 }
        })
}

fn granules(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(GRANULE_BYTES)
}

fn physical_bytes() -> usize {
    // SAFETY: sysconf takes plain numbers.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    usize::try_from(pages).unwrap_or(0) * PAGE_BYTES
}

fn map(length: usize, protection: libc::c_int, flags: libc::c_int) -> Option<usize> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing else.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
            -1,
            0,
        )
    };
    (start != libc::MAP_FAILED).then_some(start as usize)
}

fn unmap(address: usize, length: usize) {
    if length > 0 {
        // SAFETY: only ranges that `map` returned get here.
        unsafe { libc::munmap(address as *mut _, length) };
    }
}
