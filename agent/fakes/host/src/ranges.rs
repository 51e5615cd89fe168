//! Free ranges of an address space, handed out lowest first.
//!
//! Invariants: free ranges neither overlap nor touch, so giving back what was taken joins them
//! again; the lowest range that fits is taken, so a range just given back is the next one's to get
//! wherever nothing below it is free.

use std::collections::BTreeMap;

/// What is free, by start.
#[derive(Debug, Default)]
pub struct Ranges {
    free: BTreeMap<usize, usize>,
}

impl Ranges {
    /// One free range.
    pub fn whole(start: usize, bytes: usize) -> Self {
        Self {
            free: BTreeMap::from([(start, bytes)]),
        }
    }

    /// Whether exactly this range is free, in one piece.
    pub fn is_free(&self, start: usize, bytes: usize) -> bool {
        self.free.get(&start) == Some(&bytes)
    }

    /// Takes the lowest `bytes` bytes that begin at a multiple of `alignment` (a power of two).
    pub fn take(&mut self, bytes: usize, alignment: usize) -> Option<usize> {
        let (place, start, length) = self.free.iter().find_map(|(start, length)| {
            let place = start.checked_next_multiple_of(alignment)?;
            let end = start + length;
            (place.checked_add(bytes)? <= end).then_some((place, *start, *length))
        })?;
        self.carve(place, bytes, start, length);
        Some(place)
    }

    /// Takes these bytes; false if one of them is not free.
    pub fn take_at(&mut self, place: usize, bytes: usize) -> bool {
        let Some((start, length)) = self.free.range(..=place).next_back() else {
            return false;
        };
        let (start, length) = (*start, *length);
        let fits = place
            .checked_add(bytes)
            .is_some_and(|end| end <= start + length);
        if fits {
            self.carve(place, bytes, start, length);
        }
        fits
    }

    fn carve(&mut self, place: usize, bytes: usize, start: usize, length: usize) {
        self.free.remove(&start);
        if place > start {
            self.free.insert(start, place - start);
        }
        let (end, taken_end) = (start + length, place + bytes);
        if taken_end < end {
            self.free.insert(taken_end, end - taken_end);
        }
    }

    /// Gives a range back that was taken.
    pub fn give(&mut self, start: usize, bytes: usize) {
        let (mut start, mut bytes) = (start, bytes);
        if let Some(after) = self.free.remove(&(start + bytes)) {
            bytes += after;
        }
        if let Some((before, length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            start = *before;
            bytes += length;
        }
        self.free.insert(start, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_fit_is_taken_and_what_is_given_back_joins() {
        let mut ranges = Ranges::whole(100, 100);
        assert_eq!(ranges.take(10, 64), Some(128));
        assert_eq!(ranges.take(10, 1), Some(100));
        assert_eq!(ranges.take(20, 1), Some(138));
        assert_eq!(ranges.take(60, 1), None);
        ranges.give(138, 20);
        assert_eq!(ranges.take(5, 1), Some(110));
        ranges.give(110, 5);
        ranges.give(100, 10);
        ranges.give(128, 10);
        assert!(ranges.is_free(100, 100));
    }

    #[test]
    fn a_wanted_place_is_taken_only_where_it_is_free() {
        let mut ranges = Ranges::whole(0, 100);
        assert!(ranges.take_at(40, 20));
        assert!(!ranges.take_at(30, 11));
        assert!(!ranges.take_at(90, 11));
        assert!(ranges.take_at(60, 40));
        ranges.give(40, 60);
        assert!(ranges.is_free(0, 100));
    }
}
