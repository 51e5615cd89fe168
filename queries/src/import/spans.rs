//! Which segment an address lies in, while segments come and go.
//!
//! Segments of the driver are taken and given back whole. Of expandable segments parts are mapped
//! and unmapped: what is contiguous counts as one segment, as in PyTorch's snapshots.

use std::collections::BTreeMap;

use vramscope_snapshot::Action;

/// The segments of one memory at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Spans {
    /// Begin and end.
    whole: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, u64>,
}

impl Spans {
    pub fn add(&mut self, expandable: bool, address: u64, bytes: u64) {
        if expandable {
            self.map(address, bytes);
        } else {
            self.whole.insert(address, address.saturating_add(bytes));
        }
    }

    /// Takes what a segment action did into account.
    pub fn apply(&mut self, action: Action, address: u64, bytes: u64) {
        match action {
            Action::SegmentAlloc => self.add(false, address, bytes),
            Action::SegmentFree => {
                self.whole.remove(&address);
            }
            Action::SegmentMap => self.map(address, bytes),
            Action::SegmentUnmap => self.unmap(address, bytes),
            _ => {}
        }
    }

    fn map(&mut self, address: u64, bytes: u64) {
        let (mut begin, mut end) = (address, address.saturating_add(bytes));
        // Neighbours become part of it.
        while let Some((&from, &to)) = self.mapped.range(..=end).next_back() {
            if to < begin {
                break;
            }
            self.mapped.remove(&from);
            begin = begin.min(from);
            end = end.max(to);
        }
        self.mapped.insert(begin, end);
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        let (begin, end) = (address, address.saturating_add(bytes));
        while let Some((&from, &to)) = self.mapped.range(..end).next_back() {
            if to <= begin {
                break;
            }
            self.mapped.remove(&from);
            if from < begin {
                self.mapped.insert(from, begin);
            }
            if to > end {
                self.mapped.insert(end, to);
            }
        }
    }

    /// The first address of the segment that an address lies in.
    pub fn segment_of(&self, address: u64) -> Option<u64> {
        [&self.whole, &self.mapped].into_iter().find_map(|spans| {
            let (&begin, &end) = spans.range(..=address).next_back()?;
            (address < end).then_some(begin)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_parts_grow_together_and_apart() {
        let mut spans = Spans::default();
        spans.apply(Action::SegmentMap, 100, 20);
        spans.apply(Action::SegmentMap, 140, 20);
        assert_eq!(spans.segment_of(150), Some(140));
        spans.apply(Action::SegmentMap, 120, 20);
        let found = (spans.segment_of(159), spans.segment_of(160));
        assert_eq!(found, (Some(100), None));
        spans.apply(Action::SegmentUnmap, 110, 40);
        let found = (spans.segment_of(105), spans.segment_of(120));
        assert_eq!(found, (Some(100), None));
        assert_eq!(spans.segment_of(155), Some(150));
        spans.apply(Action::SegmentMap, 110, 40);
        assert_eq!(spans.segment_of(155), Some(100));
    }

    #[test]
    fn whole_segments_come_and_go() {
        let mut spans = Spans::default();
        spans.apply(Action::SegmentAlloc, 1000, 512);
        spans.apply(Action::SegmentAlloc, 1512, 512);
        let found = (spans.segment_of(1511), spans.segment_of(1512));
        assert_eq!(found, (Some(1000), Some(1512)));
        spans.apply(Action::SegmentFree, 1000, 512);
        assert_eq!(spans.segment_of(1511), None);
    }
}
