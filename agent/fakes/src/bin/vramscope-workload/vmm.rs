//! `vmm` and `vmm-segments`: addresses, memory and mappings apart.

use anyhow::ensure;

use super::{driver::Driver, runtime::Runtime};

const MIB: usize = 1 << 20;

/// Everything that mappings can be: several of one handle, adjacent ones ended at once, memory that a
/// release ends and memory that an unmapping ends, retained and shared memory.
pub fn run() -> anyhow::Result<()> {
    let driver = Driver::load()?;
    let range = driver.reserve(64 * MIB)?;
    map_twice_and_unmap_at_once(&driver, range)?;
    share_memory(&driver, range + 32 * MIB)?;
    keep_a_mapping(&driver, range + 40 * MIB)?;
    let code = driver.try_unreserve(range, 64 * MIB);
    ensure!(code != 0, "addresses were given back with memory mapped");
    reserve_for_a_moment(&driver)
}

#[inline(never)]
fn map_twice_and_unmap_at_once(driver: &Driver, range: usize) -> anyhow::Result<()> {
    let first = driver.create(8 * MIB, 0)?;
    let second = driver.create(4 * MIB, 1)?;
    // Adjacent: 8 MiB of the first, 4 of the second, 4 of the second again; and, apart, the first again.
    driver.map(range, 8 * MIB, first)?;
    driver.map(range + 16 * MIB, 8 * MIB, first)?;
    driver.map(range + 8 * MIB, 4 * MIB, second)?;
    driver.map(range + 12 * MIB, 4 * MIB, second)?;
    driver.allow_access(range, 16 * MIB, 0)?;
    let retained = driver.retain(range + 4 * MIB)?;
    ensure!(retained == first, "a mapping has another handle");
    driver.release(first)?;
    // The last reference goes before the last mapping.
    driver.release(retained)?;
    let part = driver.try_unmap(range, 4 * MIB);
    ensure!(part != 0, "a part of a mapping was unmapped");
    driver.unmap(range, 16 * MIB)?;
    // The second has a reference left and no mapping: its release ends it. The first has a mapping
    // left and no reference: its unmapping ends it.
    driver.release(second)?;
    driver.unmap(range + 16 * MIB, 8 * MIB)
}

/// Exports memory, imports it again, maps what was imported.
#[inline(never)]
fn share_memory(driver: &Driver, place: usize) -> anyhow::Result<()> {
    let handle = driver.create(6 * MIB, 0)?;
    let descriptor = driver.export(handle)?;
    let imported = driver.import(descriptor)?;
    driver.map(place, 6 * MIB, imported)?;
    driver.unmap(place, 6 * MIB)?;
    driver.release(imported)?;
    // SAFETY: a descriptor that the driver gave for this program to close.
    unsafe { libc::close(descriptor) };
    driver.release(handle)
}

#[inline(never)]
fn keep_a_mapping(driver: &Driver, place: usize) -> anyhow::Result<()> {
    let handle = driver.create(10 * MIB, 0)?;
    driver.map(place, 10 * MIB, handle)?;
    driver.allow_access(place, 10 * MIB, 0)
}

#[inline(never)]
fn reserve_for_a_moment(driver: &Driver) -> anyhow::Result<()> {
    let range = driver.reserve(16 * MIB)?;
    let code = driver.try_unreserve(range, 16 * MIB);
    driver.check("cuMemAddressFree", code)
}

const LARGE_SEGMENT: usize = 20 * MIB;
const SMALL_SEGMENT: usize = 2 * MIB;
const LARGE_SEGMENTS: usize = 10;
const SMALL_SEGMENTS: usize = 5;
/// Segments that each round gives back and takes again.
const TRIMMED: usize = 4;

/// As PyTorch's expandable segments: one reservation larger than the card for each pool, which grows
/// by segments of one size at its end and gives back from its end.
pub fn segments(rounds: u64) -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let driver = Driver::load()?;
    runtime.set_device(0)?;
    let card = runtime.total_bytes()?;
    let reserved = (card + card / 8).next_multiple_of(LARGE_SEGMENT);
    let mut large = Expandable::new(&driver, LARGE_SEGMENT, reserved)?;
    large.grow(LARGE_SEGMENTS)?;
    for _ in 0..rounds {
        large.shrink(TRIMMED)?;
        large.grow(TRIMMED)?;
    }
    let mut small = Expandable::new(&driver, SMALL_SEGMENT, reserved)?;
    small.grow(SMALL_SEGMENTS)
}

struct Expandable<'a> {
    driver: &'a Driver,
    start: usize,
    segment: usize,
    handles: Vec<usize>,
}

impl<'a> Expandable<'a> {
    fn new(driver: &'a Driver, segment: usize, reserved: usize) -> anyhow::Result<Self> {
        Ok(Self {
            driver,
            start: driver.reserve(reserved)?,
            segment,
            handles: Vec::new(),
        })
    }

    #[inline(never)]
    fn grow(&mut self, segments: usize) -> anyhow::Result<()> {
        let from = self.start + self.handles.len() * self.segment;
        for index in 0..segments {
            let handle = self.driver.create(self.segment, 0)?;
            self.driver
                .map(from + index * self.segment, self.segment, handle)?;
            self.handles.push(handle);
        }
        self.driver.allow_access(from, segments * self.segment, 0)
    }

    #[inline(never)]
    fn shrink(&mut self, segments: usize) -> anyhow::Result<()> {
        for _ in 0..segments {
            let Some(handle) = self.handles.pop() else {
                return Ok(());
            };
            let place = self.start + self.handles.len() * self.segment;
            self.driver.unmap(place, self.segment)?;
            self.driver.release(handle)?;
        }
        Ok(())
    }
}
