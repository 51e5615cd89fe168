//! The interface's codes and structures, laid out as its public documentation gives them.

use std::ffi::{CStr, c_char, c_uint, c_ulonglong};

use vramscope_fake_host::card;

pub type NvmlResult<T> = Result<T, c_uint>;

pub const SUCCESS: c_uint = 0;
pub const UNINITIALIZED: c_uint = 1;
pub const INVALID_ARGUMENT: c_uint = 2;
pub const NOT_SUPPORTED: c_uint = 3;
pub const NOT_FOUND: c_uint = 6;
pub const INSUFFICIENT_SIZE: c_uint = 7;
pub const ARGUMENT_VERSION_MISMATCH: c_uint = 25;
pub const UNKNOWN: c_uint = 999;

/// A description of a code, in our own words.
pub fn describe(code: c_uint) -> &'static CStr {
    match code {
        SUCCESS => c"success",
        UNINITIALIZED => c"library not initialized",
        INVALID_ARGUMENT => c"invalid argument",
        NOT_SUPPORTED => c"not supported",
        NOT_FOUND => c"not found",
        INSUFFICIENT_SIZE => c"too little room for the answer",
        ARGUMENT_VERSION_MISMATCH => c"unknown structure version",
        _ => c"unknown error",
    }
}

/// nvmlPciInfo_t.
#[repr(C)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_sub_system_id: c_uint,
    bus_id: [c_char; 32],
}

impl PciInfo {
    pub fn of_card(index: usize) -> Self {
        let bus_id = card::pci_bus_id(index);
        Self {
            // The old form has a domain of four digits.
            bus_id_legacy: text(bus_id.get(4..).unwrap_or_default()),
            domain: 0,
            bus: card::pci_bus(index),
            device: 0,
            // No vendor's number: the card is pretended.
            pci_device_id: 0,
            pci_sub_system_id: 0,
            bus_id: text(&bus_id),
        }
    }
}

/// A text in a field of fixed length; what does not fit before the zero byte is cut off.
fn text<const N: usize>(value: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (target, byte) in field.iter_mut().take(N - 1).zip(value.bytes()) {
        *target = byte as c_char;
    }
    field
}

/// nvmlMemory_t; bytes.
#[repr(C)]
pub struct Memory {
    pub total: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

/// nvmlMemory_v2_t; bytes.
#[repr(C)]
pub struct MemoryV2 {
    pub version: c_uint,
    pub total: c_ulonglong,
    pub reserved: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

impl MemoryV2 {
    /// The interface's mark of a structure: its size, and the version in the top byte.
    pub const VERSION: c_uint = size_of::<Self>() as c_uint | 2 << 24;
}

/// nvmlUtilization_t; percent.
#[repr(C)]
pub struct Utilization {
    pub gpu: c_uint,
    pub memory: c_uint,
}

/// nvmlProcessInfo_v1_t.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessInfoV1 {
    pub pid: c_uint,
    pub used_gpu_memory: u64,
}

impl From<&ProcessInfo> for ProcessInfoV1 {
    fn from(info: &ProcessInfo) -> Self {
        Self {
            pid: info.pid,
            used_gpu_memory: info.used_gpu_memory,
        }
    }
}

/// nvmlProcessInfo_t, as of its second version.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessInfo {
    pub pid: c_uint,
    pub used_gpu_memory: c_ulonglong,
    pub gpu_instance_id: c_uint,
    pub compute_instance_id: c_uint,
}
