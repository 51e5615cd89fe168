//! What comes again and again: texts, frames and stacks, each kept once and known by a number.

use indexmap::IndexSet;

type Set<T> = IndexSet<T, foldhash::fast::RandomState>;

/// A text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Text(pub(crate) u32);

/// A list of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(pub u32);

/// One frame as PyTorch gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Function; of C++ demangled.
    pub name: Text,
    /// File; `??` or empty where PyTorch does not know it.
    pub file: Text,
    pub line: i64,
}

/// Everything that items refer to by number.
#[derive(Debug, Default)]
pub struct Tables {
    texts: Set<Box<str>>,
    frames: Set<Frame>,
    stacks: Set<Box<[u32]>>,
    pairs: Set<(u64, u64)>,
    bytes: u64,
}

/// What one entry of a set costs beside its content: the entry, its hash, its place in the index.
const PER_ENTRY: u64 = 48;

impl Tables {
    /// The text of that number.
    pub fn text(&self, text: Text) -> &str {
        self.texts.get_index(text.0 as usize).map_or("", |t| t)
    }

    /// The frames of a stack, innermost first.
    pub fn stack(&self, stack: StackId) -> impl ExactSizeIterator<Item = Frame> + '_ {
        let frames = self.stacks.get_index(stack.0 as usize);
        let frames: &[u32] = frames.map_or(&[], |frames| frames);
        // Stacks are made of numbers of frames that are there.
        frames.iter().map(|&frame| self.frames[frame as usize])
    }

    /// How many different stacks there are so far. Their numbers begin at 0.
    pub fn stack_count(&self) -> u32 {
        self.stacks.len() as u32
    }

    /// Bytes held, about.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn intern(&mut self, text: &str) -> Text {
        if let Some(index) = self.texts.get_index_of(text) {
            return Text(index as u32);
        }
        self.bytes += text.len() as u64 + PER_ENTRY;
        Text(self.texts.insert_full(text.into()).0 as u32)
    }

    pub(crate) fn intern_frame(&mut self, frame: Frame) -> u32 {
        let (index, new) = self.frames.insert_full(frame);
        self.bytes += if new { PER_ENTRY } else { 0 };
        index as u32
    }

    pub(crate) fn intern_stack(&mut self, frames: &[u32]) -> StackId {
        if let Some(index) = self.stacks.get_index_of(frames) {
            return StackId(index as u32);
        }
        self.bytes += 4 * frames.len() as u64 + PER_ENTRY;
        StackId(self.stacks.insert_full(frames.into()).0 as u32)
    }

    pub(crate) fn intern_pair(&mut self, pair: (u64, u64)) -> u32 {
        let (index, new) = self.pairs.insert_full(pair);
        self.bytes += if new { PER_ENTRY } else { 0 };
        index as u32
    }

    pub(crate) fn pair(&self, pair: u32) -> (u64, u64) {
        // A number that `intern_pair` gave.
        self.pairs[pair as usize]
    }
}
