//! Stacks of the real PyTorch: from its allocator through the operators (`aten::empty`) and the
//! interpreter to the line of Python, against the frames that the program itself writes down.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::trace::{Row, number, rows, text};
use super::{Run, Stops, prepared_full, traced};
use crate::bench::take_turn;

/// Names of functions come when the agent has read libraries of a gigabyte: while the program lives, up
/// to so long, or as long as it takes at its end unless nothing comes for a while. What is not named by
/// then is a stack all the same, so a slow machine gets more time.
const RESTS: [Duration; 3] = [
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
];

/// Functions that PyTorch goes through between its allocator and Python, innermost first. `aten::empty`
/// of a tensor on the card is `at::_ops::empty_memory_format` to C++; `aten::zeros` calls it.
const EMPTY: [&str; 5] = [
    "at::detail::empty_generic",
    "at::detail::empty_cuda",
    "at::native::empty_cuda",
    "at::_ops::empty_memory_format::redispatch",
    "at::_ops::empty_memory_format::call",
];
const ZEROS: [&str; 2] = ["at::_ops::zeros::redispatch", "at::_ops::zeros::call"];

/// File, function, line.
type Frame = (String, String, i64);

/// What the program says of its calls: bytes, operator, frames.
fn expected(out: &Path) -> Vec<(i64, String, Vec<Frame>)> {
    let text = std::fs::read_to_string(out.join("frames.json")).unwrap();
    let lines = text.lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn field<'a>(frame: &'a Value, name: &str) -> &'a str {
    frame[name].as_str().unwrap_or_default()
}

/// The stacks of what PyTorch's allocator gave, by the bytes asked for, with their quality.
fn found(agent: &Path, folder: &Path) -> HashMap<i64, (String, Vec<Value>)> {
    let stacks: HashMap<i64, Row> = rows(agent, folder, "stacks")
        .into_iter()
        .map(|row| (number(&row, "stack_id").unwrap(), row))
        .collect();
    let events = rows(agent, folder, "alloc_events");
    let given = events
        .iter()
        .filter(|row| text(row, "layer") == "framework" && text(row, "op") == "alloc");
    let of_event = |row: &Row| {
        let frames = stacks[&number(row, "stack_id").unwrap()]["frames"].as_array();
        let quality = text(row, "stack_quality").to_string();
        let bytes = number(row, "requested_bytes").unwrap();
        (bytes, (quality, frames.unwrap().clone()))
    };
    given.map(of_event).collect()
}

/// Whether the functions come in this order, others between them or not; gives what is left.
fn after<'a>(mut frames: &'a [Value], functions: &[&str]) -> Option<&'a [Value]> {
    for function in functions {
        let is_it = |frame: &Value| field(frame, "function").starts_with(function);
        frames = &frames[frames.iter().position(is_it)? + 1..];
    }
    Some(frames)
}

fn is_named(frames: &[Value]) -> bool {
    let of_torch = frames
        .iter()
        .filter(|frame| field(frame, "module").contains("libtorch"));
    let mut nameless = of_torch.filter(|frame| frame["function"].is_null());
    nameless.next().is_none()
}

#[test]
fn stacks_go_from_the_allocator_to_the_line_of_python() {
    let test = "stacks_go_from_the_allocator_to_the_line_of_python";
    let Some((project, full)) = prepared_full(test) else {
        return;
    };
    let _turn = take_turn();
    let script = project.root.join("agent/fakes/torch/stacks.py");
    let program: [&Path; 2] = [&full.python, &script];
    let agent = project.binary("vramscope-agent");
    let mut outcome = None;
    for rest in RESTS {
        let run = Run::new(&project, &program, "", &full.libraries);
        let mut program = Stops::start(&mut traced(&run), &run.path("errors"));
        program.follow(rest, None);
        let found = found(&agent, &run.path("trace"));
        let are_named = found.values().all(|(_, frames)| is_named(frames));
        outcome = Some((expected(&run.path("out")), found));
        if are_named {
            break;
        }
    }
    let (expected, found) = outcome.unwrap();
    assert_eq!(expected.len(), 9);
    for (bytes, operator, python) in expected {
        let (quality, frames) = &found[&bytes];
        assert_eq!(quality, "full+python", "{frames:#?}");
        let operators: &[&str] = if operator == "zeros" { &ZEROS } else { &[] };
        let binding = format!("torch::autograd::THPVariable_{operator}");
        let native = [&EMPTY[..], operators, &[binding.as_str()]].concat();
        let rest = after(frames, &native)
            .unwrap_or_else(|| panic!("not in this order: {native:?}: {frames:#?}"));
        let is_python = |frame: &&Value| field(frame, "kind") == "python";
        let lines: Vec<Frame> = rest
            .iter()
            .filter(is_python)
            .map(|frame| {
                let line = frame["line"].as_i64().unwrap();
                let text = |name| field(frame, name).to_string();
                (text("module"), text("function"), line)
            })
            .collect();
        assert_eq!(lines, python, "{bytes} bytes by {operator}");
        let all = frames.iter().filter(is_python).count();
        assert_eq!(all, lines.len(), "Python within PyTorch: {frames:#?}");
        let outermost = frames.last().unwrap();
        assert_eq!(field(outermost, "function"), "_start", "{frames:#?}");
    }
}
