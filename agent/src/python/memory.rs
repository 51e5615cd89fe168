//! Another process's memory.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Open as long as it is looked at. A process that is gone has no memory to read.
pub struct Memory(File);

impl Memory {
    pub fn of(pid: u32) -> Option<Self> {
        File::open(format!("/proc/{pid}/mem")).ok().map(Self)
    }

    pub fn bytes(&self, address: u64, bytes: usize) -> Option<Vec<u8>> {
        let mut buffer = vec![0; bytes];
        self.0.read_exact_at(&mut buffer, address).ok()?;
        Some(buffer)
    }

    pub fn u32(&self, address: u64) -> Option<u32> {
        let mut buffer = [0; 4];
        self.0.read_exact_at(&mut buffer, address).ok()?;
        Some(u32::from_le_bytes(buffer))
    }

    pub fn u64(&self, address: u64) -> Option<u64> {
        let mut buffer = [0; 8];
        self.0.read_exact_at(&mut buffer, address).ok()?;
        Some(u64::from_le_bytes(buffer))
    }

    /// A C string of at most 64 bytes.
    pub fn text(&self, address: u64) -> Option<String> {
        let mut text = Vec::new();
        for at in (0..64).step_by(8) {
            for byte in self.u64(address + at)?.to_le_bytes() {
                if byte == 0 {
                    return String::from_utf8(text).ok();
                }
                text.push(byte);
            }
        }
        None
    }
}
