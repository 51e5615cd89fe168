//! Stacks: their ids, and the rows of those that something refers to.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use vramscope_snapshot::{Frame, StackId, Tables};
use vramscope_wire::{Table, schema};
use xxhash_rust::xxh3::Xxh3;

use super::columns::{self, Origin};
use super::source::positive;

/// The ids of stacks by the reader's numbers. The empty stack has no id: nobody took one.
#[derive(Default)]
pub(super) struct Stacks {
    ids: Vec<Option<Option<i64>>>,
    used: BTreeMap<i64, StackId>,
}

impl Stacks {
    /// 63-bit hash of the frame list.
    pub fn id(&mut self, stack: Option<StackId>, tables: &Tables) -> Option<i64> {
        let stack = stack?;
        let index = stack.0 as usize;
        if self.ids.len() <= index {
            self.ids.resize(index + 1, None);
        }
        if let Some(id) = self.ids[index] {
            return id;
        }
        let id = (tables.stack(stack).len() > 0).then(|| hash(tables, stack));
        self.ids[index] = Some(id);
        if let Some(id) = id {
            self.used.insert(id, stack);
        }
        id
    }

    /// One row for each stack that was asked for, in order of id.
    pub fn rows(&self, origin: &Origin, tables: &Tables) -> Result<RecordBatch, ArrowError> {
        let mut counts = Vec::new();
        let (mut kinds, mut functions, mut files, mut lines) = (vec![], vec![], vec![], vec![]);
        let mut folded = Vec::new();
        for stack in self.used.values() {
            let frames = tables.stack(*stack);
            counts.push(frames.len());
            for frame in frames {
                let file = file(tables, frame);
                kinds.push(Some(kind(file)));
                functions.push(some_text(tables.text(frame.name)));
                files.push(file);
                lines.push(i32::try_from(frame.line).ok().filter(|line| *line > 0));
            }
            folded.push(Some(fold(tables, *stack)));
        }
        let count = kinds.len();
        let none = || columns::texts(std::iter::repeat_n(None::<&str>, count));
        let frames = columns::list(
            schema::frame_fields(),
            counts,
            vec![
                columns::texts(kinds),
                none(),
                none(),
                columns::longs(std::iter::repeat_n(None, count)),
                columns::texts(functions),
                columns::texts(files),
                columns::ints(lines),
            ],
        )?;
        let ids = self.used.keys().map(|id| Some(*id));
        columns::build(
            Table::Stacks,
            self.used.len(),
            origin,
            vec![
                ("stack_id", columns::longs(ids)),
                ("frames", frames),
                ("folded", columns::texts(folded)),
            ],
        )
    }
}

fn hash(tables: &Tables, stack: StackId) -> i64 {
    let mut hash = Xxh3::new();
    for frame in tables.stack(stack) {
        hash.update(tables.text(frame.name).as_bytes());
        hash.update(&[0]);
        hash.update(tables.text(frame.file).as_bytes());
        hash.update(&[0]);
        hash.update(&frame.line.to_le_bytes());
    }
    positive(hash.digest())
}

fn some_text(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// PyTorch writes `??` where it does not know the file.
fn file(tables: &Tables, frame: Frame) -> Option<&str> {
    some_text(tables.text(frame.file)).filter(|file| *file != "??")
}

/// Python's files end in `.py`, or are none at all: `<stdin>`, `<frozen importlib._bootstrap>`.
fn kind(file: Option<&str>) -> &'static str {
    let is_python = file.is_some_and(|file| file.ends_with(".py") || file.starts_with('<'));
    if is_python { "python" } else { "native" }
}

/// Function names, outermost first.
fn fold(tables: &Tables, stack: StackId) -> String {
    let name = |frame: Frame| match some_text(tables.text(frame.name)) {
        // A semicolon in a name would split it.
        Some(name) => name.replace(';', ":"),
        None => "?".to_string(),
    };
    let mut names: Vec<String> = tables.stack(stack).map(name).collect();
    names.reverse();
    names.join(";")
}
