//! The crate's one integration-test binary.
//!
//! Snapshots are made by [`writer`], which knows Python's values and opcodes and nothing of the
//! reader; what Python itself reads in them is compared where a `python3` is at hand.

mod hostile;
mod real;
mod rerun;
mod shapes;
#[path = "../../fuzz/src/targets.rs"]
mod targets;
mod writer;

use vramscope_snapshot::{Error, Event, Item, Outline, Segment, Tables, read};

/// Everything a file holds.
pub struct Whole {
    pub segments: Vec<Segment>,
    pub events: Vec<Event>,
    pub outline: Outline,
    pub tables: Tables,
}

pub fn whole(file: &[u8]) -> Result<Whole, Error> {
    let mut segments = Vec::new();
    let mut events = Vec::new();
    let (outline, tables) = read(file, file.len() as u64, |item, _| {
        match item {
            Item::Segment(segment) => segments.push(segment),
            Item::Event(event) => events.push(event),
        }
        Ok::<(), Error>(())
    })?;
    Ok(Whole {
        segments,
        events,
        outline,
        tables,
    })
}
