//! `race`: one address freed and given out again, from thread to thread, as fast as possible.
//!
//! Every thread allocates blocks of a size of its own, so that books that mix two lives of an address
//! up come out with wrong bytes. Every second block is freed by another thread than allocated it.
//! Nothing stays. The peak is reached before the threads start, by one block as large as all that
//! they can ever hold together, so it is always the same.

use std::sync::{
    Barrier,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use anyhow::anyhow;

use super::runtime::{Address, Runtime};

const MIB: usize = 1 << 20;

const STEP_BYTES: usize = 4096;
/// Addresses are whole granules of 2 MiB, so this tells them apart.
const GRANULE_SHIFT: u32 = 21;
const REMEMBERED: usize = 4096;

pub fn run(threads: usize, iterations: u64) -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    runtime.set_device(0)?;
    reach_peak(&runtime, threads)?;
    let race = Race {
        runtime: &runtime,
        handed_over: AtomicUsize::new(0),
        owners: (0..REMEMBERED).map(|_| AtomicU64::new(0)).collect(),
        reused: AtomicU64::new(0),
    };
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (race, barrier) = (&race, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    race.run_thread(thread, iterations)
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
    let left = race.handed_over.load(Ordering::Relaxed);
    if left != 0 {
        runtime.free(Address(left));
    }
    let reused = race.reused.load(Ordering::Relaxed);
    println!("{reused} addresses went from one thread to another");
    runtime.report_failed_frees();
    Ok(())
}

#[inline(never)]
fn reach_peak(runtime: &Runtime, threads: usize) -> anyhow::Result<()> {
    let peak = runtime.malloc(2 * threads * MIB)?;
    runtime.free(peak);
    Ok(())
}

struct Race<'a> {
    runtime: &'a Runtime,
    /// A block that waits for any thread to free it; 0 for none.
    handed_over: AtomicUsize,
    /// Who had an address last, by its granule: the granule's number and the thread's.
    owners: Vec<AtomicU64>,
    reused: AtomicU64,
}

impl Race<'_> {
    fn run_thread(&self, thread: usize, iterations: u64) -> anyhow::Result<()> {
        let bytes = (thread + 1) * STEP_BYTES;
        for iteration in 0..iterations {
            let block = self.allocate(bytes)?;
            self.note(block, thread);
            if iteration % 2 == 0 {
                self.free_own(block);
            } else {
                let earlier = self.handed_over.swap(block.0, Ordering::AcqRel);
                if earlier != 0 {
                    self.free_anothers(Address(earlier));
                }
            }
        }
        Ok(())
    }

    fn note(&self, block: Address, thread: usize) {
        let granule = (block.0 >> GRANULE_SHIFT) as u64;
        let mark = granule << 16 | (thread as u64 + 1);
        let place = &self.owners[granule as usize % REMEMBERED];
        let before = place.swap(mark, Ordering::Relaxed);
        if before >> 16 == granule && before != mark {
            self.reused.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline(never)]
    fn allocate(&self, bytes: usize) -> anyhow::Result<Address> {
        self.runtime.malloc(bytes)
    }

    #[inline(never)]
    fn free_own(&self, block: Address) {
        self.runtime.free(block);
    }

    #[inline(never)]
    fn free_anothers(&self, block: Address) {
        self.runtime.free(block);
    }
}
