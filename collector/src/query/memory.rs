//! Memory of queries: a share for each, a bound for all together, and a count of the most that
//! each one held.
//!
//! Invariants:
//! - the sum over all queries stays within the bound of all, but for what operators take without
//!   asking (DataFusion's `grow`), which is small;
//! - one query stays within its share, so a query that wants everything fails (or spills) while
//!   others still find memory;
//! - within a query, operators that can spill divide what is left equally (`FairSpillPool`);
//! - a merge of what a sort has spilled takes a part only. The engine lets the first one take all
//!   that there is, and the sort of the next partition finds nothing: with less, it merges fewer
//!   runs at a time.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{
    FairSpillPool, MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation, TrackConsumersPool,
};

/// Consumers named in an error: who holds the memory.
const NAMED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(2);

/// How the engine names a merge of spilled runs, before the number of its partition.
const MERGE: &str = "ExternalSorterMerge";
/// What a merge may have however small the share is: the engine sets 10 MB aside for each sort.
const LEAST_MERGE: usize = 12 << 20;

/// The memory of all queries together.
#[derive(Debug)]
pub struct AllMemory {
    limit: usize,
    held: AtomicUsize,
}

impl AllMemory {
    /// A bound in bytes.
    pub fn new(limit: usize) -> Arc<AllMemory> {
        Arc::new(AllMemory {
            limit,
            held: AtomicUsize::new(0),
        })
    }

    /// Bytes reserved now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let within = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, within)
            .is_ok()
    }
}

/// The memory of one query: a DataFusion pool.
pub struct QueryMemory {
    own: TrackConsumersPool<FairSpillPool>,
    share: usize,
    /// What one merge of spilled runs may have.
    merge: usize,
    all: Arc<AllMemory>,
    held: AtomicUsize,
    peak: AtomicUsize,
}

impl QueryMemory {
    /// A share of all memory, in bytes.
    pub fn new(share: usize, all: &Arc<AllMemory>) -> Arc<QueryMemory> {
        let share = share.min(all.limit);
        Arc::new(QueryMemory {
            own: TrackConsumersPool::new(FairSpillPool::new(share), NAMED),
            share,
            // Every partition sorts and merges at the same time, and there is one for each processor.
            merge: (share / 2 / processors()).max(LEAST_MERGE),
            all: Arc::clone(all),
            held: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        })
    }

    /// The most that was reserved at a time, in bytes.
    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) {
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(held, Ordering::Relaxed);
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

impl MemoryPool for QueryMemory {
    fn name(&self) -> &str {
        "query"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.own.register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        self.own.unregister(consumer);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.own.grow(reservation, additional);
        self.all.held.fetch_add(additional, Ordering::Relaxed);
        self.count(additional);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.own.shrink(reservation, shrink);
        self.all.held.fetch_sub(shrink, Ordering::Relaxed);
        self.held.fetch_sub(shrink, Ordering::Relaxed);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let consumer = reservation.consumer().name();
        if consumer.starts_with(MERGE) && reservation.size() + additional > self.merge {
            return Err(DataFusionError::ResourcesExhausted(format!(
                "{consumer} holds {} bytes, wanted {additional} more, and a merge may have {}",
                reservation.size(),
                self.merge
            )));
        }
        self.own.try_grow(reservation, additional)?;
        if !self.all.take(additional) {
            self.own.shrink(reservation, additional);
            return Err(DataFusionError::ResourcesExhausted(format!(
                "{} wanted {additional} bytes more, and all queries together hold {} of {}",
                reservation.consumer().name(),
                self.all.held(),
                self.all.limit,
            )));
        }
        self.count(additional);
        Ok(())
    }

    fn reserved(&self) -> usize {
        self.own.reserved()
    }

    fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit::Finite(self.share)
    }
}

impl fmt::Debug for QueryMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueryMemory")
            .field("share", &self.share)
            .field("held", &self.held)
            .field("peak", &self.peak)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for QueryMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a query's share of {} bytes", self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reservation(memory: &Arc<QueryMemory>, name: &str) -> MemoryReservation {
        let pool: Arc<dyn MemoryPool> = Arc::clone(memory) as _;
        MemoryConsumer::new(name).register(&pool)
    }

    #[test]
    fn a_share_and_the_whole_are_bounds() {
        let all = AllMemory::new(100);
        let (one, two) = (QueryMemory::new(60, &all), QueryMemory::new(60, &all));
        let a = reservation(&one, "a");
        let b = reservation(&two, "b");
        a.try_grow(60).unwrap();
        let error = a.try_grow(1).unwrap_err().to_string();
        assert!(error.contains("60"), "{error}");
        b.try_grow(40).unwrap();
        let error = b.try_grow(1).unwrap_err().to_string();
        assert!(error.contains("hold 100 of 100"), "{error}");
        // What was refused is not held, and what is freed can be had by others.
        a.shrink(30);
        b.try_grow(20).unwrap();
        assert_eq!((all.held(), two.reserved()), (90, 60));
        drop((a, b));
        assert_eq!(all.held(), 0);
        assert_eq!((one.peak(), two.peak()), (60, 60));
    }

    #[test]
    fn a_merge_takes_a_part_of_the_share() {
        let share = 64 << 20;
        let query = QueryMemory::new(share, &AllMemory::new(share));
        let merge = reservation(&query, "ExternalSorterMerge[0]");
        while merge.try_grow(1 << 20).is_ok() {}
        let taken = merge.size();
        assert!((LEAST_MERGE..=share / 2).contains(&taken), "{taken}");
        // The rest is for the sorts of the other partitions.
        let sort = reservation(&query, "ExternalSorter[1]");
        sort.try_grow(share - taken).unwrap();
    }
}
