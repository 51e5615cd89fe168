//! Events. The runtime's own: the driver stand-in knows of no work that they could follow.
//!
//! There is never work in flight, so an event is complete as soon as it is recorded. The time of that
//! is kept, for those that measure.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use vramscope_fake_host::per_process::PerProcess;

use crate::{codes::*, runtime};

static EVENTS: PerProcess<Mutex<Events>> = PerProcess::new();

const FIRST_HANDLE: usize = 0x7000_0000;
const HANDLE_STEP: usize = 0x100;

#[derive(Default)]
struct Events {
    made: usize,
    /// When each was recorded last.
    live: HashMap<usize, Option<Instant>>,
}

fn events() -> MutexGuard<'static, Events> {
    let shared = EVENTS.get(Mutex::default);
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn create() -> CudaResult<usize> {
    runtime::ensure_context()?;
    let mut events = events();
    let handle = FIRST_HANDLE + HANDLE_STEP * events.made;
    events.made += 1;
    events.live.insert(handle, None);
    Ok(handle)
}

pub fn destroy(event: usize) -> CudaResult<()> {
    let removed = events().live.remove(&event);
    removed.map(|_| ()).ok_or(INVALID_RESOURCE_HANDLE)
}

pub fn record(event: usize, stream: usize) -> CudaResult<()> {
    runtime::with_driver(|driver| driver.query_stream(stream))?;
    let mut events = events();
    let recorded = events.live.get_mut(&event);
    *recorded.ok_or(INVALID_RESOURCE_HANDLE)? = Some(Instant::now());
    Ok(())
}

/// An event that exists is complete; one that was never recorded is so too, as documented.
pub fn require(event: usize) -> CudaResult<()> {
    let is_known = events().live.contains_key(&event);
    is_known.then_some(()).ok_or(INVALID_RESOURCE_HANDLE)
}

/// Milliseconds between two that were recorded.
pub fn elapsed(start: usize, end: usize) -> CudaResult<f32> {
    let events = events();
    let at = |event| events.live.get(event).copied().flatten();
    let (Some(start), Some(end)) = (at(&start), at(&end)) else {
        return Err(INVALID_RESOURCE_HANDLE);
    };
    let after = end.saturating_duration_since(start).as_secs_f32();
    let before = start.saturating_duration_since(end).as_secs_f32();
    Ok((after - before) * 1e3)
}
