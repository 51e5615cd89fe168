//! How many bytes a call asked for and gave, from its arguments.

use vramscope_ebpf_abi::{EXTRA_WORDS, NO_ARG};

/// Where a call's size is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// In that argument.
    Arg(u8),
    /// Rows of a pitch that the call chooses: pitch out in argument 1, width in bytes, height.
    Pitched,
    /// cudaMalloc3D: `cudaPitchedPtr` out in argument 0, `cudaExtent` in memory.
    Pitched3D,
    /// CUDA_ARRAY_DESCRIPTOR in argument 1.
    Array,
    /// CUDA_ARRAY3D_DESCRIPTOR in argument 1.
    Array3D,
    /// The same, and a number of mipmap levels in argument 2.
    Mipmaps,
    /// cudaMallocArray: `cudaChannelFormatDesc` in argument 1, width, height.
    RuntimeArray,
    /// cudaMalloc3DArray: the same, `cudaExtent` in memory.
    RuntimeArray3D,
    /// The same, and a number of mipmap levels in argument 2.
    RuntimeMipmaps,
}

/// Bytes of a call; `None` where they cannot be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Measured {
    pub requested: Option<u64>,
    /// What the call gives if it succeeds.
    pub given: Option<u64>,
}

impl Size {
    /// Argument that points to something worth reading, and how many words.
    pub(super) const fn extra(self) -> (u8, u8) {
        match self {
            Size::Arg(_) => (NO_ARG, 0),
            Size::Pitched => (1, 1),
            Size::Pitched3D => (0, 2),
            Size::Array => (1, 3),
            Size::Array3D | Size::Mipmaps => (1, 4),
            Size::RuntimeArray | Size::RuntimeArray3D | Size::RuntimeMipmaps => (1, 2),
        }
    }

    /// Whether a structure of three words is passed by value, in memory. The kernel side puts
    /// them where the last three register arguments would be.
    pub(super) const fn by_value(self) -> bool {
        matches!(
            self,
            Size::Pitched3D | Size::RuntimeArray3D | Size::RuntimeMipmaps
        )
    }

    /// Bytes of a call. Arrays are measured by their elements: what the driver pads is not known.
    pub fn measure(
        self,
        args: &[u64; 6],
        extra: Option<[u64; EXTRA_WORDS]>,
        narrow: bool,
    ) -> Measured {
        let value = |word: u64| if narrow { word & 0xffff_ffff } else { word };
        let product = |factors: &[u64]| factors.iter().try_fold(1u64, |a, b| a.checked_mul(*b));
        let same = |bytes: Option<u64>| Measured {
            requested: bytes,
            given: bytes,
        };
        match self {
            Size::Arg(arg) => same(Some(value(args[arg as usize]))),
            Size::Pitched => {
                let (width, height) = (value(args[2]), value(args[3]));
                Measured {
                    requested: product(&[width, height]),
                    given: extra.and_then(|extra| product(&[value(extra[0]), height])),
                }
            }
            Size::Pitched3D => {
                let [width, height, depth] = [args[3], args[4], args[5]];
                Measured {
                    requested: product(&[width, height, depth]),
                    given: extra.and_then(|extra| product(&[extra[1], height, depth])),
                }
            }
            Size::Array | Size::Array3D | Size::Mipmaps => {
                let levels = if self == Size::Mipmaps { args[2] } else { 1 };
                let bytes = extra.and_then(|extra| {
                    let (extent, element) = driver_descriptor(self, extra, narrow)?;
                    elements(extent, levels)?.checked_mul(element)
                });
                same(bytes)
            }
            Size::RuntimeArray | Size::RuntimeArray3D | Size::RuntimeMipmaps => {
                let extent = if self == Size::RuntimeArray {
                    [args[2], args[3], 0]
                } else {
                    [args[3], args[4], args[5]]
                };
                let levels = if self == Size::RuntimeMipmaps {
                    args[2]
                } else {
                    1
                };
                let bytes = extra.and_then(|extra| {
                    // Bits of the channels x, y, z, w.
                    let bits: u64 = [extra[0], extra[0] >> 32, extra[1], extra[1] >> 32]
                        .iter()
                        .map(|word| word & 0xffff_ffff)
                        .sum();
                    bits.is_multiple_of(8).then_some(bits / 8)
                });
                let total =
                    bytes.and_then(|element| elements(extent, levels)?.checked_mul(element));
                same(total)
            }
        }
    }
}

/// Extent and bytes of an element from an array descriptor of the driver interface; the first
/// versions have 32-bit extents.
fn driver_descriptor(
    size: Size,
    extra: [u64; EXTRA_WORDS],
    narrow: bool,
) -> Option<([u64; 3], u64)> {
    let half = |index: usize| extra[index / 2] >> (32 * (index % 2)) & 0xffff_ffff;
    let dimensions = if size == Size::Array { 2 } else { 3 };
    let (extent, format_at) = if narrow {
        let extent = core::array::from_fn(|i| if i < dimensions { half(i) } else { 0 });
        (extent, dimensions)
    } else {
        let extent = core::array::from_fn(|i| if i < dimensions { extra[i] } else { 0 });
        (extent, 2 * dimensions)
    };
    let channel = match half(format_at) {
        0x01 | 0x08 => 1,        // unsigned and signed 8-bit integers
        0x02 | 0x09 | 0x10 => 2, // 16-bit integers, half floats
        0x03 | 0x0a | 0x20 => 4, // 32-bit integers, floats
        // Planar and block-compressed formats do not have one size per element.
        _ => return None,
    };
    Some((extent, channel * half(format_at + 1)))
}

/// Elements of all mipmap levels. An extent of 0 means that there is no such dimension.
fn elements(extent: [u64; 3], levels: u64) -> Option<u64> {
    let mut total = 0u64;
    for level in 0..levels.min(64) {
        let mut count = 1u64;
        for length in extent.iter().filter(|length| **length > 0) {
            count = count.checked_mul((length >> level).max(1))?;
        }
        total = total.checked_add(count)?;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(size: Size, args: [u64; 6], extra: [u64; 4], narrow: bool) -> Option<u64> {
        size.measure(&args, Some(extra), narrow).given
    }

    #[test]
    fn pitches_count_as_given_and_widths_as_requested() {
        // 1000 bytes x 30 rows with a pitch of 1024.
        let measured = Size::Pitched.measure(&[0, 0, 1000, 30, 4, 0], Some([1024, 0, 0, 0]), false);
        assert_eq!(
            (measured.requested, measured.given),
            (Some(30_000), Some(30_720))
        );
        let measured =
            Size::Pitched3D.measure(&[0, 0, 0, 100, 10, 5], Some([0x7000, 512, 0, 0]), false);
        assert_eq!(
            (measured.requested, measured.given),
            (Some(5_000), Some(25_600))
        );
        assert_eq!(
            Size::Pitched
                .measure(&[0, 0, 8, 8, 4, 0], None, false)
                .given,
            None
        );
    }

    #[test]
    fn arrays_are_measured_by_their_elements() {
        // 64 x 32 elements of four floats: 64 * 32 * 16 bytes.
        let float4 = 0x20 | 4 << 32;
        assert_eq!(
            given(Size::Array, [0; 6], [64, 32, float4, 0], false),
            Some(32_768)
        );
        // One dimension of 100 half floats.
        assert_eq!(
            given(Size::Array, [0; 6], [100, 0, 0x10 | 1 << 32, 0], false),
            Some(200)
        );
        assert_eq!(
            given(Size::Array3D, [0; 6], [8, 4, 2, 0x01 | 2 << 32], false),
            Some(128)
        );
        // First version: width 64 and height 32 in one word, format and channels in the next.
        assert_eq!(
            given(Size::Array, [0; 6], [64 | 32 << 32, float4, 0, 0], true),
            Some(32_768)
        );
        assert_eq!(
            given(Size::Array, [0; 6], [64, 32, 0x91 | 4 << 32, 0], false),
            None,
            "a block-compressed format"
        );
    }

    #[test]
    fn mipmaps_sum_their_levels() {
        // 8 x 8, 4 x 4, 2 x 2 elements of 4 bytes: 84 elements.
        let args = [0, 0, 3, 0, 0, 0];
        assert_eq!(
            given(Size::Mipmaps, args, [8, 8, 0, 0x03 | 1 << 32], false),
            Some(336)
        );
        let args = [0, 0, 3, 8, 8, 0];
        assert_eq!(
            given(Size::RuntimeMipmaps, args, [32, 0, 0, 0], false),
            Some(336)
        );
    }

    #[test]
    fn the_runtime_counts_bits_of_channels() {
        // 16 x 8 elements of 8 + 8 + 8 + 8 bits.
        let desc = [8 | 8 << 32, 8 | 8 << 32, 0, 0];
        assert_eq!(
            given(Size::RuntimeArray, [0, 0, 16, 8, 0, 0], desc, false),
            Some(512)
        );
        assert_eq!(
            given(Size::RuntimeArray3D, [0, 0, 0, 4, 4, 4], desc, false),
            Some(256)
        );
    }

    #[test]
    fn absurd_sizes_are_not_known() {
        let huge = [u64::MAX, u64::MAX, 0x20 | 4 << 32, 0];
        assert_eq!(given(Size::Array, [0; 6], huge, false), None);
    }

    #[test]
    fn first_versions_have_32_bits() {
        let args = [0, 0xdead_0000_0000_0010, 0, 0, 0, 0];
        assert_eq!(given(Size::Arg(1), args, [0; 4], true), Some(16));
    }
}
