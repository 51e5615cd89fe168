//! What each stack and each device did in one window, so that months of a fleet are answered
//! without raw events.
//!
//! Invariants:
//! - it follows from the ledger's changes alone, in their order, so a journal rebuilds it;
//! - a free is charged to the stack and device that allocated;
//! - live figures are sums over what lives; peaks are over events, not over samples.

use serde::{Deserialize, Serialize};

use super::Allocation;
use crate::Map;
use crate::probes::hooks::{Class, Layer, MemoryKind};

/// Distinct stacks a process's roll-up tells apart. What goes beyond is booked without a stack,
/// and counted as `stacks_full`.
pub const STACKS: usize = 65_536;

/// What one device's memory of one kind is booked under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    pub device: Option<i32>,
    pub kind: MemoryKind,
    pub layer: Layer,
}

/// Sums of one window, and what lives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    pub alloc_bytes: u64,
    pub alloc_count: u64,
    pub free_bytes: u64,
    pub free_count: u64,
    pub live_bytes: u64,
    pub live_count: u64,
    /// Largest `live_bytes` in the window.
    pub peak_bytes: u64,
}

impl Sums {
    fn born(&mut self, bytes: u64) {
        self.alloc_bytes += bytes;
        self.alloc_count += 1;
        self.live_bytes += bytes;
        self.live_count += 1;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    fn gone(&mut self, bytes: u64) {
        self.free_bytes += bytes;
        self.free_count += 1;
        self.live_bytes = self.live_bytes.saturating_sub(bytes);
        self.live_count = self.live_count.saturating_sub(1);
    }

    fn is_active(&self) -> bool {
        self.alloc_count > 0 || self.free_count > 0
    }

    fn next_window(&mut self) {
        *self = Self {
            live_bytes: self.live_bytes,
            live_count: self.live_count,
            peak_bytes: self.live_bytes,
            ..Self::default()
        };
    }
}

/// The same of a device, with what it could not do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSums {
    pub sums: Sums,
    pub failed_allocations: u64,
    pub failed_frees: u64,
    /// Largest `live_bytes` since the process was met.
    pub process_peak_bytes: u64,
}

impl DeviceSums {
    fn is_active(&self) -> bool {
        self.sums.is_active() || self.failed_allocations > 0 || self.failed_frees > 0
    }
}

/// See the module's text.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Rollup {
    devices: Map<Place, DeviceSums>,
    stacks: Map<(Place, Option<i64>), Sums>,
    /// Stacks without a row of their own, and how much of them lives: what was booked without its
    /// stack must leave so, though there be room again by then.
    unnamed: Map<(Place, Option<i64>), u64>,
    /// Events booked without their stack since there were too many.
    pub stacks_full: u64,
}

/// What a process did in a window.
#[derive(Debug, Default)]
pub struct Window {
    pub devices: Vec<(Place, DeviceSums)>,
    pub stacks: Vec<(Place, Option<i64>, Sums)>,
}

impl Rollup {
    pub fn born(&mut self, allocation: &Allocation) {
        self.add(allocation.place(), allocation.stack_id(), allocation.bytes);
    }

    /// New memory of any layer.
    pub fn add(&mut self, place: Place, stack: Option<i64>, bytes: u64) {
        let device = self.devices.entry(place).or_default();
        device.sums.born(bytes);
        device.process_peak_bytes = device.process_peak_bytes.max(device.sums.live_bytes);
        let mut key = (place, stack);
        let has_room = self.stacks.len() < STACKS || self.stacks.contains_key(&key);
        if (stack.is_some() && !has_room) || self.unnamed.contains_key(&key) {
            self.stacks_full += 1;
            *self.unnamed.entry(key).or_default() += 1;
            key.1 = None;
        }
        self.stacks.entry(key).or_default().born(bytes);
    }

    pub fn gone(&mut self, allocation: &Allocation) {
        self.take(allocation.place(), allocation.stack_id(), allocation.bytes);
    }

    /// Memory that is gone, as it was added.
    pub fn take(&mut self, place: Place, stack: Option<i64>, bytes: u64) {
        if let Some(device) = self.devices.get_mut(&place) {
            device.sums.gone(bytes);
        }
        let mut key = (place, stack);
        if let Some(live) = self.unnamed.get_mut(&key) {
            *live -= 1;
            if *live == 0 {
                self.unnamed.remove(&key);
            }
            key.1 = None;
        }
        if let Some(sums) = self.stacks.get_mut(&key) {
            sums.gone(bytes);
        }
    }

    pub fn failed(&mut self, place: Place, begins: bool) {
        let device = self.devices.entry(place).or_default();
        if begins {
            device.failed_allocations += 1;
        } else {
            device.failed_frees += 1;
        }
    }

    /// Bytes and blocks of one class that live.
    pub fn live(&self, class: Class) -> (u64, u64) {
        let of_class = self
            .devices
            .iter()
            .filter(|(place, _)| place.kind.class() == class);
        of_class.fold((0, 0), |(bytes, blocks), (_, device)| {
            (
                bytes + device.sums.live_bytes,
                blocks + device.sums.live_count,
            )
        })
    }

    /// What happened in the window that ends now; with `all`, also what only lives.
    pub fn window(&self, all: bool) -> Window {
        let mut window = Window::default();
        for (place, device) in &self.devices {
            if device.is_active() || (all && device.sums.live_count > 0) {
                window.devices.push((*place, *device));
            }
        }
        for ((place, stack), sums) in &self.stacks {
            if sums.is_active() || (all && sums.live_count > 0) {
                window.stacks.push((*place, *stack, *sums));
            }
        }
        window.devices.sort_unstable_by_key(|(place, _)| *place);
        window
            .stacks
            .sort_unstable_by_key(|(place, stack, _)| (*place, *stack));
        window
    }

    /// A new window begins.
    pub fn next_window(&mut self) {
        for device in self.devices.values_mut() {
            device.sums.next_window();
            device.failed_allocations = 0;
            device.failed_frees = 0;
        }
        self.stacks.retain(|_, sums| {
            sums.next_window();
            sums.live_count > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(bytes: u64, stack: Option<i64>) -> Allocation {
        Allocation::new(MemoryKind::Device, bytes, Some(1), true, stack)
    }

    const PLACE: Place = Place {
        device: Some(1),
        kind: MemoryKind::Device,
        layer: Layer::Driver,
    };

    /// Window 1: +100, +50, -100, +20 by stacks 7 and 8; the peak is 150. Window 2: nothing.
    #[test]
    fn windows_add_up_by_hand() {
        let mut rollup = Rollup::default();
        rollup.born(&allocation(100, Some(7)));
        rollup.born(&allocation(50, Some(8)));
        rollup.gone(&allocation(100, Some(7)));
        rollup.born(&allocation(20, Some(7)));
        rollup.failed(PLACE, true);
        let window = rollup.window(false);
        let device = &window.devices[0];
        assert_eq!(
            device.1,
            DeviceSums {
                sums: Sums {
                    alloc_bytes: 170,
                    alloc_count: 3,
                    free_bytes: 100,
                    free_count: 1,
                    live_bytes: 70,
                    live_count: 2,
                    peak_bytes: 150,
                },
                failed_allocations: 1,
                failed_frees: 0,
                process_peak_bytes: 150,
            }
        );
        let stacks: Vec<_> = window
            .stacks
            .iter()
            .map(|(_, stack, sums)| (*stack, sums.live_bytes, sums.peak_bytes))
            .collect();
        assert_eq!(stacks, [(Some(7), 20, 100), (Some(8), 50, 50)]);
        rollup.next_window();
        assert!(rollup.window(false).devices.is_empty());
        let quiet = rollup.window(true);
        assert_eq!(quiet.devices[0].1.sums.peak_bytes, 70);
        assert_eq!(quiet.devices[0].1.process_peak_bytes, 150);
        assert_eq!(quiet.stacks.len(), 2);
    }

    #[test]
    fn too_many_stacks_are_booked_together_and_counted() {
        let mut rollup = Rollup::default();
        for stack in 1..=STACKS as i64 + 3 {
            rollup.born(&allocation(1, Some(stack)));
        }
        assert_eq!(rollup.stacks_full, 3);
        rollup.gone(&allocation(1, Some(STACKS as i64 + 1)));
        let window = rollup.window(false);
        let (_, _, sums) = window
            .stacks
            .iter()
            .find(|(_, stack, _)| stack.is_none())
            .unwrap();
        assert_eq!((sums.live_count, sums.free_count), (2, 1));
        let total: u64 = window
            .stacks
            .iter()
            .map(|(_, _, sums)| sums.live_count)
            .sum();
        assert_eq!(total, STACKS as u64 + 2);
    }

    /// What was booked without its stack leaves so, when there is room again: the stack's own row
    /// tells of nothing it did not tell the beginning of.
    #[test]
    fn room_that_comes_later_mixes_nothing_up() {
        let mut rollup = Rollup::default();
        for stack in 1..=STACKS as i64 {
            rollup.born(&allocation(1, Some(stack)));
        }
        let late = STACKS as i64 + 1;
        rollup.born(&allocation(10, Some(late)));
        rollup.gone(&allocation(1, Some(1)));
        rollup.next_window();
        rollup.born(&allocation(20, Some(late)));
        let live = |rollup: &Rollup, of: Option<i64>| {
            let window = rollup.window(true);
            let found = window.stacks.iter().find(|(_, stack, _)| *stack == of);
            found.map(|(_, _, sums)| sums.live_bytes)
        };
        assert_eq!(
            (live(&rollup, None), live(&rollup, Some(late))),
            (Some(30), None)
        );
        rollup.gone(&allocation(10, Some(late)));
        rollup.gone(&allocation(20, Some(late)));
        rollup.next_window();
        rollup.born(&allocation(40, Some(late)));
        assert_eq!(
            (live(&rollup, None), live(&rollup, Some(late))),
            (None, Some(40))
        );
    }
}
