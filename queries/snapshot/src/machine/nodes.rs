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
    /// The memo was asked for it: it may lie in several places.
    pub shared: bool,
    /// What it became, if others may still hold it under its handle.
    forward: Option<Value>,
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
            node.shared = false;
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
            shared: false,
            forward: None,
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

    /// The same, for one more place.
    pub fn share(&mut self, index: u32) -> Option<Handle> {
        let handle = self.current(index)?;
        self.slots[index as usize].shared = true;
        Some(handle)
    }

    /// Adds a value to a container that is there.
    #[inline]
    pub fn push(&mut self, handle: Handle, value: Value) {
        if let Some(node) = self.get_mut(handle) {
            node.items.push(value);
            self.values += 1;
        }
    }

    /// Adds values to a container that is there.
    pub fn extend(&mut self, handle: Handle, values: &[Value]) {
        if let Some(node) = self.get_mut(handle) {
            node.items.extend_from_slice(values);
            self.values += values.len() as u64;
        }
    }

    /// Ends a container that became something else. The slot of one that may lie in several places
    /// is not used again: it tells what became of it. Its place in the memo.
    pub fn become_value(&mut self, handle: Handle, value: Value) -> Option<u32> {
        let node = self.get_mut(handle)?;
        if !node.shared {
            let (items, memo) = self.take(handle)?;
            self.recycle(handle, items);
            return Some(memo);
        }
        node.live = false;
        node.forward = Some(value);
        let memo = node.memo;
        self.values -= std::mem::take(&mut self.slots[handle.index as usize].items).len() as u64;
        Some(memo)
    }

    /// What a value has become meanwhile.
    #[inline]
    pub fn resolve(&self, value: Value) -> Value {
        let Value::Node(handle) = value else {
            return value;
        };
        let node = &self.slots[handle.index as usize];
        match node.forward {
            Some(now) if node.generation == handle.generation => now,
            _ => value,
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
