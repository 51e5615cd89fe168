//! How much a file may ask for.

/// Bounds on what a reader holds. The defaults grow with the file, so that no snapshot that
/// PyTorch writes meets them, and no small file can take a large memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes held at once: names, frames, stacks, the memo, and what is not handed out yet. Growing
    /// tables take up to three times as much for a moment.
    pub memory: u64,
    /// Containers inside containers.
    pub depth: u16,
}

impl Limits {
    /// For a file of that many bytes.
    pub const fn for_file(bytes: u64) -> Self {
        Self {
            memory: (16 << 20) + 2 * bytes,
            depth: 64,
        }
    }
}
