//! Free and unmapped blocks, by pool and stream: blocks of two lists never serve each other's
//! requests.

use std::collections::{BTreeMap, HashMap};

use foldhash::fast::FixedState;

use super::blocks::Block;
use crate::map::PoolSize;

type Private = Option<(u64, u64)>;
type ListKey = (Private, PoolSize, i64);

/// One of the allocator's pools, of all streams.
#[derive(Debug, Clone)]
struct Pool {
    private: Private,
    size: PoolSize,
    /// Requests it was asked to serve, counted only where garbage is collected.
    calls: u64,
    flushable: bool,
}

/// A pool's blocks of one stream.
#[derive(Debug, Clone)]
struct List {
    pool: u32,
    size: PoolSize,
    stream: i64,
    /// By size, then address.
    free: BTreeMap<(u64, u64), u32>,
    /// By address.
    unmapped: BTreeMap<u64, u32>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Lists {
    pools: Vec<Pool>,
    lists: Vec<List>,
    by_key: HashMap<ListKey, u32, FixedState>,
    /// The last look-up of each pool size: requests come in runs of one stream.
    last: [Option<(ListKey, u32)>; 2],
}

impl Lists {
    /// The list's number; new ones are made as they are asked for.
    pub fn find(&mut self, private: Private, size: PoolSize, stream: i64) -> u32 {
        let key = (private, size, stream);
        if let Some((last, list)) = self.last[size as usize]
            && last == key
        {
            return list;
        }
        let list = match self.by_key.get(&key) {
            Some(list) => *list,
            None => self.add(key),
        };
        self.last[size as usize] = Some((key, list));
        list
    }

    fn add(&mut self, key: ListKey) -> u32 {
        let (private, size, stream) = key;
        let known = self
            .pools
            .iter()
            .position(|pool| pool.private == private && pool.size == size);
        let pool = known.unwrap_or_else(|| {
            self.pools.push(Pool {
                private,
                size,
                calls: 0,
                flushable: private.is_none(),
            });
            self.pools.len() - 1
        });
        let list = self.lists.len() as u32;
        self.lists.push(List {
            pool: pool as u32,
            size,
            stream,
            free: BTreeMap::new(),
            unmapped: BTreeMap::new(),
        });
        self.by_key.insert(key, list);
        list
    }

    fn list(&self, list: u32) -> &List {
        &self.lists[list as usize]
    }

    fn pool(&self, list: u32) -> &Pool {
        &self.pools[self.list(list).pool as usize]
    }

    pub fn size(&self, list: u32) -> PoolSize {
        self.list(list).size
    }

    pub fn stream(&self, list: u32) -> i64 {
        self.list(list).stream
    }

    pub fn private(&self, list: u32) -> Private {
        self.pool(list).private
    }

    pub fn insert_free(&mut self, number: u32, block: &mut Block) {
        block.idle_since = self.pool(block.list).calls;
        let free = &mut self.lists[block.list as usize].free;
        free.insert((block.bytes, block.address), number);
    }

    pub fn remove_free(&mut self, number: u32, block: &Block) {
        let free = &mut self.lists[block.list as usize].free;
        let removed = free.remove(&(block.bytes, block.address));
        debug_assert_eq!(removed, Some(number));
    }

    pub fn insert_unmapped(&mut self, number: u32, block: &Block) {
        let unmapped = &mut self.lists[block.list as usize].unmapped;
        unmapped.insert(block.address, number);
    }

    pub fn remove_unmapped(&mut self, block: &Block) {
        let unmapped = &mut self.lists[block.list as usize].unmapped;
        let removed = unmapped.remove(&block.address);
        debug_assert!(removed.is_some());
    }

    /// Bytes and number of free blocks of at least `bytes`, from the smallest on; of one size by
    /// address.
    pub fn fits(&self, list: u32, bytes: u64) -> impl DoubleEndedIterator<Item = (u64, u32)> {
        let range = self.list(list).free.range((bytes, 0)..);
        range.map(|((bytes, _), block)| (*bytes, *block))
    }

    /// The unmapped blocks by address.
    pub fn unmapped(&self, list: u32) -> impl Iterator<Item = u32> {
        self.list(list).unmapped.values().copied()
    }

    /// Free blocks of the pools that a flush empties, in its order: large ones of the default
    /// pool first, then small ones, then those of private pools; in each by stream, size, address.
    pub fn flushable(&self) -> Vec<Vec<u32>> {
        let mut pools: Vec<u32> = (0..self.pools.len() as u32)
            .filter(|pool| self.pools[*pool as usize].flushable)
            .collect();
        pools.sort_by_key(|pool| {
            let pool = &self.pools[*pool as usize];
            let large_first = match pool.size {
                PoolSize::Large => pool.private.is_some(),
                PoolSize::Small => pool.private.is_none(),
            };
            (pool.private, large_first)
        });
        pools.into_iter().map(|pool| self.free_of(pool)).collect()
    }

    /// Free blocks of the default pool's large part, in the order of a flush.
    pub fn large_default(&self) -> Vec<u32> {
        let pool = self
            .pools
            .iter()
            .position(|pool| pool.private.is_none() && pool.size == PoolSize::Large);
        pool.map(|pool| self.free_of(pool as u32))
            .unwrap_or_default()
    }

    fn free_of(&self, pool: u32) -> Vec<u32> {
        let mut lists: Vec<&List> = self.lists.iter().filter(|list| list.pool == pool).collect();
        // PyTorch orders by the stream's handle as an address.
        lists.sort_by_key(|list| list.stream as u64);
        lists
            .into_iter()
            .flat_map(|list| list.free.values().copied())
            .collect()
    }

    pub fn make_flushable(&mut self, private: (u64, u64)) {
        for pool in &mut self.pools {
            if pool.private == Some(private) {
                pool.flushable = true;
            }
        }
    }

    pub fn count_call(&mut self, list: u32) {
        let pool = self.list(list).pool;
        self.pools[pool as usize].calls += 1;
    }

    /// How many requests its pool was asked to serve since a block became free.
    pub fn age(&self, block: &Block) -> u64 {
        self.pool(block.list).calls - block.idle_since
    }
}
