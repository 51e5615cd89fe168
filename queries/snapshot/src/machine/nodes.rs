//! Containers that are being built, in slots that are used again.

use super::value::{Handle, Kind, Role, Value};

/// No place in the memo.
pub(crate) const NO_MEMO: u32 = u32::MAX;

/// Room that a slot keeps for its next container.
const KEPT: usize = 64;

pub(crate) struct Node {
    pub kind: Kind,
    pub role: Role,
    generation: u32,
    live: bool,
    /// Containers below it, at most.
    pub depth: u16,
    /// Where the memo holds it.
    pub memo: u32,
    pub items: Vec<Value>,
    /// Elements that were handed out and are not in `items` any more.
    pub gone: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

#[derive(Default)]
pub(crate) struct Nodes {
    slots: Vec<Node>,
    free: Vec<u32>,
    /// Values in all containers.
    values: u64,
}

impl Nodes {
    pub fn add(&mut self, kind: Kind, role: Role, offset: u64) -> Handle {
        if let Some(index) = self.free.pop() {
            let node = &mut self.slots[index as usize];
            node.kind = kind;
            node.role = role;
            node.live = true;
            node.depth = 0;
            node.memo = NO_MEMO;
            node.gone = 0;
            node.offset = offset;
            return Handle {
                index,
                generation: node.generation,
            };
        }
        self.slots.push(Node {
            kind,
            role,
            generation: 0,
            live: true,
            depth: 0,
            memo: NO_MEMO,
            items: Vec::new(),
            gone: 0,
            offset,
        });
        Handle {
            index: self.slots.len() as u32 - 1,
            generation: 0,
        }
    }

    /// `None` if it was handed out since.
    #[inline]
    pub fn get(&self, handle: Handle) -> Option<&Node> {
        let node = &self.slots[handle.index as usize];
        (node.live && node.generation == handle.generation).then_some(node)
    }

    #[inline]
    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut Node> {
        let node = &mut self.slots[handle.index as usize];
        (node.live && node.generation == handle.generation).then_some(node)
    }

    /// The container that has that number now.
    pub fn current(&self, index: u32) -> Option<Handle> {
        let node = &self.slots[index as usize];
        node.live.then_some(Handle {
            index,
            generation: node.generation,
        })
    }

    /// Adds a value to a container that is there.
    #[inline]
    pub fn push(&mut self, handle: Handle, value: Value) {
        if let Some(node) = self.get_mut(handle) {
            node.items.push(value);
            self.values += 1;
        }
    }

    /// Ends a container; returns its values, to be given back with [`Nodes::recycle`], and its place in
    /// the memo.
    pub fn take(&mut self, handle: Handle) -> Option<(Vec<Value>, u32)> {
        let node = self.get_mut(handle)?;
        node.live = false;
        node.generation = node.generation.wrapping_add(1);
        let items = std::mem::take(&mut node.items);
        let memo = node.memo;
        self.values -= items.len() as u64;
        Some((items, memo))
    }

    /// Makes the slot of a container that was taken free again.
    pub fn recycle(&mut self, handle: Handle, mut items: Vec<Value>) {
        items.clear();
        items.shrink_to(KEPT);
        self.slots[handle.index as usize].items = items;
        self.free.push(handle.index);
    }

    /// Bytes held, about.
    pub fn bytes(&self) -> u64 {
        self.slots.len() as u64 * size_of::<Node>() as u64 + self.values * size_of::<Value>() as u64
    }
}
