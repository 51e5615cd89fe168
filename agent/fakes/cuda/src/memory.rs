//! The address space behind the pretended memory.
//!
//! Device memory is address space that nobody may touch (PROT_NONE): it takes no host memory, and a
//! program that reads device memory from the host faults, as it should. It begins at and takes whole
//! granules of 2 MiB. Pinned memory is real and resident.

use vramscope_fakes::{
    card::GRANULE_BYTES,
    ledger::{Block, Kind},
};

const PAGE_BYTES: usize = 4096;

/// Reserves device memory; `None` if the address space has no room.
pub fn reserve(bytes: usize) -> Option<usize> {
    let length = granules(bytes)?;
    let mapped = length.checked_add(GRANULE_BYTES)?;
    let start = map(mapped, libc::PROT_NONE, libc::MAP_NORESERVE)?;
    // One granule more than needed was mapped: what lies before and after the aligned part goes back.
    let aligned = start.next_multiple_of(GRANULE_BYTES);
    let before = aligned - start;
    unmap(start, before);
    unmap(aligned + length, GRANULE_BYTES - before);
    Some(aligned)
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

/// Locks pages into memory; false if the process's limits forbid that.
pub fn pin(address: usize, bytes: usize) -> bool {
    // SAFETY: mlock reads no memory and fails cleanly on a range that is not mapped.
    unsafe { libc::mlock(address as *const _, bytes) == 0 }
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

/// Gives a freed block's address space back, or unlocks what was only registered.
pub fn release(address: usize, block: Block) {
    let bytes = block.bytes as usize;
    match block.kind {
        // Both sums succeeded when the block was made.
        Kind::Device => unmap(address, bytes.next_multiple_of(GRANULE_BYTES)),
        Kind::PinnedHost => unmap(address, bytes.next_multiple_of(PAGE_BYTES)),
        Kind::RegisteredHost => {
            // SAFETY: munlock touches no memory. Its failure leaves pages locked, no more.
            unsafe { libc::munlock(address as *const _, bytes) };
        }
    }
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
        // SAFETY: only ranges that `map` returned, or parts of them, get here.
        unsafe { libc::munmap(address as *mut _, length) };
    }
}
