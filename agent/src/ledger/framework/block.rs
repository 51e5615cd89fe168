//! A block that a framework's allocator handed out.

use serde::{Deserialize, Serialize};

use super::super::rollup::Place;
use crate::probes::hooks::{Layer, MemoryKind};

const HAS_REQUESTED: u8 = 1;
const HAS_STREAM: u8 = 2;
const REPORTED: u8 = 4;

/// A block that the program holds: 56 bytes, since there may be a million.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    pub seq: u64,
    /// After rounding.
    pub bytes: u64,
    /// CLOCK_MONOTONIC nanoseconds.
    pub effect_ns: u64,
    requested: u64,
    stream: i64,
    /// 0 stands for none.
    stack: i64,
    /// `i16::MIN` stands for none.
    device: i16,
    flags: u8,
}

/// What a block is made of.
#[derive(Debug, Clone, Copy)]
pub struct NewBlock {
    pub seq: u64,
    pub bytes: u64,
    pub effect_ns: u64,
    pub asked: Option<(u64, i64)>,
    pub stack_id: Option<i64>,
    pub device: Option<i32>,
    /// The allocator reports it, so it will report its end.
    pub reported: bool,
}

impl Block {
    pub fn new(new: NewBlock) -> Self {
        let mut block = Self {
            seq: new.seq,
            bytes: new.bytes,
            effect_ns: new.effect_ns,
            requested: 0,
            stream: 0,
            stack: new.stack_id.unwrap_or(0),
            device: new
                .device
                .and_then(|device| i16::try_from(device).ok())
                .unwrap_or(i16::MIN),
            flags: if new.reported { REPORTED } else { 0 },
        };
        if let Some((requested, stream)) = new.asked {
            block.complete(requested, stream);
        }
        block
    }

    pub(super) fn complete(&mut self, requested: u64, stream: i64) {
        (self.requested, self.stream) = (requested, stream);
        self.flags |= HAS_REQUESTED | HAS_STREAM;
    }

    pub fn requested(&self) -> Option<u64> {
        (self.flags & HAS_REQUESTED != 0).then_some(self.requested)
    }

    /// The framework's id of the stream.
    pub fn stream(&self) -> Option<i64> {
        (self.flags & HAS_STREAM != 0).then_some(self.stream)
    }

    pub fn is_reported(&self) -> bool {
        self.flags & REPORTED != 0
    }

    pub fn stack_id(&self) -> Option<i64> {
        (self.stack != 0).then_some(self.stack)
    }

    pub fn device(&self) -> Option<i32> {
        (self.device != i16::MIN).then_some(i32::from(self.device))
    }

    /// Where roll-ups book it.
    pub fn place(&self) -> Place {
        place(self.device())
    }
}

/// Where roll-ups book blocks of a device.
pub fn place(device: Option<i32>) -> Place {
    Place {
        device,
        kind: MemoryKind::FrameworkBlock,
        layer: Layer::Framework,
    }
}
