//! What lies on the stack and in containers.

use crate::tables::{StackId, Text};

/// A container that is being built. Numbers are used again; the generation tells an old
/// container of that number from a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    pub index: u32,
    pub generation: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// Above `i64::MAX`.
    Uint(u64),
    Float(f64),
    Text(Text),
    /// A frame that is kept.
    Frame(u32),
    /// A list of frames that is kept.
    Stack(StackId),
    /// A tuple of two numbers that is kept.
    Pair(u32),
    Node(Handle),
    /// Something that no snapshot needs: bytes, huge numbers.
    Other,
}

impl Value {
    /// What it is, for errors.
    pub const fn kind(self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a truth value",
            Value::Int(_) | Value::Uint(_) => "a whole number",
            Value::Float(_) => "a number",
            Value::Text(_) => "a text",
            Value::Frame(_) => "a frame",
            Value::Stack(_) => "a list of frames",
            Value::Pair(_) => "a pair of numbers",
            Value::Node(_) => "a list, tuple or dictionary",
            Value::Other => "bytes or a huge number",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    List,
    /// Keys and values in turn.
    Dict,
    Tuple,
}

/// What a container is for. All but `Plain` may be emptied while they are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Plain,
    /// The dictionary that is the file.
    Root,
    Segments {
        host: bool,
    },
    /// A list of traces.
    Traces {
        host: bool,
    },
    /// One trace; of a device the one with that index.
    Trace {
        host: bool,
        index: u32,
    },
    /// Below a key that nobody reads.
    Ignored,
}

impl Role {
    /// Whether dictionaries in the list are handed out, or dropped, as soon as they are whole.
    pub const fn streams(self) -> bool {
        matches!(
            self,
            // A list of traces holds lists; one that holds entries itself is one trace.
            Role::Segments { .. } | Role::Traces { .. } | Role::Trace { .. } | Role::Ignored
        )
    }
}
