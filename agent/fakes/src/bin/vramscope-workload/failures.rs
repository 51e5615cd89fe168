//! `failures`: of each kind one allocation that succeeds and one that fails, one free that succeeds,
//! the same again, and one of what was never allocated. Nothing stays.

use std::ffi::c_int;

use anyhow::ensure;

use super::{
    driver::Driver,
    runtime::{Address, ChannelFormat, DefaultStream, Runtime},
};

const MIB: usize = 1 << 20;

/// No call ever returned this.
const NEVER: usize = 0x1000;

pub fn run() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let driver = Driver::load()?;
    runtime.set_device(0)?;
    let too_much = runtime.total_bytes()? + 2 * MIB;
    fail_with_device_memory(&runtime, too_much)?;
    fail_with_managed_memory(&runtime, too_much)?;
    fail_with_pinned_memory(&runtime)?;
    fail_with_registered_memory(&runtime)?;
    fail_with_arrays(&runtime)?;
    fail_with_pools(&runtime, too_much)?;
    fail_with_reserved_addresses(&driver)?;
    fail_with_created_memory(&driver, too_much)?;
    fail_with_mappings(&driver)?;
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| fail_without_a_context(&driver));
        worker.join().unwrap_or(Ok(()))
    })
}

#[track_caller]
fn fails(what: &str, code: c_int) -> anyhow::Result<()> {
    ensure!(code != 0, "{what} succeeded");
    Ok(())
}

fn refused<T>(what: &str, outcome: Result<T, c_int>) -> anyhow::Result<()> {
    ensure!(outcome.is_err(), "{what} succeeded");
    Ok(())
}

#[inline(never)]
fn fail_with_device_memory(runtime: &Runtime, too_much: usize) -> anyhow::Result<()> {
    let block = runtime.malloc(4 * MIB)?;
    refused(
        "more memory than the card has",
        runtime.try_malloc(too_much),
    )?;
    runtime.check("cudaFree", runtime.try_free(block))?;
    fails("a second free", runtime.try_free(block))?;
    fails("a free of nothing", runtime.try_free(Address(NEVER)))
}

/// The second free fails under the kind of the function: the block is not known any more.
#[inline(never)]
fn fail_with_managed_memory(runtime: &Runtime, too_much: usize) -> anyhow::Result<()> {
    let block = runtime.malloc_managed(3 * MIB)?;
    let outcome = runtime.try_malloc_managed(too_much);
    refused("more managed memory than the card has", outcome)?;
    runtime.check("cudaFree", runtime.try_free(block))?;
    fails("a second free", runtime.try_free(block))
}

#[inline(never)]
fn fail_with_pinned_memory(runtime: &Runtime) -> anyhow::Result<()> {
    let block = runtime.host_alloc(2 * MIB)?;
    let outcome = runtime.try_host_alloc(usize::MAX / 4);
    refused("more pinned memory than the machine has", outcome)?;
    runtime.check("cudaFreeHost", runtime.try_free_host(block))?;
    fails("a second free", runtime.try_free_host(block))?;
    fails("a free of nothing", runtime.try_free_host(Address(NEVER)))
}

#[inline(never)]
fn fail_with_registered_memory(runtime: &Runtime) -> anyhow::Result<()> {
    let mut memory = vec![0; MIB];
    let address = Address(memory.as_mut_ptr() as usize);
    runtime.host_register(&mut memory)?;
    let again = runtime.try_host_register(&mut memory);
    fails("registering memory twice", again)?;
    let code = runtime.try_host_unregister(address);
    runtime.check("cudaHostUnregister", code)?;
    let again = runtime.try_host_unregister(address);
    fails("a second unregistering", again)?;
    let nothing = runtime.try_host_unregister(Address(NEVER));
    fails("unregistering nothing", nothing)
}

#[inline(never)]
fn fail_with_arrays(runtime: &Runtime) -> anyhow::Result<()> {
    let format = ChannelFormat {
        bits: [32, 0, 0, 0],
        kind: 2,
    };
    let array = runtime.try_malloc_array(&format, 256, 256);
    let array = runtime.expect("cudaMallocArray", array)?;
    let empty = runtime.try_malloc_array(&format, 0, 256);
    refused("an array without width", empty)?;
    runtime.check("cudaFreeArray", runtime.try_free_array(array))?;
    fails("a second free", runtime.try_free_array(array))?;
    fails("a free of nothing", runtime.try_free_array(NEVER))
}

#[inline(never)]
fn fail_with_pools(runtime: &Runtime, too_much: usize) -> anyhow::Result<()> {
    let stream = DefaultStream::Legacy;
    let slice = runtime.malloc_async(5 * MIB)?;
    let outcome = runtime.try_malloc_async(too_much, None, stream);
    refused("more memory of a pool than the card has", outcome)?;
    runtime.free_async(slice)?;
    fails("a second free", runtime.try_free_async(slice, stream))?;
    let nothing = runtime.try_free_async(Address(NEVER), stream);
    fails("a free of nothing", nothing)
}

#[inline(never)]
fn fail_with_reserved_addresses(driver: &Driver) -> anyhow::Result<()> {
    let range = driver.reserve(4 * MIB)?;
    refused("a reservation of one byte", driver.try_reserve(1))?;
    let half = driver.try_unreserve(range, 2 * MIB);
    fails("giving half of a reservation back", half)?;
    let whole = driver.try_unreserve(range, 4 * MIB);
    driver.check("cuMemAddressFree", whole)?;
    let again = driver.try_unreserve(range, 4 * MIB);
    fails("giving a reservation back twice", again)
}

#[inline(never)]
fn fail_with_created_memory(driver: &Driver, too_much: usize) -> anyhow::Result<()> {
    let handle = driver.create(2 * MIB, 0)?;
    let outcome = driver.try_create(too_much, 0);
    refused("more memory than the card has", outcome)?;
    // Nothing is mapped there, and no descriptor has that number.
    refused("retaining nothing", driver.try_retain(NEVER))?;
    refused("importing nothing", driver.try_import(-1))?;
    driver.release(handle)?;
    fails("a second release", driver.try_release(handle))?;
    fails("a release of nothing", driver.try_release(NEVER))
}

#[inline(never)]
fn fail_with_mappings(driver: &Driver) -> anyhow::Result<()> {
    let range = driver.reserve(4 * MIB)?;
    let handle = driver.create(2 * MIB, 0)?;
    driver.map(range, 2 * MIB, handle)?;
    let overlapping = driver.try_map(range, 2 * MIB, handle);
    fails("mapping over a mapping", overlapping)?;
    let both = driver.try_unmap(range, 4 * MIB);
    fails("unmapping more than is mapped", both)?;
    driver.unmap(range, 2 * MIB)?;
    fails("a second unmapping", driver.try_unmap(range, 2 * MIB))?;
    driver.release(handle)?;
    let code = driver.try_unreserve(range, 4 * MIB);
    driver.check("cuMemAddressFree", code)
}

/// A thread has no current context until it makes one so.
#[inline(never)]
fn fail_without_a_context(driver: &Driver) -> anyhow::Result<()> {
    let outcome = driver.try_allocate(MIB);
    refused("an allocation without a context", outcome)?;
    fails("a free without a context", driver.try_free(NEVER))
}
