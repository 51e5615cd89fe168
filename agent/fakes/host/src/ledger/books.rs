//! Keeps the totals and puts them into the ledger's file after every change.

use std::path::PathBuf;

use super::{
    FOLDER_VARIABLE, Kind, Layer, MISCOUNT_VARIABLE, Totals,
    file::{Content, Mapping, NO_DEVICE, PoolTotals},
};

/// The totals of one layer in one process. Not shared: its owner's lock also guards the
/// allocation map, so that the books and the map never disagree.
pub(super) struct Books {
    layer: Layer,
    content: Content,
    backing: Backing,
    /// The planted fault: whether the next successful allocation counts twice.
    miscount: bool,
}

enum Backing {
    /// The file is made on first use, not before: a process that only loads the library leaves none.
    Unopened(Option<PathBuf>),
    Memory,
    File(Mapping),
}

impl Books {
    pub(super) fn new(layer: Layer) -> Self {
        let folder = std::env::var_os(FOLDER_VARIABLE)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from);
        let miscount = layer == Layer::Driver
            && std::env::var_os(MISCOUNT_VARIABLE).is_some_and(|value| value == "1");
        Self {
            layer,
            content: Content::default(),
            backing: Backing::Unopened(folder),
            miscount,
        }
    }

    /// Makes the file if that has not been done. A folder that cannot be written is reported on
    /// standard error, once: the program goes on, without a ledger.
    pub(super) fn open(&mut self) {
        let Backing::Unopened(folder) = &mut self.backing else {
            return;
        };
        let Some(folder) = folder.take() else {
            self.backing = Backing::Memory;
            return;
        };
        self.backing = match Mapping::create(&folder, self.layer, &mut self.content) {
            Ok(mapping) => Backing::File(mapping),
            Err(error) => {
                let folder = folder.display();
                eprintln!("stand-in: failed to create a ledger in {folder}: {error}");
                Backing::Memory
            }
        };
    }

    pub(super) fn allocated(&mut self, kind: Kind, device: Option<u32>, bytes: u64) {
        let times = if std::mem::take(&mut self.miscount) {
            2
        } else {
            1
        };
        self.update(kind, device, |totals| {
            totals.allocations += times;
            totals.allocated_bytes += times * bytes;
            totals.live_count += times;
            totals.live_bytes += times * bytes;
            totals.peak_bytes = totals.peak_bytes.max(totals.live_bytes);
        });
    }

    pub(super) fn allocation_failed(&mut self, kind: Kind, device: Option<u32>) {
        self.update(kind, device, |totals| totals.failed_allocations += 1);
    }

    pub(super) fn freed(&mut self, kind: Kind, device: Option<u32>, bytes: u64) {
        self.update(kind, device, |totals| {
            totals.frees += 1;
            totals.freed_bytes += bytes;
            totals.live_count -= 1;
            totals.live_bytes -= bytes;
        });
    }

    /// Takes a [`Books::freed`] back, together with the failure that makes that necessary.
    pub(super) fn free_undone(&mut self, kind: Kind, device: Option<u32>, bytes: u64) {
        self.update(kind, device, |totals| {
            totals.frees -= 1;
            totals.freed_bytes -= bytes;
            totals.live_count += 1;
            totals.live_bytes += bytes;
            totals.peak_bytes = totals.peak_bytes.max(totals.live_bytes);
            totals.failed_frees += 1;
        });
    }

    pub(super) fn free_failed(&mut self, kind: Kind, device: Option<u32>) {
        self.update(kind, device, |totals| totals.failed_frees += 1);
    }

    pub(super) fn pool_grew(&mut self, device: u32, bytes: u64) {
        self.update_pools(device, |pools| {
            pools.reserved += bytes;
            pools.peak = pools.peak.max(pools.reserved);
        });
    }

    pub(super) fn pool_shrank(&mut self, device: u32, bytes: u64) {
        self.update_pools(device, |pools| pools.reserved -= bytes);
    }

    fn update_pools(&mut self, device: u32, change: impl FnOnce(&mut PoolTotals)) {
        self.open();
        change(&mut self.content.pools[device as usize]);
        if let Backing::File(mapping) = &mut self.backing {
            mapping.publish_pools(&self.content);
        }
    }

    fn update(&mut self, kind: Kind, device: Option<u32>, change: impl FnOnce(&mut Totals)) {
        self.open();
        let row = device.map_or(NO_DEVICE, |device| device as usize);
        change(&mut self.content.rows[row][kind as usize]);
        if let Backing::File(mapping) = &mut self.backing {
            mapping.publish(&self.content, row, kind);
        }
    }

    #[cfg(test)]
    pub(super) fn totals(&self, kind: Kind, device: u32) -> Totals {
        self.content.rows[device as usize][kind as usize]
    }
}
