//! Stream-ordered memory: pools that take memory of a card and hand out slices of it.
//!
//! There is never work in flight, so a free takes effect at once. What is modelled:
//! - a pool takes memory of its card in chunks, whole multiples of 32 MiB, and keeps them until it is
//!   trimmed, destroyed, or synchronised with more than its release threshold (0 by default);
//! - a chunk goes back only as a whole, when none of it is in use;
//! - a destroyed pool's slices live on until they are freed, and its memory with them, as
//!   documented; a device's default pool cannot be destroyed;
//! - an attribute's bytes in use are the requested ones.

use std::{
    collections::HashMap,
    ffi::{c_int, c_uint, c_void},
};

use vramscope_fake_host::{
    card,
    ledger::{Block, Kind},
    ranges::Ranges,
};

use crate::{
    Out, Pool as PoolHandle, Stream,
    codes::*,
    state::{HANDLE_STEP, Handles, State, allocation_failed, state},
};

/// What a pool takes of the card is a multiple of this.
const CHUNK_BYTES: usize = 32 << 20;
/// Slices begin at multiples of this.
const SLICE_ALIGNMENT: usize = 512;

const FIRST_DEFAULT: PoolHandle = 0x5000_0000;
const FIRST_CREATED: PoolHandle = 0x5100_0000;

/// CUmemPool_attribute.
const REUSE_FOLLOW_EVENT_DEPENDENCIES: c_int = 1;
const REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_CURRENT: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED_CURRENT: c_int = 7;
const USED_HIGH: c_int = 8;

/// CUmemPoolProps, as far as it is read.
#[repr(C)]
pub struct PoolProperties {
    allocation_type: c_uint,
    handle_types: c_uint,
    location_type: c_uint,
    location: c_int,
    _security: *const c_void,
    max_bytes: usize,
}

/// CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE.
const PINNED: c_uint = 1;
const ON_DEVICE: c_uint = 1;

/// The pools of a process.
pub struct Pools {
    pools: HashMap<PoolHandle, Pool>,
    handles: Handles,
    /// Each device's current pool.
    current: [PoolHandle; card::DEVICES],
    /// Live slices, with their pool and what they take of it.
    slices: HashMap<usize, (PoolHandle, usize)>,
}

struct Pool {
    device: u32,
    /// Destroyed by the program: gone once its last slice is freed.
    is_destroyed: bool,
    max_bytes: u64,
    threshold: u64,
    reuse: [c_int; 3],
    chunks: Vec<Chunk>,
    slices: usize,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
}

struct Chunk {
    start: usize,
    bytes: usize,
    free: Ranges,
}

impl Pool {
    fn new(device: u32, max_bytes: u64) -> Self {
        Self {
            device,
            is_destroyed: false,
            max_bytes,
            threshold: 0,
            reuse: [1; 3],
            chunks: Vec::new(),
            slices: 0,
            reserved: 0,
            reserved_high: 0,
            used: 0,
            used_high: 0,
        }
    }

    fn take(&mut self, length: usize) -> Option<usize> {
        self.chunks
            .iter_mut()
            .find_map(|chunk| chunk.free.take(length, SLICE_ALIGNMENT))
    }
}

fn default_pool(device: u32) -> PoolHandle {
    FIRST_DEFAULT + HANDLE_STEP * device as usize
}

impl Pools {
    pub fn new() -> Self {
        let defaults = (0..card::DEVICES as u32).map(|d| (default_pool(d), Pool::new(d, 0)));
        Self {
            pools: defaults.collect(),
            handles: Handles::from(FIRST_CREATED),
            current: std::array::from_fn(|device| default_pool(device as u32)),
            slices: HashMap::new(),
        }
    }

    /// A pool that the program may use.
    fn usable(&self, handle: PoolHandle) -> CuResult<&Pool> {
        let pool = self.pools.get(&handle);
        pool.filter(|pool| !pool.is_destroyed).ok_or(INVALID_VALUE)
    }
}

impl State {
    fn take_slice(&mut self, handle: PoolHandle, bytes: usize) -> CuResult<usize> {
        let length = bytes
            .checked_next_multiple_of(SLICE_ALIGNMENT)
            .ok_or(OUT_OF_MEMORY)?;
        let pool = self.pools.pools.get_mut(&handle).ok_or(INVALID_VALUE)?;
        let place = match pool.take(length) {
            Some(place) => place,
            None => self.grow_and_take(handle, length)?,
        };
        let pool = self.pools.pools.get_mut(&handle).ok_or(INVALID_VALUE)?;
        pool.slices += 1;
        pool.used += bytes as u64;
        pool.used_high = pool.used_high.max(pool.used);
        self.pools.slices.insert(place, (handle, length));
        Ok(place)
    }

    fn grow_and_take(&mut self, handle: PoolHandle, length: usize) -> CuResult<usize> {
        let chunk_bytes = length
            .checked_next_multiple_of(CHUNK_BYTES)
            .ok_or(OUT_OF_MEMORY)?;
        let pool = self.pools.pools.get(&handle).ok_or(INVALID_VALUE)?;
        let device = pool.device;
        let is_too_large =
            pool.max_bytes > 0 && pool.reserved + chunk_bytes as u64 > pool.max_bytes;
        if is_too_large || chunk_bytes as u64 > self.free_bytes(device) {
            return Err(OUT_OF_MEMORY);
        }
        let start = self.addresses.take(chunk_bytes, 1).ok_or(OUT_OF_MEMORY)?;
        self.accounts.pool_grew(device, chunk_bytes as u64);
        let pool = self.pools.pools.get_mut(&handle).ok_or(INVALID_VALUE)?;
        pool.reserved += chunk_bytes as u64;
        pool.reserved_high = pool.reserved_high.max(pool.reserved);
        pool.chunks.push(Chunk {
            start,
            bytes: chunk_bytes,
            free: Ranges::whole(start, chunk_bytes),
        });
        pool.take(length).ok_or(OUT_OF_MEMORY)
    }

    /// A slice was freed: its place goes back to its pool.
    pub fn give_slice_back(&mut self, address: usize, bytes: u64) {
        let Some((handle, length)) = self.pools.slices.remove(&address) else {
            return;
        };
        let Some(pool) = self.pools.pools.get_mut(&handle) else {
            return;
        };
        pool.slices -= 1;
        pool.used -= bytes;
        let holds =
            |chunk: &&mut Chunk| (chunk.start..chunk.start + chunk.bytes).contains(&address);
        if let Some(chunk) = pool.chunks.iter_mut().find(holds) {
            chunk.free.give(address, length);
        }
        if pool.is_destroyed {
            self.end_pool_if_unused(handle);
        }
    }

    /// Gives unused chunks back to the card, as long as at least `keep` bytes stay reserved.
    fn trim(&mut self, handle: PoolHandle, keep: u64) {
        let Some(pool) = self.pools.pools.get_mut(&handle) else {
            return;
        };
        let (device, mut reserved) = (pool.device, pool.reserved);
        let mut released = Vec::new();
        pool.chunks.retain(|chunk| {
            let is_unused = chunk.free.is_free(chunk.start, chunk.bytes);
            let goes = is_unused && reserved >= keep + chunk.bytes as u64;
            if goes {
                reserved -= chunk.bytes as u64;
                released.push((chunk.start, chunk.bytes));
            }
            !goes
        });
        pool.reserved = reserved;
        for (start, bytes) in released {
            self.addresses.give(start, bytes);
            self.accounts.pool_shrank(device, bytes as u64);
        }
    }

    fn end_pool_if_unused(&mut self, handle: PoolHandle) {
        self.trim(handle, 0);
        let slices = self.pools.pools.get(&handle).map(|pool| pool.slices);
        if slices == Some(0) {
            self.pools.pools.remove(&handle);
            self.pools.handles.give_back(handle);
        }
    }

    /// A device was synchronised: its pools give back what exceeds their threshold.
    pub fn pools_synchronised(&mut self, device: u32) {
        let pools = self.pools.pools.iter();
        let over: Vec<(PoolHandle, u64)> = pools
            .filter(|(_, pool)| pool.device == device && pool.reserved > pool.threshold)
            .map(|(handle, pool)| (*handle, pool.threshold))
            .collect();
        for (handle, threshold) in over {
            self.trim(handle, threshold);
        }
    }
}

/// Allocates a slice of a pool, or of the current pool of the stream's device.
pub fn allocate(
    address: Out<usize>,
    bytes: usize,
    pool: Option<PoolHandle>,
    stream: Stream,
) -> CuResult<()> {
    let mut state = state();
    let current = state.current_device();
    let named = pool.and_then(|pool| state.pools.usable(pool).ok().map(|pool| pool.device));
    let allocated = state.stream_device(stream).and_then(|device| {
        let handle = pool.unwrap_or(state.pools.current[device as usize]);
        let device = state.pools.usable(handle)?.device;
        let out = address.ok_or(INVALID_VALUE)?;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let place = state.take_slice(handle, bytes)?;
        out.write(place);
        let block = Block {
            kind: Kind::Pool,
            device: Some(device),
            bytes: bytes as u64,
            context: 0,
        };
        state.accounts.allocated(place, block);
        Ok(())
    });
    allocated.or_else(|code| {
        // A call that finds no context belongs to no device, whatever pool it names.
        let device = current.map(|current| named.unwrap_or(current));
        allocation_failed(&mut state, Kind::Pool, device, code)
    })
}

/// Makes a pool.
pub fn create(properties: &PoolProperties) -> CuResult<PoolHandle> {
    let mut state = state();
    state.require_initialised()?;
    let is_on_device = properties.location_type == ON_DEVICE;
    if properties.allocation_type != PINNED || !is_on_device || properties.handle_types > 1 {
        return Err(INVALID_VALUE);
    }
    let device = state.device(properties.location)?;
    let max_bytes = properties.max_bytes as u64;
    let max_bytes = max_bytes.next_multiple_of(CHUNK_BYTES as u64);
    let handle = state.pools.handles.issue();
    let pool = Pool::new(device, max_bytes);
    state.pools.pools.insert(handle, pool);
    Ok(handle)
}

pub fn destroy(handle: PoolHandle) -> CuResult<()> {
    let mut state = state();
    let device = state.pools.usable(handle)?.device;
    if handle == default_pool(device) {
        return Err(INVALID_VALUE);
    }
    if let Some(pool) = state.pools.pools.get_mut(&handle) {
        pool.is_destroyed = true;
    }
    for (device, current) in state.pools.current.iter_mut().enumerate() {
        if *current == handle {
            *current = default_pool(device as u32);
        }
    }
    state.end_pool_if_unused(handle);
    Ok(())
}

pub fn trim_to(handle: PoolHandle, keep: usize) -> CuResult<()> {
    let mut state = state();
    state.pools.usable(handle)?;
    state.trim(handle, keep as u64);
    Ok(())
}

/// Whether there is such a pool.
pub fn require(handle: PoolHandle) -> CuResult<()> {
    let state = state();
    state.require_initialised()?;
    state.pools.usable(handle).map(|_| ())
}

pub fn default_of(device: c_int) -> CuResult<PoolHandle> {
    Ok(default_pool(state().device(device)?))
}

pub fn current_of(device: c_int) -> CuResult<PoolHandle> {
    let state = state();
    let device = state.device(device)?;
    Ok(state.pools.current[device as usize])
}

pub fn set_current(device: c_int, handle: PoolHandle) -> CuResult<()> {
    let mut state = state();
    let device = state.device(device)?;
    if state.pools.usable(handle)?.device != device {
        return Err(INVALID_VALUE);
    }
    state.pools.current[device as usize] = handle;
    Ok(())
}

/// An attribute's value: an `int` for the first ones, else a 64-bit number.
pub enum Attribute {
    Int(c_int),
    Bytes(u64),
}

pub fn attribute(handle: PoolHandle, attribute: c_int) -> CuResult<Attribute> {
    let state = state();
    let pool = state.pools.usable(handle)?;
    Ok(match attribute {
        REUSE_FOLLOW_EVENT_DEPENDENCIES..=REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            Attribute::Int(pool.reuse[attribute as usize - 1])
        }
        RELEASE_THRESHOLD => Attribute::Bytes(pool.threshold),
        RESERVED_CURRENT => Attribute::Bytes(pool.reserved),
        RESERVED_HIGH => Attribute::Bytes(pool.reserved_high),
        USED_CURRENT => Attribute::Bytes(pool.used),
        USED_HIGH => Attribute::Bytes(pool.used_high),
        _ => return Err(INVALID_VALUE),
    })
}

/// Sets an attribute. High-water marks can only be reset, to 0, which means from now on.
///
/// # Safety
/// `value` must point to an `int` or a 64-bit number, as the attribute wants it.
pub unsafe fn set_attribute(
    handle: PoolHandle,
    attribute: c_int,
    value: *const c_void,
) -> CuResult<()> {
    let mut state = state();
    state.pools.usable(handle)?;
    let pool = state.pools.pools.get_mut(&handle).ok_or(INVALID_VALUE)?;
    if value.is_null() {
        return Err(INVALID_VALUE);
    }
    match attribute {
        REUSE_FOLLOW_EVENT_DEPENDENCIES..=REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            // SAFETY: the caller's promise.
            pool.reuse[attribute as usize - 1] = unsafe { value.cast::<c_int>().read_unaligned() };
        }
        RELEASE_THRESHOLD | RESERVED_HIGH | USED_HIGH => {
            // SAFETY: the caller's promise.
            let bytes = unsafe { value.cast::<u64>().read_unaligned() };
            match attribute {
                RELEASE_THRESHOLD => pool.threshold = bytes,
                _ if bytes != 0 => return Err(INVALID_VALUE),
                RESERVED_HIGH => pool.reserved_high = pool.reserved,
                _ => pool.used_high = pool.used,
            }
        }
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}
