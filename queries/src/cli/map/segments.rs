//! The segments of a map with their blocks, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};
use vramscope_model::map::{AddressMap, Block, BlockState, PoolKey, PoolSize, Segment};
use vramscope_queries::session::Limits;

use crate::door::Door;
use crate::target::Moment;
use crate::text::{counted, size};

/// Segments in order of pool, stream and address.
pub struct Map {
    pub segments: Vec<Shown>,
}

/// A segment.
#[derive(Debug, Clone)]
pub struct Shown {
    pub pool: String,
    pub size: String,
    pub stream: i64,
    pub expandable: bool,
    pub address: u64,
    pub bytes: u64,
    pub allocated: u64,
    pub releasable: u64,
    pub stranded: u64,
    pub cells: Vec<Cell>,
}

/// A block or gap.
#[derive(Debug, Clone)]
pub struct Cell {
    pub address: u64,
    pub bytes: u64,
    pub requested: Option<u64>,
    pub state: BlockState,
    pub age_seconds: Option<f64>,
    pub stack: Option<i64>,
}

pub async fn ask(door: &mut Door, limits: Limits, moment: &Moment) -> anyhow::Result<Map> {
    let sql = format!(
        "SELECT pool, segment_type, stream, expandable, address, bytes, allocated_bytes, releasable_bytes,
            stranded_bytes
         FROM segments WHERE memory_kind <> 'pinned_host' AND {}
         ORDER BY pool, segment_type, stream, address",
        moment.conditions()
    );
    let rows = door.collect(&sql, limits).await?;
    let mut segments = Vec::new();
    let mut index = BTreeMap::new();
    for row in rows.iter() {
        let bytes = |name| -> anyhow::Result<u64> { Ok(row.bytes(name)?.unwrap_or_default()) };
        let address = bytes("address")?;
        index.insert(address, segments.len());
        segments.push(Shown {
            pool: row.text("pool")?.unwrap_or_else(|| "default".to_string()),
            size: row.text("segment_type")?.unwrap_or_default(),
            stream: row.number("stream")?.unwrap_or_default(),
            expandable: row.flag("expandable")?.unwrap_or(false),
            address,
            bytes: bytes("bytes")?,
            allocated: bytes("allocated_bytes")?,
            releasable: bytes("releasable_bytes")?,
            stranded: bytes("stranded_bytes")?,
            cells: Vec::new(),
        });
    }
    let sql = format!(
        "SELECT segment_address, address, bytes, requested_bytes, state, age_seconds, stack_id
         FROM memory_map WHERE memory_kind <> 'pinned_host' AND {}
         ORDER BY address",
        moment.conditions()
    );
    let rows = door.collect(&sql, limits).await?;
    for row in rows.iter() {
        let segment = row
            .bytes("segment_address")?
            .and_then(|address| index.get(&address));
        let Some(segment) = segment else { continue };
        let state = match row.text("state")?.as_deref() {
            Some("inactive") => BlockState::Inactive,
            Some("active_pending_free") => BlockState::PendingFree,
            _ => BlockState::Allocated,
        };
        segments[*segment].cells.push(Cell {
            address: row.bytes("address")?.unwrap_or_default(),
            bytes: row.bytes("bytes")?.unwrap_or_default(),
            requested: row.bytes("requested_bytes")?,
            state,
            age_seconds: row.ratio("age_seconds")?,
            stack: row.number("stack_id")?,
        });
    }
    Ok(Map { segments })
}

impl Map {
    /// As the allocator's rules take it.
    pub fn address_map(&self, device: i32) -> AddressMap {
        let mut map = AddressMap {
            segments: self
                .segments
                .iter()
                .map(|segment| segment.modelled(device))
                .collect(),
        };
        map.sort();
        map
    }

    /// The stream that most of the default pool's memory belongs to.
    pub fn main_stream(&self) -> i64 {
        let mut streams: BTreeMap<i64, u64> = BTreeMap::new();
        for segment in self
            .segments
            .iter()
            .filter(|segment| segment.pool == "default")
        {
            *streams.entry(segment.stream).or_default() += segment.bytes;
        }
        // Of equals the first.
        let most = streams.iter().rev().max_by_key(|(_, bytes)| **bytes);
        most.map_or(0, |(stream, _)| *stream)
    }

    /// A line a segment; the fullest of stranded bytes first chosen, in order of address.
    pub fn text(&self, width: usize, most: usize) -> String {
        let mut chosen: Vec<usize> = (0..self.segments.len()).collect();
        if most > 0 && chosen.len() > most {
            chosen.sort_by_key(|index| {
                let segment = &self.segments[*index];
                (
                    std::cmp::Reverse((segment.stranded, segment.bytes)),
                    segment.address,
                )
            });
            chosen.truncate(most);
            chosen.sort_unstable();
        }
        let mut out = String::new();
        let mut group = None;
        for index in &chosen {
            let segment = &self.segments[*index];
            let key = (&segment.pool, &segment.size, segment.stream);
            if group != Some(key) {
                let _ = writeln!(out, "{}", self.heading(segment));
                group = Some(key);
            }
            let _ = writeln!(out, "{}", segment.line(width));
        }
        let left: Vec<&Shown> = (0..self.segments.len())
            .filter(|index| !chosen.contains(index))
            .map(|index| &self.segments[index])
            .collect();
        if !left.is_empty() {
            let bytes: u64 = left.iter().map(|segment| segment.bytes).sum();
            let stranded: u64 = left.iter().map(|segment| segment.stranded).sum();
            let _ = writeln!(
                out,
                "and {} of {} more, {} stranded in them (--segments 0 shows all)",
                counted(left.len(), "segment"),
                size(bytes),
                size(stranded)
            );
        }
        out.push_str("# in use  + mostly in use  - mostly free  . free  ~ freed, a stream may still use it\n");
        out
    }

    fn heading(&self, of: &Shown) -> String {
        let same = |segment: &&Shown| {
            (&segment.pool, &segment.size, segment.stream) == (&of.pool, &of.size, of.stream)
        };
        let segments: Vec<&Shown> = self.segments.iter().filter(same).collect();
        let bytes: u64 = segments.iter().map(|segment| segment.bytes).sum();
        let allocated: u64 = segments.iter().map(|segment| segment.allocated).sum();
        let pool = if of.pool == "default" {
            "default pool".to_string()
        } else {
            format!("private pool {}", of.pool)
        };
        format!(
            "{pool}, {} requests, stream {}: {}, {} of {} allocated",
            of.size,
            of.stream,
            counted(segments.len(), "segment"),
            size(allocated),
            size(bytes)
        )
    }

    pub fn json(&self) -> Value {
        self.segments.iter().map(Shown::json).collect()
    }
}

impl Shown {
    fn modelled(&self, device: i32) -> Segment {
        let size = if self.size == "small" {
            PoolSize::Small
        } else {
            PoolSize::Large
        };
        let block = |cell: &Cell| Block {
            address: cell.address,
            bytes: cell.bytes,
            requested: cell.requested,
            state: cell.state,
            tag: None,
        };
        Segment {
            pool: PoolKey {
                device,
                private: private_pool(&self.pool),
                size,
                stream: self.stream,
            },
            address: self.address,
            bytes: self.bytes,
            expandable: self.expandable,
            blocks: self.cells.iter().map(block).collect(),
            tag: None,
        }
    }

    fn line(&self, width: usize) -> String {
        let note = if self.stranded > 0 {
            format!("{} stranded", size(self.stranded))
        } else if self.releasable > 0 {
            format!("{} releasable", size(self.releasable))
        } else {
            String::new()
        };
        let head = format!("  {:#014x} {:>10} ", self.address, size(self.bytes));
        let room = width.saturating_sub(head.len() + note.len() + 3).max(8);
        format!("{head}[{}] {note}", self.strip(room))
            .trim_end()
            .to_string()
    }

    /// Equal shares of the segment as characters.
    fn strip(&self, room: usize) -> String {
        let mut used = vec![0.0_f64; room];
        let mut pending = vec![0.0_f64; room];
        let share = self.bytes.max(1) as f64 / room as f64;
        for cell in self
            .cells
            .iter()
            .filter(|cell| cell.state != BlockState::Inactive)
        {
            let begin = cell.address.saturating_sub(self.address) as f64 / share;
            let end = begin + cell.bytes as f64 / share;
            let target = if cell.state == BlockState::PendingFree {
                &mut pending
            } else {
                &mut used
            };
            for (index, filled) in target
                .iter_mut()
                .enumerate()
                .take((end.ceil() as usize).min(room))
                .skip(begin as usize)
            {
                let overlap = end.min(index as f64 + 1.0) - begin.max(index as f64);
                *filled += overlap.max(0.0);
            }
        }
        let shown = used.iter().zip(&pending).map(|(used, pending)| {
            if pending > used && *pending > 0.0 {
                return '~';
            }
            match used {
                // Less than a thousandth is a rounding of the shares.
                x if *x > 0.999 => '#',
                x if *x >= 0.5 => '+',
                x if *x > 0.0 => '-',
                _ => '.',
            }
        });
        shown.collect()
    }

    fn json(&self) -> Value {
        let blocks: Vec<Value> = self
            .cells
            .iter()
            .map(|cell| {
                json!({
                    "address": cell.address, "bytes": cell.bytes, "requested_bytes": cell.requested,
                    "state": cell.state.name(), "age_seconds": cell.age_seconds, "stack_id": cell.stack,
                })
            })
            .collect();
        json!({
            "pool": self.pool, "segment_type": self.size, "stream": self.stream,
            "expandable": self.expandable, "address": self.address, "bytes": self.bytes,
            "allocated_bytes": self.allocated, "releasable_bytes": self.releasable,
            "stranded_bytes": self.stranded, "blocks": blocks,
        })
    }
}

/// `(0, 1)` as the `segments` table spells it.
fn private_pool(text: &str) -> Option<(u64, u64)> {
    let inner = text.strip_prefix('(')?.strip_suffix(')')?;
    let (first, second) = inner.split_once(',')?;
    Some((first.trim().parse().ok()?, second.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(address: u64, bytes: u64, state: BlockState) -> Cell {
        Cell {
            address,
            bytes,
            requested: None,
            state,
            age_seconds: None,
            stack: None,
        }
    }

    fn segment(bytes: u64, cells: Vec<Cell>) -> Shown {
        Shown {
            pool: "default".to_string(),
            size: "large".to_string(),
            stream: 0,
            expandable: false,
            address: 1000,
            bytes,
            allocated: 0,
            releasable: 0,
            stranded: 0,
            cells,
        }
    }

    #[test]
    fn a_character_stands_for_an_equal_share() {
        use BlockState::{Allocated, Inactive, PendingFree};
        let shown = segment(
            100,
            vec![
                cell(1000, 10, Allocated),
                cell(1010, 4, Allocated),
                cell(1014, 6, Inactive),
                cell(1020, 8, Allocated),
                cell(1028, 52, Inactive),
                cell(1080, 20, PendingFree),
            ],
        );
        assert_eq!(shown.strip(10), "#-+.....~~");
        // One block of many is never invisible.
        let tiny = segment(
            1_000_000,
            vec![cell(1000, 1, Allocated), cell(1001, 999_999, Inactive)],
        );
        assert_eq!(tiny.strip(8), "-.......");
    }

    #[test]
    fn pools_are_known_by_their_names() {
        assert_eq!(private_pool("default"), None);
        assert_eq!(private_pool("(0, 1)"), Some((0, 1)));
        assert_eq!(private_pool("(3,4)"), Some((3, 4)));
        assert_eq!(private_pool("(3, x)"), None);
    }
}
