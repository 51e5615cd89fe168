//! Making a map from segments and what is known to live in them, and checking one.

use super::{AddressMap, Block, BlockState, Segment};

/// What is wrong with a map. Addresses in hexadecimal, as tools print them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapProblem {
    #[error(
        "segment {address:#x} of device {device} has no bytes or ends beyond the address space"
    )]
    SegmentSize { device: i32, address: u64 },
    #[error("segment {address:#x} of device {device} overlaps segment {other:#x}")]
    SegmentsOverlap {
        device: i32,
        address: u64,
        other: u64,
    },
    #[error("block {address:#x} of device {device} lies in no segment")]
    OutsideSegments { device: i32, address: u64 },
    #[error("block {address:#x} of device {device} has no bytes or ends beyond its segment")]
    BlockSize { device: i32, address: u64 },
    #[error("block {address:#x} of device {device} overlaps block {other:#x}")]
    BlocksOverlap {
        device: i32,
        address: u64,
        other: u64,
    },
    #[error("segment {segment:#x} of device {device} has a hole at {address:#x}")]
    Hole {
        device: i32,
        segment: u64,
        address: u64,
    },
}

/// A map, and what did not fit into it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Built {
    pub map: AddressMap,
    /// One for each segment or block that was left out.
    pub problems: Vec<MapProblem>,
}

impl AddressMap {
    /// A map of `segments` in which `live` (device and block) live. Whatever blocks the segments
    /// bring count as live too, except gaps; gaps fill the rest. A segment that overlaps an
    /// earlier one (in order of address), and a block that lies in no segment or overlaps an
    /// earlier one, is left out and reported.
    pub fn build(segments: Vec<Segment>, live: impl IntoIterator<Item = (i32, Block)>) -> Built {
        let mut built = Built::default();
        let mut blocks: Vec<(i32, Block)> = live.into_iter().collect();
        let mut segments = segments;
        segments.sort_by_key(|segment| (segment.pool.device, segment.address));
        for mut segment in segments {
            let device = segment.pool.device;
            blocks.extend(segment.blocks.drain(..).map(|block| (device, block)));
            match misplaced_segment(&segment, built.map.segments.last()) {
                Some(problem) => built.problems.push(problem),
                None => built.map.segments.push(segment),
            }
        }
        blocks.retain(|(_, block)| block.state != BlockState::Inactive);
        blocks.sort_by_key(|(device, block)| (*device, block.address));
        for (device, block) in blocks {
            if let Err(problem) = built.map.place(device, block) {
                built.problems.push(problem);
            }
        }
        for segment in &mut built.map.segments {
            fill_gaps(segment);
        }
        built
    }

    /// Puts a live block behind those of its segment that were placed already.
    fn place(&mut self, device: i32, block: Block) -> Result<(), MapProblem> {
        let address = block.address;
        let segment = self
            .index_of(device, address)
            .map(|index| &mut self.segments[index])
            .ok_or(MapProblem::OutsideSegments { device, address })?;
        let end = address.checked_add(block.bytes);
        let fits = end.is_some_and(|end| end <= segment.end());
        if block.bytes == 0 || !fits {
            return Err(MapProblem::BlockSize { device, address });
        }
        if let Some(before) = segment.blocks.last()
            && before.end() > address
        {
            return Err(MapProblem::BlocksOverlap {
                device,
                address,
                other: before.address,
            });
        }
        segment.blocks.push(block);
        Ok(())
    }

    fn index_of(&self, device: i32, address: u64) -> Option<usize> {
        let after = self
            .segments
            .partition_point(|segment| (segment.pool.device, segment.address) <= (device, address));
        let index = after.checked_sub(1)?;
        let segment = &self.segments[index];
        let inside = segment.pool.device == device && address < segment.end();
        inside.then_some(index)
    }

    /// The segment that `address` lies in. The segments must be in order of device and address, as
    /// [`AddressMap::build`] leaves them.
    pub fn segment_at(&self, device: i32, address: u64) -> Option<&Segment> {
        self.index_of(device, address)
            .map(|index| &self.segments[index])
    }

    /// Whether segments are apart and blocks tile them: the first thing wrong, if any.
    pub fn check(&self) -> Result<(), MapProblem> {
        let mut segments: Vec<&Segment> = self.segments.iter().collect();
        segments.sort_by_key(|segment| (segment.pool.device, segment.address));
        let mut before = None;
        for segment in segments {
            if let Some(problem) = misplaced_segment(segment, before) {
                return Err(problem);
            }
            check_tiling(segment)?;
            before = Some(segment);
        }
        Ok(())
    }

    /// In order of device and address: what maps from different sources are compared in.
    pub fn sort(&mut self) {
        self.segments
            .sort_by_key(|segment| (segment.pool.device, segment.address));
    }
}

/// Why `segment` cannot stand behind `before`, which has passed.
fn misplaced_segment(segment: &Segment, before: Option<&Segment>) -> Option<MapProblem> {
    let (device, address) = (segment.pool.device, segment.address);
    if segment.bytes == 0 || address.checked_add(segment.bytes).is_none() {
        return Some(MapProblem::SegmentSize { device, address });
    }
    let before = before.filter(|before| before.pool.device == device)?;
    (before.end() > address).then_some(MapProblem::SegmentsOverlap {
        device,
        address,
        other: before.address,
    })
}

fn check_tiling(segment: &Segment) -> Result<(), MapProblem> {
    let device = segment.pool.device;
    let mut reached = segment.address;
    let mut before = segment.address;
    for block in &segment.blocks {
        let address = block.address;
        if address < reached {
            return Err(MapProblem::BlocksOverlap {
                device,
                address,
                other: before,
            });
        }
        if address > reached {
            return Err(MapProblem::Hole {
                device,
                segment: segment.address,
                address: reached,
            });
        }
        let end = address.checked_add(block.bytes);
        let Some(end) = end.filter(|end| block.bytes > 0 && *end <= segment.end()) else {
            return Err(MapProblem::BlockSize { device, address });
        };
        before = address;
        reached = end;
    }
    if reached == segment.end() {
        Ok(())
    } else {
        Err(MapProblem::Hole {
            device,
            segment: segment.address,
            address: reached,
        })
    }
}

fn fill_gaps(segment: &mut Segment) {
    let mut tiles = Vec::with_capacity(segment.blocks.len() * 2 + 1);
    let mut reached = segment.address;
    for block in segment.blocks.drain(..) {
        if block.address > reached {
            tiles.push(Block::gap(reached, block.address - reached));
        }
        reached = block.end();
        tiles.push(block);
    }
    let end = segment.address + segment.bytes;
    if end > reached {
        tiles.push(Block::gap(reached, end - reached));
    }
    segment.blocks = tiles;
}

#[cfg(test)]
mod tests {
    use super::super::{PoolKey, PoolSize};
    use super::*;

    fn segment(device: i32, address: u64, bytes: u64) -> Segment {
        Segment {
            pool: PoolKey {
                device,
                private: None,
                size: PoolSize::Large,
                stream: 0,
            },
            address,
            bytes,
            expandable: false,
            blocks: Vec::new(),
            tag: None,
        }
    }

    fn live(address: u64, bytes: u64) -> Block {
        Block {
            address,
            bytes,
            requested: Some(bytes),
            state: BlockState::Allocated,
            tag: None,
        }
    }

    fn shape(segment: &Segment) -> Vec<(u64, u64, BlockState)> {
        segment
            .blocks
            .iter()
            .map(|block| (block.address, block.bytes, block.state))
            .collect()
    }

    #[test]
    fn gaps_fill_what_no_block_holds() {
        use BlockState::{Allocated, Inactive};
        let built = AddressMap::build(
            vec![segment(0, 5000, 1000), segment(0, 1000, 100)],
            [
                (0, live(5900, 100)),
                (0, live(1000, 40)),
                (0, live(5100, 300)),
            ],
        );
        assert_eq!(built.problems, []);
        assert_eq!(built.map.check(), Ok(()));
        assert_eq!(
            shape(&built.map.segments[0]),
            [(1000, 40, Allocated), (1040, 60, Inactive)]
        );
        assert_eq!(
            shape(&built.map.segments[1]),
            [
                (5000, 100, Inactive),
                (5100, 300, Allocated),
                (5400, 500, Inactive),
                (5900, 100, Allocated),
            ]
        );
    }

    #[test]
    fn what_does_not_fit_is_left_out_and_reported() {
        let device = 0;
        let built = AddressMap::build(
            vec![
                segment(0, 1000, 100),
                segment(0, 1050, 100),
                segment(1, 1050, 100),
                segment(0, 9000, 0),
                segment(0, u64::MAX, 2),
            ],
            [
                (0, live(1000, 60)),
                (0, live(1050, 20)),
                (0, live(1090, 20)),
                (0, live(2000, 20)),
                (1, live(1000, 20)),
                (0, live(1080, 0)),
            ],
        );
        assert_eq!(
            built.problems,
            [
                MapProblem::SegmentsOverlap {
                    device,
                    address: 1050,
                    other: 1000
                },
                MapProblem::SegmentSize {
                    device,
                    address: 9000
                },
                MapProblem::SegmentSize {
                    device,
                    address: u64::MAX
                },
                MapProblem::BlocksOverlap {
                    device,
                    address: 1050,
                    other: 1000
                },
                MapProblem::BlockSize {
                    device,
                    address: 1080
                },
                MapProblem::BlockSize {
                    device,
                    address: 1090
                },
                MapProblem::OutsideSegments {
                    device,
                    address: 2000
                },
                MapProblem::OutsideSegments {
                    device: 1,
                    address: 1000
                },
            ]
        );
        assert_eq!(built.map.segments.len(), 2);
        assert_eq!(built.map.check(), Ok(()));
    }

    #[test]
    fn a_map_that_does_not_tile_is_told_where() {
        let mut map = AddressMap::build(vec![segment(0, 0, 100)], [(0, live(0, 40))]).map;
        map.segments[0].blocks[1].address = 50;
        assert_eq!(
            map.check(),
            Err(MapProblem::Hole {
                device: 0,
                segment: 0,
                address: 40
            })
        );
        map.segments[0].blocks[1].address = 30;
        assert_eq!(
            map.check(),
            Err(MapProblem::BlocksOverlap {
                device: 0,
                address: 30,
                other: 0
            })
        );
        map.segments[0].blocks.pop();
        assert_eq!(
            map.check(),
            Err(MapProblem::Hole {
                device: 0,
                segment: 0,
                address: 40
            })
        );
    }
}
