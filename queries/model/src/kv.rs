//! Key-value caches in pages: what paging wastes, and whether a pool's pages add up.

/// What the last page of a sequence leaves unused, exactly, in tokens. Sums add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageWaste {
    /// Slots of the last pages that hold no token.
    pub wasted: u64,
    /// Slots of all pages.
    pub allocated: u64,
}

impl PageWaste {
    /// wasted / allocated, 0..1; `None` where nothing was allocated.
    pub fn ratio(&self) -> Option<f64> {
        (self.allocated > 0).then(|| self.wasted as f64 / self.allocated as f64)
    }
}

impl std::ops::AddAssign for PageWaste {
    fn add_assign(&mut self, other: Self) {
        self.wasted += other.wasted;
        self.allocated += other.allocated;
    }
}

impl std::iter::Sum for PageWaste {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        let mut sum = Self::default();
        for part in parts {
            sum += part;
        }
        sum
    }
}

/// What a sequence of `tokens` (prompt and generated ones) wastes in pages of `page` tokens when
/// it is complete. `None` for pages of 0 tokens, and where the slots exceed 64 bits.
pub fn kv_page_waste(tokens: u64, page: u64) -> Option<PageWaste> {
    let allocated = tokens.checked_next_multiple_of(page)?;
    Some(PageWaste {
        wasted: allocated - tokens,
        allocated,
    })
}

/// What a pool says of its pages (or blocks, or tokens: any one unit) at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolCount {
    pub total: u64,
    /// Held by running sequences.
    pub used: u64,
    /// Kept for reuse by later sequences, given up as soon as another needs the page.
    pub cached: u64,
    pub free: u64,
}

impl PoolCount {
    /// used + cached + free - total: 0 where the pool's pages add up, above 0 where some are
    /// counted twice, below 0 where some are lost.
    pub fn imbalance(&self) -> i128 {
        let parts = [self.used, self.cached, self.free];
        let parts: i128 = parts.into_iter().map(i128::from).sum();
        parts - i128::from(self.total)
    }

    /// What a new sequence can get: free, and cached ones that nobody holds.
    pub fn soft_free(&self) -> u64 {
        self.free.saturating_add(self.cached)
    }

    /// What holds nothing at all.
    pub fn really_free(&self) -> u64 {
        self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_page_is_not_full() {
        let waste = |tokens, page| kv_page_waste(tokens, page).map(|w| (w.wasted, w.allocated));
        assert_eq!(waste(0, 16), Some((0, 0)));
        assert_eq!(waste(1, 16), Some((15, 16)));
        assert_eq!(waste(16, 16), Some((0, 16)));
        assert_eq!(waste(418, 16), Some((14, 432)));
        assert_eq!(waste(7, 0), None);
        assert_eq!(waste(u64::MAX, 16), None);
        assert_eq!(PageWaste::default().ratio(), None);
    }

    #[test]
    fn pages_that_do_not_add_up_show() {
        let count = |used, cached, free| PoolCount {
            total: 100,
            used,
            cached,
            free,
        };
        assert_eq!(count(60, 30, 10).imbalance(), 0);
        assert_eq!(count(60, 30, 9).imbalance(), -1);
        assert_eq!(count(60, 31, 10).imbalance(), 1);
        assert_eq!(count(60, 30, 10).soft_free(), 40);
        assert_eq!(count(60, 30, 10).really_free(), 10);
        assert_eq!(
            count(u64::MAX, u64::MAX, 0).imbalance(),
            2 * i128::from(u64::MAX) - 100
        );
    }
}
