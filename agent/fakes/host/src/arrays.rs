//! How many bytes an array has, which the driver's and the runtime's books must agree on.
//!
//! The vendor's adds padding that it does not tell. The books hold what the descriptor asks for:
//! elements times channels times bytes of a channel, for mipmapped arrays summed over the levels.

/// What an array's descriptor says.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Elements in a row.
    pub width: usize,
    /// Rows; 0 in a one-dimensional array.
    pub height: usize,
    /// Slices or layers; 0 in a one- or two-dimensional array.
    pub depth: usize,
    /// Bytes of an element: channels times bytes of a channel.
    pub element_bytes: usize,
    /// Whether the third size counts layers, which levels do not halve.
    pub is_layered: bool,
}

impl Shape {
    /// Bytes of the first level; `None` if that does not fit a number or is 0.
    pub fn bytes(&self) -> Option<u64> {
        self.level_bytes(0)
    }

    /// Bytes of `levels` levels, each with half the sizes of the one before, but at least 1. More
    /// levels than the largest size has halvings are clamped, as documented.
    pub fn mipmapped_bytes(&self, levels: u32) -> Option<u64> {
        let halved = if self.is_layered { 0 } else { self.depth };
        let largest = self.width.max(self.height).max(halved).max(1);
        let levels = levels.clamp(1, 1 + largest.ilog2());
        (0..levels).try_fold(0u64, |sum, level| sum.checked_add(self.level_bytes(level)?))
    }

    fn level_bytes(&self, level: u32) -> Option<u64> {
        if self.width == 0 {
            return None;
        }
        let side = |length: usize| (length >> level).max(1) as u64;
        let depth = if self.is_layered {
            self.depth.max(1) as u64
        } else {
            side(self.depth)
        };
        side(self.width)
            .checked_mul(side(self.height))?
            .checked_mul(depth)?
            .checked_mul(self.element_bytes as u64)
            .filter(|bytes| *bytes > 0)
    }
}

/// Bytes of one channel in a driver's array format (CUarray_format); `None` for formats that the
/// stand-in lacks: those of videos and of compressed blocks.
pub fn channel_bytes(format: u32) -> Option<usize> {
    match format {
        // UNSIGNED_INT8, SIGNED_INT8
        0x01 | 0x08 => Some(1),
        // UNSIGNED_INT16, SIGNED_INT16, HALF
        0x02 | 0x09 | 0x10 => Some(2),
        // UNSIGNED_INT32, SIGNED_INT32, FLOAT
        0x03 | 0x0a | 0x20 => Some(4),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_halve_down_to_one_and_layers_stay() {
        let mut shape = Shape {
            width: 8,
            height: 4,
            depth: 0,
            element_bytes: 2,
            is_layered: false,
        };
        assert_eq!(shape.bytes(), Some(64));
        // 8x4 + 4x2 + 2x1 + 1x1 elements; a fifth level does not exist.
        assert_eq!(shape.mipmapped_bytes(9), Some(2 * (32 + 8 + 2 + 1)));
        shape.depth = 4;
        assert_eq!(shape.mipmapped_bytes(2), Some(2 * (128 + 16)));
        shape.is_layered = true;
        assert_eq!(shape.mipmapped_bytes(2), Some(2 * (128 + 32)));
        shape.width = 0;
        assert_eq!(shape.bytes(), None);
    }
}
