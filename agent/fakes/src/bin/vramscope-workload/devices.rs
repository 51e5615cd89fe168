//! `devices` and `contexts`: whose memory it is when more than one context is at hand.

use anyhow::{anyhow, ensure};

use super::{
    driver::{Creation, Driver},
    runtime::{Address, Runtime},
};

const MIB: usize = 1 << 20;

/// Two devices: a block freed under the other one, contexts pushed and popped, threads with devices
/// of their own.
pub fn run() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let driver = Driver::load()?;
    ensure!(runtime.device_count()? >= 2, "two devices are needed");
    free_under_the_other_device(&runtime)?;
    push_and_pop(&driver)?;
    let left = std::thread::scope(|scope| {
        let worker = scope.spawn(|| allocate_on_a_thread_of_its_own(&runtime));
        worker.join().map_err(|_| anyhow!("a thread panicked"))?
    })?;
    runtime.free(left);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| allocate_in_a_context_made_current(&driver));
        worker.join().map_err(|_| anyhow!("a thread panicked"))?
    })?;
    runtime.report_failed_frees();
    Ok(())
}

#[inline(never)]
fn free_under_the_other_device(runtime: &Runtime) -> anyhow::Result<()> {
    runtime.set_device(0)?;
    let on_first = runtime.malloc(5 * MIB)?;
    runtime.set_device(1)?;
    runtime.malloc(7 * MIB)?;
    runtime.free(on_first);
    Ok(())
}

/// The runtime's device is the second one all the while.
#[inline(never)]
fn push_and_pop(driver: &Driver) -> anyhow::Result<()> {
    let first = driver.retain_primary(0)?;
    driver.push_context(first)?;
    driver.allocate(3 * MIB)?;
    let popped = driver.pop_context()?;
    ensure!(popped == first, "another context was popped");
    driver.allocate(2 * MIB)?;
    driver.release_primary(0)
}

/// A new thread begins on the first device.
#[inline(never)]
fn allocate_on_a_thread_of_its_own(runtime: &Runtime) -> anyhow::Result<Address> {
    runtime.malloc(MIB)?;
    runtime.set_device(1)?;
    runtime.malloc(4 * MIB)
}

#[inline(never)]
fn allocate_in_a_context_made_current(driver: &Driver) -> anyhow::Result<()> {
    let second = driver.retain_primary(1)?;
    driver.set_current(second)?;
    driver.allocate(6 * MIB)?;
    driver.release_primary(1)
}

/// A device reset by the runtime with memory on it, then used again.
pub fn reset() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    runtime.set_device(0)?;
    reset_with_live_memory(&runtime)?;
    runtime.malloc(4 * MIB)?;
    Ok(())
}

/// The slice of the device's pool outlives the reset, as the stand-ins have it.
#[inline(never)]
fn reset_with_live_memory(runtime: &Runtime) -> anyhow::Result<()> {
    runtime.malloc(8 * MIB)?;
    runtime.host_alloc(2 * MIB)?;
    runtime.malloc_async(3 * MIB)?;
    runtime.reset_device()
}

/// Contexts that end with memory in them: by their destruction, by a reset and by the last release of
/// a primary one.
pub fn contexts() -> anyhow::Result<()> {
    let driver = Driver::load()?;
    destroy_with_live_memory(&driver)?;
    destroy_one_of_two(&driver)?;
    reset_and_release_a_primary(&driver)
}

/// What a context's end frees, and what outlives it: the slice of the device's pool.
#[inline(never)]
fn destroy_with_live_memory(driver: &Driver) -> anyhow::Result<()> {
    let context = driver.create_context(Creation::V2, 0)?;
    driver.allocate(4 * MIB)?;
    driver.allocate_host(2 * MIB)?;
    driver.allocate_managed(3 * MIB)?;
    driver.create_array(256, 256)?;
    driver.allocate_async(2 * MIB)?;
    driver.destroy_context(context)
}

/// The context that is destroyed is not the current one.
#[inline(never)]
fn destroy_one_of_two(driver: &Driver) -> anyhow::Result<()> {
    let second = driver.create_context(Creation::V3, 1)?;
    driver.allocate(5 * MIB)?;
    driver.create_context(Creation::V4, 0)?;
    let block = driver.allocate(6 * MIB)?;
    driver.destroy_context(second)?;
    driver.free(block)?;
    driver.allocate(MIB)?;
    Ok(())
}

/// A reset does not release: the retaining from before it has to be given back as well.
#[inline(never)]
fn reset_and_release_a_primary(driver: &Driver) -> anyhow::Result<()> {
    let primary = driver.retain_primary(0)?;
    driver.push_context(primary)?;
    driver.allocate(8 * MIB)?;
    driver.reset_primary(0)?;
    let again = driver.retain_primary(0)?;
    driver.set_current(again)?;
    driver.allocate(9 * MIB)?;
    driver.release_primary_v1(0)?;
    driver.allocate(10 * MIB)?;
    driver.release_primary(0)
}
