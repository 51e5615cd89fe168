//! What the program says of its own allocator at each checkpoint: the files that
//! `agent/fakes/torch/harness.cpp` and `script.py` write.

use std::path::Path;

use serde::Deserialize;

/// One checkpoint. The program is at rest there.
#[derive(Debug, Deserialize)]
pub struct Checkpoint {
    pub name: String,
    /// Bytes of the pinned buffer that marks the place among the calls.
    pub mark_bytes: u64,
    pub devices: Vec<Stats>,
    pub segments: Vec<Segment>,
    /// Requests of device 0 that failed so far.
    pub failures: Vec<Failure>,
    /// The agent came late and knows one device only, and no peaks.
    #[serde(skip)]
    pub is_partial: bool,
}

/// What the program saw right after a request failed.
#[derive(Debug, Deserialize)]
pub struct Failure {
    /// As asked for; what was tried is rounded up.
    pub tried_bytes: u64,
    pub allocated_bytes: u64,
    pub reserved_bytes: u64,
    pub retries: u64,
    pub ooms: u64,
    pub device_free_bytes: u64,
}

/// `torch.cuda.memory_stats()` of one device.
#[derive(Debug, Deserialize)]
pub struct Stats {
    pub device: u32,
    pub allocation: Figure,
    pub allocated_bytes: Figure,
    pub reserved_bytes: Figure,
    pub active_bytes: Figure,
    pub requested_bytes: Figure,
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
}

/// A figure and its history.
#[derive(Debug, Deserialize)]
pub struct Figure {
    pub current: u64,
    pub peak: u64,
}

/// A segment of `torch.cuda.memory_snapshot()`.
#[derive(Debug, Deserialize)]
pub struct Segment {
    pub device: u32,
    pub address: u64,
    pub bytes: u64,
    pub allocated_bytes: u64,
    pub active_bytes: u64,
    /// c10's id.
    pub stream: i64,
    #[serde(rename = "type")]
    pub kind: String,
    pub expandable: bool,
    pub pool: (u64, u64),
    pub blocks: Vec<Block>,
}

#[derive(Debug, Deserialize)]
pub struct Block {
    pub address: u64,
    pub bytes: u64,
    pub requested_bytes: u64,
    pub state: String,
}

impl Block {
    pub fn is_allocated(&self) -> bool {
        self.state == "active_allocated"
    }
}

impl Checkpoint {
    pub fn read(folder: &Path, name: &str) -> Self {
        let path = folder.join(format!("{name}.json"));
        let text = std::fs::read(&path).unwrap();
        let checkpoint: Self = serde_json::from_slice(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        checkpoint.check();
        checkpoint
    }

    /// The program's two accounts agree with each other, so that a difference later is ours.
    fn check(&self) {
        for stats in &self.devices {
            let of_device = || self.segments.iter().filter(|s| s.device == stats.device);
            let sum = |figure: fn(&Segment) -> u64| of_device().map(figure).sum::<u64>();
            let name = &self.name;
            assert_eq!(sum(|s| s.bytes), stats.reserved_bytes.current, "{name}");
            assert_eq!(
                sum(|s| s.allocated_bytes),
                stats.allocated_bytes.current,
                "{name}"
            );
            assert_eq!(
                sum(|s| s.active_bytes),
                stats.active_bytes.current,
                "{name}"
            );
        }
    }

    /// Leaves what a late agent can know: one device, of which the program held nothing then.
    pub fn keep_device(&mut self, device: u32) {
        self.devices.retain(|stats| stats.device == device);
        self.segments.retain(|segment| segment.device == device);
        self.is_partial = true;
    }

    /// Blocks that the program gave back and that a stream may still use.
    pub fn pending(&self) -> usize {
        let blocks = self.segments.iter().flat_map(|segment| &segment.blocks);
        blocks
            .filter(|block| block.state == "active_pending_free")
            .count()
    }
}
