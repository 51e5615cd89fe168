//! The settings of PyTorch's caching allocator (`PYTORCH_CUDA_ALLOC_CONF`).

/// What changes where blocks go. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// `max_split_size_mb`: larger blocks are not split. `None`: all may be.
    pub max_split_size: Option<u64>,
    /// `roundup_power2_divisions`: how many steps a power of two is divided into when a request is
    /// rounded, by the request's power of two (`(lower bound in bytes, divisions)`, ascending).
    /// Empty: rounded to 512 bytes.
    pub roundup_power2_divisions: Vec<(u64, u32)>,
    /// `expandable_segments`.
    pub expandable_segments: bool,
    /// `garbage_collection_threshold`, 0..1: above this share of the limit, old cached segments
    /// are given back before a new one is taken. `None`: off.
    pub garbage_collection_threshold: Option<f64>,
}
