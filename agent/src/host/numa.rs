//! Which NUMA node the pages of a host buffer lie on, asked of the kernel by `move_pages`
//! without moving anything.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Buffers up to this many pages are asked page by page; of larger ones one page per 2 MiB.
const EVERY_PAGE_LIMIT: u64 = 4096;
const SAMPLE_BYTES: u64 = 2 << 20;
/// Addresses per system call.
const CHUNK: usize = 1024;

/// Where a buffer's pages lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub page_bytes: u64,
    /// True if pages between the asked ones are taken to lie where those do.
    pub sampled: bool,
    /// Pages by node; `None` is for pages that were not resident or could not be asked.
    pub pages: BTreeMap<Option<i32>, u64>,
}

impl Placement {
    /// Bytes on other nodes than `node`; `None` if the node or any page is not known.
    pub fn misplaced_bytes(&self, node: Option<i32>, buffer_bytes: u64) -> Option<u64> {
        let node = node?;
        if self.pages.contains_key(&None) {
            return None;
        }
        let elsewhere: u64 = self
            .pages
            .iter()
            .filter(|(n, _)| **n != Some(node))
            .map(|(_, pages)| pages)
            .sum();
        Some((elsewhere * self.page_bytes).min(buffer_bytes))
    }
}

/// Asks where a buffer of another process lies. `None` if the process cannot be asked at all.
pub fn placement(pid: u32, address: u64, bytes: u64) -> Option<Placement> {
    if bytes == 0 {
        return None;
    }
    // SAFETY: a query without side effects.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let first = address / page_bytes * page_bytes;
    let total = (address.checked_add(bytes)? - first).div_ceil(page_bytes);
    let sampled = total > EVERY_PAGE_LIMIT;
    let step = if sampled {
        SAMPLE_BYTES / page_bytes
    } else {
        1
    };
    let indices: Vec<u64> = (0..total).step_by(step as usize).collect();
    let mut pages = BTreeMap::new();
    for chunk in indices.chunks(CHUNK) {
        let addresses: Vec<*mut libc::c_void> = chunk
            .iter()
            .map(|i| (first + i * page_bytes) as *mut libc::c_void)
            .collect();
        let mut status = vec![i32::MIN; chunk.len()];
        // SAFETY: both arrays have `chunk.len()` entries; with null nodes nothing is moved, and
        // the addresses are looked up in the other process, never touched here.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid as libc::c_int,
                chunk.len(),
                addresses.as_ptr(),
                std::ptr::null::<libc::c_int>(),
                status.as_mut_ptr(),
                0,
            )
        };
        if result < 0 {
            return None;
        }
        for (index, status) in chunk.iter().zip(status) {
            let node = (status >= 0).then_some(status);
            // The last sample stands for what is left of the buffer.
            *pages.entry(node).or_insert(0) += step.min(total - index);
        }
    }
    Some(Placement {
        page_bytes,
        sampled,
        pages,
    })
}

/// The NUMA node of a PCI device, `None` when the platform does not say (the kernel's -1).
/// `bus_id` may be spelled as NVML does (`00000000:01:00.0`).
pub fn node_of_pci(sysfs: &Path, bus_id: &str) -> Option<i32> {
    let lower = bus_id.to_ascii_lowercase();
    let (domain, rest) = lower.split_once(':')?;
    // sysfs has four digits where NVML has eight.
    let domain = &domain[domain.len().saturating_sub(4)..];
    let path = sysfs
        .join("bus/pci/devices")
        .join(format!("{domain}:{rest}"))
        .join("numa_node");
    let node: i32 = fs::read_to_string(path).ok()?.trim().parse().ok()?;
    (node >= 0).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_have_a_node_and_untouched_ones_none() {
        let pages = 8;
        let size = pages * 4096;
        // SAFETY: a fresh anonymous mapping of this process.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        for page in 0..3 {
            // SAFETY: inside the mapping.
            unsafe { address.cast::<u8>().add(page * 4096).write(1) };
        }
        let placement = placement(std::process::id(), address as u64, size as u64).unwrap();
        // SAFETY: mapped above.
        unsafe { libc::munmap(address, size) };
        assert!(!placement.sampled);
        assert_eq!(placement.pages.get(&None), Some(&5));
        assert_eq!(
            placement
                .pages
                .iter()
                .filter(|(n, _)| n.is_some())
                .map(|(_, p)| p)
                .sum::<u64>(),
            3
        );
        assert_eq!(placement.misplaced_bytes(Some(0), size as u64), None);
    }

    #[test]
    fn misplaced_bytes_by_hand() {
        let placement = Placement {
            page_bytes: 4096,
            sampled: false,
            pages: [(Some(0), 3), (Some(1), 2)].into(),
        };
        assert_eq!(placement.misplaced_bytes(Some(0), 5 * 4096), Some(2 * 4096));
        assert_eq!(placement.misplaced_bytes(Some(1), 5 * 4096), Some(3 * 4096));
        assert_eq!(placement.misplaced_bytes(None, 5 * 4096), None);
    }

    #[test]
    fn nodes_come_from_sysfs() {
        let sysfs = tempfile::tempdir().unwrap();
        let device = sysfs.path().join("bus/pci/devices/0000:0a:00.0");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), "1\n").unwrap();
        assert_eq!(node_of_pci(sysfs.path(), "00000000:0A:00.0"), Some(1));
        fs::write(device.join("numa_node"), "-1\n").unwrap();
        assert_eq!(node_of_pci(sysfs.path(), "00000000:0A:00.0"), None);
        assert_eq!(node_of_pci(sysfs.path(), "00000000:0B:00.0"), None);
    }
}
