//! `demo`: what an inference server does with memory, and what goes wrong in one.
//!
//! Live at the end: on device 0 the weights, the KV cache and one leaked block a request; on device 1
//! its weights; on each a pinned buffer. With one device, what concerns device 1 is left out.

use std::hint::black_box;

use anyhow::ensure;

use super::runtime::{Address, Runtime};

const MIB: usize = 1 << 20;

const WEIGHT_TENSOR_BYTES: usize = 32 * MIB;
const WEIGHT_TENSORS: usize = 8;
const PINNED_BYTES: usize = 16 * MIB;
const SWAP_BYTES: usize = 2 * MIB;
const REGISTERED_BYTES: usize = 4 * MIB;
const KV_CHUNK_BYTES: usize = 8 * MIB;
/// The KV cache grows for so many requests and then stays: warm-up, not a leak.
const KV_CHUNKS: u64 = 16;
const ACTIVATION_BYTES: usize = 24 * MIB;
const LOGITS_BYTES: usize = 2 * MIB;
const LEAK_BYTES: usize = MIB;
const SCRATCH_BYTES: usize = 3 * MIB;

pub fn run(requests: u64) -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let devices = runtime.device_count()?.min(2);
    for device in 0..devices {
        runtime.set_device(device)?;
        load_weights(&runtime)?;
        pin_staging_buffer(&runtime)?;
    }
    runtime.set_device(0)?;
    upload_from_registered_memory(&runtime)?;
    for request in 0..requests {
        serve_request(&runtime, request)?;
    }
    swap_out_kv_block(&runtime)?;
    ask_for_more_than_the_card(&runtime)?;
    free_twice(&runtime)?;
    free_while_another_device_is_current(&runtime, devices)?;
    runtime.report_failed_frees();
    eprintln!("served {requests} requests on {devices} devices; exiting with memory in use");
    Ok(())
}

#[inline(never)]
fn load_weights(runtime: &Runtime) -> anyhow::Result<()> {
    for _ in 0..WEIGHT_TENSORS {
        black_box(runtime.malloc(WEIGHT_TENSOR_BYTES)?);
    }
    Ok(())
}

#[inline(never)]
fn pin_staging_buffer(runtime: &Runtime) -> anyhow::Result<()> {
    black_box(runtime.host_alloc(PINNED_BYTES)?);
    Ok(())
}

#[inline(never)]
fn upload_from_registered_memory(runtime: &Runtime) -> anyhow::Result<()> {
    let mut memory = vec![0; REGISTERED_BYTES];
    runtime.host_register(&mut memory)?;
    runtime.host_unregister(&mut memory);
    Ok(())
}

#[inline(never)]
fn serve_request(runtime: &Runtime, request: u64) -> anyhow::Result<()> {
    if request < KV_CHUNKS {
        grow_kv_cache(runtime)?;
    }
    let activations = run_forward_pass(runtime)?;
    let logits = compute_logits(runtime)?;
    leak_per_request(runtime)?;
    runtime.free(logits);
    runtime.free(activations);
    Ok(())
}

#[inline(never)]
fn grow_kv_cache(runtime: &Runtime) -> anyhow::Result<()> {
    black_box(runtime.malloc(KV_CHUNK_BYTES)?);
    Ok(())
}

#[inline(never)]
fn run_forward_pass(runtime: &Runtime) -> anyhow::Result<Address> {
    Ok(black_box(runtime.malloc(ACTIVATION_BYTES)?))
}

#[inline(never)]
fn compute_logits(runtime: &Runtime) -> anyhow::Result<Address> {
    Ok(black_box(runtime.malloc(LOGITS_BYTES)?))
}

#[inline(never)]
fn leak_per_request(runtime: &Runtime) -> anyhow::Result<()> {
    black_box(runtime.malloc(LEAK_BYTES)?);
    Ok(())
}

#[inline(never)]
fn swap_out_kv_block(runtime: &Runtime) -> anyhow::Result<()> {
    let buffer = runtime.host_alloc(SWAP_BYTES)?;
    runtime.free_host(buffer);
    Ok(())
}

#[inline(never)]
fn ask_for_more_than_the_card(runtime: &Runtime) -> anyhow::Result<()> {
    let too_much = runtime.total_bytes()? + MIB;
    let outcome = runtime.try_malloc(too_much);
    ensure!(
        outcome.is_err(),
        "an allocation of {too_much} bytes succeeded on a smaller card"
    );
    Ok(())
}

#[inline(never)]
fn free_twice(runtime: &Runtime) -> anyhow::Result<()> {
    let scratch = runtime.malloc(SCRATCH_BYTES)?;
    runtime.free(scratch);
    ensure!(
        runtime.try_free(scratch) != 0,
        "freeing a block twice succeeded"
    );
    Ok(())
}

#[inline(never)]
fn free_while_another_device_is_current(runtime: &Runtime, devices: i32) -> anyhow::Result<()> {
    if devices < 2 {
        return Ok(());
    }
    runtime.set_device(0)?;
    let scratch = runtime.malloc(SCRATCH_BYTES)?;
    runtime.set_device(1)?;
    runtime.free(scratch);
    runtime.set_device(0)
}
