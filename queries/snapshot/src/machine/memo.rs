//! A pickle's memo: what was written once and is referred to by number afterwards.
//!
//! CPython gives every container a number, those that nobody refers to as well. Pages of numbers
//! whose containers all were handed out are dropped, so that a long trace leaves little behind.

use super::value::Value;
use crate::tables::{StackId, Text};

const PAGE: usize = 1024;

/// What a number stands for. Half the size of a [`Value`]: there are millions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Entry {
    Absent,
    /// Was handed out.
    Gone,
    Text(Text),
    Frame(u32),
    Stack(StackId),
    Pair(u32),
    /// A container, by its slot. It knows its number here, so that the entry is changed with it.
    Node(u32),
    Other,
}

impl Entry {
    pub fn of(value: Value) -> Option<Entry> {
        Some(match value {
            Value::Text(text) => Entry::Text(text),
            Value::Frame(frame) => Entry::Frame(frame),
            Value::Stack(stack) => Entry::Stack(stack),
            Value::Pair(pair) => Entry::Pair(pair),
            Value::Node(handle) => Entry::Node(handle.index),
            Value::Other => Entry::Other,
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Uint(_) | Value::Float(_) => {
                return None;
            }
        })
    }
}

enum Page {
    None,
    Some {
        entries: Box<[Entry; PAGE]>,
        /// How many are not absent, and of these not gone.
        set: u32,
        live: u32,
    },
    /// All were handed out.
    Gone,
}

#[derive(Default)]
pub(crate) struct Memo {
    pages: Vec<Page>,
    held: u64,
    /// Numbers given so far: the next one that MEMOIZE gives.
    count: u32,
}

impl Memo {
    pub fn next(&self) -> u32 {
        self.count
    }

    #[inline]
    pub fn get(&self, number: u32) -> Entry {
        match self.pages.get(number as usize / PAGE) {
            None | Some(Page::None) => Entry::Absent,
            Some(Page::Gone) => Entry::Gone,
            Some(Page::Some { entries, .. }) => entries[number as usize % PAGE],
        }
    }

    /// Sets an entry; what was there before, if anything.
    pub fn set(&mut self, number: u32, entry: Entry) -> Entry {
        let index = number as usize / PAGE;
        while self.pages.len() <= index {
            self.pages.push(Page::None);
        }
        let page = &mut self.pages[index];
        if let Page::None | Page::Gone = page {
            let (before, count) = match page {
                Page::Gone => (Entry::Gone, PAGE as u32),
                _ => (Entry::Absent, 0),
            };
            *page = Page::Some {
                entries: Box::new([before; PAGE]),
                set: count,
                live: 0,
            };
            self.held += 1;
        }
        let Page::Some { entries, set, live } = page else {
            // Made above.
            return Entry::Absent;
        };
        let before = std::mem::replace(&mut entries[number as usize % PAGE], entry);
        if before == Entry::Absent {
            *set += 1;
            self.count += 1;
        }
        let is_live = |entry: Entry| !matches!(entry, Entry::Absent | Entry::Gone);
        *live += u32::from(is_live(entry));
        *live -= u32::from(is_live(before));
        if *set as usize == PAGE && *live == 0 {
            *page = Page::Gone;
            self.held -= 1;
        }
        before
    }

    /// Bytes held, about.
    pub fn bytes(&self) -> u64 {
        self.held * (PAGE * size_of::<Entry>()) as u64
            + self.pages.len() as u64 * size_of::<Page>() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_what_is_gone_take_no_room() {
        let mut memo = Memo::default();
        for number in 0..PAGE as u32 * 3 {
            assert_eq!(memo.next(), number);
            memo.set(number, Entry::Node(number));
        }
        let full = memo.bytes();
        for number in 0..PAGE as u32 * 3 {
            if number != 5 {
                memo.set(number, Entry::Gone);
            }
        }
        assert!(memo.bytes() < full / 2);
        assert_eq!(memo.get(4), Entry::Gone);
        assert_eq!(memo.get(5), Entry::Node(5));
        assert_eq!(memo.get(PAGE as u32 + 1), Entry::Gone);
        assert_eq!(memo.get(PAGE as u32 * 3), Entry::Absent);
        // A number that is given again.
        memo.set(PAGE as u32 + 1, Entry::Other);
        assert_eq!(memo.get(PAGE as u32 + 1), Entry::Other);
        assert_eq!(memo.get(PAGE as u32 + 2), Entry::Gone);
        assert_eq!(memo.next(), PAGE as u32 * 3);
    }
}
