//! Values that go into lists, dictionaries and tuples.

use super::{Handle, Kind, Machine, Role, Value};
use crate::Error;
use crate::build::{self, Key};

impl Machine {
    /// The container below the values of a mark that just ended, which lies on the same level.
    fn below(&self, from: usize) -> Result<Handle, Error> {
        let floor = self.marks.last().map_or(0, |mark| mark.at);
        match from.checked_sub(1).filter(|below| *below >= floor) {
            Some(below) => match self.stack[below] {
                Value::Node(handle) => Ok(handle),
                Value::Frame(_) | Value::Stack(_) => Err(self.unexpected(
                    "a container that is being built",
                    "one that was used before",
                )),
                other => Err(self.unexpected("a list or dictionary", other.kind())),
            },
            None => Err(self.unexpected("a list or dictionary below the mark", "nothing")),
        }
    }

    /// The mark's values go into the list below them.
    pub fn append_all(&mut self) -> Result<(), Error> {
        let mark = self.pop_mark()?;
        let list = self.below(mark.at)?;
        let values = &self.stack[mark.at..];
        // Most lists are stacks, and most of their frames are known.
        let is_simple = !values.iter().any(|value| matches!(value, Value::Node(_)))
            && self
                .nodes
                .get(list)
                .is_some_and(|node| node.kind == Kind::List && node.role == Role::Plain);
        if is_simple {
            self.nodes.extend(list, values);
        } else {
            for index in mark.at..self.stack.len() {
                self.append(list, self.stack[index])?;
            }
        }
        self.stack.truncate(mark.at);
        self.check_memory()
    }

    /// The last value goes into the list below it.
    pub fn append_one(&mut self) -> Result<(), Error> {
        let value = self.pop()?;
        let list = self.below(self.stack.len())?;
        self.append(list, value)?;
        self.check_memory()
    }

    /// The mark's keys and values go into the dictionary below them.
    pub fn set_all(&mut self) -> Result<(), Error> {
        let mark = self.pop_mark_whole()?;
        let dict = self.below(mark.at)?;
        if !(self.stack.len() - mark.at).is_multiple_of(2) {
            return Err(self.unexpected("a value for each key", "a key without one"));
        }
        for index in (mark.at..self.stack.len()).step_by(2) {
            self.set(dict, self.stack[index], self.stack[index + 1])?;
        }
        self.stack.truncate(mark.at);
        self.check_memory()
    }

    /// The last two values go into the dictionary below them as key and value.
    pub fn set_one(&mut self) -> Result<(), Error> {
        let value = self.pop()?;
        let key = self.pop()?;
        let dict = self.below(self.stack.len())?;
        self.set(dict, key, value)?;
        self.check_memory()
    }

    /// The last values become a tuple.
    pub fn tuple(&mut self, count: usize) -> Result<(), Error> {
        let floor = self.marks.last().map_or(0, |mark| mark.at);
        let from = self.stack.len().checked_sub(count).filter(|f| *f >= floor);
        let Some(from) = from else {
            return Err(self.unexpected("the values of a tuple", "fewer"));
        };
        self.gather(Kind::Tuple, from)
    }

    /// The mark's values become a tuple, list or dictionary.
    pub fn gather_marked(&mut self, kind: Kind) -> Result<(), Error> {
        let mark = self.pop_mark_whole()?;
        self.gather(kind, mark.at)
    }

    fn gather(&mut self, kind: Kind, from: usize) -> Result<(), Error> {
        if let (Kind::Tuple, [a, b]) = (kind, &self.stack[from..])
            && let (Some(a), Some(b)) = (build::number(*a), build::number(*b))
        {
            let pair = self.tables.intern_pair((a, b));
            self.stack.truncate(from);
            self.push(Value::Pair(pair))?;
            return self.check_memory();
        }
        let role = match kind {
            Kind::Dict if from == 0 => Role::Root,
            _ => Role::Plain,
        };
        if kind == Kind::Dict && !(self.stack.len() - from).is_multiple_of(2) {
            return Err(self.unexpected("a value for each key", "a key without one"));
        }
        let handle = self.nodes.add(kind, role, self.offset);
        for index in from..self.stack.len() {
            let value = self.stack[index];
            match kind {
                Kind::Dict if (index - from).is_multiple_of(2) => {
                    self.set(handle, value, self.stack[index + 1])?;
                }
                Kind::Dict => {}
                Kind::List | Kind::Tuple => self.take_in(handle, value)?,
            }
        }
        self.stack.truncate(from);
        self.push(Value::Node(handle))?;
        self.check_memory()
    }

    fn append(&mut self, list: Handle, value: Value) -> Result<(), Error> {
        let value = self.nodes.resolve(value);
        let Some(node) = self.nodes.get(list) else {
            return Err(self.gone());
        };
        if node.kind != Kind::List {
            return Err(self.unexpected("a list", "another container"));
        }
        match node.role {
            Role::Plain => {
                let value = self.keep_frame(value)?;
                self.take_in(list, value)
            }
            // Only dictionaries have it.
            Role::Root => Err(self.unexpected("a list", "the file's dictionary")),
            role => {
                if let Some(node) = self.nodes.get_mut(list) {
                    node.gone += 1;
                }
                self.consume(role, value)
            }
        }
    }

    fn set(&mut self, dict: Handle, key: Value, value: Value) -> Result<(), Error> {
        let value = self.nodes.resolve(value);
        let Some(node) = self.nodes.get(dict) else {
            return Err(self.gone());
        };
        if node.kind != Kind::Dict {
            return Err(self.unexpected("a dictionary", "another container"));
        }
        if node.role == Role::Root {
            return self.set_root(key, value);
        }
        let is_frames = matches!(key, Value::Text(text) if Key::of(text) == Some(Key::Frames));
        let value = if is_frames {
            self.keep_stack(value)?
        } else {
            value
        };
        self.take_in(dict, key)?;
        self.take_in(dict, value)
    }

    /// Puts a value into a container.
    fn take_in(&mut self, owner: Handle, value: Value) -> Result<(), Error> {
        let value = self.nodes.resolve(value);
        if let Value::Node(child) = value {
            let Some(below) = self.nodes.get(child).map(|node| node.depth) else {
                return Err(self.gone());
            };
            let depth = below.saturating_add(1);
            self.check_depth(usize::from(depth))?;
            if let Some(node) = self.nodes.get_mut(owner) {
                node.depth = node.depth.max(depth);
            }
        }
        self.nodes.push(owner, value);
        Ok(())
    }
}
