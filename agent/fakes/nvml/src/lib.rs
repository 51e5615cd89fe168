//! Stand-in for `libnvidia-ml.so.1`: the management functions that an agent asks, answered from the
//! driver's ledgers of the processes that live.
//!
//! This file is the door: thin functions under the vendor's names. Invariants:
//! - nothing here panics, since a panic must not cross into C: it would end the program;
//! - every function but `nvmlInit…` and `nvmlErrorString` wants an initialised library;
//! - output parameters are `Option<&mut T>`, which C sees as a pointer that may be null. That the
//!   pointer, where not null, points to a `T` is the caller's part, as with the vendor's.

mod structs;
mod usage;

use std::{
    ffi::{CStr, c_char, c_int, c_uint},
    mem::MaybeUninit,
    sync::atomic::{AtomicU32, Ordering},
};

use structs::*;
use vramscope_fake_host::card;

/// An output parameter: in C a pointer.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// nvmlDevice_t: an opaque handle, here the card's index plus 1.
type Device = usize;

/// NVML_VALUE_NOT_AVAILABLE for the ids of a GPU or compute instance: the card is not split.
const NO_INSTANCE: c_uint = c_uint::MAX;

/// Initialisations that no shutdown has undone.
static INITIALISED: AtomicU32 = AtomicU32::new(0);

fn require_initialised() -> NvmlResult<()> {
    if INITIALISED.load(Ordering::Relaxed) > 0 {
        Ok(())
    } else {
        Err(UNINITIALIZED)
    }
}

/// The index of the card behind a handle.
fn card_of(device: Device) -> NvmlResult<usize> {
    require_initialised()?;
    device
        .checked_sub(1)
        .filter(|index| *index < card::DEVICES)
        .ok_or(INVALID_ARGUMENT)
}

fn code(result: NvmlResult<()>) -> c_uint {
    match result {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}

fn put<T>(out: Out<T>, value: NvmlResult<T>) -> c_uint {
    code(value.and_then(|value| {
        out.ok_or(INVALID_ARGUMENT)?.write(value);
        Ok(())
    }))
}

/// Writes a text with its zero byte.
///
/// # Safety
/// `buffer` must be null or point to `length` writable bytes.
unsafe fn put_text(buffer: *mut c_char, length: c_uint, text: NvmlResult<String>) -> c_uint {
    let text = match text {
        Ok(text) => text,
        Err(code) => return code,
    };
    if buffer.is_null() {
        return INVALID_ARGUMENT;
    }
    if (length as usize) <= text.len() {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller gives `length` writable bytes, which are more than the text's.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len());
        buffer.add(text.len()).write(0);
    }
    SUCCESS
}

fn initialise() -> c_uint {
    INITIALISED.fetch_add(1, Ordering::Relaxed);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> c_uint {
    initialise()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    initialise()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_uint {
    initialise()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    let undone = INITIALISED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
        count.checked_sub(1)
    });
    if undone.is_ok() {
        SUCCESS
    } else {
        UNINITIALIZED
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(error: c_uint) -> *const c_char {
    let text: &CStr = describe(error);
    text.as_ptr()
}

/// # Safety
/// `version` must be null or point to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(
    version: *mut c_char,
    length: c_uint,
) -> c_uint {
    let text = require_initialised().map(|()| card::DRIVER_VERSION.to_owned());
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_text(version, length, text) }
}

/// # Safety
/// `version` must be null or point to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> c_uint {
    // The management library's version is the CUDA major version before the driver's.
    let text = require_initialised()
        .map(|()| format!("{}.{}", card::CUDA_VERSION / 1000, card::DRIVER_VERSION));
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_text(version, length, text) }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) -> c_uint {
    put(version, require_initialised().map(|()| card::CUDA_VERSION))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) -> c_uint {
    put(version, require_initialised().map(|()| card::CUDA_VERSION))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(count: Out<c_uint>) -> c_uint {
    put(
        count,
        require_initialised().map(|()| card::DEVICES as c_uint),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Device>) -> c_uint {
    let handle = index as usize + 1;
    put(device, card_of(handle).map(|_| handle))
}

/// The handle of the card that a name, as `name_of` makes it, belongs to.
///
/// # Safety
/// `name` must be null or point to a string that ends in a zero byte.
unsafe fn handle_by_name(
    name: *const c_char,
    device: Out<Device>,
    name_of: fn(usize) -> String,
) -> c_uint {
    if name.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not null, so the caller vouches for a string that ends in a zero byte.
    let name = unsafe { CStr::from_ptr(name) };
    let found = require_initialised().and_then(|()| {
        (0..card::DEVICES)
            .find(|index| name_of(*index).as_bytes() == name.to_bytes())
            .map(|index| index + 1)
            .ok_or(NOT_FOUND)
    });
    put(device, found)
}

/// # Safety
/// `uuid` must be null or point to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    device: Out<Device>,
) -> c_uint {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { handle_by_name(uuid, device, card::uuid) }
}

/// # Safety
/// `bus_id` must be null or point to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    bus_id: *const c_char,
    device: Out<Device>,
) -> c_uint {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { handle_by_name(bus_id, device, card::pci_bus_id) }
}

/// # Safety
/// `name` must be null or point to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(
    device: Device,
    name: *mut c_char,
    length: c_uint,
) -> c_uint {
    let text = card_of(device).map(|_| card::NAME.to_owned());
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_text(name, length, text) }
}

/// # Safety
/// `uuid` must be null or point to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(
    device: Device,
    uuid: *mut c_char,
    length: c_uint,
) -> c_uint {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_text(uuid, length, card_of(device).map(card::uuid)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetIndex(device: Device, index: Out<c_uint>) -> c_uint {
    put(index, card_of(device).map(|card| card as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMinorNumber(device: Device, minor: Out<c_uint>) -> c_uint {
    put(minor, card_of(device).map(|card| card as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNumaNodeId(device: Device, node: Out<c_uint>) -> c_uint {
    put(node, card_of(device).and(Err(NOT_SUPPORTED)))
}

/// The cards are not split into instances.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(
    device: Device,
    current: Out<c_uint>,
    _pending: Out<c_uint>,
) -> c_uint {
    put(current, card_of(device).and(Err(NOT_SUPPORTED)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: Device, pci: Out<PciInfo>) -> c_uint {
    put(pci, card_of(device).map(PciInfo::of_card))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, memory: Out<Memory>) -> c_uint {
    let used = card_of(device).and_then(usage::used_bytes);
    let info = used.map(|used| Memory {
        total: card::device_bytes(),
        free: card::device_bytes().saturating_sub(used),
        used,
    });
    put(memory, info)
}

/// Not an [`Out`]: the caller fills in the version that it wants.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(
    device: Device,
    memory: Option<&mut MemoryV2>,
) -> c_uint {
    let Some(memory) = memory else {
        return INVALID_ARGUMENT;
    };
    if memory.version != MemoryV2::VERSION {
        return ARGUMENT_VERSION_MISMATCH;
    }
    code(card_of(device).and_then(usage::used_bytes).map(|used| {
        memory.total = card::device_bytes();
        memory.reserved = 0;
        memory.free = card::device_bytes().saturating_sub(used);
        memory.used = used;
    }))
}

/// Nothing computes on a pretended card.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(device: Device, rates: Out<Utilization>) -> c_uint {
    let idle = Utilization { gpu: 0, memory: 0 };
    put(rates, card_of(device).map(|_| idle))
}

/// Hands a list out by the interface's rule: `count` says how many fit and is set to how many there
/// are; with too little room nothing is written and the call says so.
///
/// # Safety
/// `infos` must be null or point to room for `*count` entries.
unsafe fn put_list<T: Copy>(
    count: Option<&mut c_uint>,
    infos: *mut T,
    list: NvmlResult<Vec<T>>,
) -> c_uint {
    let Some(count) = count else {
        return INVALID_ARGUMENT;
    };
    let list = match list {
        Ok(list) => list,
        Err(code) => return code,
    };
    let room = std::mem::replace(count, list.len() as c_uint) as usize;
    if list.is_empty() {
        return SUCCESS;
    }
    if room < list.len() {
        return INSUFFICIENT_SIZE;
    }
    if infos.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller gives room for `room` entries, which are enough.
    unsafe { std::ptr::copy_nonoverlapping(list.as_ptr(), infos, list.len()) };
    SUCCESS
}

fn compute_processes(device: Device) -> NvmlResult<Vec<ProcessInfo>> {
    let used = usage::by_process(card_of(device)?)?;
    Ok(used
        .into_iter()
        .map(|(pid, used_gpu_memory)| ProcessInfo {
            pid,
            used_gpu_memory,
            gpu_instance_id: NO_INSTANCE,
            compute_instance_id: NO_INSTANCE,
        })
        .collect())
}

/// # Safety
/// `infos` must be null or point to room for `*count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses(
    device: Device,
    count: Option<&mut c_uint>,
    infos: *mut ProcessInfoV1,
) -> c_uint {
    let list = compute_processes(device).map(|list| list.iter().map(Into::into).collect());
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_list(count, infos, list) }
}

/// # Safety
/// `infos` must be null or point to room for `*count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    device: Device,
    count: Option<&mut c_uint>,
    infos: *mut ProcessInfo,
) -> c_uint {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_list(count, infos, compute_processes(device)) }
}

/// # Safety
/// `infos` must be null or point to room for `*count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Device,
    count: Option<&mut c_uint>,
    infos: *mut ProcessInfo,
) -> c_uint {
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_list(count, infos, compute_processes(device)) }
}

/// # Safety
/// `infos` must be null or point to room for `*count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Device,
    count: Option<&mut c_uint>,
    infos: *mut ProcessInfo,
) -> c_uint {
    // A pretended card draws nothing.
    // SAFETY: the caller keeps this function's own contract.
    unsafe { put_list(count, infos, card_of(device).map(|_| Vec::new())) }
}

/// The cards have no links to each other.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: Device,
    _link: c_uint,
    kind: Out<c_uint>,
) -> c_uint {
    put(kind, card_of(device).and(Err(NOT_SUPPORTED)))
}

/// As [`nvmlDeviceGetNvLinkRemoteDeviceType`].
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: Device,
    _link: c_uint,
    pci: Out<PciInfo>,
) -> c_uint {
    put(pci, card_of(device).and(Err(NOT_SUPPORTED)))
}
