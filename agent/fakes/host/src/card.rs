//! The host that the stand-ins pretend to be on: two cards of 8 GiB each, or as much as
//! [`BYTES_VARIABLE`] says.
//!
//! The driver's and the management library's answers must agree, so both take them from here.

use std::sync::OnceLock;

/// Number of cards.
pub const DEVICES: usize = 2;

/// Capacity of one card, in bytes, unless [`BYTES_VARIABLE`] says otherwise.
pub const DEVICE_BYTES: u64 = 8 << 30;

/// Environment variable with another capacity, in bytes, for programs that are to run out of memory.
pub const BYTES_VARIABLE: &str = "VRAMSCOPE_FAKE_DEVICE_BYTES";

/// Capacity of one card, in bytes, as this process's environment has it. A value that is no number
/// of bytes above 0 is as good as none: a driver has nobody to complain to.
pub fn device_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let value = std::env::var(BYTES_VARIABLE).ok();
        let bytes = value.and_then(|value| value.parse().ok());
        bytes.filter(|bytes| *bytes > 0).unwrap_or(DEVICE_BYTES)
    })
}

/// Device memory starts at, and takes, whole granules of address space, as the vendor's does.
pub const GRANULE_BYTES: usize = 2 << 20;

/// What a process takes on a card besides its allocations, in bytes, as NVML reports it: the
/// stand-in for the context's own memory (some hundred MB on real cards).
pub const CONTEXT_OVERHEAD_BYTES: u64 = 256 << 20;

/// Version of the driver interface, as `cuDriverGetVersion` encodes it (1000 * major + 10 * minor).
pub const CUDA_VERSION: i32 = 13000;

/// Version of the driver, as `nvmlSystemGetDriverVersion` reports it.
pub const DRIVER_VERSION: &str = "580.65.06";

/// Every card's name.
pub const NAME: &str = "Stand-in GPU";

/// The card's UUID, as the driver returns it.
pub fn uuid_bytes(device: usize) -> [u8; 16] {
    (device as u128).to_be_bytes()
}

/// The card's UUID, as NVML prints it: `GPU-` and the bytes in the usual five groups.
pub fn uuid(device: usize) -> String {
    let hex: String = uuid_bytes(device)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

/// The card's PCI bus number; domain, device and function are 0.
pub fn pci_bus(device: usize) -> u32 {
    device as u32 + 1
}

/// The card's PCI address with the eight-digit domain that NVML uses.
pub fn pci_bus_id(device: usize) -> String {
    format!("00000000:{:02X}:00.0", pci_bus(device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_have_the_promised_names() {
        assert_eq!(uuid(0), "GPU-00000000-0000-0000-0000-000000000000");
        assert_eq!(uuid(1), "GPU-00000000-0000-0000-0000-000000000001");
        assert_eq!(pci_bus_id(0), "00000000:01:00.0");
        assert_eq!(pci_bus_id(1), "00000000:02:00.0");
    }
}
