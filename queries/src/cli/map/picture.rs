//! What a map's colours and labels stand for: stacks by the function that people know them by, ages
//! from young to old.

use std::collections::{BTreeSet, HashMap};

use vramscope_model::map::BlockState;
use vramscope_queries::session::Limits;

use super::segments::Map;
use crate::door::Door;
use crate::frames::{Frame, frames};

/// Stacks that are asked for in one question.
const STACKS_AT_ONCE: usize = 500;
/// Stacks with a colour of their own; the others share one.
pub const COLOURS: [&str; 12] = [
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7",
    "#9c755f", "#8cd17d", "#3b6e8f", "#d37295",
];
pub const OTHER: &str = "#a3adb8";
pub const UNKNOWN: &str = "#c9d0d8";
/// From young to old (viridis).
const AGES: [(u8, u8, u8); 6] = [
    (253, 231, 37),
    (122, 209, 81),
    (34, 168, 132),
    (42, 120, 142),
    (65, 68, 135),
    (68, 1, 84),
];

/// A stack as people are shown it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// One function, with its place if it is known.
    pub label: String,
    /// The innermost functions of the program, outermost first.
    pub path: String,
}

pub type Names = HashMap<i64, Name>;

pub async fn names(door: &mut Door, limits: Limits, map: &Map) -> anyhow::Result<Names> {
    let cells = map.segments.iter().flat_map(|segment| &segment.cells);
    let ids: BTreeSet<i64> = cells.filter_map(|cell| cell.stack).collect();
    let ids: Vec<i64> = ids.into_iter().collect();
    let mut names = Names::new();
    for some in ids.chunks(STACKS_AT_ONCE) {
        let list: Vec<String> = some.iter().map(i64::to_string).collect();
        let sql = format!(
            "SELECT stack_id, frames FROM stacks WHERE stack_id IN ({})",
            list.join(", ")
        );
        let rows = door.collect(&sql, limits).await?;
        for row in rows.iter() {
            if let Some(id) = row.number("stack_id")? {
                names.insert(id, name(&frames(row)?));
            }
        }
    }
    Ok(names)
}

/// A stack by the innermost Python function of the program itself, not of a library. Of a stack without
/// one: the backward function that PyTorch's engine ran, else the operator that was called, else the
/// innermost function that is none of the framework's, its allocator's, or the interpreter's.
pub fn name(frames: &[Frame]) -> Name {
    let own: Vec<&Frame> = frames.iter().filter(|frame| is_own_python(frame)).collect();
    let label = match own.first() {
        Some(frame) => with_place(frame),
        None => without_own_python(frames),
    };
    let mut path: Vec<String> = own
        .iter()
        .take(6)
        .map(|frame| frame.function.clone())
        .collect();
    if path.is_empty() {
        path.push(label.clone());
    }
    path.reverse();
    Name {
        label: cut(&label, 90),
        path: cut(&path.join(" > "), 240),
    }
}

fn without_own_python(frames: &[Frame]) -> String {
    let backward = frames.iter().find_map(|frame| {
        let inside = frame.function.strip_prefix("torch::autograd::")?;
        let name = inside
            .split("::apply(")
            .next()
            .filter(|name| name.len() < inside.len())?;
        let name = name.rsplit("::").next()?;
        (name != "Node").then(|| format!("{name} (backward)"))
    });
    let operator = || {
        frames.iter().rev().find_map(|frame| {
            let name = frame
                .function
                .strip_prefix("at::_ops::")?
                .split("::")
                .next()?;
            Some(format!("{name} (operator)"))
        })
    };
    let python = || {
        frames
            .iter()
            .find(|frame| frame.is_python())
            .map(with_place)
    };
    let native = || {
        frames
            .iter()
            .find(|frame| is_own_native(frame))
            .map(with_place)
    };
    let innermost = || frames.first().map(with_place);
    backward
        .or_else(operator)
        .or_else(python)
        .or_else(native)
        .or_else(innermost)
        .unwrap_or_else(|| "no stack".to_string())
}

fn with_place(frame: &Frame) -> String {
    let file = frame.file.rsplit('/').next().unwrap_or_default();
    match frame.line {
        Some(line) if !file.is_empty() && line > 0 => format!("{} ({file}:{line})", frame.function),
        _ => frame.function.clone(),
    }
}

/// Python code of the program itself.
pub fn is_own_python(frame: &Frame) -> bool {
    let file = &frame.file;
    let of_a_library =
        file.contains("/torch/") || file.contains("/site-packages/") || file.starts_with("<frozen");
    frame.is_python() && !of_a_library
}

/// Native code that is none of the framework's, its allocator's, or the interpreter's.
pub fn is_own_native(frame: &Frame) -> bool {
    const INSIDE: [&str; 15] = [
        "c10::",
        "at::",
        "torch::",
        "caffe2::",
        "cuda",
        "cuMem",
        "Py",
        "_Py",
        "void ",
        "std::",
        "pybind11::",
        "__",
        "_start",
        "pthread_",
        "start_thread",
    ];
    let function = &frame.function;
    let known = !function.is_empty() && !function.starts_with(['?', '<', '[']);
    known && !frame.is_python() && !INSIDE.iter().any(|prefix| function.starts_with(prefix))
}

/// At most so many characters.
pub fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_string();
    }
    let kept: String = text.chars().take(most - 1).collect();
    format!("{kept}…")
}

/// How much of a map each stack holds, most first: stack, bytes, blocks.
pub fn by_stack(map: &Map) -> Vec<(Option<i64>, u64, usize)> {
    let mut held: HashMap<Option<i64>, (u64, usize)> = HashMap::new();
    for cell in map.segments.iter().flat_map(|segment| &segment.cells) {
        if cell.state != BlockState::Inactive {
            let entry = held.entry(cell.stack).or_default();
            entry.0 += cell.bytes;
            entry.1 += 1;
        }
    }
    let mut held: Vec<(Option<i64>, u64, usize)> = held
        .into_iter()
        .map(|(stack, (bytes, blocks))| (stack, bytes, blocks))
        .collect();
    held.sort_by_key(|(stack, bytes, _)| (std::cmp::Reverse(*bytes), *stack));
    held
}

/// The colour of an age, from the youngest (`0`) to the oldest (`1`) of a map.
pub fn age_colour(share: f64) -> String {
    let place = share.clamp(0.0, 1.0) * (AGES.len() - 1) as f64;
    let index = (place as usize).min(AGES.len() - 2);
    let part = place - index as f64;
    let (from, to) = (AGES[index], AGES[index + 1]);
    let mix = |from: u8, to: u8| {
        (f64::from(from) + (f64::from(to) - f64::from(from)) * part).round() as u8
    };
    format!(
        "#{:02x}{:02x}{:02x}",
        mix(from.0, to.0),
        mix(from.1, to.1),
        mix(from.2, to.2)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: &str, function: &str, file: &str, line: i32) -> Frame {
        Frame {
            kind: kind.to_string(),
            function: function.to_string(),
            file: file.to_string(),
            line: Some(line),
            ..Frame::default()
        }
    }

    #[test]
    fn a_stack_is_known_by_the_programs_own_innermost_function() {
        let frames = [
            frame("native", "c10::cuda::malloc", "", 0),
            frame("native", "torch::empty", "a.cpp", 3),
            frame(
                "python",
                "forward",
                "/usr/lib/site-packages/torch/nn/linear.py",
                5,
            ),
            frame("python", "attention", "/app/model.py", 42),
            frame("python", "train", "/app/train.py", 7),
        ];
        let found = name(&frames);
        assert_eq!(found.label, "attention (model.py:42)");
        assert_eq!(found.path, "train > attention");
        assert_eq!(name(&frames[..3]).label, "forward (linear.py:5)");
        assert_eq!(name(&frames[..1]).label, "c10::cuda::malloc");
        let engine = [
            frame("native", "c10::cuda::malloc", "", 0),
            frame("native", "at::_ops::empty::call(long)", "", 0),
            frame("native", "at::_ops::new_zeros::call(at::Tensor)", "", 0),
            frame(
                "native",
                "torch::autograd::generated::IndexBackward0::apply(x)",
                "",
                0,
            ),
            frame("native", "torch::autograd::Node::apply(x)", "", 0),
            frame("native", "pthread_create", "", 0),
        ];
        assert_eq!(name(&engine).label, "IndexBackward0 (backward)");
        assert_eq!(name(&engine[..3]).label, "new_zeros (operator)");
        let native = [
            frame("native", "cudaMalloc", "", 0),
            frame("native", "load_weights", "", 0),
        ];
        assert_eq!(name(&native).label, "load_weights");
        assert_eq!(name(&[]).label, "no stack");
    }

    #[test]
    fn ages_go_from_yellow_to_purple() {
        assert_eq!(age_colour(0.0), "#fde725");
        assert_eq!(age_colour(1.0), "#440154");
        assert_eq!(age_colour(0.2), "#7ad151");
        assert_eq!(age_colour(7.0), "#440154");
    }
}
