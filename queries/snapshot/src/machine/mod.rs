//! The stack machine that builds what a file describes. Pickles drive it opcode by opcode; JSON
//! drives it with the same steps.
//!
//! A pickle is written in postfix: `[`, mark, elements, "append them". To hand out a trace entry
//! before its list is complete, the machine has to know what a list will become while its elements
//! still lie on the stack: that is its [`Role`], found from the key before it. An element of a list
//! that streams is handed out when the next one begins. Should a list turn out to be something
//! else than its role says, the file is refused.
//!
//! Frames become one number when a list takes them in, lists of frames one number when a
//! dictionary takes them in under `frames`. Both may be referred to again afterwards, but no
//! longer changed.

mod containers;
mod memo;
pub(crate) mod nodes;
mod root;
mod value;

use std::collections::VecDeque;

use crate::build::{self, Key};
use crate::tables::Tables;
use crate::{Error, Item, Limits, Memory, Outline};

use memo::{Entry, Memo};
use nodes::{NO_MEMO, Nodes};
pub(crate) use value::{Handle, Kind, Role, Value};

/// A mark: where the values above it begin.
#[derive(Clone, Copy)]
struct Mark {
    at: usize,
    /// Elements above it were handed out: they must have belonged to the list below it.
    flushed: bool,
}

pub(crate) struct Machine {
    limits: Limits,
    stack: Vec<Value>,
    marks: Vec<Mark>,
    nodes: Nodes,
    memo: Memo,
    tables: Tables,
    outline: Outline,
    /// Read and not yet handed out.
    ready: VecDeque<Item>,
    has_content: bool,
    root_keys: Vec<String>,
    /// Where the step stands.
    offset: u64,
    /// For lists of frames, kept to be used again.
    frames: Vec<u32>,
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        let mut tables = Tables::default();
        Key::intern_all(&mut tables);
        Self {
            limits,
            stack: Vec::new(),
            marks: Vec::new(),
            nodes: Nodes::default(),
            memo: Memo::default(),
            tables,
            outline: Outline::default(),
            ready: VecDeque::new(),
            has_content: false,
            root_keys: Vec::new(),
            offset: 0,
            frames: Vec::new(),
        }
    }

    pub fn into_parts(self) -> (Outline, Tables) {
        (self.outline, self.tables)
    }

    /// Says where the next step stands in the file.
    #[inline]
    pub fn at(&mut self, offset: u64) {
        self.offset = offset;
    }

    /// Hands out what is ready.
    #[inline]
    pub fn drain<E>(
        &mut self,
        sink: &mut impl FnMut(Item, &Tables) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some(item) = self.ready.pop_front() {
            sink(item, &self.tables)?;
        }
        Ok(())
    }

    fn unexpected(&self, expected: &'static str, found: impl Into<String>) -> Error {
        Error::unexpected(self.offset, expected, found)
    }

    fn check_memory(&self) -> Result<(), Error> {
        self.check_memory_with(0)
    }

    /// Whether that many bytes more may be held.
    fn check_memory_with(&self, more: usize) -> Result<(), Error> {
        let stack = self.stack.capacity() * size_of::<Value>() + more;
        let held = stack as u64 + self.nodes.bytes() + self.memo.bytes() + self.tables.bytes();
        if held <= self.limits.memory {
            return Ok(());
        }
        Err(Error::Limit {
            offset: self.offset,
            what: format!("it needs {held} bytes of memory"),
            limit: self.limits.memory,
        })
    }

    fn check_depth(&self, depth: usize) -> Result<(), Error> {
        if depth <= usize::from(self.limits.depth) {
            return Ok(());
        }
        Err(Error::Limit {
            offset: self.offset,
            what: format!("containers nested {depth} deep"),
            limit: u64::from(self.limits.depth),
        })
    }

    // Values.

    #[inline]
    pub fn push(&mut self, value: Value) -> Result<(), Error> {
        // The stack takes memory when it grows, to twice its size, and not with each of a million
        // values.
        if self.stack.len() == self.stack.capacity() {
            self.check_memory_with(self.stack.capacity() * size_of::<Value>())?;
        }
        self.stack.push(value);
        Ok(())
    }

    pub fn push_text(&mut self, text: &str) -> Result<(), Error> {
        let text = self.tables.intern(text);
        self.push(Value::Text(text))?;
        self.check_memory()
    }

    /// The last value, which stays.
    fn top(&self) -> Result<Value, Error> {
        let floor = self.marks.last().map_or(0, |mark| mark.at);
        match self.stack.last() {
            Some(value) if self.stack.len() > floor => Ok(*value),
            _ => Err(self.unexpected("a value on the stack", "none")),
        }
    }

    fn pop(&mut self) -> Result<Value, Error> {
        let value = self.top()?;
        self.stack.pop();
        Ok(value)
    }

    pub fn mark(&mut self) -> Result<(), Error> {
        self.marks.push(Mark {
            at: self.stack.len(),
            flushed: false,
        });
        self.check_depth(self.marks.len())
    }

    fn pop_mark(&mut self) -> Result<Mark, Error> {
        match self.marks.pop() {
            Some(mark) => Ok(mark),
            None => Err(self.unexpected("a mark on the stack", "none")),
        }
    }

    /// A mark whose values must all still be there.
    fn pop_mark_whole(&mut self) -> Result<Mark, Error> {
        let mark = self.pop_mark()?;
        if mark.flushed {
            return Err(self.unexpected("elements of a list (APPENDS)", "another container's"));
        }
        Ok(mark)
    }

    // Containers.

    pub fn open_dict(&mut self) -> Result<(), Error> {
        self.flush_complete()?;
        let role = if self.stack.is_empty() {
            Role::Root
        } else {
            Role::Plain
        };
        self.open(Kind::Dict, role)
    }

    pub fn open_list(&mut self) -> Result<(), Error> {
        let role = self.role_of_new_list();
        self.open(Kind::List, role)
    }

    fn open(&mut self, kind: Kind, role: Role) -> Result<(), Error> {
        let handle = self.nodes.add(kind, role, self.offset);
        self.push(Value::Node(handle))?;
        self.check_memory()
    }

    /// What a list that begins here will be.
    fn role_of_new_list(&self) -> Role {
        let Some(&Value::Node(first)) = self.stack.first() else {
            return if self.stack.is_empty() {
                // What `torch.cuda.memory_snapshot()` returns: only segments.
                Role::Segments { host: false }
            } else {
                Role::Plain
            };
        };
        // The container that the values on this level will go into, if that is certain.
        let (owner, from) = match self.marks.last() {
            None => (Some(first), 1),
            Some(mark) => match mark.at.checked_sub(1).map(|below| self.stack[below]) {
                Some(Value::Node(owner)) => (Some(owner), mark.at),
                _ => (None, mark.at),
            },
        };
        let Some(owner) = owner.and_then(|owner| self.nodes.get(owner)) else {
            return Role::Plain;
        };
        let level = &self.stack[from..];
        match owner.role {
            Role::Root => match level {
                // A key and its value in turn: after a key.
                [.., Value::Text(key)] if level.len() % 2 == 1 => self.role_of_key(*key),
                // After a value: to be appended to that.
                [.., Value::Node(list)] => self.role_in(*list, 0),
                _ => Role::Plain,
            },
            Role::Traces { host } => Role::Trace {
                host,
                index: (owner.gone + level.len() as u64) as u32,
            },
            _ => Role::Plain,
        }
    }

    /// What a list is that goes into another.
    fn role_in(&self, list: Handle, waiting: usize) -> Role {
        match self.nodes.get(list) {
            Some(node) => match node.role {
                Role::Traces { host } => Role::Trace {
                    host,
                    index: (node.gone + waiting as u64) as u32,
                },
                _ => Role::Plain,
            },
            None => Role::Plain,
        }
    }

    /// Hands out the last element of a list that streams: another one begins.
    #[inline]
    fn flush_complete(&mut self) -> Result<(), Error> {
        let Some(mark) = self.marks.last_mut() else {
            return Ok(());
        };
        if self.stack.len() != mark.at + 1 || mark.at == 0 {
            return Ok(());
        }
        let (Value::Node(owner), Value::Node(element)) =
            (self.stack[mark.at - 1], self.stack[mark.at])
        else {
            return Ok(());
        };
        let Some(role) = self.nodes.get(owner).map(|node| node.role) else {
            return Ok(());
        };
        let is_dict = self
            .nodes
            .get(element)
            .is_some_and(|e| e.kind == Kind::Dict);
        if !role.streams() || !is_dict {
            return Ok(());
        }
        mark.flushed = true;
        self.stack.pop();
        if let Some(node) = self.nodes.get_mut(owner) {
            node.gone += 1;
        }
        self.consume(role, Value::Node(element))
    }

    fn gone(&self) -> Error {
        self.unexpected(
            "a container that is still being built",
            "one that was read to its end before; no snapshot refers to such",
        )
    }

    // What is kept, handed out, or dropped.

    /// A dictionary that is a frame becomes that frame's number.
    fn keep_frame(&mut self, value: Value) -> Result<Value, Error> {
        let Value::Node(handle) = value else {
            return Ok(value);
        };
        let Some(node) = self.nodes.get(handle) else {
            return Err(self.gone());
        };
        if node.kind != Kind::Dict {
            return Ok(value);
        }
        let Some(frame) = build::frame(&node.items) else {
            return Ok(value);
        };
        let frame = self.tables.intern_frame(frame);
        Ok(self.replace(handle, Value::Frame(frame)))
    }

    /// A list of frames becomes that stack's number.
    fn keep_stack(&mut self, value: Value) -> Result<Value, Error> {
        let Value::Node(handle) = value else {
            return Ok(value);
        };
        let Some(node) = self.nodes.get(handle) else {
            return Err(self.gone());
        };
        self.frames.clear();
        for item in &node.items {
            match item {
                Value::Frame(frame) => self.frames.push(*frame),
                _ => return Ok(value),
            }
        }
        let stack = self.tables.intern_stack(&self.frames);
        Ok(self.replace(handle, Value::Stack(stack)))
    }

    /// A container becomes what is kept of it, in the memo as well.
    fn replace(&mut self, handle: Handle, value: Value) -> Value {
        let number = self.nodes.become_value(handle, value);
        if let (Some(number), Some(entry)) = (number, Entry::of(value))
            && number != NO_MEMO
        {
            self.memo.set(number, entry);
        }
        value
    }

    /// An element of a list that streams.
    fn consume(&mut self, role: Role, value: Value) -> Result<(), Error> {
        match role {
            Role::Segments { host } => {
                let segment = build::segment(&self.nodes, &self.tables, value, host, self.offset)?;
                self.ready.push_back(Item::Segment(segment));
            }
            Role::Trace { host, index } => {
                let memory = if host {
                    Memory::Host
                } else {
                    Memory::Device(i32::try_from(index).unwrap_or(i32::MAX))
                };
                let event = build::event(&self.nodes, &self.tables, value, memory, self.offset)?;
                self.ready.push_back(Item::Event(event));
            }
            Role::Traces { host } => return self.consume_trace(host, value),
            Role::Ignored | Role::Plain | Role::Root => {}
        }
        self.release(value);
        Ok(())
    }

    /// Drops a value, and what is below it.
    fn release(&mut self, value: Value) {
        let mut left = vec![value];
        while let Some(value) = left.pop() {
            let Value::Node(handle) = value else { continue };
            let Some((items, number)) = self.nodes.take(handle) else {
                continue;
            };
            if number != NO_MEMO {
                self.memo.set(number, Entry::Gone);
            }
            left.extend(items.iter().filter(|item| matches!(item, Value::Node(_))));
            self.nodes.recycle(handle, items);
        }
    }

    // The memo.

    /// The number that MEMOIZE gives.
    pub fn next_memo(&self) -> u32 {
        self.memo.next()
    }

    pub fn memoize(&mut self, number: u32) -> Result<(), Error> {
        // Each number took at least two bytes to give.
        if u64::from(number) > self.offset {
            return Err(Error::Limit {
                offset: self.offset,
                what: format!("memo entry {number}"),
                limit: self.offset,
            });
        }
        let value = self.top()?;
        let Some(entry) = Entry::of(value) else {
            return Err(self.unexpected("a text or container to remember", value.kind()));
        };
        if let Value::Node(handle) = value {
            match self.nodes.get_mut(handle) {
                Some(node) if node.memo == NO_MEMO => node.memo = number,
                _ => return Err(self.unexpected("one memo entry", "a second for the same")),
            }
        }
        if let Entry::Node(index) = self.memo.set(number, entry)
            && let Some(handle) = self.nodes.current(index)
            && let Some(node) = self.nodes.get_mut(handle)
            && Value::Node(handle) != value
        {
            node.memo = NO_MEMO;
        }
        self.check_memory()
    }

    #[inline]
    pub fn recall(&mut self, number: u32) -> Result<(), Error> {
        let value = match self.memo.get(number) {
            Entry::Text(text) => Value::Text(text),
            Entry::Frame(frame) => Value::Frame(frame),
            Entry::Stack(stack) => Value::Stack(stack),
            Entry::Pair(pair) => Value::Pair(pair),
            Entry::Other => Value::Other,
            Entry::Node(index) => match self.nodes.share(index) {
                Some(handle) => Value::Node(handle),
                None => return Err(self.gone()),
            },
            Entry::Gone => return Err(self.gone()),
            Entry::Absent => {
                return Err(self.unexpected(
                    "a memo entry that was written",
                    format!("number {number}, which was not"),
                ));
            }
        };
        self.push(value)
    }

    /// The end of the file's one value.
    pub fn finish(&mut self) -> Result<(), Error> {
        if !self.marks.is_empty() {
            return Err(self.unexpected("the end of a container", "the end of the file"));
        }
        let [value] = self.stack[..] else {
            return Err(self.unexpected("one value", format!("{}", self.stack.len())));
        };
        let root = match value {
            Value::Node(handle) => self.nodes.get(handle),
            _ => None,
        };
        let role = root.map(|node| node.role);
        match role {
            Some(Role::Segments { .. }) => Ok(()),
            Some(Role::Root) if self.has_content => Ok(()),
            Some(Role::Root) => Err(Error::NotASnapshot(format!(
                "a dictionary with the keys {:?}, without `segments` and `device_traces`",
                self.root_keys
            ))),
            _ => Err(Error::NotASnapshot(format!(
                "it holds {} where a dictionary with `segments` was expected",
                value.kind()
            ))),
        }
    }
}
