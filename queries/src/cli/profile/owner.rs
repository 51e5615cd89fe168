//! Which frame of a stack answers for an allocation, and what stacks are added up by.

use clap::ValueEnum;

use crate::frames::{Frame, Stack};
use crate::map::{is_own_native, is_own_python, stack_name};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// The innermost function of the program itself
    Function,
    /// The library, executable or Python file of that function
    Module,
    /// The whole call stack
    Stack,
}

/// The innermost Python function of the program itself; without one, the innermost native function
/// that is none of the driver's, the framework's or the interpreter's.
fn owner(frames: &[Frame]) -> Option<&Frame> {
    let first = |accepts: fn(&Frame) -> bool| frames.iter().find(|frame| accepts(frame));
    first(is_own_python).or_else(|| first(is_own_native))
}

/// What a stack without an owner is called: its operator or backward function, where one ran.
fn ownerless(frames: &[Frame]) -> String {
    let first = frames.iter().find(|frame| !frame.name().is_empty());
    match stack_name(frames).label {
        label if label.is_empty() => first.map_or("?".to_string(), Frame::name),
        label => label,
    }
}

/// The innermost frame whose module is known.
fn with_module(frames: &[Frame]) -> Option<&Frame> {
    frames.iter().find(|frame| !frame.module.is_empty())
}

/// The name that a stack is added up under. Stacks that were never taken have one of their own.
pub fn name(stack: Option<&Stack>, by: By) -> String {
    let Some(stack) = stack else {
        return "(no stack)".to_string();
    };
    match by {
        // Its names were lost: what there is stands for it.
        _ if stack.frames.is_empty() => stack.folded.clone(),
        By::Stack => stack.folded.clone(),
        By::Function => match owner(&stack.frames) {
            Some(frame) => frame.name(),
            None => ownerless(&stack.frames),
        },
        By::Module => match owner(&stack.frames).or_else(|| with_module(&stack.frames)) {
            Some(frame) if frame.is_python() && !frame.file.is_empty() => frame.file.clone(),
            Some(frame) if !frame.module.is_empty() => frame.module.clone(),
            _ => "?".to_string(),
        },
    }
}

/// Folded names in which what changes with every build is left out: the offsets of frames without a
/// function.
pub fn without_offsets(folded: &str) -> String {
    let name = |part: &str| match part.rsplit_once("+0x") {
        Some((module, offset))
            if !offset.is_empty() && offset.chars().all(|c| c.is_ascii_hexdigit()) =>
        {
            module.to_string()
        }
        _ => part.to_string(),
    };
    folded.split(';').map(name).collect::<Vec<_>>().join(";")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: &str, module: &str, function: &str, file: &str) -> Frame {
        Frame {
            kind: kind.to_string(),
            module: module.to_string(),
            function: function.to_string(),
            file: file.to_string(),
            offset: Some(0x1f),
            ..Frame::default()
        }
    }

    #[test]
    fn stacks_are_added_up_by_what_the_program_itself_did() {
        let native = Stack {
            folded: "main;serve;cudaMalloc".to_string(),
            frames: vec![
                frame("native", "", "cudaMalloc", ""),
                frame("native", "/opt/libserve.so", "serve", "serve.cc"),
                frame("native", "/opt/server", "main", "main.cc"),
            ],
        };
        assert_eq!(name(Some(&native), By::Function), "serve");
        assert_eq!(name(Some(&native), By::Module), "/opt/libserve.so");
        assert_eq!(name(Some(&native), By::Stack), "main;serve;cudaMalloc");
        let python = Stack {
            folded: String::new(),
            frames: vec![
                frame("native", "/lib/libc10_cuda.so", "c10::malloc", ""),
                frame("python", "", "forward", "/venv/site-packages/x/layer.py"),
                frame("python", "", "generate", "/app/serve.py"),
                frame("native", "/usr/bin/python3", "main", ""),
            ],
        };
        assert_eq!(name(Some(&python), By::Function), "generate");
        assert_eq!(name(Some(&python), By::Module), "/app/serve.py");
        let stripped = Stack {
            folded: String::new(),
            frames: vec![frame("native", "/opt/x.so", "", "")],
        };
        assert_eq!(name(Some(&stripped), By::Function), "x.so+0x1f");
        assert_eq!(name(None, By::Function), "(no stack)");
    }

    #[test]
    fn offsets_are_no_part_of_what_a_stack_is() {
        let old = without_offsets("main;lib.so+0x1f;cudaMalloc");
        let new = without_offsets("main;lib.so+0x2f;cudaMalloc");
        assert_eq!(old, new);
        assert_eq!(old, "main;lib.so;cudaMalloc");
        assert_eq!(without_offsets("a+0x;b+0xzz"), "a+0x;b+0xzz");
    }
}
