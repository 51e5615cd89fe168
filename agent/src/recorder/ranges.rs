//! Sets of moments, as ranges.

/// Ranges `from <= ns < to`, in order, that neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<(i64, i64)>);

impl Ranges {
    pub fn add(&mut self, from: i64, to: i64) {
        if from >= to {
            return;
        }
        let (mut from, mut to) = (from, to);
        self.0.retain(|(a, b)| {
            let apart = *b < from || *a > to;
            if !apart {
                from = from.min(*a);
                to = to.max(*b);
            }
            apart
        });
        let at = self.0.partition_point(|(a, _)| *a < from);
        self.0.insert(at, (from, to));
    }

    pub fn contains(&self, ns: i64) -> bool {
        let after = self.0.partition_point(|(from, _)| *from <= ns);
        after > 0 && ns < self.0[after - 1].1
    }

    /// Whether all from the first to the last moment is in it.
    pub fn covers(&self, first: i64, last: i64) -> bool {
        let after = self.0.partition_point(|(from, _)| *from <= first);
        after > 0 && last < self.0[after - 1].1
    }

    /// Whether something from the first to the last moment is in it.
    pub fn touches(&self, first: i64, last: i64) -> bool {
        self.0.iter().any(|(from, to)| *from <= last && *to > first)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain array of moments.
        #[test]
        fn ranges_hold_what_was_added(
            added in prop::collection::vec((0..40i64, 0..40i64), 0..12),
            asked in (0..40i64, 0..40i64),
        ) {
            let mut ranges = Ranges::default();
            let mut moments = [false; 41];
            for (from, to) in added {
                ranges.add(from, to);
                (from..to).for_each(|ns| moments[ns as usize] = true);
            }
            for ns in 0..41 {
                prop_assert_eq!(ranges.contains(ns), moments[ns as usize]);
            }
            let (first, last) = (asked.0.min(asked.1), asked.0.max(asked.1));
            let between = &moments[first as usize..=last as usize];
            prop_assert_eq!(ranges.covers(first, last), between.iter().all(|is_in| *is_in));
            prop_assert_eq!(ranges.touches(first, last), between.iter().any(|is_in| *is_in));
        }
    }
}
