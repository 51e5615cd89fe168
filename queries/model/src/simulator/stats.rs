//! What `torch.cuda.memory_stats()` counts.

use crate::map::PoolSize;

/// One counter. Blocks or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stat {
    pub current: u64,
    pub peak: u64,
    /// All increases.
    pub allocated: u64,
    /// All decreases.
    pub freed: u64,
}

impl Stat {
    pub(super) fn increase(&mut self, amount: u64) {
        self.current += amount;
        self.allocated = self.allocated.saturating_add(amount);
        self.peak = self.peak.max(self.current);
    }

    pub(super) fn decrease(&mut self, amount: u64) {
        self.current -= amount;
        self.freed = self.freed.saturating_add(amount);
    }

    fn entries(&self, name: &str, into: &mut Vec<(String, u64)>) {
        for (part, value) in [
            ("current", self.current),
            ("peak", self.peak),
            ("allocated", self.allocated),
            ("freed", self.freed),
        ] {
            into.push((format!("{name}.{part}"), value));
        }
    }
}

/// A counter over all pools, and over each sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStat {
    pub all: Stat,
    pub small: Stat,
    pub large: Stat,
}

impl PoolStat {
    fn of(&mut self, size: PoolSize) -> &mut Stat {
        match size {
            PoolSize::Small => &mut self.small,
            PoolSize::Large => &mut self.large,
        }
    }

    pub(super) fn increase(&mut self, size: PoolSize, amount: u64) {
        self.all.increase(amount);
        self.of(size).increase(amount);
    }

    pub(super) fn decrease(&mut self, size: PoolSize, amount: u64) {
        self.all.decrease(amount);
        self.of(size).decrease(amount);
    }

    /// Takes `before` away and adds `after`, as one step: PyTorch counts only the difference.
    pub(super) fn change(&mut self, size: PoolSize, before: u64, after: u64) {
        if after > before {
            self.increase(size, after - before);
        } else if before > after {
            self.decrease(size, before - after);
        }
    }
}

/// All counters, by PyTorch's names. Peaks are over events, not over samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Blocks that the program holds.
    pub allocation: PoolStat,
    /// Segments taken whole from the driver; expandable ones do not count.
    pub segment: PoolStat,
    /// Blocks held or pending.
    pub active: PoolStat,
    /// Free blocks that are part of a segment in use; not of expandable segments.
    pub inactive_split: PoolStat,
    pub allocated_bytes: PoolStat,
    pub reserved_bytes: PoolStat,
    pub active_bytes: PoolStat,
    pub inactive_split_bytes: PoolStat,
    pub requested_bytes: PoolStat,
    /// Requests that succeeded or failed only after a flush of the cache.
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    pub num_sync_all_streams: u64,
    pub num_device_alloc: u64,
    pub num_device_free: u64,
    /// Blocks of at least `max_split_size`.
    pub oversize_allocations: Stat,
    pub oversize_segments: Stat,
}

impl Stats {
    /// Every counter under its key in `torch.cuda.memory_stats()`.
    pub fn entries(&self) -> Vec<(String, u64)> {
        let mut entries = Vec::new();
        for (name, stat) in [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ] {
            stat.all.entries(&format!("{name}.all"), &mut entries);
            stat.small
                .entries(&format!("{name}.small_pool"), &mut entries);
            stat.large
                .entries(&format!("{name}.large_pool"), &mut entries);
        }
        self.oversize_allocations
            .entries("oversize_allocations", &mut entries);
        self.oversize_segments
            .entries("oversize_segments", &mut entries);
        for (name, count) in [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
        ] {
            entries.push((name.to_string(), count));
        }
        entries
    }
}
