//! Memory with an owner's context: of the card, managed, pinned, registered, and arrays; and the
//! frees, which pools' slices share with them.

use std::ffi::{c_int, c_uint};

use vramscope_fake_host::{
    arrays::Shape,
    ledger::{Block, Kind},
};

use crate::{
    Out,
    codes::*,
    memory,
    state::{State, allocation_failed, state},
};

/// CU_MEMHOSTALLOC_PORTABLE | DEVICEMAP | WRITECOMBINED.
const HOST_ALLOC_FLAGS: c_uint = 0x7;
/// CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP | IOMEMORY | READ_ONLY.
const HOST_REGISTER_FLAGS: c_uint = 0xf;
/// CU_MEM_ATTACH_GLOBAL, CU_MEM_ATTACH_HOST.
const MANAGED_FLAGS: [c_uint; 2] = [1, 2];
/// Rows of pitched memory begin at multiples of this.
const PITCH_BYTES: usize = 512;
/// CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP.
const LAYERED_FLAGS: c_uint = 0x1 | 0x4;

/// An array's descriptor as both calls that make one give it.
pub struct ArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: c_uint,
    pub channels: c_uint,
    pub flags: c_uint,
}

impl ArrayDescriptor {
    fn shape(&self) -> Option<Shape> {
        if !matches!(self.channels, 1 | 2 | 4) {
            return None;
        }
        let channel = vramscope_fake_host::arrays::channel_bytes(self.format)?;
        Some(Shape {
            width: self.width,
            height: self.height,
            depth: self.depth,
            element_bytes: channel * self.channels as usize,
            is_layered: self.flags & LAYERED_FLAGS != 0,
        })
    }
}

impl State {
    /// Gives a freed block's address or handle back, or unlocks what was only registered.
    pub fn give_back(&mut self, address: usize, block: Block) {
        let bytes = block.bytes as usize;
        match block.kind {
            Kind::Device | Kind::VmmVirtual => self.addresses.give(address, bytes),
            Kind::Managed => memory::unmap_managed(address, bytes),
            Kind::PinnedHost => memory::unmap_pinned(address, bytes),
            Kind::RegisteredHost => memory::unpin(address, bytes),
            Kind::Array => self.array_handles.give_back(address),
            Kind::Pool => self.give_slice_back(address, block.bytes),
            // Their owner, `vmm`, keeps both.
            Kind::VmmPhysical | Kind::VmmMapped => {}
        }
    }

    /// Allocates in the current context: `place` finds the address and the bytes that count. The
    /// outcome is entered in the books.
    fn allocate(
        &mut self,
        kind: Kind,
        place: impl FnOnce(&mut Self, u32) -> CuResult<(usize, u64)>,
    ) -> CuResult<()> {
        let current = self.current();
        let placed = current.and_then(|(context, device)| {
            let (address, bytes) = place(self, device)?;
            let block = Block {
                kind,
                device: Some(device),
                bytes,
                context,
            };
            self.accounts.allocated(address, block);
            Ok(())
        });
        placed.or_else(|code| {
            let device = current.ok().map(|(_, device)| device);
            allocation_failed(self, kind, device, code)
        })
    }

    fn require_free(&self, device: u32, bytes: u64) -> CuResult<()> {
        if bytes > self.free_bytes(device) {
            return Err(OUT_OF_MEMORY);
        }
        Ok(())
    }
}

pub fn allocate_device(address: Out<usize>, bytes: usize) -> CuResult<()> {
    state().allocate(Kind::Device, |state, device| {
        let out = address.ok_or(INVALID_VALUE)?;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        state.require_free(device, bytes as u64)?;
        let place = state.addresses.take(bytes, 1).ok_or(OUT_OF_MEMORY)?;
        out.write(place);
        Ok((place, bytes as u64))
    })
}

pub fn allocate_pitched(
    address: Out<usize>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
    element_bytes: c_uint,
) -> CuResult<()> {
    state().allocate(Kind::Device, |state, device| {
        let (Some(address), Some(pitch)) = (address, pitch) else {
            return Err(INVALID_VALUE);
        };
        if width == 0 || height == 0 || !matches!(element_bytes, 4 | 8 | 16) {
            return Err(INVALID_VALUE);
        }
        let row = width
            .checked_next_multiple_of(PITCH_BYTES)
            .ok_or(OUT_OF_MEMORY)?;
        let bytes = row.checked_mul(height).ok_or(OUT_OF_MEMORY)?;
        state.require_free(device, bytes as u64)?;
        let place = state.addresses.take(bytes, 1).ok_or(OUT_OF_MEMORY)?;
        address.write(place);
        pitch.write(row);
        Ok((place, bytes as u64))
    })
}

pub fn allocate_managed(address: Out<usize>, bytes: usize, flags: c_uint) -> CuResult<()> {
    state().allocate(Kind::Managed, |state, device| {
        let out = address.ok_or(INVALID_VALUE)?;
        if bytes == 0 || !MANAGED_FLAGS.contains(&flags) {
            return Err(INVALID_VALUE);
        }
        state.require_free(device, bytes as u64)?;
        let place = memory::map_managed(bytes).ok_or(OUT_OF_MEMORY)?;
        out.write(place);
        Ok((place, bytes as u64))
    })
}

pub fn allocate_pinned(address: Out<usize>, bytes: usize, flags: c_uint) -> CuResult<()> {
    state().allocate(Kind::PinnedHost, |_, _| {
        let out = address.ok_or(INVALID_VALUE)?;
        if bytes == 0 || flags & !HOST_ALLOC_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        let place = memory::pin_new(bytes).ok_or(OUT_OF_MEMORY)?;
        out.write(place);
        Ok((place, bytes as u64))
    })
}

pub fn register(address: usize, bytes: usize, flags: c_uint) -> CuResult<()> {
    state().allocate(Kind::RegisteredHost, |state, _| {
        let is_usable = address != 0
            && bytes != 0
            && address.checked_add(bytes).is_some()
            && flags & !HOST_REGISTER_FLAGS == 0;
        if !is_usable || !memory::exists(address, bytes) {
            return Err(INVALID_VALUE);
        }
        let mut others = state
            .accounts
            .overlapping(Kind::RegisteredHost, address, bytes);
        if let Some((_, other)) = others.next() {
            return Err(match other.kind {
                Kind::PinnedHost | Kind::RegisteredHost => HOST_MEMORY_ALREADY_REGISTERED,
                _ => INVALID_VALUE,
            });
        }
        drop(others);
        memory::pin(address, bytes);
        Ok((address, bytes as u64))
    })
}

pub fn create_array(
    array: Out<usize>,
    descriptor: Option<ArrayDescriptor>,
    levels: Option<c_uint>,
) -> CuResult<()> {
    state().allocate(Kind::Array, |state, device| {
        let out = array.ok_or(INVALID_VALUE)?;
        let shape = descriptor.and_then(|descriptor| descriptor.shape());
        let shape = shape.ok_or(INVALID_VALUE)?;
        let bytes = match levels {
            None => shape.bytes(),
            Some(0) => None,
            Some(levels) => shape.mipmapped_bytes(levels),
        };
        let bytes = bytes.ok_or(INVALID_VALUE)?;
        state.require_free(device, bytes)?;
        let handle = state.array_handles.issue();
        out.write(handle);
        Ok((handle, bytes))
    })
}

/// What a function that frees may free, and the kind its failures count under, the first of them.
pub type Freeable = &'static [Kind];
pub const BY_FREE: Freeable = &[Kind::Device, Kind::Managed, Kind::Pool];
pub const BY_FREE_ASYNC: Freeable = &[Kind::Pool, Kind::Device, Kind::Managed];
pub const BY_FREE_HOST: Freeable = &[Kind::PinnedHost];
pub const BY_UNREGISTER: Freeable = &[Kind::RegisteredHost];
pub const BY_ARRAY_DESTROY: Freeable = &[Kind::Array];

/// Frees, or unregisters, what begins at an address, and enters the outcome in the books.
pub fn free(kinds: Freeable, address: usize) -> CuResult<()> {
    let mut state = state();
    let current = state.current();
    // No caller's list is empty.
    let kind = kinds.first().copied().unwrap_or(Kind::Device);
    let freed = current.and_then(|_| {
        // The vendor's frees nothing, successfully, at address 0, as cudaFree is documented to.
        if address == 0 && (kind == Kind::Device || kind == Kind::Pool) {
            return Ok(());
        }
        state.fail_free_if_planted()?;
        let found = state.accounts.block(kind, address);
        let freed = found
            .filter(|block| kinds.contains(&block.kind))
            .and_then(|block| state.accounts.freed(block.kind, address));
        match freed {
            Some(block) => {
                state.give_back(address, block);
                Ok(())
            }
            None => Err(no_such_block(kind)),
        }
    });
    if freed.is_err() {
        let device = current.ok().map(|(_, device)| device);
        state.accounts.free_failed(kind, address, device);
    }
    freed
}

fn no_such_block(kind: Kind) -> c_int {
    match kind {
        Kind::RegisteredHost => HOST_MEMORY_NOT_REGISTERED,
        Kind::Array => INVALID_HANDLE,
        _ => INVALID_VALUE,
    }
}
