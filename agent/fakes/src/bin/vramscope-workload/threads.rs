//! `threads`: many threads allocate and free at once, and free each other's blocks.
//!
//! Everything is freed at the end. What a thread holds at once is bounded by [`HELD_AT_ONCE`] blocks
//! of at most [`MAX_BYTES`], and before the threads start one thread takes more than all of them can
//! ever hold together: so the peak is that of the first phase, whatever the threads' interleaving.
//!
//! Sizes are multiples of 4 KiB from 4 KiB to 1 MiB, in an order that the seed chooses; every 256
//! allocations of a thread use each size once, so their sum is the same for every seed.

use std::{
    collections::VecDeque,
    ffi::c_int,
    sync::{Barrier, Mutex, PoisonError},
};

use anyhow::anyhow;

use super::runtime::{Address, Runtime};

const STEP_BYTES: usize = 4096;
const SIZES: u64 = 256;
const MAX_BYTES: usize = STEP_BYTES * SIZES as usize;

/// Blocks that a thread keeps before it frees the oldest.
const KEPT: usize = 4;
/// A thread's kept blocks, one in hand, and one that waits with its neighbour.
const HELD_AT_ONCE: usize = KEPT + 2;
/// More than [`HELD_AT_ONCE`]: what the first phase takes for each thread.
const RESERVED_A_THREAD: usize = HELD_AT_ONCE + 2;
/// Every so many-th block is handed to the neighbour, who frees it.
const HAND_OVER_EVERY: u64 = 3;

/// A place where a thread leaves a block for its neighbour.
type Slot = Mutex<Option<Address>>;

pub fn run(threads: usize, iterations: u64, seed: u64) -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let devices = runtime.device_count()?.min(2);
    for device in 0..devices {
        runtime.set_device(device)?;
        reach_peak(&runtime, threads)?;
    }
    let slots: Vec<Slot> = (0..threads).map(|_| Mutex::new(None)).collect();
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let worker = Worker {
                    runtime: &runtime,
                    device: thread as c_int % devices,
                    own: &slots[thread],
                    neighbour: &slots[(thread + 1) % threads],
                    sizes: Sizes::new(seed, thread as u64),
                };
                let barrier = &barrier;
                scope.spawn(move || {
                    let outcome = worker.allocate_and_free(iterations);
                    barrier.wait();
                    outcome
                })
            })
            .collect();
        for worker in workers {
            worker
                .join()
                .map_err(|_| anyhow!("a worker thread panicked"))??;
        }
        anyhow::Ok(())
    })?;
    for slot in &slots {
        free_left_over(&runtime, slot);
    }
    runtime.report_failed_frees();
    Ok(())
}

#[inline(never)]
fn reach_peak(runtime: &Runtime, threads: usize) -> anyhow::Result<()> {
    let peak = runtime.malloc(threads * RESERVED_A_THREAD * MAX_BYTES)?;
    runtime.free(peak);
    Ok(())
}

#[inline(never)]
fn free_left_over(runtime: &Runtime, slot: &Slot) {
    if let Some(block) = take(slot) {
        runtime.free(block);
    }
}

fn take(slot: &Slot) -> Option<Address> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn leave(slot: &Slot, block: Address) -> Option<Address> {
    slot.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .replace(block)
}

struct Worker<'a> {
    runtime: &'a Runtime,
    device: c_int,
    own: &'a Slot,
    neighbour: &'a Slot,
    sizes: Sizes,
}

impl Worker<'_> {
    fn allocate_and_free(mut self, iterations: u64) -> anyhow::Result<()> {
        self.runtime.set_device(self.device)?;
        let mut kept = VecDeque::with_capacity(KEPT + 1);
        for iteration in 0..iterations {
            let block = self.allocate_block()?;
            if iteration % HAND_OVER_EVERY == 0 {
                if let Some(earlier) = leave(self.neighbour, block) {
                    self.free_own_block(earlier);
                }
            } else {
                kept.push_back(block);
                if kept.len() > KEPT
                    && let Some(oldest) = kept.pop_front()
                {
                    self.free_own_block(oldest);
                }
            }
            if let Some(block) = take(self.own) {
                self.free_neighbours_block(block);
            }
        }
        for block in kept {
            self.free_own_block(block);
        }
        Ok(())
    }

    #[inline(never)]
    fn allocate_block(&mut self) -> anyhow::Result<Address> {
        self.runtime.malloc(self.sizes.next_bytes())
    }

    #[inline(never)]
    fn free_own_block(&self, block: Address) {
        self.runtime.free(block);
    }

    #[inline(never)]
    fn free_neighbours_block(&self, block: Address) {
        self.runtime.free(block);
    }
}

/// A linear congruential generator modulo 256 with full period (Hull and Dobell: the multiplier
/// minus one is divisible by four and the increment is odd), so it gives every size once in a period.
struct Sizes {
    state: u64,
    increment: u64,
}

impl Sizes {
    fn new(seed: u64, thread: u64) -> Self {
        Self {
            state: seed.wrapping_add(thread.wrapping_mul(37)) % SIZES,
            increment: (seed.wrapping_mul(2) | 1) % SIZES,
        }
    }

    fn next_bytes(&mut self) -> usize {
        self.state = (self.state * 5 + self.increment) % SIZES;
        (self.state as usize + 1) * STEP_BYTES
    }
}
