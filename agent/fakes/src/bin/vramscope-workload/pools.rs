//! `pools`: stream-ordered memory from default pools and from made ones.
//!
//! Says on standard output what the pools report of themselves, which is all that a program can
//! know of the memory behind its slices.

use anyhow::ensure;

use super::runtime::{
    DefaultStream, RELEASE_THRESHOLD, RESERVED, RESERVED_HIGH, Runtime, USED, USED_HIGH,
};

const MIB: usize = 1 << 20;

pub fn run() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let devices = runtime.device_count()?.min(2);
    runtime.set_device(0)?;
    let default = runtime.default_pool(0)?;
    let kept = runtime.malloc_async(10 * MIB)?;
    let other = runtime.malloc_async(20 * MIB)?;
    grow_and_shrink_at_a_synchronisation(&runtime, default)?;
    grow_and_shrink_by_trimming(&runtime, default)?;
    destroy_a_pool_with_a_live_slice(&runtime)?;
    use_the_threads_own_stream(&runtime)?;
    if devices > 1 {
        use_a_pool_of_another_device(&runtime)?;
    }
    runtime.free_async(other)?;
    report(&runtime, "default", default)?;
    ensure!(kept.0 != 0, "a slice lies at address 0");
    Ok(())
}

/// What a pool says of itself, in MiB.
fn report(runtime: &Runtime, name: &str, pool: usize) -> anyhow::Result<()> {
    let mut shown = Vec::new();
    for attribute in [RESERVED, RESERVED_HIGH, USED, USED_HIGH] {
        shown.push(runtime.pool_bytes(pool, attribute)? >> 20);
    }
    println!(
        "{name}: reserved {} of at most {}, used {} of at most {}",
        shown[0], shown[1], shown[2], shown[3]
    );
    Ok(())
}

#[inline(never)]
fn grow_and_shrink_at_a_synchronisation(runtime: &Runtime, pool: usize) -> anyhow::Result<()> {
    let slice = runtime.malloc_async(40 * MIB)?;
    report(runtime, "default", pool)?;
    runtime.free_async(slice)?;
    report(runtime, "default", pool)?;
    runtime.synchronize_stream()?;
    report(runtime, "default", pool)
}

#[inline(never)]
fn grow_and_shrink_by_trimming(runtime: &Runtime, pool: usize) -> anyhow::Result<()> {
    runtime.set_pool_bytes(pool, RELEASE_THRESHOLD, u64::MAX)?;
    let slice = runtime.malloc_async(40 * MIB)?;
    runtime.free_async(slice)?;
    runtime.synchronize_stream()?;
    report(runtime, "default", pool)?;
    runtime.trim_pool(pool, 0)?;
    report(runtime, "default", pool)
}

/// A slice outlives its pool's destruction, as documented.
#[inline(never)]
fn destroy_a_pool_with_a_live_slice(runtime: &Runtime) -> anyhow::Result<()> {
    let pool = runtime.create_pool(0)?;
    let first = runtime.malloc_from_pool(6 * MIB, pool)?;
    let second = runtime.malloc_from_pool(7 * MIB, pool)?;
    // The call that is not ordered frees slices too.
    runtime.check("cudaFree", runtime.try_free(first))?;
    report(runtime, "made", pool)?;
    runtime.destroy_pool(pool)?;
    let outcome = runtime.try_malloc_async(MIB, Some(pool), DefaultStream::Legacy);
    ensure!(outcome.is_err(), "a destroyed pool gave memory");
    runtime.free_async(second)
}

#[inline(never)]
fn use_the_threads_own_stream(runtime: &Runtime) -> anyhow::Result<()> {
    let stream = DefaultStream::PerThread;
    let slice = runtime.try_malloc_async(3 * MIB, None, stream);
    let slice = runtime.expect("cudaMallocAsync_ptsz", slice)?;
    let code = runtime.try_free_async(slice, stream);
    runtime.check("cudaFreeAsync_ptsz", code)
}

/// The slice belongs to the pool's device, not to the current one. It stays, and its pool with it.
#[inline(never)]
fn use_a_pool_of_another_device(runtime: &Runtime) -> anyhow::Result<()> {
    let pool = runtime.create_pool(1)?;
    runtime.malloc_from_pool(5 * MIB, pool)?;
    runtime.destroy_pool(pool)
}
