//! Python frames among native ones: which native frames they stand for, what names them on every
//! host, and what they are in the table.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::modules::{ModuleId, Modules};
use super::{Location, Native as Found};
use crate::probes::record::{PythonOf, Quality};
use crate::python::elf;
use crate::python::merge::{Fit, Merged, Native, merge};
use crate::python::walks::{PythonFrame, Resolved};
use crate::spool::rows::{FrameKind, FrameRow};

/// A frame of a stack.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Place {
    Native(Location),
    Python(Arc<PythonFrame>),
}

/// What is known of a stack's Python frames.
pub(super) struct Seen {
    pub walked: Option<Resolved>,
    pub of: PythonOf,
}

/// Where the evaluation function lies in each file, looked up once a file.
#[derive(Default)]
pub(super) struct Interpreters {
    evaluation: HashMap<ModuleId, Vec<Range<u64>>>,
}

impl Interpreters {
    /// Puts Python frames among native ones. `quality`: of the native ones.
    pub(super) fn merge(
        &mut self,
        modules: &Modules,
        found: &[Found],
        seen: Seen,
        quality: Quality,
    ) -> (Vec<Place>, Quality) {
        // Without a walk only files that say so in their names are taken for interpreters: looking
        // into all of them would cost more than it tells.
        let natives: Vec<Native> = found
            .iter()
            .map(|found| self.native(modules, &found.location, seen.walked.is_some()))
            .collect();
        let native = || found.iter().map(|f| Place::Native(f.location)).collect();
        let Some(walked) = seen.walked else {
            let is_missing = seen.of != PythonOf::None || natives.contains(&Native::Evaluation);
            let quality = if is_missing {
                quality.with_python(false)
            } else {
                quality
            };
            return (native(), quality);
        };
        let kinds: Vec<_> = walked.frames.iter().map(|frame| frame.kind).collect();
        let (merged, fit) = merge(&natives, &kinds);
        let frames: Vec<Arc<PythonFrame>> = walked.frames.into_iter().map(Arc::new).collect();
        let places = merged
            .into_iter()
            .map(|frame| match frame {
                Merged::Native(index) => Place::Native(found[index].location),
                Merged::Python(index) => Place::Python(Arc::clone(&frames[index])),
            })
            .collect();
        let quality = match (quality, fit, walked.is_whole) {
            // Frames are missing somewhere in the middle, or beyond the last that was read.
            (Quality::Full, Fit::MoreGroups | Fit::MoreNative, _) => Quality::Truncated,
            (Quality::Full | Quality::FramePointer, _, false) => Quality::Truncated,
            (quality, _, _) => quality,
        };
        (places, quality.with_python(!walked.is_nameless))
    }

    fn native(&mut self, modules: &Modules, location: &Location, any_file: bool) -> Native {
        let module = modules.get(location.module);
        if !any_file && !module.file_name().contains("python") {
            return Native::Other;
        }
        let evaluation = self.evaluation.entry(location.module).or_insert_with(|| {
            module
                .open_path()
                .map(|path| elf::evaluation(&path))
                .unwrap_or_default()
        });
        // The call is before its return address.
        let called_from = location.offset.saturating_sub(1);
        if evaluation.iter().any(|range| range.contains(&called_from)) {
            Native::Evaluation
        } else if evaluation.is_empty() {
            Native::Other
        } else {
            Native::Interpreter
        }
    }
}

/// The part of a file's name that is the same wherever a package is installed.
pub(super) fn stable(file: &str) -> &str {
    for folder in ["/site-packages/", "/dist-packages/"] {
        if let Some((_, rest)) = file.rsplit_once(folder) {
            return rest;
        }
    }
    // The standard library: lib/python3.N/ and what follows.
    if let Some((_, rest)) = file.rsplit_once("/lib/python3.") {
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == 't');
        if let Some(rest) = rest.strip_prefix('/') {
            return rest;
        }
    }
    file
}

/// Hands on what names a frame on every host.
pub(super) fn hash(frame: &PythonFrame, mut update: impl FnMut(&[u8])) {
    // No native frame begins so.
    update(&[1]);
    update(stable(frame.file.as_deref().unwrap_or_default()).as_bytes());
    update(&[0]);
    update(frame.function.as_deref().unwrap_or_default().as_bytes());
    update(&[0]);
    update(&frame.line.unwrap_or(0).to_le_bytes());
}

/// The frame in the table.
pub(super) fn row(frame: &PythonFrame) -> FrameRow {
    FrameRow {
        kind: FrameKind::Python,
        module: frame.file.as_deref().map(str::to_string),
        function: frame.function.as_deref().map(str::to_string),
        file: frame.file.as_deref().map(str::to_string),
        line: frame.line,
        ..FrameRow::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_by_what_does_not_depend_on_where_it_is_installed() {
        for (file, expected) in [
            (
                "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py",
                "torch/nn/modules/linear.py",
            ),
            (
                "/usr/lib/python3/dist-packages/numpy/core.py",
                "numpy/core.py",
            ),
            (
                "/home/ml/.pyenv/versions/3.12.1/lib/python3.12/threading.py",
                "threading.py",
            ),
            (
                "/usr/lib/python3.13t/asyncio/runners.py",
                "asyncio/runners.py",
            ),
            ("/srv/app/train.py", "/srv/app/train.py"),
            ("<frozen runpy>", "<frozen runpy>"),
            ("/lib/python3.x", "/lib/python3.x"),
        ] {
            assert_eq!(stable(file), expected);
        }
    }
}
