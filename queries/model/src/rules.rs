//! The rules of PyTorch's caching allocator that depend on nothing but sizes and settings.
//!
//! Source of every rule: `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig` of
//! PyTorch; `docs/allocator-model.md` lists them.

use crate::map::PoolSize;
use crate::settings::Settings;

/// Every block is a multiple of this.
pub const MIN_BLOCK: u64 = 512;
/// The largest request that the small pool serves.
pub const SMALL_REQUEST: u64 = 1 << 20;
/// What the small pool takes from the driver at a time.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// What a request between [`SMALL_REQUEST`] and [`MIN_LARGE_REQUEST`] takes from the driver,
/// unless set otherwise.
pub const LARGE_SEGMENT: u64 = 20 << 20;
/// From here on a request gets a segment of its own size.
pub const MIN_LARGE_REQUEST: u64 = 10 << 20;
/// Segments of their request's own size are multiples of this.
pub const ROUND_LARGE: u64 = 2 << 20;

/// The bytes of the block that a request of `bytes` wants. Saturates at the last multiple of 512
/// below 2^64.
pub fn round(bytes: u64, settings: &Settings) -> u64 {
    round_by_divisions(bytes, settings.divisions(bytes))
}

/// As [`round`], with the divisions already looked up.
pub(crate) fn round_by_divisions(bytes: u64, divisions: u32) -> u64 {
    if bytes < MIN_BLOCK {
        return MIN_BLOCK;
    }
    let steps = u64::from(divisions);
    if steps > 1 && bytes > MIN_BLOCK * steps {
        return round_to_division(bytes, steps);
    }
    round_up(bytes, MIN_BLOCK)
}

/// The next of `steps` equal steps between two powers of two. Steps that are no power of two count
/// as the power of two below.
fn round_to_division(bytes: u64, steps: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let floor = 1u64 << bytes.ilog2();
    let step = floor >> steps.ilog2();
    if step == 0 {
        return floor.saturating_mul(2);
    }
    round_up(bytes, step)
}

/// Which pool serves a request that was rounded to `rounded` bytes.
pub const fn pool_size(rounded: u64) -> PoolSize {
    if rounded <= SMALL_REQUEST {
        PoolSize::Small
    } else {
        PoolSize::Large
    }
}

/// What is taken from the driver for a request that was rounded to `rounded` bytes, without
/// expandable segments.
pub fn segment_bytes(rounded: u64, settings: &Settings) -> u64 {
    if rounded <= SMALL_REQUEST {
        SMALL_SEGMENT
    } else if rounded < MIN_LARGE_REQUEST {
        settings.large_segment()
    } else {
        round_up(rounded, ROUND_LARGE)
    }
}

/// What an expandable segment is mapped and unmapped by.
pub fn chunk_bytes(pool: PoolSize, settings: &Settings) -> u64 {
    match pool {
        PoolSize::Small => SMALL_SEGMENT,
        PoolSize::Large => settings.large_segment(),
    }
}

/// Whether a block that exceeds the rounded request by `rest` bytes is split.
pub fn should_split(pool: PoolSize, rounded: u64, rest: u64, settings: &Settings) -> bool {
    if pool == PoolSize::Small || settings.expandable_segments {
        return rest >= MIN_BLOCK;
    }
    settings.max_split_size.is_none_or(|limit| rounded < limit) && rest > SMALL_REQUEST
}

/// The next multiple of `step`, which is not 0; the last one below 2^64 where there is none.
pub(crate) const fn round_up(bytes: u64, step: u64) -> u64 {
    match bytes.checked_next_multiple_of(step) {
        Some(rounded) => rounded,
        None => u64::MAX - u64::MAX % step,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The example in PyTorch's notes on `roundup_power2_divisions`: with 4 divisions the steps
    /// between 1024 and 2048 are 1024, 1280, 1536, 1792.
    #[test]
    fn a_request_goes_to_the_next_step() {
        let settings = Settings {
            roundup_power2_divisions: vec![(0, 4)],
            ..Settings::default()
        };
        // Below 4 * 512 bytes steps would be finer than a block.
        assert_eq!(round(1200, &settings), 1536);
        assert_eq!(round(1200 * 1024, &settings), 1280 * 1024);
        assert_eq!(round(1280 * 1024, &settings), 1280 * 1024);
        assert_eq!(round(1281 * 1024, &settings), 1536 * 1024);
        assert_eq!(round(1793 * 1024, &settings), 2048 * 1024);
        assert_eq!(round(2048 * 1024, &settings), 2048 * 1024);
    }

    #[test]
    fn without_steps_a_request_goes_to_512() {
        let settings = Settings::default();
        for (bytes, rounded) in [
            (0, 512),
            (1, 512),
            (512, 512),
            (513, 1024),
            (MIB + 1, MIB + 512),
        ] {
            assert_eq!(round(bytes, &settings), rounded, "{bytes}");
        }
        assert_eq!(round(u64::MAX, &settings), u64::MAX - 511);
    }

    #[test]
    fn segments_come_in_three_sizes() {
        let settings = Settings::default();
        let taken = |bytes| segment_bytes(bytes, &settings) / MIB;
        assert_eq!(taken(512), 2);
        assert_eq!(taken(MIB), 2);
        assert_eq!(taken(MIB + 512), 20);
        assert_eq!(taken(10 * MIB - 512), 20);
        assert_eq!(taken(10 * MIB), 10);
        assert_eq!(taken(11 * MIB), 12);
    }

    #[test]
    fn a_rest_is_split_off_where_another_can_use_it() {
        let mut settings = Settings {
            max_split_size: Some(128 * MIB),
            ..Settings::default()
        };
        let split =
            |pool, rounded, rest, settings: &Settings| should_split(pool, rounded, rest, settings);
        assert!(split(PoolSize::Small, 512, 512, &settings));
        assert!(!split(PoolSize::Small, 512, 0, &settings));
        assert!(!split(PoolSize::Large, 2 * MIB, MIB, &settings));
        assert!(split(PoolSize::Large, 2 * MIB, MIB + 512, &settings));
        assert!(!split(PoolSize::Large, 128 * MIB, 9 * MIB, &settings));
        settings.expandable_segments = true;
        assert!(split(PoolSize::Large, 128 * MIB, 512, &settings));
    }
}
