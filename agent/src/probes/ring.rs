//! Reads the BPF ring buffer without giving its space back until the rows made from it are
//! durable. aya's own reader frees each record as soon as it was read, which would lose what is
//! in memory when the agent is killed.
//!
//! Invariants:
//! - `position` runs ahead of the kernel's consumer position, which moves only in `release`;
//! - positions are bytes since the ring was made and never go back, so a position in the journal
//!   still names the same record after a restart, as long as the ring is the same one.
//!
//! The kernel wakes a reader by itself only when its consumer position has caught up, which ours
//! rarely has. So the kernel side forces a wake-up where haste is needed (a program starts, a
//! thread's first call), and the agent looks on a timer besides. The wait is edge-triggered: the
//! ring is never empty in the kernel's eyes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Set while the kernel side still writes the record.
const BUSY: u32 = 1 << 31;
/// Set if the kernel side gave the record up.
const DISCARDED: u32 = 1 << 30;
/// Length and offset words before each record.
const HEADER: u64 = 8;

/// See [`Ring::peek`].
pub(super) enum Peeked<'a> {
    /// The kernel side still writes it.
    Busy,
    Discarded,
    Record(&'a [u8]),
}

/// A reader of one ring.
pub struct Ring {
    consumer: NonNull<libc::c_void>,
    producer: NonNull<libc::c_void>,
    page: usize,
    size: u64,
    position: u64,
    wakeups: OwnedFd,
    /// Kept open: a closed file descriptor leaves the wait.
    _ring: OwnedFd,
}

// SAFETY: the mappings belong to this value alone and may be used from any one thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the ring of `size` bytes (a power of two). Reading starts where the kernel's
    /// consumer position stands.
    pub fn open(fd: BorrowedFd<'_>, size: u32) -> io::Result<Self> {
        // SAFETY: a query without side effects.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let map = |length: usize, protection: i32, offset: usize| {
            // SAFETY: a new mapping of a file descriptor that the caller holds.
            let address = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    length,
                    protection,
                    libc::MAP_SHARED,
                    fd.as_raw_fd(),
                    offset as libc::off_t,
                )
            };
            if address == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            NonNull::new(address).ok_or_else(io::Error::last_os_error)
        };
        let consumer = map(page, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        // The kernel maps the data twice in a row, so that no record is split at the end.
        let producer = match map(page + 2 * size as usize, libc::PROT_READ, page) {
            Ok(producer) => producer,
            Err(error) => {
                // SAFETY: mapped just above with this length.
                unsafe { libc::munmap(consumer.as_ptr(), page) };
                return Err(error);
            }
        };
        let own = fd
            .try_clone_to_owned()
            .and_then(|ring| Ok((wakeups(ring.as_fd())?, ring)));
        let (wakeups, ring) = match own {
            Ok(own) => own,
            Err(error) => {
                // SAFETY: both mapped just above with these lengths.
                unsafe {
                    libc::munmap(consumer.as_ptr(), page);
                    libc::munmap(producer.as_ptr(), page + 2 * size as usize);
                }
                return Err(error);
            }
        };
        let mut ring = Self {
            consumer,
            producer,
            page,
            size: u64::from(size),
            position: 0,
            wakeups,
            _ring: ring,
        };
        ring.position = ring.consumer_word().load(Ordering::Acquire);
        Ok(ring)
    }

    fn consumer_word(&self) -> &AtomicU64 {
        // SAFETY: the first word of the consumer page, aligned, mapped as long as `self`.
        unsafe { AtomicU64::from_ptr(self.consumer.as_ptr().cast()) }
    }

    fn producer_position(&self) -> u64 {
        let word = self.producer.as_ptr().cast::<AtomicU64>();
        // SAFETY: the first word of the producer page, aligned, mapped as long as `self`; only
        // loads are made, the page is read-only.
        unsafe { (*word).load(Ordering::Acquire) }
    }

    /// The position behind the last record that was read.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Goes on from a position of an earlier run on the same ring. Where the kernel's consumer
    /// position is further on, there was nothing of interest in between. False for a position
    /// that this ring has not reached.
    pub fn resume(&mut self, position: u64) -> bool {
        let reached = position <= self.producer_position();
        if reached {
            self.position = self.position.max(position);
        }
        reached
    }

    /// Reads up to `limit` finished records.
    pub fn read(&mut self, limit: usize, mut take: impl FnMut(&[u8])) -> usize {
        let end = self.producer_position();
        let mut taken = 0;
        while self.position < end && taken < limit {
            let offset = (self.position & (self.size - 1)) as usize;
            // SAFETY: offset < size, so header and record lie inside the doubled data mapping.
            let header = unsafe { self.producer.as_ptr().byte_add(self.page + offset) };
            // SAFETY: records are 8-byte aligned; the kernel side writes this word atomically.
            let length = unsafe { (*header.cast::<AtomicU32>()).load(Ordering::Acquire) };
            if length & BUSY != 0 {
                break;
            }
            let bytes = u64::from(length & !(BUSY | DISCARDED));
            if length & DISCARDED == 0 {
                // SAFETY: the record is finished, and stays until the consumer position passes
                // it, which only `release` does.
                take(unsafe {
                    std::slice::from_raw_parts(
                        header.byte_add(HEADER as usize).cast(),
                        bytes as usize,
                    )
                });
                taken += 1;
            }
            self.position += HEADER + bytes.next_multiple_of(8);
        }
        taken
    }

    /// What lies at a position, and where the next record begins; `None` at the end. It moves
    /// nothing: for a reader that takes records out of their order.
    pub(super) fn peek(&self, position: u64) -> Option<(Peeked<'_>, u64)> {
        if position >= self.producer_position() {
            return None;
        }
        let offset = (position & (self.size - 1)) as usize;
        // SAFETY: as in `read`.
        let header = unsafe { self.producer.as_ptr().byte_add(self.page + offset) };
        // SAFETY: as in `read`. The length is there before the producer position passes it.
        let length = unsafe { (*header.cast::<AtomicU32>()).load(Ordering::Acquire) };
        let bytes = u64::from(length & !(BUSY | DISCARDED));
        let peeked = if length & BUSY != 0 {
            Peeked::Busy
        } else if length & DISCARDED != 0 {
            Peeked::Discarded
        } else {
            // SAFETY: the record is finished, and stays until the consumer position passes it.
            Peeked::Record(unsafe {
                std::slice::from_raw_parts(header.byte_add(HEADER as usize).cast(), bytes as usize)
            })
        };
        Some((peeked, position + HEADER + bytes.next_multiple_of(8)))
    }

    /// Waits until the kernel side asks for haste, or the time is over.
    pub fn wait(&self, limit: Duration) {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        let millis = limit.as_millis().min(1000) as i32;
        // SAFETY: room for one event. An error (a signal) is a short wait.
        unsafe { libc::epoll_wait(self.wakeups.as_raw_fd(), &raw mut event, 1, millis) };
    }

    /// Gives back the space up to `position`: what was read before it is durable.
    pub fn release(&self, position: u64) {
        self.consumer_word().store(position, Ordering::Release);
    }

    /// Share of the ring that holds records, 0..1.
    pub fn fill(&self) -> f64 {
        let used = self.producer_position() - self.consumer_word().load(Ordering::Acquire);
        used as f64 / self.size as f64
    }
}

/// An edge-triggered wait on the ring.
fn wakeups(ring: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: a new file descriptor, or -1.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: made just above, and nobody else has it.
    let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut event = libc::epoll_event {
        events: (libc::EPOLLIN | libc::EPOLLET) as u32,
        u64: 0,
    };
    // SAFETY: both file descriptors are open and the event outlives the call.
    let added =
        unsafe { libc::epoll_ctl(fd, libc::EPOLL_CTL_ADD, ring.as_raw_fd(), &raw mut event) };
    if added < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(epoll)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: both were mapped in `open` with these lengths, and nothing borrows them.
        unsafe {
            libc::munmap(self.consumer.as_ptr(), self.page);
            libc::munmap(self.producer.as_ptr(), self.page + 2 * self.size as usize);
        }
    }
}
