//! A caching allocator written as plainly as possible: every free block is looked at, and a
//! segment is a list of blocks. Only what PyTorch does without settings, and with one stream's
//! memory never served to another's.

const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NaiveBlock {
    pub id: Option<u64>,
    pub bytes: u64,
    pub requested: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NaiveSegment {
    pub stream: i64,
    pub small: bool,
    /// Segments are told apart by when they were taken; of equal blocks the older one's serves.
    pub blocks: Vec<NaiveBlock>,
}

impl NaiveSegment {
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.bytes).sum()
    }
}

pub struct Naive {
    pub segments: Vec<NaiveSegment>,
    pub capacity: u64,
    pub retries: u64,
    pub ooms: u64,
}

impl Naive {
    pub fn new(capacity: u64) -> Self {
        Self {
            segments: Vec::new(),
            capacity,
            retries: 0,
            ooms: 0,
        }
    }

    pub fn reserved(&self) -> u64 {
        self.segments.iter().map(NaiveSegment::bytes).sum()
    }

    pub fn alloc(&mut self, id: u64, requested: u64, stream: i64) -> bool {
        let bytes = requested.max(1).div_ceil(512) * 512;
        let small = bytes <= MIB;
        let mut best: Option<(u64, usize, usize)> = None;
        for (s, segment) in self.segments.iter().enumerate() {
            if segment.stream != stream || segment.small != small {
                continue;
            }
            for (b, block) in segment.blocks.iter().enumerate() {
                let is_better = best.is_none_or(|(size, _, _)| block.bytes < size);
                if block.id.is_none() && block.bytes >= bytes && is_better {
                    best = Some((block.bytes, s, b));
                }
            }
        }
        let (s, b) = match best {
            Some((_, s, b)) => (s, b),
            None => {
                let segment = if small {
                    2 * MIB
                } else if bytes < 10 * MIB {
                    20 * MIB
                } else {
                    bytes.div_ceil(2 * MIB) * 2 * MIB
                };
                if self.reserved() + segment > self.capacity {
                    self.retries += 1;
                    self.flush();
                }
                if self.reserved() + segment > self.capacity {
                    self.ooms += 1;
                    return false;
                }
                self.segments.push(NaiveSegment {
                    stream,
                    small,
                    blocks: vec![NaiveBlock {
                        id: None,
                        bytes: segment,
                        requested: 0,
                    }],
                });
                (self.segments.len() - 1, 0)
            }
        };
        let blocks = &mut self.segments[s].blocks;
        let rest = blocks[b].bytes - bytes;
        let split = if small { rest >= 512 } else { rest > MIB };
        if split {
            let free = NaiveBlock {
                id: None,
                bytes: rest,
                requested: 0,
            };
            blocks.insert(b + 1, free);
            blocks[b].bytes = bytes;
        }
        blocks[b].id = Some(id);
        blocks[b].requested = requested;
        true
    }

    pub fn free(&mut self, id: u64) {
        for segment in &mut self.segments {
            let blocks = &mut segment.blocks;
            if let Some(b) = blocks.iter().position(|block| block.id == Some(id)) {
                blocks[b].id = None;
            }
            let mut b = 1;
            while b < blocks.len() {
                if blocks[b].id.is_none() && blocks[b - 1].id.is_none() {
                    blocks[b - 1].bytes += blocks[b].bytes;
                    blocks.remove(b);
                } else {
                    b += 1;
                }
            }
        }
    }

    pub fn flush(&mut self) {
        self.segments
            .retain(|segment| segment.blocks.iter().any(|block| block.id.is_some()));
    }
}
