//! Virtual memory management: addresses, memory and mappings apart.
//!
//! Invariants, as documented:
//! - memory has a count of references (its creation, each retain) and one of mappings, and lives
//!   until both are 0; a retain may revive a handle whose references are gone while it is mapped;
//! - a mapping lies within one reservation and overlaps no other; one unmapping may end several
//!   adjacent mappings, but never a part of one;
//! - a reservation can be given back only whole and with nothing mapped in it;
//! - no call needs a current context. Memory belongs to the device that its properties name, a mapping
//!   to its memory's device, a reservation to none;
//! - imported memory is the exporter's: it is mapped like other memory, but is in no book here and
//!   takes nothing of the card.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{c_int, c_uint, c_void},
    io::{Read, Seek, Write},
    os::fd::{FromRawFd, IntoRawFd},
};

use vramscope_fake_host::{
    card::GRANULE_BYTES,
    ledger::{Block, Kind},
};

use crate::{
    Memory, Out,
    codes::*,
    state::{Handles, State, allocation_failed, state},
};

const FIRST_HANDLE: Memory = 0x6000_0000;

/// CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
const PINNED: c_uint = 1;
const ON_DEVICE: c_uint = 1;
const FILE_DESCRIPTOR: c_uint = 1;

/// What the file behind a shared handle holds: this mark, and the bytes of memory.
const SHARED_MARK: [u8; 8] = *b"VSSHARED";

/// CUmemAllocationProp.
#[repr(C)]
pub struct Properties {
    allocation_type: c_uint,
    handle_types: c_uint,
    location_type: c_uint,
    location: c_int,
    _security: *const c_void,
    _flags: [u8; 8],
}

/// Memory and mappings of a process. Reservations are blocks of the accounts alone.
pub struct Vmm {
    memories: HashMap<Memory, Backing>,
    handles: Handles,
    /// Mappings by address: their bytes and memory.
    mappings: BTreeMap<usize, (usize, Memory)>,
}

struct Backing {
    bytes: usize,
    /// `None` for imported memory, whose importer names none.
    device: Option<u32>,
    is_shareable: bool,
    references: u32,
    mappings: u32,
}

impl Vmm {
    pub fn new() -> Self {
        Self {
            memories: HashMap::new(),
            handles: Handles::from(FIRST_HANDLE),
            mappings: BTreeMap::new(),
        }
    }

    /// Memory that the program holds a reference of.
    fn held(&mut self, handle: Memory) -> CuResult<&mut Backing> {
        let memory = self.memories.get_mut(&handle);
        memory
            .filter(|memory| memory.references > 0)
            .ok_or(INVALID_VALUE)
    }

    /// The mappings that make up exactly this range; none if they do not.
    fn exactly(&self, address: usize, bytes: usize) -> Option<Vec<(usize, usize, Memory)>> {
        let end = address.checked_add(bytes)?;
        let mut next = address;
        let mut found = Vec::new();
        for (start, (length, memory)) in self.mappings.range(address..end) {
            if *start != next {
                return None;
            }
            next = start + length;
            found.push((*start, *length, *memory));
        }
        (next == end && !found.is_empty()).then_some(found)
    }

    /// The memory that is mapped at an address.
    fn mapped_at(&self, address: usize) -> Option<Memory> {
        let (start, (length, memory)) = self.mappings.range(..=address).next_back()?;
        (address < start + length).then_some(*memory)
    }
}

impl State {
    /// Ends memory that has neither references nor mappings left.
    fn end_memory_if_unused(&mut self, handle: Memory) {
        let is_unused = self
            .vmm
            .memories
            .get(&handle)
            .is_some_and(|memory| memory.references == 0 && memory.mappings == 0);
        if !is_unused {
            return;
        }
        self.vmm.memories.remove(&handle);
        self.vmm.handles.give_back(handle);
        // Imported memory is in no book, so nothing is struck off for it.
        self.accounts.freed(Kind::VmmPhysical, handle);
    }

    fn free_failed(&mut self, kind: Kind, address: usize, code: c_int) -> CuResult<()> {
        self.accounts.free_failed(kind, address, None);
        Err(code)
    }
}

fn is_whole(number: usize) -> bool {
    number.is_multiple_of(GRANULE_BYTES)
}

fn is_size(bytes: usize) -> bool {
    bytes > 0 && is_whole(bytes)
}

pub fn reserve(
    address: Out<usize>,
    bytes: usize,
    alignment: usize,
    wanted: usize,
    flags: u64,
) -> CuResult<()> {
    let mut state = state();
    let reserved = state.require_initialised().and_then(|()| {
        let out = address.ok_or(INVALID_VALUE)?;
        let is_alignment = alignment == 0 || alignment.is_power_of_two();
        if !is_size(bytes) || !is_alignment || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // A wanted address is a hint.
        let place = if wanted != 0 && state.addresses.take_at(wanted, bytes) {
            wanted
        } else {
            let place = state.addresses.take(bytes, alignment.max(1));
            place.ok_or(OUT_OF_MEMORY)?
        };
        out.write(place);
        let block = Block {
            kind: Kind::VmmVirtual,
            device: None,
            bytes: bytes as u64,
            context: 0,
        };
        state.accounts.allocated(place, block);
        Ok(())
    });
    reserved.or_else(|code| allocation_failed(&mut state, Kind::VmmVirtual, None, code))
}

pub fn unreserve(address: usize, bytes: usize) -> CuResult<()> {
    let mut state = state();
    let freed = state.require_initialised().and_then(|()| {
        let block = state.accounts.block(Kind::VmmVirtual, address);
        let block = block.filter(|block| block.bytes == bytes as u64);
        let block = block.ok_or(INVALID_VALUE)?;
        let mut mapped = state.accounts.overlapping(Kind::VmmMapped, address, bytes);
        if mapped.next().is_some() {
            return Err(INVALID_VALUE);
        }
        drop(mapped);
        state.accounts.freed(Kind::VmmVirtual, address);
        state.give_back(address, block);
        Ok(())
    });
    freed.or_else(|code| state.free_failed(Kind::VmmVirtual, address, code))
}

pub fn create(
    handle: Out<Memory>,
    bytes: usize,
    properties: Option<&Properties>,
    flags: u64,
) -> CuResult<()> {
    let mut state = state();
    let device = properties
        .filter(|properties| properties.location_type == ON_DEVICE)
        .and_then(|properties| state.device(properties.location).ok());
    let created = state.require_initialised().and_then(|()| {
        let (Some(out), Some(properties)) = (handle, properties) else {
            return Err(INVALID_VALUE);
        };
        let is_understood = properties.allocation_type == PINNED
            && properties.location_type == ON_DEVICE
            && properties.handle_types <= FILE_DESCRIPTOR;
        if !is_size(bytes) || !is_understood || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let device = device.ok_or(INVALID_DEVICE)?;
        if bytes as u64 > state.free_bytes(device) {
            return Err(OUT_OF_MEMORY);
        }
        let handle = state.vmm.handles.issue();
        let backing = Backing {
            bytes,
            device: Some(device),
            is_shareable: properties.handle_types == FILE_DESCRIPTOR,
            references: 1,
            mappings: 0,
        };
        state.vmm.memories.insert(handle, backing);
        let block = Block {
            kind: Kind::VmmPhysical,
            device: Some(device),
            bytes: bytes as u64,
            context: 0,
        };
        state.accounts.allocated(handle, block);
        out.write(handle);
        Ok(())
    });
    created.or_else(|code| allocation_failed(&mut state, Kind::VmmPhysical, device, code))
}

pub fn release(handle: Memory) -> CuResult<()> {
    let mut state = state();
    let released = state.require_initialised().and_then(|()| {
        state.vmm.held(handle)?.references -= 1;
        state.end_memory_if_unused(handle);
        Ok(())
    });
    released.or_else(|code| state.free_failed(Kind::VmmPhysical, handle, code))
}

/// One more reference of the memory mapped at an address.
pub fn retain(handle: Out<Memory>, address: usize) -> CuResult<()> {
    let mut state = state();
    let retained = state.require_initialised().and_then(|()| {
        let out = handle.ok_or(INVALID_VALUE)?;
        let handle = state.vmm.mapped_at(address).ok_or(INVALID_VALUE)?;
        let memory = state.vmm.memories.get_mut(&handle).ok_or(INVALID_VALUE)?;
        memory.references += 1;
        out.write(handle);
        Ok(())
    });
    retained.or_else(|code| allocation_failed(&mut state, Kind::VmmPhysical, None, code))
}

pub fn map(
    address: usize,
    bytes: usize,
    offset: usize,
    handle: Memory,
    flags: u64,
) -> CuResult<()> {
    let mut state = state();
    let known = state.vmm.held(handle).ok();
    let device = known.and_then(|memory| memory.device);
    let mapped = state.require_initialised().and_then(|()| {
        let memory = state.vmm.held(handle)?;
        // The offset has to be 0 for the time being, as documented.
        let fits = is_size(bytes) && bytes <= memory.bytes && offset == 0;
        if !fits || !is_whole(address) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let accounts = &state.accounts;
        let reservation = accounts
            .overlapping(Kind::VmmVirtual, address, bytes)
            .next();
        let is_reserved = reservation.is_some_and(|(start, block)| {
            start <= address && address + bytes <= start + block.bytes as usize
        });
        let is_mapped = accounts
            .overlapping(Kind::VmmMapped, address, bytes)
            .next()
            .is_some();
        if !is_reserved || is_mapped {
            return Err(INVALID_VALUE);
        }
        state.vmm.held(handle)?.mappings += 1;
        state.vmm.mappings.insert(address, (bytes, handle));
        let block = Block {
            kind: Kind::VmmMapped,
            device,
            bytes: bytes as u64,
            context: 0,
        };
        state.accounts.allocated(address, block);
        Ok(())
    });
    mapped.or_else(|code| allocation_failed(&mut state, Kind::VmmMapped, device, code))
}

pub fn unmap(address: usize, bytes: usize) -> CuResult<()> {
    let mut state = state();
    let unmapped = state.require_initialised().and_then(|()| {
        let mappings = state.vmm.exactly(address, bytes).ok_or(INVALID_VALUE)?;
        for (start, _, handle) in mappings {
            state.vmm.mappings.remove(&start);
            state.accounts.freed(Kind::VmmMapped, start);
            if let Some(memory) = state.vmm.memories.get_mut(&handle) {
                memory.mappings -= 1;
            }
            state.end_memory_if_unused(handle);
        }
        Ok(())
    });
    unmapped.or_else(|code| state.free_failed(Kind::VmmMapped, address, code))
}

/// Checked, and without effect: nothing may touch device memory anyway.
pub fn set_access(address: usize, bytes: usize, descriptions: usize) -> CuResult<()> {
    let state = state();
    state.require_initialised()?;
    let is_mapped = state.vmm.exactly(address, bytes).is_some();
    if is_mapped && descriptions > 0 {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}

pub fn granularity(properties: Option<&Properties>) -> CuResult<usize> {
    let state = state();
    let properties = properties.ok_or(INVALID_VALUE)?;
    if properties.location_type != ON_DEVICE {
        return Err(INVALID_VALUE);
    }
    state.device(properties.location)?;
    Ok(GRANULE_BYTES)
}

/// A file descriptor that stands for memory in another process.
pub fn export(handle: Memory, handle_type: c_uint, flags: u64) -> CuResult<c_int> {
    let mut state = state();
    state.require_initialised()?;
    let memory = state.vmm.held(handle)?;
    if handle_type != FILE_DESCRIPTOR || flags != 0 || !memory.is_shareable {
        return Err(INVALID_VALUE);
    }
    let bytes = memory.bytes as u64;
    // SAFETY: a string with its zero byte and a plain number.
    let descriptor = unsafe { libc::memfd_create(c"shared-memory".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(OUT_OF_MEMORY);
    }
    // SAFETY: a descriptor just opened, which nobody else knows.
    let mut file = unsafe { std::fs::File::from_raw_fd(descriptor) };
    let written = file
        .write_all(&SHARED_MARK)
        .and_then(|()| file.write_all(&bytes.to_ne_bytes()));
    written.map_err(|_| OUT_OF_MEMORY)?;
    Ok(file.into_raw_fd())
}

pub fn import(handle: Out<Memory>, descriptor: c_int, handle_type: c_uint) -> CuResult<()> {
    let mut state = state();
    let imported = state.require_initialised().and_then(|()| {
        let out = handle.ok_or(INVALID_VALUE)?;
        if handle_type != FILE_DESCRIPTOR {
            return Err(INVALID_VALUE);
        }
        let bytes = shared_bytes(descriptor).ok_or(INVALID_VALUE)?;
        let handle = state.vmm.handles.issue();
        let backing = Backing {
            bytes,
            device: None,
            is_shareable: false,
            references: 1,
            mappings: 0,
        };
        state.vmm.memories.insert(handle, backing);
        out.write(handle);
        Ok(())
    });
    imported.or_else(|code| allocation_failed(&mut state, Kind::VmmPhysical, None, code))
}

/// The bytes of memory that a descriptor stands for; none if it does not come from [`export`].
fn shared_bytes(descriptor: c_int) -> Option<usize> {
    // SAFETY: duplicating a number that is no descriptor fails cleanly.
    let own = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        return None;
    }
    // SAFETY: a descriptor just made, closed by the file.
    let mut file = unsafe { std::fs::File::from_raw_fd(own) };
    let mut content = [0; 16];
    file.rewind().ok()?;
    file.read_exact(&mut content).ok()?;
    let (mark, bytes) = content.split_at(8);
    let bytes = u64::from_ne_bytes(bytes.try_into().ok()?);
    (mark == SHARED_MARK).then_some(usize::try_from(bytes).ok()?)
}
