//! The settings of PyTorch's caching allocator, as `PYTORCH_ALLOC_CONF` (older:
//! `PYTORCH_CUDA_ALLOC_CONF`) holds them.

mod text;

pub use text::{Parsed, Problem, ProblemKind};

use crate::rules;

/// What changes where blocks go. Sizes in bytes. The default is PyTorch's.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// `max_split_size_mb`: larger blocks are not split. `None`: all may be.
    pub max_split_size: Option<u64>,
    /// `roundup_power2_divisions`: how many steps a power of two is divided into when a request is
    /// rounded, by the request's power of two (`(lower bound in bytes, divisions)`, ascending; the
    /// first bound is 0). Empty, or 0 or 1 divisions: rounded to 512 bytes.
    pub roundup_power2_divisions: Vec<(u64, u32)>,
    /// `expandable_segments`.
    pub expandable_segments: bool,
    /// `garbage_collection_threshold`, 0..1: above this share of the limit, old cached segments
    /// are given back before a new one is taken. `None`: off. Without a `memory_fraction` PyTorch
    /// collects nothing, whatever the threshold.
    pub garbage_collection_threshold: Option<f64>,
    /// `large_segment_size_mb`: what is taken from the driver for a request between 1 and 10 MiB,
    /// and the chunk that an expandable segment of the large pool grows by. `None`: 20 MiB.
    pub large_segment_size: Option<u64>,
    /// `max_non_split_rounding_mb`: how much larger than the request a block may be that may not
    /// be split. `None`: the large segment's size.
    pub max_non_split_rounding: Option<u64>,
    /// `per_process_memory_fraction`, or `torch.cuda.set_per_process_memory_fraction`: the share
    /// of the card that the allocator may take. `None`: all of it.
    pub memory_fraction: Option<f64>,
}

impl Settings {
    /// The large segment's size in effect.
    pub fn large_segment(&self) -> u64 {
        self.large_segment_size.unwrap_or(rules::LARGE_SEGMENT)
    }

    /// The tolerance in effect for blocks that may not be split.
    pub fn non_split_rounding(&self) -> u64 {
        self.max_non_split_rounding
            .unwrap_or_else(|| self.large_segment())
    }

    /// Steps per power of two for a request of `bytes`; 0: rounded to 512 bytes.
    pub fn divisions(&self, bytes: u64) -> u32 {
        let above = self
            .roundup_power2_divisions
            .partition_point(|(bound, _)| *bound <= bytes);
        match above {
            0 => 0,
            index => self.roundup_power2_divisions[index - 1].1,
        }
    }
}
