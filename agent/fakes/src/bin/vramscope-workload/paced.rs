//! `paced`: a steady stream of allocations and frees over a live set that grows.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::Context;

use super::runtime::{Address, Runtime};

const BLOCK_BYTES: usize = 16 << 10;
/// Every so many-th block is never freed.
const LEAK_EVERY: u64 = 10;

/// Set by the signal handler; a handler may do little more.
static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn ask_to_stop(_signal: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

pub fn is_asked_to_stop() -> bool {
    STOP.load(Ordering::Relaxed)
}

pub fn run(duration: Duration, rate: u64) -> anyhow::Result<()> {
    stop_on_signals();
    let runtime = Runtime::load()?;
    let started = Instant::now();
    let planned = duration.as_secs() * rate;
    let mut second = 0;
    let mut leaked = 0;
    let mut pair = 0;
    while pair < planned && !is_asked_to_stop() {
        // A pair's time is worked out from the start, so that a late one does not delay the next.
        let due = started + Duration::from_secs_f64(pair as f64 / rate as f64);
        if !sleep_until(due) {
            continue;
        }
        pair += 1;
        if pair % LEAK_EVERY == 0 {
            leak_every_tenth(&runtime)?;
            leaked += 1;
        } else {
            let block = allocate_for_a_moment(&runtime)?;
            free_after_a_moment(&runtime, block);
        }
        if started.elapsed().as_secs() > second {
            second = started.elapsed().as_secs();
            report(second, pair, leaked);
        }
    }
    report(started.elapsed().as_secs(), pair, leaked);
    runtime.report_failed_frees();
    Ok(())
}

fn report(second: u64, pairs: u64, leaked: u64) {
    let bytes = leaked * BLOCK_BYTES as u64;
    eprintln!("second {second}: {pairs} blocks so far, {leaked} leaked ({bytes} bytes)");
}

pub fn stop_on_signals() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler only stores to an atomic, which is allowed in a handler.
        unsafe { libc::signal(signal, ask_to_stop as *const () as libc::sighandler_t) };
    }
}

/// Sleeps a piece of the way; true once the time has come.
fn sleep_until(due: Instant) -> bool {
    let left = due.saturating_duration_since(Instant::now());
    // Short pieces, since the standard library goes on sleeping after a signal.
    std::thread::sleep(left.min(Duration::from_millis(50)));
    left <= Duration::from_millis(50)
}

#[inline(never)]
fn allocate_for_a_moment(runtime: &Runtime) -> anyhow::Result<Address> {
    runtime
        .malloc(BLOCK_BYTES)
        .context("the card is full: use a smaller rate or time")
}

#[inline(never)]
fn free_after_a_moment(runtime: &Runtime, block: Address) {
    runtime.free(block);
}

#[inline(never)]
fn leak_every_tenth(runtime: &Runtime) -> anyhow::Result<()> {
    runtime
        .malloc(BLOCK_BYTES)
        .context("the card is full: use a smaller rate or time")?;
    Ok(())
}
